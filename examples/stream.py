"""Read a stream: messages stay in it, and each consumer chooses its start.

``offset`` is ``"first"``, ``"last"``, ``"next"``, a number, or a ``datetime`` (as exact as the stream's chunks). After
a lost connection, a consumer continues after the messages that it has handled. Your program must store the offset where
the next process begins.

Prints::

    published 5 events
    from the first: a, b, c, d, e
    from the offset of d: d, e
"""

from __future__ import annotations

import os
import uuid

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
EVENTS = Queue("example.stream", type="stream", max_age=3600)

run = uuid.uuid4().hex  # the stream may hold the events of earlier runs


def read(offset: str | int) -> list[tuple[int, str]]:
    """Read the events of this run."""
    found: list[tuple[int, str]] = []

    def handle(delivery: Delivery) -> None:
        if delivery.correlation_id == run and delivery.offset is not None:
            found.append((delivery.offset, delivery.body.decode()))
            if delivery.body == b"e":
                consumer.stop()

    consumer = Consumer(URL, EVENTS, handle, offset=offset)
    consumer.run()
    return found


with Publisher(URL, topology=[EVENTS]) as publisher:
    events = [Message(name.encode(), correlation_id=run) for name in "abcde"]
    print(f"published {publisher.publish_many(events, routing_key='example.stream').confirmed} events")

everything = read("first")
print("from the first:", ", ".join(name for _, name in everything))
print("from the offset of d:", ", ".join(name for _, name in read(everything[3][0])))
