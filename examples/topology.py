"""Topology as data: declared queues, exchanges and bindings.

They are declared at every connect, together with the queues and exchanges that they refer to. If one exists with other
arguments, an error names the argument and both values; nothing is deleted or changed.

Prints::

    orders.eu.placed: on its queue
    orders.us.placed: on the queue for what matches no binding
    TopologyMismatch in x-max-length: declared 500, existing 1000
"""

from __future__ import annotations

import os

from reliable_mq import Binding, Consumer, Exchange, Message, Publisher, Queue, TopologyMismatch

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")

UNMATCHED = Exchange("example.unmatched", type="fanout")
ORDERS = Exchange("example.orders", type="topic", alternate_exchange=UNMATCHED)
EUROPE = Queue("example.orders.eu", max_length=1000)  # if it is full, publishes are nacked, and no message is dropped
OTHERS = Queue("example.orders.others")
TOPOLOGY = [
    Binding(ORDERS, EUROPE, "orders.eu.*"),  # declares the exchanges, the queue and its dead-letter queue first
    Binding(UNMATCHED, OTHERS),
]

with Publisher(URL, topology=TOPOLOGY) as publisher:
    for region in ("eu", "us"):
        publisher.publish(
            Message.json({"region": region}), exchange="example.orders", routing_key=f"orders.{region}.placed"
        )

for queue, meaning in ((EUROPE, "its queue"), (OTHERS, "the queue for what matches no binding")):
    with Consumer(URL, queue) as consumer, consumer.get(timeout=5) as deliveries:
        for delivery in deliveries:
            print(f"{delivery.routing_key}: on {meaning}")

try:
    Publisher(URL, topology=[Queue("example.orders.eu", max_length=500)]).connect()
except TopologyMismatch as error:
    print(f"TopologyMismatch in {error.argument}: declared {error.declared}, existing {error.existing}")
