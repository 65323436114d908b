"""What a consuming session hands out next: one by one, in batches, or from quarantine, as the kill switch lets it.

Invariants: a delivery waits in one place at a time, in the order in which it came; while the kill switch holds back,
one at a time is taken, as a probe: from quarantine only where nothing else waits, since that one may hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.batching import Batcher
    from reliable_mq.core.breaker import Breaker
    from reliable_mq.core.delivery import Delivery
    from reliable_mq.core.quarantine import Quarantine

__all__ = ["HandOut"]

T = TypeVar("T")


class HandOut:
    """See the module. Not thread-safe.

    Args:
        batcher: groups deliveries for a batch handler; None for a plain one.
        quarantine: of the queue; None where there is none.
        breaker: the kill switch; None where there is none.
    """

    __slots__ = ("_batcher", "_breaker", "_quarantine", "_work")

    def __init__(self, batcher: Batcher | None, quarantine: Quarantine | None, breaker: Breaker | None) -> None:
        self._batcher = batcher
        self._quarantine = quarantine
        self._breaker = breaker
        self._work: list[Delivery] = []

    def add(self, deliveries: list[Delivery], now: float) -> None:
        """These came in, from the queue itself."""
        if self._batcher is None:
            self._work += deliveries
        elif deliveries:
            self._batcher.add(deliveries, now)

    def add_any(self, deliveries: list[Delivery], now: float) -> None:
        """These came in, some from quarantine maybe."""
        self.add(self._without_isolated(deliveries), now)

    def add_alone(self, delivery: Delivery) -> None:
        """It is to be tried again, by itself."""
        if self._quarantine is not None and self._quarantine.has(delivery):
            self._quarantine.work.append(delivery)
        elif self._batcher is None:
            self._work.append(delivery)
        else:
            self._batcher.ready.append([delivery])

    def put_back(self, deliveries: list[Delivery], now: float) -> None:
        """These were taken, and no handler has begun with them."""
        deliveries = self._without_isolated(deliveries)
        if self._batcher is None:
            self._work = deliveries + self._work
        elif deliveries:
            self._batcher.add(deliveries, now)

    def due(self, now: float) -> None:
        """Time passed."""
        if self._batcher is not None:
            self._batcher.due(now)
        if self._breaker is not None:
            self._breaker.due(now)

    def take_work(self) -> list[Delivery]:
        """Take what is for a plain handler."""
        work, self._work = self._allowed(self._work)
        return work

    def take_batches(self) -> list[list[Delivery]]:
        """Take what is for a batch handler."""
        if self._batcher is None:
            return []
        batches, self._batcher.ready = self._allowed(self._batcher.ready)
        return batches

    def take_isolated(self, waits: Callable[[], bool]) -> list[Delivery]:
        """Take what came from quarantine, unless it ``waits``."""
        quarantine, breaker = self._quarantine, self._breaker
        if quarantine is None or not quarantine.work or waits():
            return []
        if breaker is not None and breaker.paused:
            if not breaker.allows or self._work or (self._batcher is not None and self._batcher.ready):
                return []
            breaker.handed_out(beside=True)
        isolated, quarantine.work = quarantine.work, []
        return isolated

    def clear(self) -> list[Delivery]:
        """Take everything."""
        deliveries, self._work = self._work, []
        if self._batcher is not None:
            deliveries += self._batcher.clear()
        if self._quarantine is not None:
            deliveries += self._quarantine.work
            self._quarantine.work = []
        return deliveries

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be taken, an incomplete batch aside."""
        return not (self._work or (self._quarantine is not None and self._quarantine.work))

    @property
    def deadline(self) -> float | None:
        """When to look again, though nothing happens until then."""
        times = (
            None if self._batcher is None else self._batcher.deadline,
            None if self._quarantine is None else self._quarantine.deadline,
            None if self._breaker is None else self._breaker.deadline,
        )
        return min((time for time in times if time is not None), default=None)

    def _without_isolated(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Put aside what came from quarantine."""
        quarantine = self._quarantine
        if quarantine is None:
            return deliveries
        quarantine.work += [delivery for delivery in deliveries if quarantine.has(delivery)]
        return [delivery for delivery in deliveries if not quarantine.has(delivery)]

    def _allowed(self, work: list[T]) -> tuple[list[T], list[T]]:
        """Divide it into what may be handed out now, and the rest."""
        allowed = None if self._breaker is None or not work else self._breaker.allows
        if self._breaker is None or allowed is None:
            return work, []
        if allowed:
            self._breaker.handed_out()
        return work[:allowed], work[allowed:]
