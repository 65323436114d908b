"""Outstanding publishes, ordered by deadline.

Most publishes have the publisher's own delivery timeout, so their deadlines come in the order of acceptance, and the
next deadline is that of the oldest: the order is all there is to keep. Those with a timeout of their own are in a heap
as well.

A settled publish is known by its ``outcome``. It is dropped when it comes to the front, or when there are more settled
ones than others: so settling many costs one subtraction, and a straggler keeps no others alive.

Invariants:

- a publish enters once, and counts until it is settled;
- ``expire(now)`` returns exactly those unsettled whose deadline is at or before ``now``;
- entering, settling and expiring cost O(1) amortised with the common timeout and O(log n) with one of their own;
- settled publishes held are never more than unsettled ones, but for a few.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.core.publisher.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PublishDeadlines"]

P = TypeVar("P", bound=Publication)

_SETTLED_KEPT = 64  # settled publishes that are left to be skipped, however few unsettled ones there are


class PublishDeadlines(Generic[P]):
    """Accepted and unsettled publishes. Not thread-safe."""

    def __init__(self, delivery_timeout: float) -> None:
        self._delivery_timeout = delivery_timeout
        self._unsettled = 0
        self._common: deque[P] = deque()
        self._timed: deque[P] = deque()  # those with a timeout of their own, as they came
        self._heap: list[tuple[float, int, P]] = []  # the same, by deadline
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
        """Subtract publishes that have an outcome now."""
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
        """When the oldest publish was accepted; None if there is none."""
        oldest = (_first(self._common), _first(self._timed))
        return min((one.accepted_at for one in oldest if one is not None), default=None)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` will find the next one; None if there is none."""
        oldest = _first(self._common)
        common = None if oldest is None else oldest.accepted_at + self._delivery_timeout
        while self._heap and self._heap[0][2].outcome is not None:
            heapq.heappop(self._heap)
        timed = self._heap[0][0] if self._heap else None
        return min((at for at in (common, timed) if at is not None), default=None)

    def expire(self, now: float) -> list[P]:
        """Return those whose deadline has come, those with the common timeout first.

        The caller sets their outcome and calls `settled` before any other method.
        """
        expired: list[P] = []
        while self._common and self._common[0].accepted_at + self._delivery_timeout <= now:
            expired.append(self._common.popleft())
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return [one for one in expired if one.outcome is None]


def _first(publications: deque[P]) -> P | None:
    """Return the first that is unsettled; drop the settled ones before it."""
    while publications and publications[0].outcome is not None:
        publications.popleft()
    return publications[0] if publications else None
