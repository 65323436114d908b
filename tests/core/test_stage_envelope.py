"""Entries of a stage: the originals are restored byte for byte."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import Properties, RawDelivery, encode_table, join_properties, split_properties
from reliable_mq.core.stage.envelope import (
    HEADER,
    MOST_MESSAGES,
    UNKNOWN,
    Entry,
    Mark,
    identity,
    marker,
    message_id_of,
    messages_in,
    original_parts,
    staged,
    unstaged,
)
from reliable_mq.errors import ConfigurationError
from tests.core.deliveries import BROKEN_TABLE, properties, short

EPOCH = b"12345678"
ALL = properties(
    headers={"a": [1, {"b": 2.5}], "CC": ["other"]},
    message_id="m-1",
    content_type=short("a/b"),
    content_encoding=short("gzip"),
    delivery_mode=b"\1",
    priority=b"\3",
    correlation_id=short("c"),
    reply_to=short("r"),
    expiration=short("60000"),
    timestamp=(1_600_000_000).to_bytes(8),
    type=short("t"),
    user_id=short("guest"),
    app_id=short("app"),
)


def delivery(raw: bytes, body: bytes = b"body", *, redelivered: bool = False, key: str = "key") -> RawDelivery:
    return RawDelivery("work-1", 1, redelivered, "exchange", key, raw, body)


def entry_of(*deliveries: RawDelivery, frame_max: int = 131_072) -> tuple[bytes, bytes]:
    parts = [part for each in deliveries for part in original_parts(each)]
    return staged("orders", parts, len(deliveries), frame_max, low=42, epoch=EPOCH)


def essence(each: RawDelivery) -> tuple[object, ...]:
    return each.redelivered, each.exchange, each.routing_key, each.properties, each.body


def from_a_stream(raw: bytes, offset: int = 7) -> bytes:
    """Return the properties of an entry as RabbitMQ delivers them.

    There is one more header, and bytes that are UTF-8 are a string.
    """
    segments = split_properties(raw)
    table = segments["headers"]
    name, value = table[4 : 5 + len(HEADER)], Properties(raw).headers[HEADER]
    assert isinstance(value, bytes)
    with suppress(UnicodeDecodeError):
        table = table.replace(name + b"x", name + (b"S" if value.decode() else b"x"))
    item = encode_table({"x-stream-offset": offset})[4:]
    segments["headers"] = (len(table) - 4 + len(item)).to_bytes(4) + item + table[4:]
    return join_properties(segments)


def test_an_entry_is_persistent_and_has_one_header() -> None:
    """The properties of the originals are in its body."""
    raw, body = entry_of(delivery(ALL), delivery(ALL))
    entry = Properties(raw)
    assert list(entry.headers) == [HEADER]
    assert (entry.delivery_mode, entry.message_id, entry.content_type) == (2, None, None)
    assert body.count(ALL) == 2


def test_an_entry_of_one_message_has_its_properties_but_three() -> None:
    """Other programs see them, and its body.

    The entry is persistent, and our header is its only one.
    """
    raw, body = entry_of(delivery(ALL))
    entry = Properties(raw)
    assert body == b"body"
    assert list(entry.headers) == [HEADER]
    assert (entry.message_id, entry.content_type, entry.content_encoding) == ("m-1", "a/b", "gzip")
    assert (entry.correlation_id, entry.reply_to, entry.type, entry.app_id) == ("c", "r", "t", "app")
    assert (entry.user_id, entry.expiration, entry.delivery_mode, entry.priority) == (None, None, 2, 3)
    assert entry.timestamp == Properties(ALL).timestamp


def test_a_long_id_is_on_the_entry() -> None:
    """The size of a field is no text."""
    assert Properties(entry_of(delivery(properties(message_id="m" * 200)))[0]).message_id == "m" * 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"\x80\x00\x09short",
        ALL + b"more",
        b"\0\1\0\0",
        properties(headers=BROKEN_TABLE)[:-2],
        properties(message_id="m", correlation_id=b"\2\xff\xfe"),
        properties(message_id="m", content_type=b"\2\xff\xfe"),
        properties(message_id="m", app_id=b"\2\xff\xfe"),
    ],
)
def test_broken_properties_and_other_text_are_not_on_the_entry(raw: bytes) -> None:
    """RabbitMQ may be unable to convert text that is not ASCII. They only travel in our header."""
    found, body = entry_of(delivery(raw))
    entry = unstaged(found, body)
    assert Properties(found).message_id is None
    assert entry is not None
    assert [essence(each) for each in entry.originals] == [essence(delivery(raw))]


def test_a_time_that_cannot_be_converted_is_not_on_the_entry() -> None:
    """An example is a time in microseconds."""
    entry = Properties(entry_of(delivery(properties(message_id="m", timestamp=b"\xff" * 8)))[0])
    assert (entry.message_id, entry.timestamp) == ("m", None)


def test_properties_that_do_not_fit_into_a_frame_are_in_the_body() -> None:
    """RabbitMQ would close the connection."""
    original = delivery(properties(message_id="m", headers={"long": "x" * 5000}))
    raw, body = entry_of(original, frame_max=4096)
    entry = unstaged(raw, body)
    assert entry is not None
    assert [essence(each) for each in entry.originals] == [essence(original)]
    assert len(raw) < 200
    assert entry_of(original, frame_max=0)[1] == b"body"


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize("raw", [ALL, properties(), properties(message_id="m")])
def test_the_originals_come_back_whole(raw: bytes, redelivered: bool) -> None:
    """Properties, body, exchange, routing key and queue are restored, in order.

    Headers added by the broker do not matter.
    """
    keys = ("key", "\udcff no text", "k" * 255)
    several = [delivery(raw, b"%d" % len(key), redelivered=redelivered, key=key) for key in keys]
    for originals in (several, several[:1], several[1:2], several[2:]):
        properties_of_entry, body = entry_of(*originals)
        entry = unstaged(from_a_stream(properties_of_entry), body)
        assert entry is not None
        assert (entry.mark, entry.queue) == (Mark(42, EPOCH, False), "orders")
        assert [essence(each) for each in entry.originals] == [essence(each) for each in originals]
        assert messages_in(from_a_stream(properties_of_entry)) == len(originals)


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=50)), min_size=1, max_size=5))
def test_any_properties_come_back_whole(messages: list[tuple[bytes, bytes]]) -> None:
    """This includes invalid properties, which are never decoded."""
    raw, body = entry_of(*(delivery(*each) for each in messages))
    entry = unstaged(raw, body)
    assert entry is not None
    assert [(each.properties, each.body) for each in entry.originals] == messages
    split_properties(raw)


@given(st.binary(max_size=100), st.integers(0, 5))
def test_any_other_body_is_read_or_no_entry(body: bytes, messages: int) -> None:
    """What is read is as long as the body."""
    value = bytes(Properties(entry_of(*[delivery(b"")] * 2)[0]).headers[HEADER])
    number = value.index((2).to_bytes(4) + EPOCH)
    raw = properties(headers={HEADER: value[:number] + messages.to_bytes(4) + value[number + 4 :]})
    entry = unstaged(raw, body)
    if entry is not None:
        assert sum(len(part) for each in entry.originals for part in original_parts(each)) == len(body)
        assert len(entry.originals) == messages


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (ALL, b"m-1"),
        (properties(), None),
        (properties(message_id=""), b""),
        (properties(message_id="m", headers=BROKEN_TABLE), b"m"),
        (properties(message_id="m", timestamp=b"\xff" * 8), b"m"),
        (properties(message_id="m", content_type=b"\2\xff\xfe", app_id=b"\2\xff\xfe"), b"m"),
        (b"", None),
        (b"\x80", None),
        (b"\x80\x80\x09short", None),
        (b"\0\x80\x02m", None),
        (b"\0\x81\0\0\x01m", None),
    ],
)
def test_the_id_is_found_without_decoding(raw: bytes, expected: bytes | None) -> None:
    """Properties that end within the id have none."""
    assert message_id_of(raw) == expected


def test_a_marker_has_no_originals() -> None:
    """Its ``low`` is unknown when it is made."""
    assert unstaged(from_a_stream(marker(EPOCH)), b"") == Entry(Mark(UNKNOWN, EPOCH, True), "", [])
    assert unstaged(from_a_stream(marker(EPOCH, 7)), b"") == Entry(Mark(7, EPOCH, True), "", [])
    assert messages_in(from_a_stream(marker(EPOCH))) == 0


def test_an_entry_within_an_entry_comes_back_whole() -> None:
    """A stage may be the source of a shovel into another queue. The properties have the name of our header twice."""
    for number in (1, 2):
        inner, body = entry_of(*[delivery(ALL)] * number)
        raw, outer_body = entry_of(delivery(inner, body))
        outer = unstaged(from_a_stream(raw), outer_body)
        assert outer is not None
        assert [essence(each) for each in outer.originals] == [essence(delivery(inner, body))]


@pytest.mark.parametrize(
    "raw",
    [
        properties(),
        properties(headers={"other": 1}),
        properties(headers={HEADER: "text"}),
        properties(headers={HEADER: b"short"}),
        properties(headers={HEADER: b"\x01\x01" + bytes(28)}),
        properties(headers={"a": HEADER + " is no header here", "b": HEADER}),
        properties(message_id=HEADER, headers=BROKEN_TABLE),
        b"\x20\x00\x00\x00\x00\x30" + bytes((len(HEADER),)) + HEADER.encode() + b"x\x7f\xff\xff\xff",
    ],
)
def test_other_messages_are_not_entries(raw: bytes) -> None:
    """Other programs may publish into the stage."""
    assert unstaged(raw, b"body") is None
    assert messages_in(raw) is None


def test_the_header_is_found_behind_its_name() -> None:
    """Another header may contain its name."""
    value = Properties(marker(EPOCH)).headers[HEADER]
    assert unstaged(properties(headers={"a": "\x13" + HEADER, HEADER: value}), b"") is not None


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_an_entry_whose_body_was_changed_is_none(cut: int) -> None:
    """The sizes in it must be those of its body."""
    raw, body = entry_of(delivery(ALL), delivery(ALL))
    assert unstaged(raw, body[:-cut]) is None
    assert unstaged(raw, body + bytes(cut)) is None
    assert unstaged(entry_of(*[delivery(ALL)] * 3)[0], body) is None


@pytest.mark.parametrize("cut", [1, 60, 150])
def test_an_entry_whose_header_was_cut_is_none(cut: int) -> None:
    """The queue and the sizes in it must be within it."""
    raw, body = entry_of(delivery(ALL))
    value = bytes(Properties(raw).headers[HEADER])
    assert unstaged(properties(headers={HEADER: value[:-cut]}), body) is None
    raw, body = entry_of(delivery(ALL), delivery(ALL))
    value = bytes(Properties(raw).headers[HEADER])
    assert unstaged(properties(headers={HEADER: value[:-1]}), body) is None


def test_an_entry_of_too_many_messages_is_none() -> None:
    """No relay has written it, and its rows could take far more memory than its bytes."""
    each = delivery(b"", b"")
    assert unstaged(*entry_of(*[each] * MOST_MESSAGES)) is not None
    assert unstaged(*entry_of(*[each] * (MOST_MESSAGES + 1))) is None


def test_a_newer_version_is_refused() -> None:
    """This version cannot read its messages."""
    raw = properties(headers={HEADER: b"\xff\x09" + bytes(28)})
    with pytest.raises(ConfigurationError, match="version 9"):
        unstaged(raw, b"")


def test_an_identity_is_id_routing_and_body() -> None:
    """Each part counts, even if the concatenated bytes are equal."""
    given = (b"id", "exchange", "key", b"body")
    others = [
        (b"i", "dexchange", "key", b"body"),
        (b"id", "exchang", "ekey", b"body"),
        (b"id", "exchange", "ke", b"ybody"),
        (b"id", "exchange", "key", b"bodY"),
    ]
    assert identity(*given) == identity(*given)
    assert len({identity(*each) for each in [given, *others]}) == 5
