"""The conversion of rows to messages, and the input of message ids."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.rows import MessageIds, Outgoing, RowPlan, UnsendableRow, letter_of_row


def plan(*names: str, **options: str) -> RowPlan:
    made: RowPlan = pickle.loads(pickle.dumps(RowPlan(WriteOptions(url="amqp://localhost/", **options), names)))
    return made


def messages(columns: dict[str, Any], **options: str) -> list[Outgoing]:
    batch = pa.RecordBatch.from_pydict(columns)
    made = plan(*columns, **options)
    return [sendable(row) for row in made.messages(batch, MessageIds("q/0/0", made.constant), 0)]


def sendable(row: Outgoing | UnsendableRow) -> Outgoing:
    assert isinstance(row, Outgoing), row
    return row


def unsendable(row: Outgoing | UnsendableRow) -> UnsendableRow:
    assert isinstance(row, UnsendableRow), row
    return row


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_a_body_is_its_bytes(kind: pa.DataType) -> None:
    """Text is UTF-8.

    The large types are those of ``spark.sql.execution.arrow.useLargeVarTypes``.
    """
    given = pa.array(["é".encode(), b""], pa.binary()).cast(kind)
    assert [out.message.body for out in messages({"body": given}, routing_key="q")] == ["é".encode(), b""]


def test_options_come_before_columns() -> None:
    """A null is the default exchange or the empty routing key."""
    columns = {"body": ["a", "b"], "exchange": ["e", None], "routing_key": [None, "k"]}
    assert [out[1:] for out in messages(columns)] == [("e", ""), ("", "k")]
    assert [out[1:] for out in messages(columns, exchange="x")] == [("x", ""), ("x", "k")]
    assert [out[1:] for out in messages(columns, routing_key="y")] == [("e", "y"), ("", "y")]


def test_a_given_id_is_kept_and_a_null_is_made() -> None:
    """This is decided for each row."""
    first, second = messages({"body": ["a", "b"], "message_id": ["mine", None]}, routing_key="q")
    assert first.message.message_id == "mine"
    assert second.message.message_id.startswith("q/0/0/")


def test_column_and_header_order_does_not_change_an_id() -> None:
    """Spark guarantees no order across attempts or changed queries."""
    kind = pa.map_(pa.string(), pa.string())
    one = messages(
        {"body": ["a"], "type": ["t"], "headers": pa.array([[("x", "1"), ("y", "2")]], kind)}, routing_key="q"
    )
    two = messages(
        {"headers": pa.array([[("y", "2"), ("x", "1")]], kind), "type": ["t"], "body": ["a"]}, routing_key="q"
    )
    other = messages(
        {"headers": pa.array([[("y", "3"), ("x", "1")]], kind), "type": ["t"], "body": ["a"]}, routing_key="q"
    )
    assert one[0].message.message_id == two[0].message.message_id
    assert one[0].message.message_id != other[0].message.message_id


def test_the_zone_of_a_session_changes_neither_time_nor_id() -> None:
    """A timestamp is an instant; AMQP has whole seconds."""
    when = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)
    made = [
        messages({"body": ["a"], "timestamp": pa.array([when], pa.timestamp("us", zone))}, routing_key="q")[0].message
        for zone in ("UTC", "Asia/Tokyo")
    ]
    assert made[0].timestamp == made[1].timestamp == when.replace(microsecond=0)
    assert made[0].message_id == made[1].message_id


def test_a_row_that_cannot_be_a_message_says_which_one_it_is() -> None:
    """Its neighbours are converted; row numbers continue across batches."""
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b", "c"], "priority": [1, -1, 2]})
    made = plan("body", "priority", routing_key="q")
    first, second, third = made.messages(batch, MessageIds("q"), 1000)
    assert (sendable(first).message.body, sendable(third).message.body) == (b"a", b"c")
    refused = unsendable(second)
    assert refused.reason.startswith("priority must be an int")
    assert refused.number == 1001
    assert refused.message_id is not None
    assert refused.values["priority"] == -1


@pytest.mark.slow
@pytest.mark.parametrize("years", [10_000, -3_000])
def test_a_time_that_python_has_not_is_an_error_of_its_row(years: int) -> None:
    """Spark's timestamps reach the year 294247; an invalid one must not be 1970."""
    far = pa.array([0, years * 366 * 86_400 * 1_000_000], pa.timestamp("us", "UTC"))
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b"], "timestamp": far})
    first, second = plan("body", "timestamp", routing_key="q").messages(batch, MessageIds("q"), 0)
    assert sendable(first).message.body == b"a"
    refused = unsendable(second)
    assert refused.reason.startswith("timestamp lies outside of the years 1 to 9999")
    assert (refused.number, refused.message_id is not None) == (1, True)


