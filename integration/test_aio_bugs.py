"""Publishing bugs of aio-pika and aiormq that this library does not have.

Each test is for one bug, by its number in the project's list of facts about aio-pika 10.2.1 and aiormq 7.2.4. Where
it is cheap, a test shows the bug first, so that a fix in aio-pika is noticed. The bugs of consuming (4, 5, 6, 8, and
the acks of 1) are in ``test_aio_bugs_consuming.py``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import aio_pika
import pytest

from reliable_mq import (
    AsyncPublisher,
    ConfigurationError,
    Message,
    PublishBlocked,
    PublishError,
    PublishReturned,
    Queue,
    Receipt,
    TLSOptions,
)
from reliable_mq.connection.channel import Channel
from reliable_mq.core import reconnect
from reliable_mq.testing.waiting import until

if TYPE_CHECKING:
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)


def test_aio_01_nothing_hangs_when_a_full_socket_is_reset(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """In aio-pika, 18 of 18 publishes without a timeout hung forever."""
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:
            await publisher.connect()
            proxy.stop_reading("to_broker", new_connections=False)
            messages = [Message(b"x" * 1_000_000) for _ in range(18)]
            for message in messages:
                checker.attempted(message.message_id)
            tasks = [asyncio.create_task(publisher.publish(one, routing_key="orders")) for one in messages]
            await until(lambda: publisher.outstanding == 18)
            proxy.cut()
            for receipt in await asyncio.gather(*tasks):
                checker.confirmed(receipt.message_id)

    run_async(main())
    checker.drain(vhost, ["orders"])
    checker.close()


def test_aio_12_messages_are_persistent(vhost: VirtualHost, run_async: Any) -> None:
    """The default delivery mode of aio-pika is not persistent."""

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
            await publisher.publish(Message(b"x"), routing_key="orders")

    run_async(main())
    assert [message["properties"]["delivery_mode"] for message in vhost.peek("orders")] == [2]


def test_aio_13_a_channel_closed_under_load_costs_no_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """aio-pika drops a close-ok if the write queue is full.

    Using the channel number again then ends the connection.
    """
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:
            for _ in range(5):
                confirmations = [await publisher.submit(Message(b"x" * 1000), routing_key="orders") for _ in range(50)]
                refused = await publisher.submit(Message(b"x"), exchange="missing", routing_key="orders")
                confirmations += [await publisher.submit(Message(b"x" * 1000), routing_key="orders") for _ in range(50)]
                await publisher.flush(20)
                assert refused.exception() is not None
                assert [one.exception() for one in confirmations] == [None] * 100

    run_async(main())
    assert proxy.connections == 1


@pytest.mark.soak
def test_aio_02_of_two_messages_with_one_id_the_unroutable_fails(vhost: VirtualHost, run_async: Any) -> None:
    """aio-pika finds a returned message by its id alone.

    It acked the unroutable message and failed the other one.
    """

    async def with_aio_pika(keys: list[str]) -> list[object]:
        async with await aio_pika.connect(vhost.url) as connection:
            channel = await connection.channel(on_return_raises=True)
            publishes = [
                channel.default_exchange.publish(aio_pika.Message(b"x", message_id="same"), routing_key=key)
                for key in keys
            ]
            return await asyncio.gather(*publishes, return_exceptions=True)

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
            await publisher.connect()
            credited = await with_aio_pika(["nowhere", "orders"])
            assert not isinstance(credited[0], Exception), "aio-pika is healed"
            for keys in (["nowhere", "orders"], ["orders", "nowhere"]):
                publishes = [publisher.publish(Message(b"x", message_id="same"), routing_key=key) for key in keys]
                outcomes = await asyncio.gather(*publishes, return_exceptions=True)
                assert [isinstance(one, PublishReturned) for one in outcomes] == [key == "nowhere" for key in keys]

    run_async(main())


@pytest.mark.soak
def test_aio_03_unroutable_publishes_raise_after_reconnects_too(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """aio-pika raises nothing by default, and a reconnect drops return callbacks."""
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with await aio_pika.connect(vhost.url) as connection:
            channel = await connection.channel()
            await channel.default_exchange.publish(aio_pika.Message(b"x"), routing_key="nowhere")  # no error
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:
            for number in range(3):
                with pytest.raises(PublishReturned):
                    await publisher.publish(Message(b"x"), routing_key="nowhere")
                assert proxy.connections == number + 1
                proxy.cut()
                await until(lambda so_far=number: proxy.connections > so_far + 1)

    run_async(main())


@pytest.mark.parametrize("run_async", [asyncio.new_event_loop], ids=["asyncio"], indirect=True)
def test_aio_07_an_alarm_holds_up_no_call_beyond_its_time(
    private_broker: RabbitMQ, private_vhost: VirtualHost, run_async: Any
) -> None:
    """In aio-pika, channel.initialize(timeout=2) took over 10 s under an alarm."""

    async def main() -> None:
        publisher = AsyncPublisher(private_vhost.url, topology=[ORDERS])
        await publisher.publish(Message(b"x"), routing_key="orders")
        await asyncio.to_thread(private_broker.alarm, "memory")
        outcomes = await asyncio.gather(
            *(publisher.publish(Message(b"x"), routing_key="orders", timeout=1) for _ in range(3)),
            return_exceptions=True,
        )
        for one in outcomes:  # they were written before the broker reported the block
            assert isinstance(one, Receipt) or (isinstance(one, PublishError) and one.may_have_arrived)
        await until(lambda: publisher.blocked)
        began = time.monotonic()
        with pytest.raises(PublishBlocked, match="memory"):
            await publisher.publish(Message(b"x"), routing_key="orders", timeout=1)
        waiting = await publisher.submit(Message(b"x"), routing_key="orders")
        with pytest.raises(TimeoutError):
            await publisher.flush(0.2)
        with pytest.raises(PublishError):
            await publisher.close(timeout=1)
        assert waiting.done()
        assert time.monotonic() - began < 12

    try:
        run_async(main())
    finally:
        private_broker.clear_alarm("memory")


def test_aio_09_channels_that_are_closed_leave_nothing_behind(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In aio-pika, opening and closing 500 channels left 1004 callbacks."""
    monkeypatch.setattr(reconnect, "CHANNEL_BURST", 1000)  # otherwise it would wait between the channels
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:

            async def cycle(times: int) -> int:
                """Close the channel repeatedly; count callbacks and channels on the heap."""
                for _ in range(times):
                    refused = await publisher.submit(Message(b"x"), exchange="missing", routing_key="orders")
                    await publisher.flush(20)
                    assert refused.exception() is not None
                del refused
                gc.collect()
                kinds = (FunctionType, MethodType, partial, asyncio.Future, Channel)
                return sum(isinstance(one, kinds) for one in gc.get_objects())

            logging.disable()  # pytest keeps every record
            before = await cycle(110)  # the last hundred failures are kept
            after = await cycle(200)
            logging.disable(logging.NOTSET)
            assert after - before < 50
        assert proxy.connections == 1
        assert proxy.seen("channel.open") > 300

    run_async(main())


