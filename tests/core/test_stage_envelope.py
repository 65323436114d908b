"""Staged messages: the original is restored byte for byte."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import Properties, RawDelivery, encode_table, join_properties, split_properties
from reliable_mq.core.stage.envelope import (
    HEADER,
    UNKNOWN,
    Mark,
    Original,
    identity,
    marker,
    names_of,
    parts_of,
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


def copy_of(each: RawDelivery, frame_max: int = 131_072) -> tuple[bytes, bytes]:
    names = names_of("orders", each.exchange, each.routing_key)
    return staged(names, each, parts_of(each.properties), 42, EPOCH, frame_max)


def from_a_stream(raw: bytes, offset: int = 7) -> bytes:
    """Return the properties of a copy as RabbitMQ delivers them.

    There is one more header, and bytes that are UTF-8 are a string.
    """
    segments = split_properties(raw)
    table = segments["headers"]
    name, value = table[4 : 5 + len(HEADER)], Properties(raw).headers[HEADER]
    assert isinstance(value, bytes)
    with suppress(UnicodeDecodeError):
        table = table.replace(name + b"x", name + (b"S" if value.decode() else b"x"))
    entry = encode_table({"x-stream-offset": offset})[4:]
    segments["headers"] = (len(table) - 4 + len(entry)).to_bytes(4) + entry + table[4:]
    return join_properties(segments)


def test_the_copy_has_the_properties_but_three() -> None:
    """Other readers of the stream see them.

    The copy is persistent, and our header is its only one.
    """
    raw, body = copy_of(delivery(ALL))
    copy = Properties(raw)
    assert body == b"body"
    assert list(copy.headers) == [HEADER]
    assert (copy.message_id, copy.content_type, copy.content_encoding) == ("m-1", "a/b", "gzip")
    assert (copy.correlation_id, copy.reply_to, copy.type, copy.app_id) == ("c", "r", "t", "app")
    assert (copy.user_id, copy.expiration, copy.delivery_mode, copy.priority) == (None, None, 2, 3)
    assert copy.timestamp == Properties(ALL).timestamp


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize("raw", [ALL, properties(), properties(message_id="m")])
def test_the_original_comes_back_whole(raw: bytes, redelivered: bool) -> None:
    """Properties, body, exchange, routing key and queue are restored.

    Headers added by the broker do not matter.
    """
    for key in ("key", "\udcff no text", "k" * 255):
        copy, body = copy_of(delivery(raw, redelivered=redelivered, key=key))
        expected = Original("orders", "exchange", key, redelivered, raw, b"body")
        assert unstaged(from_a_stream(copy), body) == (Mark(42, EPOCH, False), expected)


@given(st.binary(max_size=300), st.binary(max_size=50))
def test_any_properties_come_back_whole(raw: bytes, body: bytes) -> None:
    """This includes invalid properties, which are never decoded."""
    copy, copied = copy_of(delivery(raw, body))
    found = unstaged(copy, copied)
    assert found is not None
    assert found[1] == Original("orders", "exchange", "key", False, raw, body)
    split_properties(copy)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"\x80\x00\x09short",
        ALL + b"more",
        b"\0\1\0\0",
        properties(headers=BROKEN_TABLE)[:-2],
    ],
)
def test_broken_properties_are_not_on_the_copy(raw: bytes) -> None:
    """They only travel in our header, and the copy has no message id."""
    assert parts_of(raw) == (0, b"", b"", None)
    copy, body = copy_of(delivery(raw))
    assert Properties(copy).message_id is None
    found = unstaged(copy, body)
    assert found is not None
    assert found[1] is not None
    assert found[1].properties == raw


def test_text_that_is_not_ascii_is_not_on_the_copy() -> None:
    """RabbitMQ may be unable to convert it. The id is still known."""
    for raw in (
        properties(message_id="m", correlation_id=b"\2\xff\xfe"),
        properties(message_id="m", content_type=b"\2\xff\xfe"),
        properties(message_id="m", app_id=b"\2\xff\xfe"),
    ):
        parts = parts_of(raw)
        assert parts == (0, b"", b"", b"m")


def test_a_time_that_cannot_be_converted_is_not_on_the_copy() -> None:
    """An example is a time in microseconds."""
    raw = properties(message_id="m", timestamp=b"\xff" * 8)
    copy = Properties(copy_of(delivery(raw))[0])
    assert (copy.message_id, copy.timestamp) == ("m", None)


def test_a_header_that_does_not_fit_travels_before_the_body() -> None:
    """A copy always fits into the frames of its original."""
    raw = properties(message_id="m", headers={"long": "x" * 5000})
    copy, body = copy_of(delivery(raw), frame_max=4096)
    assert body.startswith(raw)
    found = unstaged(copy, body)
    assert found is not None
    assert found[1] == Original("orders", "exchange", "key", False, raw, b"body")
    assert copy_of(delivery(raw), frame_max=0)[1] == b"body"


def test_a_marker_has_no_original() -> None:
    """Its ``low`` is unknown when it is made."""
    assert unstaged(from_a_stream(marker(EPOCH)), b"") == (Mark(UNKNOWN, EPOCH, True), None)
    assert unstaged(from_a_stream(marker(EPOCH, 7)), b"") == (Mark(7, EPOCH, True), None)


def test_a_copy_of_a_copy_comes_back_whole() -> None:
    """The properties then contain the name of our header twice."""
    inner, body = copy_of(delivery(ALL))
    outer, body = copy_of(delivery(inner, body))
    found = unstaged(from_a_stream(outer), body)
    assert found is not None
    assert found[1] is not None
    assert found[1].properties == inner


@pytest.mark.parametrize(
    "raw",
    [
        properties(),
        properties(headers={"other": 1}),
        properties(headers={HEADER: "text"}),
        properties(headers={HEADER: b"short"}),
        properties(headers={HEADER: b"\xff\x01\x00" + bytes(16) + b"\x00\x00"}),
        properties(headers={HEADER: b"\x01\x01\x00" + bytes(16) + b"\x00\x00"}),
        properties(headers={HEADER: b"\xff\x01\x04" + bytes(16) + b"\x00\x00\x00\x00\x00"}),
        properties(headers={"a": HEADER + " is no header here", "b": HEADER}),
        properties(message_id=HEADER, headers=BROKEN_TABLE),
        b"\x20\x00\x00\x00\x00\x30" + bytes((len(HEADER),)) + HEADER.encode() + b"x\x7f\xff\xff\xff",
    ],
)
def test_other_messages_are_not_staged_ones(raw: bytes) -> None:
    """Other programs may publish into the stage."""
    assert unstaged(raw, b"body") is None


def test_a_newer_version_is_refused() -> None:
    """This version cannot read its messages."""
    raw = properties(headers={HEADER: b"\xff\x09" + bytes(17)})
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
