"""Every error that a user of reliable_mq can meet.

The tree, and what each branch asks of the caller::

    ReliableMQError
    ├── ConfigurationError      a value given to a constructor is wrong: fix the code or the configuration
    ├── UsageError              a call made at the wrong time or from the wrong place: fix the code
    ├── BrokerUnavailable       no host could be reached in time: try later
    ├── TopologyMismatch        what is declared differs from what the broker has: fix one of the two
    ├── PublishError            one message was not confirmed
    │   ├── PublishNacked       the broker refused it, as often as the retry policy allowed
    │   ├── PublishReturned     no queue is bound for it (mandatory publish)
    │   ├── PublishRefused      the broker closed the channel over it, or it was refused before it was sent
    │   ├── PublishUnconfirmed  its deadline passed: it may or may not have arrived
    │   ├── PublishBlocked      the broker has blocked this connection (memory or disk alarm)
    │   └── OutboxError         the outbox could not store the message, or cannot be read
    └── ConsumeError
        ├── ConsumerCancelled   a consumer that pulls finds its queue deleted
        ├── StaleDelivery       the delivery belongs to a channel that is gone; it will come again
        └── IdempotencyStoreError  the store did not answer or refused a stale token

An exception of a driver never reaches a user: it is the ``__cause__`` of one of these. Each can be copied and pickled,
to cross from one process to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "BrokerUnavailable",
    "ConfigurationError",
    "ConsumeError",
    "ConsumerCancelled",
    "IdempotencyStoreError",
    "OutboxError",
    "PublishBlocked",
    "PublishError",
    "PublishNacked",
    "PublishRefused",
    "PublishReturned",
    "PublishUnconfirmed",
    "ReliableMQError",
    "StaleDelivery",
    "TopologyMismatch",
    "UsageError",
]


class ReliableMQError(Exception):
    """The base of every error that this package raises.

    Its text may hold words of the broker's, or names that somebody else chose: what does not print in it is escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
            for char in text
        )

    def __reduce__(self) -> tuple[Callable[..., ReliableMQError], tuple[object, ...]]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class ConfigurationError(ReliableMQError, ValueError):
    """A value is wrong in itself: a URL, an option, a property, a header.

    The message names the field, what was given and what is accepted.
    """


class UsageError(ReliableMQError, RuntimeError):
    """A call that cannot work here and now: after close, in a forked child, where it would deadlock."""


class BrokerUnavailable(ReliableMQError, ConnectionError):
    """No configured host could be reached, or none accepted the credentials.

    Attributes:
        permanent: True where trying again cannot help (wrong credentials, unknown virtual host,
            a certificate that does not verify).
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Difference(NamedTuple):
    """One argument or property in which a declaration differs from what exists.

    Attributes:
        argument: its name.
        declared: the value that was declared, as the broker printed it; None where the broker did not print it.
        existing: the value that the broker has, likewise.
    """

    argument: str
    declared: str | None = None
    existing: str | None = None


class TopologyMismatch(ReliableMQError):
    """A declaration differs from what exists on the broker.

    Attributes:
        kind: ``"queue"``, ``"exchange"`` or ``"binding"``.
        name: the name of the object.
        argument: the argument or property that differs, where the broker named it; the first one of several.
        declared: the value that we declared, as the broker printed it.
        existing: the value that the broker has, as the broker printed it.
        differences: every `Difference` that the broker named; the first one is in the attributes above, too.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        name: str,
        argument: str | None = None,
        declared: str | None = None,
        existing: str | None = None,
        differences: Sequence[Difference] = (),
    ) -> None:
        super().__init__(message)
        if argument is not None and not differences:
            differences = (Difference(argument, declared, existing),)
        self.kind = kind
        self.name = name
        self.differences = tuple(differences)
        first = Difference(*self.differences[0]) if self.differences else None
        self.argument = None if first is None else first.argument
        self.declared = None if first is None else first.declared
        self.existing = None if first is None else first.existing


