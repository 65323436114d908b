"""What an idempotency store says about a key.

Invariants: of all claims on a key that are ``NEW``, at most one at a time has a token that the store accepts; a token
is never given out twice, and a later one is greater, so a holder whose lease ran out and was taken over cannot settle
what is no longer its own.

What a consumer owes its idempotency store: claims that it has settled, for all it knows, and got no answer.

The store is told again before the same key is claimed, when it has answered to another claim, and when the consumer
stops. So a message that
comes again, on another channel or as its own next attempt, finds its key done, or free, and not claimed until the lease
ends; and a handler that has returned is not called again because store and broker were lost together.

Invariants: a settlement is owed until the store answers, whatever the answer is; of more than ``capacity``, the latest.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["Claim", "ClaimStatus", "CommitState", "InboxClaim", "SettlementRetries", "namespace_of"]


def namespace_of(cluster: str, virtual_host: str) -> str:
    """Name a virtual host of a broker: equal queue names there and elsewhere are different queues."""
    return f"{cluster.replace('%', '%25').replace('/', '%2F')}/{virtual_host}"


class ClaimStatus(enum.Enum):
    """What became of a claim."""

    NEW = "new"
    """The key is ours until the lease ends: do the work, then complete or release it."""
    IN_PROGRESS = "in progress"
    """Another holder has it, and its lease has not ended."""
    DONE = "done"
    """The work was completed before, and the store still knows."""
    UNREADABLE = "unreadable"
    """A newer version of this package wrote what the store has of the key: nothing is to be done now."""


class Claim(NamedTuple):
    """The answer to a claim.

    Attributes:
        key: what was claimed.
        status: what became of it.
        token: the fencing token, where the claim is new; else 0.
        attempts: how often a holder released the key as failed before.
    """

    key: str
    status: ClaimStatus
    token: int = 0
    attempts: int = 0


class CommitState(enum.Enum):
    """What is known of a transaction that has a claim as done."""

    NONE = "none"
    """There is none, or it was not told to commit."""
    UNKNOWN = "unknown"
    """It was, or may have been, and nobody answered: the database knows whether the claim is done."""
    DONE = "done"
    """It was committed."""


class InboxClaim:
    """What a delivery that is being handled holds of a store that has transactions.

    Args:
        claim: its claim.
        transaction: the store's method of that name.

    Attributes:
        claim, transaction: as given.
        commit: what is known of a transaction of the handler that has the claim as done.
    """

    __slots__ = ("claim", "commit", "transaction")

    def __init__(self, claim: Claim, transaction: Callable[..., Any]) -> None:
        self.claim = claim
        self.transaction = transaction
        self.commit = CommitState.NONE


class SettlementRetries:
    """See the module. For several threads: whatever is shared is done by one operation of a dict.

    A settlement is a claim and what became of it: None where it is complete, else whether it failed.

    Args:
        capacity: settlements that are remembered at most.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._settlements: dict[tuple[Claim, bool | None], None] = {}

    def __len__(self) -> int:
        return len(self._settlements)

    def add(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """The store was told of these, and did not answer."""
        self._settlements.update(dict.fromkeys((claim, failed) for claim in claims))
        if len(self._settlements) > self._capacity:
            for oldest in list(self._settlements)[: -self._capacity]:
                self._settlements.pop(oldest, None)

    def answered(self, claims: Iterable[Claim], failed: bool | None) -> None:
        """It has answered to these, some of which may have been owed."""
        for claim in claims:
            self._settlements.pop((claim, failed), None)

    def settlements(self, keys: Container[str] | None = None) -> list[tuple[list[Claim], bool | None]]:
        """Give what is owed, by what became of it; for these keys alone, where some are given."""
        owed = [each for each in list(self._settlements) if keys is None or each[0].key in keys]
        kinds = dict.fromkeys(failed for _, failed in owed)
        return [([claim for claim, failed in owed if failed is kind], kind) for kind in kinds]
