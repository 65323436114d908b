"""Cut the inbound stream into frames, and decode the frames of the basic class.

Deliveries, returns, confirms and replies to ``basic.get`` on an attached channel are decoded and passed to its sink.
Every other frame is passed complete (header, payload, end byte) to `foreign`, for the driver.

Invariants:

- The chunks of the stream affect only how many deliveries are passed on at once, and nothing else about the events.
- Sinks and `foreign` are called in the order of the stream. Every byte is part of an event, of a foreign frame, or of
  dropped content.
- Input raises only `CodecError`. After that error the stream cannot be trusted, and every further `feed` raises it
  again.
- Memory is bounded. A frame above the negotiated ``frame_max`` is an error as soon as its head has arrived, and so is
  content that is too large for RabbitMQ. Only content headers may be larger than ``frame_max``, because RabbitMQ sends
  properties in one frame however small the receiver's frames are. A body above its sink's limit is counted and dropped
  while it arrives.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from reliable_mq.codec.frames import FRAME_OVERHEAD
from reliable_mq.codec.tables import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_BODY: Final = 512 * 1024 * 1024
"""Bytes; RabbitMQ's ``max_message_size`` cannot be set higher."""

_unpack_frame: Final = Struct(">BHI").unpack_from
_unpack_tag: Final = Struct(">QB").unpack_from
_unpack_header_frame: Final = Struct(">BHIHHQ").unpack_from
_unpack_uint16: Final = Struct(">H").unpack_from
_unpack_uint32: Final = Struct(">I").unpack_from

_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME, _HEARTBEAT_FRAME = 1, 2, 3, 8
_FRAME_TYPES: Final = frozenset((_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME, _HEARTBEAT_FRAME))
_FRAME_END: Final = 0xCE
_PROTOCOL_HEADER: Final = b"AMQP"

_BASIC: Final = 60
# Class and method number combined.
_RETURN, _DELIVER, _GET_OK, _GET_EMPTY, _ACK, _NACK = (_BASIC << 16 | method for method in (50, 60, 71, 72, 80, 120))
_WITH_CONTENT: Final = frozenset((_RETURN, _DELIVER, _GET_OK))
_OURS: Final = frozenset((_RETURN, _DELIVER, _GET_OK, _GET_EMPTY, _ACK, _NACK))

_MAX_CACHED: Final = 1024
_FRAME_MAX: Final = 131072  # until another limit is negotiated; RabbitMQ's default, and the most that we request
_LARGEST_HEADER: Final = 16 * 1024 * 1024  # payload of a content header, bytes; RabbitMQ's default for a whole message


class RawDelivery:
    """A delivered message, undecoded.

    Attributes:
        consumer_tag: The tag of the consumer that the message was delivered to; empty for ``basic.get``.
        redelivered: Whether the broker may have delivered the message before.

    The other attributes are read-only, so that an ack, a copy for another attempt and a dead letter are always of the
    message that arrived. Bytes of names that are not UTF-8 are surrogate escapes.
    """

    __slots__ = ("_body", "_delivery_tag", "_exchange", "_properties", "_routing_key", "consumer_tag", "redelivered")

    def __init__(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
    ) -> None:
        self.consumer_tag = consumer_tag
        self._delivery_tag = delivery_tag
        self.redelivered = redelivered
        self._exchange = exchange
        self._routing_key = routing_key
        self._properties = properties
        self._body = body

    @property
    def delivery_tag(self) -> int:
        """The delivery's number on the channel."""
        return self._delivery_tag

    @property
    def exchange(self) -> str:
        """The exchange that the message was published to."""
        return self._exchange

    @property
    def routing_key(self) -> str:
        """The routing key of the publish."""
        return self._routing_key

    @property
    def properties(self) -> bytes:
        """The undecoded properties."""
        return self._properties

    @property
    def body(self) -> bytes:
        """The bytes of the message."""
        return self._body

    def complete(self, *, properties: bytes | None = None, body: bytes | None = None) -> None:
        """Add properties or body from a later frame, before the delivery is used."""
        if properties is not None:
            self._properties = properties
        if body is not None:
            self._body = body

    def __repr__(self) -> str:
        return f"<RawDelivery {self.delivery_tag}: {len(self.body)} bytes>"


