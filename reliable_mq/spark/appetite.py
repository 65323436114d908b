"""How many deliveries to ask the broker for, so that bytes stay bounded. Decides; does no I/O.

AMQP limits unacked deliveries by their number, RabbitMQ has no limit in bytes, and a message may have 16 MiB. So the
prefetch begins small, grows once sizes are known, and the subscription is cancelled while too much is held.

Invariant: the prefetch is at most what the user allows, and at least 1.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["Appetite", "Move"]

_FIRST: Final = 64  # deliveries whose size is not known: 1 GiB at the very most, and mostly some kilobytes
_WEIGHT: Final = 0.2  # of the sizes of one read in the average
_SLACK: Final = 1.1  # times what may be held: messages a little larger than the average do not end a subscription


class Move(enum.Enum):
    """What to do with the subscription."""

    STAY = enum.auto()
    PAUSE = enum.auto()
    RENEW = enum.auto()
    """Subscribe, again where need be, with the `Appetite.prefetch` of now."""


class Appetite:
    """See the module. Not thread-safe.

    Args:
        most: deliveries that a queue may have unacked.
        most_bytes: that all queues together may fill, about.
        queues: how many there are.

    Attributes:
        granted: the prefetch of the present subscription, for each queue.
        paused: whether there is none.
    """

    def __init__(self, *, most: int, most_bytes: int, queues: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._queues = queues
        self._average: float | None = None
        self.granted = self.prefetch
        self.paused = False

    @property
    def prefetch(self) -> int:
        """What a subscription should have now."""
        if self._average is None:
            return min(self._most, _FIRST)
        return max(1, min(self._most, int(self._most_bytes / self._queues / self._average)))

    def fed(self, count: int, size: int) -> None:
        """So many deliveries came in, of so many bytes."""
        average = size / count
        if self._average is None or average > self._average:
            self._average = average
        else:
            self._average += _WEIGHT * (average - self._average)

    def renewed(self) -> None:
        """There is a subscription with the prefetch of now."""
        self.granted = self.prefetch
        self.paused = False

    def move(self, held: int, unacked: int) -> Move:
        """Say what to do.

        Args:
            held: bytes that are held.
            unacked: deliveries that are.
        """
        if self.paused:
            return Move.RENEW if held <= self._most_bytes / 4 else Move.STAY
        if held > _SLACK * self._most_bytes:
            self.paused = True
            return Move.PAUSE
        if unacked >= self.granted and self.prefetch >= 2 * self.granted:
            return Move.RENEW
        return Move.STAY
