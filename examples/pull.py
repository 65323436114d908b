"""Take the messages of a queue and exit, for jobs that run on a schedule.

``get`` returns up to a number of deliveries, and waits for the first one. Settle deliveries individually, or let the
block do it: at its end the others are acked, or requeued if it raises.

Prints::

    took 4 of 4
    after an exception: 3 are back, redelivered: True
    the queue is empty: True
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.pull")


def work(_delivery: Delivery) -> None:
    raise RuntimeError("the job fails here")


with Publisher(URL, topology=[ORDERS]) as publisher:
    publisher.publish_many((Message.json({"order": n}) for n in range(4)), routing_key="example.pull")

with Consumer(URL, ORDERS) as consumer:
    try:
        with consumer.get(4, timeout=5) as deliveries:
            print(f"took {len(deliveries)} of 4")
            deliveries[0].ack()  # or .retry(delay), .dead_letter(reason), .requeue()
            work(deliveries[1])
    except RuntimeError:
        pass  # three unsettled deliveries are requeued

    back: list[Delivery] = []
    while len(back) < 3:  # get waits only for the first message
        with consumer.get(10, timeout=5) as deliveries:
            back += deliveries
    print(f"after an exception: {len(back)} are back, redelivered: {back[0].redelivered}")

    with consumer.get(10, timeout=0.5) as deliveries:
        print(f"the queue is empty: {not deliveries}")
