"""Which publishes can a channel error be about?

A channel exception names no publish. RabbitMQ's text names the exchange, the routing key or the value that it objects
to, though: only publishes that have it can have caused the error. The texts are those of RabbitMQ 4.0 to 4.3; a reply
text is cut at 255 bytes, and ends with three dots then.

Invariants:

- a publish is named where its own exchange, routing key, property or size stands in the text; a text that is not known
  names nobody;
- properties that cannot be decoded are no error here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from reliable_mq.core.codec import Properties
from reliable_mq.core.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reliable_mq.core.publication import Reply

__all__ = ["named_by"]

P = TypeVar("P", bound=Publication)

_CUT = "..."
_CUT_FROM = 240  # bytes of a text that may have been cut; a character that was cut through is missing, too


def named_by(reply: Reply, publications: Iterable[P]) -> list[P]:
    """Return the publishes that the broker's text can be about, in order. Empty where it names none of them."""
    return [one for one in publications if _is_named(reply, one)]


def _is_named(reply: Reply, publication: Publication) -> bool:
    text = reply.text
    cut = text.endswith(_CUT) and len(text.encode("utf-8", "surrogateescape")) > _CUT_FROM
    try:
        for phrase in _phrases(reply.code, publication):
            if phrase.startswith(text.removesuffix(_CUT)) if cut else text.startswith(phrase):
                return True
    except Exception:  # noqa: BLE001 -- a damaged message, or a user's own: the broker got something else
        return False
    return False


def _phrases(code: int, publication: Publication) -> Iterator[str]:
    """Yield the beginnings of the texts that the broker can have for this publish."""
    exchange = publication.exchange
    match code:
        case 404:
            yield f"NOT_FOUND - no exchange '{exchange}' in vhost '"
        case 403:
            yield f"ACCESS_REFUSED - write access to exchange '{exchange or 'amq.default'}' in vhost '"
            key = publication.routing_key
            yield f"ACCESS_REFUSED - write access to topic '{key}' in exchange '{exchange}' in vhost '"
            yield f"ACCESS_REFUSED - cannot publish to internal exchange '{exchange}' in vhost '"
        case 406:
            yield f"PRECONDITION_FAILED - message size {publication.size} is larger than "
            encoded = publication.message.encoded_properties
            if encoded is not None:
                yield from _of_properties(Properties(encoded))


def _of_properties(properties: Properties) -> Iterator[str]:
    yield f"PRECONDITION_FAILED - invalid expiration '{properties.expiration}': "
    yield f"PRECONDITION_FAILED - user_id property set to '{properties.user_id}' but "
    for name in ("CC", "BCC"):
        if name in properties.header_names() and not isinstance(properties.headers[name], list):
            yield f'PRECONDITION_FAILED - invalid message: {{unacceptable_type_in_header,"{name}",'
