"""Field tables: this codec, pika and pamqp read each other's tables.

No input crashes the decoder.
"""

from __future__ import annotations

import enum
import struct
from collections import UserDict
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pamqp.decode
import pamqp.encode
import pika.data
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reliable_mq.codec import CodecError, decode_table, encode_table
from reliable_mq.codec import tables as module
from reliable_mq.codec.tables import walk_table
from reliable_mq.errors import ConfigurationError


def naive(year: int) -> datetime:
    return datetime(year, 1, 2, tzinfo=UTC).replace(tzinfo=None)


names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)
integers = st.integers(-(2**63), 2**63 - 1)
datetimes = st.datetimes(
    naive(1970),
    naive(9999),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))]),
).map(lambda moment: moment.replace(microsecond=0))
decimals = st.builds(
    lambda unscaled, places: Decimal(unscaled).scaleb(-places), st.integers(-(2**31), 2**31 - 1), st.integers(0, 255)
)


def tables_of(*scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        st.one_of(*scalars),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=12,
    )
    return st.dictionaries(names, values, max_size=6)


def _mutated(table: dict[str, Any], at: int, patch: bytes) -> bytes:
    raw = encode_table(table)
    at %= len(raw)
    return raw[:at] + patch + raw[at + 1 :]


plain = (st.none(), st.booleans(), integers, st.text(st.characters(codec="utf-8")))
floats = st.floats(allow_nan=False, allow_infinity=False)
everything = tables_of(*plain, st.binary(), floats, datetimes, decimals)


def entry(letter: bytes, value: bytes, name: bytes = b"k") -> bytes:
    """Return a table with one entry."""
    body = bytes((len(name),)) + name + letter + value
    return struct.pack(">I", len(body)) + body


def nested(levels: int, *, innermost: bytes = b"") -> bytes:
    """Return `levels` tables, nested in each other."""
    table = struct.pack(">I", len(innermost)) + innermost
    for _ in range(levels - 1):
        table = entry(b"F", table)
    return table


@given(everything)
def test_a_table_round_trips_with_equal_values_and_types(table: dict[str, Any]) -> None:
    decoded = decode_table(encode_table(table))
    assert decoded == table
    assert _types(decoded) == _types(table)


