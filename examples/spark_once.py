"""Spark: queue → Spark → queue, with each effect once despite duplicates.

Ten orders are published twice each, with the same `message_id`, as by a publisher that missed a confirm. Spark drops
messages with an id that it has seen within the last hour, also after a crash, because the ids are in its checkpoint.
Each invoice has an id derived from its order, so a consumer with an idempotency store drops invoices that a retried
task has published again.

Prints::

    20 orders came in
    10 invoices handled: 0 to 9
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue
from reliable_mq.spark import register
from reliable_mq.stores import MemoryStore

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS, INVOICES = Queue("example.spark-orders"), Queue("example.spark-invoices")


def publish() -> None:
    """Publish each order twice."""
    now = datetime.now(UTC)
    with Publisher(URL, topology=[ORDERS, INVOICES]) as publisher:
        for number in [*range(10), *range(10)]:
            order = Message.json({"order": number}, message_id=f"order-{number}", timestamp=now)
            publisher.submit(order, routing_key=ORDERS.name)


def run(spark: SparkSession, checkpoint: str) -> int:
    """Make invoices of the orders in the queue. Return the number of input rows."""
    orders = spark.readStream.format("rabbitmq").option("url", URL).option("queue", ORDERS.name).load()
    query = (
        orders.select("body", "message_id", "timestamp")
        .withWatermark("timestamp", "1 hour")
        .dropDuplicatesWithinWatermark(["message_id"])
        .selectExpr("body", "'application/json' as content_type", "concat('invoice-', message_id) as message_id")
        .writeStream.format("rabbitmq")
        .option("url", URL)
        .option("routingKey", INVOICES.name)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def handle_invoices() -> list[int]:
    """Handle ten invoices, each once. Return their numbers."""
    handled: list[int] = []
    enough = threading.Event()

    def handle(invoice: Delivery) -> None:
        handled.append(invoice.json()["order"])
        if len(handled) == 10:
            enough.set()

    with Consumer(URL, INVOICES, handle, idempotency=MemoryStore()):
        enough.wait(30)
    return sorted(handled)


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    register(spark)
    publish()
    with tempfile.TemporaryDirectory() as checkpoint:
        print(f"{run(spark, checkpoint)} orders came in")
    handled = handle_invoices()
    print(f"{len(handled)} invoices handled: {handled[0]} to {handled[-1]}")
    spark.stop()


if __name__ == "__main__":
    main()
