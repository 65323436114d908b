"""A dead letter: content, origin and cause of death, and the message to replay.

Origin and cause come from this package's headers or, if the message was dead-lettered by others, from RabbitMQ's
``x-death`` and ``x-first-death-*``. RabbitMQ's headers are shown to a user and used as the target of a replay, but
nothing is counted by them. A message that was replayed and then dead-lettered by others has both: its queue is the one
that RabbitMQ names, and exchange and routing key are those of the first publish. A message that had waited in a delay
queue or in quarantine is read as it was before, with the failures that it brought from there. Its queue is the one to
which that delay queue or quarantine belongs.

Invariants:

- Reading never raises an error, whatever the headers contain.
- Headers of this package in a newer format than this version knows are not read at all.
- A replayed message has the body and every header and property of the original byte for byte, without the headers
  about failures. The headers and properties that RabbitMQ would act on again (``CC``, ``BCC``, ``user_id``,
  ``expiration``) are moved to headers of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

from reliable_mq._util.validation import is_whole_number
from reliable_mq.codec import CodecError, Properties, rewrite_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import BROKER_COUNTS, failures_from_headers
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.quarantine import QUARANTINE_SUFFIX
from reliable_mq.core.headers import wire_text
from reliable_mq.core.retry.dead_letters import failure_headers
from reliable_mq.core.retry.delay_queues import DelayQueue
from reliable_mq.core.retry.retry_headers import BeforeRetry, before_retry
from reliable_mq.message import Message

_DEATHS: Final = ("x-death", "x-first-death-", "x-last-death-")
_KEPT: Final = (headers.FORMAT, headers.POSSIBLE_DUPLICATE, headers.TRACE_CONTEXT, headers.PREFIX + "original-")
_NOTHING: Final[Mapping[str, object]] = {}


class Origin(NamedTuple):
    """The place of a dead letter before it died.

    Attributes:
        queue: The queue that the message was consumed from or expired in; empty if it was in no queue.
        exchange, routing_key: The exchange and routing key of its publish; None if unknown.
    """

    queue: str
    exchange: str | None = None
    routing_key: str | None = None


class DeadMessage:
    """One dead letter. Immutable.

    Attributes:
        delivery: The delivery, unchanged.
        position: The message's position in the queue, from 1.
        body: The body.
        properties: The encoded properties, without RabbitMQ's counts of deliveries.
        exchange, routing_key: The exchange and routing key by which the message arrived in the dead-letter queue.
        redelivered: Whether the message was delivered before, because it was browsed or a replay was interrupted.
        delivery_count: The number of returns to the dead-letter queue that RabbitMQ counted; 0 if it does not count.
        headers: The headers that can be read.
        message_id: The message id; None if the message has none or it cannot be read.
        origin: The message's place before it died; None if unknown.
        reason: The reason for dead-lettering: a sentence of this package or RabbitMQ's word; empty if unknown.
        exception_type, exception_message: The exception of the last attempt; empty if unknown.
        attempts: The number of attempts; None if unknown. If the broker dead-lettered the message after a retry, the
            number of attempts before that retry; the exception and the failures are also those before it.
        first_failure, last_failure: The times of the first and the last failed attempt; None if unknown.
        died_at: The time of dead-lettering; None if unknown.
        consumer: The consumer that moved the message; empty if unknown.
        package_version: The version of this package that moved the message; empty if another program did.
        unreadable: The reason why the message can neither be understood nor replayed; empty if it can.
    """

    __slots__ = (
        "_original",
        "attempts",
        "body",
        "consumer",
        "delivery",
        "delivery_count",
        "died_at",
        "exception_message",
        "exception_type",
        "exchange",
        "first_failure",
        "headers",
        "last_failure",
        "message_id",
        "origin",
        "package_version",
        "position",
        "properties",
        "reason",
        "redelivered",
        "routing_key",
        "unreadable",
    )

    def __init__(self, delivery: Delivery, position: int) -> None:
        view = Properties(delivery.properties)
        table = _headers_of(view)
        self.delivery = delivery
        self.position = position
        self.body = delivery.body
        self.exchange, self.routing_key = delivery.exchange, delivery.routing_key
        self.redelivered = delivery.redelivered
        self.delivery_count = _whole(table.get("x-delivery-count")) or 0
        self.properties = delivery.properties
        if any(name in table for name in BROKER_COUNTS):
            self.properties = rewrite_properties(delivery.properties, drop_headers=BROKER_COUNTS)
        self.headers: Mapping[str, object] = {name: table[name] for name in table if name not in BROKER_COUNTS}
        self.message_id = _readable(view, "message_id")
        self._original = before_retry(self.properties, table)
        told = table if self._original is None else _headers_of(Properties(self._original.properties))
        self.unreadable = _unreadable(told, len(self.body))
        ours = told if told.get(headers.FORMAT) == headers.FORMAT_VERSION else _NOTHING
        retried = self._original is not None and headers.DEAD_LETTER_REASON not in ours
        failures = failures_from_headers(table) if retried else None
        if failures is not None:
            ours = {**ours, **failure_headers(failures)}
        death, died_at = _first_death(table), _time(_last_death(table).get("time"))
        self.origin = _origin(ours, table, death, self._original)
        self.reason = _text(ours.get(headers.DEAD_LETTER_REASON)) or _reason(table, death)
        self.exception_type = _text(ours.get(headers.EXCEPTION_TYPE))
        self.exception_message = _text(ours.get(headers.EXCEPTION_MESSAGE))
        self.attempts = _whole(ours.get(headers.ATTEMPTS))
        self.first_failure = _time(ours.get(headers.FIRST_FAILURE))
        self.last_failure = _time(ours.get(headers.LAST_FAILURE))
        self.died_at = (died_at or self.last_failure) if retried else (self.last_failure or died_at)
        self.consumer = _text(ours.get(headers.CONSUMER))
        self.package_version = _text(ours.get(headers.PACKAGE_VERSION))

    @property
    def cause(self) -> str:
        """The cause of death in short: the exception class, or else the reason."""
        return self.exception_type or self.reason or "unknown"

    @property
    def fingerprint(self) -> str:
        """A digest of properties and body, the same at every delivery.

        It has 32 hexadecimal digits. Messages that are equal in every byte have the same fingerprint.
        """
        properties = self.properties
        if not self.headers:
            with suppress(CodecError):  # drops an empty header table, as it is dropped with RabbitMQ's counts
                properties = rewrite_properties(properties, drop_headers=BROKER_COUNTS)
        digest = hashlib.sha256(properties)
        digest.update(len(properties).to_bytes(8))
        digest.update(self.body)
        return digest.hexdigest()[:32]

    @property
    def trace_id(self) -> str:
        """The trace id of the message or else of its last attempt; empty if none."""
        for name in ("traceparent", headers.TRACE_CONTEXT):
            ids = headers.trace_ids(_text(self.headers.get(name)))
            if ids is not None:
                return ids["trace_id"]
        return ""

    def replayed(self, body: bytes | None = None) -> Message:
        """Return the message that a replay publishes: the original without its failures.

        Args:
            body: A body that replaces the original's; None keeps it.

        Raises:
            ConfigurationError: If the properties are broken.
        """
        properties, table, kept = self.properties, self.headers, _NOTHING
        if self._original is not None:
            properties = self._original.properties
            table, kept = _headers_of(Properties(properties)), _kept(self.origin, table)
        return Message.from_wire(self.body if body is None else body, _reset(properties, table, kept))

    def __repr__(self) -> str:
        return f"<DeadMessage {self.message_id or 'without id'}: {self.cause}>"


# -- the message to replay ---------------------------------------------------------------------------------------------


def _kept(origin: Origin | None, table: Mapping[str, object]) -> Mapping[str, object]:
    """Return the headers that tell of a message from before it waited."""
    kept: dict[str, object] = {}
    if origin is not None:
        names = (headers.ORIGINAL_QUEUE, headers.ORIGINAL_EXCHANGE, headers.ORIGINAL_ROUTING_KEY)
        kept = {name: wire_text(text) for name, text in zip(names, origin, strict=True) if text is not None}
    if context := _text(table.get(headers.TRACE_CONTEXT)):
        kept[headers.TRACE_CONTEXT] = wire_text(context)
    return kept


def _reset(properties: bytes, table: Mapping[str, object], kept: Mapping[str, object]) -> bytes:
    view = Properties(properties)
    user_id, expiration = _readable(view, "user_id"), _readable(view, "expiration")
    moved = {
        headers.ORIGINAL_CC: table.get("CC"),
        headers.ORIGINAL_BCC: table.get("BCC"),
        headers.ORIGINAL_USER_ID: None if user_id is None else wire_text(user_id),
        headers.ORIGINAL_EXPIRATION: None if expiration is None else wire_text(expiration),
    }
    ours = {**kept, **{name: value for name, value in moved.items() if value is not None}}
    if ours:
        ours[headers.FORMAT] = headers.FORMAT_VERSION
    dropped = [name for name in table if _counts(name)]
    try:
        return rewrite_properties(
            properties, set_headers=ours, drop_headers=[*dropped, "CC", "BCC"], clear=("user_id", "expiration")
        )
    except CodecError:
        return properties  # the publisher refuses them with a reason


def _counts(name: str) -> bool:
    """Return whether a header counts or describes failures."""
    if name.startswith(headers.PREFIX):
        return not name.startswith(_KEPT)
    return name in BROKER_COUNTS or name.startswith(_DEATHS)


# -- origin and cause --------------------------------------------------------------------------------------------------


def _headers_of(view: Properties) -> Mapping[str, object]:
    """Return all headers or, if some are broken, the headers about deaths."""
    try:
        return view.headers
    except CodecError:
        pass
    table: dict[str, object] = {}
    for prefix in (headers.PREFIX, "x-death", "x-first-death-", "x-last-death-", *BROKER_COUNTS):
        try:
            table |= view.headers_beginning(prefix)
        except CodecError:
            continue
    return table


def _readable(view: Properties, name: str) -> str | None:
    try:
        value: str | None = getattr(view, name)
    except CodecError:
        return None
    return value


def _unreadable(table: Mapping[str, object], size: int) -> str:
    """Return the reason why a message with a body of this size cannot be replayed."""
    version = _whole(table.get(headers.FORMAT)) or 0
    if version > headers.FORMAT_VERSION:
        return (
            f"its headers are of format {version}, and {headers.FORMAT_VERSION} is the newest that is known here: use "
            "the version of reliable_mq that wrote them"
        )
    whole = _whole(table.get(headers.ORIGINAL_SIZE)) or 0
    if whole > size:
        return (
            f"its body had {whole} bytes, more than the broker takes, and {size} of them are here: send the row again "
            "from where it came, in parts or with a higher max_message_size of the broker"
        )
    if headers.ORIGINAL_PROPERTIES in table:
        return (
            f"its properties were broken or too large, and are in its header {headers.ORIGINAL_PROPERTIES}: publish it "
            "again by a program that sets them"
        )
    return ""


def _origin(
    ours: Mapping[str, object], table: Mapping[str, object], death: Mapping[str, object], original: BeforeRetry | None
) -> Origin | None:
    queue = _text(ours.get(headers.ORIGINAL_QUEUE))
    exchange, key = _name(ours.get(headers.ORIGINAL_EXCHANGE)), _name(ours.get(headers.ORIGINAL_ROUTING_KEY))
    theirs = _text(table.get("x-first-death-queue")) or _text(death.get("queue"))
    if original is not None:
        theirs = _work_queue(theirs)
    if queue or exchange:
        return Origin(queue if headers.DEAD_LETTER_REASON in ours else theirs or queue, exchange, key)
    if not theirs:
        return None
    if original is not None:
        return Origin(theirs, original.exchange, original.routing_key)
    first = table.get("x-first-death-exchange", death.get("exchange"))
    keys = death.get("routing-keys")
    return Origin(theirs, _name(first), _name(keys[0]) if isinstance(keys, list) and keys else None)


def _work_queue(name: str) -> str:
    """Return the queue to which a delay queue or quarantine of ours belongs."""
    delay_queue = DelayQueue.of(name)
    return name.removesuffix(QUARANTINE_SUFFIX) if delay_queue is None else delay_queue.queue


def _reason(table: Mapping[str, object], death: Mapping[str, object]) -> str:
    last = _text(table.get("x-last-death-reason")) or _text(_last_death(table).get("reason"))
    return last or _text(table.get("x-first-death-reason")) or _text(death.get("reason"))


def _deaths(table: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the entries of ``x-death``, the latest first."""
    deaths = table.get("x-death")
    return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


def _last_death(table: Mapping[str, object]) -> Mapping[str, object]:
    return next(iter(_deaths(table)), _NOTHING)


def _first_death(table: Mapping[str, object]) -> Mapping[str, object]:
    """Return the entry of the first death if it is named, else the oldest entry."""
    deaths = _deaths(table)
    queue, reason = table.get("x-first-death-queue"), table.get("x-first-death-reason")
    named = [death for death in deaths if (death.get("queue"), death.get("reason")) == (queue, reason)]
    return (named or deaths or [_NOTHING])[-1]


def _text(value: object) -> str:
    return _name(value) or ""


def _name(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if is_whole_number(value, 0) else None


def _time(value: object) -> datetime | None:
    return value if isinstance(value, datetime) else None
