"""Properties, written and read like pika and pamqp; rewriting keeps other bytes."""

from __future__ import annotations

import operator
import struct
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pamqp.commands
import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import (
    CodecError,
    Properties,
    encode_properties,
    encode_property,
    encode_table,
    encode_values,
    find_header,
    integer_header,
    join_properties,
    plain_message_id,
    plain_properties,
    plain_properties_head,
    rewrite_properties,
    split_properties,
    stream_offset,
)
from reliable_mq.codec.properties import PROPERTY_NAMES
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message


def naive(year: int) -> datetime:
    return datetime(year, 1, 2, tzinfo=UTC).replace(tzinfo=None)


STRINGS = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=40)
# RabbitMQ only accepts a list of routing keys as CC or BCC, and so does a message.
carbon_copies = st.dictionaries(st.sampled_from(["CC", "BCC"]), st.lists(texts, max_size=2), max_size=2)
header_tables = st.builds(
    operator.or_,
    st.dictionaries(
        texts.filter(lambda name: name not in {"CC", "BCC"}),
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts,
        max_size=4,
    ),
    st.just({}) | carbon_copies,
)
moments = st.datetimes(naive(1970), naive(2105), timezones=st.just(UTC)).map(
    lambda moment: moment.replace(microsecond=0)
)
message_properties = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(STRINGS, texts),
        "headers": header_tables,
        "persistent": st.booleans(),
        "priority": st.integers(0, 255),
        "expiration": st.integers(0, 315_360_000_000).map(lambda milliseconds: milliseconds / 1000),
        "timestamp": moments,
    },
)


@dataclass
class Plain:
    """The attributes of a message that `encode_properties` uses."""

    message_id: str
    encoded_properties: bytes | None = None


def encoded(properties: dict[str, Any]) -> bytes:
    return encode_values([properties.get(name) for name in PROPERTY_NAMES])


