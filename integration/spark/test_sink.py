"""The sink in real tasks: confirms, stable ids, and errors that name the row."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import col

from integration.support.spark import bodies_of, drain
from integration.support.spark_tasks import interrupted, small_arrow_batches
from reliable_mq import Message, Publisher, Queue
from reliable_mq.deadletters import DeadLetterQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from reliable_mq.testing import VirtualHost
    from reliable_mq.testing.proxy import FaultProxy

ORDERS = Queue("orders")


@pytest.fixture(autouse=True)
def _declared(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).select(col("id").cast("string").alias("body"))


def write(rows: DataFrame, vhost: VirtualHost, **options: str) -> None:
    rows.write.format("rabbitmq").options(url=vhost.url, **options).mode("append").save()


def test_a_batch_is_there_when_the_write_returns(spark: SparkSession, vhost: VirtualHost) -> None:
    """Every row of every partition is a persistent message with its own id."""
    write(numbers(spark, 3000, 3), vhost, routingKey="orders")
    taken = drain(vhost, "orders")
    assert sorted(int(body) for body in bodies_of(taken)) == list(range(3000))
    assert len({properties.message_id for properties, _ in taken}) == 3000
    assert {properties.delivery_mode for properties, _ in taken} == {2}


def test_a_thread_writes_once_it_has_activated_the_session(spark: SparkSession, vhost: VirtualHost) -> None:
    """Spark looks up formats of Python in the active session of the thread."""
    rows = numbers(spark, 10)

    def activate_and_write() -> None:
        with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):  # py4j's error, not PySpark's
            write(rows, vhost, routingKey="orders")
        spark.createDataFrame([], "id int")
        write(rows, vhost, routingKey="orders")

    with ThreadPoolExecutor(1) as thread:
        thread.submit(activate_and_write).result()
    assert len(drain(vhost, "orders")) == 10


def test_sql_writes_into_a_view_and_not_into_a_table(spark: SparkSession, vhost: VirtualHost) -> None:
    """Spark passes the options of a view to the sink, and those of a table to nobody."""
    options = f"USING rabbitmq OPTIONS (url '{vhost.url}', routingKey 'orders')"
    numbers(spark, 10).createOrReplaceTempView("numbers")
    spark.sql(f"CREATE TEMPORARY VIEW sent (body string, message_id string) {options}")
    try:
        spark.sql("INSERT INTO sent SELECT body, concat('id-', body) FROM numbers")
        with pytest.raises(PySparkException, match="INSERT INTO a view made by CREATE TEMPORARY VIEW"):
            spark.sql(f"CREATE TABLE kept {options} AS SELECT body FROM numbers")
    finally:
        spark.sql("DROP VIEW sent")
        spark.sql("DROP VIEW numbers")
    taken = drain(vhost, "orders")
    assert sorted((properties.message_id, body) for properties, body in taken) == sorted(
        (f"id-{number}", str(number).encode()) for number in range(10)
    )


def test_a_write_does_not_return_before_the_broker_has_confirmed(
    spark: SparkSession, vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy]
) -> None:
    """The write waits for the confirms, even if the broker has the messages."""
    proxy = fault_proxy(vhost.url)
    proxy.hold_confirms()
    returned = threading.Event()

    def confirm_late() -> bool:
        """Return whether the write returned too early; release the confirms."""
        vhost.wait_for_messages("orders", 100, timeout=200)  # Spark starts its workers meanwhile
        early = returned.wait(1)
        proxy.release_confirms()
        return early

    with ThreadPoolExecutor(1) as threads:
        confirmed = threads.submit(confirm_late)
        options = {"url": proxy.url, "routingKey": "orders"}
        numbers(spark, 100, 1).write.format("rabbitmq").options(**options).mode("append").save()
        returned.set()
        assert not confirmed.result(60)
    assert len(drain(vhost, "orders")) == 100


def test_traces_pass_through_source_and_sink(spark: SparkSession, vhost: VirtualHost) -> None:
    """A trace goes from a header into its column and back.

    A trace in a row's column or headers takes precedence over the option.
    """
    events, trace = Queue("events", type="stream"), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Publisher(vhost.url, topology=[events]) as publisher:
        publisher.publish(Message(b"1", headers={"traceparent": trace}), routing_key="events")
    source = spark.read.format("rabbitmq").options(url=vhost.url, stream="events")
    read = source.schema("body binary, traceparent string").load()
    own = trace.replace("-01", "-00")
    option = trace.replace("-b7", "-c7")
    write(read, vhost, routingKey="orders")
    write(read, vhost, routingKey="orders", traceparent=option)
    with_headers = read.selectExpr("*", f"map('traceparent', '{own}') as headers")
    write(with_headers, vhost, routingKey="orders", traceparent=option)
    write(read.drop("traceparent"), vhost, routingKey="orders", traceparent=option)
    sent = [properties.headers["traceparent"] for properties, _ in drain(vhost, "orders")]
    assert sent == [trace, trace, own, option]
    with pytest.raises(PySparkException, match="traceparent must be a W3C trace context"):
        write(read, vhost, routingKey="orders", traceparent="0af7")


@pytest.mark.parametrize(
    ("columns", "options", "named"),
    [
        ("cast(id as string) as body, id as priority_", {"routingKey": "orders"}, "priority_"),
        ("cast(id as string) as body", {}, "routingKey"),
    ],
)
def test_an_unwritable_schema_is_refused_before_anything_is_sent(
    spark: SparkSession, vhost: VirtualHost, columns: str, options: dict[str, str], named: str
) -> None:
    """The driver raises an error that names the column."""
    rows = spark.range(5).selectExpr(*columns.split(", ", 1))
    with pytest.raises(PySparkException, match=named) as refused:
        write(rows, vhost, **options)
    assert "guest:guest" not in str(refused.value)
    assert drain(vhost, "orders") == []


def test_an_unroutable_row_fails_its_task_with_id_and_reason(spark: SparkSession, vhost: VirtualHost) -> None:
    """The batch fails as well; the error has no credentials."""
    rows = spark.createDataFrame([("a", "id-a")], "body string, message_id string").coalesce(1)
    with pytest.raises(PySparkException, match=r"row 0: message id-a .*312 NO_ROUTE") as failed:
        write(rows, vhost, routingKey="nowhere")
    assert "guest:guest" not in str(failed.value)


def test_rows_that_cannot_be_sent_do_not_end_a_query(spark: SparkSession, vhost: VirtualHost, tmp_path: Path) -> None:
    """With onUnsendableRow=deadLetter, the rows are dead-lettered with the reason.

    The batch is committed.
    """
    source = tmp_path / "source"
    spark.range(0, 50, 1, 2).selectExpr(
        "cast(id as string) as body", "cast(id as string) as message_id",
        "if(id % 10 = 3, 'nowhere', 'orders') as routing_key",
        "if(id = 7, timestamp_seconds(id * 100000000000), null) as timestamp",
    ).write.parquet(str(source))  # fmt: skip
    schema = spark.read.parquet(str(source)).schema
    query = (
        spark.readStream.schema(schema).parquet(str(source)).writeStream.format("rabbitmq")
        .options(url=vhost.url, onUnsendableRow="deadLetter", deadLetterQueue="orders.rows")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert query.exception() is None
    unsent = {number for number in range(50) if number % 10 == 3} | {7}
    assert {int(body) for body in bodies_of(drain(vhost, "orders"))} == set(range(50)) - unsent
    with DeadLetterQueue(vhost.url, "orders.rows") as letters:
        reasons = {letter.message_id: letter.reason for letter in letters.browse()}
    assert {int(name or "") for name in reasons} == unsent
    assert "timestamp lies outside" in reasons["7"]
    assert all("312 NO_ROUTE" in reason for name, reason in reasons.items() if name != "7")


def test_headers_of_any_type_go_out_and_come_back(spark: SparkSession, vhost: VirtualHost, tmp_path: Path) -> None:
    """Headers are a struct of lists, tables, numbers and times.

    ``CC``, which is a list, routes to a second queue.
    """
    with Publisher(vhost.url, topology=[Queue("copies", dead_letter=None)]) as publisher:
        publisher.connect()
    headers = (
        "named_struct('CC', array('copies'), 'n', id, 'at', timestamp_seconds(1700000000), 'price', 1.5, 'none', "
        "cast(null as string), 'tables', map('one', named_struct('hops', array(1, 2))))"
    )
    write(spark.range(7, 8, 1, 1).selectExpr("'a' as body", f"{headers} as headers"), vhost, routingKey="orders")
    ((properties, _),) = drain(vhost, "copies")
    assert properties.headers["tables"] == {"one": {"hops": [1, 2]}}
    kind = "struct<n bigint, at timestamp, tables map<string, struct<hops: array<int>>>, none string, CC array<string>>"
    query = (
        spark.readStream.format("rabbitmq").options(url=vhost.url, queue="orders").schema(f"headers {kind}").load()
        .selectExpr("to_json(headers) as body")
        .writeStream.format("rabbitmq").options(url=vhost.url, routingKey="copies")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    ((_, body),) = drain(vhost, "copies")
    found = json.loads(body)
    assert found.pop("at").startswith("2023-11-14T")
    assert found == {"n": 7, "tables": {"one": {"hops": [1, 2]}}, "CC": ["copies"]}


def test_f59_a_task_that_is_retried_publishes_the_same_ids(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """Delivery is at least once, with stable ids.

    No message is missing, copies of a row have one id, and equal rows have different ids.
    """
    rows = numbers(spark, 4000).selectExpr("rpad(cast(cast(body as int) % 1500 as string), 1000, ' ') as body")
    with small_arrow_batches(spark):
        write(interrupted(rows, tmp_path, after=1500), vhost, routingKey="orders")
    taken = drain(vhost, "orders")
    by_id = {properties.message_id: body for properties, body in taken}
    assert len(by_id) == 4000
    assert len(taken) > 4000, "no task was retried after it had published"
    assert all(by_id[properties.message_id] == body for properties, body in taken)
    assert sorted(int(body) for body in by_id.values()) == sorted(number % 1500 for number in range(4000))


def test_f59_a_worker_killed_in_mid_task_loses_nothing(spark: SparkSession, vhost: VirtualHost, tmp_path: Path) -> None:
    """After SIGKILL, Spark runs the task again in another worker with the same ids."""
    with small_arrow_batches(spark):
        write(interrupted(numbers(spark, 2000), tmp_path, after=600, kill=True), vhost, routingKey="orders")
    taken = drain(vhost, "orders")
    by_id = {properties.message_id: body for properties, body in taken}
    assert sorted(int(body) for body in by_id.values()) == list(range(2000))
    assert len(by_id) == 2000


def test_f59_a_repeated_micro_batch_publishes_the_same_ids(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """The query fails between sink and commit log, and restarts on its checkpoint."""
    source = tmp_path / "source"
    spark.range(0, 500, 1, 2).selectExpr("cast(id as string) as body").write.parquet(str(source))

    def run() -> None:
        stream = spark.readStream.schema("body string").parquet(str(source))
        query = (
            stream.writeStream.format("rabbitmq")
            .options(url=vhost.url, routingKey="orders", checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    first = {properties.message_id for properties, _ in drain(vhost, "orders")}
    run()
    second = [properties.message_id for properties, _ in drain(vhost, "orders")]
    assert len(first) == 500
    assert sorted(second) == sorted(first)
    metadata = json.loads((tmp_path / "checkpoint" / "metadata").read_text())
    assert all(message_id.startswith(f"{metadata['id']}/0/") for message_id in first)
