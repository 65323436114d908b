"""The calls of a store as generators of queries, for the sync and the asyncio API.

A call (``claim_many``, say) yields its queries, is sent their replies and returns its result. A query is whatever the
base class of a database yields and its ``_send`` sends: commands of Redis, a transaction of SQL. The error of a query
is raised where the call yielded it, so the call decides whether to repeat the query.

The stores of a database are therefore one base class with its queries, and two that send them, such as
``RedisStore(_RedisBase, SyncStore)`` and ``AsyncRedisStore(_RedisBase, AsyncStore)``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from reliable_mq.errors import UsageError
from reliable_mq.stores.keys import (
    ClaimAnswer,
    Held,
    UnansweredClaims,
    claims_in_order,
    held_by,
    settled_in_order,
    stored_key,
    unique,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from reliable_mq.core.idempotency import Claim

__all__ = ["AsyncStore", "Queries", "StoreBase", "SyncStore", "run_queries"]

T = TypeVar("T")

Queries: TypeAlias = Generator[Any, Any, T]
"""Yields queries, is sent the reply to each, and returns a result."""


def run_queries(queries: Queries[T], send: Callable[[Any], Any]) -> T:
    """Send each query, raise its error inside the generator, and return the result."""
    try:
        query = next(queries)
        while True:
            try:
                reply = send(query)
            except BaseException as error:  # noqa: BLE001 -- it is raised again, unless the call handles it
                query = queries.throw(error)
            else:
                query = queries.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _run_queries(queries: Queries[T], send: Callable[[Any], Awaitable[Any]]) -> T:
    """Do the same as `run_queries` on an event loop."""
    try:
        query = next(queries)
        while True:
            try:
                reply = await send(query)
            except BaseException as error:  # noqa: BLE001 -- it is raised again, unless the call handles it
                query = queries.throw(error)
            else:
                query = queries.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


class StoreBase:
    """The calls of a store; subclasses yield the queries of their database.

    ``_claim``, ``_complete``, ``_release`` and ``_reset`` are given keys as they are stored: at least one, each once,
    in order.
    """

    def __init__(self) -> None:
        self._unanswered = UnansweredClaims()

    def _claim(self, holders: Mapping[str, int], lease: float) -> Queries[Mapping[str, ClaimAnswer]]:
        """Claim keys, each in the name of its holder; return the reply for each."""
        raise NotImplementedError

    def _complete(self, held: Sequence[Held]) -> Queries[Collection[Held]]:
        """Mark claims as done; return those that are done on account of it."""
        raise NotImplementedError

    def _release(self, held: Sequence[Held], failed: bool) -> Queries[Collection[Held]]:
        """Release claims; return those that were held."""
        raise NotImplementedError

    def _reset(self, keys: Sequence[str]) -> Queries[Collection[str]]:
        """Forget failed attempts; return the keys that had some."""
        raise NotImplementedError

    def _claim_many(self, keys: Sequence[str], lease: float) -> Queries[list[Claim]]:
        if not keys:
            return []
        stored = unique(keys)
        holders = self._unanswered.holders(stored.values())
        try:
            found = yield from self._claim(holders, lease)
        except BaseException:
            self._unanswered.add(holders)
            raise
        return claims_in_order(keys, {key: found[name].claim(key) for key, name in stored.items()})

    def _complete_many(self, claims: Sequence[Claim]) -> Queries[list[bool]]:
        held = held_by(claims)
        return settled_in_order(claims, (yield from self._complete(held)) if held else ())

    def _release_many(self, claims: Sequence[Claim], failed: bool) -> Queries[list[bool]]:
        held = held_by(claims)
        return settled_in_order(claims, (yield from self._release(held, failed)) if held else ())

    def _reset_many(self, keys: Sequence[str]) -> Queries[list[bool]]:
        found = (yield from self._reset(list(unique(keys).values()))) if keys else ()
        return [stored_key(key) in found for key in keys]


class SyncStore(StoreBase):
    """An `IdempotencyStore` that sends its queries from the calling thread."""

    def _send(self, query: Any) -> Any:
        """Send a query to the database and return the reply. Blocks; thread-safe."""
        raise NotImplementedError

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each; see `IdempotencyStore.claim_many`.

        The other methods raise the same errors.

        Raises:
            IdempotencyStoreError: the database cannot be reached, does not reply in time, or replies with an error.
        """
        return run_queries(self._claim_many(keys, lease), self._send)

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        return run_queries(self._complete_many(claims), self._send)

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        return run_queries(self._release_many(claims, failed), self._send)

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys; see `ResettableStore.reset_many`."""
        return run_queries(self._reset_many(keys), self._send)


class AsyncStore(StoreBase):
    """An `AsyncIdempotencyStore` that sends its queries from one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _send(self, query: Any) -> Any:
        """Send a query to the database and return the reply."""
        raise NotImplementedError

    async def _run(self, queries: Queries[T]) -> T:
        """Make a call.

        Raises:
            UsageError: the running event loop is not the one of the first call, to which the connections belong.
        """
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise UsageError(
                f"{self!r} is used on another event loop: its connections belong to one; make a store for each"
            )
        return await _run_queries(queries, self._send)

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each; see `IdempotencyStore.claim_many`.

        The other methods raise the same errors.

        Raises:
            IdempotencyStoreError: the database cannot be reached, does not reply in time, or replies with an error.
        """
        return await self._run(self._claim_many(keys, lease))

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        return await self._run(self._complete_many(claims))

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        return await self._run(self._release_many(claims, failed))

    async def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys; see `ResettableStore.reset_many`."""
        return await self._run(self._reset_many(keys))
