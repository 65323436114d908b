"""An idempotency store in the memory of one process: for tests, and for duplicates that reach the same process.

Invariants: at most ``max_entries`` keys are known; a key that is claimed and whose lease runs is never forgotten; any
other is forgotten ``retention`` seconds after it was settled or its lease ended, or earlier where room is needed, the
longest settled first. Time is monotonic: a jump of the wall clock moves nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from reliable_mq.core.claims import Claim, ClaimStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MemoryStore"]

_DAY: Final = 86400.0


class _Entry:
    """A key that is known: claimed, done, or free with failures behind it."""

    __slots__ = ("attempts", "done", "ends", "token")

    def __init__(self) -> None:
        self.attempts = 0
        self.done = False
        self.token = 0  # of the newest claim; 0 when that was released
        self.ends = 0.0  # of the lease while claimed, else of the retention


class MemoryStore:
    """Deduplicates within this process, and forgets everything with it. Thread-safe.

    Args:
        max_entries: keys that are remembered at most, at roughly 300 bytes each.
        retention: seconds for which a done key is remembered, and the failures of one that is not.
        clock: a monotonic clock, in seconds.

    Raises:
        ConfigurationError: ``max_entries`` is below 1, or ``retention`` is not positive.
    """

    def __init__(
        self, *, max_entries: int = 1_000_000, retention: float = _DAY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_entries < 1:
            raise ConfigurationError(f"max_entries must be at least 1, not {max_entries}")
        if not retention > 0:
            raise ConfigurationError(f"retention must be a positive number of seconds, not {retention}")
        self._max_entries = max_entries
        self._retention = retention
        self._clock = clock
        self._lock = threading.Lock()
        self._claimed: OrderedDict[str, _Entry] = OrderedDict()  # in the order in which they were claimed
        self._settled: OrderedDict[str, _Entry] = OrderedDict()  # in the order in which they were settled
        self._tokens = 0

    def __len__(self) -> int:
        """How many keys are known, forgotten ones that were not swept yet included."""
        return len(self._claimed) + len(self._settled)

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`.

        Raises:
            IdempotencyStoreError: every key that is known is claimed, and there is no room for another.
        """
        with self._lock:
            now = self._clock()
            self._forget(now)
            claims: list[Claim] = []
            try:
                for key in keys:
                    claim = self._claim(key, now, lease)
                    claims.append(claim)
            except IdempotencyStoreError:
                for claim in claims:
                    self._release(claim, now, failed=False)
                raise
            return claims

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`."""
        with self._lock:
            now = self._clock()
            return [self._complete(claim, now) for claim in claims]

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`."""
        with self._lock:
            now = self._clock()
            return [self._release(claim, now, failed) for claim in claims]

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `ResettableStore.reset_many`."""
        with self._lock:
            self._forget(self._clock())
            return [self._reset(key) for key in keys]

    def _reset(self, key: str) -> bool:
        entry = self._claimed.get(key) or self._settled.get(key)
        if entry is None or entry.done or not entry.attempts:
            return False
        entry.attempts = 0
        if key in self._settled:
            del self._settled[key]  # free, and with nothing behind it: as if it had never been
        return True

    def _claim(self, key: str, now: float, lease: float) -> Claim:
        entry = self._settled.get(key)
        if entry is not None:
            if entry.done:
                return Claim(key, ClaimStatus.DONE, attempts=entry.attempts)
            del self._settled[key]
        else:
            entry = self._claimed.get(key)
            if entry is None:
                if len(self._claimed) + len(self._settled) >= self._max_entries:
                    self._make_room(now)
                entry = _Entry()
            elif entry.ends > now:
                return Claim(key, ClaimStatus.IN_PROGRESS, attempts=entry.attempts)
            else:
                del self._claimed[key]
        self._tokens += 1
        entry.token = self._tokens
        entry.ends = now + lease
        self._claimed[key] = entry
        return Claim(key, ClaimStatus.NEW, entry.token, entry.attempts)

    def _complete(self, claim: Claim, now: float) -> bool:
        entry = self._claimed.get(claim.key)
        if entry is None:
            entry = self._settled.get(claim.key)
            return entry is not None and entry.done and entry.token == claim.token
        if entry.token != claim.token:
            return False
        entry.done = True
        self._settle(claim.key, entry, now)
        return True

    def _release(self, claim: Claim, now: float, failed: bool) -> bool:
        entry = self._claimed.get(claim.key)
        if entry is None or entry.token != claim.token:
            return False
        entry.token = 0
        entry.attempts += failed
        if entry.attempts:
            self._settle(claim.key, entry, now)
        else:
            del self._claimed[claim.key]
        return True

    def _settle(self, key: str, entry: _Entry, now: float) -> None:
        del self._claimed[key]
        entry.ends = now + self._retention
        self._settled[key] = entry

    def _forget(self, now: float) -> None:
        """Forget what is over. It is at the front: the retention is the same for all, and so is the usual lease."""
        for entries, kept in ((self._settled, 0.0), (self._claimed, self._retention)):
            while entries:
                key, entry = next(iter(entries.items()))
                if entry.ends + kept > now:
                    break
                del entries[key]

    def _make_room(self, now: float) -> None:
        """Forget one early: it is the only way to know another."""
        for key, entry in self._claimed.items():
            if entry.ends <= now:
                del self._claimed[key]
                return
            if self._settled:
                break
        if not self._settled:
            raise IdempotencyStoreError(
                f"all {self._max_entries} entries of the MemoryStore are claims in progress: raise max_entries"
            )
        self._settled.popitem(last=False)
