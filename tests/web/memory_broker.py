"""Dead-letter queues in memory for the real `DeadLetterQueue`.

Only its channel and publisher are replaced.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from reliable_mq import Message
from reliable_mq.codec import encode_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.publisher.publication import Receipt
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.deadletters.delivery_limit import DeliveryLimit
from reliable_mq.errors import BrokerUnavailable, PublishReturned, StaleDelivery, TopologyMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable


class MemoryBroker:
    """Queues by name: encoded properties, body, and whether it was delivered before."""

    def __init__(self) -> None:
        self.queues: dict[str, list[tuple[bytes, bytes, bool]]] = {}
        self.reads = 0
        self.away = False
        self.counts_reads = False
        self.fails_at_ack = 0  # the number of the ack that fails, from 1; 0 for none
        self.failure: BaseException = StaleDelivery("the connection was lost")
        self.gate = threading.Event()  # publishes wait for it
        self.gate.set()
        self.reading = threading.Event()  # reads wait for it
        self.reading.set()

    def add(self, queue: str, *messages: Message) -> None:
        letters = self.queues.setdefault(queue, [])
        letters.extend((encode_properties(message), bytes(message.body), False) for message in messages)

    def bodies(self, queue: str) -> list[bytes]:
        return [body for _, body, _ in self.queues[queue]]

    def open(self, url: str, queue: str, **_: Any) -> DeadLetterQueue:
        return _Queue(self, url, queue)

    def depths(self, _settings: object, names: Iterable[str]) -> dict[str, int | None]:
        if self.away:
            raise BrokerUnavailable("no host could be reached")
        return {name: len(self.queues[name]) if name in self.queues else None for name in names}


class _Queue(DeadLetterQueue):
    def __init__(self, broker: MemoryBroker, url: str, queue: str) -> None:
        super().__init__(url, queue)
        self._broker = broker
        self._channel = _Channel(broker, queue)  # type: ignore[assignment]
        self._new_publisher = lambda: _Publisher(broker)  # type: ignore[assignment, return-value]

    def __enter__(self) -> Self:
        assert self._broker.reading.wait(30)
        if self._broker.away:
            raise BrokerUnavailable("no host could be reached")
        if self.name not in self._broker.queues:
            raise TopologyMismatch(f"there is no queue {self.name!r}")
        self._broker.reads += 1
        self._limit = DeliveryLimit(self.name, 20 if self._broker.counts_reads else None, (4, 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.finish()


class _Channel:
    def __init__(self, broker: MemoryBroker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._source = ChannelGeneration(1, 1, queue)
        self._unacked: dict[int, tuple[bytes, bytes, bool]] = {}
        self._tag = 0
        self.left = self.doubtful = 0

    def count(self) -> Any:
        return SimpleNamespace(messages=len(self._broker.queues[self._queue]))

    def take(self, most: int) -> list[Delivery]:
        letters = self._broker.queues[self._queue]
        self.left = len(letters)
        found = []
        for properties, body, redelivered in letters[:most]:
            self._tag += 1
            self._unacked[self._tag] = (properties, body, redelivered)
            delivery = Delivery("", self._tag, redelivered, "", self._queue, properties, body)
            delivery.came_from(self._source)
            found.append(delivery)
        del letters[:most]
        return found

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        self._broker.fails_at_ack -= 1
        if self._broker.fails_at_ack == 0:
            if isinstance(self._broker.failure, StaleDelivery):
                self.finish()
            raise self._broker.failure
        for delivery in deliveries:
            del self._unacked[delivery.delivery_tag]

    def finish(self) -> None:
        back = [(properties, body, True) for properties, body, _ in self._unacked.values()]
        self._unacked.clear()
        self._broker.queues[self._queue][:0] = back


class _Publisher:
    """Confirms messages to known queues and returns the others."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def submit(self, message: Message, *, exchange: str = "", routing_key: str) -> Any:
        assert self._broker.gate.wait(30)
        if exchange or routing_key not in self._broker.queues:
            raise PublishReturned("312 NO_ROUTE")
        self._broker.add(routing_key, message)
        return SimpleNamespace(exception=lambda _timeout=None: None, receipt=lambda: Receipt(message.message_id))

    def close(self, _timeout: float) -> None:
        pass


def letter(number: int, **table: object) -> Message:
    """Return a dead letter of the queue ``orders``; `table` adds headers."""
    known = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: "orders",
        headers.DEAD_LETTER_REASON: "5 of 5 attempts failed",
        headers.EXCEPTION_TYPE: "shop.Timeout" if number % 2 else "ValueError",
        headers.EXCEPTION_MESSAGE: f"no {number}",
        headers.ATTEMPTS: 5,
    }
    return Message(f'{{"order":{number}}}'.encode(), message_id=f"id-{number}", headers=known | table)  # type: ignore[arg-type]
