"""Conversions from and to messages of pika and aio-pika.

The codecs of the drivers are the reference.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aio_pika
import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic

from reliable_mq import ConfigurationError, ConsumeError, Message
from reliable_mq.codec import encode_properties
from tests.core.deliveries import delivery, short

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq import Delivery

texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
names = texts.filter(bool)
seconds = st.integers(0, 4_000_000_000)
dates = seconds.map(lambda number: datetime.fromtimestamp(number, UTC))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts | dates,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
headers = st.dictionaries(names, values, min_size=1, max_size=4)
common = {
    "content_type": names,
    "content_encoding": names,
    "headers": headers,
    "delivery_mode": st.sampled_from([1, 2]),
    "priority": st.integers(1, 255),
    "correlation_id": names,
    "reply_to": names,
    "user_id": names,
    "app_id": names,
    "type": names,
    "message_id": names,
}
pika_properties = st.fixed_dictionaries(
    {}, optional={**common, "expiration": st.integers(0, 10**9).map(str), "timestamp": seconds, "cluster_id": names}
).map(lambda given: pika.BasicProperties(**given))
aio_pika_messages = st.builds(
    lambda body, given: aio_pika.Message(body, **given),
    st.binary(max_size=50),
    st.fixed_dictionaries({}, optional={**common, "expiration": st.integers(0, 10**6), "timestamp": dates}),
)


def received(message: Message) -> Delivery:
    found = delivery(7, redelivered=True, exchange="x", routing_key="k", body=message.body)
    found.restore("x", "k", encode_properties(message))
    return found


def as_sent_by_pika(properties: pika.BasicProperties) -> bytes:
    return b"".join(properties.encode())


@given(st.binary(max_size=50), pika_properties)
def test_a_message_from_pika_round_trips_byte_for_byte(body: bytes, properties: pika.BasicProperties) -> None:
    made = Message.from_pika(body, properties)
    if properties.message_id is None:
        properties.message_id = made.message_id
    assert made.message_id == properties.message_id
    assert (made.body, encode_properties(made)) == (body, as_sent_by_pika(properties))
    method, back, same = received(made).to_pika()
    assert isinstance(method, pika.spec.Basic.Deliver)
    assert (method.delivery_tag, method.redelivered, method.exchange, method.routing_key) == (7, True, "x", "k")
    assert (same, as_sent_by_pika(back)) == (body, as_sent_by_pika(properties))


@given(aio_pika_messages)
def test_a_message_from_aio_pika_round_trips_byte_for_byte(message: aio_pika.Message) -> None:
    made = Message.from_aio_pika(message)
    if message.message_id is None:
        message.message_id = made.message_id
    assert made.message_id == message.message_id
    assert made.body == message.body
    assert encode_properties(made) == message.properties.marshal()
    back = received(made).to_aio_pika()
    assert isinstance(back, aio_pika.IncomingMessage)
    assert (back.delivery_tag, back.redelivered, back.exchange, back.routing_key) == (7, True, "x", "k")
    assert back.body == message.body
    assert encode_properties(Message.from_aio_pika(back)) == message.properties.marshal()


def test_a_message_without_an_id_gets_one() -> None:
    """The id identifies duplicates."""
    plain = Message.from_pika(b"x"), Message.from_pika("x"), Message.from_aio_pika(aio_pika.Message(b"x"))
    assert len({message.message_id for message in plain} - {""}) == 3
    assert {message.body for message in plain} == {b"x"}
    assert not any(message.persistent for message in plain)  # the default of the drivers


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Message.from_pika(b"", {"type": "x"}), "must be a pika.BasicProperties, not dict"),
        (lambda: Message.from_pika(7), "body must be bytes"),  # type: ignore[arg-type]
        (lambda: Message.from_pika(b"", pika.BasicProperties(headers={"a": object()})), "pika cannot encode"),
        (lambda: Message.from_pika(b"", pika.BasicProperties(expiration="soon")), "expiration must be"),
        (lambda: Message.from_pika(b"", pika.BasicProperties(expiration="315360000001")), "at most ten years"),
        (lambda: Message.from_pika(b"", pika.BasicProperties(expiration="\u0663")), "expiration must be"),
        (lambda: Message.from_pika(b"", pika.BasicProperties(headers={"CC": "q"})), "must be a list of routing keys"),
        (lambda: Message.from_aio_pika(aio_pika.Message(b"", headers={"a": float("nan")})), "hold nan"),
        (lambda: Message.from_aio_pika(aio_pika.Message(b"", headers={"a": [{"b": float("-inf")}]})), "hold -inf"),
        (lambda: Message.from_aio_pika(b""), "must be an aio_pika.Message, not bytes"),
        (lambda: Message.from_aio_pika(aio_pika.Message(b"", headers={"a": object()})), "aio-pika cannot encode"),  # type: ignore[dict-item]
        (lambda: Message.from_aio_pika(aio_pika.Message(b"", expiration=-1)), "expiration must be"),
        (lambda: Message.from_pika("\udcff"), "body must be text that UTF-8 can carry"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_an_aio_pika_message_cannot_ack_its_delivery() -> None:
    made = delivery(1, message_id="m").to_aio_pika()
    assert made.processed
    with pytest.raises(TypeError, match="no_ack"):
        made.ack().send(None)


# A value type that neither driver decodes ("z"), in a table that ends inside the value.
UNKNOWN_HEADER = b"\0\0\0\x03\x01az"


@pytest.mark.parametrize("convert", [lambda one: one.to_pika(), lambda one: one.to_aio_pika()], ids=["pika", "aio"])
def test_properties_that_nobody_can_decode_are_a_consume_error(convert: Callable[[Delivery], Any]) -> None:
    broken = delivery(1, headers=UNKNOWN_HEADER)
    with pytest.raises(ConsumeError, match=r"properties of .* are broken"):
        convert(broken)


def test_values_that_a_driver_cannot_decode_are_decoded_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("unknown")

    monkeypatch.setattr(pika.BasicProperties, "decode", fails)
    monkeypatch.setattr(Basic.Properties, "unmarshal", fails)
    made = delivery(1, message_id="m", headers={"a": 1}, type=short("t"), timestamp=(10**15).to_bytes(8))
    _, properties, _ = made.to_pika()
    assert (properties.message_id, properties.headers, properties.type) == ("m", {"a": 1}, "t")
    assert properties.timestamp == 10**15
    message = made.to_aio_pika()
    assert (message.message_id, message.headers, message.type) == ("m", {"a": 1}, "t")
    assert message.timestamp is None
    bare = delivery(1, message_id=None)
    assert bare.to_pika()[1].headers is None
    assert bare.to_aio_pika().headers == {}


def test_values_that_aio_pika_refuses_are_replaced_by_defaults() -> None:
    message = delivery(1, expiration=short("soon"), delivery_mode=b"\x07").to_aio_pika()
    assert (message.expiration, message.delivery_mode) == (None, 1)
