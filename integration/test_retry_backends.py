"""Retries on every backend: the same attempts, the same message, never early; and where the backends differ."""

from __future__ import annotations

import itertools
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import send
from integration.support.waiting import wait_until
from reliable_mq import Consumer, Exchange, Message, Queue, RetryPolicy
from reliable_mq.core.codec import join_properties, split_properties
from reliable_mq.core.codec.tables import walk_table
from reliable_mq.topology import Binding

if TYPE_CHECKING:
    from integration.support.management import VirtualHost
    from reliable_mq import Delivery

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")


class Attempts:
    """A handler that fails, and keeps when it was called with what."""

    def __init__(self, failures: int = 100, error: Exception | None = None) -> None:
        self.seen: list[tuple[float, bytes, int, bool, str, str, bytes]] = []
        self._failures = failures
        self._error = error or ValueError("not yet")

    def __call__(self, delivery: Delivery) -> None:
        self.seen.append(
            (
                time.monotonic(),
                delivery.body,
                delivery.attempt,
                delivery.redelivered,
                delivery.exchange,
                delivery.routing_key,
                delivery.properties,
            )
        )
        if delivery.attempt <= self._failures:
            raise self._error

    @property
    def gaps(self) -> list[float]:
        times = [one[0] for one in self.seen]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def attempts(self) -> list[int]:
        return [one[2] for one in self.seen]


def entries(properties: bytes) -> tuple[dict[str, bytes], set[bytes]]:
    """The properties but the headers, and the headers as the bytes of each."""
    segments = split_properties(properties)
    table = segments.pop("headers", b"\0\0\0\0")
    return segments, {table[start:end] for _, start, end in walk_table(table, 4, len(table))}


def short(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def header(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + value


def foreign() -> bytes:
    """The properties of a message with all that does not survive being published again."""
    table = b"".join(
        (
            header(b"CC", b"A" + struct.pack(">I", 9) + b"S" + struct.pack(">I", 4) + b"copy"),
            header(b"ratio", b"f" + struct.pack(">f", 0.1)),
            header(b"exact", b"d" + struct.pack(">d", 0.75)),
            header(b"late", b"T" + struct.pack(">Q", 1_700_000_000_000)),
            header(b"small", b"s" + struct.pack(">h", -7)),
            header(b"raw", b"S" + struct.pack(">I", 2) + b"\xff\xfe"),
        )
    )
    return join_properties(
        {
            "content_type": short("application/x-odd"),
            "headers": struct.pack(">I", len(table)) + table,
            "delivery_mode": b"\x02",
            "priority": b"\x03",
            "correlation_id": short("c"),
            "reply_to": short("r"),
            "expiration": short("60000"),
            "message_id": short("m"),
            "timestamp": struct.pack(">Q", 1_700_000_000_000),
            "type": short("t"),
            "user_id": short("guest"),
            "app_id": short("a"),
        }
    )


@pytest.mark.parametrize("backend", ["queues", "memory"])
def test_a_retried_message_is_the_same_message(any_vhost: VirtualHost, backend: Any) -> None:
    """CC, user_id, expiration, float headers, exchange and routing key: each attempt sees what the first one saw."""
    shop = Exchange("shop", type="topic")
    topology = [shop, Binding(shop, ORDERS, "new.*"), Binding(shop, Queue("copy", dead_letter=None), "copy")]
    handler = Attempts(failures=2)
    retry = RetryPolicy(3, delays=(0.1,), backend=backend)
    with Consumer(any_vhost.url, ORDERS, handler, topology=topology, retry=retry) as consumer:
        sent = Message.from_wire(b"\x00body\xff", foreign())
        send(any_vhost, "new.order", [sent], exchange="shop")
        wait_until(lambda: consumer.statistics.handled == 1, timeout=15, what="handled")
        assert consumer.statistics.delayed == (2 if backend == "queues" else 0)
    assert handler.attempts == [1, 2, 3]
    assert [one[3] for one in handler.seen] == [False, True, True]
    assert {one[1] for one in handler.seen} == {sent.body}
    assert {one[4:6] for one in handler.seen} == {("shop", "new.order")}
    assert [entries(one[6]) for one in handler.seen] == [entries(foreign())] * 3
    assert {name: count for name, count in any_vhost.live_counts().items() if count} == {"copy": 1}
