"""What the replay of dead letters asks of an idempotency store, beside what a consumer does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ResettableStore"]


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