@pytest.mark.parametrize("name", ["message_id", "type", "routing_key", "headers"])
def test_text_that_is_not_utf_8_is_an_error_of_its_row(name: str) -> None:
    """Spark makes a string of any bytes. A body may contain any bytes."""
    text = pa.array([b"fine", b"\xff", None], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, text.buffers())
    body = column
    if name == "headers":
        keys = pa.array(["a", "b", "c"])
        column = pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), keys, column)
    columns = {"message_id": pa.array(["1", "2", "3"]), "body": body, name: column}
    batch = pa.RecordBatch.from_pydict(columns)
    first, second, _ = plan(*columns).messages(batch, MessageIds("q"), 1000)
    assert sendable(first).message.body == b"fine"
    refused = unsendable(second)
    assert refused.reason.startswith(f"column {name} holds bytes that are not UTF-8")
    assert (refused.number, refused.message_id) == (1001, None if name == "message_id" else "2")
    assert refused.values[name] == ({"b": "\udcff"} if name == "headers" else "\udcff")


def test_carbon_copies_of_text_are_refused() -> None:
    """RabbitMQ closes the channel for a ``CC`` header that is not a list.

    A map of strings cannot hold a list.
    """
    headers = pa.array([[("CC", "other")]], pa.map_(pa.string(), pa.string()))
    batch = pa.RecordBatch.from_pydict({"body": ["a"], "headers": headers})
    (row,) = plan("body", "headers", routing_key="q").messages(batch, MessageIds("q"), 0)
    assert "'CC'" in unsendable(row).reason


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_context_becomes_a_header_unless_the_row_has_one() -> None:
    kind = pa.map_(pa.string(), pa.string())
    own = {"traceparent": TRACE.replace("-01", "-00")}
    columns = {
        "body": ["a", "b", "c"],
        "traceparent": [TRACE, TRACE, None],
        "headers": pa.array([[("n", "1")], list(own.items()), None], kind),
    }
    found = [dict(out.message.headers) for out in messages(columns, routing_key="q")]
    assert found == [{"n": "1", "traceparent": TRACE}, own, {}]
    assert dict(messages({"body": ["a"], "traceparent": [TRACE]}, routing_key="q")[0].message.headers) == {
        "traceparent": TRACE
    }


def test_the_context_of_the_option_is_that_of_rows_without_one() -> None:
    """The column takes precedence, and the headers over both; ids are unchanged."""
    kind = pa.map_(pa.string(), pa.string())
    option, column, own = (TRACE.replace("-01", f"-0{flags}") for flags in (3, 1, 0))
    columns = {
        "body": ["a", "b", "c", "d"],
        "traceparent": [None, column, column, None],
        "headers": pa.array([[("n", "1")], None, [("traceparent", own)], [("traceparent", own)]], kind),
    }
    found = messages(columns, routing_key="q", traceparent=option)
    assert [out.message.headers for out in found] == [
        {"traceparent": option, "n": "1"}, {"traceparent": column}, {"traceparent": own}, {"traceparent": own}
    ]  # fmt: skip
    without = messages(columns, routing_key="q")
    assert [out.message.message_id for out in found] == [out.message.message_id for out in without]
    [bare] = messages({"body": ["a"]}, routing_key="q", traceparent=option)
    assert bare.message.headers == {"traceparent": option}


@pytest.mark.parametrize(("name", "value"), [("body", None), ("type", b"x" * 256), ("type", b"\xff")])
def test_a_dead_letter_of_a_row_has_the_context_of_the_option(name: str, value: bytes | None) -> None:
    """A missing body, a text that is too long, and a text that is not UTF-8."""
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([value], pa.binary()).buffers())
    columns = {"body": ["a"], "traceparent": pa.nulls(1, pa.string()), name: text}
    batch = pa.RecordBatch.from_pydict(columns)
    made = plan(*columns, routing_key="q", traceparent=TRACE)
    [refused] = made.messages(batch, MessageIds("q/0/0", made.constant), 0)
    assert letter_of_row(unsendable(refused), MessageIds("q/0/0")).headers["traceparent"] == TRACE


def test_a_context_of_another_form_is_refused_by_its_column() -> None:
    batch = pa.RecordBatch.from_pydict({"body": ["a"], "traceparent": ["0af7"]})
    made = plan("body", "traceparent", routing_key="q")
    [refused] = made.messages(batch, MessageIds("q/0/0", made.constant), 0)
    row = unsendable(refused)
    assert (
        row.reason
        == "traceparent must be a W3C trace context, such as 00-TRACE-SPAN-01, not '0af7': correct it, or give none"
    )
    assert letter_of_row(row, MessageIds("q/0/0")).headers["traceparent"] == "0af7"


@pytest.mark.parametrize(
    ("names", "options", "decides"),
    [
        (("body", "headers"), {"routing_key": "k"}, False),
        (("body", "headers"), {"routing_key": "k", "exchange": ""}, False),
        (("body", "headers"), {"routing_key": "k", "exchange": "e"}, True),
        (("body", "headers", "exchange"), {"routing_key": "k"}, True),
        (("body", "routing_key"), {}, True),
        (("body", "type"), {"routing_key": "k", "exchange": "e"}, False),
    ],
)
def test_headers_choose_a_route_where_the_exchange_may_read_them(
    names: tuple[str, ...], options: dict[str, str], decides: bool
) -> None:
    """The default exchange ignores them: a wrong routing key is wrong for all rows."""
    assert plan(*names, **options).chooses_route is decides
