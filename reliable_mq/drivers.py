"""Convert messages to and from the objects of pika and aio-pika.

Invariants:

- A message made from a driver's object has the bytes that the driver itself would publish. A message without an id gets
  one, because consumers recognise duplicates by the id.
- The driver decodes a delivery for its own object. Values that it cannot decode are decoded as `Delivery` does.
- A driver is imported only by the first conversion, and none of its exceptions reaches a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

from reliable_mq.codec import BASIC_PROPERTIES, Properties, encode_property
from reliable_mq.codec.properties import MAX_EXPIRATION_MS
from reliable_mq.errors import ConfigurationError

__all__ = ["DeliverArguments", "aio_pika_message", "aio_pika_properties", "pika_objects", "pika_properties"]

DeliverArguments = tuple[str, int, bool, str, str]
"""The consumer tag, the delivery tag, whether it is redelivered, the exchange and the routing key."""

_NAMES = tuple(name for name in BASIC_PROPERTIES if name != "headers")


def pika_properties(properties: object) -> bytes:
    """Return pika's ``BasicProperties``, or None, encoded as pika sends them.

    Raises:
        ConfigurationError: If ``properties`` is another object, or pika or RabbitMQ does not accept one of its values.
    """
    import pika  # noqa: PLC0415

    if properties is None:
        properties = pika.BasicProperties()
    if not isinstance(properties, pika.BasicProperties):
        raise ConfigurationError(f"properties must be a pika.BasicProperties, not {type(properties).__name__}")
    return _encoded("pika", lambda: b"".join(properties.encode()))


def aio_pika_properties(message: object) -> tuple[bytes, bytes]:
    """Return the body and properties of an aio-pika message as aio-pika sends them.

    Raises:
        ConfigurationError: If ``message`` is another object, or aio-pika or RabbitMQ does not accept one of its values.
    """
    import aio_pika  # noqa: PLC0415

    if not isinstance(message, aio_pika.Message):
        raise ConfigurationError(f"message must be an aio_pika.Message, not {type(message).__name__}")
    return message.body, _encoded("aio-pika", message.properties.marshal)


def pika_objects(method: DeliverArguments, raw: bytes) -> tuple[Any, Any]:
    """Return pika's ``Basic.Deliver`` and ``BasicProperties`` for a delivery.

    Raises:
        CodecError: If the properties are broken.
    """
    import pika  # noqa: PLC0415

    deliver = pika.spec.Basic.Deliver(*method)
    properties = pika.BasicProperties()
    try:
        properties.decode(raw)
    except Exception:  # noqa: BLE001  # it decodes less than we do
        decoded = Properties(raw)
        properties = pika.BasicProperties(
            headers=_headers(decoded), **{name: getattr(decoded, name) for name in _NAMES}
        )
    return deliver, properties


def aio_pika_message(method: DeliverArguments, raw: bytes, body: bytes) -> Any:
    """Return aio-pika's ``IncomingMessage`` for a delivery, already settled.

    Raises:
        CodecError: If the properties are broken.
    """
    import aio_pika  # noqa: PLC0415
    from aiormq.abc import DeliveredMessage  # noqa: PLC0415
    from pamqp.commands import Basic  # noqa: PLC0415
    from pamqp.header import ContentHeader  # noqa: PLC0415

    properties = Basic.Properties()
    try:
        properties.unmarshal(int.from_bytes(raw[:2]), raw[2:])
    except Exception:  # noqa: BLE001  # it decodes less than we do
        decoded = Properties(raw)
        for name in _NAMES:
            setattr(properties, "message_type" if name == "type" else name, getattr(decoded, name))
        properties.headers = _headers(decoded)
        if isinstance(decoded.timestamp, int):  # no ``datetime``, which is the only type that aio-pika supports
            properties.timestamp = None
    # aio-pika would raise an error for these values.
    if properties.expiration is not None and not properties.expiration.isdecimal():
        properties.expiration = None
    if properties.delivery_mode not in (1, 2):
        properties.delivery_mode = None
    delivered = DeliveredMessage(
        Basic.Deliver(*method),
        ContentHeader(body_size=len(body), properties=properties),
        body,
        None,  # type: ignore[arg-type]  # the handler's outcome settles it
    )
    return aio_pika.IncomingMessage(delivered, no_ack=True)


def _encoded(driver: str, encode: Callable[[], bytes]) -> bytes:
    """Return properties encoded by a driver, within the limits of RabbitMQ."""
    try:
        raw = encode()
        properties = Properties(raw)
        expiration, headers = properties.expiration, properties.headers
    except Exception as error:
        raise ConfigurationError(f"{driver} cannot encode the properties: {error!r}") from error
    if expiration is not None:
        if not (expiration.isascii() and expiration.isdecimal()):
            raise ConfigurationError(f"expiration must be a number of milliseconds, not {expiration!r}")
        if int(expiration) > MAX_EXPIRATION_MS:
            raise ConfigurationError(f"expiration must be at most ten years in milliseconds, not {expiration!r}")
    encode_property("headers", {name: headers[name] for name in ("CC", "BCC") if name in headers})
    for number in _floats(headers):
        if not isfinite(number):
            raise ConfigurationError(f"headers hold {number}, over which RabbitMQ closes the connection: leave it out")
    return raw


def _floats(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, (list, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(inner)


def _headers(properties: Properties) -> Any:
    """Return the headers as a driver's object stores them: None if there are none."""
    return dict(properties.headers) or None
