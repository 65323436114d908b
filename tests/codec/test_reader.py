"""The inbound reader: its events for streams from pika's encoder.

The chunks of the stream change nothing, and no input crashes the reader.
"""

from __future__ import annotations

import gc
import struct
import tracemalloc
from contextlib import suppress
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pika
import pika.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pika import spec

from reliable_mq.codec import LARGEST_BODY, CodecError, InboundReader, Properties, RawDelivery
from tests.properties import examples, machine

Event = tuple[Any, ...]
FRAME_END = b"\xce"


class Recorder:
    """A sink and a foreign handler, with one list of events.

    Deliveries are listed one by one. A foreign ``channel.open-ok`` or ``channel.close-ok`` attaches or detaches the
    channel, as a shell does. On other events, `on_event` is called.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.batches: list[int] = []
        self.reader = InboundReader(self.foreign)
        self.on_event: dict[str, Any] = {}

    def foreign(self, frame: bytes) -> None:
        self.note("foreign", frame)
        if frame[:1] == b"\1" and frame[7:9] == b"\0\x14":
            channel = int.from_bytes(frame[1:3])
            if frame[9:11] == b"\0\x0b":  # channel.open-ok
                self.reader.attach(channel, Sink(self, channel))
            elif frame[9:11] == b"\0\x29":  # channel.close-ok
                self.reader.detach(channel)

    def note(self, *event: Any) -> None:
        self.events.append(event)
        action = self.on_event.get(event[0])
        if action is not None:
            action()


class Sink:
    def __init__(self, recorder: Recorder, channel: int, largest_body: int = LARGEST_BODY) -> None:
        self.recorder = recorder
        self.channel = channel
        self.largest_body = largest_body

    def acked(self, tag: int, multiple: bool) -> None:
        self.recorder.note("acked", self.channel, tag, multiple)

    def nacked(self, tag: int, multiple: bool) -> None:
        self.recorder.note("nacked", self.channel, tag, multiple)

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        self.recorder.note("returned", self.channel, code, text, exchange, routing_key, properties, body)

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self.recorder.batches.append(len(deliveries))
        events = [("delivered", self.channel, *values(delivery)) for delivery in deliveries]
        self.recorder.events.extend(events[:-1])
        self.recorder.note(*events[-1])

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        self.recorder.note("got", self.channel, *values(delivery), message_count)

    def got_empty(self) -> None:
        self.recorder.note("got_empty", self.channel)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        self.recorder.note("oversized", self.channel, *values(delivery), size, message_count)


def values(it: RawDelivery) -> Event:
    return it.consumer_tag, it.delivery_tag, it.redelivered, it.exchange, it.routing_key, it.properties, it.body


# -- frames, written by pika


def method(channel: int, command: Any) -> bytes:
    return bytes(pika.frame.Method(channel, command).marshal())


def content(channel: int, command: Any, properties: pika.BasicProperties, parts: list[bytes]) -> list[bytes]:
    return [
        method(channel, command),
        pika.frame.Header(channel, sum(map(len, parts)), properties).marshal(),
        *(pika.frame.Body(channel, part).marshal() for part in parts),
    ]


def deliver(tag: int, *parts: bytes, channel: int = 1, consumer: str = "c", key: str = "orders") -> bytes:
    command = spec.Basic.Deliver(consumer, tag, tag % 2 == 1, "", key)
    return b"".join(content(channel, command, pika.BasicProperties(message_id=f"m{tag}"), list(parts)))


def ack(tag: int, *, channel: int = 1, multiple: bool = False) -> bytes:
    return method(channel, spec.Basic.Ack(tag, multiple))


def delivered(tag: int, body: bytes, *, channel: int = 1, consumer: str = "c", key: str = "orders") -> Event:
    properties = b"".join(pika.BasicProperties(message_id=f"m{tag}").encode())
    return "delivered", channel, consumer, tag, tag % 2 == 1, "", key, properties, body


def attached(*channels: int) -> Recorder:
    recorder = Recorder()
    for channel in channels or (1,):
        recorder.reader.attach(channel, Sink(recorder, channel))
    return recorder


CLOSE_OK = method(1, spec.Channel.CloseOk())
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"


# -- single behaviours


def test_every_event_of_the_basic_class_is_told_with_its_values() -> None:
    properties = pika.BasicProperties(content_type="text/plain", headers={"a": 1})
    raw = b"".join(properties.encode())
    recorder = attached()
    recorder.reader.feed(
        b"".join(
            (
                ack(5, multiple=True),
                method(1, spec.Basic.Nack(2**63 - 1, False, True)),
                *content(1, spec.Basic.Return(312, "NO_ROUTE", "ex", "kéy"), properties, [b"back"]),
                *content(1, spec.Basic.Deliver("tag", 9, True, "ex", "key"), properties, [b"body"]),
                *content(1, spec.Basic.GetOk(10, False, "ex", "key", 7), properties, [b"got"]),
                method(1, spec.Basic.GetEmpty()),
            )
        )
    )
    assert recorder.events == [
        ("acked", 1, 5, True),
        ("nacked", 1, 2**63 - 1, False),
        ("returned", 1, 312, "NO_ROUTE", "ex", "kéy", raw, b"back"),
        ("delivered", 1, "tag", 9, True, "ex", "key", raw, b"body"),
        ("got", 1, "", 10, False, "ex", "key", raw, b"got", 7),
        ("got_empty", 1),
    ]
    assert Properties(raw).headers == {"a": 1}


class OwnDelivery(RawDelivery):
    __slots__ = ()


def test_deliveries_are_of_the_class_that_was_asked_for() -> None:
    """This covers single frames, several frames, and replies to ``basic.get``."""
    made: list[type] = []
    recorder = attached()
    recorder.reader = InboundReader(recorder.foreign, OwnDelivery)
    sink = Sink(recorder, 1)
    recorder.reader.attach(1, sink)
    with patch.object(Sink, "delivered", lambda _, deliveries: made.extend(map(type, deliveries))):
        recorder.reader.feed(deliver(1, b"a") + deliver(2, b"b", b"c"))
    with patch.object(Sink, "got", lambda _, delivery, _count: made.append(type(delivery))):
        got = content(1, spec.Basic.GetOk(10, False, "ex", "key", 7), pika.BasicProperties(), [b"got"])
        recorder.reader.feed(b"".join(got))
    assert made == [OwnDelivery] * 3


def test_the_deliveries_of_one_feed_come_in_one_call() -> None:
    """They include an empty body, several frames, and one begun in an earlier feed."""
    stream = deliver(1, b"a") + deliver(2) + deliver(3, b"b", b"", b"c") + deliver(4, b"d") + deliver(5, b"e")
    cut = len(stream) - 5
    recorder = attached()
    recorder.reader.feed(stream[:cut])
    recorder.reader.feed(stream[cut:] + deliver(6, b"f"))
    assert recorder.batches == [4, 2]
    assert recorder.events == [
        delivered(tag, body) for tag, body in enumerate((b"a", b"", b"bc", b"d", b"e", b"f"), start=1)
    ]


def test_deliveries_keep_their_order_against_other_events() -> None:
    recorder = attached(1, 2)
    recorder.reader.feed(
        deliver(1, b"a")
        + deliver(2, b"b")
        + ack(1)
        + deliver(3, b"c")
        + deliver(1, b"x", channel=2)
        + HEARTBEAT
        + deliver(4, b"d")
    )
    assert recorder.batches == [2, 1, 1, 1]
    assert recorder.events == [
        delivered(1, b"a"),
        delivered(2, b"b"),
        ("acked", 1, 1, False),
        delivered(3, b"c"),
        delivered(1, b"x", channel=2),
        ("foreign", HEARTBEAT),
        delivered(4, b"d"),
    ]


def test_contents_of_two_channels_may_interleave() -> None:
    first = content(
        1, spec.Basic.Deliver("c", 1, True, "", "orders"), pika.BasicProperties(message_id="m1"), [b"a", b"b"]
    )
    second = content(2, spec.Basic.Return(312, "NO_ROUTE", "", "k"), pika.BasicProperties(), [b"c", b"d"])
    third = deliver(2, b"e", b"f", channel=2)
    recorder = attached(1, 2)
    recorder.reader.feed(b"".join(frame for pair in zip(first, second, strict=True) for frame in pair) + third)
    assert recorder.events == [
        delivered(1, b"ab"),
        ("returned", 2, 312, "NO_ROUTE", "", "k", b"\0\0", b"cd"),
        delivered(2, b"ef", channel=2),
    ]


@pytest.mark.parametrize("size", range(2, 30))
def test_a_body_full_of_frame_ends_is_not_taken_for_frames(size: int) -> None:
    """The body is in one frame, or in several."""
    body = FRAME_END * size
    recorder = attached()
    recorder.reader.feed(deliver(1, body) + deliver(2, body[:1], body[1:]) + ack(1))
    assert recorder.events == [delivered(1, body), delivered(2, body[:1] + body[1:]), ("acked", 1, 1, False)]


def test_frames_of_another_channel_do_not_make_up_a_delivery() -> None:
    """This applies to headers and bodies."""
    method_frame, header, body = content(1, spec.Basic.Deliver("c", 1, False, "", "q"), pika.BasicProperties(), [b"a"])
    for frames in (
        [method_frame, header[:2] + b"\2" + header[3:], body],
        [method_frame, header, body[:2] + b"\2" + body[3:]],
    ):
        recorder = attached()
        with suppress(CodecError):
            recorder.reader.feed(b"".join(frames) + HEARTBEAT)
        assert [event[0] for event in recorder.events[:1]] == ["foreign"]
        assert "delivered" not in {event[0] for event in recorder.events}


def test_frames_that_are_not_for_a_sink_are_foreign_and_complete() -> None:
    """These are frames of other channels, methods and classes, and heartbeats.

    Methods too short for a number are also foreign.
    """
    frames = [
        HEARTBEAT,
        b"\x08\0\1\0\0\0\0\xce",
        method(0, spec.Connection.Blocked("low on memory")),
        method(1, spec.Confirm.SelectOk()),
        method(1, spec.Basic.ConsumeOk("tag")),
        method(1, spec.Basic.Cancel("tag")),
        method(1, spec.Channel.Close(406, "PRECONDITION_FAILED", 60, 40)),
        b"\1\0\1\0\0\0\3abc\xce",
        ack(1, channel=2),
        *content(2, spec.Basic.Deliver("tag", 9, True, "ex", "key"), pika.BasicProperties(), [b"body"]),
    ]
    recorder = attached()
    recorder.reader.feed(b"".join(frames))
    assert recorder.events == [("foreign", frame) for frame in frames]


def test_a_protocol_header_of_another_version_is_foreign() -> None:
    """This holds even if its bytes would be a frame of an attached channel."""
    for pieces in ([PROTOCOL_HEADER], [PROTOCOL_HEADER[:5], PROTOCOL_HEADER[5:]], [PROTOCOL_HEADER + HEARTBEAT]):
        recorder = attached(int.from_bytes(PROTOCOL_HEADER[1:3]))
        for piece in pieces:
            recorder.reader.feed(piece)
        assert recorder.events[0] == ("foreign", PROTOCOL_HEADER)
        assert recorder.events[1:] in ([], [("foreign", HEARTBEAT)])


def test_names_that_are_not_utf8_come_with_surrogate_escapes() -> None:
    frame = (
        deliver(1, b"a", consumer="ü", key="é").replace("ü".encode(), b"\xff\xfe").replace("é".encode(), b"\xfd\xfc")
    )
    recorder = attached()
    recorder.reader.feed(frame)
    assert recorder.events == [delivered(1, b"a", consumer="\udcff\udcfe", key="\udcfd\udcfc")]


def test_remembered_names_are_bounded() -> None:
    recorder = attached()
    for tag in range(1, 3001):
        recorder.reader.feed(deliver(tag, b"a", consumer=f"c{tag}", key=f"k{tag}"))
    assert recorder.events[-1] == delivered(3000, b"a", consumer="c3000", key="k3000")
    assert len(recorder.reader._routes) <= 1024
    assert len(recorder.reader._consumer_tags) <= 1024


def test_a_large_frame_in_small_chunks_is_joined_once() -> None:
    """The received chunks are not copied again for every new one.

    The tail is a list until the frame is complete.
    """
    stream = deliver(1, bytes(100_000))
    recorder = attached()
    for start in range(0, len(stream), 100):
        recorder.reader.feed(stream[start : start + 100])
        assert not recorder.reader._tail or sum(map(len, recorder.reader._tail)) == recorder.reader._tail_size
    assert recorder.events == [delivered(1, bytes(100_000))]
    assert recorder.reader._tail == []


def test_detaching_in_a_callback_makes_the_next_frame_foreign() -> None:
    recorder = attached()
    recorder.on_event = {"acked": lambda: recorder.reader.detach(1)}
    recorder.reader.feed(ack(1) + ack(2) + deliver(3, b"a"))
    assert [event[0] for event in recorder.events] == ["acked", "foreign", "foreign", "foreign", "foreign"]
    recorder.reader.detach(1)  # detaching twice changes nothing


def test_detaching_at_a_delivery_makes_the_next_frame_foreign() -> None:
    recorder = attached()
    recorder.on_event = {"delivered": lambda: recorder.reader.detach(1)}
    recorder.reader.feed(deliver(1, b"a") + ack(2))
    assert recorder.events == [delivered(1, b"a"), ("foreign", ack(2))]


def test_a_detached_channel_drops_the_rest_of_its_content() -> None:
    """The driver did not see its beginning, so it must not see its end.

    The next frame is foreign again.
    """
    frames = content(1, spec.Basic.Deliver("c", 1, True, "", "q"), pika.BasicProperties(), [b"a", b"b"])
    for fed in (1, 2, 3):
        recorder = attached()
        recorder.reader.feed(b"".join(frames[:fed]))
        recorder.reader.detach(1)
        recorder.reader.feed(b"".join(frames[fed:]) + ack(1))
        assert recorder.events == [("foreign", ack(1))]


def test_a_method_ends_the_content_of_a_detached_channel() -> None:
    frames = content(1, spec.Basic.Deliver("c", 1, True, "", "q"), pika.BasicProperties(), [b"a", b"b"])
    recorder = attached()
    recorder.reader.feed(frames[0] + frames[1])
    recorder.reader.detach(1)
    recorder.reader.feed(CLOSE_OK + frames[2])
    assert recorder.events == [("foreign", CLOSE_OK), ("foreign", frames[2])]


def test_a_foreign_method_amid_content_does_not_disturb_it() -> None:
    method_frame, header, body = content(
        1, spec.Basic.Deliver("c", 1, True, "", "orders"), pika.BasicProperties(message_id="m1"), [b"a"]
    )
    flow = method(1, spec.Channel.Flow(True))
    recorder = attached()
    recorder.reader.feed(method_frame + flow + header + HEARTBEAT + body)
    assert recorder.events == [("foreign", flow), ("foreign", HEARTBEAT), delivered(1, b"a")]


@pytest.mark.parametrize("trigger", ["acked", "delivered", "foreign", "returned"])
def test_a_reset_in_a_callback_forgets_the_rest_of_the_stream(trigger: str) -> None:
    frames = {
        "acked": ack(1),
        "delivered": deliver(1, b"a") + HEARTBEAT,
        "foreign": HEARTBEAT,
        "returned": b"".join(content(1, spec.Basic.Return(312, "NO_ROUTE", "", "k"), pika.BasicProperties(), [b"c"])),
    }
    recorder = attached()
    recorder.on_event = {trigger: recorder.reader.reset}
    recorder.reader.feed(frames[trigger] + ack(2) + ack(3)[:-3])
    assert [event[0] for event in recorder.events] == [trigger]
    recorder.reader.feed(ack(4))
    assert recorder.events[1:] == [("foreign", ack(4))]


def test_a_reset_forgets_the_beginning_of_a_frame() -> None:
    recorder = attached()
    recorder.reader.feed(deliver(1, b"a") + ack(1)[:9])
    recorder.reader.reset()
    recorder.reader.feed(HEARTBEAT)
    assert recorder.events == [delivered(1, b"a"), ("foreign", HEARTBEAT)]


def test_a_callback_exception_propagates_and_loses_no_frame() -> None:
    def fail() -> None:
        raise LookupError(recorder.events[-1][0])

    stream = ack(1) + deliver(1, b"a") + HEARTBEAT + deliver(2, b"b")
    recorder = attached()
    recorder.on_event = dict.fromkeys(("acked", "delivered", "foreign"), fail)
    raised = 0
    rest = stream
    while len(recorder.events) < 4:
        with pytest.raises(LookupError):
            recorder.reader.feed(rest)
        raised += 1
        rest = b""
    assert raised == 4
    assert recorder.events == [("acked", 1, 1, False), delivered(1, b"a"), ("foreign", HEARTBEAT), delivered(2, b"b")]


def frame(kind: int, payload: bytes, *, channel: int = 1, end: bytes = FRAME_END) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


DELIVER = b"\0\x3c\0\x3c"
RETURN = b"\0\x3c\0\x32"
GET_OK = b"\0\x3c\0\x47"
ACK = b"\0\x3c\0\x50"
NACK = b"\0\x3c\0\x78"
TAG = bytes(8) + b"\0"
HEADER = frame(2, struct.pack(">HHQH", 60, 0, 2, 0))
DELIVERY = frame(1, DELIVER + b"\1c" + TAG + b"\0\0")

BROKEN = {
    "wrong frame end": ack(2)[:-1] + b"\0",
    "unknown frame type": frame(4, b"abc"),
    "unknown type of a frame to come": frame(9, bytes(20))[:10],
    "text instead of AMQP": b"HTTP/1.1 400 Bad Request",
    "ack too short": frame(1, ACK + bytes(8)),
    "nack too long": frame(1, NACK + bytes(10)),
    "deliver without arguments": frame(1, DELIVER),
    "deliver, consumer tag cut": frame(1, DELIVER + b"\x05c" + TAG),
    "deliver, delivery tag cut": frame(1, DELIVER + b"\1c" + bytes(8)),
    "deliver, no exchange": frame(1, DELIVER + b"\1c" + TAG),
    "deliver, no routing key": frame(1, DELIVER + b"\1c" + TAG + b"\1e"),
    "deliver, routing key cut": frame(1, DELIVER + b"\1c" + TAG + b"\0\2k"),
    "deliver, bytes left over": frame(1, DELIVER + b"\1c" + TAG + b"\0\1kk"),
    "return cut": frame(1, RETURN + b"\1\x38"),
    "return, text cut": frame(1, RETURN + b"\1\x38\x09NO"),
    "get-ok cut": frame(1, GET_OK + TAG + bytes(3)),
    "get-ok, no routing key": frame(1, GET_OK + TAG + b"\1e" + bytes(4)),
    "header without a method": HEADER,
    "body without a method": frame(3, b"ab"),
    "body without a header": DELIVERY + frame(3, b"ab"),
    "two headers": DELIVERY + HEADER + HEADER,
    "header cut": DELIVERY + frame(2, struct.pack(">HHQ", 60, 0, 2)) + frame(3, b"ab"),
    "header of another class": DELIVERY + frame(2, struct.pack(">HHQH", 10, 0, 2, 0)) + frame(3, b"ab"),
    "body too large": DELIVERY + HEADER + frame(3, b"abc"),
    "bodies too large": DELIVERY + HEADER + frame(3, b"a") + frame(3, b"ab"),
    "content within content": DELIVERY + HEADER + frame(3, b"a") + DELIVERY,
    "content within content, before its header": DELIVERY + DELIVERY,
    "frame larger than agreed": frame(3, bytes(131065)),
    "frame larger than agreed, to come": struct.pack(">BHI", 1, 0, 3 * 2**30) + b"\0",
    "content header of over 16 MiB, to come": DELIVERY + struct.pack(">BHI", 2, 1, 2**24 + 1) + b"\0",
    "content larger than RabbitMQ carries": DELIVERY + frame(2, struct.pack(">HHQH", 60, 0, 2**29 + 1, 0)),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_frame_fails_all_later_but_no_earlier_frames(broken: bytes) -> None:
    """Only a reset ends this state."""
    recorder = attached()
    with pytest.raises(CodecError, match="stream is broken"):
        recorder.reader.feed(ack(1) + deliver(1, b"a") + broken + ack(2) + bytes(300))
    for data in (b"", ack(3)):
        with pytest.raises(CodecError, match="stream is broken"):
            recorder.reader.feed(data)
    assert recorder.events == [("acked", 1, 1, False), delivered(1, b"a")]
    recorder.reader.reset()
    recorder.reader.attach(1, Sink(recorder, 1))
    recorder.reader.feed(ack(4))
    assert recorder.events[2:] == [("acked", 1, 4, False)]


@pytest.mark.parametrize("broken", [frames for name, frames in BROKEN.items() if name.startswith("deliver, ")])
def test_a_broken_method_before_whole_content_delivers_nothing(broken: bytes) -> None:
    recorder = attached()
    with pytest.raises(CodecError, match="stream is broken"):
        recorder.reader.feed(broken + HEADER + frame(3, b"ab"))
    assert (recorder.events, recorder.batches) == ([], [])


def test_an_unknown_type_of_frame_names_the_likely_mistake() -> None:
    with pytest.raises(CodecError, match=r"frame of type 72 .* \(is this a port for AMQP\?\)$"):
        attached().reader.feed(BROKEN["text instead of AMQP"])


def test_an_oversized_frame_is_an_error_once_its_header_arrives() -> None:
    """The reader does not wait for its payload.

    A frame of exactly the limit is accepted.
    """
    recorder = attached()
    recorder.reader.agree(4096)
    largest = frame(1, bytes(4088))
    recorder.reader.feed(largest)
    assert recorder.events == [("foreign", largest)]
    with pytest.raises(CodecError, match="frame of type 3 and 4089 bytes on channel 1, where at most 4088 may come"):
        recorder.reader.feed(struct.pack(">BHI", 3, 1, 4089) + b"x")


def test_a_content_header_may_be_larger_than_the_agreed_size() -> None:
    """RabbitMQ does not split properties, and dead-lettering lets them grow."""
    recorder = attached()
    recorder.reader.agree(4096)
    recorder.reader.attach(1, Sink(recorder, 1))
    frames = content(
        1, spec.Basic.Deliver("c", 1, True, "", "q"), pika.BasicProperties(headers={"h": "x" * 9000}), [b"a"]
    )
    for chunks in ([b"".join(frames)], frames, cut(b"".join(frames), [500, 5000])):
        for chunk in chunks:
            recorder.reader.feed(chunk)
    assert [event[-1] for event in recorder.events] == [b"a"] * 3
    assert {len(event[-2]) for event in recorder.events} == {9000 + 13}


def limited(largest_body: int) -> Recorder:
    recorder = Recorder()
    recorder.reader.attach(1, Sink(recorder, 1, largest_body))
    return recorder


def test_a_body_above_its_limit_is_reported_without_its_bytes() -> None:
    """The report keeps its position among the other events.

    The body may be in one frame or several, pushed or pulled. A body of exactly the limit is accepted.
    """
    got = content(1, spec.Basic.GetOk(4, False, "ex", "key", 7), pika.BasicProperties(), [b"abc", b"d"])
    recorder = limited(3)
    recorder.reader.feed(
        deliver(1, b"abc")
        + deliver(2, b"abcd")
        + deliver(3, b"ab", b"cd", b"e")
        + b"".join(got)
        + deliver(5, b"a", b"bc")
    )
    assert recorder.events == [
        delivered(1, b"abc"),
        ("oversized", *delivered(2, b"")[1:], 4, None),
        ("oversized", *delivered(3, b"")[1:], 5, None),
        ("oversized", 1, "", 4, False, "ex", "key", b"\0\0", b"", 4, 7),
        delivered(5, b"abc"),
    ]


def test_a_return_above_the_limit_is_told_without_its_body() -> None:
    recorder = limited(0)
    recorder.reader.feed(
        b"".join(content(1, spec.Basic.Return(312, "NO_ROUTE", "", "k"), pika.BasicProperties(), [b"a", b"b"]))
    )
    assert recorder.events == [("returned", 1, 312, "NO_ROUTE", "", "k", b"\0\0", b"")]


def peak_of_feeding(recorder: Recorder, first: bytes, then: bytes, times: int) -> int:
    """Return the peak of the memory that feeding uses, in bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        recorder.reader.feed(first)
        for _ in range(times):
            recorder.reader.feed(then)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def begun(size: int) -> bytes:
    return DELIVERY + frame(2, struct.pack(">HHQH", 60, 0, size, 0))


