"""An application that Prometheus scrapes, under a small load.

It has publishers and consumers of both APIs, an outbox and a stage.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import tenacity
from prometheus_client import CollectorRegistry

from integration.support.blocking import BlockingPublisher
from integration.support.blocking_consumer import BlockingConsumer
from reliable_mq import Consumer, DeadLetter, Message, Publisher, Queue, RetryPolicy
from reliable_mq.health import HealthServer
from reliable_mq.monitoring import QueueDepths
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.stage import StageOptions, StageRelay
from reliable_mq.stores import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq import Delivery

__all__ = ["INVOICES", "ORDERS", "MonitoredShop"]

ORDERS = Queue("orders")
INVOICES = Queue("invoices", type="classic")
RETURNS = Queue("returns", dead_letter=None)
CLOSING = 30.0  # seconds for the relay to move the remaining messages
QUICK = RetryPolicy(max_attempts=3, delays=(0.2, 0.5))


class MonitoredShop:
    """Publishes and handles orders and invoices, and moves returns into a stage.

    A context manager, which runs until the end of the block.

    Args:
        url: The URL of the broker, for all parts.
        directory: Where the outbox is created.
        rate: Orders per second. There are as many invoices, and one return per ten orders.
        failing: The share of orders whose first attempt fails; one in a hundred of these is dead-lettered.

    Attributes:
        registry: The registry of all parts.
        address: Where metrics and probes are served. Set on entry.
        failing: As the argument. It may be changed while the shop runs.
    """

    address: str

    def __init__(self, url: str, directory: Path, *, rate: float = 100.0, failing: float = 0.0) -> None:
        self.registry = CollectorRegistry()
        self.failing = failing
        self._url = url
        self._directory = directory
        self._pause = 1 / rate
        self._closing = threading.Event()
        self._numbers = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            parts: list[Any] = []
            common: dict[str, Any] = {"registry": self.registry, "reconnect_wait": tenacity.wait_fixed(0.5)}
            sync = Publisher(self._url, topology=[ORDERS, RETURNS], name="shop", **common)
            asyncio = BlockingPublisher(self._url, topology=[INVOICES], name="shop asyncio", **common)
            outbox = SQLiteOutbox(self._directory / "outbox")
            stored = Publisher(self._url, topology=[ORDERS], outbox=outbox, name="shop outbox", **common)
            for publisher in (sync, asyncio, stored):
                stack.callback(publisher.close)
                publisher.connect()
                parts.append(getattr(publisher, "publisher", publisher))  # unwrap an AsyncPublisher
            for kind, queue, name in ((Consumer, ORDERS, "billing"), (BlockingConsumer, INVOICES, "billing asyncio")):
                consumer = stack.enter_context(
                    kind(self._url, queue, self._handle, name=name, retry=QUICK, idempotency=MemoryStore(), **common)
                )
                parts.append(getattr(consumer, "consumer", consumer))
            relay = StageRelay(
                StageOptions(url=self._url, queue=RETURNS.name, stage="returns.stage"), registry=self.registry
            )
            stack.callback(relay.close, CLOSING)
            relay.start()
            stack.enter_context(QueueDepths(self._url, [ORDERS, INVOICES], registry=self.registry, interval=0.5))
            server = stack.enter_context(HealthServer(*parts, port=0, registry=self.registry))
            self.address = server.url.removeprefix("http://")
            load = threading.Thread(target=self._publish, args=(sync, asyncio, stored), name="shop load", daemon=True)
            load.start()
            stack.callback(load.join)
            stack.callback(self._closing.set)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _publish(self, sync: Publisher, asyncio: BlockingPublisher, stored: Publisher) -> None:
        while not self._closing.wait(self._pause):
            self._numbers += 1
            order = Message.json({"order": self._numbers})
            sync.submit(order, routing_key=ORDERS.name)
            asyncio.submit(Message.json({"invoice": self._numbers}), routing_key=INVOICES.name)
            if self._numbers % 10 == 0:
                stored.publish(Message.json({"order": -self._numbers}), routing_key=ORDERS.name)
                sync.submit(Message.json({"return": self._numbers}), routing_key=RETURNS.name)

    def _handle(self, delivery: Delivery) -> None:
        number = abs(next(iter(delivery.json().values())))
        if delivery.attempt == 1 and self.failing and number % max(1, round(1 / self.failing)) == 0:
            if number % 100 == 0:
                raise DeadLetter("no such customer")
            raise ConnectionError("the payment service did not answer")
