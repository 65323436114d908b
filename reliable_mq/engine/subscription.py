"""The base of a consumer's subscription, which acts on its session's decisions.

Both APIs share it. It runs on the loop of one connection, which is an I/O thread's or asyncio's. Events of the
connection, of handlers and of the user are passed to the session. The session is then polled, and its actions are
carried out. Deliveries go to handler pools (worker threads, tasks, or a user who pulls). Results return from any thread
through a queue, and one wake-up serves all results that arrived in the meantime. Each API adds its connection and the
waiting of its callers.

Invariants:

- The session is used on the loop only. No user code runs inside a call of the connection, and nothing blocks.
- Deliveries that wait in a handler pool are recalled when their channel is lost or about to be given up.
- A result is passed on within ``ack_interval``, however long the handler of the next delivery takes.
- The subscription ends once, after everything finished until then has been acked. It has no timer after that.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from reliable_mq._util.logs import LogLimit, get_logger, given_up_logger
from reliable_mq.codec.methods import Cancel, SetPrefetch
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.connection.new_queues import QueueRecord
from reliable_mq.core.channel_setup import StepRefused, declare, explain, is_missing
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout, consumer_timeout_of
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.lifecycle import ChannelStep, ConsumerState, Resubscribe
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.idempotency import namespace_of
from reliable_mq.engine.connection import Wakeup
from reliable_mq.engine.health import ConsumerVitals, DeliveryCheck
from reliable_mq.errors import BrokerUnavailable, ReliableMQError, TopologyMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.codec import RawDelivery
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.consumer.dispatch import Work
    from reliable_mq.core.consumer.handler import ClaimPolicy, Result
    from reliable_mq.core.consumer.lifecycle import SubscriptionChange
    from reliable_mq.core.consumer.session import Actions, ConsumerSession
    from reliable_mq.core.health import ConsumerSigns
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.core.statistics import TokenStatistics
    from reliable_mq.engine.connection import BaseConnection
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.engine.republisher import BaseRepublisher
    from reliable_mq.engine.steps import Steps
    from reliable_mq.settings import Endpoint
    from reliable_mq.topology import Queue
    from reliable_mq.tracing.consuming import ConsumerTracer

logger = get_logger(__name__)

CLOSE_GRACE = 5.0  # seconds for the closing handshake
_LOG_STORE_FAILURES_EVERY = 10.0  # minimum seconds between two log lines about failures of the idempotency store


class Event(Protocol):
    """An event that callers wait for."""

    def set(self) -> None:
        """Set the event."""

    def is_set(self) -> bool:
        """Whether the event is set."""


class WorkQueue(Protocol):
    """A queue of work for handlers. Called on the loop, so methods must not block."""

    def put(self, work: Iterable[Work]) -> None:
        """Queue work for handlers."""

    def stop_starting(self) -> None:
        """Start no more handlers. Waiting and later work can be recalled. Thread-safe."""

    def recall(self) -> list[Delivery]:
        """Return the deliveries that no handler has started or will start."""


class BaseSubscription(ConnectionListener):
    """The connection of a consumer and its session. Each API adds its own parts.

    Args:
        options: The options of the consumer.

    Attributes:
        handlers: The pool that runs handlers. To be set before `start`.
        quarantine_handlers: The pool for deliveries from quarantine, so that they delay no other deliveries. None to
            use ``handlers``.
        republisher: The republisher of dead letters and retries. To be set before `start` if the session produces any.
        claiming: The policy for claims, which knows whether the store answers. None without a store.
        session: The consumer session, which makes the decisions.
        largest_body: The maximum size of a body that is read, in bytes, as in `ChannelSink`.
        error: The error that ended the subscription, if it ended by itself.
        reconnects: The number of connections that were lost and replaced.
        tracer: The tracer that records settlements. None without tracing.
        hurried: Whether the subscription was stopped without waiting for handlers.
        ended: An event that is set when the subscription has ended.
    """

    handlers: WorkQueue
    ended: Event
    _first_attempts_over: Event  # each host has had its first attempt, or one has succeeded
    _connection_type: ClassVar[type[BaseConnection]]
    _event_type: ClassVar[type[Event]]

    def __init__(self, options: ConsumerOptions) -> None:
        settings = options.settings
        self.republisher: BaseRepublisher | None = None
        self.tracer: ConsumerTracer | None = None
        self.quarantine_handlers: WorkQueue | None = None
        self.claiming: ClaimPolicy | None = None
        self.session: ConsumerSession = options.new_session()
        self.largest_body = options.largest_body
        self.error: ReliableMQError | None = None
        self.reconnects = 0
        self.hurried = False
        self.ended = self._event_type()
        self._options = options
        self._record = QueueRecord(settings.virtual_host, options.new_queue_grace)
        self._queue_listener: QueueRecord | None = None  # `_record` while new queues are recorded; else None
        self._in_quarantine = False  # whether quarantine is subscribed
        self._refused: list[tuple[Queue, ReliableMQError]] = []  # declarations that closed the last channel
        self._known_refused: list[tuple[Queue, ReliableMQError]] = []  # earlier ones, on this connection
        self._version: tuple[int, ...] = ()  # the broker's version
        self._results: deque[Result] = deque()
        self._reported_at = 0.0  # when the oldest of the results was reported
        self._report_after = 1  # number of results; fewer than that wait for the next poll
        self._published: deque[tuple[RepublishRequest, ReliableMQError | None]] = deque()
        self._unstarted: deque[Delivery] = deque()
        self._requeued: deque[Delivery] = deque()
        self._woken = False
        self._wakeup = Wakeup(self._run)
        self._store_log = LogLimit(_LOG_STORE_FAILURES_EVERY)
        self._vitals = ConsumerVitals(settings.heartbeat)
        self._first_attempts_over = self._event_type()
        self._attempts_left = len(settings.endpoints)
        self._last_error: ReliableMQError | None = None
        self._io = self._connection_type(
            name=options.name,
            settings=settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=options.new_reconnect_policy(),
        )
        self._delivery_check = DeliveryCheck(options.new_delivery_watch(), options.queue_name, self.session, self._io)

    def _call_outside(self, call: Callable[[], object]) -> None:
        """Schedule a call of code from outside this package, which may wait for others.

        Does not block.
        """
        raise NotImplementedError

    def _wait_first_attempts(self, timeout: float) -> Any:
        """Wait until the first attempts are over, for up to ``timeout`` seconds. A step."""
        raise NotImplementedError

    def join(self) -> Any:
        """Wait until the connection is closed, after the end. A step."""
        raise NotImplementedError

    def abort(self) -> None:
        """End at once, whether or not the start was complete. Does not wait."""
        self._io.stop()

    # For callers, on any thread

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    @property
    def connected(self) -> bool:
        """Whether the consumer is subscribed."""
        return self.session.lifecycle.connected

    def wait_connected(self) -> Steps[ReliableMQError | None]:
        """Wait for the first attempt on every host; return why it is not subscribed.

        Returns None if it is. A set-up in progress (for example of a large topology) extends the wait.
        """
        limit = waited = self._options.settings.first_attempts_timeout
        while limit > 0 and not self._first_attempts_over.is_set():
            yield self._wait_first_attempts(limit)
            limit = self._io.patience
        if self.connected:
            return None
        return self.error or self._last_error or BrokerUnavailable(f"no answer within {waited:g} s")

    @property
    def peer(self) -> Endpoint | None:
        """The address of the last connected host."""
        return self._io.peer

    @property
    def tokens(self) -> TokenStatistics:
        """The counts of renewed tokens, with those of the republisher."""
        return self._io.tokens if self.republisher is None else self._io.tokens + self.republisher.tokens

    def signs(self, now: float, stuck_after: float) -> ConsumerSigns:
        """Return the signs of health. Thread-safe. Does not wait."""
        store_failing = None if self.claiming is None else self.claiming.store.failing
        signs = self._vitals.signs(self.session, self._io, self.error, now, stuck_after, store_failing)
        if self.republisher is None:
            return signs
        republisher = self.republisher.signs(now, self.session.republishing)
        return replace(signs, republisher=republisher, holds_publishes=self.session.holds_publishes)

    def report(self, results: Sequence[Result]) -> None:
        """Pass the results of dispatched deliveries to the session.

        A few successful results wait for the next poll while other deliveries are being handled. There is nothing to
        ack before that, and a wake-up costs as much as handling several deliveries.
        """
        if not self._results:
            self._reported_at = time.monotonic()
        self._results.extend(results)
        if (
            len(self._results) >= self._report_after
            or not isinstance(results[0], Delivery)
            or results[0].consumer_tag == self._options.quarantine_tag  # the next quarantined one waits for its ack
            or self.session.lifecycle.state is not ConsumerState.SUBSCRIBED
            or (len(self._results) >= self.session.running and time.monotonic() >= self.session.rested_at)
        ):
            self._wake()

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Queue dispatched deliveries again that no handler has started.

        They wait if the kill switch pauses the consumer. If the consumer stops, they are requeued.
        """
        self._unstarted.extend(deliveries)
        self._wake()

    def published(self, republish: RepublishRequest, error: ReliableMQError | None) -> None:
        """Pass the outcome of a publish to the session. No ``error`` means confirmed."""
        self._published.append((republish, error))
        self._wake()

    def prefetch_changed(self) -> None:
        """Subscribe again with the new prefetch of the options. Does not wait."""
        self._io.call_soon(self._change_prefetch)

    def stop(self) -> None:
        """Begin to stop, and dispatch nothing more. Does not wait for running handlers.

        A handler that calls this is the last one on its thread or task, even if the loop learns of the stop later.
        """
        self._io.call_and_wake(self._begin_to_stop)
        if not self.session.automatic:
            self.handlers.stop_starting()
            if self.quarantine_handlers is not None:
                self.quarantine_handlers.stop_starting()

    @property
    def stalled_seconds(self) -> float | None:
        """The seconds for which the event loop has stalled (`BaseConnection`)."""
        return self._io.stalled_seconds

    def stop_now(self) -> None:
        """Stop without waiting for running handlers."""
        self.hurried = True
        self._io.call_and_wake(self._end)

    # On the loop: events of the connection

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Start using a channel that is set up, and subscribed unless the consumer stops."""
        self._version = server.version_tuple
        if self._record.ready(server):
            self.reconnects += 1
            self._known_refused.clear()
        self.session.opened(generation, channel, namespace_of(server.cluster_name, self._options.settings.virtual_host))
        self._known_refused += self._refused
        self._refused.clear()
        for queue, error in self._known_refused:
            self.session.declared(queue, error, time.monotonic())
        if self.connected:
            self._vitals.subscribed()
            if self.session.stream_offset is not None:
                self.session.stream_offset.subscribed(time.time())
            logger.info("consuming from queue %r on %s %s", self._options.queue_name, server.product, server.version)
            self._first_attempts_over.set()
            self._delivery_check.begin()
        self._run()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Forget the channel. The broker delivers all unacked messages again."""
        self._vitals.unsubscribed(printable(loss.text))
        if self.claiming is not None:
            self.claiming.store.forget()  # the deliveries that would be claimed again are gone
        self._delivery_check.end()
        self._in_quarantine = False
        self._record.lost(time.monotonic())
        timeout = consumer_timeout_of(loss)
        if timeout is not None:
            self._time_out(timeout)
            logger.warning("the broker closed the channel of consumer %r: %s", self._options.name, printable(loss.text))
        self.session.lost(generation)
        self._recall()
        self._run()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Note a failed attempt. The last attempt or a mismatched queue ends the consumer."""
        self._last_error = error
        self._vitals.attempt_failed(str(error))
        self._attempts_left -= 1
        offset = self.session.stream_offset
        if offset is not None and isinstance(error, BrokerUnavailable):
            moves = len(self._options.settings.endpoints) > 1 or self._io.tries_several_addresses
            if moves or error.permanent:
                offset.refused()
        if self.session.lifecycle.stopping:
            return  # running handlers are still waited for
        if not will_retry or (isinstance(error, TopologyMismatch) and not is_missing(error)):
            self.error = error
            if will_retry:  # else the connection has logged it
                names = self._options.name, self._options.queue_name
                given_up_logger.error("consumer %r of queue %r gives up: %s", *names, error)
            self._end()
        elif self._attempts_left <= 0:
            self._first_attempts_over.set()

    def cancelled(self, consumer_tag: str) -> None:
        """Subscribe again after the queue or its leader is gone, or a delivery timed out."""
        if consumer_tag not in {self.session.lifecycle.consumer_tag, self._options.quarantine_tag}:
            return
        if not self.session.cancelled(consumer_tag, time.monotonic()):
            return
        self._time_out(ConsumerTimeout(consumer_tag=consumer_tag))
        self._vitals.unsubscribed("the broker cancelled the subscription")
        logger.warning(
            "the broker cancelled consumer %r: queue %r was deleted or moved, or its consumer timeout expired; "
            "subscribing again",
            consumer_tag,
            self._options.queue_name,
        )
        self._run()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Pass all ``basic.deliver`` of one read to the session."""
        self.session.delivered(cast("list[Delivery]", deliveries), time.monotonic())

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Pass a ``basic.get-ok`` to the session."""
        self.session.delivered([cast("Delivery", delivery)], time.monotonic())

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """Pass a delivery or ``basic.get-ok`` without its body to the session."""
        self.session.oversized(cast("Delivery", delivery), size, time.monotonic())

    def read_finished(self) -> None:
        """Act on all events of one read."""
        self._run()

    # On the loop: the work

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._io.call_soon(self._run)

    def _run(self) -> None:
        """Poll the session, and carry out its actions."""
        self._woken = False
        now = time.monotonic()
        if not self.session.running:
            self._vitals.worked(now)  # before any delivery runs, as a probe may come in between
        self._take_in(now)
        actions = self._decide(now)
        self._carry_out(actions)
        if actions.state is ConsumerState.ENDED:
            self._finish(now)
            return
        self._report_after = actions.report_after
        if len(self._results) >= self._report_after:  # reported in the meantime, under the old limit
            self._wake()
        self._wakeup.set(actions.wake_at, now, self._io.call_later)

    def _decide(self, now: float) -> Actions:
        """Poll the session, and recall deliveries first if it requests that."""
        while (actions := self.session.poll(now)).recall:
            self.session.postponed(self._recalled())
        return actions

    def _take_in(self, now: float) -> None:
        """Pass events from other threads to the session."""
        session = self.session
        if self._results:
            since = self._reported_at
            results = [self._results.popleft() for _ in range(len(self._results))]
            session.finished(results, now, since=min(since, now))
            self._vitals.worked(now)
        while self._published:
            session.published(*self._published.popleft(), now)
        if self._unstarted:
            unstarted = self._unstarted
            session.postponed([unstarted.popleft() for _ in range(len(unstarted))])
        if self._requeued:
            back = self._requeued
            session.recalled([back.popleft() for _ in range(len(back))])

    def _carry_out(self, actions: Actions) -> None:
        if actions.dispatch:
            self.handlers.put(actions.dispatch)
        for queue in actions.declare:
            self._io.run(declare(queue, self._version, self._queue_listener), partial(self._declared, queue))
        if self.republisher is not None:
            for republish in actions.publish:
                self.republisher.put(republish)
        if actions.data:
            self._io.write(actions.data)
        self._record_settled(actions)
        if actions.dispatch_quarantined:
            (self.quarantine_handlers or self.handlers).put(actions.dispatch_quarantined)
        for change in actions.subscribe:
            self._change_subscription(change)
        self._log(actions)

    def _log(self, actions: Actions) -> None:
        for event in actions.log:
            if event.kind in (LogEventKind.PAUSED, LogEventKind.RESUMED):
                self._vitals.paused(paused=self.session.paused)
            line = event.line(self._options.name)
            if event.kind is LogEventKind.STORE_FAILED:  # while the store is down, for every unacked delivery
                due = self._store_log.count()
                if not due:
                    continue
                line += f"; {due:,} such failures since the last line" if due > 1 else ""
            logger.log(event.kind.level, "%s", line, extra=event.ids)

    def _record_settled(self, actions: Actions) -> None:
        if actions.settled and self.tracer is not None:
            self._call_outside(partial(self.tracer.settled, actions.settled, time.time_ns(), self._io.peer))

    def _change_subscription(self, change: SubscriptionChange) -> None:
        if isinstance(change, Resubscribe):
            self._io.run(self._resubscribe(change), self._resubscribed)
        elif change is ChannelStep.UNSUBSCRIBE:
            self._io.run(self._unsubscribe(), self._unsubscribed)
        elif change is ChannelStep.REOPEN:
            self._io.reopen_channel()
        else:
            self._io.run(self._options.subscribe_to_quarantine(), self._subscribed_to_quarantine)

    def _finish(self, now: float) -> None:
        """Close the connection after acking everything that has ended by now."""
        self._wakeup.cancel()  # the loop may belong to the user
        self._delivery_check.end()
        if self.ended.is_set():
            return
        if self.session.lifecycle.gave_up:
            self._log_unfinished()
        self.session.recalled(self._recalled())
        self._take_in(now)
        last = self._decide(now)
        self._io.write(last.data)
        self._record_settled(last)
        self._log(last)
        self._io.stop(CLOSE_GRACE)
        self._first_attempts_over.set()
        self.ended.set()

    def _log_unfinished(self) -> None:
        """Log the work that outlasted ``stop_timeout``, if there is any."""
        counts = {
            "deliveries are still being handled": self.session.running,
            "retries or dead letters are not confirmed": self.session.republishing,
        }
        if unfinished := " and ".join(f"{count} {what}" for what, count in counts.items() if count):
            consequence = "they are lost" if self.session.automatic else "the broker will deliver them again"
            after = self._options.stop_timeout
            logger.warning("consumer %r: %s after %g s; %s", self._options.name, unfinished, after, consequence)

    # On the loop: the subscription

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        self._queue_listener = self._record.listener_for(server)
        if self.session.lifecycle.stopping:
            return
        for index, (queue, error) in enumerate(self._refused):
            self._refused[index] = queue, (yield from explain(queue, error, server.version_tuple))
        yield from self._subscribe(server)

    def _subscribe(self, server: ServerInfo) -> SetupGenerator:
        offset = self.session.stream_offset
        self.session.subscribing(self._options.prefetch)
        start = None if offset is None else offset.start
        yield from self._options.setup(server, self.session.lifecycle.consumer_tag, start, self._queue_listener)
        if self.session.lifecycle.stopping:  # deliveries that it requeues would come back at once
            yield Cancel(self.session.lifecycle.consumer_tag)

    def _resubscribe(self, change: Resubscribe) -> StepGenerator:
        offset = self.session.stream_offset
        alone = offset is not None or self._options.exclusive
        if alone:
            yield Cancel(change.before)
        yield SetPrefetch(change.prefetch)
        yield self._options.consume(change.consumer_tag, None if offset is None else offset.here)
        if not alone:  # only now, as an auto-delete queue is deleted with its last consumer
            yield Cancel(change.before)

    def _resubscribed(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            logger.warning("the new prefetch takes effect on the next channel: %s", outcome)

    def _unsubscribe(self) -> StepGenerator:
        yield Cancel(self.session.lifecycle.consumer_tag)
        if self._in_quarantine:  # checked now, as subscribing may have been in progress when the stop began
            yield Cancel(self._options.quarantine_tag)

    def _unsubscribed(self, _outcome: object) -> None:
        self.session.lifecycle.unsubscribed(time.monotonic())
        self._run()

    def _subscribed_to_quarantine(self, outcome: object) -> None:
        self._in_quarantine = not isinstance(outcome, Exception)
        if not self._in_quarantine and not isinstance(outcome, BrokerUnavailable):  # then the next channel tries again
            logger.error(
                "consumer %r cannot consume from its quarantine queue, and tries again in %g s: %s",
                self._options.name,
                self.session.quarantine_refused(time.monotonic()),
                outcome,
            )

    def _declared(self, queue: Queue, outcome: object) -> None:
        if isinstance(outcome, ReliableMQError) and isinstance(outcome.__cause__, StepRefused):
            self._refused.append((queue, outcome))  # the next channel begins with it and holds retries for the queue
            return
        if isinstance(outcome, BrokerUnavailable):
            return  # the channel is lost, and the broker delivers the waiting messages again
        self.session.declared(queue, outcome if isinstance(outcome, Exception) else None, time.monotonic())
        self._run()

    def _change_prefetch(self) -> None:
        if self._options.ends_with_subscription:
            logger.info(
                "consumer %r: prefetch=%d takes effect with the next channel, because subscribing again would delete "
                "the auto-delete queue",
                self._options.name,
                self._options.prefetch,
            )
        elif not self.session.change_prefetch(self._options.prefetch):
            logger.info(
                "consumer %r: prefetch=%d takes effect once nothing is unacked, because subscribing again gives "
                "up the role of single active consumer",
                self._options.name,
                self._options.prefetch,
            )
        self._run()

    # On the loop: the end

    def _begin_to_stop(self) -> None:
        if not self.session.stop(time.monotonic()):
            return
        self._recall()
        logger.info("stopping consumer %r; %d deliveries are being handled", self._options.name, self.session.running)
        self._run()

    def _end(self) -> None:
        """Stop without waiting for running handlers."""
        if not self.ended.is_set():
            self.session.end()
            self._run()

    def _recall(self) -> None:
        """Recall dispatched deliveries, unless the broker has forgotten them."""
        if not self.session.automatic:
            self.session.recalled(self._recalled())

    def _recalled(self) -> list[Delivery]:
        quarantined = [] if self.quarantine_handlers is None else self.quarantine_handlers.recall()
        return [*self.handlers.recall(), *quarantined]

    def _time_out(self, timeout: ConsumerTimeout) -> None:
        """Fail the running deliveries that timed out."""
        now = time.monotonic()
        self._take_in(now)
        self._recall()
        self.session.timed_out(timeout, now, time.time())