def test_a_body_above_the_limit_takes_no_memory_while_it_arrives() -> None:
    recorder = limited(1000)
    assert peak_of_feeding(recorder, begun(400 * 2**20), frame(3, bytes(100_000)), 1000) < 2**20


def test_a_detached_channel_buffers_no_more_of_its_body() -> None:
    recorder = attached()
    recorder.reader.feed(begun(400 * 2**20) + frame(3, bytes(100_000)))
    recorder.reader.detach(1)
    assert peak_of_feeding(recorder, b"", frame(3, bytes(100_000)), 1000) < 2**20


@pytest.mark.slow
def test_a_body_in_tiny_frames_takes_little_more_than_its_size() -> None:
    """Empty frames use no memory, however many there are."""
    recorder = attached()
    recorder.reader.feed(begun(501))
    assert peak_of_feeding(recorder, b"", frame(3, b"") * 100 + frame(3, b"x"), 500) < 2**16
    recorder.reader.feed(frame(3, b"x"))
    assert recorder.events == [("delivered", 1, "c", 0, False, "", "", b"\0\0", b"x" * 501)]


def test_a_delivery_shows_no_body() -> None:
    text = repr(RawDelivery("c", 5, False, "", "q", b"", b"secret"))
    assert "secret" not in text
    assert "5" in text


