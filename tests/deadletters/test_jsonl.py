"""JSON lines: a round trip keeps every byte, and invalid lines are refused."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec import encode_properties, encode_table, join_properties
from reliable_mq.deadletters.jsonl import read_line, write_line
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message


@dataclass
class Delivered:
    """The attributes of a delivery that are written."""

    body: bytes
    properties: bytes
    exchange: str = ""
    routing_key: str = "orders"
    redelivered: bool = False


def delivered(message: Message) -> Delivered:
    return Delivered(message.body, encode_properties(message))


def written(delivery: Delivered) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(write_line(delivery))
    return line


names = st.text(min_size=1, max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.decimals(-(2**31), 2**31 - 1, places=3)
    | st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001  # hypothesis wants naive bounds
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    optional: dict[str, st.SearchStrategy[Any]] = {
        "headers": st.dictionaries(names.filter(lambda name: name not in {"CC", "BCC"}), values, max_size=4),
        "content_type": st.text(max_size=20).filter(lambda text: "\0" not in text),
        "priority": st.integers(0, 255),
        "expiration": st.integers(0, 10**6).map(lambda n: n / 1000),
        "timestamp": st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
        "persistent": st.booleans(),
    }
    chosen = draw(st.fixed_dictionaries({}, optional=optional))
    try:
        return Message(draw(st.binary(max_size=50)), **chosen)
    except ConfigurationError:
        return Message(b"")


@given(messages())
def test_what_is_written_is_read_again_byte_for_byte(message: Message) -> None:
    line = read_line(write_line(delivered(message)))
    assert (line.exchange, line.routing_key) == ("", "orders")
    assert line.message.body == message.body
    assert encode_properties(line.message) == encode_properties(message)
    assert line.message.message_id == message.message_id


FLOAT_32 = b"\0\0\0\7\1ff\x3f\x40\0\0"
FOREIGN = {
    "nothing at all": join_properties({}),
    "no message id": join_properties({"delivery_mode": b"\2"}),
    "a timestamp in milliseconds": join_properties({"timestamp": (1_700_000_000_000).to_bytes(8)}),
    "a float of 32 bits in headers": join_properties({"headers": FLOAT_32, "delivery_mode": b"\2"}),
    "headers that are broken": join_properties({"headers": b"\0\0\0\3\1f?", "delivery_mode": b"\2"}),
    "an expiration that is no number": join_properties({"expiration": b"\4soon"}),
    "a delivery mode that does not exist": join_properties({"delivery_mode": b"\3"}),
    "an id that is no UTF-8": join_properties({"message_id": b"\2\xff\xfe", "delivery_mode": b"\2"}),
    "a retired property": join_properties({"cluster_id": b"\1c"}),
    "a CC that we would not send": join_properties(
        {"headers": encode_table({"CC": 1}), "message_id": b"\2id", "delivery_mode": b"\2"}
    ),
}


@pytest.mark.parametrize("raw", FOREIGN.values(), ids=FOREIGN)
def test_what_other_clients_sent_is_carried_too(raw: bytes) -> None:
    line = read_line(write_line(Delivered(b"\xff", raw)))
    assert line.message.body == b"\xff"
    assert encode_properties(line.message) == raw


def test_broken_properties_are_carried_but_not_shown() -> None:
    raw = b"\x80\0\x09text"  # a truncated content type
    line = written(Delivered(b"x", raw))
    assert line.keys() == {"body", "exchange", "routing_key", "redelivered", "properties_base64"}
    assert base64.b64decode(line["properties_base64"]) == raw


def test_a_line_is_readable() -> None:
    message = Message(
        '{"order": 7, "name": "Zoë"}'.encode(),
        message_id="m-1",
        headers={"attempt": 2, "tags": ["a"]},
        content_type="application/json",
        expiration=1.5,
        timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert write_line(delivered(message)).decode() == (
        '{"body":"{\\"order\\": 7, \\"name\\": \\"Zoë\\"}","exchange":"","routing_key":"orders","redelivered":false,'
        '"headers":{"attempt":2,"tags":["a"]},"content_type":"application/json","message_id":"m-1","expiration":1.5,'
        '"timestamp":"2026-01-02T03:04:05+00:00","persistent":true}'
    )


def test_what_json_has_not_is_shown_as_well_as_carried() -> None:
    headers = {"bytes": b"\xffx", "when": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.5"), "sub": {"n": None}}
    line = written(delivered(Message(b"", headers=headers)))
    assert line["headers"] == {
        "bytes": "\\xffx",
        "when": "2026-01-02T00:00:00+00:00",
        "price": "1.5",
        "sub": {"n": None},
    }
    assert "properties_base64" in line


def test_a_header_that_is_infinite_is_shown_as_text() -> None:
    table = encode_table({"f": 1.0}).replace(b"\x3f\xf0\0\0\0\0\0\0", b"\x7f\xf0\0\0\0\0\0\0")
    assert written(Delivered(b"", join_properties({"headers": table})))["headers"] == {"f": "inf"}


def test_a_plain_message_needs_no_base64() -> None:
    assert "properties_base64" not in written(delivered(Message(b"text", headers={"n": 1, "f": 0.5})))


def test_a_routing_key_that_is_no_utf8_is_kept() -> None:
    key = b"k\xff".decode("utf-8", "surrogateescape")
    line = read_line(write_line(Delivered(b"", encode_properties(Message(b"")), routing_key=key)))
    assert line.routing_key == key


def test_a_short_line_is_enough() -> None:
    line = read_line(b'{"body": "x"}')
    assert (line.message.body, line.exchange, line.routing_key) == (b"x", None, None)
    assert line.message.persistent
    assert line.message.message_id


def test_null_is_the_same_as_leaving_a_key_out() -> None:
    line = read_line(b'{"body": "x", "headers": null, "exchange": null, "properties_base64": null}')
    assert line.exchange is None
    assert line.message.headers == {}


EMPTY = base64.b64encode(join_properties({})).decode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"body": "x", "headers": ' + '{"a": ' * 100_000 + "1", "nested too deeply"),
        ('{"body": "x", "headers": ' + '{"a": ' * 400 + "1" + "}" * 401, "nested deeper than 32 levels"),
        ("[]", "a JSON object is needed, not list"),
        ('{"body": "x", "routing-key": "q"}', "unknown key 'routing-key'; known are app_id, body, "),
        ('{"body": "x", "body": "y"}', "the key 'body' occurs twice"),
        ('{"body": "x", "headers": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        ("{}", "one of body .text. and body_base64 is needed"),
        ('{"body": "x", "body_base64": "eA=="}', "one of body"),
        ('{"body": {"a": 1}}', "body must be text, not dict: write JSON in it as a string"),
        ('{"body": "\\ud800"}', "body holds a lone surrogate"),
        ('{"body_base64": "%"}', "body_base64 is not base64"),
        ('{"body_base64": 1}', "body_base64 is not base64"),
        ('{"body": "x", "priority": 300}', "priority must be"),
        ('{"body": "x", "timestamp": "yesterday"}', "timestamp must be ISO 8601"),
        ('{"body": "x", "timestamp": 12}', "timestamp must be ISO 8601"),
        ('{"body": "x", "timestamp": "2026-01-01T00:00:00"}', "timestamp"),
        ('{"body": "x", "exchange": 1}', "exchange must be text, not int"),
        ('{"body": "x", "properties_base64": "AAAA"}', "properties_base64 holds no properties"),
        (f'{{"body": "x", "properties_base64": "{EMPTY}", "priority": 1}}', "priority contradicts properties_base64"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_line(text.encode())
