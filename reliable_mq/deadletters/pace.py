"""How fast a replay publishes.

Invariant: in any second there are no more than the rate (of a rate that is no whole number, such as 1.5: two in any
1.33 seconds), however long nothing was published before. Time that passed without anything to publish is not made up
for; only what a wait took too long is.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final

__all__ = ["Pace"]

_MADE_UP: Final = 0.005  # seconds: by so much a wait may take too long


class Pace:
    """Spreads publishes evenly. Not thread-safe; times are seconds by a clock that does not jump.

    Args:
        rate: how many per second, above 0.
    """

    def __init__(self, rate: float) -> None:
        most = ceil(rate)
        self._gap = 1.0 / rate
        self._window = most / rate
        self._latest: deque[float] = deque(maxlen=most)
        self._due = float("-inf")

    def due(self) -> float:
        """Return when the next one may be published, at the earliest."""
        first = self._latest[0] + self._window if len(self._latest) == self._latest.maxlen else float("-inf")
        return max(self._due, first)

    def published(self, now: float) -> None:
        """One was published, not before it was due."""
        self._due = max(self._due, now - _MADE_UP) + self._gap
        self._latest.append(now)
