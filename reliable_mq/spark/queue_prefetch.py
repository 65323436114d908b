"""Choose a prefetch that bounds the bytes of unacked deliveries. No I/O.

AMQP limits unacked deliveries by their number, RabbitMQ has no limit in bytes, and a message may have 16 MiB. So the
prefetch begins small, grows once sizes are known, and the subscription is cancelled while too many bytes are held.

On a queue with a delivery limit every death of the reader counts against all deliveries that it holds. So it holds the
fewer, the closer they are to the limit: the whole prefetch if none has come back before, a single delivery from half of
the limit on. A message that kills the reader reaches the limit alone. Messages that have come back before are at the
head of a queue: so the reader looks at one delivery before it requests more.

Invariant: the prefetch is at least 1, and never above the limit of the user.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from reliable_mq.codec import CodecError, Properties

if TYPE_CHECKING:
    from reliable_mq.codec import RawDelivery

__all__ = ["PrefetchChange", "PrefetchController", "times_returned"]

_FIRST: Final = 64  # deliveries whose size is not known: 1 GiB at the very most, and mostly some kilobytes
_WEIGHT: Final = 0.2  # of the sizes of one read in the average
_COUNT: Final = "x-delivery-count"
_SLACK: Final = 1.1  # times the limit: messages a little larger than the average do not end a subscription


class PrefetchChange(enum.Enum):
    """A change of the subscription."""

    STAY = enum.auto()
    PAUSE = enum.auto()
    RENEW = enum.auto()
    """Subscribe anew, with the present `PrefetchController.prefetch`."""


class PrefetchController:
    """Decide on the prefetch of all queues of a reader. Not thread-safe.

    Args:
        most: deliveries that a queue may have unacked.
        most_bytes: bytes that all queues together may fill, about.
        queues: number of queues.
        limit: the delivery limit of the queues; None if there is none, or if it shall not be heeded.

    Attributes:
        granted: the prefetch of the present subscription, for each queue.
        paused: whether there is no subscription.
        returned: how often an unacked delivery has come back before, at most; set by the owner.
    """

    def __init__(self, *, most: int, most_bytes: int, queues: int, limit: int | None = None) -> None:
        self.returned = 0
        self._limit = limit
        self._looked = limit is None  # at a first delivery of this channel
        self._most = most
        self._most_bytes = most_bytes
        self._queues = queues
        self._average: float | None = None
        self.granted = self.prefetch
        self.paused = False

    @property
    def prefetch(self) -> int:
        """The prefetch that a subscription should have now."""
        if not self._looked:
            return 1
        if self._average is None:
            return min(self._most, _FIRST)
        return max(1, min(self._bearable, int(self._most_bytes / self._queues / self._average)))

    @property
    def _bearable(self) -> int:
        """Unacked deliveries of a queue that the death of the reader may count against."""
        if self._limit is None:
            return self._most
        if 2 * self.returned >= self._limit:
            return 1  # also with a limit of 0, where the first death counts against all held deliveries
        return int(self._most ** (1 - 2 * self.returned / self._limit))

    def received(self, count: int, size: int) -> None:
        """Learn the sizes: ``count`` deliveries came in, of ``size`` bytes together."""
        self._looked = True
        average = size / count
        if self._average is None or average > self._average:
            self._average = average
        else:
            self._average += _WEIGHT * (average - self._average)

    def lost(self) -> None:
        """Begin anew on the next channel: all unacked deliveries have come back once more."""
        self.returned = 0
        self._looked = self._limit is None

    def renewed(self) -> None:
        """Note that there is a subscription with the present prefetch."""
        self.granted = self.prefetch
        self.paused = False

    def next_change(self, held: int, unacked: int) -> PrefetchChange:
        """Return how to change the subscription now.

        Args:
            held: bytes of deliveries that are held.
            unacked: number of unacked deliveries.
        """
        if self.paused:
            return (
                PrefetchChange.RENEW
                if held <= self._most_bytes / 4 and not self._risky(unacked)
                else PrefetchChange.STAY
            )
        if held > _SLACK * self._most_bytes:
            self.paused = True
            return PrefetchChange.PAUSE
        if self._risky(unacked) and self.granted > 1:
            self.paused = True
            self._looked = False
            return PrefetchChange.PAUSE
        if unacked >= self.granted and self.prefetch >= 2 * self.granted:
            return PrefetchChange.RENEW
        return PrefetchChange.STAY

    def _risky(self, unacked: int) -> bool:
        """Whether more deliveries are unacked than the delivery limit can bear."""
        return self._limit is not None and unacked > self._queues * (2 * self._bearable + 1)  # of two subscriptions


def times_returned(delivery: RawDelivery) -> int:
    """Return how often a delivery has come back, by the broker's count; 0 if unknown."""
    try:
        count = Properties(delivery.properties).headers_beginning(_COUNT).get(_COUNT)
    except CodecError:
        return 0
    return count if isinstance(count, int) and count > 0 else 0
