"""Headers of other types than text: as a map, or as a struct with their names.

Written, each value has AMQP's type of its kind: an array is a list, a map or a struct is a table. Read, a value that is
not of the type that the schema names is null.

Invariants: nothing here raises for a value that a column of its type can hold, but for text that is not UTF-8; entries
of maps are sorted, since Spark promises no order, and attempts at a row make the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

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
    StructType,
    TimestampType,
)

from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["TypedHeaders", "arrow_type", "moment", "refusal_of", "value_of", "written_values"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_WHOLE: Final[Mapping[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_READ: Final = (StringType, BinaryType, BooleanType, *_WHOLE, DoubleType, FloatType, TimestampType)
_WRITTEN: Final = (*_READ, DecimalType)


class TypedHeaders(str):
    """The name of the column of headers, with the type that a schema gives it."""

    __slots__ = ("kind",)

    kind: DataType

    @classmethod
    def of(cls, kind: DataType) -> TypedHeaders:
        """Return the name, with the type."""
        made = cls("headers")
        made.kind = kind
        return made


def refusal_of(kind: DataType, *, read: bool) -> str:
    """Return why headers cannot be of this type; empty if they can."""
    if not isinstance(kind, (MapType, StructType)):
        return "must be a map or a struct"
    return _refusal(kind, read=read)


def _refusal(kind: DataType, *, read: bool) -> str:
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
    if isinstance(kind, _READ if read else _WRITTEN):
        return ""
    return f"has a {kind.simpleString()} in it, which AMQP has no type for: use string"


# -- to AMQP -----------------------------------------------------------------------------------------------------------


def moment(microseconds: int) -> datetime:
    """Return a time since 1970, in whole seconds.

    Raises:
        ConfigurationError: Python has no such year.
    """
    try:
        return _EPOCH + timedelta(seconds=microseconds // 1_000_000)
    except OverflowError as error:  # Spark's timestamps end in the year 294247
        raise ConfigurationError("timestamp lies outside of the years 1 to 9999: correct it, or null it") from error


class _NoTime:
    """A time that Python has not, which no message can carry."""

    def __init__(self, microseconds: int) -> None:
        self._microseconds = microseconds

    def __repr__(self) -> str:
        return f"{self._microseconds} microseconds since 1970"


def written_values(column: pa.Array, *, escaped: bool = False) -> list[dict[str, Any] | None]:
    """Return headers as `Message` takes them, without null fields of structs.

    Args:
        column: a map with text for names, or a struct.
        escaped: whether text that is not UTF-8 becomes surrogate escapes.

    Raises:
        UnicodeDecodeError: there is such text, and it is not to be escaped.
    """
    plain = column.cast(_plain_type(column.type, escaped))
    return [_written(column.type, value) for value in plain.to_pylist()]


def _plain_type(kind: pa.DataType, escaped: bool) -> pa.DataType:
    """Return the type with numbers for times, and bytes for text to be escaped."""
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type, escaped), _plain_type(kind.item_type, escaped))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type, escaped)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type, escaped))
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if escaped and pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary() if escaped and pa.types.is_string(kind) else kind


def _written(kind: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_map(kind):
        entries = [(_written(kind.key_type, name), _written(kind.item_type, each)) for name, each in value]
        return dict(sorted(entries, key=_name))
    if pa.types.is_struct(kind):
        return {field.name: _written(field.type, value[field.name]) for field in kind if value[field.name] is not None}
    if pa.types.is_list(kind):
        return [_written(kind.value_type, each) for each in value]
    if pa.types.is_timestamp(kind):
        try:
            return moment(value)
        except ConfigurationError:
            return _NoTime(value)
    if isinstance(value, bytes) and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return value.decode("utf-8", "surrogateescape")
    return value


def _name(entry: tuple[str, Any]) -> str:
    return entry[0]


# -- from AMQP ---------------------------------------------------------------------------------------------------------


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the type that Spark wants for its own."""
    return to_arrow_type(kind, timezone="UTC")


def value_of(kind: DataType, value: Any, as_text: Callable[[object], str | None]) -> Any:
    """Return a header, or all of them, for Arrow; None if it is of another type.

    Args:
        kind: checked by `refusal_of`.
        value: from AMQP.
        as_text: for text.
    """
    if isinstance(kind, StructType):
        return (
            {field.name: value_of(field.dataType, value.get(field.name), as_text) for field in kind}
            if isinstance(value, Mapping)
            else None
        )
    if isinstance(kind, MapType):
        return _entries(kind, value.items(), as_text) if isinstance(value, Mapping) else None
    if isinstance(kind, ArrayType):
        return [value_of(kind.elementType, each, as_text) for each in value] if isinstance(value, list) else None
    if isinstance(kind, StringType):
        return as_text(value)
    if isinstance(kind, BinaryType):
        return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else _if(value, bytes)
    if isinstance(kind, BooleanType):
        return _if(value, bool)
    if isinstance(kind, TimestampType):
        return _if(value, datetime)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    bits = _WHOLE.get(type(kind))
    if bits is None:
        return float(value)
    return value if isinstance(value, int) and -(1 << bits - 1) <= value < 1 << bits - 1 else None


def _entries(kind: MapType, entries: Iterable[tuple[str, Any]], as_text: Callable[[object], str | None]) -> Any:
    return [(as_text(name), value_of(kind.valueType, value, as_text)) for name, value in entries]


def _if(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None
