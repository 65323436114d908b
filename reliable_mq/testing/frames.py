"""AMQP 0-9-1 frames for the fault proxy: how to split, name and build them.

Only a frame's head, its class and method, and the size of a content are decoded. Therefore, the proxy can count and cut
frames at line rate, and never fails on arguments or headers that it does not know.

Invariants:
- Every chunk of `Splitter.feed` ends at a frame boundary. All bytes come out once and in order.
- A stream that is not AMQP 0-9-1 passes unchanged (`Splitter.opaque`) and is never refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pamqp.commands import INDEX_MAPPING

from reliable_mq.codec.tables import encode_short_string
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
_FRAME_END: Final = 0xCE
_OVERHEAD: Final = 8
_LARGEST_FRAME: Final = 16 * 1024 * 1024
"""A larger frame shows that the stream is not AMQP 0-9-1 (RabbitMQ's frame_max is 128 KiB)."""

_HEAD = struct.Struct(">BHI")
_KEY = struct.Struct(">I")
_BODY_SIZE = struct.Struct(">Q")
_PROTOCOL_HEADER = b"AMQP"
_PROTOCOL_HEADER_SIZE = 8

_KEYS: Final = {  # pamqp writes "Basic.GetOk" for "basic.get-ok"
    re.sub(r"(?<=[a-z])(?=[A-Z])", "-", method.name).lower(): key
    for key, method in cast("dict[int, Any]", INDEX_MAPPING).items()
} | {"header": -HEADER, "body": -BODY, "heartbeat": -HEARTBEAT}
_NAMES: Final = {key: name for name, key in _KEYS.items()}
CONTENT_KEYS: Final = frozenset(
    _KEYS[name] for name in ("basic.publish", "basic.return", "basic.deliver", "basic.get-ok")
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame.

    Attributes:
        kind: The type: 1 for a method, 2 for a content header, 3 for a content body, 8 for a heartbeat.
        channel: The channel number, 0 for the connection itself.
        payload: The bytes between the head and the end octet. The payload of a method begins with its class and method
            ids.
    """

    kind: int
    channel: int
    payload: bytes

    @property
    def key(self) -> int:
        """The frame's name as a number: class and method id combined, or minus its kind."""
        return _KEY.unpack_from(self.payload)[0] if self.kind == METHOD else -self.kind

    @property
    def name(self) -> str:
        """A method like ``"basic.publish"``, or ``"header"``, ``"body"``, ``"heartbeat"``."""
        return name_of(self.key)

    @property
    def raw(self) -> bytes:
        """The frame's bytes on the wire."""
        return b"%b%b\xce" % (_HEAD.pack(self.kind, self.channel, len(self.payload)), self.payload)

    @property
    def content_size(self) -> int | None:
        """The body size that a content header announces, or None for other frames."""
        return _BODY_SIZE.unpack_from(self.payload, 4)[0] if self.kind == HEADER else None


def name_of(key: int) -> str:
    """Return the name of a frame's key. The name of an unknown method is its numbers."""
    return _NAMES.get(key) or f"{key >> 16}.{key & 0xFFFF}"


def key_of(name: str) -> int:
    """Return the key of a frame's name.

    Raises:
        ConfigurationError: If no frame has this name.
    """
    try:
        return _KEYS[name]
    except KeyError:
        raise ConfigurationError(
            f"{name!r} is the name of no frame; names are like 'basic.publish', 'basic.ack', 'channel.close', "
            f"or 'header', 'body', 'heartbeat'"
        ) from None


class Chunk(NamedTuple):
    """A sequence of bytes that ends at a frame boundary, with the keys of its frames."""

    data: bytes
    keys: list[int]
    """The keys of the frames in it, in order."""
    boundary: int | None
    """The last offset in `data` at which no content was incomplete on any channel."""


@dataclass(slots=True)
class Splitter:
    """A splitter of one direction of a connection into chunks of whole frames.

    Attributes:
        opaque: True if the stream is not AMQP 0-9-1 (TLS, another version, broken frames). Its bytes pass uncounted.
        between_contents: True if no content is incomplete, so a frame may be inserted here.
    """

    opaque: bool = False
    _begun: bool = False
    _rest: bytes = b""
    _open: dict[int, int] = field(default_factory=dict)

    @property
    def between_contents(self) -> bool:
        return not self._open

    def feed(self, data: bytes) -> Chunk:
        """Return the complete frames read so far. Keep the rest for the next call."""
        if self.opaque:
            return Chunk(data, [], None)
        if self._rest:
            data = self._rest + data
            self._rest = b""
        position = 0
        if not self._begun:
            if _PROTOCOL_HEADER.startswith(data[:4]) and len(data) < _PROTOCOL_HEADER_SIZE:
                self._rest = data
                return Chunk(b"", [], None)
            self._begun = True
            if data.startswith(_PROTOCOL_HEADER):
                position = _PROTOCOL_HEADER_SIZE
        return self._scan(data, position)

    def take_rest(self) -> bytes:
        """Remove and return the incomplete frame at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest

    def _scan(self, data: bytes, position: int) -> Chunk:
        keys: list[int] = []
        boundary = None
        opened = self._open
        size = len(data)
        head, key_at = _HEAD.unpack_from, _KEY.unpack_from
        while size - position >= _OVERHEAD:
            kind, channel, length = head(data, position)
            stop = position + length + _OVERHEAD
            if kind not in _SHORTEST or not _SHORTEST[kind] <= length <= _LARGEST_FRAME:
                self.opaque = True
                return Chunk(data, keys, boundary)
            if stop > size:
                break
            if data[stop - 1] != _FRAME_END:
                self.opaque = True
                return Chunk(data, keys, boundary)
            key = key_at(data, position + 7)[0] if kind == METHOD else -kind
            keys.append(key)
            if key in CONTENT_KEYS:
                opened[channel] = 0
            elif kind == HEADER:
                self._content(channel, _BODY_SIZE.unpack_from(data, position + 11)[0])
            elif kind == BODY:
                self._content(channel, opened.get(channel, 0) - length)
            position = stop
            if not opened:
                boundary = position
        if position < size:
            self._rest = data[position:]
            data = data[:position]
        return Chunk(data, keys, boundary)

    def _content(self, channel: int, missing: int) -> None:
        if missing > 0:
            self._open[channel] = missing
        else:
            self._open.pop(channel, None)


_SHORTEST: Final = {METHOD: 4, HEADER: 12, BODY: 0, HEARTBEAT: 0}


def parse(data: bytes) -> Iterator[Frame | bytes]:
    """Yield the frames of a chunk. Bytes that are not a frame are yielded as bytes."""
    position = _PROTOCOL_HEADER_SIZE if data.startswith(_PROTOCOL_HEADER) else 0
    if position:
        yield data[:position]
    while len(data) - position >= _OVERHEAD:
        kind, channel, length = _HEAD.unpack_from(data, position)
        stop = position + length + _OVERHEAD
        if kind not in _SHORTEST or length < _SHORTEST[kind] or stop > len(data) or data[stop - 1] != _FRAME_END:
            break
        yield Frame(kind, channel, data[position + 7 : stop - 1])
        position = stop
    if position < len(data):
        yield data[position:]


def method(channel: int, name: str, arguments: bytes = b"") -> Frame:
    """Build a method frame from its name and its encoded arguments.

    Raises:
        ConfigurationError: If no method has this name.
    """
    key = key_of(name)
    if key < 0:
        raise ConfigurationError(f"{name!r} is not a method")
    return Frame(METHOD, channel, _KEY.pack(key) + arguments)


def basic_ack(channel: int, delivery_tag: int, *, multiple: bool = False) -> Frame:
    """Build a ``basic.ack`` frame."""
    return method(channel, "basic.ack", struct.pack(">QB", delivery_tag, multiple))


def basic_nack(channel: int, delivery_tag: int, *, multiple: bool = False, requeue: bool = True) -> Frame:
    """Build a ``basic.nack`` frame."""
    return method(channel, "basic.nack", struct.pack(">QB", delivery_tag, multiple | requeue << 1))


def basic_cancel(channel: int, consumer_tag: str) -> Frame:
    """Build a ``basic.cancel`` frame as a broker sends it, which expects no reply."""
    return method(channel, "basic.cancel", encode_short_string(consumer_tag, "consumer_tag") + b"\x01")


def channel_close(channel: int, code: int, text: str) -> Frame:
    """Build a ``channel.close`` frame that names no method as its cause."""
    return method(channel, "channel.close", struct.pack(">H", code) + encode_short_string(text, "text") + bytes(4))


def connection_close(code: int, text: str) -> Frame:
    """Build a ``connection.close`` frame that names no method as its cause."""
    return method(0, "connection.close", struct.pack(">H", code) + encode_short_string(text, "text") + bytes(4))


def connection_blocked(reason: str) -> Frame:
    """Build a ``connection.blocked`` frame."""
    return method(0, "connection.blocked", encode_short_string(reason, "reason"))


def connection_unblocked() -> Frame:
    """Build a ``connection.unblocked`` frame."""
    return method(0, "connection.unblocked")
