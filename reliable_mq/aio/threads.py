"""Calls that may block, off the event loop.

On daemon threads, so that a call that hangs does not keep a program from ending, as it would on asyncio's own executor.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Threads", "call_on_thread"]

T = TypeVar("T")


async def call_on_thread(name: str, fn: Callable[[], T]) -> T:
    """Call ``fn`` on a daemon thread of its own and wait for its result.

    Use this in place of ``asyncio.to_thread``, whose threads the program shares and the interpreter waits for at exit.

    Args:
        name: of the thread.
        fn: the call.
    """
    threads = Threads(name, 1)
    result = threads.call(fn)
    threads.stop()  # once the call has returned
    return await result


class Threads:
    """As many daemon threads as are needed at a time, up to ``most``. Lives on the loop that it was made on."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = 0
        self._stopped = False
        self._busy = 0

    def call(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``fn`` on a thread; the future is that of its result. Cancelling it ends the waiting alone."""
        future: asyncio.Future[T] = self._loop.create_future()
        call = partial(self._call, fn, future)
        self._busy += 1
        if self._stopped:  # nobody would end a thread that waits for more
            self._start(call, "late")
            return future
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            self._start(self._run, self._started)
        self._calls.put(call)
        return future

    @property
    def busy(self) -> int:
        """Calls that have not returned, those that nobody waits for any more included."""
        return self._busy

    def stop(self) -> None:
        """End the threads, each when it has nothing more to do. Does not wait.

        A call that comes later, of a task that is being cancelled, say, has a thread of its own, which ends with it.
        """
        self._stopped = True
        for _ in range(self._started):
            self._calls.put(None)
        self._started = 0

    def _start(self, run: Callable[[], None], which: int | str) -> None:
        threading.Thread(target=run, name=f"{self._name}-{which}", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, fn: Callable[[], T], future: asyncio.Future[T]) -> None:
        tell: Callable[[], None]
        try:
            tell = partial(self._done, future, fn())
        except BaseException as error:  # noqa: BLE001  # handed on
            tell = partial(self._failed, future, error)
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _done(self, future: asyncio.Future[T], result: T) -> None:
        self._busy -= 1
        if not future.done():
            future.set_result(result)

    def _failed(self, future: asyncio.Future[T], error: BaseException) -> None:
        self._busy -= 1
        if isinstance(error, StopIteration):  # which no future takes
            error = RuntimeError(f"{error!r} came out of a call")
        if not future.done():
            future.set_exception(error)
