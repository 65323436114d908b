"""What an idempotency store says about a key.

Invariants: of all claims on a key that are ``NEW``, at most one at a time has a token that the store accepts; a token
is never given out twice, and a later one is greater, so a holder whose lease ran out and was taken over cannot settle
what is no longer its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Claim", "ClaimStatus", "Commit", "Hold", "namespace_of"]


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


class Commit(enum.Enum):
    """What is known of a transaction that has a claim as done."""

    NONE = "none"
    """There is none, or it was not told to commit."""
    UNKNOWN = "unknown"
    """It was, or may have been, and nobody answered: the database knows whether the claim is done."""
    DONE = "done"
    """It was committed."""


class Hold:
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
        self.commit = Commit.NONE
