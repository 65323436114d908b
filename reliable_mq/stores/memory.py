"""An idempotency store in memory, for tests and for duplicates in one process.

Invariants:

- at most ``max_entries`` keys are known;
- a claimed key whose lease has not ended is never forgotten;
- any other key is forgotten ``retention`` seconds after it was settled or its lease ended, or earlier if space is
  needed, the longest settled key first;
- time is monotonic, so a jump of the wall clock has no effect.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from reliable_mq._util.hooks import ForkStage, OfOneProcess, each_at_fork
from reliable_mq._util.validation import Duration, seconds, whole_number
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores.base import DAY

_new_claim: Final = Claim._make  # costs a third of a call with arguments


# Plain tuples of numbers: the garbage collector visits each of them only once, and there may be a million.
_Known = tuple[int, float, int]
"""A token, an end, and the number of failed attempts. Of a claimed key, it is the end of the lease. Of a settled key,
it is that of the retention, and the token is that of the claim that was completed, 0 if the key is free."""


class MemoryStore(OfOneProcess):
    """An idempotency store in the memory of this process. Thread-safe.

    Args:
        max_entries: The maximum number of keys to remember, at roughly 300 bytes each.
        retention: The time for which done keys, and the failed attempts of other keys, are remembered, in seconds.
        clock: A monotonic clock, in seconds.

    Raises:
        ConfigurationError: If ``max_entries`` is not a whole number of at least 1, or ``retention`` is not positive.
    """

    def __init__(
        self, *, max_entries: int = 1_000_000, retention: Duration = DAY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._max_entries = whole_number("max_entries", max_entries, 1)
        self._retention = seconds("retention", retention, positive=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._claimed: OrderedDict[str, _Known] = OrderedDict()  # in the order in which they were claimed
        self._settled: OrderedDict[str, _Known] = OrderedDict()  # in the order in which they were settled
        self._tokens = 0
        _stores.add(self)

    def __len__(self) -> int:
        """Return the number of known keys, including expired keys not deleted yet."""
        return len(self._claimed) + len(self._settled)

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each; see `IdempotencyStore.claim_many`.

        Raises:
            IdempotencyStoreError: If all known keys are claimed and there is no space for another.
        """
        with self._lock:
            now = self._clock()
            self._forget(now)
            claims: list[Claim] = []
            try:
                for key in keys:
                    claims.append(self._claim(key, now, lease))  # noqa: PERF401  # those before an error are needed
            except IdempotencyStoreError:
                for claim in claims:
                    self._release(claim, now, failed=False)
                raise
            return claims

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        with self._lock:
            now = self._clock()
            return [self._complete(claim, now) for claim in claims]

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        with self._lock:
            now = self._clock()
            return [self._release(claim, now, failed) for claim in claims]

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys; see `ResettableStore.reset_many`."""
        with self._lock:
            self._forget(self._clock())
            return [self._reset(key) for key in keys]

    def _reset(self, key: str) -> bool:
        claimed, settled = self._claimed.get(key), self._settled.get(key)
        if claimed is not None and claimed[2]:
            self._claimed[key] = claimed[0], claimed[1], 0
            return True
        if settled is not None and not settled[0]:
            del self._settled[key]  # a free key without failed attempts needs no entry
            return True
        return False

    def _claim(self, key: str, now: float, lease: float) -> Claim:
        attempts = 0
        settled = self._settled.get(key)
        if settled is not None:
            done, _, attempts = settled
            if done:
                return Claim(key, ClaimStatus.DONE, attempts=attempts)
            del self._settled[key]
        else:
            claimed = self._claimed.get(key)
            if claimed is not None:
                _, ends, attempts = claimed
                if ends > now:
                    return Claim(key, ClaimStatus.IN_PROGRESS, attempts=attempts)
                del self._claimed[key]
            elif len(self._claimed) + len(self._settled) >= self._max_entries:
                self._evict(now)
        self._tokens = token = self._tokens + 1
        self._claimed[key] = token, now + lease, attempts
        return _new_claim((key, ClaimStatus.NEW, token, attempts))

    def _complete(self, claim: Claim, now: float) -> bool:
        key, _, token, _ = claim
        claimed = self._claimed.get(key)
        if claimed is None:
            settled = self._settled.get(key)
            return settled is not None and settled[0] == token != 0
        if claimed[0] != token:
            return False
        del self._claimed[key]
        self._settled[key] = token, now + self._retention, claimed[2]
        return True

    def _release(self, claim: Claim, now: float, failed: bool) -> bool:
        key, _, token, _ = claim
        claimed = self._claimed.get(key)
        if claimed is None or claimed[0] != token:
            return False
        del self._claimed[key]
        attempts = claimed[2] + failed
        if attempts:
            self._settled[key] = 0, now + self._retention, attempts
        return True

    def _forget(self, now: float) -> None:
        """Forget expired keys. They come first, as leases and retention rarely differ."""
        for entries, kept in ((self._settled, 0.0), (self._claimed, self._retention)):
            while entries:
                key, (_, ends, _) = next(iter(entries.items()))
                if ends + kept > now:
                    break
                del entries[key]

    def _evict(self, now: float) -> None:
        """Forget a key early to make space for another."""
        for key, (_, ends, _) in self._claimed.items():
            if ends <= now:
                del self._claimed[key]
                return
            if self._settled:
                break
        if not self._settled:
            raise IdempotencyStoreError(
                f"all {self._max_entries} entries of the MemoryStore are claims in progress: raise max_entries"
            )
        self._settled.popitem(last=False)

    def _start_in_child(self) -> None:
        """Replace the lock in a forked child, where it may stay locked."""
        self._lock = threading.Lock()


_stores = each_at_fork(ForkStage.RENEW, MemoryStore._start_in_child)  # noqa: SLF001  # of this module
