"""Check and claim the queues of a query at its start. An error names its fix.

AMQP does not return a queue's arguments. So an existing queue is compared with this package's default declaration
(`core.channel_setup.compare`). This method cannot detect policies, and the messages say so.

Two readers of a queue in one application would share its messages. Spark creates a source for every branch of a query
that reads a DataFrame, and for every query. A stream delivers every message to each of them, but a queue delivers each
message to one of them: a join of a queue with itself would lose rows of both sides, which are acked. All readers of an
application are on the driver's host. A claim is therefore a lock on a file in the application's own directory
(`SPARK_LOCAL_DIRS`). The operating system releases it when the process ends, for whatever reason. A broker may have
many addresses, so two queues of one virtual host are the same if the broker reports the same cluster name, or if the
URL is the same (the nodes of a cluster without a configured name report their own).

Invariants: a queue that drops messages, or that reading would delete, is refused before anything is consumed. A claim
waits at most a few seconds, in which the reader of a query that has just ended exits. Other applications, and readers
outside of an application, are not affected.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Final

from reliable_mq._util.generators import drive
from reliable_mq._util.logs import get_logger
from reliable_mq.codec.methods import CheckQueue, DeclareQueue
from reliable_mq.core.channel_setup import compare
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.spark.metrics import locked
from reliable_mq.spark.options import QueueOptions
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.topology import Queue
from reliable_mq.topology.arguments import ARGUMENTS, CONSUMER_TIMEOUT, DLX, SINGLE_ACTIVE_CONSUMER

logger = get_logger(__name__)

_NAME: Final = "spark-check"  # of the connection, and in log lines
_LIMIT: Final = ARGUMENTS["x-delivery-limit"]
_SHORT_TIMEOUT: Final = 600_000  # milliseconds
_PATIENCE: Final = 15.0  # seconds for the reader of an ended query to requeue and exit
_POLL: Final = 0.1


@dataclass(frozen=True, slots=True)
class CheckResult:
    refused: str = ""  # why the queue cannot be read
    dropped: str = ""  # why the queue may drop messages (``failOnDataLoss``)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueProfile:
    """The arguments of a queue that determine how it is read."""

    name: str
    delivery_limit: int | None = None  # if the arguments are unknown, the default of the broker's quorum queues
    known: bool = True  # whether the arguments are known
    single_active_consumer: bool = False


def check_queues(options: QueueOptions, claims: QueueClaims) -> list[QueueProfile]:
    """Claim the queues, check them, and return how to read each.

    Blocks for a connection and some round trips, and while another reader has a claim on one of the queues.

    Raises:
        ConfigurationError: If a queue cannot be read, is read twice, or drops messages while ``failOnDataLoss`` is on.
        TopologyMismatch: If a queue does not exist.
        BrokerUnavailable: If the broker could not be queried.
    """
    profiles = []
    with _quietly(), AdminChannel(options.settings(), name=_NAME) as channel:
        claims.claim(options.queues, cluster=channel.server.reported_name)
        version = channel.server.version_tuple
        for name in options.queues:
            channel.carry_out(CheckQueue(name))
            queue = _declaration(channel, name, version)
            if queue is None:
                profiles.append(QueueProfile(name, _in_effect(_LIMIT.default_on(version)), known=False))
                continue
            result = judge(queue, version)
            if result.refused:
                raise ConfigurationError(result.refused)
            if result.dropped and options.fail_on_data_loss:
                raise ConfigurationError(f"{result.dropped} (failOnDataLoss=false reads it all the same)")
            for warning in filter(None, (result.dropped, *result.warnings)):
                logger.warning("%s", warning)
            single = queue.arguments.get(SINGLE_ACTIVE_CONSUMER) is True
            profiles.append(QueueProfile(name, delivery_limit(queue, version), single_active_consumer=single))
    return profiles


def delivery_limit(queue: DeclareQueue, version: tuple[int, ...]) -> int | None:
    """Return the delivery limit in effect on a broker of this version, or None."""
    if queue.arguments.get("x-queue-type") != "quorum":
        return None
    return _in_effect(queue.arguments.get(_LIMIT.name, _LIMIT.default_on(version)))


def _in_effect(limit: object) -> int | None:
    return limit if isinstance(limit, int) and limit >= 0 else None


def judge(queue: DeclareQueue, version: tuple[int, ...]) -> CheckResult:
    """Return the flaws of a queue on a broker of this version."""
    name, values = queue.name, queue.arguments
    if values.get("x-queue-type") == "stream":
        return CheckResult(refused=stream_refusal(name))
    if queue.auto_delete:
        return CheckResult(
            refused=f"queue {name!r} is auto-delete: it would be deleted with all its messages when this query stops "
            "reading it; bind a durable queue to the same exchange, and read that"
        )
    warnings = []
    if not queue.durable:
        warnings.append(
            f"queue {name!r} is not durable: it does not survive a restart of the broker; declare a durable one"
        )
    timeout = values.get(CONSUMER_TIMEOUT)
    if isinstance(timeout, int) and timeout < _SHORT_TIMEOUT:
        warnings.append(
            f"queue {name!r} has x-consumer-timeout={timeout} ms: a batch that takes longer comes again, forever; "
            "raise it, or make batches small with maxMessagesPerTrigger"
        )
    limit = delivery_limit(queue, version)
    if limit is None:
        return CheckResult(warnings=tuple(warnings))
    own = "" if _LIMIT.name in values else " (the broker's default)"
    counts = (
        f"queue {name!r} has a delivery limit of {limit}{own}: every time the application or its connection dies, all "
        "messages that were read and not committed count as delivered once more"
    )
    if DLX in values:
        warnings.append(f"{counts}; after {limit + 1} deliveries they are dead-lettered. Set x-delivery-limit=-1")
        return CheckResult(warnings=tuple(warnings))
    return CheckResult(
        dropped=f"{counts}, and with no dead-letter exchange they are dropped after {limit + 1}. Declare it with "
        "x-delivery-limit=-1, or with a dead-letter exchange. A policy that does so cannot be seen from here",
        warnings=tuple(warnings),
    )


def stream_refusal(name: str) -> str:
    return f"{name!r} is a stream: read it with the option stream, not queue"


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


def _declaration(channel: AdminChannel, name: str, version: tuple[int, ...]) -> DeclareQueue | None:
    """Return the declaration of an existing queue, or None if it is unknown."""
    try:
        declared = DeclareQueue(name, arguments=Queue(name).arguments_for(version))
        comparison = drive(compare(declared), channel.perform)
    except BrokerUnavailable as error:
        text = str(error)
    else:
        if isinstance(comparison.existing, DeclareQueue):
            return comparison.existing
        text = comparison.ended_by
    logger.warning(
        "cannot check the arguments of queue %r (%s): if it is a quorum queue, make sure that it has "
        "x-delivery-limit=-1 or a dead-letter exchange",
        name,
        text,
    )
    return None


# -- claims ------------------------------------------------------------------------------------------------------------


def application_directory() -> Path | None:
    """Return the directory that only this application uses; None outside of Spark."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    directory = Path(first)
    return directory if directory.name.startswith("blockmgr-") and directory.is_dir() else None


