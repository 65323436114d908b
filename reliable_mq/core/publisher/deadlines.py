"""Outstanding publishes, ordered by deadline.

Most publishes use the delivery timeout of the publisher. Their deadlines follow the order of acceptance, and the next
deadline is that of the oldest publish, so only the order is stored. Publishes with an individual timeout are also in a
heap.

A settled publish is recognised by its ``outcome``. It is dropped when it reaches the front, or when there are more
settled publishes than unsettled ones. So settling many costs one subtraction, and a straggler keeps no others alive.

Invariants:

- A publish enters once, and counts until it is settled.
- ``expire(now)`` returns exactly the unsettled publishes whose deadline is at or before ``now``.
- Entering, settling and expiring cost O(1) amortised with the common timeout, and O(log n) with an individual timeout.
- The settled publishes held never outnumber the unsettled ones, but for a few.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.core.publisher.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Iterable

P = TypeVar("P", bound=Publication)

_SETTLED_KEPT = 64  # settled publishes that may always be held


class PublishDeadlines(Generic[P]):
    """Accepted and unsettled publishes. Not thread-safe."""

    def __init__(self, delivery_timeout: float) -> None:
        self._delivery_timeout = delivery_timeout
        self._unsettled = 0
        self._common: deque[P] = deque()
        self._timed: deque[P] = deque()  # publishes with an individual timeout, in the order of acceptance
        self._heap: list[tuple[float, int, P]] = []  # the same publishes, by deadline
        self._order = itertools.count()  # breaks ties in _heap

    def __len__(self) -> int:
        return self._unsettled

    def enter(self, publications: Iterable[P]) -> None:
        """Add accepted publishes, in the order of their ``accepted_at``."""
        common = self._common
        before = len(common)
        for publication in publications:
            if publication.timeout is None:
                common.append(publication)
            else:
                self._timed.append(publication)
                deadline = publication.accepted_at + publication.timeout
                heapq.heappush(self._heap, (deadline, next(self._order), publication))
                self._unsettled += 1
        self._unsettled += len(common) - before

    def settled(self, count: int) -> None:
        """Subtract publishes that have received their outcome."""
        self._unsettled -= count
        kept = 2 * self._unsettled + _SETTLED_KEPT
        if len(self._common) > kept:
            self._common = deque(one for one in self._common if one.outcome is None)
        if len(self._timed) > kept:
            self._timed = deque(one for one in self._timed if one.outcome is None)
        if len(self._heap) > kept:
            self._heap = [entry for entry in self._heap if entry[2].outcome is None]
            heapq.heapify(self._heap)

    @property
    def oldest_accepted_at(self) -> float | None:
        """The time when the oldest publish was accepted, None without one."""
        oldest = (_first(self._common), _first(self._timed))
        return min((one.accepted_at for one in oldest if one is not None), default=None)

    @property
    def next_deadline(self) -> float:
        """The time when the next publish expires, infinity without one."""
        oldest = _first(self._common)
        common = inf if oldest is None else oldest.accepted_at + self._delivery_timeout
        while self._heap and self._heap[0][2].outcome is not None:
            heapq.heappop(self._heap)
        return min(common, self._heap[0][0]) if self._heap else common

    def expire(self, now: float) -> list[P]:
        """Remove and return expired publishes, those with the common timeout first.

        The caller sets their outcome and calls `settled` before any other method.
        """
        expired: list[P] = []
        while self._common and self._common[0].accepted_at + self._delivery_timeout <= now:
            expired.append(self._common.popleft())
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return [one for one in expired if one.outcome is None]


def _first(publications: deque[P]) -> P | None:
    """Return the first unsettled publish, and drop the settled ones before it."""
    while publications and publications[0].outcome is not None:
        publications.popleft()
    return publications[0] if publications else None
