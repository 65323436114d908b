"""Tests with pytest-asyncio: a publisher for each test, or one for a module.

A publisher belongs to one event loop, so its fixture has the scope of the loop on which the tests run. A fixture and
the tests that use it must have the same ``loop_scope``; by default, pytest-asyncio creates a loop for each test.

Run it with ``pytest test_asyncio.py``. Set ``RELIABLE_MQ_URL`` if the broker is not on localhost.

Prints, at its end::

    ...3 passed...
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from reliable_mq import AsyncPublisher, Message, PublishReturned, Queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.asyncio.orders", dead_letter=None)


@pytest_asyncio.fixture
async def publisher() -> AsyncIterator[AsyncPublisher]:
    """A publisher for each test, on the loop of that test."""
    async with AsyncPublisher(URL, topology=[ORDERS]) as publisher:
        yield publisher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_publisher() -> AsyncIterator[AsyncPublisher]:
    """A publisher for all tests of the module, on the loop of the module."""
    async with AsyncPublisher(URL, topology=[ORDERS]) as publisher:
        yield publisher


async def place(publisher: AsyncPublisher, count: int) -> int:
    """Publish orders concurrently: the code under test."""
    orders = [Message.json({"order": number}) for number in range(count)]
    receipts = await asyncio.gather(
        *(publisher.publish(order, routing_key="example.asyncio.orders") for order in orders)
    )
    return len(receipts)


@pytest.mark.asyncio
async def test_every_order_is_confirmed(publisher: AsyncPublisher) -> None:
    assert await place(publisher, 100) == 100
    assert publisher.outstanding == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_with_the_shared_publisher(shared_publisher: AsyncPublisher) -> None:
    assert await place(shared_publisher, 10) == 10


@pytest.mark.asyncio(loop_scope="module")
async def test_an_order_for_nobody_is_an_error(shared_publisher: AsyncPublisher) -> None:
    with pytest.raises(PublishReturned):
        await shared_publisher.publish(Message(b"x"), routing_key="example.asyncio.nobody")
