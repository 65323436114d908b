"""The publisher channel of the asyncio API: its inbox, and tasks that wait.

A caller admits its publish to the window and puts it into the inbox. One turn of the loop serves all publishes that
arrived in the meantime, so a publish needs no separate task, lock or write.

Invariants, in addition to `reliable_mq.engine.publisher_channel`:

- Everything runs on one event loop, and the channel awaits only on behalf of callers.
- Tasks that wait for the window are admitted in the order of their arrival, by the channel itself
  (`AsyncWindowWaiters`). A task that is cancelled before that has not been admitted. After that, a cancelled await does
  not affect its publish.
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
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel
from reliable_mq.engine.steps import awaiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.engine.publisher_options import PublisherOptions

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
        self._inbox: list[AsyncConfirmation] = []
        self._waiters = AsyncWindowWaiters(self.loop, self.window)

    # For callers

    def take(self, confirmation: AsyncConfirmation) -> bool:
        """Accept a publish if it fits the window, and return whether it does.

        Raises:
            PublishBlocked, PublishDisconnected: If the broker blocks publishing or is unreachable, and the options say
                to raise.
            UsageError: If the channel is closed, used on another loop, or in a forked child.
        """
        if self.forked or (asyncio.get_running_loop() is not self.loop and not self._closed):
            self.check_usable()
        if self._takes_none:
            self._refuse(confirmation)
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
        seconds = self.timeout_of(confirmation)
        remaining = confirmation.accepted_at + seconds - time.monotonic()
        record((confirmation,), PublicationEvent.WINDOW_FULL)
        admit = partial(self._admit_late, confirmation, taken)
        admitted = await self._waiters.wait(confirmation.size, remaining, admit)
        if admitted:
            return
        if admitted is None or self._takes_none or self.session.blocked_reason:
            raise self._refusal(confirmation)
        raise self._window_timeout(confirmation, seconds)

    async def close(self, limit: float) -> None:
        """Settle everything within ``limit`` seconds, give up the rest, and disconnect.

        May be cancelled and called again, and by several tasks. Each call waits for the end.
        """
        self.check_usable()
        self._take_no_more()
        if not await awaiting(self._wait_settled_before(float("inf"), limit)):
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
        return len(self._inbox) + self.session.outstanding

    # The work

    def _admit(self, confirmation: AsyncConfirmation) -> None:
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self._io.guard, self._on_wake)

    def _admit_late(self, confirmation: AsyncConfirmation, taken: Callable[[], object] | None) -> None:
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

    def _admit_waiting(self) -> None:
        if self._waiters:
            self._waiters.admit()

    async def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        try:
            async with time_limit(timeout):
                while not condition():
                    change = self.loop.create_future()
                    self._changed.append(change)
                    try:
                        await change
                    finally:
                        self._changed.remove(change)
        except TimeoutError:
            return condition()  # after a stall, confirms are read in the turn of the timer
        return True

    def _notify_change(self) -> None:
        for change in self._changed:
            resolve(change, None)