class QueueClaims:
    """The queues that a reader has claimed. Not thread-safe."""

    def __init__(self, directory: Path | None, settings: ConnectionSettings) -> None:
        self._directory = directory  # None: nothing is claimed
        self._url = str(settings)
        self._virtual_host = settings.virtual_host
        self._files: list[TextIOWrapper] = []

    def claim(self, queues: Sequence[str], *, cluster: str = "", patience: float = _PATIENCE) -> None:
        """Claim all queues, once. Blocks while another reader has a claim on one.

        ``cluster`` is the name that the broker reports. Queues of the same name on other brokers are different queues.
        """
        if self._directory is None or self._files:
            return
        deadline = time.monotonic() + patience
        brokers = [self._url, *([f"{cluster}\0{self._virtual_host}"] if cluster else [])]
        claimed = {
            hashlib.sha256(f"{broker}\0{queue}".encode()).hexdigest()[:24]: queue
            for broker in brokers
            for queue in queues
        }
        for name, queue in sorted(claimed.items()):  # sorted: two equal claims must not deadlock
            while (file := locked(self._directory / f"reliable-mq-{name}.lock")) is None:
                if time.monotonic() >= deadline:
                    self.release()
                    raise ConfigurationError(
                        f"queue {queue!r} is read twice in this application, and each message would come to one of the "
                        "two readers only. Spark makes a reader for every query, and for every branch of one (a "
                        "self-join, a union): read the queue once, in staged mode (the option stage), whose stream "
                        "gives every reader all messages; or do all that is to be done with a batch in one "
                        "foreachBatch. (Two brokers that tell the same cluster name count as one: rabbitmqctl "
                        "set_cluster_name)"
                    )
                time.sleep(_POLL)
            self._files.append(file)

    def release(self) -> None:
        files, self._files = self._files, []
        for file in files:
            file.close()
