"""The way into an outbox on the asyncio face: what a publisher with one does in place of publishing.

Storing and relaying run on threads of their own (`reliable_mq.outbox.writer`, `reliable_mq.outbox.relay`); the event
loop never waits for a disk or a database.

Invariants: every confirmation that ``submit`` returned is settled, on the event loop, by the writer or by who awaits it
beyond its deadline; who waits for room is served in order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakSet

from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.core.outbox import NewRow
from reliable_mq.core.outbox_statistics import OutboxStatistics
from reliable_mq.core.stored import StoredPublication
from reliable_mq.core.window import PublishWindow
from reliable_mq.errors import OutboxError, UsageError
from reliable_mq.outbox.relay import OutboxRelay
from reliable_mq.outbox.writer import OutboxWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reliable_mq.aio.carrier import AsyncRowCarrier
    from reliable_mq.core.outbox import Settlement
    from reliable_mq.core.publication import Receipt
    from reliable_mq.core.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.outbox.protocol import Outbox

__all__ = ["AsyncStoredConfirmation", "AsyncStoringLane"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILURES_KEPT: Final = 100  # that nobody has looked at, to be raised when the publisher is left
_FAILURES_SAID_EVERY: Final = 10.0  # seconds
_LOOK_INTO_OUTBOX: Final = (0.01, 0.25)  # seconds between two looks into the outbox, the first and the longest
_GRACE: Final = 2.0  # seconds for threads to end, beyond the caller's own timeout


class AsyncStoredConfirmation(StoredPublication, AsyncConfirmation):
    """What ``submit`` returns where there is an outbox: known once the message is durable there."""

    __slots__ = ("error",)

    home: AsyncStoringLane

    def __await__(self) -> Generator[object, None, Receipt]:
        """Wait as on every confirmation; no longer than the message's own deadline, after which it may be stored."""
        if self.outcome is None:
            limit = self.accepted_at + self.home.timeout_of(self) - time.monotonic()
            late = self.home.loop.call_later(max(limit, 0.0), self.home.give_up, self)
            try:
                return (yield from super().__await__())
            finally:
                late.cancel()
        return (yield from super().__await__())


