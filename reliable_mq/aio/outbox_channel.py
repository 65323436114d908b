"""A publisher's channel to its outbox, for tasks of an event loop.

Storing and relaying run on separate threads (`reliable_mq.outbox.relay`), so the event loop never waits for a disk or a
database.

Invariants, in addition to `reliable_mq.engine.outbox_channel`: confirmations are settled on the event loop. Callers
that wait for the window are served in order.

`AsyncRelayPublisher` takes the rows of the outbox from the relay's thread to the connection of an `AsyncPublisher`.

Invariants: every row that is sent is returned once, whatever happens to it or to the event loop. The connection is used
on the event loop only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import call_on_thread
from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.aio.loop import AsyncWindowWaiters, OnLoop, resolve, time_limit
from reliable_mq.core.outbox import KeptPlaces
from reliable_mq.core.publisher.publication import StoredPublication
from reliable_mq.engine.outbox_channel import (
    ANSWER_AT_LEAST,
    CLOSE_GRACE,
    MAX_HANGING,
    BaseOutboxChannel,
    not_open,
)
from reliable_mq.errors import ConfigurationError, OutboxError, PublishError, ReliableMQError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from reliable_mq.core.outbox import OutboxRow, RowSettlement
    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.outbox.protocol import Outbox, RowLeases

logger = get_logger(__name__)

T = TypeVar("T")


class AsyncStoredConfirmation(StoredPublication, AsyncConfirmation):
    """The outcome of storing a message. ``submit`` returns it with an outbox."""

    __slots__ = ("error", "row")

    owner: AsyncOutboxChannel

    def __await__(self) -> Generator[object, None, Receipt]:
        """Wait like any confirmation, up to the message's own deadline.

        After the deadline the message may still be stored.
        """
        if self.outcome is None:
            self.owner.check_usable()
            limit = self.accepted_at + self.owner.timeout_of(self) - time.monotonic()
            late = self.owner.loop.call_later(max(limit, 0.0), self.owner.give_up, self)
            try:
                return (yield from super().__await__())
            finally:
                late.cancel()
        return (yield from super().__await__())


class _LeaseInTransit:
    """The relay's lease, for a task that may no longer wait for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._claims: RowLeases | None = None

    def keep(self, claims: RowLeases) -> RowLeases:
        """Keep the lease. If it was abandoned, end it, which blocks."""
        with self._lock:
            self._claims = claims
            abandoned = self._abandoned
        if abandoned:
            claims.close()
        return claims

    def abandon(self) -> None:
        """End the lease now, or when it arrives. Blocks."""
        with self._lock:
            self._abandoned = True
            claims = self._claims
        if claims is not None:
            claims.close()


