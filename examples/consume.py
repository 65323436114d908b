"""Handle messages: a return acks the delivery, an exception retries it later.

After ``max_attempts`` the message is published to the dead-letter queue, with the reason in its headers. The original
is acked only after the broker has confirmed the copy. With `RetryLater` and `DeadLetter` the handler itself decides.

Prints::

    attempt 1 at fine: handled
    attempt 1 at flaky: ConnectionError
    attempt 1 at hopeless: ValueError
    attempt 1 at unwanted: DeadLetter
    attempt 2 at flaky: handled
    attempt 2 at hopeless: ValueError
    attempt 3 at hopeless: ValueError
    dead letter unwanted: nobody ordered this (reliable_mq.retry.DeadLetter: nobody ordered this)
    dead letter hopeless: 3 of 3 attempts failed (ValueError: the amount is negative)
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, DeadLetter, Delivery, Message, Publisher, Queue, RetryPolicy

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.consume")


def work(delivery: Delivery) -> None:
    """Simulate the work of a handler."""
    match delivery.json()["order"]:
        case "flaky" if delivery.attempt == 1:
            raise ConnectionError("the database is away")
        case "hopeless":
            raise ValueError("the amount is negative")
        case "unwanted":
            raise DeadLetter("nobody ordered this")


def handle(delivery: Delivery) -> None:
    outcome = "handled"
    try:
        work(delivery)
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        print(f"attempt {delivery.attempt} at {delivery.json()['order']}: {outcome}")
        if delivery.attempt == 3:
            consumer.stop()  # the example ends here; running handlers finish


with Publisher(URL, topology=[ORDERS]) as publisher:
    for order in ("fine", "flaky", "hopeless", "unwanted"):
        publisher.publish(Message.json({"order": order}), routing_key="example.consume")

consumer = Consumer(URL, ORDERS, handle, retry=RetryPolicy(max_attempts=3, delays=(0.2, 0.4)))
consumer.run()  # until stop(), SIGTERM or SIGINT

with Consumer(URL, "example.consume.dead") as dead_letters, dead_letters.get(2, timeout=10) as deliveries:
    for dead in deliveries:
        why = dead.headers["x-reliable-mq-dead-letter-reason"]
        last = "{x-reliable-mq-exception-type}: {x-reliable-mq-exception-message}".format_map(dead.headers)
        print(f"dead letter {dead.json()['order']}: {why} ({last})")
