"""A publisher's connection: what was submitted goes to the publishing session, and what it decides is carried out.

The same on both faces: it lives on the loop of its connection, an I/O thread's or asyncio's. Callers admit a publish to
the window and leave it in the inbox; the lane takes whole inboxes, lets the session decide, writes what the session
encodes, and settles what the session settled. One wake-up serves all that came in meanwhile. A face adds its connection
and its inbox, and how its callers wait.

Invariants:

- the session is touched on the loop alone; no user code runs, and nothing blocks, there;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or when the
  lane ends;
- what callers look at (the window, failures, whether it is connected) changes under ``lock``.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from reliable_mq._util.hooks import ForkStage, at_fork
from reliable_mq.codec import CodecError, Properties
from reliable_mq.connection.new_queues import QueueRecord
from reliable_mq.connection.wakeup import Wakeup
from reliable_mq.core.channel_setup import round_trip
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication
from reliable_mq.errors import BrokerUnavailable, PublishBlocked, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from reliable_mq.codec import RawDelivery
    from reliable_mq.connection.interfaces import TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.publisher.session import PublishingSession
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError

__all__ = ["CLOSE_GRACE", "BasePublisherChannel", "ObservedPublication", "PublisherConnection", "unwatched_logger"]

logger = logging.getLogger(__name__)
unwatched_logger = logger.getChild("unwatched")
"""Says how many publishes have failed with nobody to hear of it: no callback, nobody who waits."""

CLOSE_GRACE = 2.0
"""Seconds for the closing handshake, beyond the caller's own timeout."""

_BUFFERED_BYTES = 512 * 1024  # not yet taken by the socket, above which nothing more is encoded
_FAILURES_KEPT = 100  # failed confirmations that nobody has looked at, kept to be raised when the publisher is left
_FAILURES_SAID_EVERY = 10.0  # seconds, at least, between two log lines about such failures


class PublisherConnection(Protocol):
    """The connection of a face, on its loop."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Send whole frames on the ready channel; does nothing where none is ready."""

    @property
    def write_buffer_size(self) -> Callable[[], int]:
        """Bytes written that the kernel has not taken yet."""

    def call_later(self, delay: float, fn: Callable[[], None], /) -> TimerHandle:
        """Run `fn` on the loop in `delay` seconds."""

    def run(self, generator: StepGenerator, done: Callable[[Any], None], /) -> None:
        """Carry out steps on the ready channel; `done` gets the result or the exception, never inside this call."""

    def discard(self, reason: str, /) -> None:
        """Abort the connection: the channel is in doubt."""


class ObservedPublication(Publication):
    """A publish whose user may be told of its outcome, in the way of a face."""

    __slots__ = ()

    def settled(self) -> None:
        """The outcome is written: tell the watchers. Called under the lock."""
        raise NotImplementedError


P = TypeVar("P", bound=ObservedPublication)


