"""Queries over streams with a file sink, and batch reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.support import spark_credentials
from integration.support.spark_application import committed_rows, drained
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from reliable_mq.testing import Audit, VirtualHost

EVENTS = Queue("events", type="stream")


def publish(vhost: VirtualHost, checker: Audit, count: int) -> None:
    messages = [Message(b"%d" % number) for number in range(count)]
    for message in messages:
        checker.attempted(message.message_id)
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        assert publisher.publish_many(messages, routing_key=EVENTS.name).ok
    for message in messages:
        checker.confirmed(message.message_id)


def test_a_query_goes_on_where_its_checkpoint_ends(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Audit
) -> None:
    """Two runs with availableNow read each message once.

    Several tasks read under a limit, and the progress counts the messages.
    """
    source = {"url": vhost.url, "stream": EVENTS.name, "startingOffsets": "earliest"}
    source |= {"maxMessagesPerTrigger": "100", "minPartitions": "2"}
    settings = {"sources": {"events": source}, "directory": str(tmp_path)}
    for _ in range(2):
        publish(vhost, checker, 150)
        [query] = drained(spark, settings, 120)
        assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [100, 50]
    rows = committed_rows(tmp_path / "events" / "output", "offset")
    assert rows == dict.fromkeys(range(300), 1)


def test_a_batch_read_is_split_among_tasks(spark: SparkSession, vhost: VirtualHost, checker: Audit) -> None:
    """The rows have all columns, or those of a given schema."""
    publish(vhost, checker, 1000)
    source = spark.read.format("rabbitmq").options(url=vhost.url, stream="events", minPartitions="4")
    rows = source.load()
    assert rows.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in rows.select("offset", "message_id").collect()) == list(range(1000))
    narrow = source.schema("body binary, offset bigint").load()
    assert {(row.offset, bytes(row.body)) for row in narrow.collect()} == {(n, b"%d" % n) for n in range(1000)}


def test_filters_of_one_use_of_a_dataframe_limit_no_other(
    spark: SparkSession, vhost: VirtualHost, checker: Audit
) -> None:
    """Spark makes one reader for all uses, and would keep the filters that it accepts."""
    publish(vhost, checker, 100)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = spark.read.format("rabbitmq").options(url=vhost.url, stream="events").load()
        first, last = rows.where("offset < 10"), rows.where("offset >= 90")
        assert [each.count() for each in (first, last, first.union(last), rows)] == [10, 10, 20, 100]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_provider_logs_in_the_driver_and_the_executors(
    spark: SparkSession, vhost: VirtualHost, checker: Audit
) -> None:
    """The URL of sink, plan and tasks has no password.

    They call the function wherever they connect.
    """
    publish(vhost, checker, 10)
    scheme, _, rest = vhost.url.partition("://")
    given = {
        "url": f"{scheme}://{rest.partition('@')[2]}",
        "credentialsProvider": f"{spark_credentials.__name__}:guest",
    }
    given |= {"connection.heartbeat": "30s", "connection.timeout": "20s"}
    rows = spark.range(10, 20).selectExpr("cast(id as string) as body")
    rows.write.format("rabbitmq").options(**given, routingKey="events").mode("append").save()
    found = spark.read.format("rabbitmq").options(**given, stream="events").load().select("body").collect()
    assert sorted(int(row.body) for row in found) == list(range(20))


def test_a_stream_is_read_by_sql_alone(spark: SparkSession, vhost: VirtualHost, checker: Audit) -> None:
    """A temporary view has the messages of the stream at its first query.

    The URL is in no plan.
    """
    publish(vhost, checker, 100)
    view = f"CREATE OR REPLACE TEMPORARY VIEW events USING rabbitmq OPTIONS (url '{vhost.url}', stream 'events')"
    spark.sql(view)
    publish(vhost, checker, 50)
    try:
        for _ in range(2):
            counted = spark.sql("SELECT count(*) AS n, min(offset) AS low, max(offset) AS high FROM events")
            assert [tuple(row) for row in counted.collect()] == [(150, 0, 149)]
            assert vhost.url not in counted._jdf.queryExecution().toString()  # type: ignore[operator]
            publish(vhost, checker, 50)
        spark.sql(view)
        found = spark.sql("SELECT cast(body AS string) AS body FROM events WHERE offset >= 200 ORDER BY offset")
        assert [row.body for row in found.collect()] == [str(number % 50) for number in range(50)]
    finally:
        spark.sql("DROP VIEW events")


def test_sql_cannot_read_a_queue_and_the_error_says_what_to_use(spark: SparkSession, vhost: VirtualHost) -> None:
    """Reading a view is a batch read."""
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING rabbitmq OPTIONS (url '{vhost.url}', queue 'orders')")
    try:
        with pytest.raises(Exception, match=r"cannot be read with spark\.read"):
            spark.sql("SELECT * FROM orders").collect()
    finally:
        spark.sql("DROP VIEW orders")
