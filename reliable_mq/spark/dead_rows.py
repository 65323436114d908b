"""The dead letters of a sink: rows that cannot be sent, as messages that say why.

A letter has as much of its row as a message can carry: the body, and every property and header that is valid. The
columns that are not travel as text in a header of ours. Where the message was for, and why it was not sent, is in the
headers that every dead letter of this package has, so that the tools for dead letters read it.

Invariants: a letter can always be encoded, whatever the row holds; it is persistent, has the message id of its row if
that is one, and else an id that every attempt makes again; nothing in it routes it elsewhere or lets it expire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reliable_mq._util.version import OWN_VERSION
from reliable_mq.codec import Properties, encode_properties, encode_property, encode_table
from reliable_mq.core import headers
from reliable_mq.core.publisher.publication import Publication
from reliable_mq.errors import ConfigurationError, PublishError, PublishRefused
from reliable_mq.message import Message
from reliable_mq.spark.rows import MessageIds, Outgoing, UnsendableRow, moment

__all__ = ["letter_of_message", "letter_of_row"]

_TEXT: Final = 1024  # characters of a value that is no property or header
_HEADERS: Final = 48 * 2**10  # bytes; a frame holds 128 KiB, or 8 where the broker wants it so
_LARGEST: Final = 16 * 2**20  # bytes of a body, as a publisher sends it by default
_CUT: Final = 64 * 2**10  # bytes of a body that is too large
_TOO_LARGE: Final = 311
_MOVED: Final = {"user_id": headers.ORIGINAL_USER_ID, "expiration": headers.ORIGINAL_EXPIRATION}
_COPIES: Final = {"CC": headers.ORIGINAL_CC, "BCC": headers.ORIGINAL_BCC}


def letter_of_row(row: UnsendableRow, ids: MessageIds) -> Message:
    """Return the dead letter of a row that no message can be made of."""
    values = dict(row.values)
    body = values.pop("body", None)
    exchange, routing_key = values.pop("exchange", None), values.pop("routing_key", None)
    given = dict(values.pop("headers", None) or ())
    if (traceparent := values.pop("traceparent", None)) is not None:
        given.setdefault("traceparent", traceparent)
    table, unfit = _fit_headers(given)
    fit: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name == "persistent":
            continue
        if not _fits(name, value):
            unfit[name] = _text(f"{value} microseconds since 1970" if name == "timestamp" else value)
        elif name in _MOVED:
            table[_MOVED[name]] = str(round(value * 1000)) if name == "expiration" else value
        else:
            fit[name] = moment(value) if name == "timestamp" else value
    if "message_id" not in fit:
        others = sorted((name, value) for name, value in row.values.items() if name != "body")
        fit["message_id"] = ids.of(body or b"", (body is None, others))
    table |= _ours(row.reason, exchange or "", routing_key or "")
    if unfit:
        table[headers.ORIGINAL_COLUMNS] = unfit
    body = body or b""
    return _bounded(Message(body, headers=table, **fit), cut=len(body) > _LARGEST)


def letter_of_message(refused: Outgoing | Publication, error: PublishError | ConfigurationError) -> Message:
    """Return the dead letter of a message that cannot be sent to where its row says."""
    message = refused.message
    view = Properties(encode_properties(message))
    table = {name: value for name, value in view.headers.items() if name not in _COPIES}
    for name, original in _COPIES.items():
        if name in view.headers:
            table[original] = view.headers[name]
    for name, original in _MOVED.items():
        value = getattr(view, name)
        if value is not None:
            table[original] = value
    table |= _ours(str(error), refused.exchange, refused.routing_key)
    letter = message.replace(headers=table, user_id=None, expiration=None, persistent=True)
    return _bounded(letter, cut=_is_too_large(error))


def _is_too_large(error: Exception) -> bool:
    """Whether a message was refused for its size, here or by the broker."""
    return isinstance(error, PublishRefused) and (
        error.reply_code == _TOO_LARGE or "is larger than" in error.reply_text
    )


def _ours(reason: str, exchange: str, routing_key: str) -> dict[str, Any]:
    table = {
        headers.FORMAT: headers.FORMAT_VERSION,
        headers.DEAD_LETTER_REASON: _text(reason),
        headers.CONSUMER: "spark-sink",
        headers.PACKAGE_VERSION: OWN_VERSION,
        headers.ORIGINAL_EXCHANGE: _text(exchange),
        headers.ORIGINAL_ROUTING_KEY: _text(routing_key),
    }
    if not exchange:  # the default exchange: the key names a queue, which a replay goes to
        table[headers.ORIGINAL_QUEUE] = _text(routing_key)
    return table


def _bounded(letter: Message, *, cut: bool) -> Message:
    """Return a letter that a frame holds, with a body that a broker takes."""
    ours = letter.headers
    if len(encode_table(ours)) > _HEADERS:
        ours = {name: value for name, value in ours.items() if name.startswith(headers.PREFIX)}
        left_out = "headers, which are too large for a dead letter"
        ours[headers.ORIGINAL_COLUMNS] = {"headers": left_out}
        letter = letter.replace(headers=ours)
    if not cut or len(letter.body) <= _CUT:
        return letter
    return letter.replace(body=letter.body[:_CUT], headers={**ours, headers.ORIGINAL_SIZE: len(letter.body)})


def _fit_headers(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split headers into those that can be sent, and the text of the others."""
    fit: dict[str, Any] = {}
    unfit: dict[str, Any] = {}
    for name, value in given.items():
        try:
            name.encode()
            encode_property("headers", {name: value})
        except (ConfigurationError, UnicodeError):
            unfit[f"headers[{_escaped(name)[:100]}]"] = _text(value)
        else:
            fit[_COPIES.get(name, name)] = value
    return fit, unfit


def _fits(name: str, value: Any) -> bool:
    try:
        if isinstance(value, str):
            value.encode()
        encode_property(name, moment(value) if name == "timestamp" else value)
    except (ConfigurationError, UnicodeError):
        return False
    return True


def _text(value: Any) -> str | bytes:
    """Return a value as the text of a header: bytes where it is not UTF-8."""
    text = value if isinstance(value, str) else repr(value)
    return headers.wire_text(text[:_TEXT])


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