@pytest.mark.parametrize(
    ("url", "arguments", "named"),
    [
        ("amqps://guest:guest@localhost/?no_verify_ssl=false", {}, "no_verify_ssl"),
        ("amqps://guest:guest@localhost/?verify_ssl=0", {}, "verify_ssl"),
        ("amqp://guest:guest@localhost/", {"tls": TLSOptions()}, "amqps"),
        ("amqp://guest:guest@localhost/?heartbeat=30s", {}, "heartbeat"),
        ("amqp://guest:guest@localhost/?heartbeat=0", {}, "heartbeat"),
        ("amqp://broker.example/", {}, "user"),
    ],
)
def test_aio_10_a_url_is_taken_at_its_word_or_refused(url: str, arguments: dict[str, Any], named: str) -> None:
    """aio-pika ignores or misreads some options of a URL.

    no_verify_ssl=false switches verification off, a TLS context is ignored with amqp, and 30s becomes 0.
    """
    with pytest.raises(ConfigurationError, match=named):
        AsyncPublisher(url, **arguments)


def test_aio_11_frames_with_secrets_are_not_logged(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture, run_async: Any
) -> None:
    """At DEBUG, aiormq logs every frame to be sent, including the password."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "aiormq")

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
            message = Message(b"a body of its own", headers={"h": "a header of its own"})
            await publisher.publish(message, routing_key="orders")
            with pytest.raises(PublishReturned):
                await publisher.publish(message, routing_key="nowhere")

    run_async(main())
    assert caplog.records
    for secret in ("of its own", "guest:guest", "\0guest", r"\x00guest"):
        assert secret not in caplog.text
