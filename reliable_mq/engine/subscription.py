"""A consumer's connection: what comes in goes to the consuming session, and what the session decides is carried out.

The same on both faces: it lives on the loop of its connection, an I/O thread's or asyncio's. Deliveries go to an outlet
(worker threads, tasks, or a user who pulls), results come back from any thread into a queue, and one wake-up serves all
that came in meanwhile. A face adds its connection and how its callers wait. The phases::

    RUNNING --the broker cancels--> RESUBSCRIBING --what runs has ended, or the channel is lost--> RUNNING
    RUNNING --stop--> CANCELLING --cancel-ok, or the channel is lost--> SETTLING
    SETTLING --what runs has ended, or the pause is over--> STOPPING
    RESUBSCRIBING, or RUNNING without a channel or as the single active consumer --stop--> STOPPING
    STOPPING --what runs has ended--> ENDED, or after many frames at once: LINGERING --the pause is over--> ENDED
    any --an error that trying again cannot heal, stop_timeout, a second signal--> ENDED

Invariants:

- the session is touched on the loop alone; no user code runs inside a call of the connection, and nothing blocks;
- deliveries that wait in the outlet are withdrawn when their channel is lost, or is about to be given up;
- what a stop hands back leaves after the subscription has ended, or the broker would deliver it here again; and, for a
  moment, not before what runs has ended: then one frame returns it all, instead of one each;
- the role of a single active consumer is not given up while a delivery is unacked, unless its channel is lost; a stop
  does not cancel, and hands nothing back: when what runs has ended, closing the connection returns the rest and passes
  the role on in one step, so that the next consumer begins with the oldest;
- a finished delivery is looked at within ``ack_interval``, however long the handler of the next one takes;
- the subscription ends once, and what was finished until then has been acked; after that it has no timer.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from reliable_mq.codec.methods import Cancel, SetPrefetch
from reliable_mq.connection.new_queues import QueueRecord
from reliable_mq.connection.wakeup import Wakeup
from reliable_mq.core.channel_setup import declare, is_missing
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout, consumer_timeout_of
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.idempotency import namespace_of
from reliable_mq.errors import BrokerUnavailable, TopologyMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.codec import RawDelivery
    from reliable_mq.connection.interfaces import ConnectionListener, TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.consumer.session import ConsumingSession
    from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings
    from reliable_mq.topology import Queue

__all__ = ["BaseSubscription", "ConsumerConnection", "Event", "HandlerPool", "RepublisherProtocol"]

logger = logging.getLogger(__name__)

CLOSE_GRACE = 5.0  # seconds for the closing handshake
_PAUSE = 0.1  # seconds that a stop waits for quick handlers before it hands back the rest
_LINGER = 0.3  # seconds before the channel is closed, where there were many acks
_BURST_BYTES, _BURST_SECONDS = 16 * 21, 1.0  # many: a channel passes on 32 of them to a quorum queue before it waits
_SHORTEST_LOOK = 0.02  # seconds between two looks at results while handlers run, at least

_LEVELS = {
    LogEventKind.RETRIED: logging.INFO,
    LogEventKind.DEAD_LETTERED: logging.WARNING,
    LogEventKind.PAUSED: logging.ERROR,
    LogEventKind.RESUMED: logging.WARNING,
    LogEventKind.ISOLATED: logging.WARNING,
    LogEventKind.REJECTED: logging.ERROR,
    LogEventKind.NOT_DECLARED: logging.WARNING,
    LogEventKind.REPUBLISH_FAILED: logging.ERROR,
    LogEventKind.STORE_FAILED: logging.ERROR,
    LogEventKind.BATCH_FAILED: logging.WARNING,
    LogEventKind.CANCELLED: logging.WARNING,
    LogEventKind.OVERDUE: logging.WARNING,
    LogEventKind.TIMED_OUT: logging.ERROR,
    LogEventKind.DROPPED: logging.ERROR,
}


class ConsumerConnection(Protocol):
    """The connection of a face. Only `start`, `call_soon` and `stop` may be called from other threads."""

    def start(self) -> None:
        """Begin to connect. Does not wait."""

    def call_soon(self, fn: Callable[[], None], /) -> object:
        """Run `fn` on the loop."""

    def call_later(self, delay: float, fn: Callable[[], None], /) -> TimerHandle:
        """Run `fn` on the loop in `delay` seconds."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Send whole frames on the ready channel; does nothing where none is ready."""

    def run(self, generator: StepGenerator, done: Callable[[Any], None], /) -> None:
        """Carry out steps on the ready channel."""

    def reopen_channel(self) -> None:
        """Close the channel, and open another one."""

    def stop(self, grace: float, /) -> None:
        """Begin to close, with `grace` seconds for the handshake."""


