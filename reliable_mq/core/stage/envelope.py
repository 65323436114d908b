"""The form of a staged message: the original, whole, in one header of its copy.

A stream keeps messages as AMQP 1.0, and RabbitMQ converts them both ways: it drops headers that are tables or lists
unless their name begins with ``x-``, rounds times, and closes the connection over a decimal (541). So the copy has one
header only, `HEADER`, whose name begins with ``x-`` and whose value is a byte string, which comes back as it was: it
holds the properties of the original as they were on the wire, its queue, exchange and routing key. Properties of text
that is ASCII are repeated on the copy, for other readers of the stream; ``user_id``, ``expiration`` and all headers are
not: the broker would refuse, drop or route by them.

The header also holds a mark of the relay, see `reliable_mq.core.stage.tail`. A message without an original, which has
the mark alone, is a *marker*: no reader sees it.

Invariants: `unstaged` of what `staged` has made is the delivery, byte for byte; whatever the properties of a delivery
are, its copy fits into the frames that the delivery came in: a header that does not fit travels before the body.
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
"""A `Mark.low` of a marker: the relay had not read the tail yet."""

_VERSION: Final = 1
_MARKER, _REDELIVERED, _BEFORE_BODY = 1, 2, 4
_HEAD: Final = Struct(">BBq8s")
_LENGTH: Final = Struct(">I")
_NAME: Final = bytes((len(HEADER),)) + HEADER.encode()
_ENTRY: Final = _NAME + b"x"
_HEADERS, _DELIVERY_MODE, _USER_ID, _EXPIRATION = 0x2000, 0x1000, 0x0010, 0x0100
_TIMESTAMP: Final = 0x0040
_OTHERS: Final = 0x0001 | 0x0002 | 0x0004  # a continuation, and flags that no AMQP 0-9-1 client sends
_LATEST: Final = b"\0\0\0"  # the first bytes of a time before the year 36000, which can be converted
_PERSISTENT: Final = b"\2"


class Mark(NamedTuple):
    """The relay's mark in a staged message."""

    low: int  # an offset of this partition below which everything is settled; `UNKNOWN` in a marker
    epoch: bytes  # eight bytes that no other epoch of a relay has
    is_marker: bool


class Original(NamedTuple):
    """A delivery, as the relay received it.

    Exchange and routing key have bytes that are not UTF-8 as surrogate escapes.
    """

    queue: str
    exchange: str
    routing_key: str
    redelivered: bool
    properties: bytes
    body: bytes


class Parts(NamedTuple):
    """The parts of encoded properties that concern the relay."""

    flags: int  # of the properties that the copy has, too
    before: bytes  # these, up to the headers
    after: bytes  # these, behind the delivery mode
    message_id: bytes | None  # None where there is none, or the properties are broken


_NOTHING: Final = Parts(0, b"", b"", None)


def parts_of(properties: bytes) -> Parts:
    """Cut encoded properties; those that are broken have no parts."""
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
    """Return 16 bytes that two messages share only if they are the same one.

    That is: the same id, routed the same way, with the same body. Headers do not count: a broker adds to them with each
    delivery.
    """
    digest = blake2b(digest_size=16)
    for part in (message_id, _bytes(exchange), _bytes(routing_key)):
        digest.update(len(part).to_bytes(2))
        digest.update(part)
    digest.update(body)
    return digest.digest()


def marker(epoch: bytes) -> bytes:
    """Return the encoded properties of a marker; its body is empty."""
    return _properties(_HEAD.pack(_VERSION, _MARKER, UNKNOWN, epoch), _NOTHING)


def names_of(queue: str, exchange: str, routing_key: str) -> bytes:
    """Encode where a message comes from, for `staged`."""
    return b"".join(bytes((len(name),)) + name for name in (queue.encode(), _bytes(exchange), _bytes(routing_key)))


def staged(
    names: bytes, delivery: RawDelivery, parts: Parts, low: int, epoch: bytes, frame_max: int
) -> tuple[bytes, bytes]:
    """Return encoded properties and body of the copy; ``names`` is from `names_of`."""
    flags = _REDELIVERED if delivery.redelivered else 0
    original, body = delivery.properties, delivery.body
    properties = _properties(_HEAD.pack(_VERSION, flags, low, epoch) + names + original, parts)
    if not frame_max or header_frame_size(properties) <= frame_max:
        return properties, body
    head = _HEAD.pack(_VERSION, flags | _BEFORE_BODY, low, epoch) + names + _LENGTH.pack(len(original))
    return _properties(head, _NOTHING), original + body


def unstaged(properties: bytes, body: bytes) -> tuple[Mark, Original | None] | None:
    """Return mark and original of a staged message; None if it is no staged one.

    It is none, either, if its header is broken, as in a message that others have put there.

    Raises:
        ConfigurationError: it was written by a newer version of this package.
    """
    value = _value(properties)
    if value is None or len(value) < _HEAD.size:
        return None
    version, flags, low, epoch = _HEAD.unpack_from(value)
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

    To search for it costs a tenth of decoding the headers, which is done where its name occurs twice.
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