class ChannelSink:
    """The content events of a channel, called inside `InboundReader.feed`.

    A callback may attach, detach and reset.
    """

    #: The maximum size of a body, in bytes. A larger body is dropped while it arrives: ``returned`` is called without
    #: the body, and `oversized` in place of ``delivered`` and ``got``. Read when the channel is attached.
    largest_body: int = LARGEST_BODY

    def acked(self, tag: int, multiple: bool, /) -> None:
        """Process a confirm of `tag`, or of it and all earlier outstanding tags."""

    def nacked(self, tag: int, multiple: bool, /) -> None:
        """Process a nack of `tag`, or of it and all earlier outstanding tags."""

    def returned(
        self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes, /
    ) -> None:
        """Process a mandatory message that was routed to no queue."""

    def delivered(self, deliveries: list[RawDelivery], /) -> None:
        """Process consecutive deliveries; the sink may keep the list."""

    def got(self, delivery: RawDelivery, message_count: int, /) -> None:
        """Process the reply to ``basic.get``; `message_count` messages are left."""

    def got_empty(self) -> None:
        """Process the reply to ``basic.get`` from an empty queue."""

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None, /) -> None:
        """Process a delivery without its body, whose `size` is above `largest_body`.

        `message_count` is from ``basic.get-ok``; it is None for ``basic.deliver``.
        """


class _InboundChannel:
    """An attached channel, and the content that is being assembled on it."""

    __slots__ = ("body", "delivery", "dropped", "limit", "message_count", "method", "missing", "sink", "tell", "whole")

    delivery: RawDelivery  # collects the content, of a return as well
    tell: Callable[[], None]  # called at the end of the content, except for a delivery

    def __init__(self, sink: ChannelSink, largest_payload: int) -> None:
        self.sink: ChannelSink | None = sink  # None once detached; the channel is kept until its content has arrived
        self.limit = min(sink.largest_body, LARGEST_BODY)  # the size of the largest body that is kept
        self.whole = min(self.limit, largest_payload)  # the size of the largest body that may come in one frame
        self.method = 0  # the method that announced the content
        self.message_count: int | None = None
        self.missing = -1  # bytes of the body that have not arrived; -1 before the header frame
        self.dropped = 0  # the size of a body that is not kept
        self.body = bytearray()  # the part that has arrived


class _Batch:
    """Deliveries that are not passed on yet. No batch exists while a callback runs."""

    __slots__ = ("channel", "deliveries", "sink")

    def __init__(self, channel: _InboundChannel, sink: ChannelSink) -> None:
        self.channel = channel
        self.sink = sink
        self.deliveries: list[RawDelivery] = []


