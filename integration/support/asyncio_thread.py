"""Runs an `AsyncConnection` on a thread, with the methods of an `IOThread`.

One test can then cover both.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq.aio.connection import AsyncConnection
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.channel_setup import StepGenerator


class AsyncioThread:
    """An `AsyncConnection` with the methods of an `IOThread`.

    `close` fails the test if a task is left on the loop.
    """

    def __init__(self, *, name: str, **arguments: Any) -> None:
        self._make = partial(AsyncConnection, name=name, **arguments)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._ready = threading.Event()
        self._started = False
        self._ended = False
        self._lock = threading.Lock()
        self._closing: asyncio.Event
        self._grace = 0.0
        self.left: set[str] = set()
        self.connector: AsyncConnection

    @property
    def callback_errors(self) -> int:
        return self.connector.callback_errors if self._started else 0

    def start(self) -> None:
        if self._started or self._ended:
            raise UsageError("an asyncio thread runs once")
        self._started = True
        self._thread.start()
        assert self._ready.wait(10)

    def call_soon(self, fn: Callable[[], None]) -> bool:
        with self._lock:
            if not self._started or self._ended:
                return False
            self._loop.call_soon_threadsafe(self.connector.guard, fn)
            return True

    def stop(self, grace: float = 0.0) -> None:
        def begin() -> None:
            self._grace = grace
            self.connector.stop(grace)
            self._closing.set()

        if not self.call_soon(begin):
            self._ended = True

    def close(self, timeout: float) -> bool:
        self.stop(timeout)
        ended = self.join(timeout + 4.0)
        assert not self.left, f"tasks are left: {self.left}"
        return ended

    def join(self, timeout: float | None = None) -> bool:
        if not self._started:
            return self._ended
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def write(self, data: bytes) -> None:
        self.connector.write(data)

    def write_buffer_size(self) -> int:
        return self.connector.write_buffer_size()

    def call_later(self, delay: float, fn: Callable[[], None]) -> Any:
        return self.connector.call_later(delay, fn)

    def run(self, generator: StepGenerator, done: Callable[[Any], None]) -> None:
        self.connector.run(generator, done)

    def discard(self, reason: str) -> None:
        self.connector.discard(reason)

    def reopen_channel(self) -> None:
        self.connector.reopen_channel()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self.connector = self._make()
        self.connector.start()
        self._ready.set()
        await self._closing.wait()
        await self.connector.close(self._grace)
        with self._lock:
            self._ended = True
        await asyncio.sleep(0)  # callbacks that are already queued still run
        self.left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
