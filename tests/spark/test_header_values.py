"""Headers as maps and structs of Spark's types, to AMQP and back."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from reliable_mq import Message
from reliable_mq.codec import RawDelivery, encode_properties
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.columns import check_read_schema, check_written_schema, record_batch
from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.rows import written_values

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TEXT, WHOLE, LONG = StringType(), IntegerType(), LongType()


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


KIND = struct(
    tenant=TEXT, CC=ArrayType(TEXT), number=LONG, small=ByteType(), ratio=DoubleType(), yes=BooleanType(),
    raw=BinaryType(), at=TimestampType(), table=struct(inner=MapType(TEXT, ArrayType(WHOLE))),
)  # fmt: skip
VALUE: dict[str, Any] = {
    "tenant": "a", "CC": ["x", "y"], "number": 2**40, "small": 7, "ratio": 0.5, "yes": True, "raw": b"\xff", "at": WHEN,
    "table": {"inner": {"m": [1, None], "n": []}},
}  # fmt: skip


def schema(headers: DataType) -> StructType:
    return struct(body=BinaryType(), headers=headers)


def column(kind: DataType, *values: Any) -> pa.Array:
    return pa.array(values, to_arrow_type(kind, timezone="UTC"))


def read(headers: dict[str, Any], kind: DataType) -> Any:
    """Return the column of headers of one delivery."""
    names = pickle.loads(pickle.dumps(check_read_schema(schema(kind))))
    properties = encode_properties(Message(b"", headers=headers))
    batch = record_batch([RawDelivery("", 1, False, "", "orders", properties, b"")], "orders", names)
    assert batch.schema.field("headers").type == to_arrow_type(kind, timezone="UTC")
    return batch.column("headers").to_pylist()[0]


@pytest.mark.slow
def test_what_is_written_is_read_with_the_same_schema() -> None:
    """Lists, tables, numbers, bytes and times survive the message."""
    given = VALUE | {"table": {"inner": [("n", []), ("m", [1, None])]}}
    (written,) = written_values(column(KIND, given))
    assert written == VALUE
    Message(b"", headers=written)
    found = read(written or {}, KIND)
    assert found | {"table": {"inner": dict(found["table"]["inner"])}} == VALUE


def test_a_null_of_a_map_is_sent_and_one_of_a_struct_is_left_out() -> None:
    """A struct has all fields in every row; a map has only those that were set."""
    assert written_values(column(MapType(TEXT, LONG), [("b", 1), ("a", None)], None)) == [{"a": None, "b": 1}, None]
    assert written_values(column(struct(a=LONG, b=LONG), {"a": None, "b": 1})) == [{"b": 1}]


def test_decimals_are_written_and_read_as_numbers() -> None:
    """A literal in SQL is a decimal."""
    (written,) = written_values(column(struct(price=DecimalType(5, 2)), {"price": Decimal("1.50")}))
    assert written == {"price": Decimal("1.50")}
    assert read(written or {}, struct(price=DoubleType())) == {"price": 1.5}


def test_a_time_that_python_has_not_is_refused_by_the_message() -> None:
    """The error names the row and does not fail the whole batch."""
    far = pa.array([2**62], pa.timestamp("us", "UTC"))
    (written,) = written_values(pa.StructArray.from_arrays([far], ["at"]))
    with pytest.raises(ConfigurationError, match="'at'"):
        Message(b"", headers=written)


def test_what_is_not_of_the_type_is_null() -> None:
    """Missing values are null too. Any value can be read as text."""
    kind = struct(
        a=ArrayType(WHOLE), b=WHOLE, c=MapType(TEXT, TEXT), d=BooleanType(), e=TimestampType(), f=BinaryType(),
        g=DoubleType(), h=TEXT,
    )  # fmt: skip
    other = {"a": "x", "b": 2**31, "c": [1], "d": 1, "e": "x", "f": 1, "g": True, "h": [1, {"x": None}]}
    assert read(other, kind) == {**dict.fromkeys("abcdefg"), "h": '[1, {"x": null}]'}
    assert read({}, kind) == dict.fromkeys("abcdefgh")
    assert read({"a": [1], "b": "x"}, MapType(TEXT, ArrayType(LONG))) == [("a", [1]), ("b", None)]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (MapType(WHOLE, TEXT), "keys of int"),
        (struct(a=DateType()), "has a date in it"),
        (StructType([StructField("a", TEXT), StructField("a", WHOLE)]), "field twice"),
        (struct(a=ArrayType(TimestampNTZType())), "has a timestamp_ntz in it"),
    ],
)
def test_types_that_amqp_has_not_are_refused(kind: DataType, says: str) -> None:
    """The error is raised on the driver, for reading and for writing."""
    with pytest.raises(ConfigurationError, match=f"'headers'.*{says}"):
        check_read_schema(schema(kind))
    with pytest.raises(ConfigurationError, match=f"'headers'.*{says}"):
        check_written_schema(schema(kind), WriteOptions(url="amqp://localhost/", routing_key="q"))


@pytest.mark.parametrize("kind", [StructType([StructField("a", TEXT, nullable=False)]), struct(a=DecimalType(5, 2))])
def test_a_source_refuses_what_it_cannot_promise(kind: DataType) -> None:
    """Any header may be missing and may have any precision."""
    with pytest.raises(ConfigurationError, match="'headers'"):
        check_read_schema(schema(kind))
