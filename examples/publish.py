"""Publish one message and wait for its confirm.

``publish`` returns once the broker has confirmed the message: it is in every queue that it was routed to, and on disk
there. Otherwise it raises.

Prints::

    the broker has message ...-...-7...-...-...
    attempts: 1, maybe twice: False
"""

from __future__ import annotations

import os

from reliable_mq import Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.publish")  # quorum, durable, with a dead-letter queue: example.publish.dead

with Publisher(URL, topology=[ORDERS]) as publisher:
    message = Message.json({"order": 1}, headers={"shop": "north"}, type="order.placed")
    receipt = publisher.publish(message, routing_key="example.publish")
    print(f"the broker has message {receipt.message_id}")
    print(f"attempts: {receipt.attempts}, maybe twice: {receipt.possible_duplicate}")
