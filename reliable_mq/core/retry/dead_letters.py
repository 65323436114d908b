"""Dead letters: the message of a delivery, with its history in headers of ours.

Invariants:

- The body and every property and header that is not ours are copied byte for byte. Some would do harm in a message that
  is published again, and travel in headers of ours instead: ``CC`` and ``BCC`` (the message would be routed there
  again), ``user_id`` (that of another user closes the channel with 406) and ``expiration`` (the dead letter would
  expire).
- RabbitMQ's delivery counts are left out, because they belong to the queue that the message leaves.
- The ``message_id`` is unchanged, even if there is none.
- When a dead letter is dead-lettered again, the headers of its original queue, exchange and properties are kept. A
  replayed message is no dead letter. It keeps the exchange of its first publish, but not the queue.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from reliable_mq.codec import (
    CodecError,
    Properties,
    encode_table,
    join_properties,
    rewrite_properties,
    split_properties,
)
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import BROKER_COUNTS, AttemptHistory, printable
from reliable_mq.core.headers import wire_text
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import Queue
from reliable_mq.topology.arguments import REPLICATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.topology import Declaration

_EMPTY: Final[Mapping[str, object]] = {}
_CLEARED: Final = ("user_id", "expiration")
_DROPPED: Final = (
    "CC",
    "BCC",
    *BROKER_COUNTS,
    headers.ATTEMPT,
    headers.EXCEPTION_TYPE,
    headers.EXCEPTION_MESSAGE,
    headers.FIRST_FAILURE,
    headers.LAST_FAILURE,
    headers.TRACE_CONTEXT,
)
_PERSISTENT: Final = b"\x02"


class RepublishReason(enum.Enum):
    """The purpose of a message that is published again."""

    DEAD_LETTER = "dead letter"  # the message is given up
    RETRY = "retry"  # the message waits in a delay queue for its next attempt
    QUARANTINE = "quarantine"  # the message may have killed its consumer, and is handled alone from now on


@dataclass(eq=False, slots=True)
class RepublishRequest:
    """A message to publish, mandatory and confirmed, before its original may be acked.

    It is published to the default exchange.
    """

    purpose: RepublishReason
    delivery: Delivery  # the original, unsettled until this request is confirmed
    routing_key: str  # the name of the target queue
    properties: bytes  # encoded
    _: KW_ONLY
    queue: Queue | None = None  # the target queue, if it may have to be declared
    reason: str = ""  # why the message is a dead letter; empty for any other purpose
    left: float | None = None  # seconds to hold it in place of further delay queues; None for the first of a delay
    tries: int = 0  # unconfirmed publishes of this request

    @property
    def body(self) -> bytes:
        return self.delivery.body


class DeadLetters:
    """A maker of one consumer's dead letters, with the version of this package.

    Args:
        target: The name of the queue for dead letters.
        declared: The declarations of the consumer, in which the target may be.

    Attributes:
        queue: The target queue, if it can be declared again. A classic queue of a node that is down is missing, too,
            but its declaration would close the channel.
    """

    def __init__(self, target: str, *, consumer: str, version: str, declared: Iterable[Declaration] = ()) -> None:
        queues = [one for one in declared if isinstance(one, Queue) and one.name == target]
        self.queue: Final = next((queue for queue in queues if queue.type in REPLICATED), None)
        self._target = target
        self._consumer = printable(consumer)
        self._version = version

    def make(self, delivery: Delivery, reason: str) -> RepublishRequest:
        reason = printable(reason)
        properties = self._properties(delivery, reason)
        purpose = RepublishReason.DEAD_LETTER
        return RepublishRequest(purpose, delivery, self._target, properties, queue=self.queue, reason=reason)

    def cut(self, republish: RepublishRequest) -> None:
        """Cut the original properties of a dead letter to half, and more at each try.

        It is for a message whose properties leave no room for ours in a frame. Otherwise it would stay unacked for
        good, and as many of them as the prefetch allows would stop the consumer.
        """
        delivery = republish.delivery
        kept = delivery.properties[: len(delivery.properties) >> republish.tries]
        republish.properties = _enclosing(delivery.properties, kept, self._ours(delivery, _EMPTY, republish.reason))

    def _properties(self, delivery: Delivery, reason: str) -> bytes:
        raw = delivery.properties
        view = Properties(raw)
        try:
            theirs = view.headers
        except CodecError:
            theirs = _readable(view)
            sendable = not headers.may_copy(raw)
        else:
            sendable = True
        ours = self._ours(delivery, theirs, reason)
        if sendable:
            try:
                return rewrite_properties(
                    raw, set_headers=ours | _moved(view, theirs), drop_headers=_DROPPED, clear=_CLEARED
                )
            except (CodecError, ConfigurationError):
                pass  # the properties are broken, or their CC is no list of names
        return _enclosing(raw, raw, ours)

    def _ours(self, delivery: Delivery, theirs: Mapping[str, object], reason: str) -> dict[str, object]:
        table: dict[str, object] = {
            headers.FORMAT: headers.FORMAT_VERSION,
            headers.DEAD_LETTER_REASON: reason,
            headers.CONSUMER: self._consumer,
            headers.PACKAGE_VERSION: self._version,
            **failure_headers(delivery.failures or AttemptHistory()),
        }
        if theirs.get(headers.FORMAT) != headers.FORMAT_VERSION or headers.ORIGINAL_QUEUE not in theirs:
            table[headers.ORIGINAL_QUEUE] = wire_text(delivery.queue)
            table[headers.ORIGINAL_EXCHANGE] = wire_text(delivery.exchange)
            table[headers.ORIGINAL_ROUTING_KEY] = wire_text(delivery.routing_key)
        elif headers.DEAD_LETTER_REASON not in theirs:
            table[headers.ORIGINAL_QUEUE] = wire_text(delivery.queue)
        if delivery.attempt_context is not None:
            table[headers.TRACE_CONTEXT] = delivery.attempt_context
        return table


def failure_headers(failures: AttemptHistory) -> dict[str, object]:
    """Return the headers that tell of failed attempts."""
    table: dict[str, object] = {headers.ATTEMPTS: failures.count}
    if failures.first_at is not None:
        table[headers.FIRST_FAILURE] = _time(failures.first_at)
    if failures.last is not None:
        table[headers.LAST_FAILURE] = _time(failures.last.at)
        table[headers.EXCEPTION_TYPE] = failures.last.exception_type
        table[headers.EXCEPTION_MESSAGE] = failures.last.exception_message
    return table


def _enclosing(raw: bytes, kept: bytes, ours: Mapping[str, object]) -> bytes:
    """Return the properties of a dead letter with ``kept`` of ``raw`` in a header."""
    table = {**ours, headers.ORIGINAL_PROPERTIES: kept}
    segments = {"headers": encode_table(table), "delivery_mode": _PERSISTENT}
    with suppress(CodecError, KeyError):
        segments["message_id"] = split_properties(raw)["message_id"]
    return join_properties(segments)


def _moved(view: Properties, theirs: Mapping[str, object]) -> dict[str, object]:
    """Return the headers that replace ``CC``, ``BCC``, ``user_id`` and ``expiration``."""
    values = {
        headers.ORIGINAL_CC: theirs.get("CC"),
        headers.ORIGINAL_BCC: theirs.get("BCC"),
        headers.ORIGINAL_USER_ID: None if view.user_id is None else wire_text(view.user_id),
        headers.ORIGINAL_EXPIRATION: None if view.expiration is None else wire_text(view.expiration),
    }
    return {name: value for name, value in values.items() if value is not None}


def _readable(view: Properties) -> Mapping[str, object]:
    """Return our headers although others cannot be read."""
    try:
        return view.headers_beginning(headers.PREFIX)
    except CodecError:
        return _EMPTY


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
