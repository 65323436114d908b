"""Watch the broker's consumer timeout.

The broker requeues deliveries that are unacked for too long. The timeout is 30 minutes unless the broker, a policy or
the queue says otherwise, and no client can ask. Up to RabbitMQ 4.2 the broker closes the channel, with 406 and a text
that says so; from 4.3 on it cancels the consumer of a quorum queue. Either way it does so some time after the deadline
(a channel looks once a minute), and does not say which delivery it was.

Deliveries of one read from the socket are kept together, so that one which is handled in time costs nothing of its own.

Invariants: a delivery is overdue once; the settled deliveries that are kept are at most as many as are outstanding, and
a few more.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from reliable_mq.core.consumer.acks import AckBatcher
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.reconnect import ConnectionLoss

__all__ = ["WARN_AT", "ConsumerTimeout", "ConsumerTimeoutMonitor", "consumer_timeout_of"]

#: The part of the consumer timeout after which a delivery that is still unacked is warned of.
WARN_AT: Final = 0.75
_SLACK_SHARE: Final = 0.02  # of the timeout: a delivery was on its way when its time began
_SLACK: Final = 1.0  # seconds, at least
_SPARE: Final = 64  # deliveries that are kept without need, at least
_PRECONDITION_FAILED: Final = 406
_TIMED_OUT: Final = re.compile(r"timed out", re.IGNORECASE)
_VALUE: Final = re.compile(r"value used: (\d+) ms", re.IGNORECASE)


class ConsumerTimeout(NamedTuple):
    """The broker has requeued deliveries that were unacked for too long."""

    timeout: float | None = None  # seconds, where the broker said so
    consumer_tag: str | None = None  # of the subscription that it has ended; None where it closed the channel


def consumer_timeout_of(loss: ConnectionLoss) -> ConsumerTimeout | None:
    """Return the timeout that closed a channel; None for other causes of code 406."""
    if loss.code != _PRECONDITION_FAILED or not _TIMED_OUT.search(loss.text):
        return None
    value = _VALUE.search(loss.text)
    return ConsumerTimeout(None if value is None else int(value[1]) / 1000)


class ConsumerTimeoutMonitor:
    """The unacked deliveries of one channel at a time, by age. Not thread-safe.

    ``timeout`` is the broker's, in seconds; None where it has none.
    """

    def __init__(self, timeout: float | None, acks: AckBatcher) -> None:
        self.timeout = timeout
        self._acks = acks
        self._young: deque[tuple[float, list[Delivery]]] = deque()  # when they came in
        self._old: deque[tuple[float, list[Delivery]]] = deque()  # the overdue ones
        self._kept = 0

    def delivered(self, deliveries: list[Delivery], now: float) -> None:
        """Add deliveries, in the order of their tags; at least one. Keeps the list."""
        self._young.append((now, deliveries))
        self._kept += len(deliveries)
        if self._kept > 2 * self._acks.outstanding + _SPARE:
            self._forget()

    def clear(self) -> None:
        """Forget all deliveries: their channel is gone."""
        self._young.clear()
        self._old.clear()
        self._kept = 0

    def newly_overdue(self, now: float) -> list[Delivery]:
        """Return the deliveries overdue since the last call; forget finished ones."""
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
        """Return the deliveries that were unacked for so long, by the broker's clock."""
        since = now - age + max(_SLACK, age * _SLACK_SHARE)
        old = [read for at, read in (*self._old, *self._young) if at <= since]
        return [delivery for read in old for delivery in self._acks.unfinished_of(read)]

    @property
    def deadline(self) -> float | None:
        """When to call `newly_overdue` if nothing happens until then; None for never."""
        if self.timeout is None or not self._young:
            return None
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
