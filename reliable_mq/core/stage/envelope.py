"""The form of a stage: its *entries*, which hold one or several messages each.

An entry is one message of the stream. A message of a stream costs RabbitMQ far more CPU time than its bytes do. So an
entry can hold messages that a relay receives together: their bodies travel in one body, each behind its exchange, its
routing key, and its properties as they were on the wire. RabbitMQ neither sees nor converts them: it stores messages as
AMQP 1.0, where it drops headers that are tables or lists, rounds times, and closes the connection over a decimal (541).

An entry of one message has the body of its original, so that other programs can read it. Exchange, routing key and
properties are in the header, unless that would exceed a frame. If they are ASCII, the properties are repeated on the
entry, except for ``user_id``, ``expiration`` and all headers, because the broker would refuse, drop or route by these.

An entry has a single header, `HEADER`, whose name begins with ``x-`` and whose value is bytes. RabbitMQ preserves them,
except that it returns bytes that are UTF-8 as text; so they begin with one that UTF-8 does not have. They hold the
queue, the number of messages, and a mark of the relay, see `reliable_mq.core.stage.tail`. An entry without messages is
a *marker*, which no reader sees.

Invariant: `unstaged` restores deliveries from the result of `staged`, byte for byte and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

from reliable_mq.codec import CodecError, Properties, RawDelivery, header_frame_size
from reliable_mq.errors import ConfigurationError

HEADER: Final = "x-reliable-mq-stage"
"""The header of an entry."""

MOST_MESSAGES: Final = 64
"""The maximum number of messages in an entry."""

UNKNOWN: Final = -1
"""The `Mark.low` of the marker that begins an epoch: the relay had not read the tail yet."""

_BINARY: Final = 0xFF  # not UTF-8
_VERSION: Final = 1
_VALUE: Final = Struct(">BBBqI8s")  # _BINARY, version, form, low, messages, epoch; then the size and text of the queue
_PACKED, _COPY = 0, 1  # the forms: all of the originals is in the body, or only the body of the one original
_ORIGINAL: Final = Struct(">BBBII")  # redelivered, and the sizes of exchange, routing key, properties and body
_LENGTH: Final = Struct(">I")
_NAME: Final = bytes((len(HEADER),)) + HEADER.encode()
_ITEM: Final = _NAME + b"x"
_HEADERS, _DELIVERY_MODE, _PRIORITY, _EXPIRATION, _MESSAGE_ID = 0x2000, 0x1000, 0x0800, 0x0100, 0x0080
_TIMESTAMP, _USER_ID = 0x0040, 0x0010
_FLAGS: Final = (  # of the properties, in their order
    0x8000, 0x4000, _HEADERS, _DELIVERY_MODE, _PRIORITY, 0x0400, 0x0200, _EXPIRATION, _MESSAGE_ID, _TIMESTAMP, 0x0020,
    _USER_ID, 0x0008,
)  # fmt: skip
_BEFORE_ID: Final = _FLAGS[: _FLAGS.index(_MESSAGE_ID)]
_SIZES: Final = {_DELIVERY_MODE: 1, _PRIORITY: 1, _TIMESTAMP: 8}  # others begin with their size
_NOT_REPEATED: Final = _HEADERS | _DELIVERY_MODE | _EXPIRATION | _USER_ID
_OTHERS: Final = 0x0001 | 0x0002 | 0x0004  # a continuation, and flags that no AMQP 0-9-1 client sends
_LATEST: Final = b"\0\0\0"  # the first bytes of a convertible time, before the year 36000
_PERSISTENT: Final = b"\2"
_NOTHING: Final = (0, b"", b"")


class Mark(NamedTuple):
    """The relay's mark in an entry."""

    low: int  # an offset of this partition below which everything is settled, or `UNKNOWN`
    epoch: bytes  # eight bytes that are unique to one epoch of a relay
    is_marker: bool


class Entry(NamedTuple):
    """An entry, read again.

    The originals are as the relay received them, without tags. In their exchange and routing key, bytes that are not
    UTF-8 are surrogate escapes.
    """

    mark: Mark
    queue: str
    originals: list[RawDelivery]


def message_id_of(properties: bytes) -> bytes | None:
    """Return the id in encoded properties. None without one, or if they are broken."""
    try:
        flags, at = properties[0] << 8 | properties[1], 2
        if flags & _OTHERS or not flags & _MESSAGE_ID:
            return None
        for flag in _BEFORE_ID:
            if flags & flag:
                at += _size(properties, at, flag)
        end = at + 1 + properties[at]
    except IndexError:
        return None
    return properties[at + 1 : end] if end <= len(properties) else None


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


