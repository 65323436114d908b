"""Publish many messages without waiting for each, and get each outcome.

``submit`` returns a `Confirmation` at once. It blocks only while ``max_outstanding`` messages are unconfirmed, so
memory is bounded. Read a confirmation later, add a callback, or leave the ``with`` block, which waits for all messages
and raises an error if the program has not read a failure.

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
        confirmation.add_done_callback(called_back.append)  # on a callback thread, not the I/O thread
        confirmations.append(confirmation)
    print(f"submitted {len(confirmations)}")
    print(f"the 500th: {confirmations[499].result(timeout=30).status}")
    publisher.flush(timeout=30)  # waits for all messages submitted before

failures = [confirmation.exception() for confirmation in called_back if confirmation.exception() is not None]
print(f"called back {len(called_back)} times, {len(failures)} failures")
