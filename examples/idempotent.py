"""A message that is delivered twice takes effect once.

A publisher publishes unconfirmed messages again, and a broker redelivers unacked messages, so duplicates are normal.
With an idempotency store, the handler is not called for a message whose ``message_id`` is already done. `SQLiteStore`
stores the ids in a file, for all processes of the machine, and keeps them after a restart. There are also stores in
Redis and in SQL databases, for several machines, and one in memory, for tests.

Prints::

    charged for order 1
    charged for order 2
    delivered 3 times, handled 2, duplicates 1
"""

from __future__ import annotations

import os
import tempfile

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue
from reliable_mq.stores import SQLiteStore

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.idempotent")

directory = tempfile.TemporaryDirectory()  # a real service uses a permanent path
store = SQLiteStore(f"{directory.name}/done.db", retention=24 * 3600)  # a duplicate after that time is handled again
delivered = handled = duplicates = 0


def consume_until(last: int) -> None:
    """Run a consumer until it has handled the order ``last``."""
    global delivered, handled, duplicates  # noqa: PLW0603

    def handle(delivery: Delivery) -> None:
        order = delivery.json()["order"]
        print(f"charged for order {order}")
        if order == last:
            consumer.stop()

    consumer = Consumer(URL, ORDERS, handle, idempotency=store)
    consumer.run()
    delivered += consumer.statistics.delivered
    handled += consumer.statistics.handled
    duplicates += consumer.statistics.duplicates


first, second = Message.json({"order": 1}), Message.json({"order": 2})
with Publisher(URL, topology=[ORDERS]) as publisher:
    publisher.publish(first, routing_key="example.idempotent")
    consume_until(1)
    publisher.publish(first, routing_key="example.idempotent")  # the same message, a second time
    publisher.publish(second, routing_key="example.idempotent")
    consume_until(2)

print(f"delivered {delivered} times, handled {handled}, duplicates {duplicates}")

store.close()
directory.cleanup()
