"""Publish an iterable, pipelined, and get one report: how many the broker has, and which messages it does not have.

The queue here takes five messages and refuses the rest. What a queue refuses (``basic.nack``) is tried again under the
publisher's retry policy, six attempts over some ten seconds by default; here it is reported after the first.

Prints::

    confirmed: 5
    not confirmed: 15, of them PublishNacked: 15
    publish these again later: 15 messages, the same ids as before
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, Message, Publisher, PublishNacked, Queue, RetryPolicy

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
# Counted to the message on a classic queue; a quorum queue lets some more in.
SMALL = Queue("example.publish-many", type="classic", max_length=5, dead_letter=None)

orders = (Message.json({"order": number}) for number in range(20))

with Publisher(URL, topology=[SMALL], retry=RetryPolicy(max_attempts=1)) as publisher:
    report = publisher.publish_many(orders, routing_key="example.publish-many")

print(f"confirmed: {report.confirmed}")
nacked = [message for message, error in report.failures if isinstance(error, PublishNacked)]
print(f"not confirmed: {len(report.failures)}, of them PublishNacked: {len(nacked)}")
print(f"publish these again later: {len({message.message_id for message in nacked})} messages, the same ids as before")

with Consumer(URL, SMALL) as consumer, consumer.get(5, timeout=5) as taken:  # make room for the next run
    assert len(taken) == report.confirmed
