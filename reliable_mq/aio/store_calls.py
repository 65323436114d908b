"""Calls to the idempotency store in the asyncio API.

The task of a coroutine handler calls the store on its event loop. An asyncio store is awaited, a store in memory is
called directly, and any other store is called on a thread. The thread of a plain handler waits for an asyncio store,
which runs on the loop.

Invariant: a call to a store is awaited even if the task that made it is cancelled in the meantime. Otherwise an unknown
claim would hold its message until the lease ends. Only `abandon` ends the wait, for a store that hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, Any, TypeVar

from reliable_mq._util.threads import DaemonExecutor
from reliable_mq._util.validation import is_coroutine_function
from reliable_mq.engine.workers import store_call
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from reliable_mq.core.consumer.handler import Step
    from reliable_mq.core.idempotency import Claim

T = TypeVar("T")

_LOOK_EVERY = 0.5  # seconds after which a thread that waits for the store looks whether the loop is closed


class StoreAdapter:
    """The calls to one store. Created on the loop that uses it.

    Args:
        store: An `IdempotencyStore` or an `AsyncIdempotencyStore`.
        name: The name of the threads.
        most: The maximum number of threads.
    """

    def __init__(self, store: Any, name: str, most: int) -> None:
        self._store = store
        self._threads: DaemonExecutor | None = None
        self._begin: Callable[[Callable[[], Any]], asyncio.Future[Any]] | None = None
        if awaits(store):
            self._begin = _as_task
        elif type(store) is not MemoryStore:  # a subclass may block
            self._threads = DaemonExecutor(name, most)
            self._begin = self._threads.future
        self._asked: set[asyncio.Future[Any]] = set()

    async def ask(self, step: Step) -> Any:
        """Call the store, and return its answer or raise its exception."""
        call = store_call(self._store, step)
        if self._begin is None:
            return call()
        answer = self._begin(call)
        self._asked.add(answer)
        try:
            while not answer.done():
                try:
                    await asyncio.wait([answer])
                except asyncio.CancelledError:  # the task checks ``cancelling()`` after the answer
                    continue
        finally:
            self._asked.discard(answer)
        return answer.result()

    @staticmethod
    async def rest(seconds: float) -> bool:
        """Wait between two calls, and return whether to end instead.

        That is the case if the task was cancelled during a call.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return True
        await asyncio.sleep(seconds)
        return False

    def abandon(self) -> None:
        """Stop waiting for answers."""
        for answer in self._asked:
            answer.cancel()
        if self._threads is not None:
            self._threads.close()


def awaits(store: Any) -> bool:
    """Whether the methods of a store are coroutine functions."""
    return is_coroutine_function(store.claim_many)


def _as_task(question: Callable[[], Any]) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any] = asyncio.ensure_future(question())
    return answer


class BlockingStore:
    """An adapter of an `AsyncIdempotencyStore` for threads, which wait for its loop."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys, like `IdempotencyStore.claim_many`."""
        return self._wait(self._store.claim_many(keys, lease))

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Complete claims, like `IdempotencyStore.complete_many`."""
        return self._wait(self._store.complete_many(claims))

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims, like `IdempotencyStore.release_many`."""
        return self._wait(self._store.release_many(claims, failed=failed))

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:  # the loop is closed
            question.close()
            raise _loop_ended(error) from error
        while not concurrent.futures.wait((answer,), _LOOK_EVERY).done:
            if self._loop.is_closed() and not answer.done():
                raise _loop_ended(RuntimeError("it was closed during the call"))
        try:
            return answer.result()
        except concurrent.futures.CancelledError as error:  # the loop is ending
            raise _loop_ended(error) from error


def _loop_ended(error: BaseException) -> IdempotencyStoreError:
    return IdempotencyStoreError(f"the event loop of the store has ended: {error!r}")