class PublishError(ReliableMQError):
    """A message was not confirmed.

    Attributes:
        message_id: the id of the message (of the first one, where several failed).
        failures: where the error stands for several messages (a ``with`` block that is left), the
            first hundred of their errors; else empty.
        may_have_arrived: whether an attempt to publish it was never answered, so that the broker may have it all the
            same. What handles the error by publishing elsewhere makes a duplicate then.
    """

    def __init__(self, message: str, *, message_id: str | None = None, failures: Sequence[PublishError] = ()) -> None:
        super().__init__(message)
        self.message_id = message_id
        self.failures = tuple(failures)
        self.may_have_arrived = False


class PublishNacked(PublishError):
    """The broker answered ``basic.nack``, as often as the retry policy allowed.

    Attributes:
        attempts: how often it was sent.
    """

    def __init__(self, message: str, *, message_id: str | None = None, attempts: int = 1) -> None:
        super().__init__(message, message_id=message_id)
        self.attempts = attempts


class PublishReturned(PublishError):
    """The broker returned a mandatory message: no queue was bound for its routing key.

    Attributes:
        reply_code: 312 (``NO_ROUTE``) from RabbitMQ.
        reply_text: the broker's text.
        exchange: where it was published to.
        routing_key: with which key.
    """

    def __init__(
        self,
        message: str,
        *,
        message_id: str | None = None,
        reply_code: int,
        reply_text: str,
        exchange: str,
        routing_key: str,
    ) -> None:
        super().__init__(message, message_id=message_id)
        self.reply_code = reply_code
        self.reply_text = reply_text
        self.exchange = exchange
        self.routing_key = routing_key


class PublishRefused(PublishError):
    """The broker closed the channel because of this message, or it was refused before it was sent.

    The broker does not have it, unless ``may_have_arrived`` says that an earlier attempt was never answered.

    Attributes:
        reply_code: the AMQP reply code, e.g. 404 (no such exchange) or 406 (message too large); 0 where the message
            cannot be encoded.
        reply_text: the broker's text, or ours.
    """

    def __init__(self, message: str, *, message_id: str | None = None, reply_code: int, reply_text: str) -> None:
        super().__init__(message, message_id=message_id)
        self.reply_code = reply_code
        self.reply_text = reply_text


class PublishUnconfirmed(PublishError):
    """The deadline passed without a confirm. The outcome is unknown: the message may have arrived.

    Attributes:
        sent: whether any byte of it may have reached a socket; where False, it did not arrive.
    """

    def __init__(self, message: str, *, message_id: str | None = None, sent: bool = True) -> None:
        super().__init__(message, message_id=message_id)
        self.sent = self.may_have_arrived = sent


class PublishBlocked(PublishError):
    """The broker has blocked publishing on this connection, and the message was not sent.

    Attributes:
        reason: the broker's reason, e.g. ``"low on memory"``.
    """

    def __init__(self, message: str, *, message_id: str | None = None, reason: str = "") -> None:
        super().__init__(message, message_id=message_id)
        self.reason = reason


class OutboxError(PublishError):
    """The outbox failed: its disk is full, its file or database cannot be reached, locked for too long, or damaged.

    Of a message that was to be stored, ``may_have_arrived`` says whether it may be in the outbox all the same, so that
    it may be published; where False, it is not there. Rows that were stored before are safe.
    """

    def of(self, what: str, message_id: str) -> OutboxError:
        """Make the error of one message out of that of a transaction: raising one adds to its traceback."""
        own = OutboxError(f"{what} was not stored: {self}", message_id=message_id)
        own.may_have_arrived = self.may_have_arrived
        own.__cause__ = self.__cause__
        return own


class ConsumeError(ReliableMQError):
    """Something about a delivery or a subscription."""


class ConsumerCancelled(ConsumeError):
    """The queue was deleted while a consumer was at it. Raised by ``get()``, which may be called again.

    A consumer with a handler raises nothing: what the broker cancels, because the queue was deleted or has lost its
    leader, is logged, and subscribed to again when the queue is back.
    """


class StaleDelivery(ConsumeError):
    """The delivery's channel is gone; the broker will deliver the message again. Nothing was sent."""


class IdempotencyStoreError(ConsumeError):
    """The idempotency store failed, hung past its deadline, or refused a stale token: it fails closed."""


def _rebuilt(kind: type[ReliableMQError], args: tuple[object, ...], attributes: dict[str, object]) -> ReliableMQError:
    """Make an error again without asking its constructor, whose keyword-only arguments pickle does not know."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error
