"""Several channels of one connection, without a broker.

Each has separate deliveries, replies and end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.codec import CodecError, InboundReader, methods
from reliable_mq.codec.methods import ConfirmSelect
from reliable_mq.connection.channel import Channel, ChannelTable
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.core.consumer.delivery import Delivery
from tests.core.deliveries import properties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.codec import RawDelivery

OPEN, OPEN_OK, CLOSE, CLOSE_OK = (20, 10), (20, 11), (20, 40), (20, 41)
SELECT, SELECT_OK, DELIVER = (85, 10), (85, 11), (60, 60)


class Owner(ConnectionListener):
    """The owner of one channel, which records its events."""

    largest_body = 1024

    def __init__(self) -> None:
        self.opened = False
        self.bodies: list[bytes] = []
        self.replies = 0
        self.end: tuple[int, bool] | None = None

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self.bodies += [bytes(delivery.body) for delivery in deliveries]

    def channel_opened(self, channel: Channel) -> None:
        self.opened = True

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        self.end = (code, by_broker)

    def consumer_cancelled(self, channel: Channel, consumer_tag: str) -> None:
        raise AssertionError


class Connection:
    """A table of channels. The test acts as the broker."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, tuple[int, int] | None]] = []
        self.reader = InboundReader(self._foreign, Delivery)
        self.table = ChannelTable(self.reader)
        self.table.channel_max = 3

    def _write(self, data: bytes) -> None:
        self.sent.append((int.from_bytes(data[1:3], "big"), methods.method_of(data)))

    def _foreign(self, frame: bytes) -> None:
        self.table.receive(frame)

    def open(self, generation: int, owner: Owner) -> Channel:
        channel = self.table.open(generation, self._write, owner, owner)
        self.answer(channel, OPEN_OK, bytes(4))
        channel.release_content()
        return channel

    def answer(self, channel: Channel, method: tuple[int, int], arguments: bytes = b"") -> None:
        self.reader.feed(methods.method_frame(channel.number, *method, arguments))


def delivery(number: int, body: bytes) -> Sequence[bytes]:
    arguments = b"\x03tag" + (1).to_bytes(8, "big") + b"\0" + b"\0" + b"\x06orders"
    given: Any = properties(message_id="1")
    head = b"\0\x3c\0\0" + len(body).to_bytes(8, "big") + given
    return [
        methods.method_frame(number, *DELIVER, arguments),
        b"\x02" + number.to_bytes(2, "big") + len(head).to_bytes(4, "big") + head + b"\xce",
        b"\x03" + number.to_bytes(2, "big") + len(body).to_bytes(4, "big") + body + b"\xce",
    ]


def test_two_channels_of_a_connection_have_each_their_own() -> None:
    """The frames of both are interleaved. Closing one channel leaves the other open."""
    connection, one, two = Connection(), Owner(), Owner()
    first, second = connection.open(1, one), connection.open(2, two)
    assert (first.number, second.number) == (1, 2)
    assert (one.opened, two.opened) == (True, True)
    for frames in zip(delivery(1, b"paid"), delivery(2, b"shipped"), strict=True):
        for frame in frames:
            connection.reader.feed(frame)
    assert (one.bodies, two.bodies) == ([b"paid"], [b"shipped"])

    def replied(_: object) -> None:
        two.replies += 1

    second.perform([ConfirmSelect()], replied)
    connection.answer(first, CLOSE, (406).to_bytes(2, "big") + b"\4text" + bytes(4))
    assert (one.end, two.end) == ((406, True), None)
    connection.answer(second, SELECT_OK)
    assert two.replies == 1
    for frame in (*delivery(1, b"late"), *delivery(2, b"paid")):
        connection.reader.feed(frame)
    assert (one.bodies, two.bodies) == ([b"paid"], [b"shipped", b"paid"])
    assert connection.sent == [(1, OPEN), (2, OPEN), (2, SELECT), (1, CLOSE_OK)]


def test_a_second_reply_to_the_open_breaks_the_connection() -> None:
    """It would count as the reply to a step of the set-up."""
    connection = Connection()
    channel = connection.open(1, Owner())
    with pytest.raises(CodecError, match="answered nothing that was asked"):
        connection.answer(channel, OPEN_OK, bytes(4))


def test_a_number_is_used_again_once_its_channel_is_closed() -> None:
    connection, owners = Connection(), [Owner() for _ in range(4)]
    channels = [connection.open(generation, owners[generation]) for generation in range(3)]
    connection.answer(channels[1], CLOSE, (404).to_bytes(2, "big") + b"\4text" + bytes(4))
    assert connection.open(3, owners[3]).number == 2


def test_a_connection_is_closed_when_its_last_channel_is() -> None:
    connection, one, two = Connection(), Owner(), Owner()
    first, second = connection.open(1, one), connection.open(2, two)
    closed: list[bool] = []
    connection.table.close(lambda: closed.append(True))
    assert connection.sent[-2:] == [(1, CLOSE), (2, CLOSE)]
    connection.answer(second, CLOSE_OK)
    assert not closed
    connection.answer(first, CLOSE_OK)
    assert closed == [True]
    assert (one.end, two.end) == ((200, False), (200, False))


def test_a_late_close_ok_does_not_end_the_next_channel() -> None:
    """Both sides closed the channel before at the same time, and its number was free after the broker's close."""
    connection, one, two = Connection(), Owner(), Owner()
    connection.table.channel_max = 1
    first = connection.open(1, one)
    first.close()
    connection.answer(first, CLOSE, (406).to_bytes(2, "big") + b"\4text" + bytes(4))
    second = connection.table.open(2, connection._write, two, two)
    assert second.number == first.number
    connection.answer(first, CLOSE_OK)
    connection.answer(second, OPEN_OK, bytes(4))
    assert (two.opened, two.end) == (True, None)
