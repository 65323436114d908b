"""The columns of sources and sinks, and the conversion of deliveries to rows.

The conversion uses Arrow. Headers are text by default. A schema may give them another type: a map, or a struct with
their names as fields. A value of another type is null.

Invariants: a delivery always becomes a row with its body, even if its properties are invalid; a property that cannot be
decoded is null. The Arrow types are exactly those that Spark derives from the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from reliable_mq.codec import (
    BASIC_PROPERTIES,
    CodecError,
    Properties,
    RawDelivery,
    encode_table,
    integer_header,
    stream_offset,
)
from reliable_mq.codec.methods import STREAM_OFFSET
from reliable_mq.codec.tables import MAX_TIMESTAMP
from reliable_mq.core.stage.envelope import HEADER, unstaged
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.options import WriteOptions

_HEADERS: Final = MapType(StringType(), StringType())
#: The properties that are text.
_TEXTS: Final = (
    "message_id",
    "correlation_id",
    "content_type",
    "content_encoding",
    "reply_to",
    "type",
    "app_id",
    "user_id",
)

#: The columns of a source, in this order.
READ_SCHEMA: Final = StructType(
    [
        StructField("body", BinaryType()),
        StructField("queue", StringType()),
        StructField("offset", LongType()),
        StructField("exchange", StringType()),
        StructField("routing_key", StringType()),
        StructField("redelivered", BooleanType()),
        StructField("delivery_count", LongType()),
        StructField("headers", _HEADERS),
        *(StructField(name, StringType()) for name in _TEXTS),
        StructField("priority", IntegerType()),
        StructField("expiration", DoubleType()),
        StructField("timestamp", TimestampType()),
        StructField("persistent", BooleanType()),
    ]
)

#: Columns that are read only if the schema names them: most queries do not need them, and decoding them has a cost.
_ON_REQUEST: Final = StructType([StructField("traceparent", StringType())])
_READABLE: Final = StructType([*READ_SCHEMA, *_ON_REQUEST])

_BITS: Final[Mapping[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_WHOLE: Final = tuple(_BITS)
_HEADER_READ: Final = (StringType, BinaryType, BooleanType, *_WHOLE, DoubleType, FloatType, TimestampType)
_HEADER_WRITTEN: Final = (*_HEADER_READ, DecimalType)

#: The columns that a sink accepts, with their types. Only ``body`` is required.
WRITTEN: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "body": (BinaryType, StringType),
    "exchange": (StringType,),
    "routing_key": (StringType,),
    "headers": (MapType, StructType),
    "traceparent": (StringType,),
    **dict.fromkeys(_TEXTS, (StringType,)),
    "priority": _WHOLE,
    "expiration": (DoubleType, FloatType, *_WHOLE),
    "timestamp": (TimestampType,),
    "persistent": (BooleanType,),
}

_TYPES: Final = {field.name: to_arrow_type(field.dataType, timezone="UTC") for field in _READABLE}
_TRACEPARENT: Final = b"\x0btraceparent"  # the encoded name in a header table
_STAGED: Final = HEADER.encode()
_ONLY_OFFSET: Final = encode_table({STREAM_OFFSET: 2**63 - 1})[:-8]  # a table with no other header, up to its value
_ALL: Final = 0xFFFF
#: The bit of each property in the first two bytes of the encoded properties. Without it, the column is null
#: (of the headers: empty).
_FLAGS: Final = {
    **{name: 0x8000 >> index for index, name in enumerate(BASIC_PROPERTIES) if name != "headers"},
    **dict.fromkeys(("offset", "traceparent", "delivery_count"), 0x2000),  # the bit of the headers
}
_delivery_count: Final = integer_header("x-delivery-count")


class TypedHeaders(str):
    """The name of the column of headers, with the type that a schema specifies."""

    __slots__ = ("kind",)

    kind: DataType


def _refusal(kind: DataType, *, read: bool) -> str:
    """Return why headers cannot have this map or struct type; empty if they can."""
    if isinstance(kind, StructType):
        names = kind.fieldNames()
        if len(set(names)) < len(names):
            return f"has a field twice: {', '.join(names)}"
        if read and not all(field.nullable for field in kind):
            return "has a field that is NOT NULL, and any header may be missing: leave NOT NULL out"
        return next(filter(None, (_refusal(field.dataType, read=read) for field in kind)), "")
    if isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            return f"has a map with keys of {kind.keyType.simpleString()}: names are string"
        if read and not kind.valueContainsNull:
            return "has a map of values that are NOT NULL: leave NOT NULL out"
        return _refusal(kind.valueType, read=read)
    if isinstance(kind, ArrayType):
        if read and not kind.containsNull:
            return "has an array of elements that are NOT NULL: leave NOT NULL out"
        return _refusal(kind.elementType, read=read)
    if isinstance(kind, _HEADER_READ if read else _HEADER_WRITTEN):
        return ""
    return f"has a {kind.simpleString()} in it, which has no AMQP type: use string"


def check_read_schema(schema: StructType) -> tuple[str, ...]:
    """Check the schema of a read and return its column names in order.

    The name of a ``headers`` column is a `TypedHeaders` if its type is not the default one.
    """
    names = tuple(schema.fieldNames())
    if not names:
        raise ConfigurationError(
            "the schema has no columns, and rows without one are lost on the way to Spark: name one, for example "
            "'queue string'"
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"the schema has a column twice: {', '.join(names)}")
    for field in schema:
        if field.name not in _READABLE.fieldNames():
            raise ConfigurationError(
                f"the schema has a column {field.name!r}, and RabbitMQ has {', '.join(_READABLE.fieldNames())}"
            )
        ours = _READABLE[field.name].dataType
        if field.name == "headers" and isinstance(field.dataType, (MapType, StructType)):
            refusal = _refusal(field.dataType, read=True)
            if refusal:
                raise ConfigurationError(f"column 'headers' of the schema {refusal}")
            ours = field.dataType
        if field.dataType.simpleString() != ours.simpleString():
            raise ConfigurationError(
                f"column {field.name!r} of the schema is {field.dataType.simpleString()}, and RabbitMQ gives "
                f"{ours.simpleString()}: read it so, and cast it"
            )
        if not field.nullable or field.dataType != ours:
            raise ConfigurationError(
                f"column {field.name!r} of the schema, or a value in it, is NOT NULL, and Spark takes the columns of a "
                "source in Python as they are, which may be null: leave NOT NULL out"
            )
    typed = TypedHeaders("headers")
    typed.kind = schema["headers"].dataType if "headers" in names else _HEADERS
    return tuple(typed if name == "headers" and typed.kind != _HEADERS else name for name in names)


def check_written_schema(schema: StructType, options: WriteOptions) -> tuple[str, ...]:
    """Check a schema to be written and return its column names in order.

    The driver calls it before anything is sent.
    """
    names = tuple(schema.fieldNames())
    if len(set(names)) < len(names):
        raise ConfigurationError(f"a column occurs twice: {', '.join(names)}")
    for field in schema:
        accepted = WRITTEN.get(field.name)
        if accepted is None:
            raise ConfigurationError(
                f"column {field.name!r} cannot be written to RabbitMQ: select what is meant "
                f"(known: {', '.join(WRITTEN)}), and put the rest into body or headers"
            )
        if not isinstance(field.dataType, accepted):
            wanted = " or ".join(dict.fromkeys(kind().simpleString() for kind in accepted if kind is not MapType))
            if field.name == "headers":
                wanted = f"{_HEADERS.simpleString()}, another map, or a struct"
            raise ConfigurationError(
                f"column {field.name!r} is {field.dataType.simpleString()}, and must be {wanted}: cast it"
            )
        refusal = _refusal(field.dataType, read=False) if field.name == "headers" else ""
        if refusal:
            raise ConfigurationError(f"column 'headers' {refusal}")
    if "body" not in names:
        raise ConfigurationError(
            "column 'body' is missing: it is what the message carries, binary or string; e.g. "
            "df.select(to_json(struct('*')).alias('body'))"
        )
    if "routing_key" not in names and options.routing_key is None and "exchange" not in names and not options.exchange:
        raise ConfigurationError(
            "where the rows are to go is not said: give the option routingKey (with the default exchange, the name of "
            "a queue) or a column 'routing_key', and exchange where it is not the default one"
        )
    return names


#: The columns that the driver sends to the tasks in queue mode. The executors decode the properties.
RAW_SCHEMA: Final = pa.schema(
    [
        ("body", pa.binary()),
        ("queue", pa.string()),
        ("exchange", pa.string()),
        ("routing_key", pa.string()),
        ("redelivered", pa.bool_()),
        ("properties", pa.binary()),
    ]
)


def raw_batch(deliveries: Sequence[RawDelivery], queues: str | Sequence[str]) -> pa.RecordBatch:
    """Make a batch of `RAW_SCHEMA` from deliveries of one queue, or of one queue each."""
    count = len(deliveries)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([delivery.body for delivery in deliveries], pa.binary()),
            pa.repeat(queues, count) if isinstance(queues, str) else pa.array(queues, pa.string()),
            pa.array([_clean(delivery.exchange) for delivery in deliveries], pa.string()),
            pa.array([_clean(delivery.routing_key) for delivery in deliveries], pa.string()),
            pa.array([delivery.redelivered for delivery in deliveries], pa.bool_()),
            pa.array([delivery.properties for delivery in deliveries], pa.binary()),
        ],
        schema=RAW_SCHEMA,
    )


def decode(raw: pa.RecordBatch, names: Sequence[str], *, from_stream: bool = False) -> pa.RecordBatch:
    """Make rows from a batch of `RAW_SCHEMA`. Outside of a stream, offsets are null."""
    properties: list[Properties] = []
    flags = 0
    if any(name in _READERS for name in names):
        encoded = raw.column("properties").to_pylist()
        properties = [Properties(each) for each in encoded]
        for first in {each[:2] for each in encoded}:
            flags |= int.from_bytes(first) if len(first) == 2 else _ALL
    arrays, types = [], []
    for name in names:
        read, kind = _READERS.get(name), _TYPES[name]
        if isinstance(name, TypedHeaders):
            read, kind = _typed_headers(name.kind), to_arrow_type(name.kind, timezone="UTC")
        types.append(kind)
        if read is None:
            arrays.append(raw.column(name))
        elif (name in _FLAGS and not flags & _FLAGS[name]) or (name == "offset" and not from_stream):
            arrays.append(pa.nulls(raw.num_rows, kind))
        else:
            arrays.append(pa.array([_value(read, each) for each in properties], kind))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(zip(names, types, strict=True))))


def record_batch(deliveries: Sequence[RawDelivery], queue: str, names: Sequence[str]) -> pa.RecordBatch:
    """Make rows from deliveries. An entry of a stage yields one for each message."""
    if any(_STAGED in delivery.properties for delivery in deliveries):
        return _staged_batch(deliveries, queue, names)
    return decode(raw_batch(deliveries, queue), names, from_stream=True)


def _staged_batch(deliveries: Sequence[RawDelivery], stream: str, names: Sequence[str]) -> pa.RecordBatch:
    """Make rows from deliveries, some of them entries. A marker yields no row."""
    originals: list[RawDelivery] = []
    queues: list[str] = []
    offsets: list[int | None] = []
    for delivery in deliveries:
        entry = unstaged(delivery.properties, delivery.body)
        held = [delivery] if entry is None else entry.originals
        originals += held
        queues += [stream if entry is None else _clean(entry.queue)] * len(held)
        offsets += [stream_offset(delivery.properties)] * len(held)
    batch = decode(raw_batch(originals, queues), names)
    if "offset" not in names:
        return batch
    return batch.set_column(list(names).index("offset"), "offset", pa.array(offsets, _TYPES["offset"]))


def _value(read: Callable[[Properties], Any], properties: Properties) -> Any:
    try:
        return read(properties)
    except CodecError:
        return None


def _text(name: str) -> Callable[[Properties], str | None]:
    def read(properties: Properties) -> str | None:
        value = getattr(properties, name)
        return None if value is None else _clean(value)

    return read


def _clean(text: str) -> str:
    """Replace bytes that are not UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _headers(properties: Properties) -> list[tuple[str, str | None]]:
    """Return all headers except the offset.

    The offset has its own column, and would be wrong if the row is written again.
    """
    if _has_only_offset(properties.raw):  # decoding the headers costs as much as the rest of the row
        return []
    return [(_clean(name), _as_text(value)) for name, value in properties.headers.items() if name != STREAM_OFFSET]


