"""The failures of a single message, as exceptions that do not affect others.

- *returned*: no queue is bound for the routing key. RabbitMQ confirms such a message nevertheless; here it fails.
- *refused*: the broker closes the channel because of the message. Its text names the exchange, so only the message to
  that exchange fails. The other unconfirmed messages are published again.
- *refused before it was sent*: the message is too large.

Prints::

    returned: 312 NO_ROUTE
    refused: 404 NOT_FOUND - no exchange 'example.nowhere' in vhost ...
    refused: 311 refused before sending
    of 10 messages beside them confirmed: 10
    leaving the block raised PublishReturned
"""

from __future__ import annotations

import os

from reliable_mq import Message, Publisher, PublishError, PublishRefused, PublishReturned, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
QUEUE = Queue("example.failures")

with Publisher(URL, topology=[QUEUE], max_message_bytes=1_000_000) as publisher:
    beside = [publisher.submit(Message(b"good"), routing_key="example.failures") for _ in range(5)]

    try:
        publisher.publish(Message(b"unroutable"), routing_key="example.no-such-queue")
    except PublishReturned as error:
        print(f"returned: {error.reply_code} {error.reply_text}")

    culprit = publisher.submit(Message(b"no such exchange"), exchange="example.nowhere", routing_key="key")
    beside += [publisher.submit(Message(b"good"), routing_key="example.failures") for _ in range(5)]
    try:
        culprit.result(timeout=30)
    except PublishRefused as error:
        print(f"refused: {error.reply_code} {error.reply_text}")

    try:
        publisher.publish(Message(bytes(1_000_001)), routing_key="example.failures")
    except PublishRefused as error:
        print(f"refused: {error.reply_code} {error.reply_text}")

    confirmed = [confirmation for confirmation in beside if confirmation.exception(timeout=30) is None]
    print(f"of {len(beside)} messages beside them confirmed: {len(confirmed)}")

# A failure that the program does not read is not lost: the end of the block raises it.
try:
    with Publisher(URL) as publisher:
        publisher.submit(Message(b"unroutable"), routing_key="example.no-such-queue")
except PublishError as error:
    print(f"leaving the block raised {type(error).__name__}")