class BasePublisherChannel(Generic[P]):
    """See the module.

    Args:
        options: of the publisher.
        lock: guards what callers look at; they may be on other threads.

    Attributes:
        window: how much may be outstanding.
        session: decides; read-only for others.
        fatal: why the lane has ended by itself, if it has.
        forked: whether this is a copy in a forked child, where the lane's loop does not exist.
        reconnects: connections lost and made again.
        connected: whether the broker takes messages.
        largest_body: see `ChannelSink`; nobody looks at the body of a return.
    """

    write_bytes: int  # encoded and written in one piece
    _io: PublisherConnection

    def __init__(self, options: PublisherOptions, lock: AbstractContextManager[object]) -> None:
        self.window = options.window
        self.session: PublishingSession[P] = options.new_session(random.Random())
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self.reconnects = 0
        self.connected = False
        self.largest_body = 0
        self._guard = lock
        self._setup = options.setup
        self._record = QueueRecord(options.settings.virtual_host, options.new_queue_grace)
        self._connection_lost = False
        self._delivery_timeout = options.delivery_timeout
        self._raise_when_blocked = options.raise_when_blocked
        self._oldest: float | None = None  # when the oldest unsettled publish was submitted
        self._woken = False
        self._closed = False
        self._failures: deque[P] = deque(maxlen=_FAILURES_KEPT)
        self._unseen = 0  # failures that nobody has looked at, those that _failures has dropped included
        self._unwatched = 0  # of those, not said in the log yet
        self._unwatched_said_at = float("-inf")
        self._attempts_failed = 0
        self._last_error: ReliableMQError | None = None
        self._generation = 0
        self._alarm = Wakeup(self._pump)
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0
        _lanes.add(self)

    # What a face adds

    def _accept_inbox(self) -> None:
        """Give to the session what was submitted."""
        raise NotImplementedError

    def _first_in_inbox(self) -> P | None:
        """What was submitted first of what the session does not have yet. Called under the lock."""
        raise NotImplementedError

    def _tell_change(self) -> None:
        """Tell who waits for the lane to connect or to end. Called under the lock."""
        raise NotImplementedError

    def _tell_settled(self) -> None:
        """Tell who waits for room or for what was submitted before. Called under the lock."""
        raise NotImplementedError

    # For callers

    def take_failures(self) -> tuple[list[P], int]:
        """The failed confirmations that nobody has looked at (the last hundred), and how many there are in all."""
        with self._guard:
            unseen = [failed for failed in self._failures if not failed.seen]
            count, self._unseen = self._unseen, 0
            self._failures.clear()
        return unseen, count

    def not_reported(self, confirmations: Iterable[P]) -> None:
        """The report that was to tell of these will not be made: their failures are told at the end."""
        with self._guard:
            for confirmation in confirmations:
                if confirmation.seen:
                    confirmation.seen = False
                    if confirmation.outcome not in (None, Outcome.CONFIRMED):
                        self._failures.append(confirmation)
                        self._unseen += 1

    def failure_seen(self) -> None:
        """Somebody looked at a failure; the caller holds the lock."""
        self._unseen -= 1

    def forget(self) -> None:
        """This is a copy in a forked child: the connection and the loop are the parent's."""
        self.forked = True

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled."""
        raise NotImplementedError

    @property
    def stalled_seconds(self) -> float | None:
        """For how long the event loop has stood still; None without one."""
        return None

    @property
    def tried(self) -> bool:
        """Whether an attempt to connect has ended, well or not."""
        return self.connected or self._attempts_failed > 0

    @property
    def frame_max(self) -> int:
        """Bytes that a frame may have, as negotiated."""
        return self.session.frame_max

    @property
    def blocked_seconds(self) -> float:
        """How long the broker has blocked publishing, in all, the present time included."""
        since = self._blocked_since
        return self._blocked_seconds + (0.0 if since is None else time.monotonic() - since)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled publish was submitted; 0 where there is none. For any thread."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(time.monotonic() - oldest, 0.0)

    def _check_not_forked(self) -> None:
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its connection belongs to the parent; make one in the child"
            )

    def _why_not_connected(self, waited: float) -> ReliableMQError | None:
        if self.connected:
            return None
        if self._closed and self.fatal is None:
            return UsageError("this publisher was closed while it was connecting")
        error = self.fatal or self._last_error or BrokerUnavailable(f"no answer within {waited:g} s")
        return copy.copy(error)  # each is raised once: raising adds frames to its traceback

    @property
    def _takes_none(self) -> bool:
        """Whether there is a `_refusal` for what is submitted now."""
        return (
            self._closed or self.fatal is not None or (self._raise_when_blocked and bool(self.session.blocked_reason))
        )

    def _refusal(self, confirmation: P) -> ReliableMQError:
        if self.fatal is not None:
            return copy.copy(self.fatal)
        if self._closed:
            return UsageError("this publisher is closed; nothing was sent")
        reason = self.session.blocked_reason or ""
        return PublishBlocked(
            f"{confirmation} was not sent: the broker has blocked publishing ({reason})",
            message_id=confirmation.message.message_id,
            reason=reason,
        )

    def _settled_before(self, moment: float) -> bool:
        return self._oldest is None or self._oldest > moment

    # On the loop: what the connection reports

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Return the steps that make a channel ready."""
        return self._setup(server, self._record.maker(server))

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """A channel is open, the topology is declared and confirms are selected."""
        self._generation = generation
        self.reconnects += self._connection_lost
        self._connection_lost = False
        if self._record.ready(server):
            self.session.connection_replaced()
        self.session.channel_opened(generation, channel, frame_max, time.monotonic(), self._record.queues)
        with self._guard:
            self.connected = True
            self._tell_change()
        self._pump()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """The channel is gone."""
        reply = BrokerReply(loss.code, loss.text) if loss.by_broker and loss.code is not None else None
        self._record.lost(self.session.proven)
        self.session.channel_lost(generation, reply, connection=loss.scope == "connection")
        with self._guard:
            self.connected = False
        self._connection_lost = loss.scope == "connection"
        self._pump()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt to connect failed."""
        with self._guard:
            self._attempts_failed += 1
            self._last_error = error
            if not will_retry:
                self.fatal = error
            self._tell_change()
        if not will_retry:
            self._end()

    def blocked(self, reason: str) -> None:
        """``connection.blocked``."""
        logger.warning("the broker blocks publishing: %s", printable(reason))
        self._blocked_since = time.monotonic()
        self.session.blocked(reason)

    def unblocked(self) -> None:
        """``connection.unblocked``."""
        logger.info("the broker takes publishes again")
        self._blocked_seconds, self._blocked_since = self.blocked_seconds, None
        self.session.unblocked(time.monotonic())
        self._pump()

    def acked(self, tag: int, multiple: bool) -> None:
        """``basic.ack``."""
        self.session.acked(self._generation, tag, multiple, time.monotonic())

    def nacked(self, tag: int, multiple: bool) -> None:
        """``basic.nack``."""
        self.session.nacked(self._generation, tag, multiple, time.monotonic())

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """``basic.return``."""
        try:
            message_id = Properties(properties).message_id
        except CodecError:
            message_id = None
        self.session.returned(self._generation, code, text, message_id)

    def read_finished(self) -> None:
        """All that was read from the socket at once is handled: settle it together."""
        self._pump()

    def write_drained(self) -> None:
        """The socket has taken what was buffered."""
        self._pump()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a delivery on a publishing channel")

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-ok on a publishing channel")

    def got_empty(self) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-empty on a publishing channel")

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a delivery on a publishing channel")

    def cancelled(self, consumer_tag: str) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a cancel on a publishing channel")

    # On the loop: the work

    def _pump(self) -> None:
        """Take in what was submitted, write what may be written, settle what is settled, see to the next wake-up."""
        session, io = self.session, self._io
        self._accept_inbox()
        now = time.monotonic()
        session.tick(now)
        if session.channel_in_doubt(now):
            io.discard(session.doubt)
        else:
            while io.write_buffer_size() < _BUFFERED_BYTES and (data := session.data_to_send(now, self.write_bytes)):
                io.write(data)
            if session.question_due(now):
                session.asked(now)
                io.run(round_trip(), self._answered)
        self._settle()
        self._alarm.set(session.next_wakeup(), now, self._io.call_later)

    def _answered(self, outcome: object) -> None:
        if not isinstance(outcome, Exception):  # else the channel is lost, too
            self.session.answered(time.monotonic())
            self._pump()

    def _settle(self) -> None:
        session = self.session
        if not session.settled and not session.freed_count:
            return
        settled, session.settled = session.settled, []
        unwatched: P | None = None
        confirmed = Outcome.CONFIRMED
        with self._guard:
            for confirmation in settled:
                if confirmation.outcome is not confirmed:
                    if confirmation.watchers is None and not confirmation.seen:
                        unwatched = confirmation
                        self._unwatched += 1
                    if not confirmation.seen:
                        self._failures.append(confirmation)
                        self._unseen += 1
                    confirmation.settled()
                elif confirmation.watchers is not None:
                    confirmation.settled()
            self.window.release(session.freed_count, session.freed_bytes)
            session.freed_count = session.freed_bytes = 0
            self._oldest = session.oldest_accepted_at
            if self._oldest is None and (first := self._first_in_inbox()) is not None:
                self._oldest = first.accepted_at
            self._tell_settled()
        if unwatched is not None:
            self._say_unwatched(unwatched)

    def _say_unwatched(self, latest: P) -> None:
        now = time.monotonic()
        if now - self._unwatched_said_at >= _FAILURES_SAID_EVERY:
            unwatched_logger.warning(
                "%d publishes failed that nobody waits for; the last: %s", self._unwatched, latest.failure()
            )
            self._unwatched, self._unwatched_said_at = 0, now

    def _end(self) -> None:
        """Give up what is unsettled."""
        self._accept_inbox()
        self.session.abandon_all()
        self._settle()


# A forked child has copies of the lanes, whose loops and sockets are the parent's.
_lanes: WeakSet[BasePublisherChannel[Any]] = WeakSet()


def _forget_in_child() -> None:
    for lane in _lanes:
        lane.forget()


at_fork(ForkStage.MARK, _forget_in_child)
