"""Outbound frames: the same bytes that pika writes, and readable by pamqp."""

from __future__ import annotations

from typing import Any

import pamqp.commands
import pamqp.frame
import pamqp.header
import pika
import pika.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import spec

from reliable_mq.codec import (
    append_publish,
    encode_ack,
    encode_get,
    encode_nack,
    encode_reject,
    header_frame_size,
    publish_head,
)
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import Queue

channels = st.integers(1, 65535)
tags = st.integers(1, 2**63 - 1)
short_texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60)
ID_ONLY = b"".join(pika.BasicProperties(delivery_mode=2, message_id="id").encode())


def method(channel: int, command: object) -> bytes:
    return bytes(pika.frame.Method(channel, command).marshal())


@given(channels, short_texts, short_texts, st.booleans())
def test_the_head_of_a_publish_is_as_pika_writes_it(channel: int, exchange: str, key: str, mandatory: bool) -> None:
    theirs = method(channel, spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=mandatory))
    assert publish_head(channel, exchange, key, mandatory) == theirs


@given(channels, tags, st.booleans(), st.booleans())
def test_settlements_are_as_pika_writes_them(channel: int, tag: int, multiple: bool, requeue: bool) -> None:
    assert encode_ack(channel, tag, multiple) == method(channel, spec.Basic.Ack(tag, multiple))
    assert encode_nack(channel, tag, multiple, requeue) == method(channel, spec.Basic.Nack(tag, multiple, requeue))
    assert encode_reject(channel, tag, requeue) == method(channel, spec.Basic.Reject(tag, requeue))


def test_what_is_fetched_one_by_one_is_acked_by_hand() -> None:
    assert encode_get(1, "orders") == method(1, spec.Basic.Get(queue="orders", no_ack=False))


@given(channels, short_texts)
def test_a_get_is_as_pika_writes_it(channel: int, queue: str) -> None:
    assert encode_get(channel, queue) == method(channel, spec.Basic.Get(queue=queue, no_ack=False))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 33, 100])
def test_a_body_is_cut_into_frames_that_fit(size: int) -> None:
    """A frame_max of 24 leaves 16 bytes of body for each frame.

    pika would write the same frames.
    """
    body = bytes(range(size))
    head = publish_head(7, "e", "k", True)
    out: list[bytes] = [b"before"]
    appended = append_publish(out, head, 7, ID_ONLY, body, 24)
    assert out[0] == b"before"
    stream = b"".join(out[1:])
    assert len(stream) == appended
    expected = head + pika.frame.Header(7, size, pika.BasicProperties(delivery_mode=2, message_id="id")).marshal()
    for start in range(0, size, 16):
        expected += pika.frame.Body(7, body[start : start + 16]).marshal()
    assert stream == expected


def test_without_a_frame_limit_a_body_is_one_frame() -> None:
    body = bytes(300_000)
    out: list[bytes] = []
    assert append_publish(out, b"", 1, ID_ONLY, body, 0) == len(b"".join(out))
    assert out[-2] is body


@given(short_texts, st.binary(max_size=100), st.integers(20, 60))
def test_pamqp_reads_a_publish(key: str, body: bytes, frame_max: int) -> None:
    out: list[bytes] = []
    append_publish(out, publish_head(3, "", key, False), 3, ID_ONLY, body, frame_max)
    stream = b"".join(out)
    frames: list[Any] = []
    while stream:
        consumed, channel, frame = pamqp.frame.unmarshal(stream)
        assert channel == 3
        frames.append(frame)
        stream = stream[consumed:]
    publish, header, *bodies = frames
    assert isinstance(publish, pamqp.commands.Basic.Publish)
    assert (publish.exchange, publish.routing_key, publish.mandatory) == ("", key, False)
    assert isinstance(header, pamqp.header.ContentHeader)
    assert (header.body_size, header.properties.message_id) == (len(body), "id")
    assert b"".join(part.value for part in bodies) == body


def test_the_size_of_a_header_frame_is_what_is_written() -> None:
    out: list[bytes] = []
    append_publish(out, b"", 1, ID_ONLY, b"", 131_072)
    assert header_frame_size(ID_ONLY) == len(b"".join(out))


def test_a_routing_key_that_is_not_utf8_goes_out_as_it_came() -> None:
    assert b"\2\xff\xfe" in publish_head(1, "", "\udcff\udcfe", True)


@pytest.mark.parametrize(
    ("exchange", "routing_key", "text"),
    [
        ("e" * 256, "", "exchange is 256 bytes long"),
        ("", "k" * 256, "routing_key is 256 bytes long"),
        ("", "é" * 128, "routing_key is 256 bytes long"),
        ("", None, "routing_key must be a str"),
        ("", "a\0b", "routing_key holds a NUL"),
    ],
)
def test_names_that_do_not_fit_are_refused(exchange: str, routing_key: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        publish_head(1, exchange, routing_key, True)


def test_a_queue_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="queue is 256 bytes long"):
        encode_get(1, "q" * 256)


@pytest.mark.parametrize("field", ["exchange", "routing_key"])
def test_a_declaration_in_place_of_a_name_is_refused(field: str) -> None:
    names: dict[str, Any] = {"exchange": "", "routing_key": "", field: Queue("orders")}
    with pytest.raises(ConfigurationError) as refused:
        publish_head(1, mandatory=True, **names)
    assert str(refused.value) == f"{field} must be a str, not Queue: give its name"
