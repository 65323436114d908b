"""The channel of stream mode."""

from __future__ import annotations

from reliable_mq.codec import RawDelivery, join_properties
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.spark.stream_broker import StreamChannel, first_offsets_and_next
from reliable_mq.url import parse_url


def delivery(table: bytes | None) -> RawDelivery:
    return RawDelivery("", 1, False, "", "", join_properties({} if table is None else {"headers": table}), b"")


def table(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return len(body).to_bytes(4) + body


OFFSET = b"\x0fx-stream-offsetl" + (7 * 10**12).to_bytes(8)


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
