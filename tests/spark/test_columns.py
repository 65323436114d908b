"""Columns and types of messages that are read, and rows that can be written."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    FloatType,
    IntegerType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from reliable_mq import Message
from reliable_mq.codec import RawDelivery, encode_properties, encode_table
from reliable_mq.core.stage.envelope import marker
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.columns import (
    READ_SCHEMA,
    check_read_schema,
    check_written_schema,
    decode,
    raw_batch,
    record_batch,
)
from reliable_mq.spark.options import WriteOptions

EVERYTHING = READ_SCHEMA.fieldNames()
TO_A_QUEUE = WriteOptions(url="amqp://localhost/", routing_key="q")


def delivery(
    body: bytes = b"x", properties: bytes = b"\0\0", *, key: str = "k", redelivered: bool = False
) -> RawDelivery:
    return RawDelivery("tag", 1, redelivered, "e", key, properties, body)


def of(message: Message) -> RawDelivery:
    return delivery(message.body, encode_properties(message))


def row(one: RawDelivery, *names: str) -> list[object]:
    (read,) = record_batch([one], "q", names or EVERYTHING).to_pylist()
    return list(read.values())


def schema(text: str) -> StructType:
    """Return a schema as Spark would parse it, which requires a session."""
    made = StructType()
    for column in text.split(", "):
        name, kind = column.split(" ")
        made = made.add(name, _KINDS[kind])
    return made


_KINDS = {
    kind.simpleString(): kind
    for kind in (
        BinaryType(), BooleanType(), FloatType(), IntegerType(), ShortType(), StringType(), TimestampType(),
        MapType(StringType(), StringType()), MapType(StringType(), IntegerType()),
    )
}  # fmt: skip


@pytest.mark.slow
def test_the_arrow_types_are_those_that_spark_asks_for() -> None:
    """Spark refuses a batch whose types differ."""
    batch = record_batch([delivery()], "q", EVERYTHING)
    assert batch.schema.equals(to_arrow_schema(READ_SCHEMA, timezone="UTC"))


def test_a_bare_message_has_what_the_broker_says_of_it() -> None:
    """The other columns are null; without a delivery mode it is transient."""
    read = record_batch([delivery(b"\xff", redelivered=True)], "q", EVERYTHING).to_pylist()[0]
    assert {name: value for name, value in read.items() if value is not None} == {
        "body": b"\xff",
        "queue": "q",
        "exchange": "e",
        "routing_key": "k",
        "redelivered": True,
        "headers": [],
        "persistent": False,
    }


def test_headers_become_text() -> None:
    """Text stays as it is, and other values become JSON."""
    when = datetime(2026, 1, 2, tzinfo=UTC)
    message = Message(
        b"",
        headers={
            "s": "t",
            "n": 1,
            "f": 0.5,
            "b": False,
            "none": None,
            "at": when,
            "l": [1, b"\xff"],
            "d": {"a": [when]},
        },
    )
    assert row(of(message), "headers") == [
        [
            ("s", "t"),
            ("n", "1"),
            ("f", "0.5"),
            ("b", "false"),
            ("none", None),
            ("at", when.isoformat()),
            ("l", '[1, "\N{REPLACEMENT CHARACTER}"]'),
            ("d", f'{{"a": ["{when.isoformat()}"]}}'),
        ]
    ]


def test_a_message_in_a_queue_has_no_offset() -> None:
    """A message that was published again from a stream may have a header with its offset there."""
    one = of(Message(b"", headers={"x-stream-offset": 7, "other": "1"}))
    (read,) = decode(raw_batch([one], "q"), ["offset", "headers"]).to_pylist()
    assert read == {"offset": None, "headers": [("other", "1")]}


def test_numbers_of_the_broker_are_columns() -> None:
    """The offset in a stream, and the delivery count of a quorum queue."""
    message = Message(b"", headers={"x-stream-offset": 7, "x-delivery-count": 2})
    assert row(of(message), "offset", "delivery_count") == [7, 2]
    assert row(of(Message(b"", headers={"x-stream-offset": "7"})), "offset") == [None]


def test_a_number_that_a_column_cannot_hold_is_null() -> None:
    """Anyone can publish such a number, and its batch would fail again and again."""
    for header in ("x-stream-offset", "x-delivery-count"):
        table = bytes((len(header),)) + header.encode() + b"T" + b"\xff" * 8
        properties = b"\x20\x00" + len(table).to_bytes(4) + table
        assert row(delivery(properties=properties), "offset", "delivery_count") == [None, None]


@pytest.mark.parametrize(
    ("seconds", "read"),
    [
        (1_700_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (1_700_000_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (2**63, None),
    ],
)
def test_a_timestamp_in_milliseconds_is_understood(seconds: int, read: datetime | None) -> None:
    """Some publishers use milliseconds. A value that is not a time becomes null."""
    assert row(delivery(properties=b"\x00\x40" + seconds.to_bytes(8)), "timestamp") == [read]


@pytest.mark.parametrize("properties", [b"", b"\x00\x03", b"\x80\x00\x09short", b"\x20\x00\x00\x00\x00\x05\x01aZzz"])
def test_broken_properties_cost_their_columns_and_not_the_row(properties: bytes) -> None:
    """The body and the neighbouring rows are read."""
    batch = record_batch([delivery(b"1", properties), delivery(b"2")], "q", EVERYTHING).to_pylist()
    assert [each["body"] for each in batch] == [b"1", b"2"]
    assert batch[0]["message_id"] is None
    assert batch[0]["headers"] is None


def test_broken_properties_in_a_stage_cost_columns_not_the_row() -> None:
    """They belong to another program's message, next to a marker."""
    broken = b"\x20\x00\x00\x00\x00\xff\x0fx-stream-offsetl"
    batch = record_batch([delivery(b"1", broken), delivery(b"", marker(bytes(8)))], "q", ("body", "offset"))
    assert batch.to_pylist() == [{"body": b"1", "offset": None}]


