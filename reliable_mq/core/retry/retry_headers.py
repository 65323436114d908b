"""Encode a delivery as the message that waits for its next attempt, and decode it.

Invariants:

- After decoding, the body, exchange, routing key, every property and every header are the same, byte for byte. Only the
  order of headers may change, because RabbitMQ sorts them by name when it dead-letters a message out of a delay queue.
- A message that would change is not encoded.
- A value of ours that is out of range is ignored.

Some properties and headers may not stay in place while the message waits. ``CC`` and ``BCC`` (the message would be
routed there again), the headers of earlier dead-lettering (the broker overwrites them), and the format and trace
context of a dead letter or replayed message (a waiting message has its own) are renamed. ``user_id`` (that of another
user closes the channel) and ``expiration`` (it would shorten the delay) move into the header `headers.RETRY`, with the
exchange and routing key, which a delay queue does not keep. The attempt is in `headers.ATTEMPT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq._util.validation import is_whole_number
from reliable_mq.codec import CodecError, Properties, join_properties, rewrite_properties, split_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import BROKER_COUNTS, failures_from_headers
from reliable_mq.core.headers import wire_text
from reliable_mq.core.retry.delay_queues import LONGEST, LONGEST_PATH
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.core.consumer.delivery import Delivery

DEATHS: Final = (
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
)
_MOVED: Final = {
    name: headers.ORIGINAL + name.lower() for name in ("CC", "BCC", headers.FORMAT, headers.TRACE_CONTEXT, *DEATHS)
}
_CLEARED: Final = ("user_id", "expiration")


LONGEST_CONTEXT: Final = 64  # characters; a context of W3C's first version has 55


class RetryState(NamedTuple):
    """The state of a message that came from a delay queue, or from quarantine."""

    path: tuple[int, ...] = ()  # the delays of the remaining delay queues, in milliseconds
    suspect: bool = False  # whether the message is suspected of killing its consumer


class BeforeRetry(NamedTuple):
    """A message as it was before it waited."""

    exchange: str | None  # None if unknown, as the routing key
    routing_key: str | None
    properties: bytes
    state: RetryState


PLAIN: Final = RetryState()


def encode_retry_headers(delivery: Delivery, path: Sequence[int] = (), *, suspect: bool = False) -> bytes | None:
    """Return the properties of the waiting message, None if decoding would alter them.

    ``path`` contains the delay queues after the first one.
    """
    raw = delivery.properties
    view = Properties(raw)
    failures = delivery.failures
    try:
        names = view.header_names()
        moved = {name: new for name, new in _MOVED.items() if name in names}
        if any(new in names for new in moved.values()):
            return None
        table: dict[str, object] = {
            "exchange": wire_text(delivery.exchange),
            "routing-key": wire_text(delivery.routing_key),
            "path": list(path),
            "suspect": suspect,
            "moved": list(moved),
        }
        for name, value in (("user-id", view.user_id), ("expiration", view.expiration)):
            if value is not None:
                table[name] = wire_text(value)
        if failures is not None:
            if failures.lost:
                table["lost"] = failures.lost
            if failures.alone:
                table["alone"] = True
            if failures.first_at is not None:
                table["first-failure"] = datetime.fromtimestamp(failures.first_at, UTC)
            if failures.last is not None:
                table["last-failure"] = datetime.fromtimestamp(failures.last.at, UTC)
                table["exception-type"] = failures.last.exception_type
                table["exception-message"] = failures.last.exception_message
        ours: dict[str, object] = {
            headers.FORMAT: headers.FORMAT_VERSION,
            headers.ATTEMPT: delivery.attempt,
            headers.RETRY: table,
        }
        if delivery.attempt_context is not None:
            ours[headers.TRACE_CONTEXT] = delivery.attempt_context
        return rewrite_properties(
            raw, set_headers=ours, drop_headers=BROKER_COUNTS, rename_headers=moved, clear=_CLEARED
        )
    except (CodecError, ConfigurationError):
        return None


def decode_retry_headers(delivery: Delivery) -> RetryState:
    """Restore a delivery that has waited, with its failed attempts.

    Raises:
        NewerFormat: If its headers are from a newer version of this package.
        ConsumeError: If its headers cannot be read.
    """
    ours = delivery.headers_beginning(headers.PREFIX)
    delivery.set_failures(failures_from_headers(ours))
    context = ours.get(headers.TRACE_CONTEXT)
    delivery.attempt_context = context if isinstance(context, str) and len(context) <= LONGEST_CONTEXT else None
    original = before_retry(delivery.properties, ours)
    if original is None:
        return PLAIN
    delivery.restore(
        delivery.exchange if original.exchange is None else original.exchange,
        delivery.routing_key if original.routing_key is None else original.routing_key,
        original.properties,
    )
    return original.state


def before_retry(properties: bytes, ours: Mapping[str, object]) -> BeforeRetry | None:
    """Return a message as it was before it waited, None if it has not waited.

    Args:
        properties: The properties of the message.
        ours: Its headers, at least those of this package.

    Raises:
        CodecError: If the properties are broken.
    """
    version, table = ours.get(headers.FORMAT), ours.get(headers.RETRY)
    if isinstance(version, bool) or version != headers.FORMAT_VERSION or not isinstance(table, Mapping):
        return None
    moved = table.get("moved")
    said = [name for name in moved if isinstance(name, str)] if isinstance(moved, list) else []
    back = {_MOVED[name]: name for name in said if name in _MOVED}
    dropped = (headers.FORMAT, headers.ATTEMPT, headers.RETRY, headers.TRACE_CONTEXT, *DEATHS)
    # In two steps: the added headers must be gone before the original ones take their names again.
    stripped = rewrite_properties(properties, drop_headers=dropped)
    segments = split_properties(rewrite_properties(stripped, rename_headers=back))
    for name, key in (("user_id", "user-id"), ("expiration", "expiration")):
        value = _bytes(table.get(key))
        if value is not None:
            segments[name] = bytes((len(value),)) + value
    return BeforeRetry(
        _text(table.get("exchange")),
        _text(table.get("routing-key")),
        join_properties(segments),
        RetryState(_path(table.get("path")), table.get("suspect") is True),
    )


def _path(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > LONGEST_PATH:
        return ()
    steps = tuple(step for step in value if is_whole_number(step, 1, LONGEST))
    return steps if len(steps) == len(value) else ()


def _bytes(value: object) -> bytes | None:
    """Encode a result of `wire_text` as a short string, None if it is too long."""
    encoded = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return encoded if isinstance(encoded, bytes) and len(encoded) <= 255 else None


def _text(value: object) -> str | None:
    encoded = _bytes(value)
    return None if encoded is None else encoded.decode("utf-8", "surrogateescape")
