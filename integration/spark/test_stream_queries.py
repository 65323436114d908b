"""Queries over streams: what a file sink holds, and what a batch read gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.programs.spark_queries import start
from integration.support.spark_application import committed_rows
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from integration.support.checker import Checker
    from integration.support.management import VirtualHost

EVENTS = Queue("events", type="stream")


def publish(vhost: VirtualHost, checker: Checker, count: int) -> None:
    messages = [Message(b"%d" % number) for number in range(count)]
    for message in messages:
        checker.attempted(message.message_id)
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        assert publisher.publish_many(messages, routing_key=EVENTS.name).ok
    for message in messages:
        checker.confirmed(message.message_id)


def test_a_query_goes_on_where_its_checkpoint_ends(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Checker
) -> None:
    """Two runs with availableNow: each message once, by several tasks, under a limit, with progress that counts."""
    source = {"url": vhost.url, "stream": EVENTS.name, "startingOffsets": "earliest"}
    source |= {"maxMessagesPerTrigger": "100", "minPartitions": "2"}
    settings = {"sources": {"events": source}, "directory": str(tmp_path), "drain": True}
    for _ in range(2):
        publish(vhost, checker, 150)
        (query,) = start(spark, settings)
        assert query.awaitTermination(120)
        assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [100, 50]
    rows = committed_rows(tmp_path / "events" / "output", "offset")
    assert rows == dict.fromkeys(range(300), 1)


def test_a_batch_read_is_split_among_tasks(spark: SparkSession, vhost: VirtualHost, checker: Checker) -> None:
    """All columns, or those that a schema asks for."""
    publish(vhost, checker, 1000)
    source = spark.read.format("rabbitmq").options(url=vhost.url, stream="events", minPartitions="4")
    rows = source.load()
    assert rows.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in rows.select("offset", "message_id").collect()) == list(range(1000))
    narrow = source.schema("body binary, offset bigint").load()
    assert {(row.offset, bytes(row.body)) for row in narrow.collect()} == {(n, b"%d" % n) for n in range(1000)}
