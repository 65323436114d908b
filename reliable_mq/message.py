"""Messages: immutable, validated by the constructor, small in memory.

Invariants:

- Every `Message` can be sent: an invalid value raises in the constructor.
- The ``message_id`` is the same at every re-publish. It is empty only if `from_wire` was given none.
- Nothing about a message changes.

A message keeps its body, its id and, if it has others, its encoded properties. Attributes return the values as encoded:
a timestamp has whole seconds and an expiration whole milliseconds.
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
        body: ``bytes``, or a ``bytearray`` or ``memoryview``, which is copied. Text: ``Message("é".encode())``, or
            `Message.json`.
        headers: names (up to 255 bytes) to values: ``None``, ``bool``, ``int`` (64 bits), ``float`` (finite),
            ``Decimal``, ``str``, ``bytes``, aware ``datetime``, lists and mappings of these, up to 32 levels deep.
        content_type: e.g. ``"application/json"``.
        content_encoding: e.g. ``"gzip"``.
        message_id: the id by which consumers recognise duplicates; the default is a new time-ordered UUID.
        correlation_id: ties a reply to its request.
        reply_to: the queue for replies.
        priority: 0 to 255, for queues with priorities.
        expiration: seconds, or a ``timedelta``, after which queues drop the message; rounded to milliseconds.
        timestamp: an aware ``datetime``; AMQP carries whole seconds. A naive one is refused: which time it means
            would depend on the machine that reads it.
        type: an application's name for the kind of message.
        user_id: checked by RabbitMQ against the connection's user.
        app_id: the application that publishes.
        persistent: whether durable queues keep it across a restart of the broker.

    Equality is identity. A message can be pickled and copied.

    Raises:
        ConfigurationError: a value that AMQP cannot carry or that RabbitMQ would close the channel over; its text
            names the field and the remedy.
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
            encode_property("message_id", message_id)
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
            # None would pass for absent below, and the broker takes an absent delivery mode for transient.
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
            obj: anything that ``json.dumps`` accepts, but no NaN and no infinities, which JSON does not have.
            properties: as for `Message`; a ``content_type`` replaces ours.

        Raises:
            ConfigurationError: `obj` cannot be written as JSON, or as for `Message`.
        """
        try:
            body = json.dumps(obj, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the body cannot be written as JSON: {error}") from error
        properties.setdefault("content_type", "application/json")
        return cls(body, **properties)

    @classmethod
    def from_wire(cls, body: bytes, properties: bytes) -> Self:
        """Return a message equal to a delivered one, byte for byte.

        It is ``from_wire(delivery.body, delivery.properties)``. Mind RabbitMQ's rules for published properties:
        ``user_id`` must be the connection's own, and ``CC`` and ``BCC`` route the message to those queues again.

        Args:
            body: the bytes of the message.
            properties: as on the wire. Without a ``message_id`` none is sent, the message's own is empty, and a
                publisher has one such message outstanding at a time: it could not tell their returns apart.

        Raises:
            ConfigurationError: ``properties`` cannot be decoded.
        """
        try:
            split_properties(properties)
        except CodecError as error:
            raise ConfigurationError(f"properties are not those of a message: {error}") from error
        return cls._from_wire(body, properties, Properties(properties).message_id or "")

    @classmethod
    def from_pika(cls, body: bytes | str, properties: object = None) -> Self:
        """Return a message with a body and properties for pika's ``basic_publish``.

        All properties and headers are those that pika would send, byte for byte; a message without an id gets one.

        Args:
            body: bytes, or text, which pika encodes in UTF-8.
            properties: a ``pika.BasicProperties``, or None. Its ``delivery_mode`` says whether the message is
                persistent; without one it is not.

        Raises:
            ConfigurationError: pika cannot encode the properties, or RabbitMQ would close the channel over them.
        """
        return cls._from_driver(body.encode() if isinstance(body, str) else body, drivers.pika_properties(properties))

    @classmethod
    def from_aio_pika(cls, message: object) -> Self:
        """Return a message equal to an ``aio_pika.Message``, received or to be sent.

        All properties and headers are those that aio-pika would send, byte for byte; a message without an id gets one.

        Raises:
            ConfigurationError: aio-pika cannot encode the properties, or RabbitMQ would close the channel over them.
        """
        return cls._from_driver(*drivers.aio_pika_properties(message))

    @classmethod
    def _from_driver(cls, body: object, properties: bytes) -> Self:
        message = cls.from_wire(_copied_body(body), properties)
        return message if message.message_id else message.replace(message_id=None)

    @classmethod
    def _from_wire(cls, body: bytes, properties: bytes | None, message_id: str) -> Self:
        """Return a message that is sent with exactly these properties.

        Args:
            body: the bytes of the message.
            properties: encoded.
            message_id: identifies the message to the publisher; the properties need not have one.
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

        None removes a property, except ``persistent``. The copy has the same ``message_id`` unless another is given, or
        None for a new one. Properties that are not changed stay the same byte for byte.

        Raises:
            ConfigurationError: as for `Message`.
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
            message_id = changes["message_id"] or new_message_id()
            segments["message_id"] = encode_property("message_id", message_id)
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
        """Where a reply goes."""
        return self._properties.reply_to

    @property
    def priority(self) -> int | None:
        """The priority, 0 to 255."""
        return self._properties.priority

    @property
    def expiration(self) -> float | None:
        """Seconds after which queues drop it."""
        milliseconds = self._properties.expiration
        return int(milliseconds) / 1000 if milliseconds is not None and milliseconds.isdecimal() else None

    @property
    def timestamp(self) -> datetime | None:
        """The timestamp in UTC, in whole seconds."""
        value = self._properties.timestamp
        return None if isinstance(value, int) else value

    @property
    def user_id(self) -> str | None:
        """The user that publishes it."""
        return self._properties.user_id

    @property
    def app_id(self) -> str | None:
        """The application that publishes it."""
        return self._properties.app_id

    @property
    def persistent(self) -> bool:
        """Whether durable queues keep it across a restart of the broker."""
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
        """Return the message of a pickle or a copy, which anybody may have written.

        Raises:
            ConfigurationError: there is no such message; the text names the field.
        """
        try:
            body = _instance("body", bytes, body)
            message_id = _instance("message_id", str, message_id)
            if properties is None:
                encode_property("message_id", message_id)
                return cls._from_wire(body, None, message_id)
            properties = _instance("properties", bytes, properties)
            split_properties(properties)
            return cls._from_wire(body, properties, message_id)
        except (ConfigurationError, CodecError) as error:
            raise ConfigurationError(f"a pickled message is damaged: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return self._unpickled, (self.body, self.encoded_properties, self.message_id)

    def __repr__(self) -> str:
        body: bytes | None = getattr(self, "body", None)
        if body is None:  # half made: its constructor has refused something, and a debugger looks at it
            return f"<{self.__class__.__name__}, half made>"
        return f"<{self.__class__.__name__} {getattr(self, 'message_id', '?')}: {len(body)} bytes>"


# The slots' own setters, which __setattr__ does not stand before.
_set_body: Final = Message.__dict__["body"].__set__
_set_message_id: Final = Message.__dict__["message_id"].__set__
_set_encoded_properties: Final = Message.__dict__["encoded_properties"].__set__


def _copied_body(body: object) -> bytes:
    """Return the bytes of a body: a subclass may override its length or content."""
    if body.__class__ is bytes:
        return body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    if isinstance(body, str):
        raise ConfigurationError("body must be bytes, not str: use body.encode(), or Message.json(...) for JSON")
    raise ConfigurationError(
        f"body must be bytes, bytearray or memoryview, not {type(body).__name__}: encode it, or use Message.json(...)"
    )


def _instance(field: str, kind: type[T], value: object) -> T:
    if value.__class__ is not kind:
        raise ConfigurationError(f"{field} must be {kind.__name__}, not {type(value).__name__}")
    return value


# -- message ids: UUIDs of version 7 (RFC 9562): milliseconds, 12 bits of the fraction below, 62 random bits

_HEX_12_BITS: Final = tuple(f"{number:03x}" for number in range(4096))
_IDS_AT_A_TIME: Final = 256

# Twelve random hexadecimal digits for each id to come. Taking one out is atomic, so threads never get the same; a
# forked child empties it, so processes do not either.
_random_digits: list[str] = []
# The millisecond of the last id, with the digits that all ids of that millisecond share.
_moment = [(0, "", "")]


def new_message_id() -> str:
    """Make a time-ordered UUID (version 7). Thread-safe, and safe after a fork."""
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