class Event(Protocol):
    """What a face's callers wait for."""

    def set(self) -> None:
        """It has happened."""

    def is_set(self) -> bool:
        """Whether it has."""


class RepublisherProtocol(Protocol):
    """Publishes dead letters. Each that is put is answered once, with `BaseSubscription.published`."""

    def put(self, republish: RepublishRequest, /) -> None:
        """Publish one. Called on the loop; must not block."""


class HandlerPool(Protocol):
    """Where deliveries are handed out. Called on the loop, but for `hold`; must not block."""

    def put(self, work: Iterable[Delivery | list[Delivery]]) -> None:
        """These are to be handled."""

    def hold(self) -> None:
        """Begin with nothing more: what waits, and what is put in by now, will be withdrawn. Any thread."""

    def withdraw(self) -> list[Delivery]:
        """Give back what nobody has begun with."""


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    RESUBSCRIBING = enum.auto()  # the broker has cancelled: waiting for what runs, then a new channel
    CANCELLING = enum.auto()  # stopping, but the broker may still deliver: nothing is sent
    SETTLING = enum.auto()  # it delivers no more: nothing is sent yet, so that one frame may return all at once
    STOPPING = enum.auto()  # waiting for what runs
    LINGERING = enum.auto()  # for what RabbitMQ may not have passed on to the queue yet: it drops that with the channel
    ENDED = enum.auto()


