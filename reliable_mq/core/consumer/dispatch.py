"""What a consuming session hands out next: one by one, in batches, or from quarantine, as the kill switch lets it.

Invariants: a delivery waits in one place at a time, in the order in which it came; while the kill switch holds back,
one at a time is taken, as a probe: from quarantine only where nothing else waits, since that one may hang.

Deliveries grouped for a batch handler, and what its answer means for each of them.

Invariants: a delivery is in one batch at a time; a batch has at most ``batch_size`` deliveries, in the order in which
they came, and waits for more at most ``batch_wait`` seconds from its first one on; what is tried again is alone in its
batch, since an exception names no culprit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from reliable_mq.core.consumer.delivery import Delivery, DeliveryState
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.retry import Ack, DeadLetter, RetryLater

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.consumer.circuit_breaker import CircuitBreaker
    from reliable_mq.core.consumer.quarantine import Quarantine

__all__ = ["Batcher", "Dispatcher", "verdicts"]

T = TypeVar("T")


class Dispatcher:
    """See the module. Not thread-safe.

    Args:
        batcher: groups deliveries for a batch handler; None for a plain one.
        quarantine: of the queue; None where there is none.
        breaker: the kill switch; None where there is none.
    """

    __slots__ = ("_batcher", "_breaker", "_quarantine", "_work")

    def __init__(self, batcher: Batcher | None, quarantine: Quarantine | None, breaker: CircuitBreaker | None) -> None:
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
        delivery.state = DeliveryState.QUEUED
        if self._quarantine is not None and self._quarantine.has(delivery):
            self._quarantine.work.append(delivery)
        elif self._batcher is None:
            self._work.append(delivery)
        else:
            self._batcher.ready.append([delivery])

    def put_back(self, deliveries: list[Delivery], now: float) -> None:
        """These were taken, and no handler has begun with them."""
        for delivery in deliveries:
            delivery.state = DeliveryState.QUEUED
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
        for delivery in work:
            delivery.state = DeliveryState.RUNNING
        return work

    def take_batches(self) -> list[list[Delivery]]:
        """Take what is for a batch handler."""
        if self._batcher is None:
            return []
        batches, self._batcher.ready = self._allowed(self._batcher.ready)
        for batch in batches:
            for delivery in batch:
                delivery.state = DeliveryState.RUNNING
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
        for delivery in isolated:
            delivery.state = DeliveryState.RUNNING
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


class Batcher:
    """Groups deliveries. Not thread-safe.

    Args:
        batch_size: deliveries in a full batch.
        batch_wait: seconds that a batch waits to become full.

    Attributes:
        ready: batches to hand to the handler, since the list was last taken.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    __slots__ = ("_since", "_waiting", "batch_size", "batch_wait", "ready")

    def __init__(self, batch_size: int, batch_wait: float) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {batch_size}")
        if not batch_wait >= 0:
            raise ConfigurationError(f"batch_wait must be a number of seconds, at least 0, not {batch_wait}")
        self.batch_size = batch_size
        self.batch_wait = batch_wait
        self.ready: list[list[Delivery]] = []
        self._waiting: list[Delivery] = []
        self._since = 0.0

    @property
    def deadline(self) -> float | None:
        """When the batch that is waiting is given out, full or not; None where none waits."""
        return self._since + self.batch_wait if self._waiting else None

    def add(self, deliveries: list[Delivery], now: float) -> None:
        """These came in, in this order."""
        waiting = self._waiting
        if not waiting:
            self._since = now
        waiting += deliveries
        size = self.batch_size
        if len(waiting) < size:
            return
        full = len(waiting) - len(waiting) % size
        self.ready.extend(waiting[start : start + size] for start in range(0, full, size))
        self._waiting = waiting[full:]
        self._since = now

    def due(self, now: float) -> None:
        """Time passed."""
        deadline = self.deadline
        if deadline is not None and now >= deadline:
            self.ready.append(self._waiting)
            self._waiting = []

    def clear(self) -> list[Delivery]:
        """Take out everything that was not taken yet, in batches or waiting."""
        deliveries = [delivery for batch in self.ready for delivery in batch]
        deliveries += self._waiting
        self.ready = []
        self._waiting = []
        return deliveries


def verdicts(
    answer: object, deliveries: Sequence[Delivery], given: Sequence[object]
) -> list[tuple[Delivery, Exception | None]]:
    """Read what a batch handler returned: for each delivery None for an ack, else what is wrong with it.

    The verdicts are in the order of the list that the handler was given, as it has left it: it may have sorted that, or
    put something into it. Where it has taken deliveries out, only acks of all of them are clear.

    Args:
        answer: what it returned.
        deliveries: what it was called for.
        given: the list that it was called with, which is its own: a copy of ``deliveries`` then.

    Raises:
        UsageError: it is neither None nor a sequence of one verdict per delivery, or whose they are cannot be known.
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
