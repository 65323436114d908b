"""Keys, holders and purges, which every store with a database has.

Invariants: whatever a key is made of, it is stored as at most 200 printable ASCII characters, and no two keys are
stored as the same; a query has each key once, and keys in one order, so that no two queries wait for each other in a
circle; a claim whose reply was lost is repeated in the name of the same holder, so that a claim which did take place is
found again, instead of waited for until its lease ends.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from reliable_mq.core.idempotency import Claim, ClaimStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

__all__ = [
    "DAY",
    "FORMAT",
    "ClaimAnswer",
    "Held",
    "PurgePace",
    "UnansweredClaims",
    "claims_in_order",
    "held_by",
    "microseconds",
    "settled_in_order",
    "stored_key",
    "unique",
]

FORMAT: Final = 1  # of records; of one of a newer format a claim is `ClaimStatus.UNREADABLE`
DAY: Final = 86400.0

_HASHED: Final = "sha256:"
_READABLE: Final = re.compile(r"(?!sha256:)[!-~](?:[ -~]{0,198}[!-~])?")
_HOLDER_BITS: Final = 62  # they fit a signed number of 64

Held: TypeAlias = tuple[str, int]
"""A key, as it is stored, and the token of its claim."""


class ClaimAnswer(NamedTuple):
    """The reply of a database to the claim of a key."""

    status: ClaimStatus
    token: int = 0
    attempts: int = 0

    def claim(self, key: str) -> Claim:
        """Return it as the claim of a key."""
        return Claim(key, self.status, self.token, self.attempts)


def stored_key(key: str) -> str:
    """Return the stored form of a key: itself, or its digest."""
    if _READABLE.fullmatch(key):
        return key
    return _HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def unique(keys: Iterable[str]) -> dict[str, str]:
    """Return the stored form of each key, once, in the order of these forms."""
    return dict(sorted(((key, stored_key(key)) for key in set(keys)), key=_second))


def _second(pair: tuple[str, str]) -> str:
    return pair[1]


def claims_in_order(keys: Sequence[str], found: Mapping[str, Claim]) -> list[Claim]:
    """Return the claim of each key; if a key comes twice, only its first may be new."""
    claims = [found[key] for key in keys]
    if len(found) < len(keys):
        seen: set[str] = set()
        for number, claim in enumerate(claims):
            if claim.key in seen and claim.status is ClaimStatus.NEW:
                claims[number] = Claim(claim.key, ClaimStatus.IN_PROGRESS, attempts=claim.attempts)
            seen.add(claim.key)
    return claims


def held_by(claims: Iterable[Claim]) -> list[Held]:
    """Return the stored keys of claims and their tokens, each once, in order."""
    return sorted({(stored_key(claim.key), claim.token) for claim in claims})


def settled_in_order(claims: Iterable[Claim], settled: Collection[Held]) -> list[bool]:
    """Return for each claim whether it is in ``settled``, a part of `held_by`."""
    return [(stored_key(claim.key), claim.token) in settled for claim in claims]


class UnansweredClaims:
    """The holders of claims whose reply was lost. Thread-safe.

    A holder is a random number that tells one claim call from another. A claim whose reply was lost is repeated by the
    next call that claims the key in this process, and by no other: not by a forked child either. Of several holders of
    one key, from calls that overlapped, each is repeated once, the oldest first.

    Args:
        capacity: the number of keys that are remembered, the latest ones.
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
            self._start()  # the holders are the parent's, and its lock may never be released here
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
        """Remove and return the oldest holder of a key; 0 if there is none."""
        waiting = self._holders.get(key)
        if waiting is None:
            return 0
        holder = waiting.pop(0)
        if not waiting:
            del self._holders[key]
        return holder


class PurgePace:
    """When claims purge expired rows, and how many, so that a table stays small.

    Each claimed key pays for the deletion of two rows. So purges keep up with any rate of claims, over all processes
    together, also with a backlog; and no claim deletes more than a few hundred rows, or two for each of its own keys.
    After a purge that left nothing, there is no other for a second.

    Without a lock, and so safe in a forked child: of two threads at once, both may purge, or neither.

    Args:
        clock: a monotonic clock, in seconds.
    """

    EVERY: Final = 60.0  # seconds after which a claim purges in any case
    PAUSE: Final = 1.0  # seconds after a purge that left nothing
    PAUSE_AFTER_ERROR: Final = 10.0  # seconds
    AT_LEAST: Final = 250  # rows: a purge for each claim costs more
    AT_MOST: Final = 5000  # rows: all are one transaction
    ROWS_PER_KEY: Final = 2

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows_due = self.AT_LEAST  # the first claim purges: some processes make few
        self._not_before = self._at_latest = clock()

    def claimed(self, keys: int) -> int:
        """Count claimed keys and return how many rows to purge now at most, 0 for none.

        Report the end of that purge to `purged` or `failed`.
        """
        self._rows_due += self.ROWS_PER_KEY * keys
        now = self._clock()
        if now < self._not_before or (self._rows_due < self.AT_LEAST and now < self._at_latest):
            return 0
        limit = min(max(self.AT_LEAST, self.ROWS_PER_KEY * keys), self.AT_MOST)
        self._rows_due = 0
        self._at_latest = now + self.EVERY
        self._not_before = now + self.PAUSE  # for other threads, while this one purges
        return limit

    def purged(self, rows: int, limit: int) -> None:
        """Note how many rows of ``limit`` were purged: at the limit, more may be left."""
        if rows >= limit:
            self._not_before = self._clock()

    def failed(self) -> None:
        """Note that a purge failed."""
        self._not_before = self._clock() + self.PAUSE_AFTER_ERROR


def microseconds(duration: float) -> int:
    """Return seconds as a whole number of microseconds, at least one."""
    return max(int(duration * 1_000_000), 1)
