"""What is wrong with a queue for a Spark query, found at its start: every error and warning names its fix.

AMQP does not tell a queue's arguments, but it says of a declaration that differs in which argument it does, and what is
there. So the queue, which is known to exist, is declared as our own default is; each refusal corrects one argument,
until the broker agrees. Policies cannot be seen that way, and the texts say so.

Invariant: a queue that drops messages, or would be deleted by our reading it, is refused before anything is consumed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from reliable_mq.core.setup import CheckQueue, DeclareQueue, StepRefused, refusal
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.sync.channel import StepChannel
from reliable_mq.topology import Queue, mismatch_from_reply
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from reliable_mq.spark.options import QueueOptions

__all__ = ["Arguments", "Verdict", "check_queues", "corrected", "delivery_limit", "judge"]

logger = logging.getLogger(__name__)

_NAME: Final = "spark-check"  # of the connection, and in the log
_ROUNDS: Final = 24  # arguments that a queue may differ in
_NUMBER: Final = re.compile(r"current is the value '-?[0-9]+' of type '(?!longstr)")
_BARE_NUMBER: Final = re.compile(r"current is '-?[0-9]+'")  # of the type that was declared
_DEFAULT_LIMIT: Final = 20  # deliveries, of a quorum queue that says nothing, since RabbitMQ 4.0
_LIMITED_SINCE: Final = (4, 0)
_WITH_DEAD_LETTERS: Final = ("x-dead-letter-routing-key", "x-dead-letter-strategy", "x-overflow")
_SHORT_TIMEOUT: Final = 600_000  # milliseconds


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a queue was declared with."""

    durable: bool = True
    auto_delete: bool = False
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a queue.

    Attributes:
        refused: why it cannot be read; empty where it can.
        dropped: why it may drop messages, which ``failOnDataLoss`` is about; empty where it does not.
        warnings: what had better be known.
    """

    refused: str = ""
    dropped: str = ""
    warnings: tuple[str, ...] = ()


def check_queues(options: QueueOptions) -> int | None:
    """Look at the queues. Blocks for a connection and some round trips.

    Returns:
        Their lowest delivery limit; None where none is known.

    Raises:
        ConfigurationError: one cannot be read, or drops messages and ``failOnDataLoss`` is on.
        TopologyMismatch: there is none of that name.
        BrokerUnavailable: the broker could not be asked.
    """
    limits: list[int] = []
    with _quietly(), StepChannel(parse_url(options.url), name=_NAME) as channel:
        version = channel.server.version_tuple
        for name in options.queues:
            try:
                channel.perform(CheckQueue(name))
            except StepRefused as refused:
                raise refusal(CheckQueue(name), refused) from refused
            arguments = _arguments(channel, name, version)
            if arguments is None:
                continue
            verdict = judge(name, arguments, version)
            if verdict.refused:
                raise ConfigurationError(verdict.refused)
            if verdict.dropped and options.fail_on_data_loss:
                raise ConfigurationError(f"{verdict.dropped} (failOnDataLoss=false reads it all the same)")
            for warning in (*filter(None, [verdict.dropped]), *verdict.warnings):
                logger.warning("%s", warning)
            limit = delivery_limit(arguments, version)
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def delivery_limit(arguments: Arguments, version: tuple[int, ...]) -> int | None:
    """Return after how many deliveries but one a queue gives a message up; None for never.

    Args:
        arguments: of the queue.
        version: of the broker.
    """
    if arguments.values.get("x-queue-type", "classic") != "quorum":
        return None
    limit = arguments.values.get("x-delivery-limit", _DEFAULT_LIMIT if version >= _LIMITED_SINCE else None)
    return limit if isinstance(limit, int) and limit >= 0 else None


def judge(name: str, arguments: Arguments, version: tuple[int, ...]) -> Verdict:
    """Say what is wrong with a queue.

    Args:
        name: of the queue.
        arguments: its own.
        version: of the broker.
    """
    values = arguments.values
    kind = values.get("x-queue-type", "classic")
    if kind == "stream":
        return Verdict(refused=f"{name!r} is a stream: read it with the option stream, not queue")
    if arguments.auto_delete:
        return Verdict(
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
        return Verdict(warnings=tuple(warnings))
    limit = delivery_limit(arguments, version)
    if limit is None:
        return Verdict(warnings=tuple(warnings))
    own = "" if "x-delivery-limit" in values else " (the broker's default)"
    counts = (
        f"queue {name!r} has a delivery limit of {limit}{own}: every time the application or its connection dies, all "
        "messages that were read and not committed count as delivered once more"
    )
    if "x-dead-letter-exchange" in values:
        warnings.append(f"{counts}; after {limit + 1} deliveries they are dead-lettered. Set x-delivery-limit=-1")
        return Verdict(warnings=tuple(warnings))
    return Verdict(
        dropped=f"{counts}, and with no dead-letter exchange they are dropped after {limit + 1}. Declare it with "
        "x-delivery-limit=-1, or with a dead-letter exchange. A policy that does so cannot be seen from here",
        warnings=tuple(warnings),
    )


def corrected(name: str, assumed: Arguments, text: str) -> Arguments | None:
    """Take over from the broker's refusal what the queue really has; None where the text does not tell.

    Args:
        name: of the queue.
        assumed: what was declared.
        text: of the refusal, code 406.
    """
    mismatch = mismatch_from_reply("queue", name, 406, text)
    argument, existing = mismatch.argument, mismatch.existing
    if argument is None or existing is None:
        return None
    if argument == "durable":
        return replace(assumed, durable=existing == "true")
    if argument == "auto_delete":
        return replace(assumed, auto_delete=existing == "true")
    values = dict(assumed.values)
    if existing == "none":
        if argument not in values:
            return None
        del values[argument]
        if argument == "x-dead-letter-exchange":  # what goes with it is not there either; if it is, that will be said
            values = {name: value for name, value in values.items() if name not in _WITH_DEAD_LETTERS}
    else:
        declared = values.get(argument)
        value: object = existing
        if "of type 'bool'" in text or isinstance(declared, bool):
            value = existing == "true"
        elif _NUMBER.search(text) or (isinstance(declared, int) and _BARE_NUMBER.search(text)):
            value = int(existing)
        values[argument] = value
    return replace(assumed, values=values)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the refusals that are asked for out of the log."""
    connector = logging.getLogger("reliable_mq.connection.connector")

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NAME)

    connector.addFilter(other)
    try:
        yield
    finally:
        connector.removeFilter(other)


def _arguments(channel: StepChannel, name: str, version: tuple[int, ...]) -> Arguments | None:
    """Find out what an existing queue was declared with; None where that cannot be known."""
    assumed: Arguments | None = Arguments(values=Queue(name).arguments_for(version))
    text = "it differs in too much"
    for _ in range(_ROUNDS):
        if assumed is None:
            break
        step = DeclareQueue(name, assumed.durable, False, assumed.auto_delete, assumed.values)
        try:
            channel.perform(step)
        except StepRefused as refused:
            text = f"{refused.code} {refused.text}"
            assumed = corrected(name, assumed, refused.text) if refused.code == 406 else None
        except BrokerUnavailable as error:
            text, assumed = str(error), None
        else:
            return assumed
    logger.warning(
        "the arguments of queue %r cannot be looked at (%s): make sure that it has x-delivery-limit=-1 or a "
        "dead-letter exchange, where it is a quorum queue",
        name,
        text,
    )
    return None