def _types(value: object) -> object:
    if isinstance(value, dict):
        return {name: _types(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return type(value)


@given(tables_of(*plain, st.binary(), datetimes))
def test_writes_byte_for_byte_what_pika_writes(table: dict[str, Any]) -> None:
    pieces: list[bytes] = []
    pika.data.encode_table(pieces, table)
    assert encode_table(table) == b"".join(pieces)


@given(tables_of(*plain, decimals))
def test_reads_what_pika_writes_and_pika_reads_what_it_writes(table: dict[str, Any]) -> None:
    pieces: list[bytes] = []
    try:
        pika.data.encode_table(pieces, table)
    except struct.error:  # pika rounds a decimal by the context, which may make it too large
        pieces = [encode_table(table)]
    theirs = b"".join(pieces)
    assert decode_table(theirs) == pika.data.decode_table(theirs, 0)[0]
    ours = encode_table(table)
    assert pika.data.decode_table(ours, 0)[0] == decode_table(ours) == table


@given(
    tables_of(
        *plain,
        floats,
        st.builds(
            lambda unscaled, places: Decimal(unscaled).scaleb(-places), st.integers(0, 2**31 - 1), st.integers(0, 9)
        ),
        st.binary().map(bytearray),
        datetimes.filter(lambda moment: moment.year < 2106),  # pamqp reads later times as milliseconds
    )
)
def test_pamqp_reads_what_it_writes(table: dict[str, Any]) -> None:
    ours = encode_table(table)
    assert pamqp.decode.field_table(ours) == (len(ours), table)


@given(
    tables_of(
        *plain,
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.integers(-(2**31), 2**31 - 1).map(lambda unscaled: Decimal(unscaled).scaleb(-3)),
        st.binary().map(bytearray),
        datetimes,
    )
)
def test_reads_what_pamqp_writes(table: dict[str, Any]) -> None:
    assert decode_table(pamqp.encode.field_table(table)) == table


@pytest.mark.parametrize(
    ("letter", "value", "expected"),
    [
        (b"t", b"\x00", False),
        (b"t", b"\x02", True),
        (b"b", b"\xff", -1),
        (b"B", b"\xff", 255),
        (b"s", b"\xff\xfe", -2),
        (b"U", b"\xff\xfe", -2),
        (b"u", b"\xff\xfe", 65534),
        (b"I", b"\xff\xff\xff\xfd", -3),
        (b"i", b"\xff\xff\xff\xfd", 2**32 - 3),
        (b"l", b"\xff" * 8, -1),
        (b"L", b"\xff" * 8, -1),
        (b"f", struct.pack(">f", 0.75), 0.75),
        (b"d", struct.pack(">d", 0.1), 0.1),
        (b"d", struct.pack(">d", float("inf")), float("inf")),
        (b"D", b"\x02\xff\xff\xff\x85", Decimal("-1.23")),
        (b"S", b"\0\0\0\2\xc3\xa9", "é"),
        (b"S", b"\0\0\0\2\xff\xfe", b"\xff\xfe"),
        (b"x", b"\0\0\0\2ab", b"ab"),
        (b"T", struct.pack(">Q", 1_700_000_000), datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (b"T", struct.pack(">Q", 253_402_300_799), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (b"T", struct.pack(">Q", 253_402_300_800), 253_402_300_800),
        (b"T", struct.pack(">Q", 1_700_000_000_000), 1_700_000_000_000),
        (b"T", b"\xff" * 8, 2**64 - 1),
        (b"V", b"", None),
        (b"A", b"\0\0\0\4b\1t\1", [1, True]),
        (b"F", entry(b"V", b""), {"k": None}),
    ],
)
def test_reads_every_type_letter_of_the_errata(letter: bytes, value: bytes, expected: object) -> None:
    """Signed and unsigned numbers and values without a Python type are as documented."""
    assert decode_table(entry(letter, value)) == {"k": expected}
    assert walk_table(entry(letter, value), 4, 7 + len(value)) == [(b"k", 4, 7 + len(value))]


def test_the_last_of_entries_with_the_same_name_counts() -> None:
    twice = entry(b"b", b"\1")[4:] + entry(b"b", b"\2")[4:]
    assert decode_table(struct.pack(">I", len(twice)) + twice) == {"k": 2}


def test_a_name_that_is_not_utf8_survives_both_ways() -> None:
    raw = entry(b"V", b"", name=b"\xff\xfe")
    assert decode_table(raw) == {"\udcff\udcfe": None}
    assert encode_table(decode_table(raw)) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\1",
        b"\0\0\0\0\0",
        entry(b"?", b""),
        entry(b"I", b"\0\0\0"),
        entry(b"S", b"\0\0\0\2a"),
        entry(b"S", b"\0\0"),
        entry(b"A", b"\0\0\0\1?"),
        entry(b"A", b"\0\0\0\2b"),
        entry(b"F", b"\0\0\0\3\1k"),
        b"\0\0\0\1\5",
        b"\0\0\0\2\1k",
    ],
)
def test_a_broken_structure_is_a_codec_error(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode_table(raw)


@pytest.mark.parametrize(
    "body", [b"\1k?", b"\5", b"\1", b"\1k", b"\1kS", b"\1kS\0\0\0", b"\1kS\0\0\0\2a", b"\1kI\0\0\0"]
)
def test_entries_that_do_not_fit_their_table_cannot_be_walked(body: bytes) -> None:
    """The table may end there, or be followed by other bytes."""
    for raw in (body, body + bytes(10)):
        with pytest.raises(CodecError):
            walk_table(raw, 0, len(body))


@given(st.binary(max_size=60) | st.builds(_mutated, everything, st.integers(0), st.binary(max_size=3)))
@example(nested(5000))
@example(entry(b"A", b"\0\0\0\0") * 3)
def test_reading_anything_gives_a_table_or_a_codec_error(data: bytes) -> None:
    """A table that can be read can also be walked, with the same names."""
    data = struct.pack(">I", max(0, len(data) - 4)) + data[4:]
    try:
        table = decode_table(data)
    except CodecError:
        return
    entries = walk_table(data, 4, len(data))
    assert {name.decode("utf-8", "surrogateescape") for name, _, _ in entries} == set(table)
    assert b"".join(data[start:end] for _, start, end in entries) == data[4:]


def test_nesting_is_read_to_128_levels_and_refused_beyond() -> None:
    decode_table(nested(128))
    for levels in (129, 3000):
        with pytest.raises(CodecError, match="128 levels"):
            decode_table(nested(levels))
    array = b""
    for _ in range(128):
        array = b"A" + struct.pack(">I", len(array)) + array
    with pytest.raises(CodecError, match="128 levels"):
        decode_table(entry(array[:1], array[1:]))


def test_nesting_is_written_to_32_levels_and_a_cycle_is_refused() -> None:
    table: dict[str, Any] = {}
    for _ in range(31):
        table = {"k": table}
    assert encode_table(table) == nested(32)
    with pytest.raises(ConfigurationError, match="nested deeper than 32 levels"):
        encode_table({"k": table})
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigurationError, match=r"headers\['c'\]\[0\]\[0\].* nested deeper than 32 levels"):
        encode_table({"c": cycle})


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "like"),
    [
        ((1, (2,)), [1, [2]]),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (UserDict(a=1), {"a": 1}),
        (Colour.RED, "red"),
        (Level.LOW, 1),
        (2**31 - 1, 2**31 - 1),
        (Decimal("1.10"), Decimal("1.10")),
        (Decimal("1E+5"), Decimal(100_000)),
        (datetime(2024, 1, 1, 1, 2, 3, 999_999, tzinfo=UTC), datetime(2024, 1, 1, 1, 2, 3, tzinfo=UTC)),
    ],
)
def test_a_value_is_encoded_as_the_standard_type_it_resembles(value: object, like: object) -> None:
    assert encode_table({"k": value}) == encode_table({"k": like})
    assert decode_table(encode_table({"k": value})) == {"k": like}


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"k": float("nan")}, "headers['k'] is nan"),
        ({"k": float("-inf")}, "headers['k'] is -inf"),
        ({"k": 2**63}, "headers['k'] does not fit into 64 bits"),
        ({"k": -(2**63) - 1}, "headers['k'] does not fit into 64 bits"),
        ({"k": Decimal("NaN")}, "headers['k'] is NaN"),
        ({"k": Decimal("Infinity")}, "headers['k'] is Infinity"),
        ({"k": Decimal(2**31)}, "does not fit an AMQP decimal"),
        ({"k": Decimal("1E+10")}, "does not fit an AMQP decimal"),
        ({"k": Decimal("1E-256")}, "does not fit an AMQP decimal"),
        ({"k": Decimal("1" * 5000)}, "does not fit an AMQP decimal"),
        ({"k": naive(2024)}, "headers['k'] has no time zone"),
        ({"k": datetime(1969, 12, 31, tzinfo=UTC)}, "lies before 1970"),
        ({"k": "\ud800"}, "headers['k'] cannot be encoded as UTF-8"),
        ({"k": object()}, "headers['k'] is a object"),
        ({"k": {1, 2}}, "headers['k'] is a set"),
        ({"a": [0, {"b": object()}]}, "headers['a'][1]['b'] is a object"),
        ({1: "v"}, "headers[1] has a name that must be a str, not int"),
        ({"a": {b"b": "v"}}, "headers['a'][b'b'] has a name that must be a str, not bytes"),
        ({"é" * 128: 1}, "is 256 bytes long"),
        ({"a\0b": 1}, "holds a NUL"),
        ({"\ud800": 1}, "lone surrogate"),
    ],
)
def test_what_the_broker_would_not_take_is_refused_by_its_place(table: dict[Any, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        encode_table(table)
    assert text in str(caught.value)


def test_a_name_may_have_255_bytes() -> None:
    assert decode_table(encode_table({"x" * 255: 1})) == {"x" * 255: 1}


def test_remembered_names_are_bounded() -> None:
    for number in range(3000):
        encode_table({f"name-{number}": None})
    assert len(module._encoded_names) <= 1024