# -- any stream, with any chunks

small = st.integers(0, 3)
parts_of_bodies = st.binary(max_size=6) | st.integers(1, 12).map(lambda size: FRAME_END * size)
bodies = st.lists(parts_of_bodies, max_size=2).flatmap(  # an empty part can only come before the last
    lambda parts: parts_of_bodies.filter(bool).map(lambda last: [*parts, last]) | st.just([])
)
channels = st.sampled_from([1, 2])
keys = st.sampled_from(["", "q", "orders"])


def _content_frames(command: Any, parts: list[bytes], channel: int) -> list[bytes]:
    return content(channel, command, pika.BasicProperties(message_id="m"), parts)


one_frame = st.one_of(
    st.builds(
        lambda tag, multiple, channel: [ack(tag, channel=channel, multiple=multiple)], small, st.booleans(), channels
    ),
    st.builds(lambda tag, channel: [method(channel, spec.Basic.Nack(tag))], small, channels),
    st.builds(lambda channel: [method(channel, spec.Basic.GetEmpty())], channels),
    st.builds(lambda channel: [method(channel, spec.Channel.OpenOk())], channels),
    st.builds(lambda channel: [method(channel, spec.Channel.CloseOk())], channels),
    st.sampled_from([[HEARTBEAT], [PROTOCOL_HEADER]]),
)
contents = st.one_of(
    st.builds(
        lambda tag, key, parts, channel: _content_frames(spec.Basic.Deliver("c", tag, False, "", key), parts, channel),
        small,
        keys,
        bodies,
        channels,
    ),
    st.builds(
        lambda key, parts, channel: _content_frames(spec.Basic.Return(312, "t", "", key), parts, channel),
        keys,
        bodies,
        channels,
    ),
    st.builds(
        lambda tag, key, parts, channel: _content_frames(spec.Basic.GetOk(tag, True, "e", key, 1), parts, channel),
        small,
        keys,
        bodies,
        channels,
    ),
)
streams = st.lists(one_frame | contents | contents, max_size=12).map(
    lambda groups: b"".join(b"".join(group) for group in groups)
)
damaged = st.builds(
    lambda stream, at, patch: stream[: at % (len(stream) + 1)] + patch + stream[at % (len(stream) + 1) + 1 :],
    streams,
    st.integers(0),
    st.binary(max_size=2),
)


