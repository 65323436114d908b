"""Encode the frames of the basic class: publishes, acks, nacks, ``basic.get``.

A publish consists of the method frame (the head), the content header frame and the body frames. The head is the same
for all publishes of a channel to one exchange and routing key, so the caller caches it. The frames are appended to a
list that the caller joins once for many messages.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from reliable_mq.codec.tables import encode_short_string
from reliable_mq.errors import ConfigurationError

FRAME_OVERHEAD: Final = 8  # type, channel, size and end byte
_HEADER_FRAME_FIXED: Final = FRAME_OVERHEAD + 12  # class, weight, body size

_METHOD: Final = Struct(">BHIHH")
_TAG: Final = Struct(">BHIHHQBB")
_CONTENT_HEADER: Final = Struct(">BHIHHQ")
_HEADER_END_AND_BODY: Final = Struct(">BBHI")
_BODY: Final = Struct(">BHI")
_END: Final = b"\xce"

_BASIC: Final = 60


def method_frame(channel: int, class_id: int, method_id: int, arguments: bytes) -> bytes:
    return _METHOD.pack(1, channel, 4 + len(arguments), class_id, method_id) + arguments + _END


def publish_head(channel: int, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    """Encode the method frame of ``basic.publish``, for `append_publish`.

    Surrogate escapes become the bytes that they stand for, so that a delivery's routing key can be used again.

    Raises:
        ConfigurationError: If the exchange or the routing key is not a ``str``, is over 255 bytes, or contains a NUL.
    """
    names = encode_short_string(exchange, "exchange") + encode_short_string(routing_key, "routing_key")
    return method_frame(channel, _BASIC, 40, b"\0\0" + names + (b"\1" if mandatory else b"\0"))


def header_frame_size(properties: bytes) -> int:
    """Return the size of the content header frame in bytes.

    The frame cannot be split and must fit into the connection's ``frame_max``. RabbitMQ closes the connection with 501
    over a larger one.
    """
    return _HEADER_FRAME_FIXED + len(properties)


def append_publish(out: list[bytes], head: bytes, channel: int, properties: bytes, body: bytes, frame_max: int) -> int:
    """Append the frames of one publish to `out`.

    `publish_head` returns the ``head`` for the same channel. A ``frame_max`` of 0 means no limit.

    Returns:
        The number of appended bytes.

    Raises:
        ConfigurationError: If the body is not ``bytes``. Nothing was appended.
    """
    if body.__class__ is not bytes:
        raise ConfigurationError(f"body must be bytes, not {type(body).__name__}")
    size = len(body)
    header = _CONTENT_HEADER.pack(2, channel, 12 + len(properties), _BASIC, 0, size)
    if size and (size <= frame_max - FRAME_OVERHEAD or not frame_max):
        out += (head, header + properties + _HEADER_END_AND_BODY.pack(0xCE, 3, channel, size), body, _END)
        return len(head) + _HEADER_FRAME_FIXED + len(properties) + FRAME_OVERHEAD + size
    out += (head, header + properties + _END)
    total = len(head) + _HEADER_FRAME_FIXED + len(properties)
    step = frame_max - FRAME_OVERHEAD
    for start in range(0, size, step):
        part = body[start : start + step]
        out += (_BODY.pack(3, channel, len(part)), part, _END)
        total += FRAME_OVERHEAD + len(part)
    return total


def encode_ack(channel: int, tag: int, multiple: bool) -> bytes:
    """Encode ``basic.ack`` for `tag`, or for it and all earlier outstanding tags."""
    return _TAG.pack(1, channel, 13, _BASIC, 80, tag, multiple, 0xCE)


def encode_nack(channel: int, tag: int, multiple: bool, requeue: bool) -> bytes:
    """Encode ``basic.nack`` for `tag`, or for it and all earlier outstanding tags."""
    return _TAG.pack(1, channel, 13, _BASIC, 120, tag, multiple | requeue << 1, 0xCE)


def encode_reject(channel: int, tag: int, requeue: bool) -> bytes:
    """Encode ``basic.reject`` for one delivery."""
    return _TAG.pack(1, channel, 13, _BASIC, 90, tag, requeue, 0xCE)


def encode_get(channel: int, queue: str) -> bytes:
    """Encode ``basic.get`` with manual acknowledgement.

    Raises:
        ConfigurationError: If the queue's name is not a ``str``, is over 255 bytes, or contains a NUL.
    """
    return method_frame(channel, _BASIC, 70, b"\0\0" + encode_short_string(queue, "queue") + b"\0")
