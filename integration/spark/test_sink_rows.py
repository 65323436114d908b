"""The rows of a sink task against a real broker, without a Spark session."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pytest

from integration.support.spark import bodies_of, drain
from reliable_mq import Binding, ConfigurationError, Exchange, Publisher, PublishError, Queue, RetryPolicy
from reliable_mq.core import headers
from reliable_mq.deadletters import DeadLetterQueue, DeadMessage, Origin
from reliable_mq.spark import sink
from reliable_mq.spark.metrics import Exporter, exporter
from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.rows import RowPlan
from reliable_mq.spark.sink import BatchSink, WrittenPartition
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from reliable_mq.testing import FaultProxyFactory, VirtualHost
    from reliable_mq.topology import Declaration

ORDERS = Queue("orders", dead_letter=None)


def declare(vhost: VirtualHost, *topology: Declaration) -> None:
    with Publisher(vhost.url, topology=topology) as publisher:
        publisher.connect()


@pytest.fixture(autouse=True)
def _orders(vhost: VirtualHost, baseline: None) -> Iterator[None]:
    declare(vhost, ORDERS)
    yield
    sink.close_all()


def set_retries(monkeypatch: pytest.MonkeyPatch, attempts: int, delay: float) -> None:
    """Let the publisher of a task give up sooner than after the default of ten seconds."""
    policy = RetryPolicy(max_attempts=attempts, delays=(delay,))
    monkeypatch.setattr(sink, "_TaskPublisher", partial(sink._TaskPublisher, retry=policy))


def write(vhost: VirtualHost, batch: pa.RecordBatch, **options: Any) -> WrittenPartition:
    sink = BatchSink(WriteOptions(url=vhost.url, **options), tuple(batch.schema.names))
    return sink.write(iter([batch.slice(0, 1), batch.slice(1)]))


def test_columns_become_the_properties_of_their_names(vhost: VirtualHost) -> None:
    """Every property has a column; null leaves the property out."""
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    batch = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"1", b"2"]),
            "routing_key": ["orders", "orders"],
            "headers": pa.array([[("tenant", "a"), ("plan", None)], None], pa.map_(pa.string(), pa.string())),
            "message_id": ["id-1", "id-2"],
            "correlation_id": ["c-1", None],
            "content_type": ["text/plain", None],
            "content_encoding": ["gzip", None],
            "reply_to": ["replies", None],
            "type": ["placed", None],
            "app_id": ["shop", None],
            "user_id": ["guest", None],
            "priority": pa.array([5, None], pa.int32()),
            "expiration": [60.5, None],
            "timestamp": pa.array([when, None], pa.timestamp("us", "Europe/Berlin")),
            "persistent": [False, None],
        }
    )
    assert write(vhost, batch) == WrittenPartition(2, 2)
    (full, body), (bare, other) = drain(vhost, "orders")
    assert (body, other) == (b"1", b"2")
    assert full.headers == {"tenant": "a", "plan": None}
    assert (full.message_id, full.correlation_id, full.content_type) == ("id-1", "c-1", "text/plain")
    assert (full.content_encoding, full.reply_to, full.type) == ("gzip", "replies", "placed")
    assert (full.app_id, full.user_id, full.priority, full.expiration) == ("shop", "guest", 5, "60500")
    assert (full.timestamp, full.delivery_mode) == (int(when.timestamp()), 1)
    assert (bare.message_id, bare.delivery_mode) == ("id-2", 2)
    assert (bare.headers, bare.content_type, bare.priority, bare.timestamp) == (None, None, None, None)


def test_columns_direct_each_row_unless_an_option_overrides(vhost: VirtualHost) -> None:
    """The options work as the topic of Spark's Kafka sink does."""
    other, events = Queue("other", dead_letter=None), Exchange("events", type="direct")
    declare(vhost, Binding(events, ORDERS, "o"), Binding(events, other, "x"))
    batch = pa.RecordBatch.from_pydict(
        {"body": ["a", "b", "c"], "exchange": ["events", "events", None], "routing_key": ["o", "x", "orders"]}
    )
    write(vhost, batch)
    assert bodies_of(drain(vhost, "orders")) == [b"a", b"c"]
    assert bodies_of(drain(vhost, "other")) == [b"b"]
    write(vhost, batch, exchange="events", routing_key="x")
    assert bodies_of(drain(vhost, "other")) == [b"a", b"b", b"c"]


