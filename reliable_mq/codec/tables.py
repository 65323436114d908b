"""AMQP 0-9-1 field tables, as RabbitMQ reads and writes them.

Encoding is strict: a value over which the broker would close the connection (NaN, integers beyond 64 bits, names over
255 bytes) raises ``ConfigurationError``, which names the entry. Decoding is tolerant: a value without a natural Python
type gets a plainer one, and only a broken structure raises ``CodecError``. A timestamp out of range is decoded to an
``int``, a string that is not UTF-8 to ``bytes``, and a name that is not UTF-8 to a ``str`` with surrogate escapes.

Invariants:

- An encoded value is decoded to an equal one, except that tuples become lists, datetimes are cut to whole seconds in
  UTC, and all byte strings become ``bytes``.
- Decoding raises only ``CodecError``, whatever the input.
- Nesting is bounded in both directions, so that neither can exhaust the stack.

The type letters are those of RabbitMQ's errata to the AMQP 0-9-1 specification, and ``U``, which older clients use for
a signed 16-bit integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import isfinite
from struct import Struct
from struct import error as struct_error
from typing import Any

from reliable_mq.errors import ConfigurationError

#: The values of a table, nested up to ``MAX_ENCODE_DEPTH``.
FieldValue = object

MAX_ENCODE_DEPTH = 32  # deeper nesting is a mistake or a cycle; the broker accepts it, other clients do not
MAX_DECODE_DEPTH = 128
MAX_TIMESTAMP = 253_402_300_799  # the last second of the year 9999, the last one that datetime can represent

_UINT32 = Struct(">I")
_TAGGED_UINT32 = Struct(">cI")
_TAGGED_INT32 = Struct(">ci")
_TAGGED_INT64 = Struct(">cq")
_TAGGED_UINT64 = Struct(">cQ")
_TAGGED_DOUBLE = Struct(">cd")
_TAGGED_DECIMAL = Struct(">cBi")
_DECIMAL = Struct(">Bi")
_DECIMAL_DIGITS = 11  # more digits than an AMQP decimal can have: a number with so many does not fit
_UINT64 = Struct(">Q")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)

_MAX_CACHED_NAMES = 1024
_encoded_names: dict[str, bytes] = {}

_INTEGERS = {
    ord(letter): Struct(code)
    for letter, code in {
        "b": ">b",
        "B": ">B",
        "s": ">h",
        "U": ">h",
        "u": ">H",
        "I": ">i",
        "i": ">I",
        "l": ">q",
        "L": ">q",
    }.items()
}
_NUMBERS = _INTEGERS | {ord("f"): Struct(">f"), ord("d"): Struct(">d")}
_T_BOOL, _T_DECIMAL, _T_TIMESTAMP, _T_VOID = b"tDTV"
_T_STRING, _T_BYTES, _T_ARRAY, _T_TABLE = b"SxAF"

_FIXED_SIZES = {letter: number.size for letter, number in _NUMBERS.items()}
_FIXED_SIZES |= {_T_BOOL: 1, _T_DECIMAL: 5, _T_TIMESTAMP: 8, _T_VOID: 0}
_SIZED = frozenset((_T_STRING, _T_BYTES, _T_ARRAY, _T_TABLE))


class CodecError(ValueError):
    """The structure of bytes from the wire is broken. Internal: no user sees it."""


class _Unfit(Exception):
    """A value cannot be encoded. Each level of nesting adds its part of the path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str | int] = []


def encode_short_string(text: object, field: str) -> bytes:
    """Encode a short string with its length byte.

    Surrogate escapes, which decoding makes of bytes that are not UTF-8, become those bytes again.

    Raises:
        ConfigurationError: If ``text`` is not a ``str``, is over 255 bytes, or contains a NUL, which AMQP forbids here.
    """
    try:
        return _encode_short_string(text)
    except _Unfit as unfit:
        raise ConfigurationError(f"{field} {unfit.reason}") from unfit.__cause__


