"""Test a service under faults: ``python -m pytest test_with_faults.py``.

The fault proxy is placed between a client of any library and its broker, and fails on demand: it cuts connections after
a chosen frame or in the middle of a message, holds or drops confirms, and blocks, delays or throttles traffic.

Prints::

    ...2 passed...
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue
from reliable_mq.stores import MemoryStore

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory

pytest_plugins = ["reliable_mq.testing.fixtures"]  # in a suite: in the top-level conftest.py

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")


def test_an_order_whose_confirm_is_lost_is_charged_once(fault_proxy: FaultProxyFactory) -> None:
    """The connection dies after the publish and before the confirm arrives."""
    orders = Queue("example.faults.confirm")
    proxy = fault_proxy(URL)
    proxy.hold_confirms()
    with Publisher(proxy.url, topology=[orders]) as publisher:
        confirmation = publisher.submit(Message.json({"order": 1}), routing_key=orders.name)
        proxy.wait_for(lambda: proxy.held_confirms == 1)  # the broker has confirmed it, and the publisher does not know
        proxy.cut()
        proxy.heal()
        receipt = confirmation.result(timeout=30)
        assert (receipt.attempts, receipt.possible_duplicate) == (2, True)
        publisher.publish(Message.json({"order": 2}), routing_key=orders.name)

    charged: list[int] = []

    def charge(delivery: Delivery) -> None:
        charged.append(delivery.json()["order"])
        if charged[-1] == 2:
            consumer.stop()

    consumer = Consumer(URL, orders, charge, idempotency=MemoryStore())
    consumer.run()
    assert charged == [1, 2]


def test_publishing_survives_a_connection_that_dies_in_the_middle_of_a_message(fault_proxy: FaultProxyFactory) -> None:
    """Half of the fifth message arrives; no message is lost or truncated."""
    orders = Queue("example.faults.body")
    proxy = fault_proxy(URL)
    with Publisher(proxy.url, topology=[orders]) as publisher:
        publisher.connect()
        proxy.cut_in_body(0.5, nth=5)
        report = publisher.publish_many((Message(b"%d" % n * 1000) for n in range(10)), routing_key=orders.name)
        assert report.ok
        assert proxy.connections == 2

    bodies: set[bytes] = set()
    with Consumer(URL, orders) as consumer:
        while len(bodies) < 10:
            with consumer.get(100, timeout=10) as deliveries:
                assert deliveries, "an order was lost"
                bodies.update(delivery.body for delivery in deliveries)
    assert bodies == {b"%d" % n * 1000 for n in range(10)}