class BaseSubscription:
    """See the module; a face says how its connection and its events are made.

    Args:
        options: of the consumer.
        settings: of the connection.
        recovery: when to try again.

    Attributes:
        outlet: hands out; to be set before `start`.
        isolation: hands out what comes from quarantine, so that it holds up nothing else; None to use ``outlet``.
        republisher: for dead letters; to be set before `start` where the session makes any.
        session: decides.
        largest_body: see `ChannelSink`.
        error: why it ended by itself, if it did.
        connected: whether it is subscribed.
        reconnects: connections lost and made again.
        hurried: whether it was told not to wait.
        ended: set when it has ended.
    """

    outlet: HandlerPool
    ended: Event
    _verdict: Event  # each host had its first attempt, or one has succeeded
    _io: ConsumerConnection

    def __init__(self, options: ConsumerOptions, settings: ConnectionSettings, recovery: ReconnectPolicy) -> None:
        self.republisher: RepublisherProtocol | None = None
        self.isolation: HandlerPool | None = None
        self._isolated = False  # subscribed to quarantine
        self.session: ConsumingSession = options.new_session()
        self.largest_body = options.largest_body
        self.error: ReliableMQError | None = None
        self.connected = False
        self.reconnects = 0
        self.hurried = False
        self.ended = self._new_event()
        self._options = options
        self._virtual_host = settings.virtual_host
        self._record = QueueRecord(settings.virtual_host, options.new_queue_grace)
        self._maker: QueueRecord | None = None  # the same, where anybody wants to know
        self._consumer_tag = options.name
        self._isolated_tag = options.isolated_tag
        self._prefetch = options.prefetch  # that the broker was told
        self._version: tuple[int, ...] = ()  # of the broker
        self._phase = _Phase.RUNNING
        self._results: deque[Result] = deque()
        self._reported_at = 0.0  # when the oldest of them was
        self._published: deque[tuple[RepublishRequest, ReliableMQError | None]] = deque()
        self._handed_back: deque[Delivery] = deque()
        self._woken = False
        self._connection_lost = False
        self._alarm = Wakeup(self._pump)
        self._burst_at = 0.0
        self._burst = 0  # bytes sent since then
        self._pause: TimerHandle | None = None  # of SETTLING, or of LINGERING
        self._renewal: TimerHandle | None = None  # of the channel, for another prefetch
        self._patience: TimerHandle | None = None  # with what runs, before the channel or the consumer is given up
        self._verdict = self._new_event()
        self._attempts_left = len(settings.endpoints)
        self._last_error: ReliableMQError | None = None
        self._look_every = max(options.ack_interval, _SHORTEST_LOOK)
        self._look_after = 1  # results; fewer of them wait for the next look
        self._io = self._new_connection(
            name=options.name, settings=settings, setup=self._set_up, client=self, recovery=recovery
        )

    def _new_event(self) -> Event:
        raise NotImplementedError

    def _new_connection(
        self,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: ConnectionListener,
        recovery: ReconnectPolicy,
    ) -> ConsumerConnection:
        raise NotImplementedError

    # For callers, on any thread

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    def verdict(self, waited: float) -> ReliableMQError | None:
        """Say why it is not subscribed, after ``waited`` seconds for the first attempt on every host; None if it is."""
        if self.connected:
            return None
        return self.error or self._last_error or BrokerUnavailable(f"no answer within {waited:g} s")

    def report(self, results: Sequence[Result]) -> None:
        """These were handed out, and this is what became of them.

        Few that went well are left for the next look, while others are being handled: there is nothing to ack yet, and
        a wake-up costs as much as handling several.
        """
        if not self._results:
            self._reported_at = time.monotonic()
        self._results.extend(results)
        if (
            len(self._results) >= self._look_after
            or not isinstance(results[0], Delivery)
            or results[0].consumer_tag == self._isolated_tag  # the next one in quarantine waits for its ack
            or self._phase is not _Phase.RUNNING
            or (len(self._results) >= self.session.running and time.monotonic() >= self.session.rested_at)
        ):
            self._wake()

    def hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """These were handed out, and go back to the broker unhandled."""
        self._handed_back.extend(deliveries)
        self._wake()

    def published(self, republish: RepublishRequest, error: ReliableMQError | None) -> None:
        """A dead letter is confirmed, or it is known that it is not."""
        self._published.append((republish, error))
        self._wake()

    def prefetch_changed(self) -> None:
        """Subscribe anew with the prefetch that the options have now. Does not wait; what was delivered stays."""
        self._io.call_soon(self._change_prefetch)

    def call_later(self, delay: float, fn: Callable[[], None]) -> TimerHandle:
        """Run ``fn`` on the loop in ``delay`` seconds. On the loop only."""
        return self._io.call_later(delay, fn)

    def stop(self) -> None:
        """Begin to stop and return at once: nothing new is handed out, what is being handled is waited for.

        A handler that calls this is the last one on its thread, or task, however late the loop comes to know of it.
        """
        self._io.call_soon(self._begin_to_stop)
        if not self.session.automatic:
            self.outlet.hold()
            if self.isolation is not None:
                self.isolation.hold()

    def stop_now(self) -> None:
        """Stop without waiting for what is being handled."""
        self.hurried = True
        self._io.call_soon(self._end)

    # On the loop: what the connection reports

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """A channel is set up, and subscribed unless the consumer is stopping."""
        self.reconnects += self._connection_lost
        self._connection_lost = False
        self._version = server.version_tuple
        self._record.ready(server)
        self.session.opened(generation, channel, namespace_of(server.cluster_name, self._virtual_host))
        if self._phase is _Phase.RESUBSCRIBING:
            self._phase = _Phase.RUNNING
            self._be_patient_no_more()
        if self._phase is _Phase.RUNNING:
            logger.info("consuming from queue %r on %s %s", self._options.queue_name, server.product, server.version)
            self.connected = True
            self._verdict.set()
            if self._prefetch != self._options.prefetch:  # it was changed meanwhile
                self._change_prefetch()
        self._pump()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """The channel is gone; the broker delivers again what was not acked."""
        self.connected = self._isolated = False
        self._connection_lost |= loss.scope == "connection"
        self._record.lost(time.monotonic())
        strike = consumer_timeout_of(loss)
        if strike is not None:
            logger.warning("the broker closed the channel of consumer %r: %s", self._options.name, printable(loss.text))
            self._time_out(strike)
        self.session.lost(generation)
        self._withdraw()
        self._pump()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt failed. A queue with other arguments ends the consumer even where a lost one is waited for."""
        self._last_error = error
        self._attempts_left -= 1
        if self._phase in _STOPPING:
            return  # what runs is waited for all the same
        if not will_retry or (isinstance(error, TopologyMismatch) and not is_missing(error)):
            self.error = error
            self._end()
        elif self._attempts_left <= 0:
            self._verdict.set()

    def blocked(self, reason: str) -> None:
        """Of no concern to a connection that publishes nothing."""

    def unblocked(self) -> None:
        """Of no concern."""

    def cancelled(self, consumer_tag: str) -> None:
        """The broker ended the subscription: the queue is gone, or its leader, or a delivery was unacked too long."""
        ours = consumer_tag in {self._consumer_tag, self._isolated_tag}
        if not ours or self._phase is not _Phase.RUNNING:
            return
        logger.warning(
            "the broker cancelled consumer %r: queue %r was deleted or moved, or its consumer timeout is over; "
            "subscribing again",
            consumer_tag,
            self._options.queue_name,
        )
        self._phase = _Phase.RESUBSCRIBING
        self.connected = False
        self.session.drain()
        self._time_out(ConsumerTimeout(consumer_tag=consumer_tag))
        self._patience = self._io.call_later(self._options.stop_timeout, self._resubscribe)
        self._pump()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """``basic.deliver``, as many as one read held."""
        self.session.delivered(cast("list[Delivery]", deliveries), time.monotonic())

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """``basic.get-ok``."""
        self.session.delivered([cast("Delivery", delivery)], time.monotonic())

    def got_empty(self) -> None:
        """``basic.get-empty``."""

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """A delivery or ``basic.get-ok`` with a body that was not taken in."""
        self.session.oversized(cast("Delivery", delivery), size, time.monotonic())

    def acked(self, tag: int, multiple: bool) -> None:
        """Never: nothing is published on this channel."""

    def nacked(self, tag: int, multiple: bool) -> None:
        """Never: nothing is published on this channel."""

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """Never: nothing is published on this channel."""

    def read_finished(self) -> None:
        """All that was read at once has been reported."""
        self._pump()

    def write_drained(self) -> None:
        """Nothing waits for that: acks are few."""

    # On the loop: the work

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        self._maker = self._record.maker(server)
        return _nothing() if self._phase in _STOPPING else self._subscribe(server)

    @property
    def _subscribed(self) -> bool:
        return self.connected

    def _subscribe(self, server: ServerInfo) -> SetupGenerator:
        position = self.session.position
        self._prefetch = self._options.prefetch
        self.session.set_prefetch(self._prefetch)
        following = None if position is None else position.following
        return self._options.setup(server, self._consumer_tag, following, self._maker)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._io.call_soon(self._pump)

    def _pump(self) -> None:
        """Take in results, hand out work, publish dead letters, write acks, and see to the next wake-up."""
        self._woken = False
        session = self.session
        now = time.monotonic()
        self._take_in(now)
        session.tick(now)
        if session.take_pause():
            session.postponed(self._withdrawn(), now)
        work = session.take_work() or session.take_batches()
        if work:
            self.outlet.put(work)
        if session.take_subscription():
            self._io.run(self._options.subscribe_to_quarantine(), self._isolating)
        for queue in session.take_declarations():
            self._io.run(declare(queue, self._version, self._maker), partial(self._declared, queue))
        for republish in session.take_republishes():
            if self.republisher is not None:
                self.republisher.put(republish)
        if self._phase is _Phase.SETTLING and session.drained:
            self._phase = _Phase.STOPPING
        if self._phase not in _SILENT:
            self._send(now)
        isolated = session.take_isolated()
        if isolated:
            (self.isolation or self.outlet).put(isolated)
        for notice in session.take_notices():
            logger.log(_LEVELS[notice.kind], "%s", notice.line(self._options.name))
        if session.drained:
            if self._phase is _Phase.RESUBSCRIBING:
                self._resubscribe()
            elif self._phase is _Phase.STOPPING and self._burst <= _BURST_BYTES:
                self._end()
            elif self._phase is _Phase.STOPPING:
                self._phase = _Phase.LINGERING
                self._pause = self._io.call_later(_LINGER, self._end)
        if self._prefetch != self._options.prefetch or self._renewal is not None:
            self._renew_when_idle()
        self._schedule(now)

    def _take_in(self, now: float) -> None:
        """Tell the session what has happened on other threads."""
        session = self.session
        if self._results:
            since = self._reported_at
            results = [self._results.popleft() for _ in range(len(self._results))]
            session.finished(results, now, since=min(since, now))
        while self._published:
            session.published(*self._published.popleft(), now)
        if self._handed_back:
            back = self._handed_back
            session.withdrawn([back.popleft() for _ in range(len(back))])

    def _send(self, now: float) -> None:
        output = self.session.take_output(now)
        if output:
            if now - self._burst_at > _BURST_SECONDS:
                self._burst_at, self._burst = now, 0
            self._burst += len(output)
            self._io.write(output)

    def _schedule(self, now: float) -> None:
        if self._phase is _Phase.ENDED:
            self._alarm.cancel()  # the loop may be the user's: a timer would keep the consumer alive
            return
        self._look_after = 1 if self._options.ack_interval < _SHORTEST_LOOK else self.session.acks_due_after
        if len(self._results) >= self._look_after:  # reported meanwhile, when more were wanted
            self._wake()
        at = self.session.deadline
        if self._look_after > 1 and self.session.running:
            look = now + self._look_every
            rested = self.session.rested_at  # what ends before wakes nobody
            at = min(look, rested if rested > now else look, look if at is None else at)
        if at is not None and self._phase in _SILENT:
            at = max(at, now + _SHORTEST_LOOK)
        self._alarm.set(at, now, self._io.call_later)

    def _withdraw(self) -> None:
        """Take back what nobody has begun with, unless it would never come again."""
        if not self.session.automatic:
            self.session.withdrawn(self._withdrawn())

    def _time_out(self, strike: ConsumerTimeout) -> None:
        """What handlers have begun with by now has failed, as far as it is old enough."""
        now = time.monotonic()
        self._take_in(now)
        self._withdraw()
        self.session.timed_out(strike, now, time.time())

    def _withdrawn(self) -> list[Delivery]:
        isolated = [] if self.isolation is None else self.isolation.withdraw()
        return [*self.outlet.withdraw(), *isolated]

    def _isolating(self, outcome: object) -> None:
        self._isolated = not isinstance(outcome, Exception)
        if not self._isolated:
            logger.warning("consumer %r does not handle what is in quarantine: %s", self._options.name, outcome)

    def _declared(self, queue: Queue, outcome: object) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        self.session.declared(queue, error, time.monotonic())
        self._pump()

    def _resubscribe(self) -> None:
        if self._phase is _Phase.RESUBSCRIBING:
            self._io.reopen_channel()

    def _change_prefetch(self) -> None:
        if self._subscribed and self._options.single_active:
            logger.info(
                "consumer %r: prefetch=%d takes effect once nothing is unacked: subscribing anew gives the role of the "
                "single active consumer away",
                self._options.name,
                self._options.prefetch,
            )
            self._wake()
            return
        self.session.set_prefetch(self._options.prefetch)
        if self._subscribed:  # else `ready` sees what the broker was told last
            self._prefetch = self._options.prefetch
            before, self._consumer_tag = self._consumer_tag, _next_tag(self._consumer_tag)
            steps = self._subscribe_anew(before, self._consumer_tag, self._prefetch)
            self._io.run(steps, self._subscribed_anew)

    def _subscribe_anew(self, before: str, consumer_tag: str, prefetch: int) -> StepGenerator:
        yield Cancel(before)
        yield SetPrefetch(prefetch)
        position = self.session.position
        yield self._options.consume(consumer_tag, None if position is None else position.upcoming)

    def _subscribed_anew(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            logger.warning("the prefetch takes effect with the next channel: %s", outcome)

    @property
    def _may_renew(self) -> bool:
        """Whether a prefetch that was put off may take effect now."""
        idle = self._phase is _Phase.RUNNING and self._subscribed and not self.session.outstanding
        return idle and self._prefetch != self._options.prefetch

    def _renew_when_idle(self) -> None:
        """Open another channel, after a moment in which nothing has come: acks on their way would go with this one."""
        if self._renewal is None and self._may_renew:
            self._renewal = self._io.call_later(_LINGER, self._renew)
        elif self._renewal is not None and not self._may_renew:
            self._renewal.cancel()
            self._renewal = None

    def _renew(self) -> None:
        self._renewal = None
        if self._may_renew:
            self._io.reopen_channel()

    def _begin_to_stop(self) -> None:
        if self._phase in _STOPPING:
            return
        keep = self._subscribed and self._options.single_active
        if self._subscribed and not keep:
            self._phase = _Phase.CANCELLING
            self._io.run(self._unsubscribe(), self._unsubscribed)
        else:
            self._phase = _Phase.STOPPING
        self.connected = False
        self.session.stop(keep=keep)
        self._withdraw()
        logger.info("consumer %r stops; %d deliveries are being handled", self._options.name, self.session.running)
        self._be_patient_no_more()
        self._patience = self._io.call_later(self._options.stop_timeout, self._give_up_waiting)
        self._pump()

    def _unsubscribe(self) -> StepGenerator:
        yield Cancel(self._consumer_tag)
        if self._isolated:  # by now: that may have been under way when the stop began
            yield Cancel(self._isolated_tag)

    def _unsubscribed(self, _outcome: object) -> None:
        if self._phase is _Phase.CANCELLING:
            self._phase = _Phase.SETTLING
            self._pause = self._io.call_later(_PAUSE, self._send_all_the_same)
            self._pump()

    def _send_all_the_same(self) -> None:
        if self._phase is _Phase.SETTLING:
            self._phase = _Phase.STOPPING
            self._pump()

    def _give_up_waiting(self) -> None:
        if self._phase is not _Phase.ENDED:
            logger.warning(
                "consumer %r: %d deliveries are still being handled after %g s; %s",
                self._options.name,
                self.session.running,
                self._options.stop_timeout,
                "they are lost" if self.session.automatic else "the broker will deliver them again",
            )
            self._end()

    def _be_patient_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _end(self) -> None:
        if self._phase is _Phase.ENDED:
            return
        self._phase = _Phase.ENDED
        self.connected = False
        for timer in (self._pause, self._renewal):
            if timer is not None:
                timer.cancel()
        self._be_patient_no_more()
        self._alarm.cancel()
        self.session.stop()
        self.session.withdrawn(self._withdrawn())
        now = time.monotonic()
        self._take_in(now)
        self._send(now)
        self._io.stop(CLOSE_GRACE)
        self._verdict.set()
        self.ended.set()


_STOPPING = frozenset({_Phase.CANCELLING, _Phase.SETTLING, _Phase.STOPPING, _Phase.LINGERING, _Phase.ENDED})
_SILENT = frozenset({_Phase.CANCELLING, _Phase.SETTLING})


def _nothing() -> SetupGenerator:
    yield from ()


def _next_tag(consumer_tag: str) -> str:
    name, _, number = consumer_tag.rpartition("#")
    return f"{name}#{int(number) + 1}" if name and number.isdecimal() else f"{consumer_tag}#2"
