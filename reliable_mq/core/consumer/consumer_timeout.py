"""The broker's consumer timeout.

The broker requeues deliveries that are unacked for too long. The timeout is 30 minutes unless the broker, a policy or
the queue sets another value, which no client can query. Up to RabbitMQ 4.2 the broker closes the channel, with 406 and
a text about the timeout. From 4.3 on it cancels the consumer of a quorum queue. In both cases it acts some time after
the deadline (a channel checks once a minute), and does not name the delivery.

Deliveries of one read from the socket are kept together, so that a delivery handled in time has no individual cost.

Invariants: A delivery is overdue once. The settled deliveries kept are at most as many as the outstanding ones, plus a
few.
"""

from __future__ import annotations

import re
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.codec.methods import ReplyCode

if TYPE_CHECKING:
    from reliable_mq.core.consumer.acks import AckBatcher
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.reconnect import ConnectionLoss

#: The part of the consumer timeout after which a warning is logged for an unacked delivery.
WARN_AT: Final = 0.75
_SLACK_SHARE: Final = 0.02  # the part of the timeout for which a delivery may have been on its way
_SLACK: Final = 1.0  # the minimum of that, in seconds
_SPARE: Final = 64  # settled deliveries that may always be kept
_TIMED_OUT: Final = re.compile(r"timed out", re.IGNORECASE)
_VALUE: Final = re.compile(r"value used: (\d+) ms", re.IGNORECASE)


class ConsumerTimeout(NamedTuple):
    """The broker has requeued deliveries that were unacked for too long."""

    timeout: float | None = None  # in seconds, None if the broker did not report it
    consumer_tag: str | None = None  # the subscription that the broker ended, None if it closed the channel


def consumer_timeout_of(loss: ConnectionLoss) -> ConsumerTimeout | None:
    """Return the timeout that closed a channel, None for any other loss."""
    if loss.code != ReplyCode.PRECONDITION_FAILED or not _TIMED_OUT.search(loss.text):
        return None
    value = _VALUE.search(loss.text)
    return ConsumerTimeout(None if value is None else int(value[1]) / 1000)


class ConsumerTimeoutMonitor:
    """The unacked deliveries of one channel at a time, by age. Not thread-safe.

    ``timeout`` is the consumer timeout of the broker, in seconds, or None without one.
    """

    def __init__(self, timeout: float | None, acks: AckBatcher) -> None:
        self.timeout = timeout
        self._acks = acks
        self._young: deque[tuple[float, list[Delivery]]] = deque()  # deliveries of one read, with their arrival time
        self._old: deque[tuple[float, list[Delivery]]] = deque()  # the overdue ones
        self._kept = 0

    def delivered(self, deliveries: list[Delivery], now: float) -> None:
        """Add at least one delivery, in the order of tags. The monitor keeps the list."""
        self._young.append((now, deliveries))
        self._kept += len(deliveries)
        if self._kept > 2 * self._acks.outstanding + _SPARE:
            self._forget()

    def clear(self) -> None:
        """Forget all deliveries, because their channel is gone."""
        self._young.clear()
        self._old.clear()
        self._kept = 0

    def newly_overdue(self, now: float) -> list[Delivery]:
        """Forget finished deliveries. Return those overdue since the last call."""
        lowest, young = self._acks.first_unfinished, self._young
        while young and young[0][1][-1].delivery_tag < lowest:
            self._kept -= len(young.popleft()[1])
        found: list[Delivery] = []
        if self.timeout is not None:
            since = now - self.timeout * WARN_AT
            while young and young[0][0] <= since:
                at, deliveries = young.popleft()
                self._kept -= len(deliveries)
                found += self._keep(at, deliveries, self._old)
        return found

    def unacked(self, age: float, now: float) -> list[Delivery]:
        """Return deliveries unacked for ``age`` seconds by the broker's clock."""
        since = now - age + max(_SLACK, age * _SLACK_SHARE)
        old = [read for at, read in (*self._old, *self._young) if at <= since]
        return [delivery for read in old for delivery in self._acks.unfinished_of(read)]

    @property
    def deadline(self) -> float:
        """The time to call `newly_overdue` if no event comes first, infinity for never."""
        if self.timeout is None or not self._young:
            return inf
        return self._young[0][0] + self.timeout * WARN_AT

    def _forget(self) -> None:
        """Forget finished deliveries behind an unfinished one."""
        self._kept = 0
        for reads in (self._old, self._young):
            for _ in range(len(reads)):
                self._keep(*reads.popleft(), reads)

    def _keep(
        self, at: float, deliveries: list[Delivery], reads: deque[tuple[float, list[Delivery]]]
    ) -> list[Delivery]:
        left = self._acks.unfinished_of(deliveries)
        if left:
            reads.append((at, left))
            self._kept += len(left)
        return left
