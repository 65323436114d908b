"""Deliveries on request, for tasks, which take turns."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from reliable_mq.aio.subscription import AsyncSubscription
from reliable_mq.connection.consuming.pull import BasePullSubscription, PulledDelivery

if TYPE_CHECKING:
    from types import TracebackType

    from reliable_mq.core.consumer_options import ConsumerOptions
    from reliable_mq.core.recovery import Recovery
    from reliable_mq.settings import ConnectionSettings

__all__ = ["AsyncPullSubscription", "PulledDelivery"]

_LONGEST = 1e8  # seconds that a timer is set for


class AsyncPullSubscription(AsyncSubscription, BasePullSubscription):
    """See `BasePullSubscription`."""

    _changed: _Changes

    def __init__(self, options: ConsumerOptions, settings: ConnectionSettings, recovery: Recovery) -> None:
        super().__init__(options, settings, recovery)
        self._turn = asyncio.Lock()

    async def take(self, most: int, timeout: float) -> list[PulledDelivery]:
        """Take up to ``most`` deliveries: all that are there, or what comes first within ``timeout`` seconds.

        The answers of a broker that is connected are waited for, a few seconds beyond ``timeout`` at most. Where the
        task is cancelled, nothing is taken.

        Raises:
            UsageError: that would exceed the prefetch.
        """
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(min(timeout, _LONGEST)):
                await self._turn.acquire()
        except TimeoutError:
            return []
        try:
            return await self._take(most, max(deadline, time.monotonic()))
        finally:
            self._turn.release()

    async def _take(self, most: int, deadline: float) -> list[PulledDelivery]:
        taken: list[PulledDelivery] = []
        self._begin_round(most)
        try:
            while (wait := self._take_arrived(taken, deadline)) is not None:
                await self._changed.wait(min(wait, _LONGEST))
        except BaseException:
            self._give_back(taken)
            raise
        finally:
            self._end_round()
        return taken

    def _new_changes(self) -> _Changes:
        return _Changes()


class _Changes:
    """Wakes the one who waits. On one loop, so there is nothing to guard."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing."""

    def notify_all(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float) -> None:
        """Wait for a change, for up to ``timeout`` seconds."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._waiter], timeout=timeout)
        finally:
            self._waiter = None
