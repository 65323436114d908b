"""The deliveries of queue mode: waiting, in a batch, committed. No I/O.

The states of a delivery::

    waiting --plan--> in a batch --committed--> to be acked
    waiting --its channel is lost--> forgotten: the broker delivers it again
    waiting, or in a batch --the query stops--> to be requeued

Invariants:

- One batch is planned at a time: Spark plans the next one only after it has committed this one.
- A delivery is returned for its ack only after its batch was committed, and only once.
- A batch that was planned and not committed is planned again as the same batch.
- A batch that another process planned is empty here. The broker redelivers its messages, which go into a later batch.
- A batch keeps its deliveries when the channel is lost. The reader, which knows the channel, drops their acks.

An offset is a position among the deliveries of a query. Spark stores it as JSON in its checkpoint. It consists of the
name of the process that counted (`session`), the number of deliveries since the query began (`sequence`), and the
number by queue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from reliable_mq.codec import RawDelivery
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.errors import ConfigurationError

_OVERHEAD: Final = 512  # bytes per delivery in addition to its body and properties


def size_of(delivery: RawDelivery) -> int:
    """Return the approximate memory size of a delivery, in bytes."""
    return len(delivery.body) + len(delivery.properties) + _OVERHEAD


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """An offset of a query: the deliveries that it has read so far."""

    session: str
    sequence: int
    queues: Mapping[str, int]

    @classmethod
    def first(cls, queues: Iterable[str]) -> QueuePosition:
        return cls("", 0, dict.fromkeys(queues, 0))

    @classmethod
    def parse(cls, offset: object) -> QueuePosition:
        match offset:
            case {"session": str(session), "sequence": int(sequence), "queues": dict(queues)}:
                return cls(session, sequence, queues)
        raise ConfigurationError(
            f"the checkpoint has an offset that queue mode did not write: {str(offset)[:200]}; it belongs to another "
            "source: give this query a checkpointLocation of its own"
        )

    def as_json(self) -> dict[str, Any]:
        return {"session": self.session, "sequence": self.sequence, "queues": dict(self.queues)}


@dataclass(frozen=True, slots=True)
class _QueueBatch:
    start: QueuePosition
    end: QueuePosition
    deliveries: list[Delivery] = field(default_factory=list)
    size: int = 0


class Batches:
    """The deliveries of one reader, waiting and in batches. Not thread-safe."""

    def __init__(self, session: str) -> None:
        self._session = session  # unique to this process
        self.waiting: deque[Delivery] = deque()  # in no batch
        self.held = 0  # bytes of all waiting and planned deliveries
        self.remaining: dict[str, int] | None = None  # deliveries to plan, by queue, if there is a limit
        first = QueuePosition(session, 0, {})
        self._batch = _QueueBatch(first, first)  # the newest one; without deliveries once it is committed

    def knows(self, start: QueuePosition) -> bool:
        """Return whether the batch that follows ``start`` is already planned."""
        return bool(self._batch.deliveries) and self._batch.start == start

    def waits(self) -> bool:
        """Return whether a delivery is available to `plan`."""
        if self.remaining is None:
            return bool(self.waiting)
        return any(self.remaining[delivery.queue] > 0 for delivery in self.waiting)

    def arrived(self, deliveries: Sequence[Delivery]) -> int:
        """Add deliveries in this order and return their size in bytes."""
        self.waiting.extend(deliveries)
        size = sum(map(size_of, deliveries))
        self.held += size
        return size

    def plan(self, start: QueuePosition, *, most: int, most_bytes: int) -> QueuePosition:
        """Return the end of a batch of waiting deliveries, or ``start`` if none waits.

        A batch has at least one delivery, even if that exceeds ``most_bytes``, and at most `remaining` of each queue.
        """
        if self.knows(start):
            return self._batch.end
        remaining = self.remaining
        taken: list[Delivery] = []
        passed: list[Delivery] = []
        size = 0
        while self.waiting and len(taken) < most:
            delivery = self.waiting[0]
            if remaining is not None and remaining[delivery.queue] <= 0:
                passed.append(self.waiting.popleft())
                continue
            if taken and size + size_of(delivery) > most_bytes:
                break
            taken.append(self.waiting.popleft())
            size += size_of(delivery)
            if remaining is not None:
                remaining[delivery.queue] -= 1
        self.waiting.extendleft(reversed(passed))
        end = start
        if taken:
            counts = Counter(start.queues)
            counts.update(delivery.queue for delivery in taken)
            end = QueuePosition(self._session, start.sequence + len(taken), counts)
        self._batch = _QueueBatch(start, end, taken, size)
        return end

    def deliveries(self, start: QueuePosition, end: QueuePosition) -> list[Delivery]:
        """Return the deliveries between two positions, or none if they are unknown."""
        return self._batch.deliveries if (start, end) == (self._batch.start, self._batch.end) else []

    def horizon(self, ready: Mapping[str, int]) -> QueuePosition:
        """Return the position after all held deliveries and all ready messages."""
        last = self._batch.end
        counts = Counter(last.queues)
        counts.update(ready)
        counts.update(delivery.queue for delivery in self.waiting)
        return QueuePosition(self._session, last.sequence + sum(ready.values()) + len(self.waiting), counts)

    def committed(self, end: QueuePosition) -> list[Delivery]:
        """Forget the batch that ends at ``end``, and return its deliveries to ack."""
        batch = self._batch
        if batch.end != end:
            return []
        self._batch = _QueueBatch(end, end)
        self.held -= batch.size
        return batch.deliveries

    def lost(self) -> list[Delivery]:
        """Forget the waiting deliveries of a lost channel and return the planned ones."""
        self.held -= sum(map(size_of, self.waiting))
        self.waiting.clear()
        return self._batch.deliveries

    def recall(self, queue: str) -> list[Delivery]:
        """Forget and return the waiting deliveries of a queue that is no longer read."""
        recalled = [delivery for delivery in self.waiting if delivery.queue == queue]
        self.waiting = deque(delivery for delivery in self.waiting if delivery.queue != queue)
        self.held -= sum(map(size_of, recalled))
        return recalled

    def planned(self, queue: str) -> bool:
        """Return whether the uncommitted batch has deliveries of this queue."""
        return self._batch.end.queues.get(queue, 0) > self._batch.start.queues.get(queue, 0)

    def take_all(self) -> list[Delivery]:
        """Forget and return all deliveries, because the query stops."""
        everything = [*self._batch.deliveries, *self.waiting]
        self._batch = _QueueBatch(self._batch.end, self._batch.end)
        self.waiting.clear()
        self.held = 0
        return everything