def test_broken_headers_leave_the_other_properties() -> None:
    """Each property is decoded separately."""
    table = encode_table({"a": 1})[:-1] + b""
    properties = b"\xa0\x00" + b"\x03a/b" + table
    assert row(delivery(properties=properties), "content_type", "headers") in (["a/b", None], [None, None])


def test_text_that_is_not_utf8_is_readable_text() -> None:
    """Arrow accepts only UTF-8."""
    assert row(delivery(key=b"\xffk".decode("utf-8", "surrogateescape")), "routing_key") == [
        "\N{REPLACEMENT CHARACTER}k"
    ]
    assert row(delivery(properties=b"\x00\x80\x02\xffi"), "message_id") == ["\N{REPLACEMENT CHARACTER}i"]


def test_only_what_is_asked_for_is_decoded() -> None:
    """The columns come in the order of the request."""
    check_read_schema(schema("routing_key string, body binary"))
    raw = raw_batch([delivery(b"1"), delivery(b"2")], ["a", "b"])
    assert decode(raw, ["queue", "body"]).to_pylist() == [{"queue": "a", "body": b"1"}, {"queue": "b", "body": b"2"}]
    assert raw.column("body").equals(decode(raw, ["body"]).column("body"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("value binary", "column 'value', and RabbitMQ has body"),
        ("body string", "'body' of the schema is string"),
        ("body binary, body binary", "a column twice: body, body"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(given: str, says: str) -> None:
    """The error names the column and lists the available ones."""
    with pytest.raises(ConfigurationError, match=says):
        check_read_schema(schema(given))


def test_a_schema_without_columns_is_refused() -> None:
    """Arrow does not count rows without columns, so messages would be lost."""
    with pytest.raises(ConfigurationError, match="the schema has no columns"):
        check_read_schema(StructType([]))


@pytest.mark.parametrize(
    "field",
    [
        StructField("body", BinaryType(), nullable=False),
        StructField("headers", MapType(StringType(), StringType(), valueContainsNull=False)),
    ],
)
def test_a_schema_that_says_never_null_is_refused(field: StructField) -> None:
    """Spark compares it only while the query runs, with an unclear error."""
    with pytest.raises(ConfigurationError, match=f"column '{field.name}' of the schema.*leave NOT NULL out"):
        check_read_schema(StructType([field]))


@pytest.mark.parametrize(
    "given",
    [
        "body string",
        "body binary, routing_key string, priority smallint, expiration float",
        "body binary, headers map<string,string>, timestamp timestamp, persistent boolean",
    ],
)
def test_what_can_be_written_passes(given: str) -> None:
    """The columns come in any order, and optional ones may be missing."""
    assert check_written_schema(schema(given), TO_A_QUEUE) == tuple(schema(given).fieldNames())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("value string", "column 'value' cannot be written"),
        ("routing_key string", "column 'body' is missing"),
        ("body int", "column 'body' is int, and must be binary or string"),
        ("body string, headers string", "column 'headers' is string, and must be map<string,string>"),
        ("body string, priority string", "column 'priority' is string, and must be tinyint or"),
        ("body string, body string", "a column occurs twice"),
    ],
)
def test_what_cannot_be_written_is_refused(given: str, says: str) -> None:
    """The error is raised on the driver, names the column and suggests a fix."""
    with pytest.raises(ConfigurationError, match=says):
        check_written_schema(schema(given), TO_A_QUEUE)


def test_rows_must_go_somewhere() -> None:
    """A routing key is needed, unless the exchange ignores it."""
    nowhere = WriteOptions(url="amqp://localhost/")
    with pytest.raises(ConfigurationError, match="give the option routingKey"):
        check_written_schema(schema("body string"), nowhere)
    check_written_schema(schema("body string"), WriteOptions(url="amqp://localhost/", exchange="fanout"))
    check_written_schema(schema("body string, routing_key string"), nowhere)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_context_of_a_trace_is_read_if_the_schema_names_it() -> None:
    wanted = check_read_schema(schema("body binary, traceparent string"))
    for message, expected in (
        (Message(b"x", headers={"traceparent": TRACE, "n": 1}), TRACE),
        (Message(b"x", headers={"n": 1}), None),
        (Message(b"x"), None),
    ):
        assert row(of(message), *wanted) == [b"x", expected]
    assert "traceparent" not in READ_SCHEMA.fieldNames()
