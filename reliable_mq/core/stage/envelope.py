"""The form of a staged message: the whole original in one header of its copy.

A stream stores messages as AMQP 1.0, and RabbitMQ converts them in both directions. It drops headers that are tables or
lists unless their name begins with ``x-``, rounds times, and closes the connection over a decimal (541). So the copy
has a single header, `HEADER`, whose name begins with ``x-`` and whose value is bytes. RabbitMQ preserves them, except
that it returns bytes that are UTF-8 as text; so they begin with one that UTF-8 does not have. They hold the queue,
exchange and routing key of the original, and its properties as they were on the wire. If they are ASCII, the properties
are repeated on the copy for other readers of the stream, except for ``user_id``, ``expiration`` and all headers,
because the broker would refuse, drop or route by these.

The header also holds a mark of the relay, see `reliable_mq.core.stage.tail`. A message that has a mark but no original
is a *marker*, which no reader sees.

Invariants:

- `unstaged` restores a delivery from the result of `staged`, byte for byte.
- Whatever the properties of a delivery are, its copy fits into the frames in which the delivery came. A header that is
  too large travels before the body.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

from reliable_mq.codec import CodecError, Properties, RawDelivery, header_frame_size
from reliable_mq.errors import ConfigurationError

__all__ = [
    "HEADER",
    "UNKNOWN",
    "Mark",
    "Original",
    "Parts",
    "identity",
    "marker",
    "names_of",
    "parts_of",
    "staged",
    "unstaged",
]

HEADER: Final = "x-reliable-mq-stage"
"""The header of a staged message."""

UNKNOWN: Final = -1
"""The `Mark.low` of the marker that begins an epoch: the relay had not read the tail yet."""

_BINARY: Final = 0xFF  # not UTF-8
_VERSION: Final = 1
_MARKER, _REDELIVERED, _BEFORE_BODY = 1, 2, 4
_HEAD: Final = Struct(">BBBq8s")
_LENGTH: Final = Struct(">I")
_NAME: Final = bytes((len(HEADER),)) + HEADER.encode()
_ENTRY: Final = _NAME + b"x"
_HEADERS, _DELIVERY_MODE, _USER_ID, _EXPIRATION = 0x2000, 0x1000, 0x0010, 0x0100
_TIMESTAMP: Final = 0x0040
_OTHERS: Final = 0x0001 | 0x0002 | 0x0004  # a continuation, and flags that no AMQP 0-9-1 client sends
_LATEST: Final = b"\0\0\0"  # the first bytes of a convertible time, before the year 36000
_PERSISTENT: Final = b"\2"


class Mark(NamedTuple):
    """The relay's mark in a staged message."""

    low: int  # an offset of this partition below which everything is settled, or `UNKNOWN`
    epoch: bytes  # eight bytes that are unique to one epoch of a relay
    is_marker: bool


class Original(NamedTuple):
    """A delivery, as the relay received it.

    In the exchange and routing key, bytes that are not UTF-8 are surrogate escapes.
    """

    queue: str
    exchange: str
    routing_key: str
    redelivered: bool
    properties: bytes
    body: bytes


class Parts(NamedTuple):
    """The parts of encoded properties that concern the relay."""

    flags: int  # the flags of the properties that are repeated on the copy
    before: bytes  # the repeated properties before the headers
    after: bytes  # the repeated properties after the delivery mode
    message_id: bytes | None  # None if there is none, or the properties are broken


_NOTHING: Final = Parts(0, b"", b"", None)


def parts_of(properties: bytes) -> Parts:
    """Split encoded properties into parts. Broken properties have no parts."""
    try:
        return _cut(properties)
    except IndexError:
        return _NOTHING


def _cut(raw: bytes) -> Parts:
    flags = raw[0] << 8 | raw[1]
    if flags & _OTHERS:
        return _NOTHING
    at = 2
    for flag in (0x8000, 0x4000):
        if flags & flag:
            at += 1 + raw[at]
    before = raw[2:at]
    if flags & _HEADERS:
        at += 4 + int.from_bytes(raw[at : at + 4])
    at += flags >> 12 & 1  # the delivery mode
    start = at
    at += flags >> 11 & 1  # the priority
    for flag in (0x0400, 0x0200):
        if flags & flag:
            at += 1 + raw[at]
    after = raw[start:at]
    if flags & _EXPIRATION:
        at += 1 + raw[at]
    message_id = None
    if flags & 0x0080:
        start, at = at, at + 1 + raw[at]
        message_id = raw[start + 1 : at]
        after += raw[start:at]
    time = b""
    if flags & _TIMESTAMP:
        time, at = raw[at : at + 8], at + 8
    end = b""
    for flag in (0x0020, _USER_ID, 0x0008):
        if flags & flag:
            start, at = at, at + 1 + raw[at]
            if flag != _USER_ID:
                end += raw[start:at]
    if at != len(raw):
        return _NOTHING
    kept = flags & ~(_HEADERS | _DELIVERY_MODE | _USER_ID | _EXPIRATION)
    if not (before.isascii() and after.isascii() and end.isascii()):
        return Parts(0, b"", b"", message_id)
    if not time.startswith(_LATEST):
        time, kept = b"", kept & ~_TIMESTAMP
    return Parts(kept, before, after + time + end, message_id)


