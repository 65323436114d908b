"""Calls to the idempotency store in the asyncio API.

A coroutine handler's task calls the store on its event loop: an asyncio store is awaited, one in memory is called, any
other has a thread. A plain handler's thread waits for an asyncio store, which runs on the loop.

Invariant: a call to a store is waited for though the task that made it is cancelled meanwhile: a claim that nobody
knows of would keep its message until the lease ends. Only `abandon` ends that, for a store that hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from reliable_mq._util.threads import DaemonExecutor
from reliable_mq.engine.workers import store_call
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from reliable_mq.core.consumer.handler import Step
    from reliable_mq.core.idempotency import Claim

__all__ = ["BlockingStore", "StoreAdapter", "awaits"]

T = TypeVar("T")


class StoreAdapter:
    """The calls to one store. Made on the loop that it is for.

    Args:
        store: an `IdempotencyStore` or an `AsyncIdempotencyStore`.
        name: of threads.
        most: threads at a time.
    """

    def __init__(self, store: Any, name: str, most: int) -> None:
        self._store = store
        self._threads: DaemonExecutor | None = None
        self._begin: Callable[[Callable[[], Any]], asyncio.Future[Any]] | None = None
        if awaits(store):
            self._begin = _as_task
        elif type(store) is not MemoryStore:  # one that is made of it may well block
            self._threads = DaemonExecutor(name, most)
            self._begin = self._threads.future
        self._asked: set[asyncio.Future[Any]] = set()

    async def ask(self, step: Step) -> Any:
        """Call the store, and wait for its answer. Raises its exceptions."""
        call = store_call(self._store, step)
        if self._begin is None:
            return call()
        answer = self._begin(call)
        self._asked.add(answer)
        try:
            while not answer.done():
                try:
                    await asyncio.wait([answer])
                except asyncio.CancelledError:  # it is looked at when there is an answer
                    continue
        finally:
            self._asked.discard(answer)
        return answer.result()

    def abandon(self) -> None:
        """Stop waiting for answers."""
        for answer in self._asked:
            answer.cancel()
        if self._threads is not None:
            self._threads.close()


def awaits(store: Any) -> bool:
    """Whether the methods of a store are coroutine functions."""
    return inspect.iscoroutinefunction(store.claim_many)


def _as_task(question: Callable[[], Any]) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any] = asyncio.ensure_future(question())
    return answer


class BlockingStore:
    """An `AsyncIdempotencyStore` for threads, which wait for the loop that it runs on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys, as `IdempotencyStore.claim_many`."""
        return self._wait(self._store.claim_many(keys, lease))

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Complete claims, as `IdempotencyStore.complete_many`."""
        return self._wait(self._store.complete_many(claims))

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims, as `IdempotencyStore.release_many`."""
        return self._wait(self._store.release_many(claims, failed=failed))

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(question, self._loop).result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:  # the loop ends, or is closed
            question.close()
            raise IdempotencyStoreError(f"the event loop of the store has ended: {error!r}") from error
