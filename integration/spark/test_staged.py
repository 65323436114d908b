"""Staged mode with real Spark: complete rows, once each, in stable batches.

`test_staged_source` calls the source as Spark would. `test_staged_kills` kills the parts of a query.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from integration.programs.spark_queries import start
from integration.support.shovels import shovel
from integration.support.spark_application import batches_in, committed_rows, killed_in_each_phase
from integration.support.stages import ORDERS, STAGED, left, publish_orders
from reliable_mq import Binding, ConfigurationError, Exchange, Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from reliable_mq.testing import RabbitMQ, VirtualHost


def test_what_was_ready_is_moved_and_read_and_the_query_ends(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """Rows are those of queue mode, with lists and tables in headers.

    A second run reads the messages that were published since.
    """
    first = publish_orders(vhost, 300)
    rows = spark.readStream.format("rabbitmq").options(url=vhost.url, stagePartitions="2", **STAGED).load()

    def run() -> None:
        writer = rows.writeStream.format("parquet").option("path", f"{tmp_path}/output")
        query = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True).start()
        assert query.awaitTermination(240)

    run()
    second = publish_orders(vhost, 100)
    run()
    assert left(vhost, "orders") == 0
    read = spark.read.parquet(f"{tmp_path}/output").collect()
    assert [row for row in read if row.message_id is None] == []
    assert sorted(row.message_id for row in read) == sorted(first + second)
    row = next(row for row in read if row.message_id == first[7])
    assert (bytes(row.body), row.queue, row.exchange, row.routing_key) == (b"7", "orders", "", "orders")
    assert row.headers == {"n": "7", "items": '[1, {"two": "2"}]'}
    assert (row.user_id, row.redelivered, row.persistent) == ("guest", False, True)
    assert all(row.offset is not None for row in read)


def test_a_query_stopped_between_triggers_has_nothing_twice(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """After a restart, it continues after its last batch; queue mode would repeat it."""
    rows = spark.readStream.format("rabbitmq").options(url=vhost.url, **STAGED).load()
    writer = rows.writeStream.format("parquet").option("path", f"{tmp_path}/output")
    writer = writer.option("checkpointLocation", f"{tmp_path}/checkpoint")
    published: list[str] = []
    for _ in range(2):
        published += publish_orders(vhost, 50)
        query = writer.trigger(processingTime="3 seconds").start()
        wait_until(
            lambda: set(published) <= committed(tmp_path).keys() and not query.status["isTriggerActive"],  # noqa: B023
            timeout=240, what="everything read, and no trigger",
        )  # fmt: skip
        query.stop()
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    assert committed(tmp_path) == dict.fromkeys(published, 1)


def test_a_stage_is_joined_with_itself(spark: SparkSession, vhost: VirtualHost, tmp_path: Path) -> None:
    """Spark makes two readers with a relay each, and one of the relays waits.

    Both readers read everything, and each row is joined with itself.
    """
    published = publish_orders(vhost, 200)
    rows = spark.readStream.format("rabbitmq").options(url=vhost.url, **STAGED).load()
    joined = rows.select("message_id", "offset").join(rows.select("message_id", rows.body.alias("again")), "message_id")
    writer = joined.writeStream.format("parquet").option("path", f"{tmp_path}/output")
    query = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    assert max(len(progress["sources"]) for progress in query.recentProgress) == 2
    assert committed_rows(tmp_path / "output") == dict.fromkeys(published, 1)
    assert left(vhost, "orders") == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_f60_a_staged_query_killed_in_any_phase_loses_nothing(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random
) -> None:
    """A repeated batch has the same rows."""
    orders = publish_orders(vhost, 600)
    options = {"url": vhost.url, "maxMessagesPerTrigger": "40", "minPartitions": "2", **STAGED}
    settings = {"sources": {"queue": options}, "pause": 0.003}
    killed_in_each_phase(settings, tmp_path, rng, of="queue", timeout=240)
    settings = {"sources": {"queue": {"url": vhost.url, **STAGED}}, "directory": str(tmp_path), "drain": True}
    for query in start(spark, settings):
        assert query.awaitTermination(240)
    assert committed_rows(tmp_path / "queue" / "output") == dict.fromkeys(orders, 1)


def test_without_a_relay_a_query_reads_what_a_binding_stages(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """Rows are those of stream mode, without headers that are lists or tables.

    The queue keeps a copy for other consumers.
    """
    placed, stage = Exchange("placed", type="fanout"), Queue("orders.stage", type="stream")
    messages = [Message(b"%d" % number, headers={"n": number, "items": [1]}) for number in range(50)]
    with Publisher(vhost.url, topology=[Binding(placed, ORDERS), Binding(placed, stage)]) as publisher:
        assert publisher.publish_many(messages, exchange="placed", routing_key="eu").ok
    rows = spark.readStream.format("rabbitmq").options(url=vhost.url, stageBy="none", **STAGED).load()
    writer = rows.writeStream.format("parquet").option("path", f"{tmp_path}/output")
    query = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    read = spark.read.parquet(f"{tmp_path}/output").collect()
    assert sorted(row.message_id for row in read) == sorted(message.message_id for message in messages)
    assert {(row.queue, row.exchange, row.routing_key) for row in read} == {("orders.stage", "placed", "eu")}
    assert sorted((row.headers for row in read), key=str) == sorted(({"n": str(n)} for n in range(50)), key=str)
    assert left(vhost, "orders") == 50


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_without_a_relay_a_query_reads_what_a_shovel_moves(
    spark: SparkSession,
    private_vhost: VirtualHost,
    private_broker: RabbitMQ,
    tmp_path: Path,
    report: Callable[[str], None],
) -> None:
    """The query survives a kill of the broker.

    Files have duplicates only if the shovel publishes them.
    """
    published = publish_orders(private_vhost, 20_000)
    published += publish_orders(private_vhost, 1, Queue("orders.stage", type="stream"))
    source = {"url": private_vhost.url, "stageBy": "none", "maxMessagesPerTrigger": "2000", **STAGED}
    settings = {"sources": {"shoveled": source}, "directory": str(tmp_path)}
    checkpoint = tmp_path / "shoveled" / "checkpoint"
    [query] = start(spark, settings)
    try:
        wait_until(lambda: batches_in(checkpoint, "commits"), timeout=240, what="a query that has begun")
        shovel(private_broker, private_vhost, "orders", "orders.stage")
        wait_until(lambda: 0 < left(private_vhost, "orders") < 19_000, timeout=240, what="some messages moved")
        private_broker.kill()
        private_broker.start()
        wait_until(lambda: private_vhost.live_counts(["orders"])["orders"] == 0, timeout=240, what="an empty queue")
        assert query.isActive
    finally:
        query.stop()
    [query] = start(spark, {**settings, "drain": True})
    assert query.awaitTermination(240)
    rows = committed_rows(tmp_path / "shoveled" / "output")
    report(f"a shovel that was killed with its broker: {rows.total() - len(rows)} of {len(published)} twice in files")
    assert rows.keys() == set(published)


@pytest.mark.parametrize(
    ("options", "schema", "trigger", "text"),
    [
        (
            {**STAGED, "stageRetention": "7 days"},
            None,
            {"processingTime": "1 second"},
            "stageRetention must be a number with a unit",
        ),
        ({"queue": "orders"}, "nobody string", {"availableNow": True}, "the schema has a column 'nobody', and"),
    ],
)
def test_the_error_of_a_refused_query_is_ours_alone(
    spark: SparkSession,
    checkpoint: str,
    options: dict[str, str],
    schema: str | None,
    trigger: dict[str, Any],
    text: str,
) -> None:
    """Otherwise PySpark replaces the error if a reader cannot be made."""
    reader = spark.readStream.format("rabbitmq").options(url="amqp://localhost/", **options)
    rows = (reader if schema is None else reader.schema(schema)).load()
    query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(**trigger).start()
    with pytest.raises(Exception, match=rf"reliable_mq\.errors\.ConfigurationError: {text}") as raised:
        query.awaitTermination(240)
    assert "UnboundLocalError" not in str(raised.value)


def test_a_batch_read_of_a_stage_is_refused_with_the_way_out(spark: SparkSession, vhost: VirtualHost) -> None:
    """The error says to read the stream."""
    with pytest.raises(Exception, match=r"option stream='orders\.stage'") as raised:
        spark.read.format("rabbitmq").options(url=vhost.url, **STAGED).load().collect()
    assert ConfigurationError.__name__ in str(raised.value)


def committed(directory: Path) -> Counter[str]:
    try:
        return committed_rows(directory / "output")
    except FileNotFoundError:
        return Counter()