class AsyncOutboxChannel(OnLoop[AsyncStoredConfirmation], BaseOutboxChannel[AsyncStoredConfirmation]):
    """The channel of an `AsyncPublisher` to its outbox. For one event loop.

    The base class documents the arguments.
    """

    def __init__(
        self, outbox: Outbox, relay_publisher: AsyncRelayPublisher, options: PublisherOptions, *, measured: bool
    ) -> None:
        super().__init__(outbox, relay_publisher, options, measured=measured, guard=nullcontext())  # one loop: no lock
        self.loop = asyncio.get_running_loop()
        self._relay_publisher = relay_publisher
        self._waiters = AsyncWindowWaiters(self.loop, self._window)
        self._opens: asyncio.Task[None] | None = None
        self._starting = 0  # tasks that wait for the opening
        self._end_name = f"{options.name}-outbox-end"

    # For callers

    async def start(self, limit: float) -> None:
        """Wait for the opening. Several tasks may wait."""
        if self._opens is None:
            self._opens = self.loop.create_task(self._open())
        opens = self._opens
        self._starting += 1
        try:
            async with time_limit(limit):
                await asyncio.shield(opens)
        except TimeoutError as error:
            raise not_open(self.outbox, limit) from error
        finally:
            self._starting -= 1
            if not self._starting and not self.begun:  # no task waits any more
                self._opens = None
                opens.cancel()
                await asyncio.wait([opens])

    def take(self, confirmation: AsyncStoredConfirmation) -> bool:
        """Store a message if the window has room, and return whether it has.

        Raises:
            UsageError: If the channel is closed, used on another loop, or in a forked child.
        """
        self.check_usable()
        self._check_open()
        if self._waiters or not self._window.fits(confirmation.size):
            return False
        self._store(confirmation)
        return True

    async def wait_for_window(self, confirmation: AsyncStoredConfirmation) -> None:
        """Store a message once the window has room. Wait up to the message's deadline.

        Raises:
            OutboxError: If the window had no room in time. The message was not stored.
            UsageError: If the channel was closed in the meantime.
        """
        remaining = confirmation.accepted_at + self.timeout_of(confirmation) - time.monotonic()
        if not await self._waiters.wait(confirmation.size, remaining, partial(self._store, confirmation)):
            self._check_open()
            self._refuse_late(confirmation)

    def abort(self) -> None:
        """End without waiting, and send no more rows."""
        self._relay_publisher.cancel()
        super().abort()

    # On the writer's thread

    def _stored(self, confirmations: list[AsyncStoredConfirmation], error: OutboxError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits any more
            self.loop.call_soon_threadsafe(self._settle, confirmations, error)
        if error is None:
            self.relay.wake()

    def _settled(self, settlements: list[RowSettlement]) -> None:
        self.relay.settled(settlements)

    # On threads without a caller

    def _take_lease(self, transit: _LeaseInTransit) -> RowLeases:
        self.outbox.open()
        claims = transit.keep(self.outbox.claims())
        if self._closed:  # in the meantime; the outbox may have been closed before it was open
            self.outbox.close()
        return claims

    # On the event loop

    async def _open(self) -> None:
        transit = _LeaseInTransit()
        try:
            claims = await self._call_outbox(partial(self._take_lease, transit), float("inf"))
            self._check_open()
            self._begin(claims)
        except BaseException:
            _ = self._calls.future(transit.abandon)
            self._calls.close()
            raise
        self._relay_publisher.start()

    def _notify_window(self) -> None:
        self._waiters.admit()

    def _refuse_waiting(self) -> None:
        self._closed = True
        self._waiters.refuse()

    async def _call_outbox(self, call: Callable[[], T], deadline: float) -> T:
        limit = max(deadline - time.monotonic(), ANSWER_AT_LEAST)
        if self._calls.hanging >= MAX_HANGING:
            raise TimeoutError(f"{self.outbox!r} does not answer: {MAX_HANGING} questions are without an answer")
        try:
            async with time_limit(limit):
                return await self._calls.future(call)
        except TimeoutError as error:
            raise TimeoutError(f"{self.outbox!r} does not answer: no answer within {limit:g} s") from error

    async def _join(self, join: Callable[[float], bool], deadline: float) -> None:
        """Wait for the end of a thread, until a moment after the deadline."""
        limit = max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE
        await call_on_thread(self._end_name, partial(join, limit))

    async def _wait_stored(self, limit: float) -> bool:
        answered: asyncio.Future[None] = self.loop.create_future()
        if self._writer.ended:
            return True
        # Queued behind the answers themselves, which take the same path.
        self._writer.call(partial(self._tell, answered))
        try:
            async with time_limit(limit):
                await answered
        except TimeoutError:
            return self._writer.ended
        return True

    def _tell(self, answered: asyncio.Future[None]) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(resolve, answered, None)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _end_threads(self, deadline: float) -> None:
        await self._join(self.relay.join, deadline)
        self._relay_publisher.cancel()
        self._writer.stop()
        await self._join(self._writer.join, deadline)
        self._give_up_unstored()


class AsyncRelayPublisher:
    """A publisher that publishes rows and collects their outcomes.

    It is created on the event loop. One task does all of the work. The task starts with the relay, so that the end of
    the event loop cancels it. No task is created when rows arrive, because the loop may be ending at that time.

    Args:
        connect: A callable that begins to connect. It waits until every host has had its first attempt.
        send: A callable that submits a row to the channel to the broker. It must call the first function when the
            channel takes the row, even if it is then cancelled. The row's confirmation must call the second one.
        kept: A callable that returns the places that settled rows have at the channel. The relay's thread calls it.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[None]],
        send: Callable[[OutboxRow, Callable[[], object], Callable[[AsyncConfirmation], None]], Awaitable[None]],
        kept: Callable[[], KeptPlaces] = KeptPlaces,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect = connect
        self._send = send
        self.kept = kept
        self._to_send: deque[OutboxRow] = deque()  # begins with the row that waits for the channel
        self._has_rows = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended = False  # by `cancel`, or because the loop ends
        self._refusal: ReliableMQError | None = None  # why the last attempt has failed
        self._settled: deque[tuple[OutboxRow, ReliableMQError | None]] = deque()
        self._wake: Callable[[], object] | None = None  # wakes a relay that waits

    # On the relay's thread

    @property
    def ended(self) -> bool:
        """Whether the event loop has ended, and no row is left for `take_settled`."""
        return self._loop.is_closed() and not (self._to_send or self._settled)

    def connect(self) -> None:
        """Connect again unless connected. Raise the error of the last attempt, if any.

        Does not wait for the new attempt. The task begins by connecting.
        """
        refusal = self._refusal
        if refusal is not None or not self.kept().connected:  # the channel may have given up later
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_rows)
        if refusal is not None:
            raise refusal

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows, in order."""
        self._to_send.extend(rows)
        with suppress(RuntimeError):  # the loop is closed: `take_settled` returns them
            self._loop.call_soon_threadsafe(self._on_rows)

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Return the rows whose publish has ended, each with its error, if any."""
        if self._loop.is_closed():
            self._return_unsent(UsageError("the event loop of this publisher has ended; its rows stay in the outbox"))
        settled: list[tuple[OutboxRow, ReliableMQError | None]] = []
        while self._settled:
            settled.append(self._settled.popleft())
        return settled

    def watch(self, wake: Callable[[], object]) -> None:
        """Wake the relay at the next outcome."""
        self._wake = wake
        if self._settled:  # the outcome may have come before ``_wake`` was set
            wake()

    # On the event loop

    def start(self) -> None:
        """Connect, and send the rows that arrive."""
        self._task = self._loop.create_task(self._run(), name="reliable_mq outbox relay")

    def cancel(self) -> None:
        """Send no more. Unsent rows are returned to the relay."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()

    def _on_rows(self) -> None:
        if self._ended:
            self._return_unsent(_closed())
        else:
            self._has_rows.set()

    async def _run(self) -> None:
        try:
            while True:
                self._has_rows.clear()
                await self._send_rows()
                await self._has_rows.wait()
        finally:
            self._ended = True
            self._return_unsent(_closed())

    async def _send_rows(self) -> None:
        """Send the rows, in order, until nothing can be published."""
        try:
            await self._connect()
            self._refusal = None
            while self._to_send:
                row = self._to_send[0]
                try:
                    await self._send(row, self._to_send.popleft, partial(self._done, row))
                except (PublishError, ConfigurationError) as error:  # about this row
                    self._settle(self._to_send.popleft(), error)
        except ReliableMQError as error:
            self._refusal = error
            self._return_unsent(error)
        except Exception as error:
            logger.exception("unexpected error while the relay submitted a row")
            self._return_unsent(UsageError(f"the row could not be sent: {type(error).__name__}: {error}"))

    def _return_unsent(self, failure: ReliableMQError) -> None:
        while self._to_send:
            self._settle(self._to_send.popleft(), failure)

    def _done(self, row: OutboxRow, confirmation: AsyncConfirmation) -> None:
        self._settle(row, confirmation.failure())

    def _settle(self, row: OutboxRow, error: ReliableMQError | None) -> None:
        self._settled.append((row, error))
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


def _closed() -> UsageError:
    return UsageError("the publisher of this row was closed")
