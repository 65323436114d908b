"""A connection on the running event loop, which reconnects until it is closed.

A `Connector` makes the decisions, as in the sync API. This module provides asyncio's loop and driver.

Invariants:

- All methods except `call_soon` and `call_and_wake` are called on the loop that the object was created on.
- After ``close`` the object leaves no task, timer or socket behind, whatever the broker does.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.connection.aiormq_driver import Link
from reliable_mq.connection.aiormq_driver.loop import EventLoop
from reliable_mq.engine.connection import BaseConnection

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from reliable_mq.engine.connection import ConnectionArguments

_ABORT_GRACE = 3.0  # seconds that `close` waits beyond its grace for sockets to be closed
_FINISH_GRACE = 1.0  # seconds for the driver's tasks to end once their socket is closed


class AsyncConnection(BaseConnection):
    """A connection on the running loop, which reconnects. Construction opens nothing."""

    def __init__(self, **connection: Unpack[ConnectionArguments]) -> None:
        super().__init__(**connection)
        self._loop: EventLoop = EventLoop(self._on_error)
        self._thread = threading.get_ident()
        self._ended = asyncio.Event()
        self._stopped = False
        self._watch: asyncio.Task[None] | None = None  # watches for the end of the event loop
        self._connector = self._new_connector(self._loop, partial(Link, self._loop))

    @property
    def over(self) -> bool:
        """Whether the event loop is closed."""
        return self._loop.asyncio.is_closed()

    @property
    def stalled_seconds(self) -> float:
        """The seconds for which the event loop was blocked.

        Only blocks long enough to endanger the connection count.
        """
        return self._loop.stalled

    def start(self) -> None:
        self._watch = self._loop.asyncio.create_task(self._watch_loop(), name="reliable_mq connection")
        self._loop.call_soon(self._connector.begin)

    def call_soon(self, fn: Callable[[], None], /) -> None:
        """Run `fn` on the loop, after the current call. Thread-safe.

        An exception in `fn` costs the connection.
        """
        if threading.get_ident() != self._thread:
            self._loop.call_soon(fn)
        elif not self._loop.asyncio.is_closed():
            self._loop.call_soon_here(fn)

    def call_and_wake(self, fn: Callable[[], None], /) -> None:
        self._loop.call_soon(fn)  # a signal handler runs on the loop's thread, but may interrupt its wait for events

    def guard(self, fn: Callable[[], None]) -> None:
        """Run `fn` now. An exception in `fn` costs the connection."""
        self._loop.guard(fn)

    def stop(self, grace: float = 0.0, /) -> None:
        self._stopped = True
        self._connector.close(grace)

    async def close(self, grace: float) -> bool:
        """Stop with this grace, and wait for the end. May be cancelled and called again.

        Returns:
            Whether every socket is closed.
        """
        self.stop(grace)
        try:
            async with asyncio.timeout(grace + _ABORT_GRACE):
                await self._ended.wait()
        except TimeoutError:
            return False
        finally:
            await self._loop.finish(_FINISH_GRACE)
        return True

    def _on_ended(self) -> None:
        self._ended.set()

    async def _watch_loop(self) -> None:
        """Wait for the end, or give up if the program ends and cancels all tasks.

        The driver has no task that would be cancelled while the next attempt is not due.
        """
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            if not self._stopped:
                self._connector.crashed(RuntimeError("the task of the connection was cancelled"))
            await self._loop.finish(_FINISH_GRACE)
            raise
