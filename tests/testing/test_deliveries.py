"""Deliveries for unit tests of handlers."""

from __future__ import annotations

import asyncio

import pytest

from reliable_mq import ConfigurationError, Message, UsageError
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.testing import make_delivery


def test_a_delivery_has_the_properties_of_its_message() -> None:
    message = Message.json({"order": 1}, headers={"tenant": "a", "parts": [1, 2]}, priority=3, correlation_id="c")
    delivery = make_delivery(message, queue="orders")
    assert isinstance(delivery, Delivery)
    assert (delivery.json(), delivery.body, delivery.message_id) == ({"order": 1}, message.body, message.message_id)
    assert dict(delivery.headers) == {"tenant": "a", "parts": [1, 2]}
    assert (delivery.priority, delivery.correlation_id, delivery.content_type) == (3, "c", "application/json")
    assert (delivery.queue, delivery.exchange, delivery.routing_key) == ("orders", "", "orders")
    assert (delivery.attempt, delivery.redelivered) == (1, False)
    assert delivery.persistent


def test_a_message_without_properties_of_its_own_has_its_id() -> None:
    message = Message(b"x")
    assert make_delivery(message).message_id == message.message_id


def test_a_later_attempt_is_a_redelivery() -> None:
    delivery = make_delivery(Message(b"x"), attempt=3, exchange="events", routing_key="order.placed")
    assert (delivery.attempt, delivery.redelivered) == (3, True)
    assert (delivery.exchange, delivery.routing_key) == ("events", "order.placed")
    with pytest.raises(ConfigurationError, match="attempt must be"):
        make_delivery(Message(b"x"), attempt=0)


def test_a_transaction_gives_the_session() -> None:
    session = object()
    delivery = make_delivery(Message(b"x"), session=session)
    with delivery.transaction() as given:
        assert given is session

    async def handle() -> object:
        async with delivery.transaction() as given:
            return given

    assert asyncio.run(handle()) is session
    with pytest.raises(UsageError, match="has no transaction"):
        make_delivery(Message(b"x")).transaction()
