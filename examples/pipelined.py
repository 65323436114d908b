"""Publish many messages without waiting for each, and learn of each what became of it.

``submit`` returns a `Confirmation` at once; it blocks only while ``max_outstanding`` messages are unconfirmed, so
memory is bounded. Look at a confirmation later, or be called back, or leave the ``with`` block, which waits for all and
raises for every failure that nobody has looked at.

Prints::

    submitted 1000
    the 500th: confirmed
    called back 1000 times, 0 failures
"""

from __future__ import annotations

import os

from reliable_mq import Confirmation, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")

called_back: list[Confirmation] = []

with Publisher(URL, topology=[Queue("example.pipelined")], max_outstanding=200) as publisher:
    confirmations = []
    for number in range(1000):
        confirmation = publisher.submit(Message.json({"order": number}), routing_key="example.pipelined")
        confirmation.add_done_callback(called_back.append)  # on a thread for this purpose, not on the I/O thread
        confirmations.append(confirmation)
    print(f"submitted {len(confirmations)}")
    print(f"the 500th: {confirmations[499].result(timeout=30).status}")
    publisher.flush(timeout=30)  # waits for everything submitted before

failures = [confirmation.exception() for confirmation in called_back if confirmation.exception() is not None]
print(f"called back {len(called_back)} times, {len(failures)} failures")
