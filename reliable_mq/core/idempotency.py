"""Claims of an idempotency store, and retries of settlements without an answer.

A settlement without an answer is sent again before the same key is claimed, when the store has answered to another
claim, and when the consumer stops. So a message that comes again, on another channel or as its own next attempt, finds
its key done, or free, and not claimed until the lease ends; and a handler that has returned is not called again because
store and broker were lost together.

Invariants:

- of all claims on a key that are ``NEW``, at most one at a time has a token that the store accepts; a token is never
  issued twice, and a later one is greater, so a holder whose lease ran out and was taken over cannot settle the claim
  of another;
- a settlement is retried until the store answers, whatever the answer is; of more than ``capacity``, the latest are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["Claim", "ClaimStatus", "CommitStatus", "InboxClaim", "SettlementRetries", "namespace_of"]


def namespace_of(cluster: str, virtual_host: str) -> str:
    """Return a name of a virtual host, in which queue names are unique.

    It is the same whichever node of a cluster the connection is to.
    """
    return f"{cluster.replace('%', '%25').replace('/', '%2F')}/{virtual_host}"


class ClaimStatus(enum.Enum):
    """The answer of a store to a claim."""

    NEW = "new"
    """The key is ours until the lease ends: do the work, then complete or release it."""
    IN_PROGRESS = "in progress"
    """Another holder has it, and its lease has not ended."""
    DONE = "done"
    """The work was completed before, and the store still knows."""
    UNREADABLE = "unreadable"
    """A newer version of this package wrote the record of the key: nothing is to be done now."""


class Claim(NamedTuple):
    """A claim, as a store answered it.

    Attributes:
        key: the key that was claimed.
        status: whether it is ours.
        token: the fencing token of a new claim; else 0.
        attempts: how often a holder released the key as failed before.
    """

    key: str
    status: ClaimStatus
    token: int = 0
    attempts: int = 0


class CommitStatus(enum.Enum):
    """The state of a transaction that marks a claim as done."""

    NONE = "none"  # there is none, or it was not told to commit
    UNKNOWN = "unknown"  # it was, or may have been, and nobody answered: the database knows whether the claim is done
    DONE = "done"  # it was committed


class InboxClaim:
    """The claim of a running delivery, in a store with a method ``transaction``."""

    __slots__ = ("claim", "commit", "transaction")

    def __init__(self, claim: Claim, transaction: Callable[..., Any]) -> None:
        self.claim = claim
        self.transaction = transaction
        self.commit = CommitStatus.NONE  # of a transaction of the handler that marks the claim as done


class SettlementRetries:
    """Settlements without an answer. Thread-safe: a step is one operation of a dict.

    A settlement is a claim and its outcome: None if it is complete, else whether it failed.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._settlements: dict[tuple[Claim, bool | None], None] = {}

    def __len__(self) -> int:
        return len(self._settlements)

    def add(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """Add settlements that the store did not answer to."""
        self._settlements.update(dict.fromkeys((claim, failed) for claim in claims))
        if len(self._settlements) > self._capacity:
            for oldest in list(self._settlements)[: -self._capacity]:
                self._settlements.pop(oldest, None)

    def answered(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """Remove settlements that the store has answered to."""
        for claim in claims:
            self._settlements.pop((claim, failed), None)

    def settlements(self, keys: Container[str] | None = None) -> list[tuple[list[Claim], bool | None]]:
        """Return the settlements, by outcome; those of ``keys`` alone if given."""
        found = [each for each in list(self._settlements) if keys is None or each[0].key in keys]
        kinds = dict.fromkeys(failed for _, failed in found)
        return [([claim for claim, failed in found if failed is kind], kind) for kind in kinds]
