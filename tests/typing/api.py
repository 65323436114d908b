"""The types of the public names of both APIs, checked by mypy in `make check`.

Nothing here runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import assert_type

import tenacity

from reliable_mq import (
    Ack,
    AsyncConfirmation,
    AsyncConsumer,
    AsyncPublisher,
    Confirmation,
    Consumer,
    DeadLetter,
    Delivery,
    KillSwitch,
    Message,
    Publisher,
    PublishError,
    PublishReport,
    Queue,
    Receipt,
    RetryLater,
    RetryPolicy,
)
from reliable_mq.stores import AsyncIdempotencyStore, IdempotencyStore

URL = "amqp://guest:guest@localhost/"
ORDERS = Queue("orders")


def publishing() -> None:
    with Publisher(URL, topology=[ORDERS], confirm_timeout=5) as publisher:
        assert_type(publisher, Publisher)
        assert_type(publisher.publish(Message(b"x"), routing_key="orders"), Receipt)
        confirmation = publisher.submit(Message.json({"order": 1}), routing_key="orders")
        assert_type(confirmation, Confirmation)
        assert_type(confirmation.result(timeout=1), Receipt)
        assert_type(confirmation.exception(), PublishError | None)
        confirmation.add_done_callback(lambda done: assert_type(done, Confirmation))
        assert_type(publisher.publish_many([Message(b"x")], routing_key="orders"), PublishReport)
        assert_type(publisher.outstanding, int)
        assert_type(publisher.blocked, str | None)


def with_options() -> None:
    """Options are typed on every public class, and an unknown option is an error."""
    Publisher([URL], max_outstanding=10, reconnect_wait=lambda attempt: min(attempt, 30.0))
    AsyncPublisher(URL, reconnect_stop=lambda attempt: attempt > 5, reconnect_wait=tenacity.wait_fixed(1))
    Publisher(URL, max_outstanding="10")  # type: ignore[arg-type]
    AsyncPublisher(URL, max_outstandin=10)  # type: ignore[call-arg]
    Publisher()  # type: ignore[call-arg]
    Consumer(URL, ORDERS, prefetch=10, consumer_timeout=None)
    AsyncConsumer(URL, "orders", handle_on_the_loop, reconnect_stop=lambda attempt: attempt > 5)
    Consumer(URL)  # type: ignore[call-arg]
    AsyncConsumer(URL, ORDERS, prefetch="10")  # type: ignore[arg-type]


async def publishing_on_asyncio() -> None:
    async def messages() -> AsyncIterator[Message]:
        yield Message(b"x")

    async with AsyncPublisher(URL, topology=[ORDERS], confirm_timeout=5) as publisher:
        assert_type(publisher, AsyncPublisher)
        assert_type(await publisher.publish(Message(b"x"), routing_key="orders"), Receipt)
        confirmation = await publisher.submit(Message.json({"order": 1}), routing_key="orders")
        _ = assert_type(confirmation, AsyncConfirmation)
        assert_type(await confirmation, Receipt)
        assert_type(confirmation.result(), Receipt)
        assert_type(confirmation.exception(), PublishError | None)
        confirmation.add_done_callback(lambda done: assert_type(done, AsyncConfirmation))
        assert_type(await publisher.publish_many(messages(), routing_key="orders"), PublishReport)
        assert_type(await publisher.publish_many([Message(b"x")], routing_key="orders"), PublishReport)


def handle(delivery: Delivery) -> None:
    assert_type(delivery.body, bytes)
    assert_type(delivery.attempt, int)
    assert_type(delivery.redelivered, bool)
    assert_type(delivery.message_id, str | None)
    raise RetryLater(delay=1)


def handle_batch(deliveries: Sequence[Delivery]) -> list[type[Ack] | DeadLetter]:
    return [Ack if delivery.body else DeadLetter("empty") for delivery in deliveries]


async def handle_on_the_loop(delivery: Delivery) -> None:
    raise DeadLetter(str(delivery.message_id))


def consuming() -> None:
    Consumer(URL, ORDERS, handle, retry=RetryPolicy(3, delays=(1, timedelta(seconds=10)))).run()
    switch = KillSwitch(window=timedelta(minutes=1), pause=timedelta(seconds=10), longest_pause=timedelta(minutes=2))
    Consumer(URL, ORDERS, handle, kill_switch=switch, stop_timeout=timedelta(seconds=10)).run()
    Consumer(URL, ORDERS, handle_batch, batch_size=10).stop()
    with Consumer(URL, "orders") as consumer, consumer.get(10, timeout=1) as deliveries:
        for delivery in deliveries:
            assert_type(delivery.body, bytes)
            delivery.dead_letter("of no use")


async def consuming_on_asyncio(store: AsyncIdempotencyStore | IdempotencyStore) -> None:
    await AsyncConsumer(URL, ORDERS, handle_on_the_loop, idempotency=store).run()
    await AsyncConsumer(URL, ORDERS, handle_on_the_loop, retry=RetryPolicy(3, delays=(1, 10))).run()
    AsyncConsumer(URL, ORDERS, handle_batch, batch_size=10).stop()
    async with AsyncConsumer(URL, "orders") as consumer, consumer.get(10, timeout=1) as deliveries:
        for delivery in deliveries:
            assert_type(delivery.body, bytes)
            delivery.dead_letter("of no use")