def run(chunks: list[bytes], frame_max: int = 131072, largest_body: int = LARGEST_BODY) -> tuple[list[Event], bool]:
    recorder = Recorder()
    recorder.reader.agree(frame_max)
    recorder.reader.attach(1, Sink(recorder, 1, largest_body))
    for chunk in chunks:
        try:
            recorder.reader.feed(chunk)
        except CodecError:
            return recorder.events, True
    return recorder.events, False


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


@examples(75)
@given(
    streams | damaged, st.lists(st.integers(0), max_size=20), st.sampled_from([131072, 40]), st.sampled_from([2**29, 3])
)
def test_how_a_stream_is_cut_changes_nothing(
    stream: bytes, places: list[int], frame_max: int, largest_body: int
) -> None:
    """Channels are attached and detached, and frames are damaged or too large."""
    whole = run([stream], frame_max, largest_body)
    assert run(cut(stream, places), frame_max, largest_body) == whole
    assert run([stream[at : at + 1] for at in range(len(stream))], frame_max, largest_body) == whole


@given(st.binary(max_size=100), st.lists(st.integers(0), max_size=5))
def test_no_bytes_raise_anything_but_a_codec_error(stream: bytes, places: list[int]) -> None:
    assert run(cut(stream, places)) == run([stream])


