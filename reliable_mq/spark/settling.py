"""Acks and hand-backs of what queue mode has read: on the channel that it came on, or not at all.

Invariant: of what came on a channel that is gone, nothing is sent; the broker delivers it again.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from reliable_mq.core.acks import AckBatcher
from reliable_mq.core.codec import encode_ack, encode_nack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.core.delivery import Delivery
    from reliable_mq.spark.metrics import QueueStatistics

__all__ = ["Settling"]

logger = logging.getLogger(__name__)


class Settling:
    """See the module. Of the I/O thread alone.

    Args:
        write: sends frames on the connection of now.
        statistics: where to count.
    """

    def __init__(self, write: Callable[[bytes], object], statistics: QueueStatistics) -> None:
        self._write = write
        self._statistics = statistics
        self._acks = AckBatcher(ack_interval=0.0, prefetch=0)
        self._channel = 0

    @property
    def generation(self) -> int:
        """Of the channel of now."""
        return self._acks.generation

    @property
    def outstanding(self) -> int:
        """Deliveries of this channel that are neither acked nor handed back."""
        return self._acks.outstanding

    def opened(self, generation: int, channel: int) -> None:
        """A channel is there."""
        self._channel = channel
        self._acks.opened(generation)

    def lost(self) -> None:
        """It is gone."""
        self._acks.lost()

    def delivered(self, first: int, last: int) -> None:
        """Deliveries came in, with these tags and those between."""
        self._acks.delivered(first, last)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Ack a committed batch."""
        own, tags = self._of_this_channel(deliveries)
        if len(own) < len(deliveries):
            self._statistics.stale_acks += len(deliveries) - len(own)
            logger.warning(
                "%d of %d deliveries of a committed batch came on a channel that is gone: they will come again",
                len(deliveries) - len(own),
                len(deliveries),
            )
        if own:
            self._statistics.acked.update(delivery.queue for delivery in own)
            self._acks.finished(self._acks.generation, tags, time.monotonic())
            self._write(b"".join(encode_ack(self._channel, *frame) for frame in self._acks.flush()))

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Return to the broker what is in no committed batch, and will be in none."""
        own, tags = self._of_this_channel(deliveries)
        if not own:
            return
        self._statistics.handed_back.update(delivery.queue for delivery in own)
        logger.info("handing back %d deliveries that are in no committed batch", len(own))
        acks, nacks = self._acks.hand_back(self._acks.generation, tags)
        frames = [encode_ack(self._channel, *frame) for frame in acks]
        frames += [encode_nack(self._channel, *frame, requeue=True) for frame in nacks]
        self._write(b"".join(frames))

    def _of_this_channel(self, deliveries: Sequence[Delivery]) -> tuple[list[Delivery], list[int]]:
        generation = self._acks.generation
        own = [delivery for delivery in deliveries if delivery.source.generation == generation]
        return own, [delivery.delivery_tag for delivery in own]
