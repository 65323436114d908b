"""Consuming bugs of plain pika 1.4.4 that this library does not have.

Each test shows the bug first, so that a fix in pika is noticed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from pika.exceptions import StreamLostError

from integration.support.consuming import Handler, numbered, publish, running, send
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.codec import join_properties
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def table(*entries: bytes) -> bytes:
    return struct.pack(">I", sum(map(len, entries))) + b"".join(entries)


def poison(headers: bytes) -> Message:
    return Message.from_wire(b"poison", join_properties({"delivery_mode": b"\x02", "headers": headers}))


def nested(depth: int) -> bytes:
    inner = table()
    for _ in range(depth):
        inner = table(b"\x01nF" + inner)
    return inner


MILLISECONDS = table(b"\x02atT" + struct.pack(">Q", 1_700_000_000_000))


@pytest.mark.parametrize(
    ("headers", "error"),
    [(MILLISECONDS, "ValueError"), pytest.param(nested(2000), "RecursionError", marks=pytest.mark.soak)],
    ids=["ms timestamp", "nested 2000 deep"],
)
def test_pika_02_undecodable_headers_do_not_cost_the_connection(vhost: VirtualHost, headers: bytes, error: str) -> None:
    """pika raises before any callback, at every redelivery.

    Messages behind such a message are never delivered.
    """
    declare(vhost)
    send(vhost, "orders", [poison(headers), *map(Message, numbered(5))])
    for _ in range(2):
        vhost.wait_for_messages("orders", 6)  # the broken connection may still have the first one
        with pytest.raises(StreamLostError, match=error):
            take_one(vhost)
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler) as consumer:
        handler.wait_done(6)
        # Six, plus two acks for the message that broke two connections: it passes through quarantine by a delay
        # queue.
        wait_until(lambda: consumer.statistics.acked == 8, timeout=10, what="all acked")
        assert consumer.statistics.quarantined == 1
        assert consumer.reconnects == 0
    assert sorted(handler.bodies) == sorted([b"poison", *numbered(5)])


def take_one(vhost: VirtualHost) -> Any:
    """Return plain pika's properties of the first message, which is requeued."""
    with vhost.connect() as connection:
        _, properties, _ = connection.channel().basic_get("orders")
        return properties


def test_pika_03_float_headers_are_read_as_they_are(vhost: VirtualHost) -> None:
    """pika reads 0.75 as 0; this consumer and its dead letters have the sent value."""
    declare(vhost)
    floats = {"share": 0.75, "loss": -2.5, "tiny": 1e-300}
    send(vhost, "orders", [Message(b"x", headers=floats)])
    assert take_one(vhost).headers["share"] == 0

    with Consumer(vhost.url, ORDERS) as consumer, consumer.get(1, timeout=10) as [delivery]:
        assert {name: delivery.headers[name] for name in floats} == floats
        delivery.dead_letter("to be looked at")
    with Consumer(vhost.url, "orders.dead") as dead, dead.get(1, timeout=10) as [letter]:
        assert {name: letter.headers[name] for name in floats} == floats


def test_pika_07_a_queue_that_is_deleted_does_not_end_run(vhost: VirtualHost) -> None:
    """pika's start_consuming() returns without an error.

    run() continues with the queue that it declares again.
    """
    declare(vhost)
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_consume("orders", lambda *_: None)
        vhost.delete_queue("orders")
        channel.start_consuming()  # returns
    handler = Handler()
    with running(Consumer(vhost.url, ORDERS, handler)) as run:
        wait_until(lambda: run.consumer.connected, timeout=10, what="consuming")
        vhost.delete_queue("orders")
        wait_until(lambda: run.consumer.statistics.cancelled == 1, timeout=10, what="cancelled")
        wait_until(lambda: run.consumer.connected, timeout=10, what="consuming again")
        publish(vhost, "orders", numbered(3))
        handler.wait_done(3)
        assert not run.returned
