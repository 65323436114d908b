"""Spark: from a stream into Parquet files, each message once.

The query ends when it has read all available messages. Started again with the same checkpoint, it continues after them.
If a crash interrupts a micro-batch, the micro-batch is run again with the same messages, and Spark's file sink keeps
one copy of it.

Prints::

    60 orders in the files
    100 orders in the files, each of them once
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid

from pyspark.sql import SparkSession

from reliable_mq import Message, Publisher, Queue
from reliable_mq.spark import register

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.spark-files", type="stream", max_age=3600)

RUN = uuid.uuid4().hex  # the stream may hold the orders of earlier runs


def publish(first: int, count: int) -> None:
    """Publish orders into the stream."""
    with Publisher(URL, topology=[ORDERS]) as publisher:
        orders = (Message.json({"order": number}, type=RUN) for number in range(first, first + count))
        publisher.publish_many(orders, routing_key=ORDERS.name).raise_for_failures()


def run(spark: SparkSession, directory: str) -> None:
    """Read all new messages, in micro-batches of at most 25, with two tasks each."""
    (
        spark.readStream.format("rabbitmq")
        .option("url", URL)
        .option("stream", ORDERS.name)
        .option("startingOffsets", "earliest")
        .option("maxMessagesPerTrigger", 25)
        .option("minPartitions", 2)
        .load()
        .where(f"type = '{RUN}'")
        .selectExpr("offset", "message_id", "get_json_object(cast(body as string), '$.order') as order")
        .writeStream.format("parquet")
        .option("path", f"{directory}/orders")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    register(spark)
    with tempfile.TemporaryDirectory() as directory:
        publish(0, 60)
        run(spark, directory)
        print(f"{spark.read.parquet(f'{directory}/orders').count()} orders in the files")
        publish(60, 40)
        run(spark, directory)
        orders = [row.order for row in spark.read.parquet(f"{directory}/orders").collect()]
        assert len(set(orders)) == len(orders)
        print(f"{len(orders)} orders in the files, each of them once")
    spark.stop()


if __name__ == "__main__":
    main()
