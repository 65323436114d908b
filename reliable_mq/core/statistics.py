"""Counts that the core keeps while it works.

Plain numbers, written by the thread that owns a session and read by any other (a metrics scrape, a progress bar): each
is whole at any moment, and two of them may be a few messages apart. They only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["Histogram", "PublisherStatistics"]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds, in seconds, from a local broker's round trip to the default delivery timeout."""


class Histogram:
    """Observations counted by upper bound; cheap enough for one per message.

    Attributes:
        bounds: upper bounds, ascending; a value equal to a bound is counted under it.
        counts: observations per bound, and one more for those above the last. Not cumulative.
        total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float]) -> None:
        """Count many at once (at least one). Mostly they share a bucket, which makes it cheap."""
        if len(values) == 1:
            self.observe(values[0])
            return
        bucket = bisect_left(self.bounds, min(values))
        if bucket == bisect_left(self.bounds, max(values)):
            self.counts[bucket] += len(values)
            self.total += sum(values)
        else:
            for value in values:
                self.observe(value)

    def add(self, other: Histogram) -> None:
        """Count all that ``other`` has counted, under the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class PublisherStatistics:
    """What a publisher has seen.

    Attributes:
        confirmed, nacked, returned, refused, unknown: publishes settled, by outcome.
        nacks: ``basic.nack`` for a publish, whether it was tried again or reported.
        in_doubt: attempts that ended without a confirm because their channel was lost.
        republished: attempts beyond the first of a publish.
        stray_returns: returns that matched no outstanding publish.
        confirm_seconds: from acceptance to the confirm.
    """

    confirmed: int = 0
    nacked: int = 0
    returned: int = 0
    refused: int = 0
    unknown: int = 0
    nacks: int = 0
    in_doubt: int = 0
    republished: int = 0
    stray_returns: int = 0
    confirm_seconds: Histogram = field(default_factory=Histogram)