def _encode_short_string(text: object) -> bytes:
    if not isinstance(text, str):
        kind = type(text).__name__
        advice = ": give its name" if kind in ("Queue", "Exchange") else ""
        raise _Unfit(f"must be a str, not {kind}{advice}")
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _Unfit("cannot be encoded as UTF-8: it holds a lone surrogate") from error
    size = len(encoded)
    if size > 255:
        raise _Unfit(f"is {size} bytes long in UTF-8, and AMQP allows 255: shorten it")
    if 0 in encoded:
        raise _Unfit("holds a NUL character, which AMQP forbids: remove it")
    return size.to_bytes(1) + encoded


def encode_table(table: Mapping[str, FieldValue], field: str = "headers") -> bytes:
    """Encode a table with its 4-byte length.

    Args:
        table: A mapping of names to values: ``None``, ``bool``, ``int`` (64 bits), ``float`` (finite), ``Decimal`` (32
            bits unscaled), ``str``, bytes-like, aware ``datetime`` (cut to whole seconds), lists, tuples and mappings.
        field: The table's name in errors.

    Raises:
        ConfigurationError: If AMQP or RabbitMQ does not accept a name or a value. The message names the entry.
    """
    try:
        return _encode_table(table, 1)
    except _Unfit as unfit:
        where = "".join(f"[{step!r}]" for step in reversed(unfit.path))
        raise ConfigurationError(f"{field}{where} {unfit.reason}") from unfit.__cause__


# Each encoder below takes a value and the depth of the table or array that contains it.


def _encode_table(table: Mapping[str, FieldValue], depth: int) -> bytes:
    if depth > MAX_ENCODE_DEPTH:
        raise _Unfit(f"is nested deeper than {MAX_ENCODE_DEPTH} levels: flatten it")
    pieces: list[bytes] = []
    name = ""
    try:
        for name, value in table.items():
            pieces.append(_encoded_names.get(name) or _encode_name(name))
            pieces.append((_ENCODERS.get(value.__class__) or _encoder_of(value))(value, depth))
    except _Unfit as unfit:
        unfit.path.append(name)
        raise
    body = b"".join(pieces)
    return _UINT32.pack(len(body)) + body


def _encode_name(name: str) -> bytes:
    try:
        encoded = _encode_short_string(name)
    except _Unfit as unfit:
        unfit.reason = f"has a name that {unfit.reason}"
        raise
    if len(_encoded_names) >= _MAX_CACHED_NAMES:
        _encoded_names.clear()
    _encoded_names[name] = encoded
    return encoded


def _encode_array(items: Sequence[FieldValue], depth: int) -> bytes:
    if depth >= MAX_ENCODE_DEPTH:
        raise _Unfit(f"is nested deeper than {MAX_ENCODE_DEPTH} levels: flatten it")
    pieces: list[bytes] = []
    try:
        for item in items:
            encoder = _ENCODERS.get(item.__class__) or _encoder_of(item)
            pieces.append(encoder(item, depth + 1))
    except _Unfit as unfit:
        unfit.path.append(len(pieces))
        raise
    body = b"".join(pieces)
    return _TAGGED_UINT32.pack(b"A", len(body)) + body


def _encode_nested_table(table: Mapping[str, FieldValue], depth: int) -> bytes:
    return b"F" + _encode_table(table, depth + 1)


def _encode_string(value: str, _: int) -> bytes:
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise _Unfit("cannot be encoded as UTF-8: it holds a lone surrogate") from error
    return _TAGGED_UINT32.pack(b"S", len(encoded)) + encoded


def _encode_bytes(value: bytes | bytearray | memoryview, _: int) -> bytes:
    encoded = bytes(value)
    return _TAGGED_UINT32.pack(b"x", len(encoded)) + encoded


def _encode_bool(value: bool, _: int) -> bytes:
    return b"t\1" if value else b"t\0"


def _encode_none(_value: None, _: int) -> bytes:
    return b"V"


def _encode_int(value: int, _: int) -> bytes:
    if -0x8000_0000 <= value <= 0x7FFF_FFFF:
        return _TAGGED_INT32.pack(b"I", value)
    try:
        return _TAGGED_INT64.pack(b"l", value)
    except struct_error as error:
        raise _Unfit("does not fit into 64 bits: send it as str") from error


