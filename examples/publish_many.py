"""Publish an iterable, pipelined, and get one report of the outcomes.

The queue here accepts five messages and rejects the others. Rejected messages (``basic.nack``) are retried under the
publisher's retry policy: by default six attempts over about ten seconds, here only one.

Prints::

    confirmed: 5
    not confirmed: 15, of them PublishNacked: 15
    publish these again later: 15 messages, the same ids as before
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, Message, Publisher, PublishNacked, Queue, RetryPolicy

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
# The limit is exact on a classic queue; a quorum queue accepts a few more messages.
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
