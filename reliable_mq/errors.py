"""All exceptions of the package.

The tree, and the caller's remedy for each branch::

    ReliableMQError
    ├── ConfigurationError      an argument is wrong: fix the code or the configuration
    ├── UsageError              a call at the wrong time or from the wrong place: fix the code
    ├── BrokerUnavailable       no host could be reached in time: try later
    ├── TopologyMismatch        a declaration differs from the object on the broker: fix one of the two
    ├── PublishError            one message was not confirmed
    │   ├── PublishNacked       the broker nacked every attempt that its retries and deadline allow
    │   ├── PublishReturned     no queue is bound for it (mandatory publish)
    │   ├── PublishRefused      the broker closed the channel over it, or it cannot be sent at all
    │   ├── PublishUnconfirmed  its deadline passed: it may or may not have arrived
    │   ├── PublishBlocked      the broker has blocked this connection (memory or disk alarm)
    │   ├── PublishDisconnected there is no connection, and waiting for one was not asked for
    │   └── OutboxError         the outbox could not store the message, or cannot be read
    ├── LabError                docker, a container or a broker's API failed under `reliable_mq.testing`
    └── ConsumeError
        ├── ConsumerCancelled   the queue of a pulling consumer was deleted
        ├── StaleDelivery       the delivery's channel is closed; the broker redelivers the message
        └── IdempotencyStoreError  the store failed, timed out or refused a stale token

A driver's exception never reaches the user: it is the ``__cause__`` of one of these. All can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

__all__ = [
    "BrokerUnavailable",
    "ConfigurationError",
    "ConsumeError",
    "ConsumerCancelled",
    "IdempotencyStoreError",
    "LabError",
    "OutboxError",
    "PublishBlocked",
    "PublishDisconnected",
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
    """Base class of all errors of this package.

    The text may quote the broker or names from elsewhere, so unprintable characters in the text are escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
            for char in text
        )

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[object, ...]]:
        return rebuilt, (type(self), self.args, self.__dict__)

    def __copy__(self) -> Self:
        """Return an equal error with the same cause, but without the traceback."""
        copied = cast("Self", rebuilt(type(self), self.args, self.__dict__))
        copied.__cause__, copied.__suppress_context__ = self.__cause__, self.__suppress_context__
        return copied


class ConfigurationError(ReliableMQError, ValueError):
    """An invalid value of a URL, an option, a property or a header.

    The message names the field, the given value and the accepted values.
    """


class UsageError(ReliableMQError, RuntimeError):
    """A call that cannot work, e.g. after close, in a forked child, or in a deadlock."""


class BrokerUnavailable(ReliableMQError, ConnectionError):
    """No host could be reached, or none accepted the login or the channel set-up.

    Attributes:
        permanent: Whether a retry cannot help: the credentials are wrong, the virtual host is unknown, a permission is
            missing, or the certificate does not verify.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Difference(NamedTuple):
    """An argument or property in which a declaration differs from the existing object.

    Attributes:
        argument: The name of the argument or property.
        declared: The declared value, as the broker printed it; None if the broker did not print it.
        existing: The broker's value, as the broker printed it; None if the broker did not print it.
    """

    argument: str
    declared: str | None = None
    existing: str | None = None


class TopologyMismatch(ReliableMQError):
    """A declaration differs from the object of that name on the broker.

    Also raised if an object that is only given by its name does not exist.

    Attributes:
        kind: The kind of object: ``"queue"``, ``"exchange"`` or ``"binding"``.
        name: The name of the object.
        argument: The first argument or property that differs; None if the broker named none.
        declared: The declared value of ``argument``, as the broker printed it.
        existing: The broker's value of ``argument``, as the broker printed it.
        differences: Every `Difference` that the broker named. The attributes above repeat the first one.
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
        message_id: The id of the message; of the first one if several failed.
        failures: Up to a hundred of the errors, if this error stands for several messages, as at the end of a
            ``with`` block. Otherwise empty.
        may_have_arrived: Whether an attempt was never answered, so that the broker may have the message nevertheless,
            or one of several messages. Code that then publishes it elsewhere creates a duplicate.
    """

    def __init__(self, message: str, *, message_id: str | None = None, failures: Sequence[PublishError] = ()) -> None:
        super().__init__(message)
        self.message_id = message_id
        self.failures = tuple(failures)
        self.may_have_arrived = False


class PublishNacked(PublishError):
    """The broker nacked every attempt that the retry policy and the deadline allow.

    If an exchange routes the message to several queues, each queue that had room has a copy for each attempt.

    Attributes:
        attempts: The number of times that the message was sent.
    """

    def __init__(self, message: str, *, message_id: str | None = None, attempts: int = 1) -> None:
        super().__init__(message, message_id=message_id)
        self.attempts = attempts


class PublishReturned(PublishError):
    """The broker returned a mandatory message: no queue was bound for its routing key.

    Attributes:
        reply_code: The AMQP reply code; RabbitMQ sends 312 (``NO_ROUTE``).
        reply_text: The broker's text.
        exchange: The exchange that the message was published to.
        routing_key: The routing key of the publish.
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
    """The broker closed the channel over this message, or it cannot be sent at all.

    The broker does not have the message, unless ``may_have_arrived`` is true because an earlier attempt was never
    answered.

    Attributes:
        reply_code: The AMQP reply code, e.g. 404 (no such exchange) or 406 (message too large); 0 if the message
            cannot be encoded.
        reply_text: The broker's text, or this package's.
    """

    def __init__(self, message: str, *, message_id: str | None = None, reply_code: int, reply_text: str) -> None:
        super().__init__(message, message_id=message_id)
        self.reply_code = reply_code
        self.reply_text = reply_text


