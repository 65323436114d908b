"""The groups in which deliveries are claimed.

If handlers are quick, several deliveries are claimed at once. Those that do not start soon are released and put back,
so that no lease runs while another handler takes its time. If the store fails, half as many are claimed next, and then
slowly more, because the store may have no space for so many.

The results of a group are settled together after its last handler. If a handler runs for longer than `PATIENCE`, the
results of the others are settled meanwhile by another thread or task, which also releases and puts back the deliveries
that have not begun.

Invariant: a group belongs to one epoch of the waiting work. Once the work was recalled, no further delivery of the
group is started. Before that, the first of a group may always start. Deliveries that are put back come first again, in
their order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from reliable_mq.core.consumer.attempts import shown
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import GroupProgress, Skipped, SkipReason, settling_rest
from reliable_mq.engine.steps import calling

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.core.consumer.dispatch import Work
    from reliable_mq.core.consumer.handler import ClaimPolicy, GroupRemainder, Result, Step
    from reliable_mq.engine.steps import Steps
    from reliable_mq.engine.workers import ResultSink

PATIENCE = 1.0
"""The seconds after which the rest of a group is taken over, within as much again, while a handler of it runs."""
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
        progress: The progress of the running group, or None between two groups.
    """

    def __init__(self, waiting: Waiting, share: float) -> None:
        self.progress: GroupProgress | None = None
        self._waiting = waiting
        self._share = share
        self._together = 1  # deliveries to take at once while handlers are quick
        self._most: float = _CLAIMED_TOGETHER  # maximum claims that the store seems to accept
        self._calls = 0  # handler calls of this group
        self._epoch = 0  # epoch in which the group was taken
        self._end = 0.0  # until when deliveries of the group may start
        self._seen: GroupProgress | None = None  # the group at the last `overdue`

    def take(self, first: Work) -> list[Delivery]:
        """Start a group with ``first``, and a fair share of the work if it is no batch."""
        self._calls, self._epoch, self._end = 0, self._waiting.epoch, time.perf_counter() + _GROUP_SECONDS
        self.progress = GroupProgress(self._epoch)
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
        return self._epoch == self._waiting.epoch and (self._calls == 1 or now <= self._end)

    def end(self, results: Sequence[Result]) -> tuple[Sequence[Result], list[Delivery]]:
        """End the group, and put back the deliveries that have not started.

        Returns:
            The results of the others, and the deliveries that could not be put back.
        """
        interrupted = self.progress is not None and self.progress.interrupted
        self.progress = self._seen = None
        begun, left = _split(results)
        failed = any(isinstance(one, Skipped) and one.reason is SkipReason.STORE_FAILED for one in results)
        self._most = max(len(results) // 2, 1) if failed else min(self._most + 0.25, _CLAIMED_TOGETHER)
        self._together = 1 if left or interrupted else min(2 * self._together, int(self._most))
        return begun, [] if not left or self._waiting.put_back(left, self._epoch) else left

    def abandon(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """End the group, and return those of its deliveries that nobody has taken over."""
        progress, self.progress = self.progress, None
        return list(deliveries) if progress is None else progress.left(deliveries)

    def overdue(self) -> GroupProgress | None:
        """Return the group if it was running at the last call, too. Thread-safe."""
        before, self._seen = self._seen, self.progress
        return self._seen if self._seen is before else None


def settling_group_rest(
    claiming: ClaimPolicy,
    group: GroupProgress,
    rest: GroupRemainder,
    ask: Callable[[Step], Any],
    waiting: Waiting,
    sink: ResultSink,
) -> Steps[None]:
    """Settle and report the results of a group's rest, and put back its deliveries.

    ``ask`` carries out a step with the store.
    """
    try:
        results = yield from calling(settling_rest(claiming, group.claims, rest), ask)
    except BaseException as error:  # from a store that ends its thread, or the task is destroyed
        sink.report([Skipped(one, SkipReason.STORE_FAILED, shown(error)) for one in rest.deliveries])
        raise
    begun, left = _split(results)
    if begun:
        sink.report(begun)
    if left and not waiting.put_back(left, group.epoch):
        sink.put_back(left)


def _split(results: Sequence[Result]) -> tuple[Sequence[Result], list[Delivery]]:
    """Return the results of deliveries that were begun, and the other deliveries."""
    left = [one.delivery for one in results if isinstance(one, Skipped) and one.reason is SkipReason.NOT_BEGUN]
    if not left:
        return results, left
    return [one for one in results if not (isinstance(one, Skipped) and one.reason is SkipReason.NOT_BEGUN)], left
