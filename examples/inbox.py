"""The inbox: an effect in a database happens once, even if processes die.

The handler's writes and the completion record of the message are committed in one transaction. If the process is killed
before the commit, nothing is written, and the message is redelivered and handled. If the process is killed after the
commit, the redelivered message is recognised by its record.

``RELIABLE_MQ_DATABASE`` may be any SQLAlchemy URL, for example
``postgresql+psycopg://user:password@localhost/accounts``. The default is a temporary SQLite file.

Prints::

    credited 10: balance 10
    failed after it had written: rolled back
    credited 5: balance 15
    handled 2, duplicates 1: balance 15
"""

from __future__ import annotations

import os
import tempfile
import uuid

from sqlalchemy import create_engine, text

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue, RetryPolicy
from reliable_mq.stores import SQLAlchemyStore

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
RUN = uuid.uuid4().hex[:8]  # so that runs of the example do not share queues and tables
CREDITS = Queue(f"example.inbox.{RUN}")
CREDIT = text(f"UPDATE accounts_{RUN} SET balance = balance + :amount")
BALANCE = text(f"SELECT balance FROM accounts_{RUN}")


def main(database: str) -> None:
    engine = create_engine(database)
    store = SQLAlchemyStore(engine, table=f"inbox_{RUN}")
    store.create_table()  # or use a migration with the statements in store.ddl
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE accounts_{RUN} (balance INTEGER)"))
        connection.execute(text(f"INSERT INTO accounts_{RUN} VALUES (0)"))

    def handle(delivery: Delivery) -> None:
        amount = delivery.json()["amount"]
        with delivery.transaction() as session:
            session.execute(CREDIT, {"amount": amount})
            balance = session.execute(BALANCE).scalar_one()
            if amount == 5 and delivery.attempt == 1:
                print("failed after it had written: rolled back")
                raise ConnectionError("the bank does not answer")
        print(f"credited {amount}: balance {balance}")
        if amount == 5:
            consumer.stop()

    ten, again = (Message.json({"amount": 10}, message_id="credit-1") for _ in range(2))  # delivered twice
    five = Message.json({"amount": 5}, message_id="credit-2")
    with Publisher(URL, topology=[CREDITS]) as publisher:
        publisher.publish_many([ten, again, five], routing_key=CREDITS.name)
    consumer = Consumer(URL, CREDITS, handle, idempotency=store, retry=RetryPolicy(3, delays=(0.1,)))
    consumer.run()
    seen = consumer.statistics
    with engine.connect() as connection:
        balance = connection.execute(BALANCE).scalar_one()
    print(f"handled {seen.handled}, duplicates {seen.duplicates}: balance {balance}")
    with engine.begin() as connection:
        for table in ("accounts", "inbox"):
            connection.execute(text(f"DROP TABLE {table}_{RUN}"))
    store.close()
    engine.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(os.environ.get("RELIABLE_MQ_DATABASE", f"sqlite:///{directory}/accounts.db"))
