"""A service that runs until it is told to stop: it consumes orders and publishes an invoice for each.

``run`` returns on SIGTERM, on Ctrl-C and on ``stop()``. By then nothing new was begun, what was being handled is
finished and acknowledged, and what had not begun is back in the queue. A second signal does not wait for handlers.

The invoice is confirmed before the handler returns, and the order is acknowledged after that: an order is never lost
between the two. It may be invoiced twice, where the service dies in between; whoever handles invoices can tell by the
``message_id``, which is made from the order's.

Prints, after it was stopped::

    order 1 -> invoice 1
    order 2 -> invoice 2
    order 3 -> invoice 3
    stopped: 3 orders handled, 3 acknowledged, 3 invoices confirmed
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS, INVOICES = Queue("example.service.orders"), Queue("example.service.invoices")


def main() -> None:
    with Publisher(URL, topology=[ORDERS, INVOICES], name="invoices") as publisher:
        for number in (1, 2, 3):  # something to do
            publisher.publish(Message.json({"order": number}), routing_key="example.service.orders")

        def handle(delivery: Delivery) -> None:
            order = delivery.json()["order"]
            invoice = Message.json({"invoice": order}, message_id=f"invoice-of-{delivery.message_id}")
            publisher.publish(invoice, routing_key="example.service.invoices")
            print(f"order {order} -> invoice {order}", flush=True)

        consumer = Consumer(URL, ORDERS, handle, stop_timeout=20, name="orders")
        consumer.run()
        confirmed = publisher.statistics.confirmed - 3
    counts = consumer.statistics
    print(f"stopped: {counts.handled} orders handled, {counts.acked} acknowledged, {confirmed} invoices confirmed")


if __name__ == "__main__":
    main()
