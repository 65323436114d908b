"""The service of ``asyncio_service.py`` on uvloop: only the loop differs.

``uvloop.run(main())`` replaces ``asyncio.run(main())``. This package does not install uvloop: use
``pip install uvloop``.

Prints::

    on uvloop.Loop: 1000 orders confirmed
    on uvloop.Loop: 1000 orders handled, 1000 acknowledged
"""

from __future__ import annotations

import asyncio
import os

import uvloop

from reliable_mq import AsyncConsumer, AsyncPublisher, Delivery, Message, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.uvloop_service")
COUNT = 1000


async def main() -> None:
    kind = type(asyncio.get_running_loop())
    loop = f"{kind.__module__}.{kind.__qualname__}"
    async with AsyncPublisher(URL, topology=[ORDERS]) as publisher:
        orders = (Message.json({"order": number}) for number in range(COUNT))
        report = await publisher.publish_many(orders, routing_key=ORDERS.name)
    print(f"on {loop}: {report.confirmed} orders confirmed")

    handled = 0

    async def handle(_delivery: Delivery) -> None:
        nonlocal handled
        handled += 1
        if handled == COUNT:
            consumer.stop()

    consumer = AsyncConsumer(URL, ORDERS, handle)
    await consumer.run()
    print(f"on {loop}: {handled} orders handled, {consumer.statistics.acked} acknowledged")


uvloop.run(main())