class PublishUnconfirmed(PublishError):
    """The deadline passed without a confirm, and the message may have arrived.

    Attributes:
        sent: Whether any byte of the message may have reached a socket. If False, the message did not arrive.
    """

    def __init__(self, message: str, *, message_id: str | None = None, sent: bool = True) -> None:
        super().__init__(message, message_id=message_id)
        self.sent = self.may_have_arrived = sent


class PublishBlocked(PublishError):
    """The broker has blocked publishing, and the message was not sent.

    Attributes:
        reason: The broker's reason, e.g. ``"low on memory"``.
    """

    def __init__(self, message: str, *, message_id: str | None = None, reason: str = "") -> None:
        super().__init__(message, message_id=message_id)
        self.reason = reason


class PublishDisconnected(PublishError):
    """The publisher has no connection to the broker, and the message was not sent.

    Raised only with ``on_disconnected="raise"``.

    Attributes:
        reason: Why there is no connection: how the last connection, or the last attempt, ended.
    """

    def __init__(self, message: str, *, message_id: str | None = None, reason: str = "") -> None:
        super().__init__(message, message_id=message_id)
        self.reason = reason


class OutboxError(PublishError):
    """The outbox failed: its file or database is full, unreachable, locked or damaged.

    If ``may_have_arrived`` is true, the message may be in the outbox nevertheless, and may be published. Rows that were
    stored earlier are safe.
    """

    def of(self, what: str, message_id: str) -> OutboxError:
        """Return a copy for one message: raising one error again adds to its traceback."""
        stored = "may not be stored" if self.may_have_arrived else "was not stored"
        own = OutboxError(f"{what} {stored}: {self}", message_id=message_id)
        own.may_have_arrived = self.may_have_arrived
        own.__cause__ = self.__cause__
        return own


class LabError(ReliableMQError):
    """Docker, a container or a broker's API failed under `reliable_mq.testing`."""


class ConsumeError(ReliableMQError):
    """Base class of errors while consuming."""


class ConsumerCancelled(ConsumeError):
    """The queue was deleted while ``get()`` pulled from it.

    ``get()`` may be called again.

    A consumer with a handler does not raise this error. When the broker cancels its subscription, because the queue was
    deleted or has lost its leader, the consumer logs that and subscribes again once the queue is back.
    """


class StaleDelivery(ConsumeError):
    """The delivery's channel is closed; nothing was sent, and the broker redelivers."""


class IdempotencyStoreError(ConsumeError):
    """The idempotency store failed, timed out, or refused a stale token.

    The delivery is not acked.
    """


def rebuilt(kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    """Unpickle an error without its constructor, which may take other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
