"""What a consumer asks of an idempotency store, on either face.

Invariants: each method is atomic per key; a call may be made again with the same arguments whenever its answer did not
come, and does no harm by it; what is given in one call costs one question to the database, however much it is.

What the replay of dead letters asks of an idempotency store, beside what a consumer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.core.idempotency import Claim

__all__ = ["AsyncIdempotencyStore", "IdempotencyStore", "ResettableStore"]


@runtime_checkable
class IdempotencyStore(Protocol):
    """What a store does. Thread-safe; the methods may block, and are called from worker threads only.

    Each is atomic per key. A store that cannot answer raises `IdempotencyStoreError`; nothing is known then of what it
    was asked to do, and the same call may be made again. It has a deadline of its own: a call that never returns keeps
    its worker thread for ever, though no effect is doubled by it.

    A store whose records can be written in the transaction of a handler may have a method ``transaction(*deliveries)``
    as well, which ``Delivery.transaction`` calls.
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
            Per claim, in order, whether it was held; False, and nothing counted, where its token is stale. A store that
            asks its server again by itself, where the connection broke, may say False of what the first question has
            released.
        """
        ...


@runtime_checkable
class AsyncIdempotencyStore(Protocol):
    """An `IdempotencyStore` for ``AsyncConsumer``, whose methods are coroutines of its event loop.

    ``AsyncConsumer`` takes an `IdempotencyStore` as well, and calls it on a thread.
    """

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`."""
        ...

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`."""
        ...

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`."""
        ...


@runtime_checkable
class ResettableStore(Protocol):
    """A store that can forget failed attempts, so that a message that was given up has all of them again."""

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget the failed attempts of keys that are not done. Thread-safe; may block.

        What is done stays done, and a claim that is held stays held.

        Returns:
            Per key, in order, whether there were any to forget.

        Raises:
            IdempotencyStoreError: the store does not answer.
        """
        ...
