"""An orders service with an outbox and an inbox.

An order and its message are written in one transaction: either both are stored, or neither. The handler writes the
invoice, the completion record of the order's message, and the message about the invoice in one transaction, too. So
each order has one invoice, and one message about it, even if messages are delivered twice or a process dies.

``RELIABLE_MQ_DATABASE`` may be any SQLAlchemy URL, for example ``postgresql+psycopg://user:password@localhost/orders``.
The default is a temporary SQLite file. The relay runs in this process; ``reliable-mq outbox relay`` runs one in a
separate process.

Prints::

    placed: [1, 2]; order 3 was rolled back, and its message with it
    invoiced: [1, 2]
    messages about invoices: [1, 2]
    delivered 3 times, done once each: 1 duplicate
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.stores import SQLAlchemyStore

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
RUN = uuid.uuid4().hex[:8]  # so that runs of the example do not share queues and tables
ORDERS, INVOICES = Queue(f"example.outbox.orders.{RUN}"), Queue(f"example.outbox.invoices.{RUN}")


class OrdersService:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outbox = SQLAlchemyOutbox(engine, table=f"outbox_{RUN}", create=True)
        self.store = SQLAlchemyStore(engine, table=f"inbox_{RUN}")
        self.store.create_table()
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE orders_{RUN} (number INTEGER)"))
            connection.execute(text(f"CREATE TABLE invoices_{RUN} (number INTEGER)"))

    def place(self, number: int) -> None:
        """Commit the order and its message together."""
        with Session(self.engine) as session:
            session.execute(text(f"INSERT INTO orders_{RUN} VALUES (:number)"), {"number": number})
            message = Message.json({"order": number}, message_id=f"order-{number}-{RUN}")
            self.outbox.add(session, message, routing_key=ORDERS.name)
            if number == 3:
                return  # an invalid order: the session rolls back
            session.commit()

    def invoice(self, delivery: Delivery) -> None:
        """Commit the invoice, the completion record and the next message together."""
        with delivery.transaction() as session:
            number = delivery.json()["order"]
            session.execute(text(f"INSERT INTO invoices_{RUN} VALUES (:number)"), {"number": number})
            self.outbox.add(session, Message.json({"invoice": number}), routing_key=INVOICES.name)

    def numbers(self, table: str) -> list[int]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(f"SELECT number FROM {table}_{RUN} ORDER BY number")).scalars())

    def clean_up(self) -> None:
        self.store.close()
        with self.engine.begin() as connection:
            for table in ("orders", "invoices", "outbox", "inbox"):
                connection.execute(text(f"DROP TABLE {table}_{RUN}"))


def main(engine: Engine) -> None:
    service = OrdersService(engine)
    messages: list[int] = []
    arrived = threading.Semaphore(0)

    def note(delivery: Delivery) -> None:
        messages.append(delivery.json()["invoice"])
        arrived.release()

    with (
        Publisher(URL, topology=[ORDERS, INVOICES], outbox=service.outbox) as publisher,
        Consumer(URL, ORDERS, service.invoice, idempotency=service.store) as consumer,
        Consumer(URL, INVOICES, note),
    ):
        for number in (1, 2, 3):
            service.place(number)
        print(f"placed: {service.numbers('orders')}; order 3 was rolled back, and its message with it")
        again = Message.json({"order": 1}, message_id=f"order-1-{RUN}")  # as after a lost confirm
        publisher.publish(again, routing_key=ORDERS.name)
        for _ in range(2):
            arrived.acquire(timeout=30)
        deadline = time.monotonic() + 30
        while not consumer.statistics.duplicates and time.monotonic() < deadline:
            time.sleep(0.05)
    print(f"invoiced: {service.numbers('invoices')}")
    print(f"messages about invoices: {sorted(messages)}")
    counts = consumer.statistics
    print(f"delivered {counts.delivered} times, done once each: {counts.duplicates} duplicate")
    service.clean_up()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        database = create_engine(os.environ.get("RELIABLE_MQ_DATABASE", f"sqlite:///{directory}/orders.db"))
        main(database)
        database.dispose()
