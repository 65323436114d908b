"""Helpers for one event loop: waits of its tasks, and channels that serve them.

Invariants of `OnLoop`: a channel serves the tasks of the loop that it was created on. It refuses others, which no
outcome would ever reach.

Invariants of `AsyncWindowWaiters`:

- Places are assigned in the order of the requests, by the call that frees them, and are taken at that moment. Neither a
  cancellation nor a newcomer intervenes.
- A task that is late or cancelled has taken nothing, leaves nothing behind, and delays no task after it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from reliable_mq.core.publisher.publication import Publication
from reliable_mq.engine.channel import BaseChannel
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.publisher.window import PublishWindow

T = TypeVar("T")
P = TypeVar("P", bound=Publication)


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future that is neither resolved nor cancelled."""
    if not future.done():
        future.set_result(result)


def time_limit(seconds: float) -> asyncio.Timeout:
    """Return a context manager that limits an ``async with`` block.

    The block raises TimeoutError after ``seconds``. It may take any time if ``seconds`` is infinite.
    """
    return asyncio.timeout(seconds if seconds < float("inf") else None)


class OnLoop(BaseChannel[P]):
    """The part of a publisher's channel that belongs to its event loop.

    Attributes:
        loop: The event loop.
    """

    loop: asyncio.AbstractEventLoop

    def take(self, confirmation: P) -> bool:
        """Accept the message if the window has room, and return whether it has."""
        raise NotImplementedError

    async def wait_for_window(self, confirmation: P) -> None:
        """Accept the message once the window has room."""
        raise NotImplementedError

    def check_usable(self) -> None:
        """Raise UsageError on another event loop, or in a forked child."""
        if self.forked or asyncio.get_running_loop() is not self.loop:
            super().check_usable()
            raise UsageError("this publisher belongs to another event loop; make one for each")

    def _call_outside(self, call: Callable[[], object]) -> None:
        self.loop.call_soon(call)


class AsyncWindowWaiters:
    """Tasks of one event loop that wait for a window. Truthy while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop, window: PublishWindow) -> None:
        self._loop = loop
        self._window = window
        # Ordered, and cheap to remove from anywhere. A dict that is emptied from its front is slow to iterate.
        self._waiting: OrderedDict[asyncio.Future[bool | None], tuple[int, Callable[[], object]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait(self, size: int, timeout: float, take: Callable[[], object]) -> bool | None:
        """Wait for a place; return whether it was taken, or None if the task is refused.

        Args:
            size: The size of the message, in bytes.
            timeout: The time to wait, in seconds. Without time left, a place that is free in the same turn of the loop
                is still taken.
            take: A callable that takes the place. It is called once there is a place, before any other task runs.
        """
        given: asyncio.Future[bool | None] = self._loop.create_future()
        late = self._loop.call_later(max(timeout, 0.0), resolve, given, False)
        self._waiting[given] = size, take
        try:
            return await given
        finally:
            late.cancel()
            if self._waiting.pop(given, None) is not None:
                self.admit()

    def admit(self) -> None:
        """Admit waiting tasks that fit."""
        waiting = self._waiting
        while waiting:
            given, (size, take) = next(iter(waiting.items()))
            if not given.done():  # otherwise it is late or cancelled, and about to leave
                if not self._window.fits(size):
                    return
                take()
                given.set_result(True)
            del waiting[given]

    def refuse(self) -> None:
        """Refuse all waiting tasks."""
        while self._waiting:
            resolve(self._waiting.popitem(last=False)[0], None)
