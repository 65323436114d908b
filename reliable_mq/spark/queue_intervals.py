"""The time between two batches of queue mode, which can be too long. No I/O.

A batch is acked at the next trigger. A long interval limits the throughput: unacked deliveries keep others back. If the
interval is above the consumer timeout of a queue, the broker redelivers each batch before its ack, so that every batch
has the same messages.

Invariant: the query fails only if no batch was acked in time between those that were not.
"""

from __future__ import annotations

from typing import Final

from reliable_mq._util.logs import get_logger
from reliable_mq.errors import ConsumeError

logger = get_logger(__name__)

LINGER: Final = 0.1  # maximum seconds that a batch waits for more
_OF_INTERVAL: Final = 0.1  # share of the time since the previous batch to wait while the queue has more
_LONGEST_LINGER: Final = 5.0  # seconds
_SELDOM: Final = 2.0  # seconds between two batches that count as infrequent
_SELDOM_BATCHES: Final = 3
_SHORTEST_TIMEOUT: Final = 60.0  # seconds; RabbitMQ supports no shorter consumer timeout
_IN_VAIN: Final = 2  # consecutive batches that were redelivered before their acks


def longest_linger(since: float, *, backlog: bool) -> float:
    """Return the maximum seconds that a batch waits for more deliveries.

    With a trigger interval, a batch holds the deliveries of that interval, but unacked deliveries of the previous batch
    kept others back. If the queue has more messages, they are worth waiting for during a part of the interval.
    """
    return max(LINGER, min(_OF_INTERVAL * since, _LONGEST_LINGER)) if backlog else LINGER


class IntervalMonitor:
    """The intervals of one query. Not thread-safe.

    Attributes:
        taken_back: Whether the broker took back deliveries of the uncommitted batch, probably over the consumer
            timeout.
    """

    def __init__(self) -> None:
        self.taken_back = False
        self._seldom = 0  # consecutive infrequent batches while messages were ready
        self._in_vain = 0  # consecutive batches that were taken back

    def planned(self, rows: int, apart: float, backlog: int) -> None:
        """Warn once if full batches are infrequent while messages wait."""
        self._seldom = self._seldom + 1 if backlog and apart >= _SELDOM else 0
        if self._seldom == _SELDOM_BATCHES:
            logger.warning(
                "batches of %d messages are %.0f s apart, and %d more messages are ready: to read faster, shorten "
                "the trigger interval, or raise maxBytesPerTrigger (and maxMessagesPerTrigger and prefetch if "
                "they are set)",
                rows,
                apart,
                backlog,
            )

    def committed(self, unacked: float) -> None:
        """Record the commit of a batch, ``unacked`` seconds after it was planned.

        Raises:
            ConsumeError: If consecutive batches were redelivered before their acks.
        """
        self._in_vain = self._in_vain + 1 if self.taken_back and unacked >= _SHORTEST_TIMEOUT else 0
        self.taken_back = False
        if self._in_vain == _IN_VAIN:
            raise ConsumeError(
                f"{_IN_VAIN} batches in a row were redelivered before they were acked, and so would be every further "
                "one: a batch is acked at the next trigger, and that is later than the consumer timeout of the queue "
                "(30 minutes by default). Use a trigger interval below half of it, or trigger(availableNow=True) and "
                "a scheduler; make batches smaller with maxMessagesPerTrigger; use staged mode (the option stage); or "
                "raise x-consumer-timeout"
            )