def identity(message_id: bytes, exchange: str, routing_key: str, body: bytes) -> bytes:
    """Return 16 bytes that two messages share only if they are the same message.

    The same message has the same id, routing and body. Headers do not count, because a broker adds to them with each
    delivery.
    """
    digest = blake2b(digest_size=16)
    for part in (message_id, _bytes(exchange), _bytes(routing_key)):
        digest.update(len(part).to_bytes(2))
        digest.update(part)
    digest.update(body)
    return digest.digest()


def marker(epoch: bytes, low: int = UNKNOWN) -> bytes:
    """Return the encoded properties of a marker, whose body is empty."""
    return _properties(_head(_MARKER, low, epoch), _NOTHING)


def names_of(queue: str, exchange: str, routing_key: str) -> bytes:
    """Encode the origin of a message for `staged`."""
    return b"".join(bytes((len(name),)) + name for name in (queue.encode(), _bytes(exchange), _bytes(routing_key)))


def staged(
    names: bytes, delivery: RawDelivery, parts: Parts, low: int, epoch: bytes, frame_max: int
) -> tuple[bytes, bytes]:
    """Return the encoded properties and body of the copy.

    ``names`` is the result of `names_of`.
    """
    flags = _REDELIVERED if delivery.redelivered else 0
    original, body = delivery.properties, delivery.body
    properties = _properties(_head(flags, low, epoch) + names + original, parts)
    if not frame_max or header_frame_size(properties) <= frame_max:
        return properties, body
    head = _head(flags | _BEFORE_BODY, low, epoch) + names + _LENGTH.pack(len(original))
    return _properties(head, _NOTHING), original + body


def unstaged(properties: bytes, body: bytes) -> tuple[Mark, Original | None] | None:
    """Return the mark and original of a staged message, or None for any other message.

    A message with a broken header, which another program may have published, is not a staged message.

    Raises:
        ConfigurationError: If a newer version of this package wrote the message.
    """
    value = _value(properties)
    if value is None or len(value) < _HEAD.size or value[0] != _BINARY:
        return None
    _, version, flags, low, epoch = _HEAD.unpack_from(value)
    if version != _VERSION:
        raise ConfigurationError(
            f"a staged message has version {version} of header {HEADER}, and this package reads version {_VERSION}: "
            "install the version of reliable-mq that its relay has"
        )
    mark = Mark(low, epoch, bool(flags & _MARKER))
    if mark.is_marker:
        return mark, None
    names = []
    at = _HEAD.size
    try:
        for _ in range(3):
            end = at + 1 + value[at]
            names.append(value[at + 1 : end].decode("utf-8", "surrogateescape"))
            at = end
        original = value[at:]
        if flags & _BEFORE_BODY:
            (length,) = _LENGTH.unpack(original)
            original, body = body[:length], body[length:]
    except (IndexError, struct_error):
        return None
    return mark, Original(names[0], names[1], names[2], bool(flags & _REDELIVERED), original, body)


def _head(flags: int, low: int, epoch: bytes) -> bytes:
    return _HEAD.pack(_BINARY, _VERSION, flags, low, epoch)


def _properties(value: bytes, parts: Parts) -> bytes:
    entry = _ENTRY + _LENGTH.pack(len(value)) + value
    return b"".join(
        (
            (parts.flags | _HEADERS | _DELIVERY_MODE).to_bytes(2),
            parts.before,
            _LENGTH.pack(len(entry)),
            entry,
            _PERSISTENT,
            parts.after,
        )
    )


def _value(properties: bytes) -> bytes | None:
    """Return the value of our header.

    Searching for it costs a tenth of decoding the headers. They are decoded if its name does not occur exactly once.
    """
    at = properties.find(_NAME)
    if at < 0:
        return None
    start = at + len(_ENTRY) + 4
    if properties.startswith(_ENTRY, at) and properties.find(_NAME, start) < 0:
        end = start + int.from_bytes(properties[start - 4 : start])
        return properties[start:end] if end <= len(properties) else None
    try:
        value = Properties(properties).headers.get(HEADER)
    except CodecError:
        return None
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
