"""Run a consumer and a publisher with probes.

Usage: ``python -m integration.programs.probed URL STOP_TIMEOUT API``, with API ``sync`` or ``aio``. Each handler
waits for a byte on standard input before it ends. Prints the URL of the probes, the steps of the handlers, and
``returned`` at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from integration.support.blocking_consumer import in_a_coroutine
from reliable_mq import AsyncConsumer, AsyncPublisher, Consumer, Message, Publisher, Queue
from reliable_mq.health import HealthServer

if TYPE_CHECKING:
    from reliable_mq import Delivery

ORDERS, SHIPPED = Queue("orders"), Queue("shipped", dead_letter=None)


def handle(delivery: Delivery) -> None:
    say(f"begun {delivery.body.decode()}")
    os.read(0, 1)
    say(f"done {delivery.body.decode()}")


def main(url: str, stop_timeout: float) -> None:
    publisher = Publisher(url, topology=[SHIPPED])

    def ship(delivery: Delivery) -> None:
        handle(delivery)
        publisher.publish(Message(delivery.body), routing_key="shipped")

    consumer = Consumer(url, ORDERS, ship, stop_timeout=stop_timeout, ack_every=1)
    with HealthServer(publisher, consumer, port=0) as server, publisher:
        say(server.url)
        consumer.run()
    say("returned")


async def main_on_a_loop(url: str, stop_timeout: float) -> None:
    publisher = AsyncPublisher(url, topology=[SHIPPED])
    waiting = in_a_coroutine(handle)

    async def ship(delivery: Delivery) -> None:
        await waiting(delivery)
        await publisher.publish(Message(delivery.body), routing_key="shipped")

    consumer = AsyncConsumer(url, ORDERS, ship, stop_timeout=stop_timeout, ack_every=1)
    with HealthServer(publisher, consumer, port=0) as server:
        async with publisher:
            say(server.url)
            await consumer.run()
    say("returned")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    if sys.argv[3] == "sync":
        main(sys.argv[1], float(sys.argv[2]))
    else:
        asyncio.run(main_on_a_loop(sys.argv[1], float(sys.argv[2])))