def test_an_unroutable_row_is_an_error_with_its_id_and_reason(vhost: VirtualHost) -> None:
    """Earlier rows stay published, and are published again by the next attempt."""
    batch = pa.RecordBatch.from_pydict(
        {
            "body": ["a", "c", "b"],
            "message_id": ["id-a", "id-c", "id-b"],
            "routing_key": ["orders", "orders", "nowhere"],
        }
    )
    with pytest.raises(
        PublishError, match=r"1 of 3 rows of partition 0 .* row 2: message id-b .*312 NO_ROUTE"
    ) as failed:
        write(vhost, batch)
    assert failed.value.message_id == "id-b"
    assert bodies_of(drain(vhost, "orders")) == [b"a", b"c"]


def test_a_publisher_takes_the_options_of_the_sink(vhost: VirtualHost) -> None:
    """Without ``mandatory``, RabbitMQ drops unroutable rows and the task succeeds."""
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b"], "routing_key": ["orders", "nowhere"]})
    write(vhost, batch, publisher=(("mandatory", False), ("max_outstanding", 1)))
    assert bodies_of(drain(vhost, "orders")) == [b"a"]


def test_a_nacked_row_is_an_error_with_its_id_and_the_reason(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue nacks every attempt of the publisher."""
    set_retries(monkeypatch, 3, 0.1)
    declare(
        vhost, Queue("full", type="classic", dead_letter=None, max_length=2, arguments={"x-overflow": "reject-publish"})
    )
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b", "c", "d"], "message_id": ["1", "2", "id-3", "id-4"]})
    with pytest.raises(PublishError, match=r"2 of 4 rows .* row 2: message id-3 .* was nacked .* row 3: message id-4"):
        write(vhost, batch, routing_key="full")
    assert bodies_of(drain(vhost, "full")) == [b"a", b"b"]


def test_rows_behind_a_slow_one_do_not_fill_the_memory(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row's queue is full.

    Rows after it are kept with their bodies until it is settled, so their number is limited.
    """
    monkeypatch.setattr(sink, "_ROWS_KEPT", 100)
    set_retries(monkeypatch, 2, 1.0)
    bound = {"x-max-length": 0, "x-overflow": "reject-publish"}
    declare(vhost, Queue("full", type="classic", dead_letter=None, arguments=bound))
    kept = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(10):
            keys = ["orders" if row or number else "full" for row in range(100)]
            yield pa.RecordBatch.from_pydict({"body": ["body"] * 100, "routing_key": keys})
            kept.append(len(partition.confirmations))

    options = WriteOptions(url=vhost.url)
    partition = sink._Partition(options, RowPlan(options, ("body", "routing_key")), "write", 0)
    with pytest.raises(PublishError, match=r"row 0: .* was nacked"):
        partition.write(batches())
    assert max(kept) <= 100


def test_a_refused_row_is_an_error_and_the_others_are_published(vhost: VirtualHost) -> None:
    """A missing exchange closes the channel, but only the row for it fails."""
    batch = pa.RecordBatch.from_pydict(
        {"body": ["a", "b", "c"], "exchange": ["", "missing", ""], "routing_key": ["orders", "orders", "orders"]}
    )
    with pytest.raises(PublishError, match=r"1 of 3 rows .* row 1: message .* 404 NOT_FOUND"):
        write(vhost, batch)
    assert set(bodies_of(drain(vhost, "orders"))) == {b"a", b"c"}  # perhaps twice: the channel was lost


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("priority", pa.array([1, 256]), r"priority must be an int from 0 to 255, not 256"),
        ("message_id", pa.array(["a", "x" * 256]), r"message_id .*AMQP allows 255"),
        ("expiration", pa.array([1.0, -1.0]), r"expiration must be seconds"),
        ("timestamp", pa.array([0, 2**62], pa.timestamp("us", "UTC")), r"timestamp lies outside"),
        ("exchange", pa.array(["", "x" * 256]), r"exchange is 256 bytes long"),
        ("routing_key", pa.array(["orders", "x" * 256]), r"routing_key is 256 bytes long"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_named_and_not_sent(
    vhost: VirtualHost, column: str, values: pa.Array, reason: str
) -> None:
    """Rows before it have been published."""
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b"], column: values})
    with pytest.raises(PublishError, match=r"1 of 2 rows of partition 0 .* row 1.*" + reason):
        write(vhost, batch, **({} if column == "routing_key" else {"routing_key": "orders"}))
    assert bodies_of(drain(vhost, "orders")) == [b"a"]


def test_a_row_without_a_body_is_named(vhost: VirtualHost) -> None:
    """Null is not a message; an empty body is."""
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"", None])})
    with pytest.raises(PublishError, match="row 1: column body is null"):
        write(vhost, batch, routing_key="orders")
    assert bodies_of(drain(vhost, "orders")) == [b""]


