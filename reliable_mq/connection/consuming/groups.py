"""How many deliveries one worker or task claims with one question to the store, and which of them may still begin.

Where handlers are quick, several deliveries are claimed at once; those whose turn does not come soon are put back,
unclaimed, so that no lease runs while another handler takes its time. Where the store fails, half as many are claimed
next, and then slowly more: it may have no room for so many.

Invariants: a group is of one epoch of what waits: once that was withdrawn, none of the group begins any more; the first
of a group may always begin; what is put back comes first again, in its order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from reliable_mq.core.delivery import Delivery
from reliable_mq.core.handling import Outcome, What

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from reliable_mq.core.handling import Result

__all__ = ["Groups", "Waiting", "Work"]

_CLAIMED_TOGETHER = 64  # deliveries for which the store is asked at once, at most
_GROUP_SECONDS = 0.05  # after which handlers that have not begun are put off: the lease of their claims is running

Work = Delivery | list[Delivery]


class Waiting(Protocol):
    """What has been handed out and nobody has begun with. An epoch ends when it is withdrawn."""

    items: deque[Work]
    epoch: int

    def put_back(self, deliveries: Sequence[Delivery], epoch: int) -> bool:
        """Put what was taken in front again, in its order; False where it is to be withdrawn by now."""


class Groups:
    """The groups of one worker or task, one after the other.

    Args:
        waiting: where to take from.
        share: of what waits that it may take at once.
    """

    def __init__(self, waiting: Waiting, share: float) -> None:
        self._waiting = waiting
        self._share = share
        self._together = 1  # deliveries to take at once, as long as their handlers are quick
        self._most: float = _CLAIMED_TOGETHER  # that the store seems to take
        self._calls = 0  # of the handler, since deliveries were taken
        self._epoch = 0  # in which they were
        self._end = 0.0  # until when they may begin

    def take(self, first: Work) -> list[Delivery]:
        """Begin a group with ``first``, and take a fair share of what waits along with it, unless that is a batch."""
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
        """Whether the next one of the group may begin now, by ``time.perf_counter``; asked once for each."""
        self._calls += 1
        return self._calls == 1 or (self._epoch == self._waiting.epoch and now <= self._end)

    def end(self, results: Sequence[Result]) -> tuple[Sequence[Result], list[Delivery]]:
        """Put back what has not begun. Returns the results of what has, and what could not be put back."""
        left = [one.delivery for one in results if isinstance(one, Outcome) and one.what is What.NOT_BEGUN]
        failed = any(isinstance(one, Outcome) and one.what is What.STORE_FAILED for one in results)
        self._most = max(len(results) // 2, 1) if failed else min(self._most + 0.25, _CLAIMED_TOGETHER)
        self._together = 1 if left else min(2 * self._together, int(self._most))
        if not left:
            return results, left
        begun = [one for one in results if not (isinstance(one, Outcome) and one.what is What.NOT_BEGUN)]
        return begun, [] if self._waiting.put_back(left, self._epoch) else left