class ReaderMachine(RuleBasedStateMachine):
    """The reader, compared with a model that sees whole frames.

    Frames of two channels are queued with interleaved contents, as a broker may send them. Any number of bytes is fed,
    and channels are attached and detached between feeds. The second channel accepts bodies of up to `LIMIT` bytes.
    """

    LIMIT = 5

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.unfed = b""
        self.sent = self.fed = 0
        self.frames: list[tuple[int, int, str, Any, bytes]] = []  # end in the stream, channel, kind, value, bytes
        self.waiting: dict[int, list[tuple[str, Any, bytes]]] = {1: [], 2: []}  # the rest of a content, by channel
        self.attached: set[int] = set()
        self.orphans: set[int] = set()
        self.assembling: dict[int, list[Any]] = {}
        self.expected: list[Event] = []

    @initialize()
    def attach_the_first(self) -> None:
        self.attach(1)

    def send(self, channel: int, kind: str, value: Any, data: bytes) -> None:
        self.unfed += data
        self.sent += len(data)
        self.frames.append((self.sent, channel, kind, value, data))

    @rule(tag=small, multiple=st.booleans(), channel=channels)
    def confirm(self, tag: int, multiple: bool, channel: int) -> None:
        if not self.waiting[channel]:
            self.send(channel, "event", ("acked", channel, tag, multiple), ack(tag, channel=channel, multiple=multiple))

    @rule()
    def heartbeat(self) -> None:
        self.send(0, "other", None, HEARTBEAT)

    @rule(channel=channels)
    def other_method(self, channel: int) -> None:
        if not self.waiting[channel]:
            self.send(channel, "other", None, method(channel, spec.Basic.ConsumeOk("c")))

    @rule(tag=small, parts=bodies, channel=channels, kind=st.sampled_from(["delivered", "returned", "got"]))
    def begin_content(self, tag: int, parts: list[bytes], channel: int, kind: str) -> None:
        if self.waiting[channel]:
            return
        raw = b"".join(pika.BasicProperties(message_id="m").encode())
        body = b"".join(parts)
        commands: dict[str, tuple[Any, Event]] = {
            "delivered": (
                spec.Basic.Deliver("c", tag, False, "e", "k"),
                ("delivered", channel, "c", tag, False, "e", "k", raw, body),
            ),
            "returned": (
                spec.Basic.Return(312, "t", "e", "k"),
                ("returned", channel, 312, "t", "e", "k", raw, body),
            ),
            "got": (
                spec.Basic.GetOk(tag, True, "e", "k", 4),
                ("got", channel, "", tag, True, "e", "k", raw, body, 4),
            ),
        }
        command, event = commands[kind]
        if channel == 2 and len(body) > self.LIMIT:
            event = {
                "delivered": ("oversized", *event[1:-1], b"", len(body), None),
                "returned": (*event[:-1], b""),
                "got": ("oversized", *event[1:-2], b"", len(body), 4),
            }[kind]
        first, *rest = _content_frames(command, parts, channel)
        self.send(channel, "begin", None, first)
        self.waiting[channel] = [*(("part", None, data) for data in rest[:-1]), ("end", event, rest[-1])]

    @precondition(lambda self: any(self.waiting.values()))
    @rule(channel=channels)
    def go_on_with_content(self, channel: int) -> None:
        if self.waiting[channel]:
            self.send(channel, *self.waiting[channel].pop(0))

    @rule(count=st.integers(0, 60) | st.just(10_000))
    def feed(self, count: int) -> None:
        chunk, self.unfed = self.unfed[:count], self.unfed[count:]
        self.fed += len(chunk)
        self.recorder.reader.feed(chunk)
        while self.frames and self.frames[0][0] <= self.fed:
            _, channel, kind, value, data = self.frames.pop(0)
            self.expect(channel, kind, value, data)

    def expect(self, channel: int, kind: str, value: Any, data: bytes) -> None:
        if kind in ("begin", "part", "end") and channel in (self.attached | self.orphans):
            if kind == "begin":
                if channel in self.attached:
                    self.assembling[channel] = []
            elif channel in self.orphans:
                if kind == "end":
                    self.orphans.discard(channel)
                return
            elif kind == "end":
                del self.assembling[channel]
                self.expected.append(value)
                return
            if channel in self.attached:
                return
        if kind == "event" and channel in self.attached:
            self.expected.append(value)
        else:
            self.expected.append(("foreign", data))

    @rule(channel=channels)
    def attach(self, channel: int) -> None:
        # Like a shell, this attaches when the channel is opened, so never within a content.
        in_content = self.waiting[channel] or any(frame[1] == channel for frame in self.frames)
        if channel not in self.attached and channel not in self.orphans and not in_content:
            self.recorder.reader.attach(
                channel, Sink(self.recorder, channel, LARGEST_BODY if channel == 1 else self.LIMIT)
            )
            self.attached.add(channel)

    @rule(channel=channels)
    def detach(self, channel: int) -> None:
        self.recorder.reader.detach(channel)
        if channel in self.attached:
            self.attached.discard(channel)
            if channel in self.assembling:
                del self.assembling[channel]
                self.orphans.add(channel)

    @invariant()
    def told_is_what_the_model_expects(self) -> None:
        assert self.recorder.events == self.expected


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = machine(50, steps=30)