def _typed_headers(kind: DataType) -> Callable[[Properties], Any]:
    """Return a reader of headers for a type other than the default."""

    def read(properties: Properties) -> Any:
        return _of_kind(kind, {name: value for name, value in properties.headers.items() if name != STREAM_OFFSET})

    return read


def _of_kind(kind: DataType, value: Any) -> Any:
    """Return a header, or all headers, for Arrow; None if the type differs."""
    if isinstance(kind, StructType):
        return (
            {field.name: _of_kind(field.dataType, value.get(field.name)) for field in kind}
            if isinstance(value, Mapping)
            else None
        )
    if isinstance(kind, MapType):
        return (
            [(_as_text(name), _of_kind(kind.valueType, each)) for name, each in value.items()]
            if isinstance(value, Mapping)
            else None
        )
    if isinstance(kind, ArrayType):
        return [_of_kind(kind.elementType, each) for each in value] if isinstance(value, list) else None
    if isinstance(kind, StringType):
        return _as_text(value)
    if isinstance(kind, BinaryType):
        return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else _if(value, bytes)
    if isinstance(kind, BooleanType):
        return _if(value, bool)
    if isinstance(kind, TimestampType):
        return _if(value, datetime)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    bits = _BITS.get(type(kind))
    if bits is None:
        return float(value)
    return value if isinstance(value, int) and -(1 << bits - 1) <= value < 1 << bits - 1 else None


