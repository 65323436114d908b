"""The groups in which deliveries are claimed.

If handlers are quick, several deliveries are claimed at once. Those that do not start soon are released and put back,
so that no lease runs while another handler takes its time. If the store fails, half as many are claimed next, and then
slowly more, because the store may have no space for so many.

The results of a group are settled together after its last handler. If that one runs for longer than `PATIENCE`, the
others are settled meanwhile, by another thread or task.

Invariant: a group belongs to one epoch of the waiting work. Once the work was recalled, no further delivery of the
group is started. The first of a group may always start. Deliveries that are put back come first again, in their order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from reliable_mq.core.consumer.attempts import shown
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Ended, Skipped, SkipReason, delivery_of, settling_ended
from reliable_mq.engine.steps import asking

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.core.consumer.dispatch import Work
    from reliable_mq.core.consumer.handler import ClaimPolicy, Failed, Result, Step
    from reliable_mq.engine.steps import Steps

__all__ = ["PATIENCE", "ClaimBatcher", "Waiting", "settling_results"]

PATIENCE = 1.0
"""The seconds after which results of a group are settled, within as much again, although a handler of it still runs."""
_CLAIMED_TOGETHER = 64  # maximum number of deliveries claimed at once
_GROUP_SECONDS = 0.05  # after that, deliveries that have not started are put back, as their leases are running


class Waiting(Protocol):
    """The dispatched work that no worker has started. A recall ends an epoch."""

    items: deque[Work]
    epoch: int

    def put_back(self, deliveries: Sequence[Delivery], epoch: int) -> bool:
        """Put deliveries in front again, in order. Return False if they are recalled."""


class ClaimBatcher:
    """The groups that one worker or task claims, one after the other.

    Args:
        waiting: The work to take from.
        share: The maximum share of the work to take at once.

    Attributes:
        ended: The results of handlers of the running group, or None between two groups.
    """

    def __init__(self, waiting: Waiting, share: float) -> None:
        self.ended: Ended | None = None
        self._waiting = waiting
        self._share = share
        self._together = 1  # deliveries to take at once while handlers are quick
        self._most: float = _CLAIMED_TOGETHER  # maximum claims that the store seems to accept
        self._calls = 0  # handler calls of this group
        self._epoch = 0  # epoch in which the group was taken
        self._end = 0.0  # until when deliveries of the group may start
        self._seen: Ended | None = None  # the group at the last `overdue`

    def take(self, first: Work) -> list[Delivery]:
        """Start a group with ``first``, and a fair share of the work if it is no batch."""
        self.ended = Ended()
        self._calls, self._epoch, self._end = 0, self._waiting.epoch, time.perf_counter() + _GROUP_SECONDS
        if not isinstance(first, Delivery):
            return first
        deliveries = [first]
        items = self._waiting.items
        together = min(self._together, int(len(items) * self._share) + 1)
        while len(deliveries) < together:
            try:
                item = items.popleft()
            except IndexError:
                break
            deliveries += [item] if isinstance(item, Delivery) else item
        return deliveries

    def may_begin(self, now: float) -> bool:
        """Whether the next of the group may start at ``now``. To be called once for each."""
        self._calls += 1
        return self._calls == 1 or (self._epoch == self._waiting.epoch and now <= self._end)

    def end(self, results: Sequence[Result]) -> tuple[Sequence[Result], list[Delivery]]:
        """End the group, and put back the deliveries that have not started.

        Returns:
            The results of the others, and the deliveries that could not be put back.
        """
        self.ended = self._seen = None
        left = [one.delivery for one in results if isinstance(one, Skipped) and one.reason is SkipReason.NOT_BEGUN]
        failed = any(isinstance(one, Skipped) and one.reason is SkipReason.STORE_FAILED for one in results)
        self._most = max(len(results) // 2, 1) if failed else min(self._most + 0.25, _CLAIMED_TOGETHER)
        self._together = 1 if left else min(2 * self._together, int(self._most))
        if not left:
            return results, left
        begun = [one for one in results if not (isinstance(one, Skipped) and one.reason is SkipReason.NOT_BEGUN)]
        return begun, [] if self._waiting.put_back(left, self._epoch) else left

    def abandon(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """End the group, and return those of its deliveries that nobody has taken over."""
        ended, self.ended = self.ended, None
        return list(deliveries) if ended is None else ended.left(deliveries)

    def overdue(self) -> Ended | None:
        """Return the group if it was running at the last call, too. Thread-safe."""
        before, self._seen = self._seen, self.ended
        return self._seen if self._seen is before else None


def settling_results(
    claiming: ClaimPolicy,
    group: Ended,
    taken: list[Delivery | Failed],
    ask: Callable[[Step], Any],
    report: Callable[[list[Result]], None],
) -> Steps[None]:
    """Settle and report results that were taken over from a group.

    Args:
        claiming: The policy by which the group was claimed.
        group: The group.
        taken: The results.
        ask: A callable that carries out a step with the store.
        report: A callable that accepts results.
    """
    try:
        results = yield from asking(settling_ended(claiming, group.claims, taken), ask)
    except BaseException as error:  # from a store that ends its thread, or the task is destroyed
        report([Skipped(delivery_of(one), SkipReason.STORE_FAILED, shown(error)) for one in taken])
        raise
    report(results)
