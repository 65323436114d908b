"""The channel of stream mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reliable_mq.codec import RawDelivery, join_properties
from reliable_mq.codec.methods import CheckQueue, Consume, QueueState
from reliable_mq.core.channel_setup import StepGenerator
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.errors import BrokerUnavailable, ConsumeError
from reliable_mq.spark.stream_broker import StreamChannel, end_of, first_offsets_and_next, offset_of
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.url import parse_url

LOST = ConnectionLoss(None, "connection reset", "connection", by_broker=False)


def delivery(table: bytes | None, consumer_tag: str = "", delivery_tag: int = 1) -> RawDelivery:
    properties = join_properties({} if table is None else {"headers": table})
    return RawDelivery(consumer_tag, delivery_tag, False, "", "", properties, b"x")


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


def test_a_reply_of_the_next_connection_ends_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a part of the last chunk would be taken for the whole chunk."""
    channel = StreamChannel(parse_url("amqp://localhost/"), name="test")

    def run(_: AdminChannel, steps: StepGenerator, _name: str) -> QueueState:
        for step in steps:
            if isinstance(step, Consume | CheckQueue):
                channel.delivered([delivery(table(OFFSET), "spark-1")])
                channel.read_finished()
            if isinstance(step, CheckQueue):
                channel.lost(1, LOST)
        return QueueState("events", 12, 0)

    monkeypatch.setattr(AdminChannel, "_run", run)
    with pytest.raises(BrokerUnavailable, match="the channel is lost: connection reset"):
        end_of(channel, "events", 1.0)
    assert not channel.usable


def test_an_ack_of_a_lost_channel_is_not_sent_on_the_next() -> None:
    """The broker would close that channel, since it does not know the delivery."""
    channel = StreamChannel(parse_url("amqp://localhost/"), name="test")
    sent: list[bytes] = []
    io: Any = SimpleNamespace(call_soon=lambda call: call(), write=sent.append)
    channel._io = io
    channel.delivered([delivery(table(OFFSET), delivery_tag=tag) for tag in (1, 2, 3)])
    channel.read_finished()
    channel.take(0.0)
    channel.ack()
    channel.ack()  # of nothing more
    assert len(sent) == 1
    channel.delivered([delivery(table(OFFSET), delivery_tag=4)])
    channel.read_finished()
    channel.lost(1, LOST)
    assert len(channel.take(0.0)) == 1
    channel.ack()
    assert len(sent) == 1


def test_a_message_without_an_offset_ends_a_task() -> None:
    """Further attempts would read the same message again."""
    with pytest.raises(ConsumeError, match="is not a stream"):
        offset_of(RawDelivery("", 1, False, "", "orders", b"\0\0", b""), "orders")
