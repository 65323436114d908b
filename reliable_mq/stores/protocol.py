"""The protocols of idempotency stores.

Invariants: each method is atomic per key; a call may be repeated with the same arguments if its reply was lost, and
does no harm then; a call costs one query to the database, however many keys it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from reliable_mq.core.idempotency import Claim

__all__ = ["AsyncIdempotencyStore", "IdempotencyStore", "ResettableStore"]


@runtime_checkable
class IdempotencyStore(Protocol):
    """Remembers which keys are done. Thread-safe.

    The methods may block, and are called from worker threads only. Each is atomic per key. It raises
    `IdempotencyStoreError` if the store cannot be reached: the call may have taken effect or not, and may be repeated.
    A store has a timeout of its own: a call that never returns blocks its worker thread for ever, though it never
    makes an effect happen twice.

    A store whose records can be written in the transaction of a handler may have a method ``transaction(*deliveries)``
    as well, which ``Delivery.transaction`` calls.
    """

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each.

        Returns:
            One claim per key, in order. If a key is given twice, at most its first claim is new.
        """
        ...

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark new claims as done.

        Returns:
            Per claim, in order, whether this claim has made its key done. False if its token is stale: the lease ended
            and another holder took over, or the claim was released. Completing a claim again returns True again.
        """
        ...

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release new claims, so that their keys can be claimed at once.

        Args:
            claims: the claims.
            failed: whether an attempt failed, which is counted; False if no handler ran.

        Returns:
            Per claim, in order, whether it was held; False, and nothing counted, if its token is stale. A store that
            repeats a query by itself after its connection broke may return False for a claim that the first query has
            released.
        """
        ...


@runtime_checkable
class AsyncIdempotencyStore(Protocol):
    """An `IdempotencyStore` whose methods are coroutines, for ``AsyncConsumer``.

    ``AsyncConsumer`` takes an `IdempotencyStore` as well, and calls it on a thread.
    """

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys; see `IdempotencyStore.claim_many`."""
        ...

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark claims as done; see `IdempotencyStore.complete_many`."""
        ...

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release claims; see `IdempotencyStore.release_many`."""
        ...


@runtime_checkable
class ResettableStore(Protocol):
    """A store that can forget failed attempts, for the replay of dead letters."""

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys that are not done. Thread-safe; may block.

        A done key stays done, and a claim that is held stays held. A message that is replayed has all its attempts
        again.

        Returns:
            Per key, in order, whether there were any to forget.

        Raises:
            IdempotencyStoreError: the store cannot be reached.
        """
        ...
