"""Frames: split from a stream at any chunk boundary, named, and built."""

from __future__ import annotations

import struct

import pamqp.commands
import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.errors import ConfigurationError
from reliable_mq.testing import frames
from reliable_mq.testing.frames import Frame, Splitter, parse

HEARTBEAT = Frame(8, 0, b"")
PUBLISH = frames.method(1, "basic.publish", b"\0\0\0\1q\0")


def header(size: int, channel: int = 1) -> Frame:
    return Frame(2, channel, struct.pack(">HHQH", 60, 0, size, 0))


def body(data: bytes, channel: int = 1) -> Frame:
    return Frame(3, channel, data)


some_frames = st.lists(
    st.one_of(
        st.just(HEARTBEAT),
        st.builds(frames.basic_ack, st.integers(1, 9), st.integers(1, 2**63), multiple=st.booleans()),
        st.just(PUBLISH),
        st.builds(header, st.integers(0, 2**63 - 1)),
        st.builds(body, st.binary(max_size=40)),
    ),
    max_size=12,
)


@given(some_frames, st.booleans(), st.lists(st.integers(1, 50), min_size=1), st.binary(max_size=7))
def test_all_comes_out_once_and_in_order_however_it_is_torn(
    sent: list[Frame], with_protocol_header: bool, sizes: list[int], incomplete: bytes
) -> None:
    stream = (b"AMQP\0\0\x09\x01" if with_protocol_header else b"") + b"".join(frame.raw for frame in sent)
    if incomplete:
        stream += HEARTBEAT.raw[: len(incomplete)]
    splitter, keys, out, position = Splitter(), [], b"", 0
    while position < len(stream):
        size = sizes[position % len(sizes)]
        chunk = splitter.feed(stream[position : position + size])
        position += size
        assert [part.key for part in parse(chunk.data) if isinstance(part, Frame)] == chunk.keys
        out += chunk.data
        keys += chunk.keys
    assert not splitter.opaque
    assert out + splitter.take_rest() == stream
    assert keys == [frame.key for frame in sent]


def test_boundary_is_where_no_content_is_under_way() -> None:
    splitter = Splitter()
    first = HEARTBEAT.raw + PUBLISH.raw + header(4).raw + body(b"ab").raw
    chunk = splitter.feed(first)
    assert chunk.boundary == len(HEARTBEAT.raw)
    assert not splitter.between_contents
    rest = body(b"cd").raw
    assert splitter.feed(rest + PUBLISH.raw).boundary == len(rest)
    assert splitter.feed(header(0).raw).boundary == len(header(0).raw)
    assert splitter.between_contents


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(HEARTBEAT.raw[:-1] + b"x", id="wrong end octet"),
        pytest.param(struct.pack(">BHI", 1, 1, 2) + b"\0\x3c\xce", id="method too short"),
        pytest.param(struct.pack(">BHI", 3, 1, 2**31) + b"x", id="absurd size"),
    ],
)
def test_what_is_not_amqp_passes_as_it_is(stream: bytes) -> None:
    splitter = Splitter()
    chunk = splitter.feed(HEARTBEAT.raw + stream)
    assert chunk.data == HEARTBEAT.raw + stream
    assert splitter.opaque
    assert splitter.feed(b"more") == (b"more", [], None)
    assert list(parse(HEARTBEAT.raw + stream)) == [HEARTBEAT, stream]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (frames.basic_ack(3, 2**40, multiple=True), pamqp.commands.Basic.Ack(2**40, True)),
        (frames.basic_nack(3, 7, requeue=False), pamqp.commands.Basic.Nack(7, False, False)),
        (frames.basic_nack(3, 7, multiple=True), pamqp.commands.Basic.Nack(7, True, True)),
        (frames.basic_cancel(3, "tag"), pamqp.commands.Basic.Cancel("tag", True)),
        (frames.channel_close(3, 404, "no é"), pamqp.commands.Channel.Close(404, "no é", 0, 0)),
        (frames.connection_close(320, "forced"), pamqp.commands.Connection.Close(320, "forced", 0, 0)),
        (frames.connection_blocked("memory"), pamqp.commands.Connection.Blocked("memory")),
        (frames.connection_unblocked(), pamqp.commands.Connection.Unblocked()),
    ],
)
def test_built_frames_are_those_of_pamqp(ours: Frame, theirs: pamqp.frame.FrameTypes) -> None:
    assert ours.raw == pamqp.frame.marshal(theirs, ours.channel)


def test_names_cover_every_method_that_pamqp_knows() -> None:
    # pamqp writes "Basic.Ack", for example: the names differ only in case and hyphens
    for index, command in pamqp.commands.INDEX_MAPPING.items():
        name = frames.name_of(index)
        assert name.replace("-", "") == command.name.lower().replace("-", "")
        assert frames.key_of(name) == index


def test_unknown_names() -> None:
    assert frames.name_of(60 << 16 | 999) == "60.999"
    with pytest.raises(ConfigurationError, match=r"basic\.akc"):
        frames.key_of("basic.akc")
    with pytest.raises(ConfigurationError, match="not a method"):
        frames.method(1, "header")
    with pytest.raises(ConfigurationError, match="AMQP allows 255"):
        frames.connection_blocked("x" * 256)


def test_frame_names_and_content_size() -> None:
    assert [frame.name for frame in (PUBLISH, header(3), body(b"abc"), HEARTBEAT)] == [
        "basic.publish",
        "header",
        "body",
        "heartbeat",
    ]
    assert header(3).content_size == 3
    assert body(b"abc").content_size is None
