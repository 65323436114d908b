"""The sink: rows of a batch or of a micro-batch, published and confirmed before their task is done.

Each task publishes its own partition, pipelined, through the publisher of its Python worker. A task is done when the
broker has confirmed every row of it; where one row is not confirmed, the task fails, with the rows' ids and reasons,
and Spark runs it again. What was published before is then published a second time with the same ids (see
`reliable_mq.spark.message_ids`): at least once.

Invariants: a writer does nothing when it is made, and can be pickled; after the first failure no further row is sent,
and what is outstanding is waited for, so that the error says what became of it; nothing that a writer says holds the
URL.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from reliable_mq.errors import ConfigurationError, PublishError
from reliable_mq.spark.message_ids import MessageIds
from reliable_mq.spark.publishers import borrowed_publisher
from reliable_mq.spark.rows import RowPlan, UnsendableRow
from reliable_mq.spark.shipping import Shipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from reliable_mq.spark.options import WriteOptions
    from reliable_mq.sync.confirmation import Confirmation
    from reliable_mq.sync.publisher import Publisher

__all__ = ["BatchSink", "Sink", "Written"]

logger = logging.getLogger(__name__)

_WAITED_FOR_BEYOND: Final = 8000  # confirmations kept; more where the first of them is slow, and its rows need memory
_FAILURES_NAMED: Final = 5
_FAILURES_KEPT: Final = 100
_BATCH_ID: Final = "streaming.sql.batchId"  # local properties that Spark sets for each micro-batch
_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What a task has done: all of it confirmed.

    Attributes:
        rows: how many messages.
        bytes: of their bodies.
    """

    rows: int
    bytes: int


class BatchSink(Shipped, DataSourceArrowWriter):
    """``df.write.format("rabbitmq")``.

    Args:
        options: where to.
        names: of the columns, checked.
    """

    def __init__(self, options: WriteOptions, names: tuple[str, ...]) -> None:
        self._options = options
        self._plan = RowPlan(options, names)
        self._write_id = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish a partition; returns when all of it is confirmed.

        Raises:
            PublishError: a row was not confirmed, or cannot be a message.
            BrokerUnavailable: connecting cannot succeed.
        """
        partition = _partition()
        return _Partition(self._options, self._plan, f"{self._write_id}/{partition}", partition).write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what was written."""
        _log_commit("the batch", messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what cannot be taken back."""
        _log_abort("the batch", messages)


class Sink(Shipped, DataSourceStreamArrowWriter):
    """``df.writeStream.format("rabbitmq")``. Arguments as for `BatchSink`."""

    def __init__(self, options: WriteOptions, names: tuple[str, ...]) -> None:
        self._options = options
        self._plan = RowPlan(options, names)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish a partition of a micro-batch. As `BatchSink.write`."""
        partition = _partition()
        context = TaskContext.get()
        query, batch = (
            (context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)) if context else (None, None)
        )
        prefix = f"{query or uuid.uuid4()}/{batch or 0}/{partition}"
        return _Partition(self._options, self._plan, prefix, partition).write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Say what was written."""
        _log_commit(f"micro-batch {batchId}", messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Say what cannot be taken back."""
        _log_abort(f"micro-batch {batchId}", messages)


@dataclass(slots=True)
class _Partition:
    """One attempt at one partition."""

    options: WriteOptions
    plan: RowPlan
    prefix: str
    number: int
    ids: MessageIds = field(init=False)
    confirmations: deque[Confirmation] = field(default_factory=deque)
    rows: int = 0  # submitted
    settled: int = 0  # rows at the beginning, in order; the next one is the first of `confirmations`
    bytes: int = 0
    failures: list[str] = field(default_factory=list)
    errors: list[PublishError] = field(default_factory=list)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        self.ids = MessageIds(self.prefix, self.plan.constant)
        for batch in batches:
            if batch.num_rows:
                with borrowed_publisher(self.options) as publisher:
                    self._publish(publisher, batch)
                    for each in batches:
                        self._publish(publisher, each)
                    self._settle(0)
        return Written(self.rows, self.bytes)

    def _publish(self, publisher: Publisher, batch: pa.RecordBatch) -> None:
        confirmations = self.confirmations
        submit = publisher.submit
        try:
            for message, exchange, routing_key in self.plan.messages(batch, self.ids, self.rows):
                self.rows += 1
                try:
                    confirmations.append(submit(message, exchange=exchange, routing_key=routing_key))
                except (PublishError, ConfigurationError) as error:  # the latter of its exchange or routing key
                    failure = error if isinstance(error, PublishError) else PublishError(str(error))
                    self._settle(0)
                    self._failed(self.rows - 1, message.message_id, failure)
                    self._check()
                self.bytes += len(message.body)
                if confirmations[0].outcome is not None:
                    self._settle(_WAITED_FOR_BEYOND)
        except UnsendableRow as row:
            self._settle(0)
            self.rows = row.number + 1
            refused = PublishError(row.reason, message_id=row.message_id)
            self._failed(row.number, row.message_id, refused)
            self._check()

    def _settle(self, beyond: int) -> None:
        """Take confirmations whose outcome is known from the front; wait while there are more than ``beyond``."""
        confirmations = self.confirmations
        while confirmations and (confirmations[0].outcome is not None or len(confirmations) > beyond):
            confirmation = confirmations.popleft()
            error = confirmation.exception()
            if error is not None:
                self._failed(self.settled, confirmation.message_id, error)
                beyond = 0  # nothing more is sent: hear of all that is
            self.settled += 1
        if not confirmations:
            self._check()

    def _failed(self, row: int, message_id: str | None, error: PublishError) -> None:
        self.errors.append(error)
        if len(self.failures) < _FAILURES_NAMED:
            text = str(error)
            named = message_id is None or message_id in text
            self.failures.append(f"row {row}: {text}" if named else f"row {row}, message {message_id}: {text}")

    def _check(self) -> None:
        """Raise one error for all failures, if there are any."""
        if not self.errors:
            return
        more = len(self.errors) - len(self.failures)
        raise PublishError(
            f"{len(self.errors)} of {self.rows} rows of partition {self.number} were not confirmed: "
            + "; ".join(self.failures)
            + (f"; and {more} more" if more else ""),
            message_id=self.errors[0].message_id,
            failures=self.errors[:_FAILURES_KEPT],
        )


def _partition() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def _log_commit(what: str, messages: Sequence[Any]) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    logger.info("%s is written: %d messages are confirmed", what, sum(message.rows for message in written))


def _log_abort(what: str, messages: Sequence[Any]) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    logger.warning(
        "%s was given up after %d messages were confirmed, which stay published; a further attempt publishes them again"
        " with the same ids",
        what,
        sum(message.rows for message in written),
    )
