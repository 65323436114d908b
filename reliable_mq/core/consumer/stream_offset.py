"""The offset at which to resume a stream when its channel is lost.

A stream keeps consumed messages, and no count of acks.

Invariants: the position is never beyond a delivery that is not settled, so nothing is left out; a settled delivery
behind an unsettled one is delivered again, and is marked as redelivered, which RabbitMQ does not do for streams. Memory
is bounded by the deliveries between the oldest unsettled one and the newest.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliable_mq.errors import ConsumeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.core.consumer.delivery import Delivery

__all__ = ["StreamOffset"]


class StreamOffset:
    """The next offset to consume. Not thread-safe.

    Attributes:
        following: the offset at which the next channel is to begin; None where nothing came in yet.
        upcoming: the least offset of the next delivery on this channel; None likewise.
    """

    def __init__(self) -> None:
        self.following: int | None = None
        self.upcoming: int | None = None
        self._offsets: deque[int | None] = deque()  # of deliveries, from the delivery tag _first on
        self._first = 1
        self._unseen = 0  # offsets below were delivered on this channel or an earlier one

    def delivered(self, deliveries: Iterable[Delivery], lowest: int) -> None:
        """Add deliveries, in order; all with a tag below ``lowest`` are settled."""
        self._forget(lowest)
        for delivery in deliveries:
            offset = _offset(delivery)
            if offset is None:
                offset = self.upcoming
            self._offsets.append(offset)
            if offset is not None:
                self.upcoming = offset + 1
                if offset < self._unseen:
                    delivery.redelivered = True
                else:
                    self._unseen = self.upcoming

    def lost(self, lowest: int) -> None:
        """Go on at the first delivery that is not below ``lowest``: the channel is lost."""
        self._forget(lowest)
        self.following = self.upcoming = self._offsets[0] if self._offsets else self.upcoming
        self._offsets.clear()
        self._first = 1

    def _forget(self, lowest: int) -> None:
        while self._first < lowest and self._offsets:
            self._offsets.popleft()
            self._first += 1


def _offset(delivery: Delivery) -> int | None:
    try:
        return delivery.offset
    except ConsumeError:
        delivery.flaw = None  # the handler has not read the broken part
        return None
