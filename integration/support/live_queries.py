"""Two Spark queries that run during broker faults: queue to queue, and a stream."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import Audit, VirtualHost

__all__ = ["COPIES", "EVENTS", "MESSAGES", "ORDERS", "LiveQueries"]

ORDERS, COPIES, EVENTS = Queue("orders"), Queue("copies"), Queue("events", type="stream")
MESSAGES = 300


class LiveQueries:
    """Publishes orders and events; one query copies the orders, one reads the events.

    Attributes:
        came: How often each copy was delivered. A consumer of `COPIES` counts them here.
        offsets: How often each offset of the stream was read. The function that is passed to `read` counts them here.
    """

    def __init__(self, spark: SparkSession, vhost: VirtualHost, checker: Audit, path: Path) -> None:
        self._spark, self._vhost, self._checker, self._path = spark, vhost, checker, path
        self.came: Counter[str] = Counter()
        self.offsets: Counter[int] = Counter()
        for message_id in self._publish(ORDERS):
            checker.attempted(message_id)
            checker.confirmed(message_id)
        self._publish(EVENTS)

    def copy(self) -> StreamingQuery:
        """Start to copy the orders, 20 per batch."""
        url = self._vhost.url
        source = self._spark.readStream.format("rabbitmq").option("url", url)
        return (
            source.option("maxMessagesPerTrigger", 20).option("queue", "orders").load().select("body", "message_id")
            .writeStream.format("rabbitmq").options(url=url, routingKey="copies", **self._checkpoint("queue"))
            .start()
        )  # fmt: skip

    def read(self, collect: Callable[[DataFrame, int], None]) -> StreamingQuery:
        """Start to read the events, 60 per batch."""
        source = self._spark.readStream.format("rabbitmq").option("url", self._vhost.url)
        return (
            source.option("maxMessagesPerTrigger", 60).option("stream", "events").option("startingOffsets", "earliest")
            .load().writeStream.foreachBatch(collect).options(**self._checkpoint("stream"))
            .start()
        )  # fmt: skip

    def check(self) -> None:
        """Assert that each event was read once, and that no order is lost."""
        assert set(self.offsets.values()) == {1}
        for message_id, times in self.came.items():
            for _ in range(times):
                self._checker.handled(message_id)
        self._checker.drain(self._vhost, ["orders", "copies"], dead_letters=["orders.dead", "copies.dead"])
        balance = self._checker.close()
        assert balance.left == balance.dead_lettered == 0

    def _publish(self, queue: Queue) -> list[str]:
        messages = [Message(b"%d" % number) for number in range(MESSAGES)]
        with Publisher(self._vhost.url, topology=[queue, COPIES]) as publisher:
            assert publisher.publish_many(messages, routing_key=queue.name).ok
        return [message.message_id for message in messages]

    def _checkpoint(self, name: str) -> dict[str, str]:
        return {"checkpointLocation": str(self._path / name)}
