"""A message delivered to a handler: its properties, channel, state and attempts.

Invariants:

- Properties and headers are decoded on first use, and an error in them only concerns this delivery.
- A delivery gets its channel generation before any other code sees it, so that a result for a lost channel is
  recognised.
- A delivery is in one `DeliveryState` at a time, and changes it according to `TRANSITIONS`.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from reliable_mq import drivers
from reliable_mq.codec import CodecError, Properties, RawDelivery, plain_message_id
from reliable_mq.codec.methods import STREAM_OFFSET
from reliable_mq.core.consumer.attempts import AttemptHistory
from reliable_mq.errors import ConsumeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from reliable_mq.core.idempotency import Claim, InboxClaim

_NAMED: Final = 5  # messages that a log line names
_SETTLING: Final = ("ack", "nack", "reject")  # methods of other libraries' messages


class DeliveryState(enum.Enum):
    """The state of a delivery in its consumer."""

    QUEUED = "waits for a handler, alone or in a batch"
    RUNNING = "dispatched to a handler"
    HELD = "waits in this process: for its next attempt, for the store, or to be published again"
    REPUBLISHING = "a message takes its place: a dead letter, or one in a delay queue or in quarantine; not confirmed"
    FINISHED = "nothing is left to do but its ack, which the `AckBatcher` sends"
    TIMED_OUT = "the consumer timeout of the broker is over, and its handler runs on"
    SETTLED = "rejected, requeued, or left to the end of its channel: its result, if one comes, is dropped"


_S = DeliveryState
#: Event -> state before (None before the delivery) -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[DeliveryState | None, set[DeliveryState]]]] = {
    "delivered": {None: {_S.QUEUED}},
    "refused (too large, undecodable, newer format, attempts used up)": {_S.QUEUED: {_S.REPUBLISHING, _S.SETTLED}},
    "next attempt not due": {_S.QUEUED: {_S.REPUBLISHING, _S.HELD}},
    "suspect of killing its consumer": {_S.QUEUED: {_S.REPUBLISHING}},
    "dispatched": {_S.QUEUED: {_S.RUNNING}},
    "handled, or a duplicate": {_S.RUNNING: {_S.FINISHED}},
    "failed": {_S.RUNNING: {_S.REPUBLISHING, _S.HELD, _S.SETTLED, _S.FINISHED}},
    "refused by its claim (attempts used up, no key)": {_S.RUNNING: {_S.REPUBLISHING, _S.SETTLED}},
    "claimed elsewhere, store failed": {_S.RUNNING: {_S.HELD, _S.REPUBLISHING, _S.SETTLED}},
    "handler cancelled": {_S.RUNNING: {_S.HELD, _S.REPUBLISHING, _S.SETTLED}},
    "recalled, no handler has begun": {_S.RUNNING: {_S.QUEUED, _S.REPUBLISHING, _S.SETTLED}},
    "consumer timeout": {_S.RUNNING: {_S.TIMED_OUT}},
    "delay over": {_S.HELD: {_S.QUEUED, _S.REPUBLISHING, _S.SETTLED}},
    "confirmed": {_S.REPUBLISHING: {_S.FINISHED}},
    "not confirmed": {_S.REPUBLISHING: {_S.HELD, _S.SETTLED}},
    "subscription ended": {state: {_S.REPUBLISHING, _S.SETTLED} for state in (_S.QUEUED, _S.HELD)},
    "channel lost": {state: {_S.SETTLED} for state in (_S.QUEUED, _S.RUNNING, _S.HELD, _S.REPUBLISHING)},
    "late result": {_S.TIMED_OUT: {_S.SETTLED}},
}
del _S


@dataclass(eq=False, slots=True)
class ChannelGeneration:
    """The channel of deliveries, one object per generation, compared by identity."""

    generation: int
    channel: int
    queue: str
    namespace: str = ""  # the name of the queue's virtual host, see `reliable_mq.core.idempotency.namespace_of`


_QUEUED: Final = DeliveryState.QUEUED  # a global is looked up faster than a member of an enum


class Delivery(RawDelivery):
    """A message delivered to a handler.

    A property that the message does not have is None. Reading a property or the headers of a message with broken
    properties raises `ConsumeError`. If the handler does not catch it, the message is dead-lettered at once.

    Attributes:
        body: The bytes of the message.
        exchange: The exchange to which the message was published, empty for the default exchange.
        routing_key: The routing key with which the message was published.
        redelivered: Whether the message may have been delivered before. The broker flags it, or this is not the first
            attempt.
        consumer_tag: The tag of the consumer that received the delivery.
        delivery_tag: The number of the delivery on its channel.
        properties: The encoded properties of the message, byte for byte.
    """

    __slots__ = (
        "_decoded",
        "_failures",
        "_source",
        "attempt_context",
        "claim",
        "flaw",
        "inbox_claim",
        "state",
        "store_failures",
    )

    _source: ChannelGeneration

    def __init__(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
    ) -> None:
        # Spelt out instead of super().__init__(), which would cost a call per message.
        self.consumer_tag = consumer_tag
        self._delivery_tag = delivery_tag
        self.redelivered = redelivered
        self._exchange = exchange
        self._routing_key = routing_key
        self._properties = properties
        self._body = body
        self.state = _QUEUED
        self._failures: AttemptHistory | None = None
        self.claim: Claim | None = None  # the claim of a finished handler, until the idempotency store has the result
        self.flaw: str | None = None  # the error in its properties, once they were found broken
        self.inbox_claim: InboxClaim | None = None  # the claim while its handler runs, if the store has transactions
        self.store_failures = 0  # failures of the idempotency store for this delivery
        self.attempt_context: str | None = None  # the trace context of the last attempt, if it is sampled
        self._decoded: Properties | None = None

    @property
    def source(self) -> ChannelGeneration:
        """The channel of the delivery."""
        return self._source

    def came_from(self, source: ChannelGeneration) -> None:
        """Set the channel of the delivery, before any other code sees it."""
        self._source = source

    @property
    def failures(self) -> AttemptHistory | None:
        """The failed attempts so far, None without any."""
        return self._failures

    def set_failures(self, failures: AttemptHistory | None) -> None:
        """Set the failed attempts so far."""
        self._failures = failures

    def begin_failures(self) -> AttemptHistory:
        """Return the failed attempts so far, to add one."""
        if self._failures is None:
            self._failures = AttemptHistory()
        return self._failures

    @property
    def queue(self) -> str:
        """The queue from which the message was consumed."""
        return self._source.queue

    @property
    def attempt(self) -> int:
        """The number of this attempt at the message, 1 for the first."""
        return 1 if self._failures is None else self._failures.count + 1

    def transaction(self) -> Any:
        """Begin a transaction of the idempotency store that marks the message done.

        The handler's writes in the transaction and the record that the message is done are committed together when its
        block ends, or not at all. If another holder has taken over meanwhile, nothing is committed. In a function, with
        a ``SQLAlchemyStore``::

            with delivery.transaction() as session:
                session.execute(insert(Order), delivery.json())

        In a coroutine, with an ``AsyncSQLAlchemyStore``::

            async with delivery.transaction() as session:
                await session.execute(insert(Order), delivery.json())

        Returns:
            The context manager of the store's ``transaction`` for this delivery. A batch handler can call that method
            for several deliveries at once.

        Raises:
            UsageError: If the consumer has no idempotency store, or one without transactions.
        """
        if self.inbox_claim is None:
            raise UsageError(
                f"{self!r} has no transaction: its consumer has no idempotency store with transactions, as "
                "SQLAlchemyStore has"
            )
        return self.inbox_claim.transaction(self)

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            ValueError: If the body is not JSON.
        """
        return json.loads(self.body)

    @property
    def headers(self) -> Mapping[str, object]:
        """The headers, empty if there are none. Read-only."""
        headers: Mapping[str, object] = self._read("headers")
        return headers

    @property
    def content_type(self) -> str | None:
        """The MIME type of the body."""
        return self._text("content_type")

    @property
    def content_encoding(self) -> str | None:
        """The MIME content encoding of the body."""
        return self._text("content_encoding")

    @property
    def message_id(self) -> str | None:
        """The id that the publisher set."""
        found = plain_message_id(self._properties) if self._decoded is None else None
        return self._text("message_id") if found is None else found

    @property
    def correlation_id(self) -> str | None:
        """The id of the request that the message answers, or of its group."""
        return self._text("correlation_id")

    @property
    def reply_to(self) -> str | None:
        """The queue for answers."""
        return self._text("reply_to")

    @property
    def type(self) -> str | None:
        """The type that the publisher set."""
        return self._text("type")

    @property
    def user_id(self) -> str | None:
        """The user that published the message.

        RabbitMQ checks this property when a message is published. While a message waits for a retry, the value is in a
        header, which RabbitMQ does not check and which any client that may publish to the queue can forge. So the value
        does not prove the sender of a message.
        """
        return self._text("user_id")

    @property
    def app_id(self) -> str | None:
        """The application that published the message."""
        return self._text("app_id")

    @property
    def expiration(self) -> float | None:
        """The time to live of the message in a queue, in seconds."""
        text = self._text("expiration")
        return int(text) / 1000 if text is not None and text.isdecimal() else None

    @property
    def priority(self) -> int | None:
        """The priority of the message."""
        priority: int | None = self._read("priority")
        return priority

    @property
    def timestamp(self) -> datetime | int | None:
        """The time that the publisher set.

        It is a number if it is not a valid date, for example because the publisher sent milliseconds.
        """
        timestamp: datetime | int | None = self._read("timestamp")
        return timestamp

    @property
    def persistent(self) -> bool:
        """Whether a durable queue keeps the message over a restart of the broker."""
        return bool(self._read("delivery_mode") == 2)

    @property
    def offset(self) -> int | None:
        """The offset of the message in a stream, None if the queue is not a stream."""
        offset = self.headers.get(STREAM_OFFSET)
        return offset if isinstance(offset, int) else None

    def headers_beginning(self, prefix: str) -> Mapping[str, object]:
        """Return the headers whose names begin with ``prefix``, even if others are broken.

        Raises:
            ConsumeError: If the header table itself is broken.
        """
        try:
            return Properties(self.properties).headers_beginning(prefix)
        except CodecError as error:
            raise self._broken(error) from error

    def restore(self, exchange: str, routing_key: str, properties: bytes) -> None:
        """Undo the changes for a delay queue, before any other code sees the delivery."""
        self._exchange = exchange
        self._routing_key = routing_key
        self._properties = properties
        self._decoded = None

    def to_pika(self) -> tuple[Any, Any, bytes]:
        """Return pika's ``(method, properties, body)``.

        They are a ``Basic.Deliver``, a ``BasicProperties`` and bytes, for code that was written for pika's callbacks:
        ``callback(None, *delivery.to_pika())``. Such code cannot settle the delivery, which is settled by the outcome
        of the handler. If pika cannot decode the properties, they are decoded as in this class.

        Raises:
            ConsumeError: If the properties are broken.
        """
        try:
            method, properties = drivers.pika_objects(self._method, self._properties)
        except CodecError as error:
            raise self._broken(error) from error
        return method, properties, self._body

    def to_aio_pika(self) -> Any:
        """Return an ``aio_pika.IncomingMessage``, for code written for aio-pika.

        The message counts as settled, as with ``no_ack=True``, because the outcome of the handler settles the delivery.
        So ``async with message.process(ignore_processed=True)`` does nothing, and ``message.ack()`` raises.

        Raises:
            ConsumeError: If the properties are broken.
        """
        try:
            return drivers.aio_pika_message(self._method, self._properties, self._body)
        except CodecError as error:
            raise self._broken(error) from error

    @property
    def _method(self) -> drivers.DeliverArguments:
        return self.consumer_tag, self.delivery_tag, self.redelivered, self._exchange, self._routing_key

    def _text(self, name: str) -> str | None:
        text: str | None = self._read(name)
        return text

    def _read(self, name: str) -> Any:
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = Properties(self.properties)
        try:
            return getattr(decoded, name)
        except CodecError as error:
            raise self._broken(error) from error

    def _broken(self, error: CodecError) -> ConsumeError:
        self.flaw = str(error)
        return ConsumeError(f"the properties of {self!r} are broken: {error}")

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> object:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _SETTLING:
                text += (
                    ": return from the handler to ack the delivery, raise to retry it, raise DeadLetter to give it up"
                )
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<Delivery {self.delivery_tag} with routing key {self.routing_key!r}, {len(self.body)} bytes>"


def message_name(delivery: Delivery) -> str:
    """Return the name of a message for a log, even of a broken message."""
    try:
        message_id = Properties(delivery.properties).message_id
    except CodecError:
        message_id = None
    return f"message {message_id!r}" if message_id else f"a message without an id ({len(delivery.body)} bytes)"


def message_names(deliveries: Sequence[Delivery]) -> str:
    """Return the names of the first few messages for a log."""
    others = f", and {len(deliveries) - _NAMED} more" if len(deliveries) > _NAMED else ""
    return f"{', '.join(map(message_name, deliveries[:_NAMED]))}{others} of queue {deliveries[0].queue!r}"
