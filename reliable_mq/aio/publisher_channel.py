"""The publisher channel of the asyncio API: its inbox, and tasks that wait.

A caller admits its publish to the window and puts it into the inbox. One turn of the loop serves all publishes that
arrived in the meantime, so a publish needs no separate task, lock or write.

Invariants:

- Everything runs on one event loop, and the channel awaits only on behalf of callers.
- Every confirmation that ``submit`` returned is settled by the broker, by its deadline, or at the end of the channel. A
  cancelled await does not affect an admitted publish.
- Tasks that wait for the window are admitted in the order of their arrival, by the channel itself
  (`AsyncWindowWaiters`). A task that is cancelled before that has not been admitted.
- Every wait of a task ends: with its condition, at its deadline, or at the end of the channel.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.aio.connection import AsyncConnection
from reliable_mq.aio.loop import AsyncWindowWaiters, OnLoop, resolve, time_limit
from reliable_mq.core.publisher.trace import PublicationEvent, record
from reliable_mq.engine.confirmation import end_trace
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError

__all__ = ["AsyncPublisherChannel"]


_ADVANCE_AT = 64  # publishes in the inbox that do not wait for the next turn of the loop


class AsyncPublisherChannel(OnLoop[AsyncConfirmation], BasePublisherChannel[AsyncConfirmation]):
    """The channel of one publisher of the asyncio API. Created on its loop."""

    write_bytes = 128 * 1024
    _connection_type = AsyncConnection
    _io: AsyncConnection

    def __init__(self, options: PublisherOptions) -> None:
        super().__init__(options, nullcontext())  # one loop: no lock
        self.loop = asyncio.get_running_loop()
        self._changed: list[asyncio.Future[None]] = []  # futures of tasks that wait for a change of state
        self._flushing: list[tuple[float, asyncio.Future[None]]] = []  # and the moment before which all must be settled
        self._inbox: list[AsyncConfirmation] = []
        self._waiters = AsyncWindowWaiters(self.loop, self.window)

    # For callers

    async def wait_connected(
        self, limit: float, attempts: int = 1, *, at_most: float = float("inf")
    ) -> ReliableMQError | None:
        """Wait for the attempts. Several tasks may wait."""
        self.check_usable()
        deadline = time.monotonic() + at_most
        enough = self._attempts_failed + attempts
        left = limit
        while left > 0:
            try:
                async with time_limit(left):
                    while not (self.connected or self._attempts_failed >= enough or self.fatal or self._closed):
                        change = self.loop.create_future()
                        self._changed.append(change)
                        await change
            except TimeoutError:
                left = min(self._io.patience, deadline - time.monotonic())
            else:
                break
        return self._why_not_connected(limit)

    def take(self, confirmation: AsyncConfirmation) -> bool:
        """Accept a publish if it fits the window, and return whether it does.

        Raises:
            PublishBlocked, PublishDisconnected: If the broker blocks publishing or is unreachable, and the options say
                to raise.
            UsageError: If the channel is closed, used on another loop, or in a forked child.
        """
        try:
            if self.forked or (asyncio.get_running_loop() is not self.loop and not self._closed):
                self.check_usable()
            if self._takes_none:
                self._refuse(confirmation)
        except BaseException as error:
            end_trace(confirmation, error)
            raise
        if self._waiters or not self.window.fits(confirmation.size):
            return False
        self._admit(confirmation)
        if len(self._inbox) >= _ADVANCE_AT and self.connected:
            self._io.guard(self._advance)
        return True

    async def wait_for_window(self, confirmation: AsyncConfirmation, taken: Callable[[], object] | None = None) -> None:
        """Accept a publish once it fits the window, and call ``taken`` at that moment.

        If the task is cancelled after that, in the same turn of the loop, the publish stays accepted.

        Raises:
            PublishUnconfirmed: If the window was full until the deadline. The message was not sent.
            PublishBlocked: The same while the broker blocks publishing, or at once if the options say to raise.
            PublishDisconnected: If the connection was lost in the meantime, and the options say to raise.
            UsageError: If the channel was closed in the meantime.
        """
        try:
            await self._wait_for_window(confirmation, taken)
        except BaseException as error:
            end_trace(confirmation, error)
            raise

    async def _wait_for_window(self, confirmation: AsyncConfirmation, taken: Callable[[], object] | None) -> None:
        seconds = self.timeout_of(confirmation)
        remaining = confirmation.accepted_at + seconds - time.monotonic()
        record((confirmation,), PublicationEvent.WINDOW_FULL)
        admit = partial(self._admit_waiting, confirmation, taken)
        admitted = await self._waiters.wait(confirmation.size, remaining, admit)
        if admitted:
            return
        if admitted is None or self._takes_none or self.session.blocked_reason:
            raise self._refusal(confirmation)
        raise self._window_timeout(confirmation, seconds)

    async def flush(self, limit: float) -> bool:
        """Wait until all earlier publishes are settled, and return whether they are."""
        self.check_usable()
        return await self._wait_settled_before(time.monotonic(), limit)

    async def close(self, limit: float) -> None:
        """Settle everything within ``limit`` seconds, give up the rest, and disconnect.

        May be cancelled and called again, and by several tasks. Each call waits for the end.
        """
        self.check_usable()
        self._take_no_more()
        self._notify_change()
        self._waiters.refuse()
        if not await self._wait_settled_before(float("inf"), limit):
            self._end()
        await self._io.close(CLOSE_GRACE)
        self._wakeup.cancel()
        self._after_stall.cancel()

    def abort(self) -> None:
        """Settle everything as given up, and disconnect without waiting."""
        self._take_no_more()
        self._end()
        self._io.stop()
        self._wakeup.cancel()
        self._after_stall.cancel()

    @property
    def outstanding(self) -> int:
        """The number of publishes submitted and not settled."""
        return len(self._inbox) + self.session.outstanding

    @property
    def stalled_seconds(self) -> float:
        """The seconds for which the event loop has stalled (`AsyncConnection`)."""
        return self._stalled_before + self._io.stalled_seconds

    # The work

    def _admit(self, confirmation: AsyncConfirmation) -> None:
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self._io.guard, self._on_wake)

    def _admit_waiting(self, confirmation: AsyncConfirmation, taken: Callable[[], object] | None) -> None:
        record((confirmation,), PublicationEvent.ADMITTED)
        self._admit(confirmation)
        if taken is not None:
            taken()

    def _on_wake(self) -> None:
        self._woken = False
        self._advance()

    def _accept_inbox(self) -> None:
        if self._inbox:
            taken, self._inbox = self._inbox, []
            self.session.accept(taken)

    def _first_in_inbox(self) -> AsyncConfirmation | None:
        return self._inbox[0] if self._inbox else None

    def _refuse_waiting(self) -> None:
        if self._takes_none:
            self._waiters.refuse()

    def _notify_settled(self) -> None:
        if self._waiters:
            self._waiters.admit()
        if self._flushing:
            self._notify_flushing()

    def _end(self) -> None:
        self._waiters.refuse()
        super()._end()

    def _notify_change(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            resolve(future, None)

    # Flushing

    async def _wait_settled_before(self, moment: float, limit: float) -> bool:
        if self._settled_before(moment):
            return True
        settled = self.loop.create_future()
        entry = moment, settled
        self._flushing.append(entry)
        try:
            async with time_limit(limit):
                await settled
        except TimeoutError:
            return self._settled_before(moment)  # after a stall, confirms are read in the turn of the timer
        finally:
            self._flushing.remove(entry)
        return True

    def _notify_flushing(self) -> None:
        for moment, settled in self._flushing:
            if self._settled_before(moment):
                resolve(settled, None)
