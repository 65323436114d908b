"""A message as one line of JSON, for ``consume --json`` and ``publish --json``.

Keys: ``body`` (text) or ``body_base64``; ``exchange`` and ``routing_key``; the properties of `Message` that are set,
under the same names (``timestamp`` as ISO 8601, ``expiration`` in seconds); ``redelivered``, which is written but not
read. If JSON cannot carry the properties exactly (byte strings, timestamps or 32-bit floats in headers, duplicate
names, broken properties), ``properties_base64`` also holds them as they were on the wire.

Invariants:

- A message that is written and read again has the same body and the same properties, byte for byte.
- A blank line is no message, and is skipped. Any other line is understood completely or refused. An unknown key, a
  duplicate key, a wrong type, and a property that contradicts ``properties_base64`` are errors that name the key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any, Final, NamedTuple

from reliable_mq._util.validation import decode_json, is_text, unique_keys
from reliable_mq.codec import CodecError, Properties, encode_properties
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.deadletters.message import DeadMessage
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message, MessageProperties

_PROPERTIES: Final = tuple(MessageProperties.__annotations__)
_BODY, _BODY_BASE64, _RAW = "body", "body_base64", "properties_base64"
_KEYS: Final = frozenset({_BODY, _BODY_BASE64, _RAW, "exchange", "routing_key", "redelivered", *_PROPERTIES})


class Line(NamedTuple):
    """The content of a line: a message, and its exchange and routing key if given."""

    message: Message
    exchange: str | None
    routing_key: str | None


def write_line(delivery: Delivery | DeadMessage) -> bytes:
    """Encode a delivery as a line without the line end."""
    line: dict[str, object] = _written_body(delivery.body)
    line |= {"exchange": delivery.exchange, "routing_key": delivery.routing_key, "redelivered": delivery.redelivered}
    shown = _shown_properties(delivery.properties)
    line |= shown
    if not _carries(shown, delivery.properties):
        line[_RAW] = base64.b64encode(delivery.properties).decode()
    return _dumps(line)


def is_blank(text: bytes) -> bool:
    """Return whether a line holds only whitespace, and so no message."""
    return not text or text.isspace()


def read_line(text: bytes) -> Line:
    """Decode a line.

    Raises:
        ConfigurationError: If the line is not a message. The error names a wrong key.
    """
    try:
        line = decode_json(text, object_pairs_hook=unique_keys)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"not JSON: {error}") from error
    except RecursionError:
        raise ConfigurationError("not read: its JSON is nested too deeply") from None
    if not isinstance(line, dict):
        raise ConfigurationError(f"a JSON object is needed, not {type(line).__name__}")
    unknown = sorted(line.keys() - _KEYS)
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    properties = {name: line[name] for name in _PROPERTIES if line.get(name) is not None}
    body = _read_body(line)
    raw = line.get(_RAW)
    message = _message(body, properties) if raw is None else _exact(body, _decoded(_RAW, raw), properties)
    return Line(message, _optional_text(line, "exchange"), _optional_text(line, "routing_key"))


# -- writing -----------------------------------------------------------------------------------------------------------


def _written_body(body: bytes) -> dict[str, object]:
    try:
        return {_BODY: body.decode()}
    except UnicodeDecodeError:
        return {_BODY_BASE64: base64.b64encode(body).decode()}


def _shown_properties(raw: bytes) -> dict[str, object]:
    """Return the readable properties by the names of `Message`; empty if broken."""
    view = Properties(raw)
    try:
        values: dict[str, Any] = {
            name: getattr(view, name) for name in _PROPERTIES if name not in ("headers", "persistent")
        }
        values["persistent"] = None if view.delivery_mode is None else view.delivery_mode == 2
    except CodecError:
        return {}
    try:
        values["headers"] = dict(view.headers) or None
    except CodecError:
        values["headers"] = None
    expiration = values["expiration"]
    if expiration is not None:
        values["expiration"] = int(expiration) / 1000 if expiration.isdecimal() else None
    return {name: _shown(values[name]) for name in _PROPERTIES if values[name] is not None}


def _shown(value: object) -> object:
    """Return the nearest value that JSON can carry."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else str(value)
        case datetime():
            return value.isoformat()
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case Mapping():
            return {str(name): _shown(item) for name, item in value.items()}
        case list() | tuple():
            return [_shown(item) for item in value]
        case _:
            return str(value)


def _carries(shown: Mapping[str, object], raw: bytes) -> bool:
    """Return whether reading the shown properties results in the same bytes."""
    if "message_id" not in shown or "persistent" not in shown:
        return False  # reading would add an id or make the message persistent
    try:
        return encode_properties(_message(b"", dict(shown))) == raw
    except ConfigurationError:
        return False


def _dumps(line: Mapping[str, object]) -> bytes:
    # Bytes that are not UTF-8 were read as lone surrogates, which this turns into JSON escapes.
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_body(line: Mapping[str, object]) -> bytes:
    if (_BODY in line) == (_BODY_BASE64 in line):
        raise ConfigurationError(f"one of {_BODY} (text) and {_BODY_BASE64} is needed")
    if _BODY_BASE64 in line:
        return _decoded(_BODY_BASE64, line[_BODY_BASE64])
    body = line[_BODY]
    if not isinstance(body, str):
        raise ConfigurationError(f"{_BODY} must be text, not {type(body).__name__}: write JSON in it as a string")
    if not is_text(body):
        raise ConfigurationError(f"{_BODY} holds a lone surrogate: give {_BODY_BASE64}")
    return body.encode()


def _decoded(key: str, value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    except ValueError as error:
        raise ConfigurationError(f"{key} is not base64: {error}") from error


def _message(body: bytes, properties: dict[str, Any]) -> Message:
    timestamp = properties.get("timestamp")
    if timestamp is not None:
        try:
            properties = {**properties, "timestamp": datetime.fromisoformat(timestamp)}
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"timestamp must be ISO 8601 with a zone, not {timestamp!r}") from error
    return Message(body, **properties)


def _exact(body: bytes, raw: bytes, properties: Mapping[str, object]) -> Message:
    """Return the message with exactly these raw properties; the others must match."""
    try:
        message = Message.from_wire(body, raw)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_RAW} holds no properties: {error.__cause__}") from error
    shown = json.loads(_dumps(_shown_properties(raw)))
    changed = sorted(name for name in shown.keys() | properties.keys() if shown.get(name) != properties.get(name))
    if changed:
        raise ConfigurationError(f"{changed[0]} contradicts {_RAW}: leave that out to publish what the line says")
    return message


def _optional_text(line: Mapping[str, object], key: str) -> str | None:
    value = line.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{key} must be text, not {type(value).__name__}")
    return value
