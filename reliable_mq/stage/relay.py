"""The relay into a stage: it consumes a queue and publishes into a stream.

One channel does both: so when the broker lets another relay consume the lock of the stage, nothing that this one has
published comes later. A block of the connection (a memory or disk alarm) holds the acks back, too; nothing could be
acked during it anyway.

`reliable_mq.core.stage.session` decides. This module connects, sets up the channel, carries out reads of the tail and
changes of the subscription, and watches the time.

Invariants:

- Only the I/O thread touches the session.
- A stage is not moved into before it is a few seconds old.
- An error that time cannot heal ends the relay: `error` has it, and nothing is left unacked that was confirmed.
- Closing waits for outstanding confirms, acks, and disconnects in good order.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry

from reliable_mq.codec import Properties, RawDelivery
from reliable_mq.codec.methods import (
    STREAM_OFFSET,
    Cancel,
    CheckQueue,
    ConfirmSelect,
    Consume,
    QueueState,
    SetPrefetch,
    Step,
)
from reliable_mq.connection.interfaces import NullListener
from reliable_mq.core.channel_setup import (
    ServerInfo,
    SetupGenerator,
    StepGenerator,
    StepRefused,
    is_missing,
    publisher_setup,
    refusal,
)
from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
from reliable_mq.core.stage.options import StageOptions
from reliable_mq.core.stage.session import EpochState, StageSession
from reliable_mq.core.statistics import StageStatistics, StageStatus
from reliable_mq.errors import BrokerUnavailable, ConsumeError, ReliableMQError, TopologyMismatch
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import Reading, register
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.io_thread import IOThread
from reliable_mq.url import parse_url

__all__ = ["StageRelay"]

logger = logging.getLogger(__name__)

_TICK: Final = 0.5  # seconds between two looks at the clock
_COUNT_EVERY: Final = 2.0  # seconds between two counts of the queue
_CROWDED_COUNTS: Final = 2  # in a row that find other consumers: one that has just gone may be counted once
_LONGEST_WAIT: Final = 2.0  # seconds between two attempts: a relay that waits takes over soon
_TAIL_PREFETCH: Final = 2000
_CLOSE_GRACE: Final = 3.0  # seconds for the closing handshake


class StageRelay(NullListener):
    """Move a queue into a stage, on a thread of its own. Thread-safe.

    Construction does not connect; `start` does, in the background. It reconnects by itself, and runs once. A second
    relay of the same stage waits, and takes over when the first is gone.

    Args:
        options: what to move where.
        registry: where to register Prometheus metrics; None for none.
        settings: how to connect; None for what the URL of the options says.

    Attributes:
        statistics: counts.
    """

    def __init__(
        self,
        options: StageOptions,
        *,
        registry: CollectorRegistry | None = None,
        settings: ConnectionSettings | None = None,
    ) -> None:
        if settings is None:
            settings = parse_url(options.url)
        self._options = options
        self._session = StageSession(options)
        self.statistics: StageStatistics = self._session.statistics
        # Guarded by `_changed`.
        self._changed = threading.Condition()
        self._error: ReliableMQError | None = None
        self._last_error: ReliableMQError | None = None
        self._declared = False
        self._active = False
        self._ready: int | None = None  # messages, by the last count
        self._found = 0  # likewise, when the relay became active
        self._handled_before = 0  # messages moved when it became active
        self._empty_counts = 0  # in a row
        self._ended = threading.Event()
        # Of the I/O thread alone.
        self._out: list[bytes] = []
        self._channel = 0
        self._epoch_number = 0
        self._tags = 0
        self._work_tag: str | None = None
        self._tail_tag: str | None = None
        self._tail_of = ""
        self._changing = False
        self._paused = False
        self._others_after = 0  # messages moved before which consumers of ours that are cancelled may be counted
        self._crowded_counts = 0  # in a row
        self._warned_of_others = False
        self._blocked = False
        self._waits_for_lock = False
        self._missing_since: float | None = None
        self._quiet = 0  # counts in a row that found nothing, ready or unacked
        self._seen = 0  # deliveries, at the last count
        self._delivered = 0
        self._count_at = 0.0
        self._declared_at = 0.0
        self._closing = False
        self._cancelled_work = False
        self._io = IOThread(
            name=f"stage-{options.queue}",
            settings=settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=ReconnectPolicy(hosts=len(settings.endpoints), wait=_wait),
        )
        self._registration = None if registry is None else register(registry, self._readings)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and begin to move messages, in the background."""
        self._io.start()
        self._io.call_soon(self._tick)

    @property
    def error(self) -> ReliableMQError | None:
        """Why the relay has ended by itself; None if it has not."""
        with self._changed:
            return self._error

    @property
    def active(self) -> bool:
        """Whether it moves messages; False while it waits for another relay or the broker."""
        with self._changed:
            return self._active

    def wait_declared(self, timeout: float) -> None:
        """Wait until the stage is declared.

        Raises:
            ReliableMQError: it could not be, within ``timeout`` seconds or at all.
        """
        if not self._wait_for(lambda: self._declared, timeout):
            with self._changed:
                error = self._last_error
            raise error or BrokerUnavailable(f"stage {self._options.stage!r} was not declared within {timeout:g} s")

    def wait_active(self, timeout: float) -> bool:
        """Wait until it moves messages; return whether it does.

        Raises:
            ReliableMQError: it has ended by itself.
        """
        return self._wait_for(lambda: self._active, timeout)

    def wait_moved(self, timeout: float) -> bool:
        """Wait until the messages that were ready when it became active are moved.

        Other consumers may have taken some: so the wait ends, too, once the queue was found empty twice.

        Args:
            timeout: seconds.

        Returns:
            Whether they are moved.

        Raises:
            ReliableMQError: it has ended by itself.
        """
        return self._wait_for(lambda: self._active and self._has_moved(), timeout)

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or condition(), timeout)
            if self._error is not None:
                raise self._error
            return condition()

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until it has ended by itself, or was closed; return whether it has."""
        return self._ended.wait(timeout)

    def close(self, timeout: float) -> None:
        """Read no more, wait for outstanding confirms, ack, and disconnect.

        Blocks for ``timeout`` seconds and a few at most. What is not confirmed by then stays in the queue.
        """
        if self._io.call_soon(self._begin_to_close):
            self._ended.wait(timeout)
        self._io.close(_CLOSE_GRACE)
        self._ended.set()
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    def status(self) -> StageStatus:
        """Return the present state."""
        session = self._session
        with self._changed:
            return StageStatus(int(self._active), session.outstanding, session.held, self._ready)

    def _readings(self) -> Iterator[Reading]:
        return readings((self._options.queue, self._options.stage), self.status(), self.statistics)

    def _has_moved(self) -> bool:
        return self._empty_counts >= 2 or self._handled - self._handled_before >= self._found

    @property
    def _handled(self) -> int:
        return self.statistics.moved + self.statistics.moved_before

    # -- on the I/O thread: the connection -----------------------------------------------------------------------------

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Declare the stage once, check it from then on; get the lock."""
        options = self._options
        if not self._declared:
            try:
                yield from publisher_setup(options.topology(), server.version_tuple)
            except TopologyMismatch as mismatch:
                raise options.explained(mismatch) from mismatch
            self._declared_at = time.monotonic()
            with self._changed:
                self._declared = True
                self._changed.notify_all()
        else:  # a stage that was deleted is not made anew in silence: what was not read is lost
            yield from _carried_out(ConfirmSelect())
            for stream in options.streams:
                yield from _carried_out(CheckQueue(stream))
        state: QueueState = yield from _carried_out(CheckQueue(options.queue))
        with self._changed:
            self._ready = self._found = state.messages
        yield from _carried_out(SetPrefetch(1))
        yield from _carried_out(Consume(options.lock, self._new_tag("lock"), exclusive=True))

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Begin an epoch: this is the active relay now."""
        self._channel, self._epoch_number = channel, generation
        self._missing_since = None
        self._waits_for_lock = False
        self._work_tag = self._tail_tag = None
        self._changing = self._paused = False
        self._quiet = 0
        self._io.write(self._session.opened(generation, channel, frame_max, os.urandom(8), time.monotonic()))

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Forget the epoch."""
        self._session.lost()
        self._out.clear()
        self._work_tag = self._tail_tag = None
        with self._changed:
            self._active = False
            self._changed.notify_all()
        if self._closing:
            self._ended.set()
        else:
            logger.info("%s: the channel is lost (%s); what was not acked is delivered again", self, loss.text)

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Note an attempt that failed; end where no other can help."""
        with self._changed:
            self._last_error = error
        taken = isinstance(error.__cause__, StepRefused) and "in exclusive use" in error.__cause__.text
        if taken and not self._waits_for_lock:
            logger.info("%s: another relay is active; waiting until it is gone", self)
        self._waits_for_lock = taken
        if is_missing(error) and self._declared:
            now = time.monotonic()
            self._missing_since = self._missing_since or now
            if now - self._missing_since < self._options.missing_queue_timeout and will_retry:
                return
        elif will_retry:
            self._missing_since = None
            return
        self._end(error)

    def blocked(self, reason: str) -> None:
        """Note that the broker reads no more."""
        self._blocked = True
        logger.warning("%s: the broker takes no messages for now: %s", self, reason)

    def unblocked(self) -> None:
        """Go on."""
        self._blocked = False
        self._session.waited(time.monotonic())

    def cancelled(self, consumer_tag: str) -> None:
        """End the epoch: the queue, the stage or the lock is gone, or its leader."""
        if consumer_tag in (self._work_tag, self._tail_tag) or consumer_tag.startswith("lock-"):
            self._fail(f"the broker cancelled consumer {consumer_tag}")

    def nacked(self, tag: int, multiple: bool) -> None:
        """End the epoch: whether the stage has the message is not known."""
        self._fail("the stage did not take a message (basic.nack)")

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """End the epoch: the stage was deleted."""
        self._fail(f"stream {routing_key!r} of the stage is gone ({code} {text})")

    def acked(self, tag: int, multiple: bool) -> None:
        """Note a confirm; the acks follow at the end of the read."""
        self._session.confirmed(self._epoch_number, tag, multiple)

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Move messages of the queue; take in those of a tail."""
        start = 0
        for end in range(1, len(deliveries) + 1):
            if end == len(deliveries) or deliveries[end].consumer_tag != deliveries[start].consumer_tag:
                self._received(deliveries[start:end])
                start = end

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """End: a message cannot be moved."""
        self._end(
            ConsumeError(
                f"a message of queue {self._options.queue!r} has {size} bytes, too many to be moved: take it out"
            )
        )

    def read_finished(self) -> None:
        """Write what the events of one read have led to, and do what is next."""
        self._out.append(self._session.acks(time.monotonic()))
        frames = b"".join(self._out)
        self._out.clear()
        if frames:
            self._io.write(frames)
        self._advance()

    def _received(self, deliveries: list[RawDelivery]) -> None:
        now = time.monotonic()
        tag = deliveries[0].consumer_tag
        if tag.startswith("work-"):
            self._delivered += len(deliveries)
            self._out.append(self._session.delivered(deliveries, now))
        elif tag == self._tail_tag:
            messages = [(_offset_of(each), each) for each in deliveries]
            over, frames = self._session.tail_read(self._tail_of, messages, now)
            self._out.append(frames)
            if over:
                self._tail_tag = None
                self._run(_one(Cancel(tag)))
        else:
            self._out.append(self._session.passed_over(deliveries, now))

    # -- on the I/O thread: what is next -------------------------------------------------------------------------------

    def _advance(self) -> None:
        session = self._session
        if session.error is not None and self._error is None:
            self._end(session.error)
        if self._closing:
            self._close_if_done()
            return
        if self._changing:
            return
        if session.state is EpochState.READING and self._tail_tag is None and (read := session.next_read) is not None:
            self._tail_of, offset = read
            self._tail_tag = self._new_tag("tail")
            steps = (
                SetPrefetch(_TAIL_PREFETCH),
                Consume(self._tail_of, self._tail_tag, arguments={STREAM_OFFSET: offset}),
            )
            self._change(steps)
        elif session.state is EpochState.MOVING:
            left = self._declared_at + self._options.new_stage_grace - time.monotonic()
            if session.is_new and left > 0:
                self._changing = True
                self._io.call_later(left, self._go_on)
                return
            if not self._active:
                self._became_active()
            self._adjust()

    def _go_on(self) -> None:
        self._changing = False
        self._advance()

    def _became_active(self) -> None:
        logger.info("%s: moving messages; %d of the tail may come again", self, self._session.tail)
        with self._changed:
            self._active = True
            self._handled_before = self._handled
            self._empty_counts = 0
            self._changed.notify_all()

    def _adjust(self) -> None:
        """Change the subscription, where the deliveries that are held require it."""
        session = self._session
        if self._paused:
            if session.held <= self._options.max_outstanding_bytes / 4:
                self._paused = False
                self._subscribe()
        elif session.wants_pause and self._work_tag is not None:
            self._paused = True
            tag, self._work_tag = self._work_tag, None
            self._change((Cancel(tag),))
        elif session.wants_subscription:
            self._subscribe()

    def _subscribe(self) -> None:
        prefetch = self._session.prefetch
        self._session.prefetch_granted = prefetch
        self._others_after = self._handled + self._session.outstanding
        before, self._work_tag = self._work_tag, self._new_tag("work")
        cancel = () if before is None else (Cancel(before),)
        self._change((*cancel, SetPrefetch(prefetch), Consume(self._options.queue, self._work_tag)))

    def _change(self, steps: tuple[Step, ...]) -> None:
        self._changing = True
        self._run(_all(steps))

    def _run(self, steps: StepGenerator) -> None:
        self._io.run(steps, self._changed_subscriptions)

    def _changed_subscriptions(self, outcome: object) -> None:
        self._changing = False
        if isinstance(outcome, StepRefused):
            logger.warning("%s: %s; trying again", self, outcome)  # the channel is lost
        elif not isinstance(outcome, Exception):
            self._advance()

    def _fail(self, why: str) -> None:
        """End the epoch; the next one reads the tail."""
        if self._session.state in (EpochState.CLOSED, EpochState.ENDING):
            return
        self._session.failed()
        self.statistics.failures += 1
        if not self._closing:
            logger.warning("%s: %s; beginning anew with what the stage has", self, why)
        self._io.reopen_channel()

    def _tick(self) -> None:
        """Look at the clock."""
        now = time.monotonic()
        session = self._session
        if self._blocked:
            session.waited(now)
        elif session.overdue(now):
            session.failed()
            self.statistics.failures += 1
            logger.warning("%s: nothing was confirmed for %g s; connecting anew", self, self._options.confirm_timeout)
            self._io.discard("the stage does not confirm")
        if session.state is EpochState.MOVING and not self._closing and now >= self._count_at and not self._blocked:
            self._count_at = now + _COUNT_EVERY
            self._io.run(_one(CheckQueue(self._options.queue)), self._counted)
        if not self._ended.is_set():
            self._io.call_later(_TICK, self._tick)

    def _counted(self, outcome: object) -> None:
        if not isinstance(outcome, QueueState):
            return
        session = self._session
        empty = not outcome.messages and not session.outstanding and self._delivered == self._seen
        self._seen = self._delivered
        self._quiet = self._quiet + 1 if empty else 0
        if self._quiet >= 2:
            session.drained(time.monotonic())
        self._look_for_others(outcome.consumers)
        with self._changed:
            self._ready = outcome.messages
            self._empty_counts = self._empty_counts + 1 if empty else 0
            self._changed.notify_all()

    def _look_for_others(self, consumers: int) -> None:
        """Warn once of other consumers of the queue.

        They take messages that the stage then lacks. AMQP shows only how many there are, not whether one at a time is
        active: that one is another than this relay, or becomes so when this relay changes its subscription, so the
        warning holds there, too. A quorum queue counts a cancelled consumer until its deliveries are acked, and of
        those of which one at a time is active that one alone.
        """
        if self._work_tag is None or self._changing or self._handled < self._others_after:
            self._crowded_counts = 0
        elif consumers <= 1:
            self._crowded_counts = 0
            self._warned_of_others = False
        else:
            self._crowded_counts += 1
            if self._crowded_counts >= _CROWDED_COUNTS and not self._warned_of_others:
                self._warned_of_others = True
                logger.warning(
                    "%s: the queue has other consumers (%d), such as a relay of another stage: each message goes to "
                    "one of them (with a single active consumer, to the active one), so the stage may lack some. Move "
                    "the queue into one stage, which all read",
                    self,
                    consumers - 1,
                )

    # -- on the I/O thread: the end ------------------------------------------------------------------------------------

    def _end(self, error: ReliableMQError) -> None:
        """End with an error: nothing can be moved any more."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        self._begin_to_close()

    def _begin_to_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        tag, self._work_tag = self._work_tag, None
        if tag is None:
            self._cancelled_work = True
            self._close_if_done()
        else:
            self._io.run(_one(Cancel(tag)), self._work_cancelled)

    def _work_cancelled(self, _outcome: object) -> None:
        self._cancelled_work = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Disconnect once everything is confirmed and the broker has read the acks."""
        if not self._cancelled_work:
            return
        if self._session.state is EpochState.MOVING and self._session.unconfirmed:
            return
        if self._out:
            self._io.write(b"".join(self._out))
            self._out.clear()
        self._cancelled_work = False  # this happens once
        self._io.run(_one(CheckQueue(self._options.queue)), self._finished)

    def _finished(self, _outcome: object) -> None:
        with self._changed:
            self._changed.notify_all()
        self._ended.set()
        self._io.stop(_CLOSE_GRACE)

    def _new_tag(self, kind: str) -> str:
        self._tags += 1
        return f"{kind}-{self._tags}"

    def __repr__(self) -> str:
        return f"<StageRelay {self._options.queue} -> {self._options.stage}>"


def _wait(rounds: int) -> float:
    return min(0.1 * 2.0 ** min(rounds, 10), _LONGEST_WAIT)


def _one(step: Step) -> StepGenerator:
    return (yield step)


def _all(steps: tuple[Step, ...]) -> StepGenerator:
    yield from steps


def _carried_out(step: Step) -> Generator[Step, Any, Any]:
    try:
        return (yield step)
    except StepRefused as refused:
        raise refusal(step, refused) from refused


def _offset_of(delivery: RawDelivery) -> int:
    offset = Properties(delivery.properties).headers.get(STREAM_OFFSET)
    if not isinstance(offset, int):
        raise ConsumeError("a message of a stage came without an offset: it is no stream")
    return offset
