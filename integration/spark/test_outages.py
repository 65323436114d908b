"""The broker is SIGKILLed and started again under live queries: a queue to a queue, and a stream."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import Audit, RabbitMQ, VirtualHost

ORDERS, COPIES, EVENTS = Queue("orders"), Queue("copies"), Queue("events", type="stream")
MESSAGES = 300


def publish(vhost: VirtualHost, queue: Queue) -> list[str]:
    messages = [Message(b"%d" % number) for number in range(MESSAGES)]
    with Publisher(vhost.url, topology=[queue, COPIES]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return [message.message_id for message in messages]


@pytest.mark.timeout(400)
def test_f01_a_broker_killed_under_live_queries_loses_nothing(
    spark: SparkSession, private_vhost: VirtualHost, private_broker: RabbitMQ, checker: Audit, tmp_path: Path
) -> None:
    """Neither query fails. What was in a batch of the queue may come twice; a batch of the stream is read on."""
    for message_id in publish(private_vhost, ORDERS):
        checker.attempted(message_id)
        checker.confirmed(message_id)
    publish(private_vhost, EVENTS)
    killed = threading.Event()
    offsets: Counter[int] = Counter()
    copying: list[StreamingQuery] = []

    def collect(rows: DataFrame, batch: int) -> None:
        if batch == 2:
            copying.append(copy())
            wait_until(lambda: copying[0].lastProgress, timeout=60, what="a batch of the other query")
            private_broker.kill()
            killed.set()
        offsets.update(row.offset for row in rows.select("offset").collect())  # the broker is gone, or just back

    def checkpoint(name: str) -> dict[str, str]:
        return {"checkpointLocation": str(tmp_path / name)}

    def copy() -> StreamingQuery:
        source = spark.readStream.format("rabbitmq").option("url", private_vhost.url)
        return (
            source.option("maxMessagesPerTrigger", 20).option("queue", "orders").load().select("body", "message_id")
            .writeStream.format("rabbitmq").options(url=private_vhost.url, routingKey="copies", **checkpoint("queue"))
            .start()
        )  # fmt: skip

    source = spark.readStream.format("rabbitmq").option("url", private_vhost.url).option("maxMessagesPerTrigger", 60)
    read = (
        source.option("stream", "events").option("startingOffsets", "earliest").load()
        .writeStream.foreachBatch(collect).options(**checkpoint("stream"))
        .start()
    )  # fmt: skip
    came: Counter[str] = Counter()
    with Consumer(private_vhost.url, COPIES, lambda copy: came.update([copy.message_id])):
        wait_until(killed.is_set, timeout=120, what="the broker killed")
        [copied] = copying
        assert len(came) < MESSAGES
        private_broker.start()
        wait_until(
            lambda: len(came) == len(offsets) == MESSAGES or copied.exception() or read.exception(),
            timeout=120, what=lambda: f"{len(came)} and {len(offsets)} of {MESSAGES}",
        )  # fmt: skip
        assert copied.exception() is read.exception() is None
        copied.processAllAvailable()
    copied.stop()
    read.stop()
    assert set(offsets.values()) == {1}
    for message_id, times in came.items():
        for _ in range(times):
            checker.handled(message_id)
    checker.drain(private_vhost, ["orders", "copies"], dead_letters=["orders.dead", "copies.dead"])
    balance = checker.close()
    assert balance.left == balance.dead_lettered == 0