def original_parts(delivery: RawDelivery) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Return the parts of a body that hold one delivery, for `staged`."""
    exchange, routing_key = _bytes(delivery.exchange), _bytes(delivery.routing_key)
    properties, body = delivery.properties, delivery.body
    head = _ORIGINAL.pack(delivery.redelivered, len(exchange), len(routing_key), len(properties), len(body))
    return head, exchange, routing_key, properties, body


def marker(epoch: bytes, low: int = UNKNOWN) -> bytes:
    """Return the encoded properties of a marker, whose body is empty."""
    return _properties(_VALUE.pack(_BINARY, _VERSION, _PACKED, low, 0, epoch) + b"\0")


def staged(
    queue: str, parts: Sequence[bytes], messages: int, frame_max: int, *, low: int, epoch: bytes
) -> tuple[bytes, bytes]:
    """Return the encoded properties and body of an entry with these `original_parts`."""
    name = queue.encode()
    name = bytes((len(name),)) + name
    if messages == 1:
        *head, original, body = parts
        value = _VALUE.pack(_BINARY, _VERSION, _COPY, low, messages, epoch)
        properties = _properties(b"".join((value, name, *head, original)), _repeated(original))
        if not frame_max or header_frame_size(properties) <= frame_max:
            return properties, body
    return _properties(_VALUE.pack(_BINARY, _VERSION, _PACKED, low, messages, epoch) + name), b"".join(parts)


def messages_in(properties: bytes) -> int | None:
    """Return the number of messages in an entry. None for any other message."""
    value = _value(properties)
    return None if value is None else min(_VALUE.unpack_from(value)[4], MOST_MESSAGES)


def unstaged(properties: bytes, body: bytes) -> Entry | None:
    """Read an entry again. Return None for any other message.

    A message with a broken header or body, which another program may have published, is not an entry. Nor is one with
    more messages than a relay puts into it.

    Raises:
        ConfigurationError: If a newer version of this package wrote the message.
    """
    value = _value(properties)
    if value is None:
        return None
    _, version, form, low, messages, epoch = _VALUE.unpack_from(value)
    if version != _VERSION:
        raise ConfigurationError(
            f"a staged message has version {version} of header {HEADER}, and this package reads version {_VERSION}: "
            "install the version of reliable-mq that its relay has"
        )
    if messages > MOST_MESSAGES:
        return None
    queue_at = _VALUE.size + 1
    end = queue_at + value[queue_at - 1]
    data = value[end:] + body if form == _COPY else body
    originals: list[RawDelivery] = []
    at = 0
    try:
        for _ in range(messages):
            redelivered, exchange_size, key_size, properties_size, body_size = _ORIGINAL.unpack_from(data, at)
            key_at = at + _ORIGINAL.size + exchange_size
            properties_at = key_at + key_size
            body_at = properties_at + properties_size
            exchange = data[key_at - exchange_size : key_at].decode("utf-8", "surrogateescape")
            routing_key = data[key_at:properties_at].decode("utf-8", "surrogateescape")
            at = body_at + body_size
            originals.append(
                RawDelivery(
                    "", 0, bool(redelivered), exchange, routing_key, data[properties_at:body_at], data[body_at:at]
                )
            )
    except struct_error:
        return None
    if at != len(data) or end > len(value):
        return None
    queue = value[queue_at:end].decode("utf-8", "surrogateescape")
    return Entry(Mark(low, epoch, not messages), queue, originals)


def _repeated(raw: bytes) -> tuple[int, bytes, bytes]:
    """Return the repeated properties: flags, those before and those after the headers."""
    try:
        flags, at = raw[0] << 8 | raw[1], 2
        if flags & _OTHERS:
            return _NOTHING
        kept, before, after = 0, b"", b""
        for flag in _FLAGS:
            if not flags & flag:
                continue
            start, at = at, at + _size(raw, at, flag)
            field = raw[start:at]
            if flag & _NOT_REPEATED or (flag == _TIMESTAMP and not field.startswith(_LATEST)):
                continue
            if flag != _TIMESTAMP and not field[1:].isascii():
                return _NOTHING
            kept |= flag
            if flag > _HEADERS:
                before += field
            else:
                after += field
    except IndexError:
        return _NOTHING
    return (kept, before, after) if at == len(raw) else _NOTHING


def _size(raw: bytes, at: int, flag: int) -> int:
    """Return the size of an encoded property."""
    if flag == _HEADERS:
        return 4 + int.from_bytes(raw[at : at + 4])
    return _SIZES.get(flag) or 1 + raw[at]


def _properties(value: bytes, repeated: tuple[int, bytes, bytes] = _NOTHING) -> bytes:
    flags, before, after = repeated
    item = _ITEM + _LENGTH.pack(len(value)) + value
    flags |= _HEADERS | _DELIVERY_MODE
    return b"".join((flags.to_bytes(2), before, _LENGTH.pack(len(item)), item, _PERSISTENT, after))


def _value(properties: bytes) -> bytes | None:
    """Return the value of our header, which is complete. None for another message.

    Searching for it costs a tenth of decoding the headers. They are decoded if its name does not occur exactly once.
    """
    at = properties.find(_NAME)
    if at < 0:
        return None
    start = at + len(_ITEM) + 4
    if properties.startswith(_ITEM, at) and properties.find(_NAME, start) < 0:
        end = start + int.from_bytes(properties[start - 4 : start])
        value: object = properties[start:end] if end <= len(properties) else None
    else:
        try:
            value = Properties(properties).headers.get(HEADER)
        except CodecError:
            return None
    if not isinstance(value, bytes | bytearray) or len(value) <= _VALUE.size or value[0] != _BINARY:
        return None
    return bytes(value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
