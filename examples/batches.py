"""Handle messages in batches, with a verdict for each.

The handler gets a list of deliveries and returns one verdict for each: `Ack`, ``RetryLater(...)`` or
``DeadLetter(...)``. None acks all of them. If the handler raises, the item at fault is unknown, so each delivery is
retried alone.

Prints::

    batch of 5: 1, 2, 3, 4, 5
    batch of 1: 3, attempt 2
    handled 4, retried 1, dead-lettered 1, 6 deliveries acked
"""

from __future__ import annotations

import os

from reliable_mq import Ack, Consumer, DeadLetter, Delivery, Message, Publisher, Queue, RetryLater

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.batches")


def verdict(delivery: Delivery) -> Ack | RetryLater | DeadLetter:
    match delivery.json()["order"]:
        case 3 if delivery.attempt == 1:
            return RetryLater(delay=0.2)
        case 4:
            return DeadLetter("out of stock")
        case _:
            return Ack()


def handle(deliveries: list[Delivery]) -> list[Ack | RetryLater | DeadLetter]:
    orders = ", ".join(str(delivery.json()["order"]) for delivery in deliveries)
    attempt = deliveries[0].attempt
    print(f"batch of {len(deliveries)}: {orders}" + (f", attempt {attempt}" if attempt > 1 else ""))
    if attempt > 1:
        consumer.stop()
    return [verdict(delivery) for delivery in deliveries]


with Publisher(URL, topology=[ORDERS]) as publisher:
    publisher.publish_many((Message.json({"order": n}) for n in range(1, 6)), routing_key="example.batches")

consumer = Consumer(URL, ORDERS, handle, batch_size=5, batch_wait=5)
consumer.run()  # until stop(), SIGTERM or SIGINT

counts = consumer.statistics
print(
    f"handled {counts.handled}, retried {counts.retried}, dead-lettered {counts.dead_lettered}, "
    f"{counts.acked} deliveries acked"
)
