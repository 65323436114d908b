"""The offset of a delivery, read from its encoded headers."""

from __future__ import annotations

import pytest

from reliable_mq.codec import RawDelivery, encode_table, join_properties
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.spark.stream_broker import StreamChannel, first_offsets_and_next, offset_of
from reliable_mq.url import parse_url


def delivery(table: bytes | None) -> RawDelivery:
    return RawDelivery("", 1, False, "", "", join_properties({} if table is None else {"headers": table}), b"")


def table(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return len(body).to_bytes(4) + body


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
    assert offset_of(delivery(headers)) == 7 * 10**12


@pytest.mark.parametrize(
    "headers", [None, table(), encode_table({"x-stream-offset": "7"}), table(b"\x0fx-stream-offset")]
)
def test_a_delivery_without_one_comes_from_no_stream(headers: bytes | None) -> None:
    """The header is missing, of another type, or damaged."""
    assert offset_of(delivery(headers)) is None


def test_what_came_before_an_answer_is_there_with_it() -> None:
    """Otherwise they would be attributed to the next subscription."""
    channel = StreamChannel(parse_url("amqp://localhost/"), name="test")
    before = delivery(table(OFFSET))
    channel.delivered([before])
    channel._performed([], None)
    assert channel.take(0.0) == [before]


def test_a_query_that_names_all_offsets_subscribes_to_nothing() -> None:
    """The lookup of the partitions of a super stream ends with a refusal, which ends the channel."""
    channel = StreamChannel(parse_url("amqp://localhost/"), name="test")
    channel.lost(1, ConnectionLoss(404, "NOT_FOUND - no queue 'orders-3'", "channel", by_broker=True))
    assert first_offsets_and_next(channel, (), (), 0.0) == ({}, {})
