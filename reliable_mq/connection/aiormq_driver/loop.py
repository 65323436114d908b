"""The asyncio loop of a connection.

The loop reports exceptions of its calls and timers, and can wait for its tasks. Its calls and timers have the context
variables of the code that made it, whatever task requests them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING

from reliable_mq.core.reconnect import AddressOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import TimerHandle


class EventLoop:
    """The running asyncio loop, for one connection after the other."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self.asyncio = asyncio.get_running_loop()
        self._context = copy_context()
        self.on_error = on_error  # called on the loop with every exception that a callback raises
        self.tasks: set[asyncio.Task[None]] = set()
        self.addresses = AddressOrder()  # in which links try the addresses of their hosts
        self.stalled = 0.0  # the total length of stalls of the loop that endangered heartbeats, in seconds

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the loop. Do nothing if the loop is closed. Thread-safe."""
        with suppress(RuntimeError):
            self.asyncio.call_soon_threadsafe(self.guard, fn, context=self._context.copy())

    def call_soon_here(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the loop, which is open. To be called on the loop, which is cheaper."""
        self.asyncio.call_soon(self.guard, fn, context=self._context.copy())

    def call_later(self, delay: float, fn: Callable[[], None]) -> TimerHandle:
        return self.asyncio.call_later(max(0.0, delay), self.guard, fn, context=self._context.copy())

    def guard(self, fn: Callable[..., None], *args: object) -> None:
        try:
            fn(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop goes on
            self.on_error(error)

    async def finish(self, grace: float) -> None:
        """Wait until all tasks of links end; cancel them after `grace` seconds."""
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=grace)
            for task in late:
                task.cancel()
