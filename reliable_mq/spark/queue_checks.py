"""Check the queues of a Spark query at its start; an error names its fix.

AMQP does not return a queue's arguments. So the queue, which is known to exist, is compared with our own default
(`core.channel_setup.compare`). Policies cannot be seen that way, and the texts say so.

Invariant: a queue that drops messages, or would be deleted by our reading it, is refused before anything is consumed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from reliable_mq.codec.methods import CheckQueue, DeclareQueue
from reliable_mq.core.channel_setup import Comparison, Pipeline, StepRefused, compare, refusal
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.topology import Queue
from reliable_mq.topology.arguments import ARGUMENTS

if TYPE_CHECKING:
    from reliable_mq.spark.options import QueueOptions

__all__ = ["CheckResult", "QueueArguments", "QueueProfile", "check_queues", "delivery_limit", "judge"]

logger = logging.getLogger(__name__)

_NAME: Final = "spark-check"  # of the connection, and in the log
_LIMIT: Final = ARGUMENTS["x-delivery-limit"]
_SHORT_TIMEOUT: Final = 600_000  # milliseconds


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """The declaration of an existing queue."""

    durable: bool = True
    auto_delete: bool = False
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of checking a queue.

    Attributes:
        refused: why it cannot be read; empty if it can.
        dropped: why it may drop messages (``failOnDataLoss``); empty if it does not.
        warnings: other flaws.
    """

    refused: str = ""
    dropped: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueProfile:
    """The arguments of a queue that decide how it is read.

    Attributes:
        name: of the queue.
        delivery_limit: None for none. If its arguments are not known, that of the broker's quorum queues.
        known: whether its arguments are.
        single_active_consumer: whether it has ``x-single-active-consumer``.
    """

    name: str
    delivery_limit: int | None = None
    known: bool = True
    single_active_consumer: bool = False


def check_queues(options: QueueOptions) -> list[QueueProfile]:
    """Check all queues. Blocks for a connection and some round trips.

    Returns:
        How each of them is to be read.

    Raises:
        ConfigurationError: one cannot be read, or drops messages and ``failOnDataLoss`` is on.
        TopologyMismatch: there is none of that name.
        BrokerUnavailable: the broker could not be asked.
    """
    profiles = []
    with _quietly(), AdminChannel(options.connection.settings(options.url), name=_NAME) as channel:
        version = channel.server.version_tuple
        for name in options.queues:
            try:
                channel.perform(CheckQueue(name))
            except StepRefused as refused:
                raise refusal(CheckQueue(name), refused) from refused
            arguments = _arguments(channel, name, version)
            if arguments is None:
                profiles.append(QueueProfile(name, _in_effect(_LIMIT.default_on(version)), known=False))
                continue
            result = judge(name, arguments, version)
            if result.refused:
                raise ConfigurationError(result.refused)
            if result.dropped and options.fail_on_data_loss:
                raise ConfigurationError(f"{result.dropped} (failOnDataLoss=false reads it all the same)")
            for warning in (*filter(None, [result.dropped]), *result.warnings):
                logger.warning("%s", warning)
            single = arguments.values.get("x-single-active-consumer") is True
            profiles.append(QueueProfile(name, delivery_limit(arguments, version), single_active_consumer=single))
    return profiles


def delivery_limit(arguments: QueueArguments, version: tuple[int, ...]) -> int | None:
    """Return the delivery limit in effect; None if there is none.

    Args:
        arguments: of the queue.
        version: of the broker.
    """
    if arguments.values.get("x-queue-type", "classic") != "quorum":
        return None
    return _in_effect(arguments.values.get(_LIMIT.name, _LIMIT.default_on(version)))


def _in_effect(limit: object) -> int | None:
    return limit if isinstance(limit, int) and limit >= 0 else None


def judge(name: str, arguments: QueueArguments, version: tuple[int, ...]) -> CheckResult:
    """Return the flaws of a queue.

    Args:
        name: of the queue.
        arguments: its own.
        version: of the broker.
    """
    values = arguments.values
    kind = values.get("x-queue-type", "classic")
    if kind == "stream":
        return CheckResult(refused=f"{name!r} is a stream: read it with the option stream, not queue")
    if arguments.auto_delete:
        return CheckResult(
            refused=f"queue {name!r} is auto-delete: it would be deleted with all its messages when this query stops "
            "reading it; bind a durable queue to the same exchange, and read that"
        )
    warnings = []
    if not arguments.durable:
        warnings.append(
            f"queue {name!r} is not durable: it does not survive a restart of the broker; declare a durable one"
        )
    timeout = values.get("x-consumer-timeout")
    if isinstance(timeout, int) and timeout < _SHORT_TIMEOUT:
        warnings.append(
            f"queue {name!r} has x-consumer-timeout={timeout} ms: a batch that takes longer comes again, for ever; "
            "raise it, or make batches small with maxMessagesPerTrigger"
        )
    if kind != "quorum":
        return CheckResult(warnings=tuple(warnings))
    limit = delivery_limit(arguments, version)
    if limit is None:
        return CheckResult(warnings=tuple(warnings))
    own = "" if _LIMIT.name in values else " (the broker's default)"
    counts = (
        f"queue {name!r} has a delivery limit of {limit}{own}: every time the application or its connection dies, all "
        "messages that were read and not committed count as delivered once more"
    )
    if "x-dead-letter-exchange" in values:
        warnings.append(f"{counts}; after {limit + 1} deliveries they are dead-lettered. Set x-delivery-limit=-1")
        return CheckResult(warnings=tuple(warnings))
    return CheckResult(
        dropped=f"{counts}, and with no dead-letter exchange they are dropped after {limit + 1}. Declare it with "
        "x-delivery-limit=-1, or with a dead-letter exchange. A policy that does so cannot be seen from here",
        warnings=tuple(warnings),
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep provoked refusals out of the log."""
    connector = logging.getLogger("reliable_mq.connection.connection")

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NAME)

    connector.addFilter(other)
    try:
        yield
    finally:
        connector.removeFilter(other)


def _arguments(channel: AdminChannel, name: str, version: tuple[int, ...]) -> QueueArguments | None:
    """Return the arguments of an existing queue; None if they cannot be known."""
    try:
        comparison = _carry_out(channel, compare(DeclareQueue(name, arguments=Queue(name).arguments_for(version))))
    except BrokerUnavailable as error:
        text = str(error)
    else:
        existing, text = comparison.existing, comparison.ended_by
        if isinstance(existing, DeclareQueue):
            return QueueArguments(existing.durable, existing.auto_delete, existing.arguments)
    logger.warning(
        "the arguments of queue %r cannot be looked at (%s): make sure that it has x-delivery-limit=-1 or a "
        "dead-letter exchange, where it is a quorum queue",
        name,
        text,
    )
    return None


def _carry_out(channel: AdminChannel, steps: Generator[Pipeline, Any, Comparison]) -> Comparison:
    """Carry out steps that go on after a refusal, on a channel that is opened anew."""
    try:
        step = next(steps)
        while True:
            try:
                reply = channel.perform(step)
            except StepRefused as refused:
                step = steps.throw(refused)
            else:
                step = steps.send(reply)
    except StopIteration as stop:
        comparison: Comparison = stop.value
        return comparison
