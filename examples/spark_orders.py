"""RabbitMQ → Spark → RabbitMQ: aggregate orders into alerts, each order once.

    spark-submit examples/spark_orders.py amqp://guest:guest@localhost/ /tmp/orders-checkpoint

The query reads the queue ``orders`` (JSON with ``order``, ``customer``, ``cents`` and ``placed``), and publishes an
alert to the queue ``alerts`` for every customer who has ordered for more than 1000.00 within a minute. It uses staged
mode: a relay next to the driver moves orders into the stream ``orders.stage``, each once, and the executors read the
stream. A duplicate of an order has the same ``message_id``, and is dropped. A duplicate of an alert has the same
``message_id``, too, so the consumer of alerts can detect it, for example with an idempotency store.

The query runs until it is stopped. If it is stopped or killed, and started again with the same checkpoint, no order is
lost.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from reliable_mq.spark import register

LIMIT = 100_000  # cents


def start(spark: SparkSession, url: str, checkpoint: str, **trigger: str) -> StreamingQuery:
    """Start the query. The queues must exist."""
    register(spark)
    orders = (
        spark.readStream.format("rabbitmq")
        .option("url", url)
        .option("queue", "orders")
        .option("stage", "orders.stage")
        .option("maxMessagesPerTrigger", 1000)
        .load()
    )
    alerts = (
        orders.select(
            "message_id",
            f.from_json(f.col("body").cast("string"), "customer string, cents long, placed timestamp").alias("order"),
        )
        .select("message_id", "order.*")
        .withWatermark("placed", "1 hour")
        .dropDuplicatesWithinWatermark(["message_id"])
        .groupBy(f.window("placed", "1 minute").alias("minute"), "customer")
        .agg(f.sum("cents").alias("cents"), f.count("*").alias("orders"))
        .where(f.col("cents") > LIMIT)
        .select(
            f.to_json(f.struct("customer", "cents", "orders", f.col("minute.start").alias("minute"))).alias("body"),
            f.concat_ws("@", "customer", f.unix_timestamp("minute.start")).alias("message_id"),
            f.lit("application/json").alias("content_type"),
        )
    )
    return (
        alerts.writeStream.format("rabbitmq")
        .option("url", url)
        .option("routingKey", "alerts")
        .option("checkpointLocation", checkpoint)
        .queryName("alerts")
        .trigger(**(trigger or {"processingTime": "1 second"}))
        .start()
    )


if __name__ == "__main__":
    start(SparkSession.builder.appName("orders").getOrCreate(), sys.argv[1], sys.argv[2]).awaitTermination()
