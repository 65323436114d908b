"""A service that publishes an invoice for each order until it is stopped.

``run`` returns on SIGTERM, on Ctrl-C and on ``stop()``. No new handler starts then. Running handlers finish, and their
deliveries are acked; the other deliveries are requeued. After a second signal, ``run`` does not wait for handlers.

The invoice is confirmed before the handler returns, and the order is acked after that, so no order is lost in between.
If the service dies between the two, the order is invoiced twice. The handler of the invoices can detect this by the
``message_id``, which is derived from that of the order.

Prints, after it was stopped::

    order 1 -> invoice 1
    order 2 -> invoice 2
    order 3 -> invoice 3
    stopped: 3 orders handled, 3 acknowledged, 3 invoices confirmed
"""

from __future__ import annotations

import os

from reliable_mq import Consumer, DeadLetter, Delivery, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS, INVOICES = Queue("example.service.orders"), Queue("example.service.invoices")


def main() -> None:
    with Publisher(URL, topology=[ORDERS, INVOICES], name="invoices") as publisher:
        for number in (1, 2, 3):  # orders for this example
            publisher.publish(Message.json({"order": number}), routing_key="example.service.orders")

        def handle(delivery: Delivery) -> None:
            if not delivery.message_id:
                raise DeadLetter("no message_id")  # all invoices of such orders would have the same id
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
