"""The calls of a store as generators of queries, for both APIs; keys and purges.

A call, for example ``claim_many``, yields its queries, receives their replies and returns its result. A query is
whatever the base class of a database yields and its ``_send`` sends: Redis commands or an SQL transaction. The error of
a query is raised where the call yielded it, so the call decides whether to repeat the query.

The stores of a database are therefore one base class with the queries and two subclasses that send them, such as
``RedisStore(_RedisBase, SyncStore)`` and ``AsyncRedisStore(_RedisBase, AsyncStore)``.

Invariants:

- any key is stored as at most 200 printable ASCII characters, and different keys have different stored forms;
- a query has each key once, and all queries have the same order of keys, so that queries do not deadlock;
- a claim whose reply was lost is repeated in the name of the same holder. If the lost claim took place, it is found
  again, instead of waited for until its lease ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from reliable_mq._util.generators import drive, drive_async
from reliable_mq._util.hooks import OfOneProcess
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.errors import UsageError

T = TypeVar("T")
FORMAT: Final = 1  # the format of records; claiming a record of another format results in `ClaimStatus.UNREADABLE`
DAY: Final = 86400.0

_HASHED: Final = "sha256:"
_READABLE: Final = re.compile(r"(?!sha256:)[!-~](?:[ -~]{0,198}[!-~])?")
_HOLDER_BITS: Final = 62  # holders fit into a signed 64-bit number

Held: TypeAlias = tuple[str, int]
"""A key, as it is stored, and the token of its claim."""


class ClaimAnswer(NamedTuple):
    """The reply of a database to the claim of a key."""

    status: ClaimStatus
    token: int = 0
    attempts: int = 0


def stored_key(key: str) -> str:
    """Return the stored form of a key: itself, or its digest."""
    if _READABLE.fullmatch(key):
        return key
    return _HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def unique(keys: Iterable[str]) -> dict[str, str]:
    """Return the stored form of each distinct key, sorted by stored form."""
    return dict(sorted(((key, stored_key(key)) for key in set(keys)), key=itemgetter(1)))


def held_by(claims: Iterable[Claim]) -> list[Held]:
    """Return the distinct stored keys of claims with their tokens, sorted."""
    return sorted({(stored_key(claim.key), claim.token) for claim in claims})


class UnansweredClaims:
    """The holders of claims whose replies were lost, for the latest keys. Thread-safe.

    A holder is a random number that identifies a claim call. The next call in this process that claims the key repeats
    the claim whose reply was lost. Other processes, including forked children, do not. If overlapping calls left
    several holders of one key, each holder is used once, the oldest first.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._random = random.SystemRandom()
        self._start()

    def _start(self) -> None:
        self._holders: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._made_in = os.getpid()

    def holders(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the holder in whose name to claim each key."""
        if os.getpid() != self._made_in:
            self._start()  # the holders belong to the parent, whose lock may never be released in this process
        fresh = self._random.getrandbits(_HOLDER_BITS) or 1
        if not self._holders:
            return dict.fromkeys(keys, fresh)
        with self._lock:
            return {key: self._take(key) or fresh for key in keys}

    def add(self, holders: Mapping[str, int]) -> None:
        """Remember the holders of claims whose reply was lost."""
        with self._lock:
            for key, holder in holders.items():
                self._holders.setdefault(key, []).append(holder)
            while len(self._holders) > self._capacity:
                del self._holders[next(iter(self._holders))]

    def _take(self, key: str) -> int:
        """Remove and return the oldest holder of a key, or 0 if there is none."""
        waiting = self._holders.get(key)
        if waiting is None:
            return 0
        holder = waiting.pop(0)
        if not waiting:
            del self._holders[key]
        return holder


class PurgePace:
    """The pace at which claims purge expired rows, so that a table stays small.

    Each claimed key pays for the deletion of two rows. So purges keep up with any rate of claims of all processes, even
    with a backlog, and no claim deletes more than a few hundred rows or two for each of its keys. A purge that left no
    expired rows is followed by a pause of a second.

    There is no lock, so the object is safe in a forked child. If two threads call it at once, both may purge, or
    neither.
    """

    EVERY: Final = 60.0  # seconds after which a claim purges in any case
    PAUSE: Final = 1.0  # seconds after a purge that left no expired rows
    PAUSE_AFTER_ERROR: Final = 10.0  # seconds
    AT_LEAST: Final = 250  # rows; a smaller purge with every claim would cost more
    AT_MOST: Final = 5000  # rows, as they are deleted in one transaction
    ROWS_PER_KEY: Final = 2

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows_due = self.AT_LEAST  # the first claim purges, because some processes make few claims
        self._not_before = self._at_latest = clock()

    def claimed(self, keys: int) -> int:
        """Count claimed keys and return the maximum number of rows to purge now, or 0.

        Report the end of that purge to `purged` or `failed`.
        """
        self._rows_due += self.ROWS_PER_KEY * keys
        now = self._clock()
        if now < self._not_before or (self._rows_due < self.AT_LEAST and now < self._at_latest):
            return 0
        limit = min(max(self.AT_LEAST, self.ROWS_PER_KEY * keys), self.AT_MOST)
        self._rows_due = 0
        self._at_latest = now + self.EVERY
        self._not_before = now + self.PAUSE  # keeps other threads from purging while this one does
        return limit

    def purged(self, rows: int, limit: int) -> None:
        """Note the number of purged rows: if it is ``limit``, more may be left."""
        if rows >= limit:
            self._not_before = self._clock()

    def failed(self) -> None:
        """Note that a purge failed."""
        self._not_before = self._clock() + self.PAUSE_AFTER_ERROR


def microseconds(duration: float) -> int:
    """Convert seconds to a whole number of microseconds, at least one."""
    return max(int(duration * 1_000_000), 1)


Queries: TypeAlias = Generator[Any, Any, T]
"""Yields queries, is sent the reply to each, and returns a result."""


class StoreBase(OfOneProcess):
    """The calls of a store. Subclasses yield the queries of their database.

    ``_claim``, ``_complete``, ``_release`` and ``_reset`` receive the stored forms of keys: at least one, without
    duplicates, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unanswered = UnansweredClaims()

    def _claim(self, holders: Mapping[str, int], lease: float) -> Queries[Mapping[str, ClaimAnswer]]:
        """Claim each key in the name of its holder; return the reply for each key."""
        raise NotImplementedError

    def _complete(self, held: Sequence[Held]) -> Queries[Collection[Held]]:
        """Mark claims as done; return the claims that made their keys done."""
        raise NotImplementedError

    def _release(self, held: Sequence[Held], failed: bool) -> Queries[Collection[Held]]:
        """Release claims; return the claims that were held."""
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
        claims = [Claim(key, *found[stored[key]]) for key in keys]
        if len(stored) < len(keys):  # if a key occurs twice, only its first claim may be new
            seen: set[str] = set()
            for number, claim in enumerate(claims):
                if claim.key in seen and claim.status is ClaimStatus.NEW:
                    claims[number] = Claim(claim.key, ClaimStatus.IN_PROGRESS, attempts=claim.attempts)
                seen.add(claim.key)
        return claims

    def _settle_many(
        self, claims: Sequence[Claim], settle: Callable[[Sequence[Held]], Queries[Collection[Held]]]
    ) -> Queries[list[bool]]:
        held = held_by(claims)
        settled = (yield from settle(held)) if held else ()
        return [(stored_key(claim.key), claim.token) in settled for claim in claims]

    def _reset_many(self, keys: Sequence[str]) -> Queries[list[bool]]:
        found = (yield from self._reset(list(unique(keys).values()))) if keys else ()
        return [stored_key(key) in found for key in keys]


class SyncStore(StoreBase):
    """An `IdempotencyStore` that sends its queries on the calling thread."""

    def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send(self, query: Any) -> Any:
        """Send a query to the database and return the reply. Blocks; thread-safe."""
        raise NotImplementedError

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each; see `IdempotencyStore.claim_many`."""
        return drive(self._claim_many(keys, lease), self._send)

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        return drive(self._settle_many(claims, self._complete), self._send)

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        return drive(self._settle_many(claims, partial(self._release, failed=failed)), self._send)

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys; see `ResettableStore.reset_many`."""
        return drive(self._reset_many(keys), self._send)


class AsyncStore(StoreBase):
    """An `AsyncIdempotencyStore` that sends its queries on one event loop."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def _send(self, query: Any) -> Any:
        """Send a query to the database and return the reply."""
        raise NotImplementedError

    async def _run(self, queries: Queries[T]) -> T:
        """Make a call on the event loop of the first call, which owns the connections."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise UsageError(
                f"{self!r} is used on another event loop: its connections belong to one; make a store for each"
            )
        return await drive_async(queries, self._send)

    async def close(self) -> None:
        """Close the connections until the next call. Your own client or engine stays open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each; see `IdempotencyStore.claim_many`."""
        return await self._run(self._claim_many(keys, lease))

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        return await self._run(self._settle_many(claims, self._complete))

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        return await self._run(self._settle_many(claims, partial(self._release, failed=failed)))

    async def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys; see `ResettableStore.reset_many`."""
        return await self._run(self._reset_many(keys))
