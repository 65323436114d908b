"""Consuming bugs of aio-pika and aiormq that this library does not have.

Tests have the number of the bug, as in ``test_aio_bugs.py`` for publishing.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import numbered, publish, send
from reliable_mq import AsyncConsumer, AsyncPublisher, Message, Queue, TopologyMismatch
from reliable_mq.codec import join_properties
from reliable_mq.testing.waiting import until, wait_until

if TYPE_CHECKING:
    from reliable_mq import Delivery
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")


class Bodies:
    """A coroutine handler that records the bodies."""

    def __init__(self) -> None:
        self.handled: list[bytes] = []

    async def __call__(self, delivery: Delivery) -> None:
        await asyncio.sleep(0)
        self.handled.append(delivery.body)


async def declare(vhost: VirtualHost) -> None:
    async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
        await publisher.connect()


def test_aio_01_no_ack_hangs_when_a_full_socket_is_reset(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """In aiormq, 50 of 60 acks behind a full socket hung forever."""
    proxy = fault_proxy(vhost.url)
    handler = Bodies()

    async def main() -> None:
        await declare(vhost)
        await asyncio.to_thread(publish, vhost, "orders", numbered(200))
        async with AsyncConsumer(proxy.url, ORDERS, handler, prefetch=100, ack_every=1):
            await until(lambda: len(handler.handled) >= 10)
            proxy.stop_reading("to_broker", new_connections=False)
            await until(lambda: len(handler.handled) >= 100)
            proxy.cut()
            await until(lambda: set(handler.handled) == set(numbered(200)))

    run_async(main())
    vhost.wait_for_messages("orders", 0)


def wait_until_settled(vhost: VirtualHost) -> None:
    wait_until(lambda: not any(vhost.live_counts().values()), timeout=10, what="nothing unacked")


def table(*entries: bytes) -> bytes:
    return struct.pack(">I", sum(map(len, entries))) + b"".join(entries)


MICROSECONDS = table(b"\x02atT" + struct.pack(">Q", 1_700_000_000_000_000))
NOT_UTF_8 = table(b"\x01nS" + struct.pack(">I", 2) + b"\xff\xfe")


POISON: tuple[dict[str, bytes], ...] = (
    {"message_id": b"\x01a", "headers": MICROSECONDS},
    {"message_id": b"\x01b", "headers": NOT_UTF_8},
    {"message_id": b"\x01c", "correlation_id": b"\x02\xff\xfe"},
    {"message_id": b"\x01d", "delivery_mode": b"\x03"},
)


def test_aio_04_poison_costs_no_connection_and_holds_up_nothing(vhost: VirtualHost, run_async: Any) -> None:
    """aio-pika reconnects forever, and later messages are never delivered.

    Delivery mode 3 costs a prefetch slot.
    """
    handler = Bodies()
    wire = [join_properties({"delivery_mode": b"\x02", **properties}) for properties in POISON]

    async def main() -> None:
        await declare(vhost)
        poison = [Message.from_wire(b"poison", properties) for properties in wire]
        await asyncio.to_thread(send, vhost, "orders", [*poison, *map(Message, numbered(20))])
        async with AsyncConsumer(vhost.url, ORDERS, handler, prefetch=1) as consumer:
            await until(lambda: consumer.statistics.acked == 24)
            assert consumer.reconnects == 0

    run_async(main())
    assert handler.handled == [b"poison"] * 4 + numbered(20)


@pytest.mark.soak
def test_aio_05_buffered_deliveries_of_a_loss_are_handled_once(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """aio-pika's RobustQueue kept deliveries across the reconnect.

    They were handled twice, and their acks were refused.
    """
    proxy = fault_proxy(vhost.url)
    begun = asyncio.Event()
    go_on = asyncio.Event()
    handled: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        if not begun.is_set():
            begun.set()
            await go_on.wait()
        handled.append(delivery.body)

    async def main() -> None:
        await declare(vhost)
        await asyncio.to_thread(publish, vhost, "orders", numbered(50))
        async with AsyncConsumer(proxy.url, ORDERS, handle, prefetch=50) as consumer:
            await begun.wait()
            await until(lambda: proxy.forwarded("basic.deliver") == 50)
            proxy.cut()
            await until(lambda: consumer.reconnects == 1 and consumer.connected)
            go_on.set()
            await until(lambda: set(handled) == set(numbered(50)))
            await until(lambda: consumer.statistics.acked == 50)

    run_async(main())
    assert sorted(handled[1:]) == sorted(numbered(50))  # the message being handled at the loss is redelivered
    vhost.wait_for_messages("orders", 0)


@pytest.mark.soak
def test_aio_05_a_cancel_by_the_broker_is_not_the_end(vhost: VirtualHost, run_async: Any) -> None:
    """After such a cancel, aio-pika's robust consumer never consumed again.

    This consumer continues, or reports why it cannot.
    """
    handler = Bodies()

    async def main() -> None:
        await declare(vhost)
        async with AsyncConsumer(vhost.url, ORDERS, handler) as consumer:
            await until(lambda: consumer.connected)
            await asyncio.to_thread(vhost.delete_queue, "orders")
            await until(lambda: consumer.statistics.cancelled == 1 and consumer.connected)
            await asyncio.to_thread(publish, vhost, "orders", numbered(3))
            await until(lambda: len(handler.handled) == 3)
        other = Queue("orders", type="classic")
        with pytest.raises(TopologyMismatch, match="queue 'orders'"):
            async with AsyncConsumer(vhost.url, other, handler):
                pytest.fail("it was entered")

    run_async(main())


def test_aio_06_a_cancelled_handler_costs_no_message(vhost: VirtualHost, run_async: Any) -> None:
    """aio-pika's message.process() rejects without requeue if its task is cancelled.

    The message is then lost.
    """
    begun = asyncio.Event()

    async def handle(_: Delivery) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        await declare(vhost)
        await asyncio.to_thread(publish, vhost, "orders", [b"x"])
        running = asyncio.create_task(AsyncConsumer(vhost.url, ORDERS, handle).run())
        await begun.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    run_async(main())
    vhost.wait_for_messages("orders", 1)
    assert vhost.live_counts()["orders.dead"] == 0


def test_aio_08_work_finished_beyond_a_gap_is_acked_completely(vhost: VirtualHost, run_async: Any) -> None:
    """aiormq drops an ack(multiple=True) whose tag was acked singly before.

    Lower tags stay unacked.
    """
    slow = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        if delivery.body == b"0":
            await slow.wait()

    async def main() -> None:
        await declare(vhost)
        await asyncio.to_thread(publish, vhost, "orders", numbered(20))
        async with AsyncConsumer(vhost.url, ORDERS, handle, prefetch=20, concurrency=2, ack_every=10) as consumer:
            await until(lambda: consumer.statistics.acked == 19)  # all but the first, each by its own ack
            slow.set()
            await until(lambda: consumer.statistics.acked == 20)
            await asyncio.to_thread(wait_until_settled, vhost)

    run_async(main())
