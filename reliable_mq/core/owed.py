"""What a consumer owes its idempotency store: claims that it has settled, for all it knows, and got no answer.

The store is told again before the same key is claimed, when it has answered to another claim, and when the consumer
stops. So a message that
comes again, on another channel or as its own next attempt, finds its key done, or free, and not claimed until the lease
ends; and a handler that has returned is not called again because store and broker were lost together.

Invariants: a settlement is owed until the store answers, whatever the answer is; of more than ``capacity``, the latest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from reliable_mq.core.claims import Claim

__all__ = ["Owed"]


class Owed:
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
