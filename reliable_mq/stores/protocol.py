"""The protocols of idempotency stores.

Invariants:

- each method is atomic per key;
- a call whose reply was lost may safely be repeated with the same arguments;
- a call costs one query to the database, regardless of the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from reliable_mq._util.validation import is_coroutine_function
from reliable_mq.core.idempotency import LEASE, Claim, check_options
from reliable_mq.errors import ConfigurationError


@runtime_checkable
class IdempotencyStore(Protocol):
    """A store that remembers which keys are done. Thread-safe.

    The methods may block, and are called only on worker threads. They raise `IdempotencyStoreError` if the store cannot
    be reached, does not reply in time, or replies with an error. The call may have taken effect in that case, and may
    be repeated. Each store enforces its own timeout: a call that never returned would block its worker thread forever,
    although no effect would happen twice.

    A store whose records can be written in a handler's transaction may also have a method ``transaction(*deliveries)``,
    which ``Delivery.transaction`` calls.
    """

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """Claim keys for ``lease`` seconds each.

        Returns:
            One claim per key, in order. If a key occurs twice, at most its first claim is new.
        """
        ...

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Mark new claims as done.

        Returns:
            For each claim, in order, whether this claim marked its key as done. False if its token is stale: the lease
            ended and another holder took over, or the claim was released. Completing a claim again returns True again.
        """
        ...

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """Release new claims, so that their keys can be claimed at once.

        Args:
            claims: The claims to release.
            failed: Whether to count a failed attempt. False if no handler ran.

        Returns:
            For each claim, in order, whether it was held. If its token is stale, the value is False and no attempt is
            counted. A store that repeats a query after its connection broke may return False for a claim that the first
            query released.
        """
        ...


@runtime_checkable
class AsyncIdempotencyStore(Protocol):
    """An `IdempotencyStore` whose methods are coroutines, for ``AsyncConsumer``.

    ``AsyncConsumer`` also accepts an `IdempotencyStore`, and calls it on a thread.
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

        A done key stays done, and a held claim stays held. A replayed message has all its attempts again.

        Returns:
            For each key, in order, whether it had failed attempts.

        Raises:
            IdempotencyStoreError: If the store cannot be reached.
        """
        ...


def resettable(store: object) -> ResettableStore:
    """Return the store of a replay after checking it.

    Raises:
        ConfigurationError: If it cannot reset attempts, or only on an event loop.
    """
    if isinstance(store, type) or not isinstance(store, ResettableStore):
        raise ConfigurationError(f"idempotency must be a store that can reset attempts (reset_many), not {store!r}")
    if is_coroutine_function(store.reset_many):
        raise ConfigurationError(
            f"idempotency is a store for AsyncConsumer, which a replay would never await: {store!r}; give a plain one "
            "with the same records, such as RedisStore for AsyncRedisStore"
        )
    return store


def check_reset_options(store: object, namespace: object) -> None:
    """Check a replay's options for the consumer's store.

    Raises:
        ConfigurationError: If an option is invalid, or there is a namespace without a store. The message names it.
    """
    if store is not None:
        resettable(store)
    check_options(None, namespace, LEASE, has_store=store is not None)
