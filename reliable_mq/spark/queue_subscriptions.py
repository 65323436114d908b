"""The consumers of queues, and a prefetch that bounds unacked bytes. No I/O.

AMQP limits unacked deliveries by their number, RabbitMQ has no limit in bytes, and a message may have 16 MiB. So the
prefetch begins with one delivery and grows with the number of those whose size is known, and the subscription is
cancelled while too many bytes are held.

The limit of the prefetch is chosen for the queue, where the user gives none (`choose`). A queue without a delivery
limit is read as far ahead as the bytes allow: a crash then has messages come again, and nothing else.

On a queue with a delivery limit every death of the reader counts against all deliveries that it holds. So it holds the
fewer, the closer they are to the limit: the whole prefetch if none has come back before, a single delivery from half of
the limit on. A message that kills the reader reaches the limit alone. Messages that have come back before are at the
head of a queue: so the reader looks at one delivery before it requests more.

Invariant: the prefetch is at least 1. Unacked deliveries of all queues together are never more than the limit allows
them together, also while a subscription is renewed. No consumer tag is used twice: deliveries of a cancelled consumer
are told from those of its successor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reliable_mq.codec import CodecError, Properties, RawDelivery
from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, SetPrefetch, Step
from reliable_mq.spark.options import LARGEST_PREFETCH
from reliable_mq.spark.queue_checks import QueueProfile

__all__ = ["PrefetchChange", "PrefetchChoice", "PrefetchController", "Subscriptions", "choose", "times_returned"]

_CAREFUL: Final = 2000  # where a crash counts against what was read ahead
_STEADY: Final = 64  # where a change of the subscription makes another consumer the active one
_GROWTH: Final = 64  # times the deliveries whose size is known
_WEIGHT: Final = 0.2  # of the sizes of one read in the average
_COUNT: Final = "x-delivery-count"
_SLACK: Final = 1.1  # times the limit: messages a little larger than the average do not end a subscription


@dataclass(frozen=True, slots=True)
class PrefetchChoice:
    """The limit of the prefetch of a query, and why."""

    most: int  # deliveries that a queue may have unacked
    limit: int | None = None  # the delivery limit to heed; None also where the user has chosen the prefetch
    first: int = 1  # before a size is known
    reason: str = ""


def choose(given: int | None, queues: Sequence[QueueProfile]) -> PrefetchChoice:
    single = any(queue.single_active_consumer for queue in queues)
    if given is not None:
        return PrefetchChoice(given, None, given if single else 1, "the option prefetch says so")
    limited = min(
        (queue for queue in queues if queue.delivery_limit is not None),
        key=lambda queue: (queue.delivery_limit, queue.known),
        default=None,
    )
    if limited is not None:
        why = (
            f"queue {limited.name!r} has a delivery limit of {limited.delivery_limit}, and a crash counts against "
            "everything that was read ahead"
            if limited.known
            else f"the arguments of queue {limited.name!r} are not known, so it may have a delivery limit"
        )
        return PrefetchChoice(_CAREFUL, limited.delivery_limit, 1, f"{why}; the option prefetch overrides it")
    if single:
        why = "a queue has a single active consumer, which a change of the subscription may make another one"
        return PrefetchChoice(_STEADY, None, _STEADY, f"{why}; the option prefetch overrides it")
    return PrefetchChoice(
        LARGEST_PREFETCH, None, 1, "no queue has a delivery limit: maxBytesPerTrigger bounds what is read ahead"
    )


class PrefetchChange(enum.Enum):
    STAY = enum.auto()
    PAUSE = enum.auto()
    RENEW = enum.auto()
    """Subscribe anew, with what `PrefetchController.grant` returns."""


class PrefetchController:
    """Decide on the prefetch of all queues of a reader. Not thread-safe."""

    def __init__(self, *, most: int, most_bytes: int, queues: int, limit: int | None = None, first: int = 1) -> None:
        self.returned = 0  # how often an unacked delivery has come back before, at most; set by the owner
        self._limit = limit
        self._looked = limit is None  # at a first delivery of this channel
        self._most = most
        self._most_bytes = most_bytes
        self._queues = queues
        self._first = min(first, most)
        self._known = 0  # deliveries whose size is known
        self._average: float | None = None
        self.granted = self.prefetch  # of the present subscription, for each queue
        self.paused = False  # there is no subscription

    @property
    def prefetch(self) -> int:
        """The prefetch that a subscription should have now, if nothing is unacked."""
        if not self._looked:
            return 1
        if self._average is None:
            return self._first
        grown = max(_GROWTH * self._known, self._first)
        if self._bearable <= 4 * grown:  # else the next step would be less than twice this one
            grown = self._bearable
        return max(1, min(grown, int(self._most_bytes / self._queues / self._average)))

    def _target(self, unacked: int) -> int:
        """The prefetch to subscribe with while so many deliveries are unacked."""
        return max(1, min(self.prefetch, self._most - unacked // self._queues))

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
        self._known += count
        average = size / count
        if self._average is None or average > self._average:
            self._average = average
        else:
            self._average += _WEIGHT * (average - self._average)

    def lost(self) -> None:
        """Begin anew on the next channel: all unacked deliveries have come back once more."""
        self.returned = 0
        self._looked = self._limit is None

    def grant(self, unacked: int) -> int:
        """Return the prefetch of a new subscription, and note that there is one."""
        self.granted = self._target(unacked)
        self.paused = False
        return self.granted

    def next_change(self, held: int, unacked: int) -> PrefetchChange:
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
        if unacked >= self.granted and self._target(unacked) >= 2 * self.granted:
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


class Subscriptions:
    """The consumers on one channel at a time: one for each queue, with one prefetch.

    Its generators are the steps for a connection to carry out. Of the I/O thread alone.
    """

    def __init__(
        self, name: str, queues: Sequence[str], wanted: Callable[[str], bool], grant: Callable[[], int]
    ) -> None:
        self._name = name
        self._queues = queues
        self._wanted = wanted
        self._grant = grant
        self._granted = 1
        self._queue_of: dict[str, str] = {}  # by consumer tag, of this channel
        self._active: list[str] = []  # the tags that the broker delivers to now
        self._made = 0  # so far

    def queue(self, consumer_tag: str) -> str:
        """Return the queue of a consumer of this channel, active or cancelled."""
        return self._queue_of[consumer_tag]

    @property
    def queues(self) -> set[str]:
        return {self._queue_of[tag] for tag in self._active}

    def begin(self) -> Generator[Step, Any, None]:
        self._queue_of.clear()
        self._active.clear()
        yield from self._consume_wanted()

    def renew(self) -> Generator[Step, Any, None]:
        """Consume all wanted queues anew, with the present prefetch."""
        yield from self.end()
        yield from self._consume_wanted()

    def resume(self, queue: str) -> Generator[Step, Any, None]:
        """Consume a queue again whose consumer the broker has cancelled."""
        yield CheckQueue(queue)
        yield SetPrefetch(self._granted)
        yield self._consume(queue)

    def end(self, queue: str | None = None) -> Generator[Step, Any, None]:
        """Cancel the consumer of a queue, or all that exist when this is carried out."""
        tags = [tag for tag in self._active if queue in (None, self._queue_of[tag])]
        self._active = [tag for tag in self._active if tag not in tags]
        for tag in tags:
            yield Cancel(tag)

    def cancelled(self, consumer_tag: str) -> str | None:
        """Forget a consumer; return its queue, None if it was being cancelled anyway."""
        if consumer_tag not in self._active:
            return None
        self._active.remove(consumer_tag)
        return self._queue_of[consumer_tag]

    def lost(self) -> None:
        """Forget all consumers: their channel is gone."""
        self._active.clear()

    def _consume_wanted(self) -> Generator[Step, Any, None]:
        self._granted = self._grant()
        yield SetPrefetch(self._granted)
        for queue in filter(self._wanted, self._queues):
            yield self._consume(queue)

    def _consume(self, queue: str) -> Consume:
        self._made += 1
        tag = f"{self._name}-{self._made}"
        self._queue_of[tag] = queue
        self._active.append(tag)
        return Consume(queue, tag)
