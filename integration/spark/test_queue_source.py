"""Queue mode with real queues: rows, acks and refused options."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import expr

from integration.support.spark import failing_once, requeued_counts
from integration.support.spark_application import Application, batches_in
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, VirtualHost
    from reliable_mq.testing.proxy import FaultProxy

ORDERS, PAYMENTS = Queue("orders"), Queue("payments", type="classic")


def publish(vhost: VirtualHost, queue: Queue, messages: Iterable[Message], checker: Audit | None = None) -> None:
    messages = list(messages)
    with Publisher(vhost.url, topology=[queue]) as publisher:
        for message in messages if checker else ():
            checker.attempted(message.message_id)
        assert publisher.publish_many(messages, routing_key=queue.name).ok
        for message in messages if checker else ():
            checker.confirmed(message.message_id)


def numbered(count: int, first: int = 0) -> list[Message]:
    return [Message(b"%d" % number) for number in range(first, first + count)]


def read(spark: SparkSession, url: str, queue: str = "orders", **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.readStream.format("rabbitmq").options(url=url, queue=queue, **given).load()


class Seen:
    """The rows that ``foreachBatch`` was given."""

    def __init__(self, hold: Callable[[int], None] = lambda _batch: None) -> None:
        self.batches: list[list[Row]] = []
        self._hold = hold

    def __call__(self, rows: DataFrame, batch: int) -> None:
        self.batches.append(rows.collect())
        self._hold(batch)

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    @property
    def numbers(self) -> list[int]:
        return sorted(int(row.body) for row in self.rows)


def available_now(rows: DataFrame, checkpoint: str) -> Seen:
    seen = Seen()
    query = running(rows, checkpoint, seen, availableNow=True)
    assert query.awaitTermination(240)
    return seen


def running(rows: DataFrame, checkpoint: str, seen: Seen, **trigger: Any) -> StreamingQuery:
    writer = rows.writeStream.foreachBatch(seen).option("checkpointLocation", checkpoint)
    return writer.trigger(**trigger or {"processingTime": "0 seconds"}).start()


def test_a_message_becomes_a_row_with_all_that_it_had(spark: SparkSession, vhost: VirtualHost, checkpoint: str) -> None:
    """Every property has a column of its type; missing properties are null."""
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers = {"n": 1, "t": "\N{SNOWMAN}", "l": [1, "a"], "none": None, "yes": True, "at": when, "f": 0.75}
    texts = {name: str(value) for name, value in headers.items()}
    texts |= {"l": '[1, "a"]', "none": None, "yes": "true", "at": when.isoformat()}
    full = Message(
        b"\x00\xff", headers=headers,
        content_type="a/b", content_encoding="gzip", message_id="id-1", correlation_id="c-1", reply_to="r", priority=3,
        expiration=60.5, timestamp=when, type="placed", user_id="guest", app_id="shop", persistent=False,
    )  # fmt: skip
    publish(vhost, PAYMENTS, [full, Message(b"plain", message_id="id-2")])
    seen = available_now(read(spark, vhost.url, "payments"), checkpoint)
    first, second = sorted(seen.rows, key=lambda row: row.message_id)
    assert first.asDict() | {"timestamp": None} == {
        "body": bytearray(b"\x00\xff"), "queue": "payments", "offset": None, "exchange": "", "routing_key": "payments",
        "redelivered": False, "delivery_count": None,
        "headers": texts, "message_id": "id-1", "correlation_id": "c-1", "content_type": "a/b",
        "content_encoding": "gzip", "reply_to": "r", "type": "placed",
        "app_id": "shop", "user_id": "guest", "priority": 3, "expiration": 60.5, "timestamp": None,
        "persistent": False,
    }  # fmt: skip
    assert first.timestamp.timestamp() == when.timestamp()
    assert {name for name, value in second.asDict().items() if value not in (None, {})} == {
        "body", "queue", "exchange", "routing_key", "redelivered", "message_id", "persistent",
    }  # fmt: skip


def test_available_now_ends_at_what_was_ready_beside_a_consumer(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str
) -> None:
    """The query reads the messages that the other consumer does not take, and ends.

    The limit determines the number of batches.
    """
    publish(vhost, ORDERS, numbered(500))
    others: list[int] = []
    begun = threading.Event()  # Spark has begun its first batch

    def handle(delivery: Delivery) -> None:
        if begun.wait(240):
            others.append(int(delivery.body))

    with Consumer(vhost.url, ORDERS, handle, prefetch=20):
        vhost.wait_for_messages("orders", 480)
        seen = Seen(lambda _batch: begun.set())
        options = {"maxMessagesPerTrigger": 100, "prefetch": 150}
        assert running(read(spark, vhost.url, **options), checkpoint, seen, availableNow=True).awaitTermination(240)
        wait_until(lambda: len(others) + len(seen.numbers) >= 500, timeout=30, what="the other's rest")
    assert len(others) >= 20
    assert len(seen.numbers) >= 100
    assert sorted(others + seen.numbers) == list(range(500))
    assert all(len(batch) <= 100 for batch in seen.batches)
    vhost.wait_for_messages("orders", 0)


def test_an_application_says_how_far_it_reads_ahead_and_why(
    vhost: VirtualHost, spark_python: str, tmp_path: Path
) -> None:
    """The line is in its error stream once, whatever the logging settings are."""
    with Publisher(vhost.url, topology=[Queue("orders")]) as publisher:
        assert publisher.publish_many([Message(b"x"), Message(b"y")], routing_key="orders").ok
    sources = {"read": {"url": vhost.url, "queue": "orders", "maxMessagesPerTrigger": "1"}}
    settings = {"sources": sources, "directory": str(tmp_path), "drain": True}
    with Application("spark_queries", settings, tmp_path / "log", python=spark_python) as application:
        application.wait(300)
    assert batches_in(tmp_path / "read" / "checkpoint", "commits") >= 2
    line = "prefetch 65535 for orders: no queue has a delivery limit: maxBytesPerTrigger bounds what is read ahead"
    assert (tmp_path / "log").read_text().count(line) == 1


def test_available_now_leaves_what_comes_later_to_others(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str
) -> None:
    """Messages published during the query stay in the queue.

    They are not counted as delivered.
    """
    publish(vhost, ORDERS, numbered(60))
    more = iter([numbered(200, 60)])
    seen = Seen(lambda _batch: publish(vhost, ORDERS, next(more, [])))
    query = running(read(spark, vhost.url, maxMessagesPerTrigger=20), checkpoint, seen, availableNow=True)
    assert query.awaitTermination(240)
    assert seen.numbers == list(range(60))
    vhost.wait_for_messages("orders", 200)
    again = available_now(read(spark, vhost.url), checkpoint)
    assert again.numbers == list(range(60, 260))
    assert {row.delivery_count for row in again.rows} <= requeued_counts(vhost)


def test_several_queues_are_read_as_one(spark: SparkSession, vhost: VirtualHost, checkpoint: str) -> None:
    """Each row has the name of its queue; each queue is acked."""
    publish(vhost, ORDERS, numbered(150))
    publish(vhost, PAYMENTS, numbered(150, 1000))
    rows = read(spark, vhost.url, "orders, payments", maxMessagesPerTrigger=70, minPartitions=3)
    seen = available_now(rows.select("queue", "body"), checkpoint)
    assert seen.numbers == [*range(150), *range(1000, 1150)]
    assert {(row.queue, int(row.body) >= 1000) for row in seen.rows} == {("orders", False), ("payments", True)}
    for queue in ("orders", "payments"):
        vhost.wait_for_messages(queue, 0)


def test_nothing_is_acked_before_its_commit_and_a_stop_requeues(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str
) -> None:
    """A query stopped in the middle of a batch requeues everything at once.

    No delivery is counted.
    """
    publish(vhost, ORDERS, numbered(300))
    with vhost.connect() as connection:
        channel = connection.channel()

        def ready() -> int:
            return int(channel.queue_declare("orders", passive=True).method.message_count)

        def hold(_batch: int) -> None:
            wait_until(lambda: not query.isActive, timeout=240, what="the test")

        seen = Seen(hold)
        query = running(read(spark, vhost.url, maxMessagesPerTrigger=50, prefetch=100), checkpoint, seen)
        wait_until(lambda: seen.batches, timeout=240, what="a batch")
        wait_until(lambda: 200 <= ready() <= 236, timeout=60, what=lambda: f"{ready()} ready, the rest read ahead")
        query.stop()
        wait_until(lambda: ready() == 300, timeout=30, what=lambda: f"{ready()} requeued")
    rest = available_now(read(spark, vhost.url), checkpoint)
    assert sorted({*seen.numbers, *rest.numbers}) == list(range(300))
    assert {row.delivery_count for row in rest.rows} <= requeued_counts(vhost)


def test_f59_a_task_that_fails_is_tried_again_with_the_same_rows(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str, tmp_path: Path
) -> None:
    """The messages are part of the task, so its second attempt has the same ones.

    The ids are the same, and no message is lost.
    """
    publish(vhost, ORDERS, numbered(200))
    rows = failing_once(read(spark, vhost.url, maxMessagesPerTrigger=200), tmp_path, after=30)
    seen = available_now(rows, checkpoint)
    assert (tmp_path / "failed").exists()
    assert seen.numbers == list(range(200))
    assert len({row.message_id for row in seen.rows}) == 200
    vhost.wait_for_messages("orders", 0)


def test_a_connection_cut_in_mid_batch_loses_nothing(
    spark: SparkSession,
    vhost: VirtualHost,
    checkpoint: str,
    checker: Audit,
    fault_proxy: Callable[..., FaultProxy],
) -> None:
    """Messages of the batch are redelivered, and no old tag is acked.

    The query continues by itself.
    """
    publish(vhost, ORDERS, numbered(300), checker)
    proxy = fault_proxy(vhost.url)
    cuts = iter((1, 3))
    cut_in = next(cuts)

    def hold(batch: int) -> None:
        nonlocal cut_in
        if batch == cut_in:
            proxy.cut()
            cut_in = next(cuts, -1)

    seen = Seen(hold)
    query = running(read(spark, proxy.url, maxMessagesPerTrigger=40, prefetch=80), checkpoint, seen)
    wait_until(
        lambda: set(seen.numbers) == set(range(300)), timeout=240, what=lambda: f"{len(set(seen.numbers))} of 300"
    )
    query.processAllAvailable()
    query.stop()
    for row in seen.rows:
        checker.handled(row.message_id)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.dead_lettered == 0
    assert len(balance.duplicated) <= 2 * 80 + 40


def test_the_backlog_is_in_the_progress(spark: SparkSession, vhost: VirtualHost, checkpoint: str) -> None:
    """``latestOffset`` includes the messages that wait in the queue."""
    publish(vhost, ORDERS, numbered(500))
    seen = Seen()
    query = running(read(spark, vhost.url, maxMessagesPerTrigger=50, prefetch=60), checkpoint, seen)
    wait_until(lambda: len(query.recentProgress) >= 2, timeout=240, what="progress")
    first = next(progress for progress in query.recentProgress if progress.numInputRows)
    source = first.sources[0]
    end, latest = json.loads(source.endOffset), json.loads(source.latestOffset)
    assert end["queues"] == {"orders": end["sequence"]}
    assert latest["sequence"] - end["sequence"] == 500 - end["sequence"]
    query.stop()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue": None}, "give one of the options queue and stream: neither is there"),
        ({"queue": "missing"}, "no queue 'missing'"),
        ({"startingOffsets": "earliest"}, "startingOffsets is an option of stream mode"),
        ({"url": "amqp://guest:s3cret@127.0.0.1:1/"}, "127.0.0.1:1"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str, options: dict[str, str | None], says: str
) -> None:
    """The error is raised when the query starts at the latest, without the password."""
    given = {"url": vhost.url, "queue": "orders"} | options
    source = spark.readStream.format("rabbitmq").options(**{k: v for k, v in given.items() if v is not None})
    with pytest.raises(PySparkException) as raised:
        available_now(source.load(), checkpoint)
    assert says in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_what_spark_could_not_do_safely_is_refused(spark: SparkSession, vhost: VirtualHost, checkpoint: str) -> None:
    """Batch reads, trigger(once), overwriting, "complete" and async progress fail.

    Each error says what to do instead.
    """
    publish(vhost, ORDERS, numbered(5))
    batch = spark.read.format("rabbitmq").options(url=vhost.url, queue="orders")
    with pytest.raises(PySparkException, match=r"Use spark.readStream with trigger\(availableNow=True\)"):
        batch.load().collect()
    with pytest.raises(PySparkException, match=r"use\s+trigger\(availableNow=True\)"):
        running(read(spark, vhost.url), checkpoint, Seen(), once=True).awaitTermination(240)
    rows = spark.range(1).selectExpr("cast(id as string) as body")
    with pytest.raises(PySparkException, match="use mode"):
        rows.write.format("rabbitmq").options(url=vhost.url, routingKey="orders").mode("overwrite").save()
    to_orders = {"url": vhost.url, "routingKey": "orders"}
    counted = read(spark, vhost.url).groupBy("queue").count().selectExpr("cast(count as string) as body")
    complete = counted.writeStream.format("rabbitmq").outputMode("complete").options(**to_orders)
    with pytest.raises(PySparkException, match="foreachBatch"):
        complete.option("checkpointLocation", f"{checkpoint}-complete").start().awaitTermination(240)
    tracked = read(spark, vhost.url).select("body").writeStream.format("rabbitmq").options(**to_orders)
    tracked = tracked.option("asyncProgressTrackingEnabled", "true")
    with pytest.raises(PySparkException, match="does not support async progress tracking"):  # Spark's own error
        tracked.option("checkpointLocation", f"{checkpoint}-async").start().awaitTermination(240)
    vhost.wait_for_messages("orders", 5)


def test_a_queue_that_would_lose_messages_is_refused_with_a_fix(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """A delivery limit without dead-lettering, an auto-delete queue and a stream fail."""
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("limited", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_declare("at-3", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 3})
        channel.queue_declare("going", durable=True, auto_delete=True)
        channel.queue_declare("log", durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_declare(
            "kept",
            durable=True,
            arguments={"x-queue-type": "quorum", "x-delivery-limit": 3, "x-dead-letter-exchange": ""},
        )
    for number, (queue, says) in enumerate(
        {
            "limited": "Declare it with x-delivery-limit=-1",
            "at-3": "delivery limit of 3",
            "going": "auto-delete",
            "log": "option stream",
        }.items()
    ):
        with pytest.raises(PySparkException, match=says):
            available_now(read(spark, vhost.url, queue), str(tmp_path / str(number)))
    for queue, options in {"limited": {"failOnDataLoss": "false"}, "kept": {}}.items():
        publish_plain(vhost, queue, 3)
        assert available_now(read(spark, vhost.url, queue, **options), str(tmp_path / queue)).numbers == [0, 1, 2]


def publish_plain(vhost: VirtualHost, queue: str, count: int) -> None:
    with vhost.connect() as connection:
        channel = connection.channel()
        for number in range(count):
            channel.basic_publish("", queue, b"%d" % number)
    vhost.wait_for_messages(queue, count)


def test_the_password_is_nowhere_to_be_seen(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is in no plan, progress, checkpoint, description or log."""
    publish(vhost, ORDERS, numbered(5))
    broker = vhost.broker
    broker.management.call("PUT", "users", "reader", body={"password": "s3cr3t-pass", "tags": ""})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    broker.management.call("PUT", "permissions", vhost.name, "reader", body=everything)
    url = vhost.url.replace("guest:guest", "reader:s3cr3t-pass")
    rows = read(spark, url)
    seen = Seen()
    query = running(rows, checkpoint, seen)
    wait_until(lambda: len(seen.rows) >= 5, timeout=240, what="the messages, which may take a moment to arrive")
    query.processAllAvailable()
    shown = [str(query.lastProgress), str(query.status), repr(rows)]
    rows.explain(extended=True)
    query.explain(extended=True)
    query.stop()
    shown.append(capfd.readouterr().out)
    shown += [path.read_text(errors="replace") for path in Path(checkpoint).rglob("*") if path.is_file()]
    assert seen.numbers == list(range(5))
    assert not [text for text in shown if "s3cr3t" in text]


def test_a_queue_that_is_joined_with_itself_is_refused(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str
) -> None:
    """Spark would make two sources that share the messages.

    No rows would be joined, and all messages would be acked.
    """
    publish(vhost, ORDERS, numbered(100))
    rows = read(spark, vhost.url).select("message_id")
    joined = rows.alias("one").join(rows.alias("other"), expr("one.message_id = other.message_id"))
    writer = joined.select("one.message_id").writeStream.format("noop").option("checkpointLocation", checkpoint)
    with pytest.raises(PySparkException, match=r"queue 'orders' is read twice in this application"):
        writer.start().awaitTermination(240)
    vhost.wait_for_messages("orders", 100)


def test_a_table_is_refused_and_a_view_named(spark: SparkSession) -> None:
    """A table is refused when it is created, one with columns when it is read.

    Spark does not ask the source for the columns of the second kind.
    """
    options = "OPTIONS (url 'amqp://guest:guest@localhost/', stream 'events')"
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE events USING rabbitmq {options}")
    spark.sql(f"CREATE TABLE columns (body binary) USING rabbitmq {options}")
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.table("columns").collect()
    spark.sql("DROP TABLE columns")