def as_on_the_wire(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a message with the names and values of the protocol."""
    wire = {**properties}
    if "persistent" in wire:
        wire["delivery_mode"] = 2 if wire.pop("persistent") else 1
    if "expiration" in wire:
        wire["expiration"] = str(round(wire["expiration"] * 1000))
    return wire


@given(message_properties)
def test_pika_reads_what_it_writes_and_writes_the_same(properties: dict[str, Any]) -> None:
    raw = encoded(properties)
    wire = as_on_the_wire(properties)
    theirs = pika.BasicProperties()
    theirs.decode(raw)
    seen = {name: value for name, value in vars(theirs).items() if value is not None}
    if "timestamp" in wire:
        wire["timestamp"] = round(wire["timestamp"].timestamp())
    assert seen == wire
    assert b"".join(pika.BasicProperties(**wire).encode()) == raw


@given(message_properties)
def test_pamqp_reads_what_it_writes(properties: dict[str, Any]) -> None:
    raw = encoded(properties)
    theirs = pamqp.commands.Basic.Properties()
    flags = struct.unpack_from(">H", raw)[0]
    theirs.unmarshal(flags, raw[2:])
    seen = {name.replace("message_type", "type"): value for name, value in theirs if value not in (None, "")}
    assert seen == as_on_the_wire(properties)


@given(message_properties)
def test_what_is_written_is_read_back(properties: dict[str, Any]) -> None:
    raw = encoded(properties)
    view = Properties(raw)
    wire = as_on_the_wire(properties)
    for name in (*STRINGS, "delivery_mode", "priority", "expiration", "timestamp", "cluster_id"):
        assert getattr(view, name) == wire.get(name)
    assert view.headers == wire.get("headers", {})
    assert view.headers is view.headers
    assert view.raw is raw


def test_a_plain_message_is_written_as_pika_writes_it() -> None:
    """The id may be long, or not ASCII."""
    for message_id in ("0190a5f2-6b7e-7c3d-9a41-3f5e2d1c0b9a", "x" * 255, "é"):
        theirs = pika.BasicProperties(delivery_mode=2, message_id=message_id)
        assert encode_properties(Plain(message_id)) == b"".join(theirs.encode())


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"\x10\x80\x02\x02m1", "m1"),
        (b"\x10\x80\x02\x00", ""),
        (b"\x10\x80\x02\x02\xffm", "\udcffm"),
        (b"\x10\x80\x01\x02m1", None),
        (b"\x00\x80\x02m1", None),
        (b"\x10\x80\x02\x02m", None),
        (b"\x10\x80\x02\x02m12", None),
        (b"\x10\x80\x02" + b"\x10" * 300, None),
        (b"\x10\x80", None),
        (b"", None),
    ],
)
def test_the_id_of_a_plain_message_is_found_without_decoding(raw: bytes, found: str | None) -> None:
    """No id is found if the message is not persistent, has more, or is broken."""
    assert plain_message_id(raw) == found


@given(st.binary(max_size=255).map(lambda text: b"\x10\x80\x02" + bytes((len(text),)) + text))
def test_the_id_of_a_plain_message_is_the_one_that_is_decoded(raw: bytes) -> None:
    assert plain_message_id(raw) == Properties(raw).message_id


def test_encoded_properties_are_sent_as_they_are() -> None:
    raw = join_properties({"priority": b"\7"})
    assert encode_properties(Plain("id", raw)) is raw
    assert encode_properties(Plain("id", raw), {}) is raw


def test_extra_headers_are_set_on_top() -> None:
    plain = Properties(encode_properties(Plain("id"), {"x": True}))
    assert (plain.message_id, plain.delivery_mode, plain.headers) == ("id", 2, {"x": True})
    own = encoded({"headers": {"a": 1, "x": 2}})
    assert Properties(encode_properties(Plain("id", own), {"x": 3})).headers == {"a": 1, "x": 3}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *((name, 5, f"{name} must be a str, not int") for name in STRINGS),
        *((name, "x" * 256, f"{name} is 256 bytes long") for name in STRINGS),
        *((name, "a\0", f"{name} holds a NUL") for name in STRINGS),
        ("app_id", "\ud800", "app_id cannot be encoded as UTF-8"),
        ("message_id", "", "message_id must not be empty"),
        ("headers", [("a", 1)], "headers must be a mapping"),
        ("headers", {"a": object()}, "headers['a'] is a object"),
        ("headers", {"CC": "q"}, "headers['CC'] must be a list"),
        ("headers", {"CC": None}, "headers['CC'] must be a list"),
        ("headers", {"BCC": ["q", 1]}, "headers['BCC'] must be a list"),
        ("priority", 256, "priority must be"),
        ("priority", -1, "priority must be"),
        ("priority", True, "priority must be"),
        ("priority", 1.0, "priority must be"),
        ("expiration", -0.001, "expiration must be"),
        ("expiration", "5", "expiration must be"),
        ("expiration", True, "expiration must be"),
        ("expiration", float("nan"), "expiration must be"),
        ("expiration", float("inf"), "expiration must be"),
        ("expiration", timedelta(seconds=-1), "expiration must be"),
        ("expiration", 315_360_000.001, "at most 315360000 seconds"),
        ("expiration", 10**400, "at most 315360000 seconds"),
        ("expiration", 1e308, "at most 315360000 seconds"),
        ("timestamp", 1_700_000_000, "timestamp must be an aware datetime, not int"),
        ("timestamp", naive(2024), "timestamp has no time zone"),
        ("timestamp", datetime(1960, 1, 1, tzinfo=UTC), "timestamp lies before 1970"),
        ("persistent", 1, "persistent must be True or False"),
    ],
)
def test_what_the_broker_would_not_take_is_refused_by_its_name(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        encode_property(name, value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "wire"),
    [
        (0, b"\x010"),
        (1.5, b"\x041500"),
        (0.1, b"\x03100"),
        (4.35, b"\x044350"),
        (0.0001, b"\x011"),
        (timedelta(minutes=1), b"\x0560000"),
        (315_360_000, b"\x0c315360000000"),
    ],
)
def test_an_expiration_goes_out_as_milliseconds(seconds: float | timedelta, wire: bytes) -> None:
    """The value is rounded, but never to 0, which has another meaning."""
    assert encode_property("expiration", seconds) == wire


def test_cc_and_bcc_may_be_lists_of_routing_keys() -> None:
    table = {"CC": ["a", "b"], "BCC": ("c",)}
    assert encode_property("headers", table) == encode_table(table)


def test_strings_that_are_not_utf8_survive_both_ways() -> None:
    raw = join_properties({"correlation_id": b"\2\xff\xfe"})
    assert Properties(raw).correlation_id == "\udcff\udcfe"
    assert encode_property("correlation_id", "\udcff\udcfe") == b"\2\xff\xfe"


def test_a_timestamp_beyond_the_year_9999_is_its_number() -> None:
    raw = join_properties({"timestamp": struct.pack(">Q", 1_700_000_000_000)})
    assert Properties(raw).timestamp == 1_700_000_000_000


def test_a_broken_header_table_leaves_other_properties_readable() -> None:
    view = Properties(join_properties({"headers": b"\0\0\0\3\1k?", "message_id": b"\2id"}))
    assert view.message_id == "id"
    with pytest.raises(CodecError):
        _ = view.headers


BROKEN = [
    b"",
    b"\x80",
    b"\x80\x00",
    b"\x80\x00\x02a",
    b"\x20\x00\0\0\0",
    b"\x20\x00\0\0\0\1",
    b"\x10\x00",
    b"\x00\x40\0\0\0\0\0\0\0",
    b"\x00\x00x",
    b"\x00\x01",
    b"\x00\x02",
]


@pytest.mark.parametrize("raw", BROKEN)
def test_broken_properties_are_a_codec_error(raw: bytes) -> None:
    for read in (
        split_properties,
        rewrite_properties,
        lambda it: Properties(it).message_id,
        lambda it: Properties(it).headers,
    ):
        with pytest.raises(CodecError):
            read(raw)


@given(
    st.binary(max_size=80)
    | st.builds(
        lambda raw, at, patch: raw[: at % len(raw)] + patch + raw[at % len(raw) + 1 :],
        message_properties.map(encoded),
        st.integers(0),
        st.binary(max_size=3),
    )
)
def test_reading_anything_gives_values_or_a_codec_error(raw: bytes) -> None:
    """Properties that can be split are joined to the same bytes."""
    try:
        segments = split_properties(raw)
    except CodecError:
        with pytest.raises(CodecError):
            _ = Properties(raw).priority
        return
    assert join_properties(segments) == raw
    assert rewrite_properties(raw) == raw
    view = Properties(raw)
    for name in segments:
        if name != "headers":
            assert getattr(view, name) is not None
    with suppress(CodecError):
        assert "headers" in segments or view.headers == {}


def table(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack(">I", len(body)) + body


def raw_entry(name: bytes, rest: bytes) -> bytes:
    return bytes((len(name),)) + name + rest


FLOAT = raw_entry(b"f", b"f" + struct.pack(">f", 0.75))
MILLISECONDS = raw_entry(b"ms", b"T" + struct.pack(">Q", 1_700_000_000_000))
NESTED = raw_entry(b"deep", b"F" + table(*[raw_entry(b"a", b"A\0\0\0\2?!")]))
NOT_UTF8 = raw_entry(b"\xff", b"S\0\0\0\1\xfe")


def test_what_the_protocol_has_retired_can_still_be_read() -> None:
    assert Properties(join_properties({"cluster_id": b"\1c"})).cluster_id == "c"


UNSIGNED = raw_entry(b"u", b"u\xff\xff")
TWICE = raw_entry(b"x", b"b\1"), raw_entry(b"x", b"b\2")


def test_rewriting_copies_other_headers_and_properties_unchanged() -> None:
    """Floats, milliseconds and undecodable values are copied.

    Our header comes last, and only once.
    """
    strange = {"content_type": b"\1\xff", "timestamp": b"\xff" * 8, "cluster_id": b"\1c", "type": b"\0"}
    raw = join_properties(
        {
            **strange,
            "headers": table(FLOAT, TWICE[0], MILLISECONDS, NESTED, TWICE[1], NOT_UTF8, UNSIGNED, MILLISECONDS),
            "expiration": b"\x015",
            "user_id": b"\1u",
        }
    )
    new = rewrite_properties(
        raw, set_headers={"x": 3}, drop_headers=["f", "\udcff", "absent"], clear=["user_id", "expiration", "app_id"]
    )
    assert split_properties(new) == {
        **strange,
        "headers": table(MILLISECONDS, NESTED, UNSIGNED, MILLISECONDS, raw_entry(b"x", b"I\0\0\0\3")),
    }


def test_rewriting_adds_a_header_table_and_removes_an_empty_one() -> None:
    raw = encode_properties(Plain("id"))
    with_table = rewrite_properties(raw, set_headers={"a": 1})
    assert Properties(with_table).headers == {"a": 1}
    assert rewrite_properties(with_table, drop_headers={"a"}) == raw
    assert rewrite_properties(raw, drop_headers={"a"}) == raw
    assert rewrite_properties(with_table, clear=["headers"]) == raw


def test_rewriting_puts_new_headers_before_an_unreadable_table() -> None:
    broken = FLOAT + raw_entry(b"q", b"?")
    raw = join_properties({"headers": table(broken), "message_id": b"\2id"})
    new = rewrite_properties(raw, set_headers={"a": 1}, drop_headers=["f"])
    assert split_properties(new) == {"headers": table(raw_entry(b"a", b"I\0\0\0\1"), broken), "message_id": b"\2id"}


def test_rewriting_refuses_a_header_that_cannot_be_encoded() -> None:
    with pytest.raises(ConfigurationError, match="headers"):
        rewrite_properties(b"\0\0", set_headers={"a": float("nan")})


@given(header_tables, header_tables, st.lists(texts, max_size=3))
def test_rewriting_headers_does_what_dictionaries_do(
    own: dict[str, Any], ours: dict[str, Any], dropped: list[str]
) -> None:
    dropped = [*dropped, *list(own)[:1]]
    raw = encoded({"headers": own, "message_id": "id"})
    new = Properties(rewrite_properties(raw, set_headers=ours, drop_headers=dropped))
    assert new.headers == {name: value for name, value in own.items() if name not in dropped} | ours
    assert new.message_id == "id"


def test_some_headers_are_read_though_others_cannot_be() -> None:
    """A value that cannot be decoded is skipped.

    A table whose entries cannot be separated raises an error.
    """
    broken = encode_table({"our-count": 3, "theirs": {"n": 1}, "our-name": "é"}).replace(b"\x01nI", b"\x01n?")
    properties = Properties(join_properties({"headers": broken}))
    with pytest.raises(CodecError):
        properties.headers  # noqa: B018
    assert properties.headers_beginning("our-") == {"our-count": 3, "our-name": "é"}
    assert properties.headers_beginning("no such") == {}
    assert Properties(join_properties({})).headers_beginning("our-") == {}
    with pytest.raises(CodecError):
        Properties(join_properties({"headers": b"\x00\x00\x00\x03\x05ab"})).headers_beginning("our-")


COUNT = raw_entry(b"n", b"I\0\0\0\3")
ENTRIES = (
    COUNT,
    *(raw_entry(b"n", rest) for rest in (b"b\xfe", b"l" + (2**40).to_bytes(8), b"S\0\0\0\1x", b"t\1", b"V")),
    raw_entry(b"s", b"S" + len(COUNT).to_bytes(4) + COUNT),
    raw_entry(b"t", b"F" + table(COUNT)),
    raw_entry(b"a", b"A" + table(b"F" + table(COUNT, COUNT))),
    *(FLOAT, UNSIGNED, *TWICE),
)


@given(
    entries=st.lists(st.sampled_from(ENTRIES), max_size=6),
    others=st.dictionaries(
        st.sampled_from(["content_type", "content_encoding", "message_id"]),
        st.sampled_from([b"\0", b"\x09" + raw_entry(b"n", b"I\0\0\0\7\0\0")]),
    ),
)
def test_an_integer_header_is_the_one_that_is_decoded(entries: list[bytes], others: dict[str, bytes]) -> None:
    """Other headers surround it, and values of any kind hold the same bytes."""
    value = Properties(raw := join_properties({**others, "headers": table(*entries)})).headers.get("n")
    assert integer_header("n")(raw) == (value if type(value) is int else None)
    last = max((i for i, entry in enumerate(entries) if entry.startswith(b"\x01n")), default=None)
    found = find_header(raw, b"\x01n")
    if last is None:
        assert found == -1
    else:
        assert raw[found:].startswith(b"".join(entries[last:]))


def test_the_position_of_a_header_needs_only_the_bytes_before() -> None:
    assert find_header(join_properties({"message_id": b"\x02\x01n"}), b"\x01n") == -1
    assert find_header(join_properties({"headers": table(COUNT, b"\x01x?")}), b"\x01n") == 6
    assert find_header(b"", b"\x01n") == -1
    for broken in (b"\x20\0\x01n", join_properties({"headers": table(b"\x01x?", COUNT)})):
        with pytest.raises(CodecError):
            find_header(broken, b"\x01n")


@pytest.mark.parametrize("before", [(), ("content_type",), ("content_encoding",), ("content_type", "content_encoding")])
def test_an_integer_header_is_found_behind_other_properties(before: tuple[str, ...]) -> None:
    others = dict.fromkeys(before, bytes((len(COUNT),)) + COUNT)
    raw = join_properties({**others, "headers": table(*ENTRIES[-7:], raw_entry(b"n", b"b\xfe"))})
    assert integer_header("n")(raw) == -2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x20\0",
        b"\x20\0\x01n",
        join_properties({"message_id": b"\x02\x01n"}),
        join_properties({"headers": table(b"\x01x?", COUNT)}),
        join_properties({"headers": table(b"\x01xS\0\0\1\0", COUNT)}),
        join_properties({"headers": table(COUNT[:2]), "message_id": b"\x02Ix"}),
        join_properties({"headers": table(COUNT[:-1]), "message_id": b"\x02xx"}),
        join_properties({"headers": table(), "message_id": bytes((len(COUNT),)) + COUNT}),
    ],
)
def test_broken_properties_have_no_integer_header(raw: bytes) -> None:
    """None of these bytes is a header of that name."""
    assert integer_header("n")(raw) is None


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_searching_anything_for_an_integer_raises_nothing(before: bytes, after: bytes) -> None:
    for flags in (b"\x20\0", b"\xe0\0"):
        assert isinstance(integer_header("n")(flags + before + b"\x01n" + after), int | None)


OFFSET = b"\x0fx-stream-offsetl" + (7 * 10**12).to_bytes(8)


@pytest.mark.parametrize(
    "headers",
    [
        table(OFFSET),
        table(b"\x05otherI\0\0\0\1", OFFSET),
        table(OFFSET, b"\x05otherI\0\0\0\1"),
        table(b"\x05otherS" + len(OFFSET).to_bytes(4) + OFFSET[:-1] + b"\0", OFFSET),  # the name occurs in a value, too
    ],
)
def test_the_offset_is_found_wherever_it_is(headers: bytes) -> None:
    """Other headers may surround it, and a value may look like it."""
    assert stream_offset(join_properties({"headers": headers})) == 7 * 10**12


@pytest.mark.parametrize(
    "headers",
    [None, table(), encode_table({"x-stream-offset": "7"}), table(b"\x0fx-stream-offset"), table(OFFSET[:-1])],
)
def test_a_delivery_without_one_comes_from_no_stream(headers: bytes | None) -> None:
    """The header is missing, of another type, or damaged."""
    assert stream_offset(join_properties({} if headers is None else {"headers": headers})) is None


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-1-2-01"}, {"a": "1", "b": "2"}])
@pytest.mark.parametrize("message_id", ["m", "x" * 255, "\udcff"])
def test_a_plain_message_with_headers_is_encoded_in_two_parts(headers: dict[str, str], message_id: str) -> None:
    message = Message(b"", message_id=message_id) if message_id.isascii() else Message._from_wire(b"", None, message_id)
    assert plain_properties(plain_properties_head(headers), message_id) == encode_properties(message, headers)
