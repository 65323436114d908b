"""A publishing lane on asyncio: one connection, its publishing session, and the window that callers await.

A caller admits its publish to the window and leaves it in the inbox; the lane takes whole inboxes, lets the session
decide, writes what the session encodes, and settles what the session settled. One turn of the loop serves all that came
in meanwhile, so that a publish costs no task, no lock and no write of its own.

Invariants:

- everything runs on one event loop, and nothing here awaits but for callers;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or when the
  lane ends; whoever is cancelled while awaiting, what was admitted stays as it is;
- callers that wait for the window are admitted in the order in which they came, by the lane itself: one that is
  cancelled first has not been admitted;
- every wait of a caller ends: with what it waits for, at its deadline, or when the lane ends.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import random
import time
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from reliable_mq.aio.connector import AsyncConnector
from reliable_mq.core.codec import CodecError, Properties
from reliable_mq.core.publication import Outcome, Reply
from reliable_mq.errors import BrokerUnavailable, PublishBlocked, PublishUnconfirmed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.aio.event_loop import Timer
    from reliable_mq.core.codec import RawDelivery
    from reliable_mq.core.publisher_options import PublisherOptions
    from reliable_mq.core.publishing import PublishingSession
    from reliable_mq.core.recovery import Loss
    from reliable_mq.core.setup import ServerInfo
    from reliable_mq.errors import ReliableMQError

__all__ = ["AsyncPublishingLane"]

logger = logging.getLogger(__name__)

_WRITE_BYTES = 128 * 1024  # encoded and written in one piece
_BUFFERED_BYTES = 512 * 1024  # not yet taken by the socket, above which nothing more is encoded
_PUMPED_AT = 64  # publishes in the inbox that are not left to wait for the next turn of the loop
_FAILURES_KEPT = 100  # failed confirmations that nobody has looked at, kept to be raised when the publisher is left
_FAILURES_SAID_EVERY = 10.0  # seconds, at least, between two log lines about such failures
_CLOSE_GRACE = 2.0  # seconds for the closing handshake, beyond the caller's own timeout


class AsyncPublishingLane:
    """See the module. Made on the loop that it is to run on.

    Attributes:
        loop: the event loop.
        session: what decides; read-only for others.
        fatal: why the lane has ended by itself, if it has.
        forked: whether this is a copy in a forked child.
    """

    def __init__(self, options: PublisherOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.window = options.window
        self.session: PublishingSession[AsyncConfirmation] = options.new_session(random.Random())
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self.reconnects = 0
        self.connected = False
        self._delivery_timeout = options.delivery_timeout
        self._raise_when_blocked = options.raise_when_blocked
        self._connection_lost = False
        self._changed: list[asyncio.Future[None]] = []  # of those who wait for the state to change
        self._flushing: list[tuple[float, asyncio.Future[None]]] = []  # until which moment all is to be settled
        self._inbox: list[AsyncConfirmation] = []
        self._room: deque[tuple[AsyncConfirmation, asyncio.Future[bool]]] = deque()  # who waits for the window
        self._oldest: float | None = None  # when the oldest unsettled publish was submitted
        self._woken = False
        self._closed = False
        self._failures: deque[AsyncConfirmation] = deque(maxlen=_FAILURES_KEPT)
        self._unseen = 0  # failures that nobody has looked at, those that _failures has dropped included
        self._unwatched = 0  # of those, not said in the log yet
        self._unwatched_said_at = float("-inf")
        self._attempts_failed = 0
        self._last_error: ReliableMQError | None = None
        self._generation = 0
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0
        self._io = AsyncConnector(
            name=options.name,
            settings=options.settings,
            setup=options.setup,
            client=self,
            recovery=options.new_recovery(),
        )
        _lanes.add(self)

    # For callers

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    def check_usable(self) -> None:
        """Raise UsageError on another event loop than the publisher's, or in a forked child."""
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its connection belongs to the parent; make one in the child"
            )
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("this publisher belongs to another event loop; make one for each")

    async def wait_connected(self, limit: float, attempts: int = 1) -> ReliableMQError | None:
        """Wait until the lane is connected or ``attempts`` more have failed. Returns why it is not connected, or None.

        Where the error is permanent the lane has ended (``fatal``); else it goes on trying.
        """
        self.check_usable()
        enough = self._attempts_failed + attempts
        try:
            async with asyncio.timeout(limit if limit < float("inf") else None):
                while not (self.connected or self._attempts_failed >= enough or self.fatal is not None or self._closed):
                    change = self.loop.create_future()
                    self._changed.append(change)
                    await change
        except TimeoutError:
            pass
        if self.connected:
            return None
        if self._closed and self.fatal is None:
            return UsageError("this publisher was closed while it was connecting")
        error = self.fatal or self._last_error or BrokerUnavailable(f"no answer within {limit:g} s")
        return copy.copy(error)  # each is raised once: raising adds frames to its traceback

    def take(self, confirmation: AsyncConfirmation) -> bool:
        """Take a publish in, where the window has room for it. False where it has none.

        Raises:
            PublishBlocked: the broker blocks publishing, and that is to be raised.
            UsageError: closed, on another loop, or in a forked child.
        """
        if self.forked:
            self.check_usable()
        if self._closed or self.fatal is not None or (self._raise_when_blocked and self.session.blocked_reason):
            raise self._refusal(confirmation)
        if asyncio.get_running_loop() is not self.loop:
            self.check_usable()
        if self._room or not self.window.fits(confirmation.size):
            return False
        self._admit(confirmation)
        if len(self._inbox) >= _PUMPED_AT and self.connected:
            self._io.guard(self._pump)
        return True

    async def wait_for_room(self, confirmation: AsyncConfirmation) -> None:
        """Take a publish in once the window has room for it.

        Raises:
            PublishUnconfirmed: no room within the publish's own deadline; it was not sent.
            PublishBlocked: likewise, while the broker blocks publishing.
            UsageError: closed meanwhile.
        """
        seconds = self._delivery_timeout if confirmation.timeout is None else confirmation.timeout
        admitted: asyncio.Future[bool] = self.loop.create_future()
        late = self.loop.call_later(seconds, _resolve, admitted, False)
        self._room.append((confirmation, admitted))
        try:
            if await admitted:
                return
        finally:
            late.cancel()
        if self._closed or self.fatal is not None or self.session.blocked_reason:
            raise self._refusal(confirmation)
        raise PublishUnconfirmed(
            f"{confirmation} was never sent: the window ({self.window.max_count} messages, "
            f"{self.window.max_bytes} bytes) was full for {seconds} s",
            message_id=confirmation.message_id,
            sent=False,
        )

    async def flush(self, limit: float) -> bool:
        """Wait until everything submitted before is settled. False where ``limit`` seconds were not enough."""
        self.check_usable()
        return await self._wait_settled_before(time.monotonic(), limit)

    async def close(self, limit: float) -> None:
        """Settle everything within ``limit`` seconds, give up the rest, disconnect.

        May be cancelled and called again, and by several tasks: each waits for the end.
        """
        self.check_usable()
        self._closed = True
        self._tell_change()
        self._refuse_waiting()
        if not await self._wait_settled_before(float("inf"), limit):
            self._end()
        await self._io.close(_CLOSE_GRACE)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Give up what is unsettled, and disconnect without waiting for it."""
        self._closed = True
        self._refuse_waiting()
        self._end()
        self._io.stop()

    def take_failures(self) -> tuple[list[AsyncConfirmation], int]:
        """The failed confirmations that nobody has looked at (the last hundred), and how many there are in all."""
        unseen = [failed for failed in self._failures if not failed.seen]
        count, self._unseen = self._unseen, 0
        self._failures.clear()
        return unseen, count

    def not_reported(self, confirmations: Iterable[AsyncConfirmation]) -> None:
        """The report that was to tell of these will not be made: their failures are told at the end."""
        for confirmation in confirmations:
            if confirmation.seen:
                confirmation.seen = False
                if confirmation.outcome not in (None, Outcome.CONFIRMED):
                    self._failures.append(confirmation)
                    self._unseen += 1

    def failure_seen(self) -> None:
        """Somebody looked at a failure."""
        self._unseen -= 1

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
    def outstanding(self) -> int:
        """Publishes submitted and not settled."""
        return len(self._inbox) + self.session.outstanding

    @property
    def stalled_seconds(self) -> float:
        """For how long the event loop has stood still, see `AsyncConnector`."""
        return self._io.stalled_seconds

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled publish was submitted; 0 where there is none. For any thread."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(time.monotonic() - oldest, 0.0)

    # What the connection reports

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """A channel is open, the topology is declared and confirms are selected."""
        self._generation = generation
        self.reconnects += self._connection_lost
        self._connection_lost = False
        self.session.channel_opened(generation, channel, frame_max, time.monotonic())
        self.connected = True
        self._tell_change()
        self._pump()

    def lost(self, generation: int, loss: Loss) -> None:
        """The channel is gone."""
        reply = Reply(loss.code, loss.text) if loss.by_broker and loss.code is not None else None
        self.session.channel_lost(generation, reply, connection=loss.scope == "connection")
        self.connected = False
        self._connection_lost = loss.scope == "connection"
        self._pump()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt to connect failed."""
        self._attempts_failed += 1
        self._last_error = error
        if not will_retry:
            self.fatal = error
            self._refuse_waiting()
            self._end()
        self._tell_change()

    def blocked(self, reason: str) -> None:
        """``connection.blocked``."""
        logger.warning("the broker blocks publishing: %s", reason)
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

    def cancelled(self, consumer_tag: str) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a cancel on a publishing channel")

    # The work

    def _admit(self, confirmation: AsyncConfirmation) -> None:
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self._io.guard, self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False
        self._pump()

    def _pump(self) -> None:
        """Take in what was submitted, write what may be written, settle what is settled, see to the next wake-up."""
        session, io = self.session, self._io
        self._accept_inbox()
        now = time.monotonic()
        session.tick(now)
        if session.channel_in_doubt(now):
            io.discard(f"no confirm for any of {session.on_wire} outstanding publishes in time")
        else:
            while io.write_buffer_size() < _BUFFERED_BYTES and (data := session.data_to_send(now, _WRITE_BYTES)):
                io.write(data)
        self._settle()
        self._schedule(now)

    def _accept_inbox(self) -> None:
        if self._inbox:
            taken, self._inbox = self._inbox, []
            self.session.accept(taken)

    def _settle(self) -> None:
        session = self.session
        if not session.settled and not session.freed_count:
            return
        settled, session.settled = session.settled, []
        unwatched: AsyncConfirmation | None = None
        confirmed = Outcome.CONFIRMED
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
        if self._oldest is None and self._inbox:
            self._oldest = self._inbox[0].accepted_at
        if self._room:
            self._admit_waiting()
        if self._flushing:
            self._tell_flushing()
        if unwatched is not None:
            self._say_unwatched(unwatched)

    def _admit_waiting(self) -> None:
        room, window = self._room, self.window
        while room:
            confirmation, admitted = room[0]
            if not admitted.done():  # else it was cancelled, or is late
                if not window.fits(confirmation.size):
                    return
                self._admit(confirmation)
                admitted.set_result(True)
            room.popleft()

    def _refuse_waiting(self) -> None:
        while self._room:
            _resolve(self._room.popleft()[1], False)

    def _say_unwatched(self, latest: AsyncConfirmation) -> None:
        now = time.monotonic()
        if now - self._unwatched_said_at >= _FAILURES_SAID_EVERY:
            logger.warning("%d publishes failed that nobody waits for; the last: %s", self._unwatched, latest.failure())
            self._unwatched, self._unwatched_said_at = 0, now

    def _end(self) -> None:
        """Give up what is unsettled."""
        self._accept_inbox()
        self.session.abandon_all()
        self._settle()

    def _schedule(self, now: float) -> None:
        at = self.session.next_wakeup()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._io.call_later(max(at - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _refusal(self, confirmation: AsyncConfirmation) -> ReliableMQError:
        if self.fatal is not None:
            return copy.copy(self.fatal)
        if self._closed:
            return UsageError("this publisher is closed; nothing was sent")
        reason = self.session.blocked_reason or ""
        return PublishBlocked(
            f"{confirmation} was not sent: the broker has blocked publishing ({reason})",
            message_id=confirmation.message_id,
            reason=reason,
        )

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    # Flushing

    def _settled_before(self, moment: float) -> bool:
        return self._oldest is None or self._oldest > moment

    async def _wait_settled_before(self, moment: float, limit: float) -> bool:
        if self._settled_before(moment):
            return True
        settled = self.loop.create_future()
        entry = moment, settled
        self._flushing.append(entry)
        try:
            async with asyncio.timeout(limit if limit < float("inf") else None):
                await settled
        except TimeoutError:
            return False
        finally:
            self._flushing.remove(entry)
        return True

    def _tell_flushing(self) -> None:
        for moment, settled in self._flushing:
            if not settled.done() and self._settled_before(moment):
                settled.set_result(None)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


# A forked child has copies of the lanes, whose loops and sockets are the parent's.
_lanes: WeakSet[AsyncPublishingLane] = WeakSet()


def _forget_in_child() -> None:
    for lane in _lanes:
        lane.forked = True


os.register_at_fork(after_in_child=_forget_in_child)
