"""The properties of a message: their flags and values in a content header frame.

Encoding takes the values of `Message` and is strict. Decoding (`Properties`) keeps the raw bytes and decodes on first
use. Rewriting (`rewrite_properties`) cuts and joins raw bytes, so that everything else stays the same byte for byte:
floats, timestamps in milliseconds, nested tables, duplicate names, and values that this module cannot decode.

Invariant: A segment (the encoded bytes of one property) is copied, never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from math import inf
from struct import Struct
from struct import error as struct_error
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from reliable_mq.codec.methods import STREAM_OFFSET
from reliable_mq.codec.tables import (
    CodecError,
    FieldValue,
    decode_table,
    decode_timestamp,
    encode_short_string,
    encode_table,
    encode_timestamp,
    find_entry,
    find_integer,
    walk_table,
)
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import datetime

T = TypeVar("T")

#: In the order on the wire. The first property's flag is the highest bit.
BASIC_PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_FLAGS: Final = {name: 0x8000 >> index for index, name in enumerate(BASIC_PROPERTIES)}
_UNKNOWN_FLAGS: Final = 0b11  # the lowest bit announces more flags, which no property of this class needs

MAX_EXPIRATION_MS: Final = 315_360_000_000  # ten years; RabbitMQ 4.0 to 4.3 close the channel with 406 above it

# As in the first byte of the flags.
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = (_FLAGS[name] >> 8 for name in BASIC_PROPERTIES[:3])

_FLAGS_WORD: Final = Struct(">H")
_UINT32: Final = Struct(">I")
_INT64: Final = Struct(">q").unpack_from
_OFFSET_ENTRY: Final = encode_table({STREAM_OFFSET: 2**63 - 1})[4:-8]  # the name and the type, as RabbitMQ encodes them
_WITH_OFFSET: Final = len(_OFFSET_ENTRY) + 8

# The sizes of values that are not short strings; negative for values with a length prefix.
_SHORT_STRING: Final = -1
_TABLE: Final = -4
_SIZES: Final = {"headers": _TABLE, "delivery_mode": 1, "priority": 1, "timestamp": 8}

_PERSISTENT: Final = b"\x02"
_TRANSIENT: Final = b"\x01"
# Flags, delivery mode and length byte of a persistent message that has only an id, indexed by the id's length.
_PLAIN: Final = tuple(
    _FLAGS_WORD.pack(_FLAGS["delivery_mode"] | _FLAGS["message_id"]) + _PERSISTENT + bytes((length,))
    for length in range(256)
)
_HEADERS_AND_ID: Final = _FLAGS_WORD.pack(_FLAGS["headers"] | _FLAGS["delivery_mode"] | _FLAGS["message_id"])
_NO_HEADERS: Final[Mapping[str, FieldValue]] = MappingProxyType({})


class HasProperties(Protocol):
    """A message whose properties can be encoded."""

    @property
    def message_id(self) -> str:
        """The id, which fits a short string."""

    @property
    def encoded_properties(self) -> bytes | None:
        """All properties, encoded; None if the message is persistent and has only an id."""


def encode_properties(message: HasProperties, extra_headers: Mapping[str, FieldValue] | None = None) -> bytes:
    """Return the encoded properties of a message, with extra headers set.

    Raises:
        ConfigurationError: If an extra header cannot be encoded.
        CodecError: If extra headers are given, and the properties come from a delivery and are broken.
    """
    raw = message.encoded_properties
    if raw is None:
        encoded = message.message_id.encode("utf-8", "surrogateescape")
        raw = _PLAIN[len(encoded)] + encoded
    if extra_headers:
        return rewrite_properties(raw, set_headers=extra_headers)
    return raw


def plain_properties_head(headers: Mapping[str, FieldValue]) -> bytes:
    """Return the encoded properties of a message with headers, up to its id.

    The message is persistent, and has only headers and an id.

    Raises:
        ConfigurationError: If a header cannot be encoded.
    """
    return _HEADERS_AND_ID + encode_table(headers) + _PERSISTENT if headers else _PLAIN[0][:-1]


def plain_properties(head: bytes, message_id: str) -> bytes:
    """Return the encoded properties that begin with a `plain_properties_head`."""
    encoded = message_id.encode("utf-8", "surrogateescape")
    return b"%b%c%b" % (head, len(encoded), encoded)


def plain_message_id(raw: bytes) -> str | None:
    """Return the id of a persistent message that has only an id; else None.

    Most messages are of this kind, and a consumer with an idempotency store needs the id of each one. This costs a
    fifth of decoding.
    """
    size = len(raw) - 4
    if 0 <= size < len(_PLAIN) and raw.startswith(_PLAIN[size]):
        return raw[4:].decode("utf-8", "surrogateescape")
    return None


def encode_property(name: str, value: object) -> bytes:
    """Check one property, named as in `Message`, and return its segment.

    Raises:
        ConfigurationError: If the value has the wrong type or is out of range. The message names the property.
    """
    return _ENCODERS[name](value, name)


def encode_values(values: Sequence[object]) -> bytes:
    """Check and encode the properties of a message.

    Args:
        values: A value for each of `PROPERTY_NAMES`, in that order; None omits the property.

    Raises:
        ConfigurationError: If a value has the wrong type or is out of range. The message names the property.
    """
    flags = 0
    pieces = [b""]
    for (name, encoder, flag), value in zip(_ENCODERS_AND_FLAGS, values, strict=True):
        if value is not None:
            pieces.append(encoder(value, name))
            flags |= flag
    pieces[0] = _FLAGS_WORD.pack(flags)
    return b"".join(pieces)


def _encode_headers(value: object, name: str) -> bytes:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a mapping of names to values, not {type(value).__name__}")
    for carbon_copies in ("CC", "BCC"):
        if carbon_copies in value:
            keys = value[carbon_copies]
            if not isinstance(keys, (list, tuple)) or not all(isinstance(key, str) for key in keys):
                raise ConfigurationError(
                    f"{name}[{carbon_copies!r}] must be a list of routing keys (str): "
                    f"RabbitMQ closes the channel over anything else"
                )
    return encode_table(value, name)


def _encode_persistent(value: object, name: str) -> bytes:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")
    return _PERSISTENT if value else _TRANSIENT


def _encode_priority(value: object, name: str) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ConfigurationError(f"{name} must be an int from 0 to 255, not {value!r}")
    return value.to_bytes(1)


def _encode_expiration(value: object, name: str) -> bytes:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < inf:
        raise ConfigurationError(f"{name} must be seconds (a number >= 0) or a timedelta, not {value!r}")
    if seconds * 1000 > MAX_EXPIRATION_MS + 0.5:  # the product may be infinite, which cannot be rounded
        raise ConfigurationError(
            f"{name} is {value!r}, and RabbitMQ takes at most {MAX_EXPIRATION_MS // 1000} seconds (ten years)"
        )
    milliseconds = round(seconds * 1000)
    if milliseconds == 0 and seconds:  # 0 has another meaning: drop the message unless it can be delivered at once
        milliseconds = 1
    return encode_short_string(str(milliseconds), name)


def _encode_message_id(value: object, name: str) -> bytes:
    if value == "":
        raise ConfigurationError(f"{name} must not be empty: leave it out, and one is made")
    return encode_short_string(value, name)


# In the order on the wire. `Message` has all properties except cluster_id, which AMQP 0-9-1 has retired.
_ENCODERS: Final[dict[str, Callable[[object, str], bytes]]] = {
    "content_type": encode_short_string,
    "content_encoding": encode_short_string,
    "headers": _encode_headers,
    "persistent": _encode_persistent,
    "priority": _encode_priority,
    "correlation_id": encode_short_string,
    "reply_to": encode_short_string,
    "expiration": _encode_expiration,
    "message_id": _encode_message_id,
    "timestamp": encode_timestamp,
    "type": encode_short_string,
    "user_id": encode_short_string,
    "app_id": encode_short_string,
}
#: The properties of a `Message`, in the order on the wire.
PROPERTY_NAMES: Final = tuple(_ENCODERS)
_ENCODERS_AND_FLAGS: Final = tuple(
    (name, encoder, flag) for (name, encoder), flag in zip(_ENCODERS.items(), _FLAGS.values(), strict=False)
)


def join_properties(segments: Mapping[str, bytes]) -> bytes:
    """Join segments, named as in `Properties`, behind their flags."""
    flags = 0
    for name in segments:
        flags |= _FLAGS[name]
    return _FLAGS_WORD.pack(flags) + b"".join([segments[name] for name, _ in _layout(flags)])


def split_properties(raw: bytes) -> dict[str, bytes]:
    """Cut properties into segments by name. `join_properties` is the inverse.

    Raises:
        CodecError: If the values do not end where the bytes do, or an unknown flag is set.
    """
    return {name: raw[start:end] for name, start, end in _spans(raw)}


@lru_cache(maxsize=256)
def _layout(flags: int) -> tuple[tuple[str, int], ...]:
    """Return the properties in `flags`, with their sizes or kinds of length prefix."""
    return tuple((name, _SIZES.get(name, _SHORT_STRING)) for name, flag in _FLAGS.items() if flags & flag)


def _spans(raw: bytes) -> list[tuple[str, int, int]]:
    """Return the position of each property in `raw`, as (name, start, end)."""
    size = len(raw)
    if size < 2:
        raise CodecError("the property flags are missing")
    flags = raw[0] << 8 | raw[1]
    if flags & _UNKNOWN_FLAGS:
        raise CodecError(f"unknown property flags {flags:#06x}")
    spans: list[tuple[str, int, int]] = []
    start = end = 2
    try:
        for name, length in _layout(flags):
            if length == _SHORT_STRING:
                end = start + 1 + raw[start]
            elif length == _TABLE:
                end = start + 4 + _UINT32.unpack_from(raw, start)[0]
            else:
                end = start + length
            spans.append((name, start, end))
            start = end
    except (IndexError, struct_error) as error:
        raise CodecError("truncated properties") from error
    if end != size:
        raise CodecError("the properties do not end where their bytes do")
    return spans


class _Value(Generic[T]):
    """A descriptor of the property with the attribute's name."""

    def __set_name__(self, _owner: type[Properties], name: str) -> None:
        self._name = name

    def __get__(self, properties: Properties, _owner: type[Properties]) -> T | None:
        return (properties._values or properties._decode()).get(self._name)  # noqa: SLF001  # of its owner


