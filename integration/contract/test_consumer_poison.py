"""Messages that cannot be decoded, parsed or accepted.

They are dead-lettered, and other messages are handled.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from integration.support.consuming import Handler, dead_letters, numbered, publish, send
from reliable_mq import Consumer, Exchange, Message, Publisher, Queue, RetryPolicy
from reliable_mq.codec import join_properties
from reliable_mq.stores import MemoryStore
from reliable_mq.testing import Frame
from reliable_mq.testing.waiting import wait_until
from reliable_mq.topology import Binding

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
NOT_UTF_8 = b"\xff\xfe\xc3("


def entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + kind + value


def table(*entries: bytes) -> bytes:
    return struct.pack(">I", sum(map(len, entries))) + b"".join(entries)


def nested(depth: int) -> bytes:
    inner = table()
    for _ in range(depth):
        inner = table(entry(b"n", b"F", inner))
    return inner


def long_string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def short_string(value: bytes) -> bytes:
    return bytes((len(value),)) + value


def wire(message_id: str, **segments: bytes) -> bytes:
    return join_properties({"delivery_mode": b"\x02", "message_id": short_string(message_id.encode()), **segments})


MILLISECONDS = struct.pack(">Q", 1_700_000_000_000)

#: Headers and properties that pika or aiormq cannot decode, and the expected values.
POISON: dict[str, tuple[dict[str, bytes], Callable[[Delivery], object], object]] = {
    "ms timestamp in a header": (
        {"headers": table(entry(b"at", b"T", MILLISECONDS))},
        lambda delivery: delivery.headers["at"],
        1_700_000_000_000,
    ),
    "ms timestamp": ({"timestamp": MILLISECONDS}, lambda delivery: delivery.timestamp, 1_700_000_000_000),
    "microseconds": (
        {"headers": table(entry(b"at", b"T", struct.pack(">Q", 1_700_000_000_000_000)))},
        lambda delivery: delivery.headers["at"],
        1_700_000_000_000_000,
    ),
    "seconds": (
        {"timestamp": struct.pack(">Q", 1_700_000_000)},
        lambda delivery: delivery.timestamp,
        datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
    ),
    "header value not UTF-8": (
        {"headers": table(entry(b"raw", b"S", long_string(NOT_UTF_8)))},
        lambda delivery: delivery.headers["raw"],
        NOT_UTF_8,
    ),
    "header name not UTF-8": (
        {"headers": table(entry(NOT_UTF_8, b"I", struct.pack(">i", 7)))},
        lambda delivery: delivery.headers[NOT_UTF_8.decode("utf-8", "surrogateescape")],
        7,
    ),
    "correlation id not UTF-8": (
        {"correlation_id": short_string(NOT_UTF_8)},
        lambda delivery: delivery.correlation_id,
        NOT_UTF_8.decode("utf-8", "surrogateescape"),
    ),
    "a double": (
        {"headers": table(entry(b"x", b"d", struct.pack(">d", 0.75)))},
        lambda delivery: delivery.headers["x"],
        0.75,
    ),
    "a float": (
        {"headers": table(entry(b"x", b"f", struct.pack(">f", -2.5)))},
        lambda delivery: delivery.headers["x"],
        -2.5,
    ),
    "delivery mode 3": ({"delivery_mode": b"\x03"}, lambda delivery: delivery.persistent, False),
}


@pytest.mark.both_lines
def test_f29_headers_that_drivers_cannot_decode_are_read(any_vhost: VirtualHost) -> None:
    """The handler reads the values, and nothing is redelivered.

    Messages before and after them are handled.
    """
    found: dict[str, object] = {}

    def look(delivery: Delivery) -> None:
        if delivery.body == b"poison":
            _, read, _ = POISON[delivery.message_id or ""]
            found[delivery.message_id or ""] = read(delivery)

    handler = Handler(then=look)
    with Consumer(any_vhost.url, ORDERS, handler, idempotency=MemoryStore()) as consumer:
        poison = [Message.from_wire(b"poison", wire(name, **segments)) for name, (segments, _, _) in POISON.items()]
        send(any_vhost, "orders", [Message(b"before"), *poison, Message(b"behind")])
        handler.wait_done(1 + len(POISON) + 1)
        assert (consumer.reconnects, consumer.statistics.redelivered) == (0, 0)
    expected = {name: value for name, (_, _, value) in POISON.items()}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.both_lines
def test_f29_nesting_that_nobody_can_decode(any_vhost: VirtualHost) -> None:
    """A message nested 2000 levels deep is handled unless the handler reads it.

    Otherwise it is dead-lettered at once, with its properties.
    """

    def look(delivery: Delivery) -> None:
        if delivery.message_id == "read":
            assert delivery.headers.get("n") is None

    handler = Handler(then=look)
    with Consumer(any_vhost.url, ORDERS, handler) as consumer:
        poison = [Message.from_wire(name.encode(), wire(name, headers=nested(2000))) for name in ("unread", "read")]
        send(any_vhost, "orders", [Message(b"before"), *poison, Message(b"behind")])
        handler.wait_done(3)
        wait_until(lambda: consumer.statistics.acked == 4, timeout=10, what="all acked")
        assert consumer.statistics.dead_lettered == 1
        assert (consumer.reconnects, consumer.statistics.redelivered) == (0, 0)
    assert handler.bodies == [b"before", b"unread", b"behind"]
    assert len(handler.begun) == 4, "it was attempted once"
    with Consumer(any_vhost.url, "orders.dead") as dead, dead.get(timeout=10) as [delivery]:
        assert delivery.body == b"read"
        assert delivery.message_id == "read"


def test_f29_a_routing_key_that_is_not_utf_8(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The key is read with surrogate escapes, and a dead letter keeps its bytes."""
    proxy = fault_proxy(vhost.url)
    placeholder = b"KEY!"

    def spoil(_direction: str, frame: Frame) -> list[Frame]:
        if frame.name == "basic.publish":
            return [Frame(frame.kind, frame.channel, frame.payload.replace(placeholder, NOT_UTF_8))]
        return [frame]

    fan = Exchange("fan", type="fanout")
    topology = [fan, ORDERS, Binding(fan, ORDERS)]
    handler = Handler(then=refuse_odd_keys)
    with Consumer(vhost.url, ORDERS, handler, topology=topology, retry=RetryPolicy(1)) as consumer:
        proxy.rewrite(spoil, "to_broker")
        with Publisher(proxy.url, mandatory=False) as publisher:
            for key in ("before", placeholder.decode(), "behind"):
                publisher.publish(Message(key.encode()), exchange="fan", routing_key=key)
        handler.wait_done(2)
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
        assert (consumer.reconnects, consumer.statistics.redelivered) == (0, 0)
    with Consumer(vhost.url, "orders.dead") as dead, dead.get(timeout=10) as [delivery]:
        assert delivery.headers["x-reliable-mq-original-routing-key"] == NOT_UTF_8
        assert delivery.headers["x-reliable-mq-original-exchange"] == "fan"


