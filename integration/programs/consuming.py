"""Consume until stopped; each handler waits for a byte on standard input.

Usage: ``python -m integration.programs.consuming URL STOP_TIMEOUT PASSES API QUEUE``. The handlers of the first
PASSES deliveries do not wait. API is ``sync`` or ``aio``. QUEUE is ``shared``, or ``single`` for a single active
consumer. Prints its steps, and ``returned`` when ``run()`` has returned.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

from integration.support.blocking_consumer import in_a_coroutine
from reliable_mq import AsyncConsumer, Consumer, Queue

if TYPE_CHECKING:
    from reliable_mq import Delivery


def main(url: str, stop_timeout: float, passes: int, api: str, queue: str) -> None:
    orders = Queue("orders", single_active_consumer=queue == "single")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

    def handle(delivery: Delivery) -> None:
        say(f"begun {delivery.body.decode()}")
        if int(delivery.body) >= passes:
            os.read(0, 1)  # not sys.stdin: its lock would abort an interpreter that is exiting
        say(f"done {delivery.body.decode()}")

    if api == "sync":
        Consumer(url, orders, handle, stop_timeout=stop_timeout, ack_every=1).run()
    else:
        consumer = AsyncConsumer(url, orders, in_a_coroutine(handle), stop_timeout=stop_timeout, ack_every=1)
        asyncio.run(consumer.run())
    say("returned")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