class Properties:
    """The properties of a delivered or returned message, decoded on first use.

    An absent property is None; absent headers are empty. Short strings that are not UTF-8 have surrogate escapes. The
    ``expiration`` is the broker's string of milliseconds. A ``timestamp`` beyond the year 9999 is an ``int``. The last
    of several headers with the same name counts. Every access raises `CodecError` if the properties are broken. If only
    the header table is broken, only access to the headers raises it.

    Attributes:
        raw: The received bytes.
    """

    __slots__ = ("_headers", "_values", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._values: dict[str, Any] | None = None  # by name; for the headers, their position in `raw`
        self._headers: Mapping[str, FieldValue] | None = None

    def __reduce__(self) -> tuple[type[Properties], tuple[bytes]]:
        return type(self), (self.raw,)  # read-only headers cannot be pickled; a copy decodes them again

    def _decode(self) -> dict[str, Any]:
        raw = self.raw
        values: dict[str, Any] = {}
        for name, start, end in _spans(raw):
            size = _SIZES.get(name, _SHORT_STRING)
            if size == _SHORT_STRING:
                values[name] = raw[start + 1 : end].decode("utf-8", "surrogateescape")
            elif size == 1:
                values[name] = raw[start]
            elif size == 8:
                values[name] = decode_timestamp(int.from_bytes(raw[start:end]))
            else:
                values[name] = start, end
        self._values = values
        return values

    @property
    def headers(self) -> Mapping[str, FieldValue]:
        headers = self._headers
        if headers is None:
            span = (self._values or self._decode()).get("headers")
            headers = MappingProxyType(decode_table(self.raw[span[0] : span[1]])) if span else _NO_HEADERS
            self._headers = headers
        return headers

    def headers_beginning(self, prefix: str) -> dict[str, FieldValue]:
        """Return the headers whose names begin with ``prefix``; others may be broken."""
        wanted = prefix.encode()
        table = b"".join(self.raw[start:end] for name, start, end in self._entries() if name.startswith(wanted))
        return decode_table(_UINT32.pack(len(table)) + table)

    def header_names(self) -> frozenset[str]:
        """Return the names of the headers without decoding a value."""
        return frozenset(name.decode("utf-8", "surrogateescape") for name, _, _ in self._entries())

    def _entries(self) -> list[tuple[bytes, int, int]]:
        """Return (name, start, end) of each header."""
        span = (self._values or self._decode()).get("headers")
        return walk_table(self.raw, span[0] + 4, span[1]) if span else []

    content_type = _Value[str]()
    content_encoding = _Value[str]()
    delivery_mode = _Value[int]()  # 2 for a persistent message
    priority = _Value[int]()
    correlation_id = _Value[str]()
    reply_to = _Value[str]()
    expiration = _Value[str]()  # milliseconds after which queues drop the message, as on the wire
    message_id = _Value[str]()
    timestamp: _Value[datetime | int] = _Value()
    type = _Value[str]()
    user_id = _Value[str]()
    app_id = _Value[str]()
    cluster_id = _Value[str]()  # retired by AMQP 0-9-1


def _table_span(raw: bytes) -> tuple[int, int] | None:
    """Return the start and the end of the headers' entries."""
    try:
        start = 2
        if raw[0] & _CONTENT_TYPE:
            start += 1 + raw[start]
        if raw[0] & _CONTENT_ENCODING:
            start += 1 + raw[start]
        if not raw[0] & _HEADERS:
            return None
        start += 4
        return start, start + _UINT32.unpack_from(raw, start - 4)[0]
    except (IndexError, struct_error) as error:
        raise CodecError("truncated properties") from error


def find_header(raw: bytes, name: bytes) -> int:
    """Return the position of a header in properties, or -1. No value is decoded.

    The name is encoded, with its length byte.

    Raises:
        CodecError: If the properties are broken up to the header.
    """
    span = _table_span(raw) if name in raw else None
    return find_entry(raw, *span, name) if span else -1


def integer_header(name: str) -> Callable[[bytes], int | None]:
    """Return a function that reads a header of properties if it is an integer.

    The function returns None for properties without the header, with one of another type, or that are broken. It costs
    a tenth of decoding the headers.
    """
    encoded = encode_short_string(name, "the name of a header")

    def read(raw: bytes) -> int | None:
        if encoded not in raw:
            return None
        try:
            span = _table_span(raw)
            return find_integer(raw, *span, encoded) if span else None
        except CodecError:
            return None

    return read


_offset_of: Final = integer_header(STREAM_OFFSET)


def stream_offset(raw: bytes) -> int | None:
    """Return the offset of a delivery from a stream, or None for another queue.

    RabbitMQ adds it as a header to each delivery from a stream. So its bytes are the header, unless they occur twice,
    for example in a value, too.
    """
    at = raw.find(_OFFSET_ENTRY)
    if at >= 0 and raw.find(_OFFSET_ENTRY, at + 1) < 0 and len(raw) >= at + _WITH_OFFSET:
        offset: int = _INT64(raw, at + len(_OFFSET_ENTRY))[0]
        return offset
    return _offset_of(raw)


def rewrite_properties(
    raw: bytes,
    *,
    set_headers: Mapping[str, FieldValue] | None = None,
    drop_headers: Collection[str] = (),
    rename_headers: Mapping[str, str] | None = None,
    clear: Collection[str] = (),
) -> bytes:
    """Change some headers and properties, and copy every other byte unchanged.

    A header that is set replaces all entries with its name and comes last. If the header table cannot be walked, for
    example because of an unknown type letter, headers are set in front of its entries, and nothing is dropped or
    renamed. Behind the entries, a broken length could swallow the new headers.

    Args:
        raw: The properties of a delivery.
        set_headers: The headers to set.
        drop_headers: The names of headers to remove.
        rename_headers: A mapping of headers' old names to new ones. Values keep their bytes and their positions.
        clear: The names of properties to remove, as in `Properties`.

    Raises:
        ConfigurationError: If a header to set cannot be encoded.
        CodecError: If the properties themselves are broken.
    """
    segments = split_properties(raw)
    for name in clear:
        segments.pop(name, None)
    if set_headers or drop_headers or rename_headers:
        ours = encode_table(set_headers or {})[4:]
        dropped = {*(set_headers or ()), *drop_headers}
        table = _rewrite_table(segments.get("headers", b"\0\0\0\0"), ours, dropped, rename_headers or {})
        if table:
            segments["headers"] = _UINT32.pack(len(table)) + table
        else:
            segments.pop("headers", None)
    return join_properties(segments)


def _rewrite_table(table: bytes, ours: bytes, dropped: set[str], renamed: Mapping[str, str]) -> bytes:
    """Return the table's body with entries dropped, renamed and added."""
    try:
        entries = walk_table(table, 4, len(table))
    except CodecError:
        return ours + table[4:]
    names = {name.encode("utf-8", "surrogateescape") for name in dropped}
    new_names = {old.encode(): encode_short_string(new, "a header's name") for old, new in renamed.items()}
    kept: list[bytes] = []
    for name, start, end in entries:
        if name in new_names:
            kept.append(new_names[name] + table[start + 1 + len(name) : end])
        elif name not in names:
            kept.append(table[start:end])
    return b"".join((*kept, ours))
