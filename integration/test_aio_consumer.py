"""`AsyncConsumer`: what is its own, on the event loop. What both faces promise is tested with each in turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from integration.support.consuming import numbered, publish
from reliable_mq import AsyncConsumer, Queue, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.support.management import VirtualHost
    from reliable_mq import Delivery

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")
SOON = tenacity.wait_fixed(0.1)
QUICK = RetryPolicy(3, delays=(0.05,))


async def until(condition: Callable[[], object], timeout: float = 20) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def left(vhost: VirtualHost) -> int:
    return vhost.live_counts(["orders"])["orders"]


def test_coroutine_handlers_are_awaited_and_acked(vhost: VirtualHost, run_async: Any) -> None:
    """In order, with concurrency 1."""
    handled: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        handled.append(delivery.body)

    async def main() -> None:
        async with AsyncConsumer(vhost.url, ORDERS, handle) as consumer:
            await asyncio.to_thread(publish, vhost, "orders", numbered(500))
            await until(lambda: consumer.statistics.acked == 500)
            assert consumer.statistics.acks_sent <= 50

    run_async(main())
    assert handled == numbered(500)
    assert left(vhost) == 0
