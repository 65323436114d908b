"""What all stores with a database do to a question before they ask it, and to the answer.

Invariants: whatever a key is made of, what is stored for it is at most 200 printable ASCII characters, and no two keys
share it; within one question a key comes once, and keys come in one order, so that no two questions wait for each other
in a circle; a question whose answer was lost is asked again in the name of the same holder, so that a claim which did
take place is found again, and not waited for until its lease ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

__all__ = [
    "DAY",
    "FORMAT",
    "ClaimAnswer",
    "PurgePace",
    "UnansweredClaims",
    "claims_in_order",
    "held_by",
    "microseconds",
    "stored_key",
    "taken_in_order",
    "the_one_loop",
    "unique",
]

FORMAT: Final = 1  # of records; one of a newer format is answered with `ClaimStatus.UNREADABLE`
DAY: Final = 86400.0

_HASHED: Final = "sha256:"
_READABLE: Final = re.compile(r"(?!sha256:)[!-~](?:[ -~]{0,198}[!-~])?")
_HOLDER_BITS: Final = 62  # they fit a signed number of 64


class ClaimAnswer(NamedTuple):
    """What became of a key that was to be claimed."""

    status: ClaimStatus
    token: int = 0
    attempts: int = 0

    def claim(self, key: str) -> Claim:
        """Make it the claim of a key."""
        return Claim(key, self.status, self.token, self.attempts)


def stored_key(key: str) -> str:
    """Answer what a key is stored as: itself where any database takes it as it is, else a digest of it."""
    if _READABLE.fullmatch(key):
        return key
    return _HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def unique(keys: Iterable[str]) -> dict[str, str]:
    """Answer what each key is stored as, each once, in the order of what is stored."""
    return dict(sorted(((key, stored_key(key)) for key in set(keys)), key=_second))


def _second(pair: tuple[str, str]) -> str:
    return pair[1]


def claims_in_order(keys: Sequence[str], found: Mapping[str, Claim]) -> list[Claim]:
    """Give each key its claim; of one that was given twice, the first alone may be new."""
    claims = [found[key] for key in keys]
    if len(found) < len(keys):
        seen: set[str] = set()
        for number, claim in enumerate(claims):
            if claim.key in seen and claim.status is ClaimStatus.NEW:
                claims[number] = Claim(claim.key, ClaimStatus.IN_PROGRESS, attempts=claim.attempts)
            seen.add(claim.key)
    return claims


def held_by(claims: Iterable[Claim]) -> list[tuple[str, int]]:
    """Answer what is stored for the keys of claims, and their tokens: each once, in the order of what is stored."""
    return sorted({(stored_key(claim.key), claim.token) for claim in claims})


def taken_in_order(claims: Iterable[Claim], taken: Collection[tuple[str, int]]) -> list[bool]:
    """Say of each claim whether it is among those that were `held_by` them and taken."""
    return [(stored_key(claim.key), claim.token) in taken for claim in claims]


class UnansweredClaims:
    """The holders in whose names keys were claimed, as far as nobody answered. Thread-safe.

    A holder is a number that is drawn for a question. Whoever takes one out of here again asks the same question again;
    nobody else does, a forked child neither. Of several for one key, which were asked for at a time, each is tried in
    its turn.

    Args:
        capacity: keys that are remembered at most, the latest.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._random = random.SystemRandom()
        self._begin()

    def _begin(self) -> None:
        self._doubts: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._made_in = os.getpid()

    def holders(self, keys: Iterable[str]) -> dict[str, int]:
        """Say in whose name to claim each key."""
        if os.getpid() != self._made_in:
            self._begin()  # those are the parent's, and so may be the lock, for ever
        fresh = self._random.getrandbits(_HOLDER_BITS) or 1
        if not self._doubts:
            return dict.fromkeys(keys, fresh)
        with self._lock:
            return {key: self._take(key) or fresh for key in keys}

    def unanswered(self, holders: Mapping[str, int]) -> None:
        """These were asked for, and no answer came."""
        with self._lock:
            for key, holder in holders.items():
                self._doubts.setdefault(key, []).append(holder)
            while len(self._doubts) > self._capacity:
                del self._doubts[next(iter(self._doubts))]

    def _take(self, key: str) -> int:
        """Take out the holder that has waited longest; 0 where there is none."""
        waiting = self._doubts.get(key)
        if waiting is None:
            return 0
        holder = waiting.pop(0)
        if not waiting:
            del self._doubts[key]
        return holder


class PurgePace:
    """When claims purge rows that are over, and how many, so that a table does not grow for ever.

    Claimed keys pay for it: each entitles to the deletion of two rows. So purging keeps up with any rate of claims,
    over all processes together, also where there is a backlog; and no claim deletes more than a few hundred rows, or
    two for each of its own keys. Where nothing is left to delete, it is not looked for again within a second.

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
        self._entitled = self.AT_LEAST  # to so many rows; the first claim purges: some processes make few
        self._not_before = self._at_latest = clock()

    def claimed(self, keys: int) -> int:
        """Count claimed keys.

        Returns:
            How many rows to purge now at most; 0 for none. Tell `purged` or `failed` what became of it.
        """
        self._entitled += self.ROWS_PER_KEY * keys
        now = self._clock()
        if now < self._not_before or (self._entitled < self.AT_LEAST and now < self._at_latest):
            return 0
        limit = min(max(self.AT_LEAST, self.ROWS_PER_KEY * keys), self.AT_MOST)
        self._entitled = 0
        self._at_latest = now + self.EVERY
        self._not_before = now + self.PAUSE  # for other threads, as long as this one is at it
        return limit

    def purged(self, rows: int, limit: int) -> None:
        """Note how many rows were purged of ``limit``: where it was reached, there may be more."""
        if rows >= limit:
            self._not_before = self._clock()

    def failed(self) -> None:
        """Note that a purge failed."""
        self._not_before = self._clock() + self.PAUSE_AFTER_ERROR


def the_one_loop(store: object, loop: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """Answer the running event loop, on which all questions of an asyncio store are to be asked.

    Raises:
        UsageError: it is another one than ``loop``, that of the first question.
    """
    running = asyncio.get_running_loop()
    if loop is not None and loop is not running:
        raise UsageError(
            f"{store!r} is used on another event loop: its connections belong to one; make a store for each"
        )
    return running


def microseconds(duration: float) -> int:
    """Seconds as a whole number of microseconds, at least one."""
    return max(int(duration * 1_000_000), 1)