def _if(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _traceparent(properties: Properties) -> str | None:
    """Return the message's trace context in the format of W3C's ``traceparent``."""
    if _TRACEPARENT not in properties.raw:
        return None
    return _as_text(properties.headers.get("traceparent"))


def _has_only_offset(raw: bytes) -> bool:
    """Return whether the stream offset is the only header."""
    try:
        at = 2
        if raw[0] & 0x80:  # skips the content type
            at += 1 + raw[at]
        if raw[0] & 0x40:  # skips the content encoding
            at += 1 + raw[at]
        has_headers = bool(raw[0] & 0x20)
        return has_headers and raw.startswith(_ONLY_OFFSET, at) and len(raw) >= at + len(_ONLY_OFFSET) + 8
    except IndexError:
        return False


def _as_text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _clean(value)
    plain = _as_json(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _as_json(value: object) -> object:
    """Return a header as JSON: times in ISO 8601 with a zone, UTF-8 bytes as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {_clean(str(name)): _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return str(value)


def _expiration(properties: Properties) -> float | None:
    text = properties.expiration
    return int(text) / 1000 if text is not None and text.isdecimal() else None


def _timestamp(properties: Properties) -> datetime | None:
    """Return the time. A number too large for seconds is read as milliseconds."""
    value = properties.timestamp
    if isinstance(value, int):
        return datetime.fromtimestamp(value / 1000, UTC) if 0 <= value <= MAX_TIMESTAMP * 1000 else None
    return value


_READERS: Final[Mapping[str, Callable[[Properties], Any]]] = {
    **{name: _text(name) for name in _TEXTS},
    "offset": lambda properties: stream_offset(properties.raw),
    "delivery_count": lambda properties: _delivery_count(properties.raw),
    "headers": _headers,
    "traceparent": _traceparent,
    "priority": lambda properties: properties.priority,
    "expiration": _expiration,
    "timestamp": _timestamp,
    "persistent": lambda properties: properties.delivery_mode == 2,
}
