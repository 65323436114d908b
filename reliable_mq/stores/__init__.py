"""Idempotency stores: what has been done already, so that a message that is delivered twice takes effect once.

A consumer claims the key of a delivery before its handler runs, and completes it afterwards; only then is the delivery
acked. A claim that nobody settles ends with its lease, and whoever claims the key next takes over. What is done is
remembered for the retention of the store: a duplicate that comes later than that takes effect again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from reliable_mq.core.claims import Claim, ClaimStatus
from reliable_mq.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Claim", "ClaimStatus", "IdempotencyStore", "MemoryStore"]


@runtime_checkable
class IdempotencyStore(Protocol):
    """What a store does. Thread-safe; the methods may block, and are called from worker threads only.

    Each is atomic per key. A store that cannot answer raises `IdempotencyStoreError`; nothing is known then of what it
    was asked to do, and the same call may be made again.
    """

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each.

        Returns:
            One claim per key, in order. Of a key that is given twice, at most the first is new.
        """
        ...

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark new claims as done.

        Returns:
            Per claim, in order, whether the key is done on account of it: False where its token is stale, because the
            lease ended and another holder took over, or because it was released. Completing a claim again answers True
            again.
        """
        ...

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Give up new claims, so that their keys can be claimed at once.

        Args:
            claims: what to give up.
            failed: whether an attempt failed, which counts; else nothing was tried.

        Returns:
            Per claim, in order, whether it was held; False, and nothing counted, where its token is stale.
        """
        ...