def _encode_float(value: float, _: int) -> bytes:
    if not isfinite(value):
        raise _Unfit(f"is {value}, over which RabbitMQ closes the connection: leave it out")
    return _TAGGED_DOUBLE.pack(b"d", value)


def _encode_decimal(value: Decimal, _: int) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise _Unfit(f"is {value}, and AMQP carries finite decimals only: leave it out")
    unscaled = int("".join(map(str, digits[:_DECIMAL_DIGITS])))
    places = -exponent
    if -10 < places < 0:
        unscaled *= 10**-places
        places = 0
    try:
        return _TAGGED_DECIMAL.pack(b"D", places, -unscaled if sign else unscaled)
    except struct_error as error:
        raise _Unfit("does not fit an AMQP decimal (32 bits, at most 255 places): send it as str") from error


def _encode_datetime(value: datetime, _: int) -> bytes:
    return _TAGGED_UINT64.pack(b"T", _seconds(value))


_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
    str: _encode_string,
    bool: _encode_bool,
    int: _encode_int,
    float: _encode_float,
    type(None): _encode_none,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    memoryview: _encode_bytes,
    datetime: _encode_datetime,
    Decimal: _encode_decimal,
    list: _encode_array,
    tuple: _encode_array,
    dict: _encode_nested_table,
}


def _encoder_of(value: FieldValue) -> Callable[[Any, int], bytes]:
    """Return the encoder for a value whose class derives from a known one."""
    if isinstance(value, Mapping):
        return _encode_nested_table
    for known, encoder in _ENCODERS.items():
        if isinstance(value, known):
            return encoder
    raise _Unfit(f"is a {type(value).__name__}, which has no AMQP type: convert it, for example to str")


def encode_timestamp(value: object, field: str) -> bytes:
    """Encode an aware datetime as whole seconds since 1970.

    Raises:
        ConfigurationError: If ``value`` is not a datetime, is naive (its seconds would depend on the reader), or lies
            before 1970.
    """
    if not isinstance(value, datetime):
        raise ConfigurationError(f"{field} must be an aware datetime, not {type(value).__name__}")
    try:
        return _UINT64.pack(_seconds(value))
    except _Unfit as unfit:
        raise ConfigurationError(f"{field} {unfit.reason}") from None


def _seconds(value: datetime) -> int:
    if value.utcoffset() is None:
        raise _Unfit("has no time zone: use e.g. datetime.now(timezone.utc)")
    seconds = (value - _EPOCH) // _SECOND
    if seconds < 0:
        raise _Unfit("lies before 1970, which AMQP timestamps cannot show: send it as str")
    return seconds


def decode_timestamp(seconds: int) -> datetime | int:
    """Return the seconds as an aware UTC datetime, or unchanged beyond the year 9999."""
    if seconds > MAX_TIMESTAMP:
        return seconds
    return datetime.fromtimestamp(seconds, UTC)


def decode_table(data: bytes) -> dict[str, FieldValue]:
    """Decode a table with its 4-byte length, which must fill `data`.

    The last of several entries with the same name counts.

    Raises:
        CodecError: If the structure is broken, has an unknown type letter, or nests deeper than 128 levels.
    """
    if len(data) < 4 or _UINT32.unpack_from(data)[0] != len(data) - 4:
        raise CodecError("the length of the table does not match its bytes")
    try:
        return _read_table(data, 4, len(data), 1)
    except (struct_error, IndexError) as error:
        raise CodecError("truncated table") from error


def _read_table(data: bytes, offset: int, end: int, depth: int) -> dict[str, FieldValue]:
    if depth > MAX_DECODE_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DECODE_DEPTH} levels")
    table: dict[str, FieldValue] = {}
    while offset < end:
        start = offset + 1
        offset = start + data[offset]
        name = data[start:offset].decode("utf-8", "surrogateescape")
        table[name], offset = _read_value(data, offset, end, depth)
    return table


def _read_array(data: bytes, offset: int, end: int, depth: int) -> list[FieldValue]:
    if depth > MAX_DECODE_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DECODE_DEPTH} levels")
    items: list[FieldValue] = []
    while offset < end:
        item, offset = _read_value(data, offset, end, depth)
        items.append(item)
    return items


