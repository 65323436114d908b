"""The service of ``service.py`` on asyncio: an invoice for each order.

The names and arguments are the same; calls that block there are awaited here. The handler is a coroutine function; up
to ``concurrency`` calls run at a time, each in its own task. ``run`` returns on SIGTERM, on Ctrl-C and on ``stop()``.

Prints, after it was stopped::

    order 1 -> invoice 1
    order 2 -> invoice 2
    order 3 -> invoice 3
    stopped: 3 orders handled, 3 acknowledged, 3 invoices confirmed
"""

from __future__ import annotations

import asyncio
import os

from reliable_mq import AsyncConsumer, AsyncPublisher, DeadLetter, Delivery, Message, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS, INVOICES = Queue("example.asyncio_service.orders"), Queue("example.asyncio_service.invoices")


async def main() -> None:
    async with AsyncPublisher(URL, topology=[ORDERS, INVOICES], name="invoices") as publisher:
        for number in (1, 2, 3):  # orders for this example
            await publisher.publish(Message.json({"order": number}), routing_key=ORDERS.name)

        async def handle(delivery: Delivery) -> None:
            if not delivery.message_id:
                raise DeadLetter("no message_id")  # all invoices of such orders would have the same id
            order = delivery.json()["order"]
            invoice = Message.json({"invoice": order}, message_id=f"invoice-of-{delivery.message_id}")
            await publisher.publish(invoice, routing_key=INVOICES.name)
            print(f"order {order} -> invoice {order}", flush=True)

        consumer = AsyncConsumer(URL, ORDERS, handle, stop_timeout=20, name="orders")
        await consumer.run()
        confirmed = publisher.statistics.confirmed - 3
    counts = consumer.statistics
    print(f"stopped: {counts.handled} orders handled, {counts.acked} acknowledged, {confirmed} invoices confirmed")


if __name__ == "__main__":
    asyncio.run(main())
