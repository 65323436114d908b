"""How a store is asked on the event loop: one that awaits is awaited, one in memory is called, any other has a thread.

Invariant: a question that was asked is waited for, though the task that asked is cancelled meanwhile: a claim that
nobody knows of would keep its message until the lease ends. Only `abandon` ends that, for a store that hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from reliable_mq.aio.threads import Threads
from reliable_mq.core.handling import ClaimKeys, Complete, Release
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from reliable_mq.core.claims import Claim
    from reliable_mq.core.handling import Step

__all__ = ["BlockingStore", "StoreCalls", "awaits"]

T = TypeVar("T")


class StoreCalls:
    """The questions to one store. Made on the loop that it is for.

    Args:
        store: an `IdempotencyStore` or an `AsyncIdempotencyStore`.
        name: of threads.
        most: threads at a time.
    """

    def __init__(self, store: Any, name: str, most: int) -> None:
        self._store = store
        self._threads: Threads | None = None
        self._begin: Callable[[Callable[[], Any]], asyncio.Future[Any]] | None = None
        if awaits(store):
            self._begin = _as_task
        elif type(store) is not MemoryStore:  # one that is made of it may well block
            self._threads = Threads(name, most)
            self._begin = self._threads.call
        self._asked: set[asyncio.Future[Any]] = set()

    async def ask(self, step: Step) -> Any:
        """Ask, and wait for the answer. What the store raises is raised here."""
        if isinstance(step, ClaimKeys):
            question = partial(self._store.claim_many, step.keys, step.lease)
        elif isinstance(step, Complete):
            question = partial(self._store.complete_many, step.claims)
        else:
            assert isinstance(step, Release)  # noqa: S101  # there is no other
            question = partial(self._store.release_many, step.claims, failed=step.failed)
        if self._begin is None:
            return question()
        answer = self._begin(question)
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
        """Wait for no answer any more."""
        for answer in self._asked:
            answer.cancel()
        if self._threads is not None:
            self._threads.stop()


def awaits(store: Any) -> bool:
    """Whether the methods of a store are coroutine functions."""
    return inspect.iscoroutinefunction(store.claim_many)


def _as_task(question: Callable[[], Any]) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any] = asyncio.ensure_future(question())
    return answer


class BlockingStore:
    """An `AsyncIdempotencyStore` asked by threads, which wait for the event loop that this is made on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`."""
        return self._wait(self._store.claim_many(keys, lease))

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`."""
        return self._wait(self._store.complete_many(claims))

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`."""
        return self._wait(self._store.release_many(claims, failed=failed))

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(question, self._loop).result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:  # the loop ends, or is closed
            question.close()
            raise IdempotencyStoreError(f"the event loop of the store has ended: {error!r}") from error
