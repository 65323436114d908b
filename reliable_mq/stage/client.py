"""The connection of a relay into a stage, and the relay's states.

One channel consumes and publishes. So when the broker lets another relay consume the lock of the stage, no message that
this relay has published arrives later. A block of the connection (a memory or disk alarm) also holds back the acks, but
no delivery could be acked during it anyway.

`TRANSITIONS` lists the state changes of the relay. `reliable_mq.core.stage.session` decides on messages, and
`reliable_mq.core.stage.counts` on counts of the queue. This module sets up the channel, reads the tail, changes the
subscription and checks deadlines.

Invariants:

- Only the I/O thread uses the session.
- No message is moved into a stage before the stage is a few seconds old.
- A permanent error ends the relay. `error` holds it, and every confirmed message is acked.
- Closing waits for outstanding confirms, acks their deliveries, and disconnects cleanly.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from reliable_mq._util.logs import get_logger
from reliable_mq.codec import RawDelivery, stream_offset
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
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.core.channel_setup import (
    NO_STREAM,
    ServerInfo,
    SetupGenerator,
    StepGenerator,
    StepRefused,
    carry_out,
    in_exclusive_use,
    is_a_stream,
    is_missing,
    lacks_permission,
    publisher_setup,
)
from reliable_mq.core.publisher.window import is_too_large
from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy, is_permanent
from reliable_mq.core.stage.counts import QueueCounts
from reliable_mq.core.stage.options import StageOptions
from reliable_mq.core.stage.session import EpochState, StageSession
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, ReliableMQError, TopologyMismatch
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.io_thread import IOThread

logger = get_logger(__name__)

_CLOSE_GRACE: Final = 3.0  # seconds for the closing handshake
_TICK: Final = 0.5  # seconds between two checks of the deadlines
_COUNT_EVERY: Final = 2.0  # seconds between two counts of the queue
_LONGEST_WAIT: Final = 2.0  # seconds between two attempts, so that a waiting relay soon takes over
_TAIL_PREFETCH: Final = 2000


class RelayState(enum.Enum):
    """The states of a relay, which runs once."""

    CONNECTING = "no channel: connects, now or after a pause"
    WAITING = "another relay holds the lock; tries again"
    READING = "holds the lock: reads the tail of the stage, and waits while the stage is new"
    ACTIVE = "moves messages"
    CANCELLING = "closing: waits for cancel-ok"
    CONFIRMING = "closing: waits for outstanding confirms, and acks"
    DISCONNECTING = "everything is acked: waits until the broker has read the acks"
    ENDED = "the connection is closed, or about to be"


_S = RelayState
_RUNNING: Final = (_S.CONNECTING, _S.WAITING, _S.READING, _S.ACTIVE)
_CLOSING: Final = (_S.CANCELLING, _S.CONFIRMING, _S.DISCONNECTING)
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[RelayState, set[RelayState]]]] = {
    "the lock is consumed": {_S.CONNECTING: {_S.READING}, _S.WAITING: {_S.READING}},
    "the lock is refused": {_S.CONNECTING: {_S.WAITING}},
    "an attempt fails otherwise": {_S.WAITING: {_S.CONNECTING}},
    "the tail is read, and the stage is old enough": {_S.READING: {_S.ACTIVE}},
    "the channel is lost": {
        **{state: {_S.CONNECTING} for state in (_S.READING, _S.ACTIVE)},
        **{state: {_S.ENDED} for state in _CLOSING},
    },
    "close, or an error for good": {_S.ACTIVE: {_S.CANCELLING}},
    "the same without a subscription": {state: {_S.CONFIRMING} for state in _RUNNING},
    "cancel-ok": {_S.CANCELLING: {_S.CONFIRMING}},
    "nothing is unconfirmed": {_S.CONFIRMING: {_S.DISCONNECTING}},
    "the broker has read the acks": {_S.DISCONNECTING: {_S.ENDED}},
    "the time to close is over": {state: {_S.ENDED} for state in (*_RUNNING, *_CLOSING)},
}
del _S


class _ChannelReads(enum.Enum):
    """The subscription of the channel, in addition to the lock."""

    NONE = "nothing yet, or a tail to its end"
    TAIL = "the tail of a partition"
    AGEING = "nothing: the stage is too new to be moved into"
    QUEUE = "the queue"
    PAUSED = "nothing, while too many bytes are held, or the queue is counted without a subscription"


class RelayClient(ConnectionListener):
    """A client that connects and moves messages. Callbacks run on the I/O thread."""

    def __init__(self, options: StageOptions, session: StageSession, settings: ConnectionSettings) -> None:
        self.changed = threading.Condition()  # guards the public attributes below, and notifies of their changes
        self.state = RelayState.CONNECTING
        self.error: ReliableMQError | None = None  # of the end of the relay
        self.last_error: ReliableMQError | None = None  # of the last failed attempt
        self.declared_at: float | None = None  # when the set-up of this channel declared or found the stage
        self.counts = QueueCounts()
        self.unsettled = 0  # entries that another epoch would read, when last determined
        self._options = options
        self._session = session
        self._out: list[bytes] = []
        self._channel_generation = 0
        self._subscription = _ChannelReads.NONE
        self._tag: str | None = None  # of the newest subscription; None after its cancellation
        self._tags = 0
        self._tail_of = ""
        self._changing = False  # steps of a subscription are in progress
        self._blocked = False
        self._missing_since: float | None = None
        self._count_at = 0.0
        self._reconnect_policy = ReconnectPolicy(hosts=len(settings.endpoints), wait=_wait)
        self._io = IOThread(
            name=f"stage-{options.queue}",
            settings=settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=self._reconnect_policy,
        )

    # -- any thread ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._io.start()
        self._io.call_soon(self._tick)

    def end(self, timeout: float) -> None:
        """Close, waiting up to ``timeout`` seconds for outstanding confirms."""
        if self._io.call_soon(self._begin_to_close):
            self.wait_ended(timeout)
        self._io.close(_CLOSE_GRACE)
        self._enter(RelayState.ENDED)

    def wait_ended(self, timeout: float | None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.state is RelayState.ENDED, timeout)

    @property
    def moved(self) -> int:
        """The number of messages that are in the stage and acked."""
        return self._session.statistics.moved + self._session.statistics.moved_before

    def _enter(self, state: RelayState) -> None:
        with self.changed:
            self.state = state
            self.changed.notify_all()

    # -- on the I/O thread: the connection -----------------------------------------------------------------------------

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Declare the stage once and later only check it; then consume the lock."""
        options = self._options
        if self.declared_at is None or not options.fewer_partitions:  # another relay may have added one meanwhile
            yield from self._check_partitions()
        if self.declared_at is None:
            try:
                yield from publisher_setup(options.topology(), server.version_tuple)
            except TopologyMismatch as mismatch:
                raise options.explained(mismatch) from mismatch
        else:  # a deleted stage is not silently declared again, since unread messages are lost
            yield from carry_out(ConfirmSelect())
            for stream in options.streams:
                yield from carry_out(CheckQueue(stream))
        with self.changed:
            self.declared_at = time.monotonic()  # a broker that has started again may forget the stage again
            self.changed.notify_all()
        state: QueueState = yield from carry_out(CheckQueue(options.queue))
        self._reconnect_policy.proven = True  # a relay that waits for the lock is patient, too, if the queue goes
        with self.changed:
            self.counts.set_up(state)
        self._session.shared = self.counts.shared
        yield from carry_out(SetPrefetch(1))
        yield from carry_out(Consume(options.lock, self._new_tag("lock"), exclusive=True))

    def _check_partitions(self) -> SetupGenerator:
        """Refuse a stage with more partitions, whose ends would not be read."""
        options = self._options
        try:
            yield from carry_out(CheckQueue(options.next_partition))
        except TopologyMismatch:  # it does not exist
            return
        if not options.fewer_partitions:
            error = ConfigurationError(
                f"{options.more_partitions}, or use a stage of another name if that queue is not a partition"
            )
            self._end(error)  # a relay that was set up before would try again
            raise error
        logger.warning("%s: %s; continuing all the same", self, options.more_partitions)

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Begin an epoch: this relay is now the active one."""
        self._channel_generation = generation
        self._missing_since = None
        self._subscription, self._tag, self._changing = _ChannelReads.NONE, None, False
        if self.state in _RUNNING:
            self._enter(RelayState.READING)
        self._io.write(self._session.opened(generation, channel, frame_max, os.urandom(8), time.monotonic()))

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        self._session.lost()
        self._out.clear()
        self._subscription, self._tag = _ChannelReads.NONE, None
        if self.state in _RUNNING:
            self._enter(RelayState.CONNECTING)
            logger.info("%s: channel lost (%s); unacked messages will be delivered again", self, loss.text)
            if lacks_permission(loss.code, loss.text):
                self._end(BrokerUnavailable(f"the broker refused {self}: {loss.code} {loss.text}", permanent=True))
            elif is_too_large(loss.code, loss.text):
                self._end(
                    ConsumeError(
                        f"a message of queue {self._options.queue!r} is too large for the broker to be moved: "
                        f"{loss.text}. Raise max_message_size in the broker, or take it out (properties that do not "
                        "fit into a frame are a part of its size)"
                    )
                )
        else:
            self._finish()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Record a failed attempt. End the relay if no further attempt can succeed."""
        with self.changed:
            self.last_error = error
        refused = error.__cause__ if isinstance(error.__cause__, StepRefused) else None
        if self.state in _RUNNING:
            self._wait_for_lock(refused is not None and in_exclusive_use(refused.text))
        if is_missing(error) and self.declared_at is not None:
            now = time.monotonic()
            self._missing_since = self._missing_since or now
            if now - self._missing_since < self._options.missing_queue_timeout and will_retry:
                return
        elif will_retry and (refused is None or not is_permanent(error)):
            self._missing_since = None
            return
        self._end(error)

    def _wait_for_lock(self, taken: bool) -> None:
        if taken and self.state is not RelayState.WAITING:
            logger.info("%s: another relay is active; waiting for it to end", self)
        self._enter(RelayState.WAITING if taken else RelayState.CONNECTING)

    def blocked(self, reason: str) -> None:
        self._blocked = True
        logger.warning("%s: the broker blocks publishing: %s", self, reason)

    def unblocked(self) -> None:
        self._blocked = False
        self._session.waited(time.monotonic())

    def cancelled(self, consumer_tag: str) -> None:
        """End the epoch: the queue, the stage, the lock or its leader is gone."""
        if consumer_tag == self._tag or consumer_tag.startswith("lock-"):
            self._fail(f"the broker cancelled consumer {consumer_tag}")

    def nacked(self, tag: int, multiple: bool) -> None:
        """End the epoch: it is unknown whether the stage has the message."""
        self._fail("the stage did not take a message (basic.nack)")

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """End the epoch: the stage was deleted."""
        self._fail(f"stream {routing_key!r} of the stage is gone ({code} {text})")

    def acked(self, tag: int, multiple: bool) -> None:
        self._session.confirmed(self._channel_generation, tag, multiple)

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Move deliveries of the queue, and process deliveries of a tail."""
        start = 0
        for end in range(1, len(deliveries) + 1):
            if end == len(deliveries) or deliveries[end].consumer_tag != deliveries[start].consumer_tag:
                self._received(deliveries[start:end])
                start = end

    def read_finished(self) -> None:
        """Write the frames that result from one read, and start the next step."""
        self._out.append(self._session.acks(time.monotonic()))
        self._write_out()
        self._advance()

    def _received(self, deliveries: list[RawDelivery]) -> None:
        now = time.monotonic()
        tag = deliveries[0].consumer_tag
        if tag.startswith("work-"):
            self.counts.delivered(len(deliveries))
            moving = self._session.state is EpochState.MOVING
            self._out.append(self._session.delivered(deliveries, now))
            if moving and self._session.state is EpochState.ENDING:
                self._write_out()
                self._begin_anew("the queue, whose leader had lost the link to this node, delivered messages again")
        elif tag == self._tag and self._subscription is _ChannelReads.TAIL:
            messages = [(_offset_of(each), each) for each in deliveries]
            over, frames = self._session.tail_read(self._tail_of, messages, now)
            self._out.append(frames)
            if over:
                self._subscription = _ChannelReads.NONE
        else:
            self._out.append(self._session.passed_over(deliveries, now))

    def _write_out(self) -> None:
        frames = b"".join(self._out)
        self._out.clear()
        if frames:
            self._io.write(frames)

    # -- on the I/O thread: the next step ------------------------------------------------------------------------------

    def _advance(self) -> None:
        session = self._session
        if session.error is not None and self.error is None:
            self._end(session.error)
        if self.state not in _RUNNING:
            self._close_if_done()
        elif self._changing:
            return
        elif self._subscription is _ChannelReads.NONE and (read := session.next_read) is not None:
            self._tail_of, offset = read
            self._subscribe(_ChannelReads.TAIL, self._tail_of, _TAIL_PREFETCH, {STREAM_OFFSET: offset})
        elif session.state is EpochState.MOVING and not self._is_ageing():
            if self.state is RelayState.READING:
                self._became_active()
            self._adjust()

    def _is_ageing(self) -> bool:
        """Return whether the stage is too new for messages; schedule a check if so."""
        if self._subscription is _ChannelReads.AGEING:
            return True
        assert self.declared_at is not None, "there is no stage"  # noqa: S101
        left = self.declared_at + self._options.new_stage_grace - time.monotonic()
        if not self._session.is_new or left <= 0:
            return False
        self._subscription = _ChannelReads.AGEING
        self._io.call_later(left, self._aged)
        return True

    def _aged(self) -> None:
        if self._subscription is _ChannelReads.AGEING:
            self._subscription = _ChannelReads.NONE
        self._advance()

    def _became_active(self) -> None:
        logger.info("%s: moving messages; up to %d of the last ones may be redelivered", self, self._session.tail)
        with self.changed:
            self.counts.activated(self.moved)
            self.unsettled = self._session.unsettled(time.monotonic())
        self._enter(RelayState.ACTIVE)

    def _adjust(self) -> None:
        """Change the subscription if the held deliveries require it."""
        session = self._session
        if self._subscription is _ChannelReads.PAUSED:
            if session.held <= self._options.max_outstanding_bytes / 4:
                self._subscribe_to_queue()
        elif session.wants_pause and self._subscription is _ChannelReads.QUEUE:
            self._change(_ChannelReads.PAUSED, None)
        elif session.wants_subscription:
            self._subscribe_to_queue()

    def _subscribe_to_queue(self) -> None:
        prefetch = self._session.prefetch
        self._session.prefetch_granted = prefetch
        self.counts.subscribed(self.moved, self._session.outstanding, prefetch)
        self._subscribe(_ChannelReads.QUEUE, self._options.queue, prefetch, NO_STREAM)

    def _subscribe(self, to: _ChannelReads, queue: str, prefetch: int, arguments: Mapping[str, Any]) -> None:
        tag = self._new_tag("work" if to is _ChannelReads.QUEUE else "tail")
        self._change(to, tag, SetPrefetch(prefetch), Consume(queue, tag, arguments=arguments))

    def _change(self, to: _ChannelReads, tag: str | None, *steps: Step) -> None:
        """Cancel the subscription and perform the steps to the next one."""
        cancel = () if self._tag is None else (Cancel(self._tag),)
        self._subscription, self._tag, self._changing = to, tag, True
        self._io.run(_all(*cancel, *steps), self._subscription_changed)

    def _subscription_changed(self, outcome: object) -> None:
        self._changing = False
        if isinstance(outcome, StepRefused) and is_a_stream(outcome):
            self._end(
                ConfigurationError(f"{self._options.queue!r} is a stream, which needs no stage: read it directly")
            )
        elif isinstance(outcome, StepRefused):
            logger.warning("%s: %s; trying again", self, outcome)  # the channel is lost
        elif not isinstance(outcome, Exception):
            if isinstance(outcome, QueueState):
                with self.changed:
                    self.counts.renewed(outcome)
            elif self._subscription is _ChannelReads.QUEUE and self.counts.wants_count:
                self._count()
            self._advance()

    def _fail(self, why: str) -> None:
        """End the epoch. The next one reads the tail."""
        if self._session.state in (EpochState.CLOSED, EpochState.ENDING):
            return
        self._session.failed()
        self._begin_anew(why)

    def _begin_anew(self, why: str) -> None:
        """Open another channel for the next epoch."""
        self._session.statistics.failures += 1
        if self.state in _RUNNING:
            logger.warning("%s: %s; starting again from the end of the stage", self, why)
        self._io.reopen_channel()

    def _tick(self) -> None:
        now = time.monotonic()
        session = self._session
        if self._blocked:
            session.waited(now)
        elif session.overdue(now):
            session.failed()
            session.statistics.failures += 1
            logger.warning("%s: nothing was confirmed for %g s; reconnecting", self, self._options.confirm_timeout)
            self._io.discard("the stage does not confirm")
        elif session.state is EpochState.MOVING and self.state in _RUNNING and now >= self._count_at:
            self._count_at = now + _COUNT_EVERY
            self._count()
        if self.state is not RelayState.ENDED:
            self._io.call_later(_TICK, self._tick)

    def _wants_to_know(self) -> bool:
        """Return whether it matters that the queue is empty."""
        return bool(self._session.tail) or not self.counts.has_moved(self.moved)

    def _count(self) -> None:
        self._io.run(_all(CheckQueue(self._options.queue)), self._counted)

    def _counted(self, count: object) -> None:
        if not isinstance(count, QueueState):
            return
        subscribed = self._subscription is _ChannelReads.QUEUE and not self._changing
        unknown = self.counts.unknown
        with self.changed:
            self.counts.counted(count, self._session.outstanding)
            others = self.counts.others(count.consumers, self.moved, subscribed=subscribed)
            self.changed.notify_all()
        self._session.shared = self.counts.shared
        if unknown and not count.in_doubt:
            self._count()  # two in a row show that the queue seems empty
        now = time.monotonic()
        if self.counts.drained:
            self._session.drained(now)
        elif subscribed and self.counts.wants_renewal and self._wants_to_know():
            self._change(_ChannelReads.PAUSED, None, CheckQueue(self._options.queue))
        if self._session.state is EpochState.MOVING:
            with self.changed:
                self.unsettled = self._session.unsettled(now)
                self.changed.notify_all()
        if others:
            logger.warning(
                "%s: the queue has other consumers (%d), such as a relay of another stage: each message goes to only "
                "one of them (the active one, if only one is active at a time), so the stage may miss some. Use one "
                "stage for the queue, and let every query read it",
                self,
                others,
            )

    # -- on the I/O thread: the end ------------------------------------------------------------------------------------

    def _end(self, error: ReliableMQError) -> None:
        """End with an error, because no more messages can be moved."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
        self._begin_to_close()

    def _begin_to_close(self) -> None:
        if self.state not in _RUNNING:
            return
        if self._subscription is _ChannelReads.QUEUE and self._tag is not None:
            self._enter(RelayState.CANCELLING)
            self._io.run(_all(Cancel(self._tag)), self._queue_cancelled)
            self._subscription, self._tag = _ChannelReads.NONE, None
        else:
            self._enter(RelayState.CONFIRMING)
            self._close_if_done()

    def _queue_cancelled(self, _outcome: object) -> None:
        if self.state is RelayState.CANCELLING:
            self._enter(RelayState.CONFIRMING)
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Disconnect once everything is confirmed and the broker has read the acks."""
        session = self._session
        if self.state is not RelayState.CONFIRMING or (session.state is EpochState.MOVING and session.unconfirmed):
            return
        if self._subscription is not _ChannelReads.AGEING:  # else the stage must stay new for the next epoch
            self._out.append(session.ending(time.monotonic()))
        self._write_out()
        self._enter(RelayState.DISCONNECTING)
        self._io.run(_all(CheckQueue(self._options.queue)), self._finish)

    def _finish(self, _outcome: object = None) -> None:
        self._enter(RelayState.ENDED)
        self._io.stop(_CLOSE_GRACE)

    def _new_tag(self, kind: str) -> str:
        self._tags += 1
        return f"{kind}-{self._tags}"

    def __repr__(self) -> str:
        return f"<StageRelay {self._options.queue} -> {self._options.stage}>"


def _wait(rounds: int) -> float:
    return min(0.1 * 2.0 ** min(rounds, 10), _LONGEST_WAIT)


def _all(*steps: Step) -> StepGenerator:
    """Perform the steps and return the outcome of the last one."""
    outcome = None
    for step in steps:
        outcome = yield step
    return outcome


def _offset_of(delivery: RawDelivery) -> int:
    offset = stream_offset(delivery.properties)
    if offset is None:
        raise ConsumeError("a message of a stage came without an offset: it is not a stream")
    return offset