def dead_letters(vhost: VirtualHost, queue: str = "dead") -> dict[str, DeadMessage]:
    """Return the dead letters of a queue by the first eight bytes of their bodies."""
    with DeadLetterQueue(vhost.url, queue) as letters:
        return {letter.body[:8].decode(): letter for letter in letters.browse()}


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Exporter]:
    made = exporter(str(tmp_path / "metrics"))
    assert made is not None
    yield made
    made.close()


def test_unsendable_rows_are_dead_lettered_the_others_written(
    vhost: VirtualHost, metrics: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are invalid, unroutable, for a missing exchange, or too large."""
    raw = pa.array([b"x"] * 5 + [b"\xff"] + [b"x"] * 4, pa.binary())
    batch = pa.RecordBatch.from_pydict(
        {
            "body": [*"abcdefgh", "large " * 3_000_000, "j"],
            "message_id": [f"id-{name}" for name in "abcdefghij"],
            "exchange": ["", "", "missing", "", "", "", "", "", "", ""],
            "routing_key": ["orders", "nowhere", "orders", "k" * 256, *["orders"] * 6],
            "timestamp": pa.array([0, 0, 0, 0, 2**62, 0, 0, 0, 0, 0], pa.timestamp("us", "UTC")),
            "type": pa.Array.from_buffers(pa.string(), 10, raw.buffers()),
            "priority": [0, 0, 0, 0, 0, 0, 256, 0, 0, 0],
            "user_id": [None, None, None, None, None, None, None, "nobody", None, None],
        }
    )
    written = write(vhost, batch, dead_letter_queue="dead", metrics_directory=str(metrics.path.parent))
    assert (written.rows, written.dead_lettered) == (10, 8)
    assert 'reliable_mq_spark_sink_dead_lettered_total{queue="dead",worker="0"} 8.0' in metrics.path.read_text()
    assert "no caller waits" not in caplog.text
    assert set(bodies_of(drain(vhost, "orders"))) == {b"a", b"j"}  # perhaps twice: channels were lost
    letters = dead_letters(vhost)
    reasons = {
        "b": "312 NO_ROUTE",
        "c": "404 NOT_FOUND - no exchange 'missing'",
        "d": "routing_key is 256 bytes long",
        "e": "timestamp lies outside of the years",
        "f": "column type holds bytes that are not UTF-8",
        "g": "priority must be an int from 0 to 255, not 256",
        "h": "406 PRECONDITION_FAILED - user_id property set to 'nobody'",
        "large la": "max_message_bytes is 16777216",
    }
    assert set(letters) == set(reasons)
    for name, reason in reasons.items():
        assert reason in letters[name].reason
        assert letters[name].message_id == f"id-{'i' if name == 'large la' else name}"
        assert letters[name].consumer == "spark-sink"
    assert letters["b"].origin == Origin("nowhere", "", "nowhere")
    assert letters["large la"].headers[headers.ORIGINAL_SIZE] == 18_000_000
    assert "18000000 bytes" in letters["large la"].unreadable


def test_rows_that_fit_a_letter_only_in_part_are_dead_lettered(vhost: VirtualHost) -> None:
    """One has a NUL in a header name, one a direct reply.

    RabbitMQ refuses direct replies if no client consumes replies.
    """
    named = pa.map_(pa.string(), pa.string())
    batch = pa.RecordBatch.from_pydict(
        {
            "body": ["a", "b", "c"],
            "routing_key": ["orders"] * 3,
            "headers": pa.array([[("a\0b", "v")], None, [("fine", "1")]], named),
            "reply_to": [None, "amq.rabbitmq.reply-to", "replies"],
        }
    )
    written = write(vhost, batch, dead_letter_queue="dead")
    assert (written.rows, written.dead_lettered) == (3, 2)
    assert set(bodies_of(drain(vhost, "orders"))) == {b"c"}
    letters = dead_letters(vhost)
    assert letters["a"].headers[headers.ORIGINAL_COLUMNS] == {"headers[a\\x00b]": "v"}
    assert letters["b"].headers[headers.ORIGINAL_COLUMNS] == {"reply_to": "amq.rabbitmq.reply-to"}


def test_a_wrong_routing_key_for_all_rows_dead_letters_none(vhost: VirtualHost) -> None:
    """Headers do not affect routing by the default exchange, so the task fails."""
    named = pa.map_(pa.string(), pa.string())
    batch = pa.RecordBatch.from_pydict({"body": ["a"], "headers": pa.array([[("fine", "1")]], named)})
    with pytest.raises(PublishError, match="312 NO_ROUTE"):
        write(vhost, batch, routing_key="ordres", dead_letter_queue="dead")
    assert not dead_letters(vhost)


def test_a_row_that_fits_no_letter_fails_its_task_by_number(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has both reasons."""

    def refused(*_given: object) -> NoReturn:
        raise ConfigurationError("no letter")

    monkeypatch.setattr("reliable_mq.spark.sink.letter_of_row", refused)
    batch = pa.RecordBatch.from_pydict({"body": ["a", None], "routing_key": ["orders"] * 2})
    with pytest.raises(PublishError, match=r"row 1: column body is null.* no dead letter can be made of it: no letter"):
        write(vhost, batch, dead_letter_queue="dead")


def test_dead_letters_of_rows_are_replayed(vhost: VirtualHost) -> None:
    """Replay works once the missing queue or exchange exists.

    The messages have the ids of their rows.
    """
    batch = pa.RecordBatch.from_pydict(
        {"body": ["a", "b"], "message_id": ["id-a", "id-b"], "exchange": ["", "events"], "routing_key": ["late", "l"]}
    )
    # One after the other, because the missing exchange closes the channel, and a dead letter on it would be published
    # twice.
    for row in range(len(batch)):
        write(vhost, batch.slice(row, 1), dead_letter_queue="dead")
    late = Queue("late", dead_letter=None)
    declare(vhost, late, Binding(Exchange("events", type="direct"), late, "l"))
    with DeadLetterQueue(vhost.url, "dead") as letters:
        assert letters.replay().replayed == 2
    assert {(properties.message_id, body) for properties, body in drain(vhost, "late")} == {
        ("id-a", b"a"),
        ("id-b", b"b"),
    }


@pytest.mark.parametrize(
    ("options", "reason"), [({"routing_key": "nowhere"}, "312 NO_ROUTE"), ({"exchange": "missing"}, "404 NOT_FOUND")]
)
def test_what_the_options_name_and_is_not_there_fails_the_task(
    vhost: VirtualHost, options: dict[str, str], reason: str
) -> None:
    """Otherwise one mistake would dead-letter every row."""
    batch = pa.RecordBatch.from_pydict({"body": ["a"]})
    with pytest.raises(PublishError, match=reason):
        write(vhost, batch, dead_letter_queue="dead", **options)
    assert drain(vhost, "dead") == []


def test_confirmed_dead_letters_are_not_kept_in_memory(vhost: VirtualHost) -> None:
    """Each holds the body of its row; only letters without an outcome are kept."""
    kept = []

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(10):
            yield pa.RecordBatch.from_pydict({"body": ["body"] * 20, "priority": [256] * 20})
            kept.append(len(partition.letters))
            wait_until(lambda: all(each.done() for _, each in partition.letters), timeout=30, what="the confirms")

    options = WriteOptions(url=vhost.url, routing_key="orders", dead_letter_queue="dead")
    partition = sink._Partition(options, RowPlan(options, ("body", "priority")), "write", 0)
    assert partition.write(batches()).dead_lettered == 200
    assert max(kept) <= 20
    assert len(drain(vhost, "dead")) == 200


def test_a_dead_letter_that_is_not_confirmed_fails_the_task(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, metrics: Exporter
) -> None:
    """The error has both reasons, and the row is not counted.

    For example, the dead-letter queue is full, so the row is stored nowhere.
    """
    set_retries(monkeypatch, 2, 0.1)
    bound = {"x-max-length": 1, "x-overflow": "reject-publish"}
    monkeypatch.setattr(sink, "Queue", partial(Queue, type="classic", arguments=bound))
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b", "c", "d"], "routing_key": ["nowhere"] * 3 + ["orders"]})
    with pytest.raises(PublishError, match=r"row 1: .*312 NO_ROUTE.*its dead letter was not confirmed.*nacked"):
        write(vhost, batch, dead_letter_queue="dead", metrics_directory=str(metrics.path.parent))
    assert metrics.sink.dead_lettered == {"dead": 1}


def test_connections_cut_in_the_middle_lose_nothing(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Unconfirmed rows are published again with the same ids, and the task succeeds."""
    proxy = fault_proxy(vhost.url)
    cuts = set(rng.sample(range(1, 20), 4))

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(20):
            if number in cuts:
                proxy.cut()
            yield pa.RecordBatch.from_pydict({"body": [f"{number * 100 + row}" for row in range(100)]})

    sink = BatchSink(WriteOptions(url=proxy.url, routing_key="orders"), ("body",))
    assert sink.write(batches()).rows == 2000
    by_id = {properties.message_id: body for properties, body in drain(vhost, "orders")}
    assert len(by_id) == 2000
    assert sorted(int(body) for body in by_id.values()) == list(range(2000))


def test_an_error_of_what_gives_the_rows_is_passed_on(vhost: VirtualHost) -> None:
    """No connection stays open."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"body": ["a"]})
        raise RuntimeError("the source is broken")

    with pytest.raises(RuntimeError, match="the source is broken"):
        BatchSink(WriteOptions(url=vhost.url, routing_key="orders"), ("body",)).write(batches())


def test_a_partition_without_rows_does_not_connect(vhost: VirtualHost) -> None:
    """Most partitions of a filtered micro-batch are empty."""
    sink = BatchSink(WriteOptions(url="amqp://nobody:nothing@localhost:1/", routing_key="orders"), ("body",))
    assert sink.write(iter([pa.RecordBatch.from_pydict({"body": pa.array([], pa.binary())})])) == WrittenPartition(0, 0)


def test_a_worker_that_is_used_again_keeps_its_publisher(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Successive tasks share one connection; a failed task closes it."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b"]})
    options = WriteOptions(url=vhost.url, routing_key="orders")
    used = []
    for _ in range(3):
        write(vhost, batch, routing_key="orders")
        with sink.publisher_pool(options) as publisher:
            used.append(publisher)
    assert used[0] is used[1] is used[2]
    assert used[0].statistics.confirmed == 6
    with pytest.raises(PublishError):
        write(vhost, batch, routing_key="nowhere")
    with sink.publisher_pool(options) as publisher:
        assert publisher is not used[0]