class InboundReader:
    """The reader of one connection's inbound stream. Not thread-safe.

    `feed` must not be called from a callback.

    Args:
        foreign: A callable for every complete frame that is not for a sink. It is also called with a protocol header (8
            bytes), with which a broker requests another version of the protocol.
        delivery: The class of deliveries, whose constructor takes the arguments of `RawDelivery`.
    """

    def __init__(self, foreign: Callable[[bytes], None], delivery: type[RawDelivery] = RawDelivery) -> None:
        self._foreign = foreign
        self._make_delivery = delivery
        self._channels: dict[int, _InboundChannel] = {}
        self._largest = _FRAME_MAX - FRAME_OVERHEAD  # maximum payload of a frame, in bytes
        self._epoch = 0  # incremented by `reset`, so that `feed` notices a reset by a callback
        self._tail: list[bytes] = []  # the beginning of a frame
        self._tail_size = 0
        self._wanted = 0  # the size that the tail must have before cutting continues
        self._broken = ""
        self._batch: _Batch | None = None
        self._consumer_tags: dict[bytes, str] = {}
        self._routes: dict[bytes, tuple[str, str]] = {}

    def agree(self, frame_max: int) -> None:
        """Limit the size of frames, except content headers. Call it before `attach`."""
        self._largest = frame_max - FRAME_OVERHEAD

    def attach(self, channel: int, sink: ChannelSink) -> None:
        """Pass the content of `channel` to `sink`, starting with the next frame."""
        self._channels[channel] = _InboundChannel(sink, self._largest)

    def detach(self, channel: int) -> None:
        """Pass the frames of `channel` to `foreign` again; drop incomplete content."""
        state = self._channels.get(channel)
        if state is not None:
            state.sink = None
            state.limit = -1
            state.dropped = 1  # marks a partly received body, if there is one
            state.body.clear()
            if not state.method:
                del self._channels[channel]

    def reset(self) -> None:
        """Forget the stream and detach every channel, for a new connection.

        A running `feed` ends.
        """
        self._epoch += 1
        self._channels.clear()
        self._tail.clear()
        self._tail_size = self._wanted = 0
        self._largest = _FRAME_MAX - FRAME_OVERHEAD
        self._broken = ""

    def feed(self, data: bytes) -> None:
        """Process the next bytes: call sinks and `foreign` for the complete frames.

        An exception of a callback propagates. The next `feed` continues after the frame of that callback.

        Raises:
            CodecError: If the stream is broken. All earlier events were passed on. The connection must be aborted.
        """
        if self._broken:
            raise CodecError(self._broken)
        if self._tail:
            self._tail.append(data)
            self._tail_size += len(data)
            if self._tail_size < self._wanted:
                return
            data = b"".join(self._tail)
            self._tail.clear()
        channels = self._channels
        epoch = self._epoch
        size = len(data)
        offset = 0
        wanted = 8
        try:
            while size - offset >= 8:
                kind, number, length = _unpack_frame(data, offset)
                payload = offset + 7
                end = payload + length
                if length > self._largest or end >= size or data[end] != _FRAME_END or kind not in _FRAME_TYPES:
                    most = _LARGEST_HEADER if kind == _HEADER_FRAME else self._largest
                    if kind not in _FRAME_TYPES:
                        if data[offset : offset + 4] != _PROTOCOL_HEADER:
                            raise self._broken_by_frame(kind, number, length, " (is this a port for AMQP?)")
                        number, end = -1, payload
                    elif length > most:
                        raise self._broken_by_frame(kind, number, length, f", where at most {most} may come")
                    elif end >= size:
                        wanted = end + 1 - offset
                        break
                    elif data[end] != _FRAME_END:
                        raise self._broken_by_frame(kind, number, length, " has no end")
                state = channels.get(number)
                method = 0
                if kind == _METHOD_FRAME and length >= 4 and state is not None:
                    method = _unpack_uint32(data, payload)[0]
                    if method == _DELIVER:
                        after = self._whole_delivery(state, number, data, payload, end)
                        if after:
                            offset = after
                            continue
                    elif method in (_ACK, _NACK) and length == 13 and state.sink and not self._batch:
                        tag, bits = _unpack_tag(data, payload + 4)
                        offset = end + 1
                        (state.sink.acked if method == _ACK else state.sink.nacked)(tag, bits & 1 == 1)
                        if self._epoch != epoch:
                            return
                        continue
                if self._batch and not self._continues(self._batch, state, kind, method):
                    self._pass_on(self._batch)
                else:
                    offset = end + 1
                    self._frame(state, number, kind, method, data, payload, end)
                if self._epoch != epoch:
                    return
            if self._batch:
                self._pass_on(self._batch)
        finally:
            if self._epoch == epoch and offset < size:
                self._tail.append(data[offset:])
                self._tail_size = size - offset
                self._wanted = wanted

    def _whole_delivery(self, state: _InboundChannel, number: int, data: bytes, payload: int, end: int) -> int:
        """Decode a delivery whose three frames are complete and adjacent in `data`.

        Returns:
            The start of the next frame; 0 if `data` has no such delivery. Then nothing happened, and `_frame` decides.
        """
        start = end + 1
        size = len(data)
        sink = state.sink
        batch = self._batch
        if size - start < 30 or state.method or sink is None or (batch and batch.channel is not state):
            return 0
        kind, channel, length, class_id, _, body_size = _unpack_header_frame(data, start)
        header_end: int = start + 7 + length
        body_start = header_end + 8
        body_end: int = body_start + body_size
        if (
            body_end >= size
            or kind != _HEADER_FRAME
            or channel != number
            or not 14 <= length <= _LARGEST_HEADER
            or body_size > state.whole
            or class_id != _BASIC
            or data[header_end] != _FRAME_END
            or data[body_end] != _FRAME_END
            or _unpack_frame(data, header_end + 1) != (_BODY_FRAME, number, body_size)
        ):
            return 0
        delivery = self._make_delivery(
            *self._delivery_arguments(data, payload + 4, end),
            data[start + 19 : header_end],
            data[body_start:body_end],
        )
        if batch is None:
            batch = self._batch = _Batch(state, sink)
        batch.deliveries.append(delivery)
        return body_end + 1

    def _continues(self, batch: _Batch, state: _InboundChannel | None, kind: int, method: int) -> bool:
        """Return whether a frame belongs to another delivery of the batch's channel."""
        if state is not batch.channel or batch.channel.dropped:
            return False
        return (batch.channel.method if kind in (_HEADER_FRAME, _BODY_FRAME) else method) == _DELIVER

    def _frame(
        self, state: _InboundChannel | None, number: int, kind: int, method: int, data: bytes, payload: int, end: int
    ) -> None:
        """Process one frame.

        Callbacks, except those for deliveries, are called only while no batch exists.
        """
        if state is not None and kind in (_HEADER_FRAME, _BODY_FRAME):
            if kind == _HEADER_FRAME:
                self._content_header(state, data, payload, end)
            else:
                self._content_body(state, data, payload, end)
            if state.missing == 0:
                self._content_complete(state, number)
            return
        if state is not None and state.sink is None:  # the broker continued without finishing the content
            del self._channels[number]
            state = None
        if state is None or state.sink is None or method not in _OURS:
            self._foreign(data[payload - 7 : end + 1])
            return
        if method in _WITH_CONTENT:
            self._content_method(state, state.sink, method, data, payload + 4, end)
        elif method == _GET_EMPTY:
            state.sink.got_empty()
        else:
            raise self._broken_by("confirm of a wrong size")

    def _content_method(
        self, state: _InboundChannel, sink: ChannelSink, method: int, data: bytes, start: int, end: int
    ) -> None:
        if state.method:
            raise self._broken_by("content begins before the one before it is complete")
        if method == _DELIVER:
            delivery = self._make_delivery(*self._delivery_arguments(data, start, end), b"", b"")
        elif method == _RETURN:
            code, text, route = self._return_arguments(data, start, end)
            delivery = RawDelivery("", 0, False, *route, b"", b"")
            state.tell = lambda: sink.returned(code, text, *route, delivery.properties, delivery.body)
        else:
            message_count, arguments = self._get_arguments(data, start, end)
            delivery = self._make_delivery(*arguments, b"", b"")
            state.message_count = message_count
            state.tell = lambda: sink.got(delivery, message_count)
        state.delivery = delivery
        state.method = method
        state.missing = -1

    def _content_header(self, state: _InboundChannel, data: bytes, payload: int, end: int) -> None:
        if not state.method or state.missing >= 0:
            raise self._broken_by("content header out of place")
        if end - payload < 14:
            raise self._broken_by("truncated content header")
        _, _, _, class_id, _, size = _unpack_header_frame(data, payload - 7)
        if class_id != _BASIC:
            raise self._broken_by(f"content of class {class_id}")
        if size > LARGEST_BODY:
            raise self._broken_by(f"content of {size} bytes, where {LARGEST_BODY} are the most that RabbitMQ carries")
        state.missing = size
        if size > state.limit:
            state.dropped = size
        state.delivery.complete(properties=data[payload + 12 : end])

    def _content_body(self, state: _InboundChannel, data: bytes, payload: int, end: int) -> None:
        if state.missing < 0:
            raise self._broken_by("content body out of place")
        state.missing -= end - payload
        if state.missing < 0:
            raise self._broken_by("content body larger than announced")
        if not state.dropped:
            state.body += data[payload:end]

    def _content_complete(self, state: _InboundChannel, number: int) -> None:
        method, state.method = state.method, 0
        dropped, state.dropped = state.dropped, 0
        state.delivery.complete(body=bytes(state.body))
        state.body = bytearray()
        state.missing = -1
        if state.sink is None:
            del self._channels[number]
        elif dropped and method != _RETURN:
            state.sink.oversized(state.delivery, dropped, state.message_count if method == _GET_OK else None)
        elif method == _DELIVER:
            if self._batch is None:
                self._batch = _Batch(state, state.sink)
            self._batch.deliveries.append(state.delivery)
        else:
            state.tell()

    def _pass_on(self, batch: _Batch) -> None:
        self._batch = None
        batch.sink.delivered(batch.deliveries)

    def _broken_by_frame(self, kind: int, number: int, length: int, flaw: str) -> CodecError:
        return self._broken_by(f"frame of type {kind} and {length} bytes on channel {number}{flaw}")

    def _broken_by(self, reason: str) -> CodecError:
        """Pass on the batch, refuse further input, and return the error to raise."""
        error = CodecError(f"the broker's stream is broken: {reason}")
        self._broken = str(error)
        if self._batch:
            self._pass_on(self._batch)
        return error

    # -- arguments of methods: `start` is the offset behind the method number, `end` is the end of the payload

    def _delivery_arguments(self, data: bytes, start: int, end: int) -> tuple[str, int, bool, str, str]:
        middle = start + 1 + data[start]
        if middle + 9 > end:
            raise self._broken_by("truncated method")
        raw_tag = data[start + 1 : middle]
        raw_route = data[middle + 9 : end]
        consumer_tag = self._consumer_tags.get(raw_tag)
        if consumer_tag is None:
            if len(self._consumer_tags) >= _MAX_CACHED:
                self._consumer_tags.clear()
            consumer_tag = self._consumer_tags[raw_tag] = raw_tag.decode("utf-8", "surrogateescape")
        route = self._routes.get(raw_route)
        if route is None:
            if len(self._routes) >= _MAX_CACHED:
                self._routes.clear()
            route = self._routes[raw_route] = self._route(raw_route)
        delivery_tag, redelivered = _unpack_tag(data, middle)
        return consumer_tag, delivery_tag, redelivered != 0, *route

    def _get_arguments(self, data: bytes, start: int, end: int) -> tuple[int, tuple[str, int, bool, str, str]]:
        if end - start < 13:
            raise self._broken_by("truncated method")
        delivery_tag, redelivered = _unpack_tag(data, start)
        route = self._route(data[start + 9 : end - 4])
        return _unpack_uint32(data, end - 4)[0], ("", delivery_tag, redelivered != 0, *route)

    def _return_arguments(self, data: bytes, start: int, end: int) -> tuple[int, str, tuple[str, str]]:
        if end - start < 3:
            raise self._broken_by("truncated method")
        middle = start + 3 + data[start + 2]
        text = data[start + 3 : middle].decode("utf-8", "surrogateescape")
        return _unpack_uint16(data, start)[0], text, self._route(data[middle:end])

    def _route(self, raw: bytes) -> tuple[str, str]:
        """Decode the exchange and the routing key, which must fill `raw`."""
        middle = 1 + raw[0] if raw else 1
        if middle >= len(raw) or middle + 1 + raw[middle] != len(raw):
            raise self._broken_by("exchange and routing key do not fit their method")
        return raw[1:middle].decode("utf-8", "surrogateescape"), raw[middle + 1 :].decode("utf-8", "surrogateescape")