class AsyncStoringLane:
    """See the module. For one event loop.

    Args:
        outbox: where to store.
        carrier: publishes the rows of the relay.
        options: of the publisher. As much may be submitted and not stored as may be outstanding without an outbox.
        measured: whether to count what is in the outbox now and then, for metrics.

    Attributes:
        loop: the event loop.
        fatal: None; nothing ends an outbox for good.
        forked: whether this is a copy in a forked child.
        relay: the relay.
    """

    def __init__(self, outbox: Outbox, carrier: AsyncRowCarrier, options: PublisherOptions, *, measured: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self.outbox = outbox
        self._carrier = carrier
        self._window = PublishWindow(options.max_outstanding, options.window.max_bytes)
        self._store_timeout = options.delivery_timeout
        self._room: deque[tuple[AsyncStoredConfirmation, asyncio.Future[bool]]] = deque()
        self._closed = False
        self._failures: deque[AsyncStoredConfirmation] = deque(maxlen=_FAILURES_KEPT)
        self._unseen = 0
        self._said_at = float("-inf")
        statistics = OutboxStatistics()
        self._writer: OutboxWriter[AsyncStoredConfirmation] = OutboxWriter(
            outbox,
            name=f"{options.name}-outbox",
            on_stored=self._stored,
            on_settled=self._settled,
            statistics=statistics,
        )
        self.relay = OutboxRelay(
            outbox,
            carrier,
            settle=self._writer.settle,
            limit=options.max_outstanding,
            name=f"{options.name}-relay",
            statistics=statistics,
            measured=measured,
        )
        _lanes.add(self)

    # For callers

    async def start(self) -> None:
        """Open the outbox, and start storing and relaying.

        Raises:
            OutboxError: the outbox cannot be opened.
        """
        await asyncio.to_thread(self._start)

    async def submit(self, confirmation: AsyncStoredConfirmation, row: NewRow) -> None:
        """Store a message; waits for room, up to the publish's own deadline.

        Raises:
            OutboxError: no room in time; it was not stored.
            UsageError: closed, on another loop, or in a forked child.
        """
        self.check_usable()
        self._check_open()
        if self._room or not self._window.fits(confirmation.size):
            await self._wait_for_room(confirmation)
        else:
            self._window.take(confirmation.size)
        self._writer.store(confirmation, row)

    async def flush(self, limit: float) -> int:
        """Wait until every message in the outbox is published, or will not be by itself.

        Returns how many are left after ``limit`` seconds.
        """
        self.check_usable()
        deadline = time.monotonic() + limit
        if not await self._wait_stored(limit):
            return max(self._window.count, 1)
        _, last = await asyncio.to_thread(self.outbox.backlog)
        return await self._wait_relayed(last, deadline, lambda: True)

    async def close(self, limit: float, worth_waiting: Callable[[], bool]) -> None:
        """Store all that was submitted; relay for up to ``limit`` seconds while it is ``worth_waiting``; end.

        May be cancelled and called again, and by several tasks.
        """
        self.check_usable()
        deadline = time.monotonic() + limit
        self._refuse_waiting()
        left = 0
        try:
            if await self._wait_stored(limit):
                left = await self._wait_relayed(None, deadline, worth_waiting)
        except OutboxError:
            logger.exception("closing the publisher of %r", self.outbox)
        # What is on its way to a broker that is not there stays where it is.
        self.relay.stop(max(deadline - time.monotonic(), 0.0) if worth_waiting() else 0.0)
        await asyncio.to_thread(self.relay.join, max(deadline - time.monotonic(), 0.0) + _GRACE)
        self._carrier.cancel()
        self._writer.stop()
        await asyncio.to_thread(self._writer.join, max(deadline - time.monotonic(), 0.0) + _GRACE)
        if left:
            logger.warning("%d messages stay in %r, to be published at the next start", left, self.outbox)
        await asyncio.to_thread(self.outbox.close)

    def abort(self) -> None:
        """End without waiting. What is stored stays."""
        self._refuse_waiting()
        self.relay.stop(0.0)
        self._carrier.cancel()
        self._writer.stop()

    def take_failures(self) -> tuple[list[AsyncStoredConfirmation], int]:
        """The failed confirmations that nobody has looked at (the last hundred), and how many there are in all."""
        unseen = [failed for failed in self._failures if not failed.seen]
        count, self._unseen = self._unseen, 0
        self._failures.clear()
        return unseen, count

    def give_up(self, confirmation: AsyncStoredConfirmation) -> None:
        """Its deadline has passed, and the writer has not answered."""
        if confirmation.outcome is None:
            error = OutboxError(
                f"{confirmation} was not stored in time, and may be stored yet: writing to {self.outbox!r} hangs",
                message_id=confirmation.message_id,
            )
            error.may_have_arrived = True
            confirmation.stored(error)
            confirmation.settled()

    def timeout_of(self, confirmation: AsyncStoredConfirmation) -> float:
        """Seconds that a message may take to be stored."""
        return self._store_timeout if confirmation.timeout is None else confirmation.timeout

    @property
    def outstanding(self) -> int:
        """Messages submitted and not stored."""
        return self._window.count

    # For confirmations

    def check_usable(self) -> None:
        """Raise UsageError on another event loop than the publisher's, or in a forked child."""
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its threads are the parent's; make one in the child"
            )
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("this publisher belongs to another event loop; make one for each")

    def failure_seen(self) -> None:
        """Somebody looked at a failure."""
        self._unseen -= 1

    # On other threads

    def _start(self) -> None:
        self.outbox.open()
        self.relay.start()
        self._writer.start()

    def _stored(self, confirmations: list[AsyncStoredConfirmation], error: OutboxError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, confirmations, error)
        if error is None:
            self.relay.wake()

    def _settled(self, settlements: list[Settlement]) -> None:
        self.relay.settled(settlements)

    # On the event loop

    def _settle(self, confirmations: list[AsyncStoredConfirmation], error: OutboxError | None) -> None:
        size = 0
        for confirmation in confirmations:
            size += confirmation.size
            if confirmation.outcome is not None:  # given up by who waited for it
                continue
            if error is None:
                confirmation.stored(None)
            else:
                confirmation.stored(error.of(str(confirmation), confirmation.message_id))
                if not confirmation.seen:
                    self._failures.append(confirmation)
                    self._unseen += 1
            confirmation.settled()
        self._window.release(len(confirmations), size)
        self._admit_waiting()
        now = time.monotonic()
        if error is not None and now - self._said_at >= _FAILURES_SAID_EVERY:
            self._said_at = now
            logger.error("%d messages were not stored: %s", len(confirmations), error)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed; nothing was stored")

    async def _wait_for_room(self, confirmation: AsyncStoredConfirmation) -> None:
        admitted: asyncio.Future[bool] = self.loop.create_future()
        late = self.loop.call_later(self.timeout_of(confirmation), _resolve, admitted, False)
        self._room.append((confirmation, admitted))
        try:
            taken = await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and admitted.result():
                self._window.release(1, confirmation.size)
                self._admit_waiting()
            raise
        finally:
            late.cancel()
        if not taken:
            self._check_open()
            raise OutboxError(
                f"{confirmation} was not stored: {self._window.count} messages before it were not, either, in time",
                message_id=confirmation.message_id,
            )

    def _admit_waiting(self) -> None:
        while self._room:
            confirmation, admitted = self._room[0]
            if not admitted.done():
                if not self._window.fits(confirmation.size):
                    return
                self._window.take(confirmation.size)
                admitted.set_result(True)
            self._room.popleft()

    def _refuse_waiting(self) -> None:
        self._closed = True
        while self._room:
            _resolve(self._room.popleft()[1], False)

    async def _wait_stored(self, limit: float) -> bool:
        """Wait until everything submitted before has its answer."""
        answered: asyncio.Future[None] = self.loop.create_future()
        if self._writer.ended:
            return True
        # Behind the answers themselves, which come the same way.
        self._writer.call(partial(self._tell, answered))
        try:
            async with asyncio.timeout(limit if limit < float("inf") else None):
                await answered
        except TimeoutError:
            return self._writer.ended
        return True

    def _tell(self, answered: asyncio.Future[None]) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_resolve, answered, None)

    async def _wait_relayed(self, last: int | None, deadline: float, worth_waiting: Callable[[], bool]) -> int:
        """Wait until nothing is left up to the row ``last``; return what is left at the end."""
        pause, longest = _LOOK_INTO_OUTBOX
        while True:
            left, _ = await asyncio.to_thread(self.outbox.backlog, last)
            remaining = deadline - time.monotonic()
            if not left or remaining <= 0 or not worth_waiting():
                return left
            await asyncio.sleep(min(remaining, pause))
            pause = min(2 * pause, longest)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


# A forked child has copies of the lanes and none of their threads.
_lanes: WeakSet[AsyncStoringLane] = WeakSet()


def _forget_in_child() -> None:
    for lane in _lanes:
        lane.forked = True


os.register_at_fork(after_in_child=_forget_in_child)
