"""The choice of deliveries to dispatch: single, in batches, or from quarantine.

Invariants:

- A delivery waits in one place at a time, in the order of arrival.
- While the kill switch pauses the consumer, one delivery at a time is dispatched, as a probe. A delivery from
  quarantine, which may hang, is a probe only if no other delivery waits.
- A batch has at most ``batch_size`` deliveries, in the order of arrival. It waits for more deliveries for at most
  ``batch_wait`` seconds after its first one.
- A delivery that is tried again is alone in its batch, because an exception names no culprit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from reliable_mq.core.consumer.delivery import Delivery, DeliveryState
from reliable_mq.errors import UsageError
from reliable_mq.retry import Ack, DeadLetter, RetryLater

if TYPE_CHECKING:
    from reliable_mq.core.consumer.kill_switch import KillSwitchMonitor
    from reliable_mq.core.consumer.quarantine import Quarantine

_RUNNING: Final = DeliveryState.RUNNING  # a global is looked up faster than a member of an enum
#: One delivery, or a batch for a batch handler.
Work: TypeAlias = Delivery | list[Delivery]


def deliveries_of(work: Work) -> list[Delivery]:
    """Return one delivery as a list, and a batch as it is."""
    return [work] if isinstance(work, Delivery) else work


class Dispatcher:
    """The deliveries that wait for a handler. Not thread-safe."""

    def __init__(
        self, batcher: Batcher | None, quarantine: Quarantine | None, kill_switch: KillSwitchMonitor | None
    ) -> None:
        self._batcher = batcher
        self._quarantine = quarantine
        self._kill_switch = kill_switch
        self._ready: list[Any] = []  # deliveries, or batches if there is a batcher
        self._quarantined: list[Delivery] = []  # deliveries from quarantine, one at a time

    def add(self, deliveries: list[Delivery], now: float) -> None:
        """Add deliveries of the queue."""
        self._ready += deliveries if self._batcher is None else self._batcher.add(deliveries, now)

    def add_any(self, deliveries: list[Delivery], now: float) -> None:
        """Add deliveries of the queue, or of quarantine."""
        self.add(self._without_quarantined(deliveries), now)

    def add_alone(self, delivery: Delivery) -> None:
        delivery.state = DeliveryState.QUEUED
        alone = self._without_quarantined([delivery])
        if alone:
            self._ready.append(delivery if self._batcher is None else alone)

    def put_back(self, deliveries: list[Delivery]) -> None:
        """Queue dispatched deliveries, which no handler has begun with, before others."""
        for delivery in deliveries:
            delivery.state = DeliveryState.QUEUED
        deliveries = self._without_quarantined(deliveries)
        if self._batcher is None:
            self._ready[:0] = deliveries
        else:
            alone = [[delivery] for delivery in deliveries if delivery.redelivered]
            others = [delivery for delivery in deliveries if not delivery.redelivered]
            self._ready[:0] = [*alone, *self._batcher.split(others)]

    def due(self, now: float) -> None:
        """Advance the timers of batches and of the kill switch to ``now``."""
        if self._batcher is not None:
            self._ready += self._batcher.due(now)
        if self._kill_switch is not None:
            self._kill_switch.due(now)

    def take(self) -> tuple[Sequence[Work], int]:
        """Take the deliveries or batches to dispatch now, and the number of deliveries."""
        if not self._ready:
            return (), 0
        work, self._ready = self._ready, []
        if self._kill_switch is not None:
            allowed = self._kill_switch.allows
            if allowed is not None:
                work, self._ready = work[:allowed], work[allowed:]
            if allowed:
                self._kill_switch.dispatched(self._deliveries(work))
        deliveries = self._deliveries(work)
        for delivery in deliveries:
            delivery.state = _RUNNING
        return work, len(deliveries)

    @property
    def has_quarantined(self) -> bool:
        """Whether deliveries wait for `take_quarantined`."""
        return bool(self._quarantined)

    def take_quarantined(self) -> list[Work]:
        """Take the deliveries from quarantine to dispatch now."""
        kill_switch = self._kill_switch
        if kill_switch is not None and kill_switch.paused:
            if not kill_switch.allows or self._ready:
                return []
            kill_switch.dispatched(self._quarantined, beside=True)
        taken, self._quarantined = self._quarantined, []
        for delivery in taken:
            delivery.state = _RUNNING
        return list(taken) if self._batcher is None else [[delivery] for delivery in taken]

    def clear(self) -> list[Delivery]:
        """Take all deliveries, to be requeued."""
        waiting = [] if self._batcher is None else self._batcher.clear()
        deliveries = [*self._deliveries(self._ready), *waiting, *self._quarantined]
        self._ready, self._quarantined = [], []
        return deliveries

    @property
    def empty(self) -> bool:
        """Whether no delivery waits, except those of a batch that is not full."""
        return not (self._ready or self._quarantined)

    @property
    def deadline(self) -> float:
        """The time of the next timer, infinity without one."""
        timers = (self._batcher, self._quarantine, self._kill_switch)
        return min((timer.deadline for timer in timers if timer is not None), default=inf)

    def _deliveries(self, work: list[Any]) -> list[Delivery]:
        return work if self._batcher is None else list(chain.from_iterable(work))

    def _without_quarantined(self, deliveries: list[Delivery]) -> list[Delivery]:
        quarantine = self._quarantine
        if quarantine is None:
            return deliveries
        self._quarantined += [delivery for delivery in deliveries if quarantine.has(delivery)]
        return [delivery for delivery in deliveries if not quarantine.has(delivery)]


class Batcher:
    """A grouping of deliveries for a batch handler. Not thread-safe.

    Args:
        batch_size: The number of deliveries in a full batch.
        batch_wait: The maximum seconds that a batch waits to become full.
    """

    def __init__(self, batch_size: int, batch_wait: float) -> None:
        self.batch_size = batch_size
        self.batch_wait = batch_wait
        self._waiting: list[Delivery] = []
        self._since = 0.0

    @property
    def deadline(self) -> float:
        """The time when an incomplete batch is dispatched, infinity if none waits."""
        return self._since + self.batch_wait if self._waiting else inf

    def add(self, deliveries: list[Delivery], now: float) -> list[list[Delivery]]:
        """Add deliveries, in order. Return the batches that are full."""
        waiting = [*self._waiting, *deliveries]
        full = len(waiting) - len(waiting) % self.batch_size
        if full or not self._waiting:
            self._since = now
        self._waiting = waiting[full:]
        return self.split(waiting[:full])

    def split(self, deliveries: list[Delivery]) -> list[list[Delivery]]:
        """Return batches of the deliveries, all full except the last."""
        size = self.batch_size
        return [deliveries[start : start + size] for start in range(0, len(deliveries), size)]

    def due(self, now: float) -> list[list[Delivery]]:
        """Return the batch that has waited long enough, if any."""
        if now < self.deadline:
            return []
        batch, self._waiting = self._waiting, []
        return [batch]

    def clear(self) -> list[Delivery]:
        waiting, self._waiting = self._waiting, []
        return waiting


def verdicts(
    answer: object, deliveries: Sequence[Delivery], given: Sequence[object]
) -> list[tuple[Delivery, Exception | None]]:
    """Return a batch handler's verdicts by delivery: None for an ack, or an exception.

    The verdicts follow the order of the list that was passed to the handler, in its final state: the handler may have
    sorted it or added to it. If the handler has removed deliveries, only verdicts that are all acks are unambiguous.

    Args:
        answer: The return value of the handler.
        deliveries: The deliveries of the batch.
        given: The list with which the handler was called. It was a copy of ``deliveries``, and the handler may have
            changed it.

    Raises:
        UsageError: If the answer is neither None nor a sequence of one verdict per delivery, or if the verdicts cannot
            be matched to the deliveries.
    """
    if answer is None:
        return [(delivery, None) for delivery in deliveries]
    kind = answer if isinstance(answer, type) else type(answer)
    if issubclass(kind, (Ack, RetryLater, DeadLetter)):
        raise UsageError(
            f"the batch handler returned one verdict, {answer!r}, for {len(deliveries)} deliveries: return a list with "
            "a verdict for each, or nothing for an ack of all"
        )
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        raise UsageError(f"a batch handler returns None or a sequence of verdicts, not {type(answer).__name__}")
    count = len(deliveries)
    if len(answer) != count:
        raise UsageError(f"the batch handler returned {len(answer)} verdicts for {count} deliveries")
    found = [_verdict(item) for item in answer]
    ours = {id(delivery): delivery for delivery in deliveries}
    order = [id(one) for one in given if id(one) in ours]
    if len(order) == count == len(set(order)):
        deliveries = [ours[one] for one in order]
    elif any(verdict is not None for verdict in found):
        raise UsageError(
            "the batch handler took deliveries out of its list, and returned other verdicts than Ack: which belongs to "
            "which delivery is not known; return them in the order of the list, and leave in it what was in it"
        )
    return list(zip(deliveries, found, strict=True))


def _verdict(item: object) -> Exception | None:
    if item is None or item is Ack or isinstance(item, Ack):
        return None
    if isinstance(item, Exception):
        return item
    if item is RetryLater:
        return RetryLater()
    return UsageError(f"a verdict is Ack, RetryLater(...), DeadLetter(...) or an exception, not {item!r:.100}")