def refuse_odd_keys(delivery: Delivery) -> None:
    if not delivery.routing_key.isascii():
        raise ValueError(f"odd key {delivery.routing_key!r}")


def test_f30_an_unparsable_body_is_dead_lettered_with_a_reason(any_vhost: VirtualHost, checker: Audit) -> None:
    """This happens after the last attempt; the body is unchanged.

    Good messages are handled at the same time.
    """
    handler = Handler(then=lambda delivery: delivery.json()["number"], account=checker)
    body = b"\x00not json\xff"
    good = [Message.json({"number": number}) for number in range(10)]
    poison = Message(body, content_type="application/json", message_id="poison")
    with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(3, delays=(0.05,))) as consumer:
        send(any_vhost, "orders", [*good[:5], poison, *good[5:]], checker)
        handler.wait_done(10)
        # Until then, messages go through a new delay queue twice, and each move waits for the disk several times.
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=60, what="dead-lettered")
        assert (consumer.statistics.failed, consumer.statistics.retried) == (3, 2)
    assert [attempt for attempt, one in zip(handler.attempts, handler.begun, strict=True) if one.body == body] == [
        1,
        2,
        3,
    ]
    with Consumer(any_vhost.url, "orders.dead") as dead, dead.get(timeout=10) as [delivery]:
        assert delivery.body == body
        assert (delivery.message_id, delivery.content_type) == ("poison", "application/json")
        headers = delivery.headers
        assert headers["x-reliable-mq-dead-letter-reason"] == "3 of 3 attempts failed"
        assert headers["x-reliable-mq-exception-type"] in {"UnicodeDecodeError", "json.decoder.JSONDecodeError"}
        assert headers["x-reliable-mq-attempts"] == 3
        checker.dead_lettered(["poison"])
    checker.drain(any_vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


def test_f32_what_is_above_the_limits_is_quarantined_unseen(any_vhost: VirtualHost, checker: Audit) -> None:
    """A body or headers above the limits reach no handler and cost no attempt."""
    handler = Handler(account=checker)
    large_body = Message(b"x" * 100_001, message_id="large body")
    large_headers = Message(b"y", headers={"h": "x" * 50_000}, message_id="large headers")
    fits = Message(b"x" * 100_000, headers={"h": "x" * 4_000}, message_id="fits")
    with Consumer(
        any_vhost.url, ORDERS, handler, max_body_bytes=100_000, max_header_bytes=5_000, idempotency=MemoryStore()
    ) as consumer:
        send(any_vhost, "orders", [Message(b"1"), large_body, fits, large_headers, Message(b"2")], checker)
        handler.wait_done(3)
        wait_until(lambda: consumer.statistics.dead_lettered == 2, timeout=10, what="quarantined")
        assert consumer.statistics.rejected_unseen == 2
        assert (consumer.statistics.failed, consumer.reconnects) == (0, 0)
    reasons = {
        dead["properties"]["message_id"]: dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"]
        for dead in dead_letters(any_vhost, "orders.dead", 2)
    }
    assert reasons.keys() == {"large body", "large headers"}
    assert "100001 bytes of body are above the limit of 100000" in reasons["large body"]
    assert "above the limit of 5000" in reasons["large headers"]
    checker.drain(any_vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


@pytest.mark.both_lines
def test_f32_an_oversized_body_is_dead_lettered_by_the_broker(any_vhost: VirtualHost, checker: Audit) -> None:
    """The dead letter is identical, byte for byte, and other messages are handled.

    The consumer never has the body in memory.
    """
    handler = Handler(account=checker)
    body = bytes(range(256)) * 40_000
    with Consumer(any_vhost.url, ORDERS, handler, max_body_bytes=100_000) as consumer:
        send(any_vhost, "orders", [Message(b"1"), Message(body, message_id="large"), Message(b"2")], checker)
        handler.wait_done(2)
        wait_until(lambda: consumer.statistics.rejected == 1, timeout=10, what="rejected")
        assert (consumer.statistics.rejected_unseen, consumer.reconnects) == (1, 0)
    with Consumer(any_vhost.url, "orders.dead") as dead, dead.get(timeout=10) as [delivery]:
        assert (delivery.message_id, delivery.body) == ("large", body)
        assert delivery.headers["x-death"][0]["reason"] == "rejected"
        checker.dead_lettered(["large"])
    checker.drain(any_vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


@pytest.mark.both_lines
def test_f32_headers_larger_than_a_frame_cost_no_connection(any_vhost: VirtualHost) -> None:
    """RabbitMQ sends properties in one frame, whatever frame size was negotiated."""
    handler = Handler()
    large = Message(b"large", headers={"h": "x" * 100_000}, message_id="large")
    with Consumer(any_vhost.url + "?frame_max=8192", ORDERS, handler) as consumer:
        send(any_vhost, "orders", [Message(b"1"), large, Message(b"2")])
        handler.wait_done(3)
        assert consumer.reconnects == 0
    assert sorted(handler.bodies) == [b"1", b"2", b"large"]
    assert {len(str(one.headers.get("h", ""))) for one in handler.begun} == {0, 100_000}


@pytest.mark.both_lines
def test_f28_foreign_claims_of_earlier_attempts_are_not_trusted(any_vhost: VirtualHost) -> None:
    """A client's x-death, x-delivery-count or attempt header changes no attempt."""
    spoofs: list[dict[str, object]] = [
        {"x-delivery-count": 99},
        {"x-acquired-count": 99},
        {"x-death": [{"count": 99, "reason": "rejected", "queue": "orders"}]},
        {"x-reliable-mq-attempt": 99},
        {"x-reliable-mq-attempt": -1, "x-reliable-mq-format": 1},
        {"x-reliable-mq-attempt": 10**9, "x-reliable-mq-format": 1},
        {"x-reliable-mq-attempt": "many", "x-reliable-mq-format": 1},
        {"x-reliable-mq-retry": {"moved": [["CC"], {"CC": True}]}, "x-reliable-mq-format": 1},
    ]
    handler = Handler()
    with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(3)):
        send(any_vhost, "orders", [Message(b"x", headers=spoof) for spoof in spoofs])
        handler.wait_done(len(spoofs))
    assert handler.attempts == [1] * len(spoofs)


def test_f58_a_newer_header_format_is_dead_lettered_not_misread(vhost: VirtualHost) -> None:
    """The reason of the dead letter says so; no handler sees the message."""
    handler = Handler()
    newer = {"x-reliable-mq-format": 2, "x-reliable-mq-attempt": {"number": 2}}
    with Consumer(vhost.url, ORDERS, handler) as consumer:
        send(vhost, "orders", [Message(b"newer", headers=newer), Message(b"plain")])
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    assert handler.bodies == [b"plain"]
    [dead] = dead_letters(vhost, "orders.dead", 1)
    assert "format 2" in dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"]


def test_with_a_store_a_message_without_an_id_is_dead_lettered(vhost: VirtualHost) -> None:
    """A key function would give it one."""
    nameless = [Message.from_wire(b"%d" % number, join_properties({"delivery_mode": b"\x02"})) for number in range(2)]
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler, idempotency=MemoryStore()) as consumer:
        send(vhost, "orders", [nameless[0], Message(b"named")])
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="quarantined")
    assert handler.bodies == [b"named"]
    [dead] = dead_letters(vhost, "orders.dead", 1)
    reason = dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"]
    assert "it has no message_id" in reason
    assert "idempotency_key" in reason
    with Consumer(
        vhost.url, ORDERS, handler, idempotency=MemoryStore(), idempotency_key=lambda delivery: delivery.body.decode()
    ) as consumer:
        send(vhost, "orders", [nameless[1], nameless[1]])
        handler.wait_done(2)
        wait_until(lambda: consumer.statistics.duplicates == 1, timeout=10, what="known by its body")


def test_headers_that_the_broker_adds_do_not_hold_up_anything(vhost: VirtualHost) -> None:
    """A message with x-death that the broker dead-lettered is handled as any other."""
    first = Queue("first", message_ttl=0.05, dead_letter=ORDERS)
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler, topology=[first]):
        publish(vhost, "first", numbered(3))
        handler.wait_done(3)
    assert all("x-death" in delivery.headers for delivery in handler.done)