def _read_value(data: bytes, offset: int, end: int, depth: int) -> tuple[FieldValue, int]:
    """Return the value at `offset`, and the offset of its end, at most `end`."""
    letter = data[offset]
    start = offset + 1
    value: FieldValue
    if letter in _SIZED:
        start += 4
        stop = start + _UINT32.unpack_from(data, offset + 1)[0]
        if stop > end:
            raise CodecError("a value reaches beyond its table")
        if letter == _T_STRING:
            value = _read_string(data[start:stop])
        elif letter == _T_TABLE:
            value = _read_table(data, start, stop, depth + 1)
        elif letter == _T_ARRAY:
            value = _read_array(data, start, stop, depth + 1)
        else:
            value = data[start:stop]
        return value, stop
    try:
        stop = start + _FIXED_SIZES[letter]
    except KeyError:
        raise CodecError(f"unknown type letter {letter:#04x}") from None
    if stop > end:
        raise CodecError("a value reaches beyond its table")
    if letter in _NUMBERS:
        value = _NUMBERS[letter].unpack_from(data, start)[0]
    elif letter == _T_BOOL:
        value = data[start] != 0
    elif letter == _T_TIMESTAMP:
        value = decode_timestamp(int.from_bytes(data[start:stop]))
    elif letter == _T_DECIMAL:
        places, unscaled = _DECIMAL.unpack_from(data, start)
        value = Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -places))
    else:
        value = None
    return value, stop


def _read_string(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def walk_table(data: bytes, offset: int, end: int) -> list[tuple[bytes, int, int]]:
    """Return (name, start, end) of each entry of the table in ``data[offset:end]``.

    Raises:
        CodecError: If the entries do not end where the table does, or one has an unknown type letter.
    """
    entries: list[tuple[bytes, int, int]] = []
    while offset < end:
        start = offset
        offset += 1 + data[start]
        name = data[start + 1 : offset]
        if offset >= end:
            raise CodecError("an entry reaches beyond its table")
        letter = data[offset]
        if letter in _SIZED:
            if offset + 5 > end:
                raise CodecError("an entry reaches beyond its table")
            offset += 5 + _UINT32.unpack_from(data, offset + 1)[0]
        elif letter in _FIXED_SIZES:
            offset += 1 + _FIXED_SIZES[letter]
        else:
            raise CodecError(f"unknown type letter {letter:#04x}")
        entries.append((name, start, offset))
    if offset != end:
        raise CodecError("an entry reaches beyond its table")
    return entries


def find_entry(data: bytes, offset: int, end: int, name: bytes) -> int:
    """Return the position of an entry of the table in ``data[offset:end]``, or -1.

    The name, which is encoded with its length byte, is searched for, and only the entries before it are walked. The
    same bytes within a value do not count. The last of several entries with the same name counts.

    Raises:
        CodecError: If the table is broken up to the entry.
    """
    found = -1
    at = data.find(name, offset, end)
    try:
        while at >= 0:
            while offset < at:
                offset += 1 + data[offset]
                letter = data[offset]
                if letter in _SIZED:
                    offset += 5 + _UINT32.unpack_from(data, offset + 1)[0]
                else:
                    offset += 1 + _FIXED_SIZES[letter]
            if offset == at:
                found = at
            at = data.find(name, max(offset, at + 1), end)
    except (IndexError, KeyError, struct_error) as error:
        raise CodecError("the table is broken") from error
    return found


def find_integer(data: bytes, offset: int, end: int, name: bytes) -> int | None:
    """Return an integer of the table in ``data[offset:end]``, by `find_entry`.

    None if there is none, if it is no integer, or if the table is broken up to it.
    """
    try:
        at = find_entry(data, offset, end, name)
        if at < 0:
            return None
        start = at + len(name) + 1
        number = _INTEGERS.get(data[start - 1])
        return number.unpack_from(data, start)[0] if number and start + number.size <= end else None
    except (CodecError, IndexError, struct_error):
        return None
