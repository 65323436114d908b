"""Publish with asyncio: the same names and arguments as ``Publisher``, awaited.

A thousand tasks that publish at the same time are as fast as a loop that submits, with more CPU time for each message:
each task only waits for its confirm, and the window limits the number of unconfirmed messages.

Prints::

    the broker has order ...
    1000 tasks: 1000 confirmed
    submitted: 1000, confirmed: 1000
    nobody there: PublishReturned
"""

from __future__ import annotations

import asyncio
import os

from reliable_mq import AsyncPublisher, Message, PublishReturned, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.asyncio_publisher")


async def main() -> None:
    async with AsyncPublisher(URL, topology=[ORDERS]) as publisher:
        receipt = await publisher.publish(Message.json({"order": 0}), routing_key=ORDERS.name)
        print(f"the broker has order {receipt.message_id}")

        orders = [Message.json({"order": number}) for number in range(1, 1001)]
        receipts = await asyncio.gather(*(publisher.publish(order, routing_key=ORDERS.name) for order in orders))
        print(f"1000 tasks: {len(receipts)} confirmed")

        more = (Message.json({"order": number}) for number in range(1001, 2001))
        confirmations = [await publisher.submit(order, routing_key=ORDERS.name) for order in more]
        await publisher.flush(timeout=30)
        confirmed = sum(confirmation.exception() is None for confirmation in confirmations)
        print(f"submitted: {len(confirmations)}, confirmed: {confirmed}")

        try:
            await publisher.publish(Message.json({"order": 2001}), routing_key="example.nobody")
        except PublishReturned as error:
            print(f"nobody there: {type(error).__name__}")


asyncio.run(main())
