"""Immutable messages, validated by their constructor and small in memory.

Invariants:

- Every `Message` can be sent. The constructor raises for an invalid value.
- The ``message_id`` is the same at every re-publish, and the same text as that of a returned message. It is empty only
  if `from_wire` was given properties without one.
- A message never changes.

A message keeps its body and its id, and its encoded properties if it has any others. Attributes return the values as
encoded: timestamps in whole seconds, expirations in whole milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from secrets import randbits
from time import time_ns
from typing import Any, Final, Never, Self, TypedDict, TypeVar, Unpack

from reliable_mq import drivers
from reliable_mq._util.hooks import ForkStage, at_fork
from reliable_mq.codec import (
    CodecError,
    FieldValue,
    Properties,
    encode_properties,
    encode_property,
    encode_values,
    join_properties,
    split_properties,
)
from reliable_mq.errors import ConfigurationError

__all__ = ["Message", "MessageProperties", "new_message_id"]

T = TypeVar("T")

_JSON_ADVICE: Final = (
    ": convert it, or encode it yourself: "
    'Message(json.dumps(obj, default=str).encode(), content_type="application/json")'
)


class MessageProperties(TypedDict, total=False):
    """The keyword arguments of `Message`."""

    headers: Mapping[str, FieldValue] | None
    content_type: str | None
    content_encoding: str | None
    message_id: str | None
    correlation_id: str | None
    reply_to: str | None
    priority: int | None
    expiration: float | timedelta | None
    timestamp: datetime | None
    type: str | None
    user_id: str | None
    app_id: str | None
    persistent: bool


class Message:
    """A message to publish.

    Args:
        body: The body, as ``bytes``, or as a ``bytearray`` or ``memoryview``, which is copied. For text use
            ``Message("é".encode())`` or `Message.json`.
        headers: A mapping of names (up to 255 bytes) to ``None``, ``bool``, ``int`` (64 bits), finite ``float``,
            ``Decimal``, ``str``, ``bytes``, aware ``datetime``, lists and mappings of these, up to 32 levels deep.
        content_type: The content type, e.g. ``"application/json"``.
        content_encoding: The content encoding, e.g. ``"gzip"``.
        message_id: The id by which consumers recognise duplicates. The default is a new time-ordered UUID.
        correlation_id: An id that ties a reply to its request.
        reply_to: The queue for replies.
        priority: The priority, 0 to 255, for queues with priorities.
        expiration: The seconds, or a ``timedelta``, after which a queue dead-letters the message, or drops it if it
            has no dead-letter queue; rounded to milliseconds.
        timestamp: An aware ``datetime``; AMQP carries whole seconds. A naive one is refused, because its meaning would
            depend on the machine that reads it.
        type: The application's name for the kind of message.
        user_id: The publishing user, which RabbitMQ checks against the connection's user.
        app_id: The application that publishes the message.
        persistent: Whether durable queues keep the message across a restart of the broker.

    Equality is identity. A message can be pickled and copied.

    Raises:
        ConfigurationError: If AMQP cannot carry a value, or RabbitMQ would close the channel over it. The message names
            the field and the remedy.
    """

    __slots__ = ("body", "encoded_properties", "message_id")

    body: bytes
    message_id: str
    encoded_properties: bytes | None
    """All properties as on the wire; None where the message is persistent, has an id, and nothing else. Internal."""

    def __init__(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Mapping[str, FieldValue] | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        message_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        priority: int | None = None,
        expiration: float | timedelta | None = None,
        timestamp: datetime | None = None,
        type: str | None = None,  # noqa: A002
        user_id: str | None = None,
        app_id: str | None = None,
        persistent: bool = True,
    ) -> None:
        if body.__class__ is not bytes:
            body = _copied_body(body)
        if message_id is None:
            message_id = new_message_id()
        else:
            encoded_id = encode_property("message_id", message_id)
            if message_id.__class__ is not str or not message_id.isascii():
                message_id = _as_returned(encoded_id)
        encoded = None
        if not (
            persistent is True
            and headers is None
            and content_type is None
            and content_encoding is None
            and correlation_id is None
            and reply_to is None
            and priority is None
            and expiration is None
            and timestamp is None
            and type is None
            and user_id is None
            and app_id is None
        ):
            # Below, None means absent, and the broker treats a message without a delivery mode as transient.
            encode_property("persistent", persistent)
            encoded = encode_values(
                (
                    content_type,
                    content_encoding,
                    headers,
                    persistent,
                    priority,
                    correlation_id,
                    reply_to,
                    expiration,
                    message_id,
                    timestamp,
                    type,
                    user_id,
                    app_id,
                )
            )
        _set_body(self, body)
        _set_message_id(self, message_id)
        _set_encoded_properties(self, encoded)

    @classmethod
    def json(cls, obj: object, **properties: Unpack[MessageProperties]) -> Self:
        """Return a message with `obj` as JSON and the content type ``application/json``.

        Args:
            obj: Any object that ``json.dumps`` accepts, except NaN and infinities, which JSON does not have.
            properties: The keyword arguments of `Message`. A ``content_type`` replaces the default one.

        Raises:
            ConfigurationError: If `obj` cannot be written as JSON, or a property is invalid.
        """
        try:
            body = json.dumps(obj, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            advice = _JSON_ADVICE if isinstance(error, TypeError) else ""
            raise ConfigurationError(f"the body cannot be written as JSON: {error}{advice}") from error
        properties.setdefault("content_type", "application/json")
        return cls(body, **properties)

    @classmethod
    def from_wire(cls, body: bytes, properties: bytes) -> Self:
        """Return a message equal to a delivered one, byte for byte.

        For a delivery, call ``from_wire(delivery.body, delivery.properties)``. RabbitMQ's rules for published
        properties apply: ``user_id`` must be the connection's user, and ``CC`` and ``BCC`` route the message to those
        queues again.

        Args:
            body: The bytes of the message.
            properties: The encoded properties. If they have no ``message_id``, none is sent and the message's id is
                empty. A publisher has only one such message outstanding at a time, because it could not tell their
                returns apart.

        Raises:
            ConfigurationError: If ``properties`` cannot be decoded.
        """
        try:
            split_properties(properties)
        except CodecError as error:
            raise ConfigurationError(f"properties are not those of a message: {error}") from error
        return cls._from_wire(body, properties, Properties(properties).message_id or "")

    @classmethod
    def from_pika(cls, body: bytes | str, properties: object = None) -> Self:
        """Return a message with a body and properties for pika's ``basic_publish``.

        All properties and headers are those that pika would send, byte for byte. A message without an id gets one.

        Args:
            body: The body, as bytes, or as text, which is encoded as UTF-8, as pika does.
            properties: A ``pika.BasicProperties``, or None. Only ``delivery_mode`` 2 makes the message persistent.

        Raises:
            ConfigurationError: If pika cannot encode the body or the properties, or RabbitMQ would close the channel
                over the properties.
        """
        try:
            encoded = body.encode() if isinstance(body, str) else body
        except UnicodeEncodeError as error:
            raise ConfigurationError("body must be text that UTF-8 can carry: give bytes") from error
        return cls._from_driver(encoded, drivers.pika_properties(properties))

    @classmethod
    def from_aio_pika(cls, message: object) -> Self:
        """Return a message equal to an ``aio_pika.Message``, received or to be sent.

        All properties and headers are those that aio-pika would send, byte for byte. A message without an id gets one.

        Raises:
            ConfigurationError: If aio-pika cannot encode the properties, or RabbitMQ would close the channel over them.
        """
        return cls._from_driver(*drivers.aio_pika_properties(message))

    @classmethod
    def _from_driver(cls, body: object, properties: bytes) -> Self:
        message = cls.from_wire(_copied_body(body), properties)
        return message if message.message_id else message.replace(message_id=None)

    @classmethod
    def _from_wire(cls, body: bytes, properties: bytes | None, message_id: str) -> Self:
        """Return a message that is sent with exactly these properties.

        The id identifies the message to the publisher. The properties need not have one.
        """
        message = cls.__new__(cls)
        _set_body(message, body)
        _set_message_id(message, message_id)
        _set_encoded_properties(message, properties)
        return message

    def replace(
        self, *, body: bytes | bytearray | memoryview | None = None, **changes: Unpack[MessageProperties]
    ) -> Self:
        """Return a copy with some properties changed.

        None removes a property, except ``persistent``. The copy has the same ``message_id``, unless another one is
        given; None creates a new id. Unchanged properties stay the same byte for byte.

        Raises:
            ConfigurationError: If a value is invalid, as for `Message`.
        """
        segments = split_properties(encode_properties(self))
        message_id = self.message_id
        for name, value in changes.items():
            if name not in MessageProperties.__annotations__:
                raise TypeError(f"Message.replace() got an unexpected keyword argument {name!r}")
            segment = "delivery_mode" if name == "persistent" else name
            if value is not None or name == "persistent":
                segments[segment] = encode_property(name, value)
            elif segment in segments:
                del segments[segment]
        if "message_id" in changes:
            encoded_id = encode_property("message_id", changes["message_id"] or new_message_id())
            segments["message_id"], message_id = encoded_id, _as_returned(encoded_id)
        copied = self.body if body is None else _copied_body(body)
        return self._from_wire(copied, join_properties(segments), message_id)

    @property
    def _properties(self) -> Properties:
        return Properties(encode_properties(self))

    @property
    def headers(self) -> Mapping[str, FieldValue]:
        """The headers, read-only; empty if there are none."""
        return self._properties.headers

    @property
    def content_type(self) -> str | None:
        """The content type."""
        return self._properties.content_type

    @property
    def content_encoding(self) -> str | None:
        """The content encoding."""
        return self._properties.content_encoding

    @property
    def correlation_id(self) -> str | None:
        """The correlation id."""
        return self._properties.correlation_id

    @property
    def reply_to(self) -> str | None:
        """The queue for replies."""
        return self._properties.reply_to

    @property
    def priority(self) -> int | None:
        """The priority, 0 to 255."""
        return self._properties.priority

    @property
    def expiration(self) -> float | None:
        """The seconds after which queues drop the message."""
        milliseconds = self._properties.expiration
        return int(milliseconds) / 1000 if milliseconds is not None and milliseconds.isdecimal() else None

    @property
    def timestamp(self) -> datetime | None:
        """The timestamp in UTC, in whole seconds."""
        value = self._properties.timestamp
        return None if isinstance(value, int) else value

    @property
    def user_id(self) -> str | None:
        """The user that publishes the message."""
        return self._properties.user_id

    @property
    def app_id(self) -> str | None:
        """The application that publishes the message."""
        return self._properties.app_id

    @property
    def persistent(self) -> bool:
        """Whether durable queues keep the message across a restart of the broker."""
        return self._properties.delivery_mode == 2

    @property
    def type(self) -> str | None:
        """The application's name for the kind of message."""
        return self._properties.type

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"a Message is immutable: use replace({name}=...)")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"a Message is immutable: {name!r} cannot be deleted")

    @classmethod
    def _unpickled(cls, body: object, properties: object, message_id: object) -> Self:
        """Return the message of a pickle, which is untrusted, or of a copy.

        Raises:
            ConfigurationError: If a value is invalid. The message names the field.
        """
        try:
            body = _instance("body", bytes, body)
            message_id = _instance("message_id", str, message_id)
            if properties is None:
                return cls._from_wire(body, None, _as_returned(encode_property("message_id", message_id)))
            properties = _instance("properties", bytes, properties)
            return cls._from_wire(body, properties, Properties(properties).message_id or message_id)
        except (ConfigurationError, CodecError) as error:
            raise ConfigurationError(f"a pickled message is damaged: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return self._unpickled, (self.body, self.encoded_properties, self.message_id)

    def __repr__(self) -> str:
        body: bytes | None = getattr(self, "body", None)
        if body is None:  # the constructor raised, and a debugger shows the incomplete object
            return f"<{self.__class__.__name__}, half made>"
        return f"<{self.__class__.__name__} {getattr(self, 'message_id', '?')}: {len(body)} bytes>"


# The slots' own setters, which bypass __setattr__.
_set_body: Final = Message.__dict__["body"].__set__
_set_message_id: Final = Message.__dict__["message_id"].__set__
_set_encoded_properties: Final = Message.__dict__["encoded_properties"].__set__


def _copied_body(body: object) -> bytes:
    """Return the body as plain bytes: a subclass may override its length or content."""
    if body.__class__ is bytes:
        return body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    if isinstance(body, str):
        raise ConfigurationError("body must be bytes, not str: use body.encode(), or Message.json(...) for JSON")
    raise ConfigurationError(
        f"body must be bytes, bytearray or memoryview, not {type(body).__name__}: encode it, or use Message.json(...)"
    )


def _as_returned(segment: bytes) -> str:
    """Return an encoded id as it is decoded from a returned message.

    It differs from the given id if that has surrogate escapes that form UTF-8, or is a member of an enum.
    """
    return segment[1:].decode("utf-8", "surrogateescape")


def _instance(field: str, kind: type[T], value: object) -> T:
    if value.__class__ is not kind:
        raise ConfigurationError(f"{field} must be {kind.__name__}, not {type(value).__name__}")
    return value


# -- message ids: UUIDs of version 7 (RFC 9562) from milliseconds, 12 bits of their fraction, and 62 random bits

_HEX_12_BITS: Final = tuple(f"{number:03x}" for number in range(4096))
_IDS_AT_A_TIME: Final = 256

# Twelve random hexadecimal digits for each future id. `pop` is atomic, so no two threads get the same digits. A forked
# child clears the list, so no two processes do either.
_random_digits: list[str] = []
# The millisecond of the last id, and the digits that all ids of that millisecond share.
_moment = [(0, "", "")]


def new_message_id() -> str:
    """Return a new time-ordered UUID (version 7). Thread-safe, and safe after a fork."""
    millisecond, nanoseconds = divmod(time_ns(), 1_000_000)
    shared, head, middle = _moment[0]
    if shared != millisecond:
        head = f"{millisecond >> 16:08x}-{millisecond & 0xFFFF:04x}-7"
        middle = f"-{0x8000 | randbits(14):04x}-"
        _moment[0] = (millisecond, head, middle)
    try:
        tail = _random_digits.pop()
    except IndexError:
        tail = _refill()
    return f"{head}{_HEX_12_BITS[nanoseconds * 67 >> 14]}{middle}{tail}"


def _refill() -> str:
    digits = os.urandom(6 * _IDS_AT_A_TIME).hex()
    *fresh, tail = (digits[start : start + 12] for start in range(0, len(digits), 12))
    _random_digits.extend(fresh)
    return tail


at_fork(ForkStage.RENEW, _random_digits.clear)
