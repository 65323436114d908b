"""The sink: it publishes rows and waits for their confirms before a task is done.

Each task publishes its partition, pipelined, through the publisher of its Python worker. A task is done when the broker
has confirmed all of its rows. If one row is not confirmed, the task fails with the rows' ids and reasons, and Spark
runs the task again. Rows that were already published are then published again with the same ids
(`reliable_mq.spark.rows`): at least once.

A Python worker keeps one publisher for each broker and user for its next task. PySpark forks its workers before they
load this package, runs one task at a time in each, and reuses them by default. Without the kept publisher, a
micro-batch of a thousand rows would spend most of its time on handshakes. The publisher's thread sends heartbeats
independently of the task.

Invariants:

- A writer's constructor has no side effects, and a writer can be pickled.
- After the first failure no further row is sent. The task waits for outstanding rows, so that the error contains their
  outcomes.
- With a queue for dead letters, a row that cannot be sent is not a failure: its dead letter is confirmed before its
  task is done (`reliable_mq.spark.rows`). A cause that would affect other rows too is a failure: a full queue, a lost
  broker, or an exchange or a routing key from the options.
- No message, log line or error of a writer holds the URL.
- A publisher belongs to one task at a time, and is kept only if everything that the task published was confirmed. An
  unused publisher is closed cleanly before Spark kills its worker for being idle (60 s). A worker that is not reused
  keeps none.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core import headers
from reliable_mq.errors import ConfigurationError, PublishError, PublishRefused, PublishReturned, ReliableMQError
from reliable_mq.message import Message
from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.pickling import PicklableByName
from reliable_mq.spark.rows import MessageIds, Outgoing, RowPlan, UnsendableRow, letter_of_message, letter_of_row
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.publisher import Publisher
from reliable_mq.topology import Queue

logger = get_logger(__name__)

_IDLE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 5.0
_KEPT: Final = 4

_lock = threading.Lock()
# Keyed by the options in which publishers differ. The most recently used one is last.
_idle: dict[WriteOptions, tuple[Publisher, threading.Timer]] = {}


class _TaskPublisher(Publisher):
    """A publisher that does not log failures, because the task reads every outcome."""

    def submit(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Confirmation:
        return self._submit(message, exchange, routing_key, timeout, reported=True)


@contextmanager
def publisher_pool(options: WriteOptions) -> Iterator[Publisher]:
    """Lend a publisher. Keep it after a clean exit, discard it after an exception."""
    key = replace(options, exchange=None, routing_key=None, traceparent=None)
    metrics = exporter(options.metrics_directory)
    registry = None if metrics is None else metrics.registry
    arguments: dict[str, Any] = options.connection.arguments() | dict(options.publisher)
    if options.dead_letter_queue is not None:
        arguments["topology"] = [Queue(options.dead_letter_queue, dead_letter=None)]
    publisher = _take(key) or _TaskPublisher(options.url, name="spark-sink", registry=registry, **arguments)
    try:
        yield publisher
    except BaseException:
        _close(publisher, 0.0)
        raise
    else:
        if os.environ.get("SPARK_REUSE_WORKER"):
            _keep(key, publisher)
        else:
            _close(publisher, _CLOSE_SECONDS)
    finally:
        if metrics is not None:
            metrics.write()  # the process may end at any time


def _take(key: WriteOptions) -> Publisher | None:
    with _lock:
        entry = _idle.pop(key, None)
    if entry is None:
        return None
    publisher, timer = entry
    timer.cancel()
    return publisher


def _keep(key: WriteOptions, publisher: Publisher) -> None:
    timer = threading.Timer(_IDLE_SECONDS, _expire, (key, publisher))
    timer.daemon = True
    with _lock:
        _idle[key] = publisher, timer
        surplus = [_idle.pop(next(iter(_idle))) for _ in range(len(_idle) - _KEPT)]
    timer.start()
    for other, its_timer in surplus:
        its_timer.cancel()
        _close(other, _CLOSE_SECONDS)


def _expire(key: WriteOptions, publisher: Publisher) -> None:
    with _lock:
        entry = _idle.get(key)
        if entry is None or entry[0] is not publisher:  # a task uses it
            return
        del _idle[key]
    _close(publisher, _CLOSE_SECONDS)


def _close(publisher: Publisher, timeout: float) -> None:
    try:
        publisher.close(timeout)
    except ReliableMQError as error:  # the task reports it
        logger.debug("failed to close a publisher: %s", error)


def close_all() -> None:
    """Close the unused publishers cleanly."""
    with _lock:
        entries = list(_idle.values())
        _idle.clear()
    for publisher, timer in entries:
        timer.cancel()
        _close(publisher, _CLOSE_SECONDS)


at_exit(ExitStage.KEPT, close_all)
at_fork(ForkStage.FORGET, _idle.clear)


_ROWS_KEPT: Final = 8000  # maximum confirmations behind an unsettled one; each holds the body of its row
_BYTES_KEPT: Final = 128 * 2**20  # maximum size of these bodies: twice the window of the publisher
_FAILURES_NAMED: Final = 5
_FAILURES_KEPT: Final = 100
_LETTERS: Final = 1000  # maximum dead letters kept; each holds the body of its row
_NO_EXCHANGE: Final = (ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_FOUND)
_BATCH_ID: Final = "streaming.sql.batchId"  # local properties that Spark sets for each micro-batch
_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class WrittenPartition(WriterCommitMessage):
    """The result of a task whose rows are all confirmed."""

    rows: int
    bytes: int  # total size of the bodies
    dead_lettered: int = 0  # number of rows


class _Sink(PicklableByName):
    def __init__(self, options: WriteOptions, names: tuple[str, ...]) -> None:
        self._options = options
        self._plan = RowPlan(options, names)
        self._write_id = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenPartition:
        """Publish a partition and return when all of its rows are confirmed.

        Raises:
            PublishError: If a row was not confirmed, or cannot be a message.
            BrokerUnavailable: If connecting cannot succeed.
        """
        context = TaskContext.get()
        number = 0 if context is None else context.partitionId()
        return _Partition(self._options, self._plan, f"{self._prefix(context)}/{number}", number).write(iterator)

    def _prefix(self, _context: TaskContext | None) -> str:
        """Return the common prefix of the message ids, without the partition's number."""
        return self._write_id

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803
        what, written = _written(messages, batchId)
        logger.info("%s: %d messages confirmed", what, sum(message.rows for message in written))
        dead_lettered = sum(message.dead_lettered for message in written)
        if dead_lettered:
            logger.warning("%s: %d rows could not be sent and were dead-lettered", what, dead_lettered)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803
        what, written = _written(messages, batchId)
        logger.warning(
            "%s: aborted after %d messages were confirmed, which stay published; another %s",
            what,
            sum(message.rows for message in written),
            "write publishes them again, with the same ids only if the rows have a column message_id"
            if batchId is None
            else "attempt publishes them again, with the same ids",
        )


class BatchSink(_Sink, DataSourceArrowWriter):
    """The sink of ``df.write.format("rabbitmq")``."""


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """The sink of ``df.writeStream.format("rabbitmq")``."""

    def _prefix(self, context: TaskContext | None) -> str:
        if context is None:
            return f"{uuid.uuid4()}/0"
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        return f"{query or uuid.uuid4()}/{batch or 0}"


@dataclass(slots=True)
class _Partition:
    """One attempt at one partition."""

    options: WriteOptions
    plan: RowPlan
    prefix: str
    number: int
    ids: MessageIds = field(init=False)
    publisher: Publisher = field(init=False)
    confirmations: deque[tuple[int, Confirmation]] = field(default_factory=deque)  # with the numbers of their rows
    letters: deque[tuple[int, Confirmation]] = field(default_factory=deque)
    rows: int = 0
    bytes: int = 0
    kept: int = 0  # total size of the bodies in `confirmations`
    dead_lettered: int = 0
    failures: list[str] = field(default_factory=list)
    errors: list[PublishError] = field(default_factory=list)

    def write(self, batches: Iterator[pa.RecordBatch]) -> WrittenPartition:
        self.ids = MessageIds(self.prefix, self.plan.constant)
        for batch in batches:
            if batch.num_rows:
                with publisher_pool(self.options) as self.publisher:
                    self._publish(batch)
                    for each in batches:
                        self._publish(each)
                    self._settle(0)
                    self._settle_letters(0)
        return WrittenPartition(self.rows, self.bytes, self.dead_lettered)

    def _publish(self, batch: pa.RecordBatch) -> None:
        confirmations = self.confirmations
        submit = self.publisher.submit
        for row, outgoing in enumerate(self.plan.messages(batch, self.ids, self.rows), self.rows):
            self.rows = row + 1
            if isinstance(outgoing, UnsendableRow):
                self._unsendable(outgoing)
                continue
            message, exchange, routing_key = outgoing
            try:
                confirmations.append((row, submit(message, exchange=exchange, routing_key=routing_key)))
            except (PublishError, ConfigurationError) as error:  # ConfigurationError: bad exchange or routing key
                self._not_submitted(row, outgoing, error)
                continue
            self.bytes += len(message.body)
            self.kept += len(message.body)
            if len(confirmations) > _ROWS_KEPT or self.kept > _BYTES_KEPT:
                self._settle(len(confirmations) - 1)
            elif confirmations[0][1].outcome is not None:
                self._settle(len(confirmations))

    def _unsendable(self, row: UnsendableRow) -> None:
        """Handle a row that cannot be made into a message."""
        failure = PublishError(row.reason, message_id=row.message_id)
        if self.options.dead_letter_queue is not None:
            try:
                letter = letter_of_row(row, self.ids)
            except (ConfigurationError, UnicodeError) as error:
                failure = PublishError(f"{row.reason}; and no dead letter can be made of it: {error}")
            else:
                self._dead_letter(row.number, letter)
                return
        self._settle(0)
        self._failed(row.number, row.message_id, failure)
        self._check()

    def _not_submitted(self, row: int, outgoing: Outgoing, error: PublishError | ConfigurationError) -> None:
        """Handle a message that was refused before it was sent."""
        if self._is_of_the_row(error):
            self._dead_letter(row, letter_of_message(outgoing, error))
            return
        failure = error if isinstance(error, PublishError) else PublishError(str(error))
        self._settle(0)
        self._failed(row, outgoing.message.message_id, failure)
        self._check()

    def _is_of_the_row(self, error: PublishError | ConfigurationError) -> bool:
        """Return whether an error concerns only one row, so that it is dead-lettered."""
        if self.options.dead_letter_queue is None:
            return False
        if isinstance(error, PublishReturned):
            return self.plan.chooses_route
        if isinstance(error, PublishRefused) and error.reply_code in _NO_EXCHANGE:
            return self.plan.chooses_exchange
        return isinstance(error, (PublishRefused, ConfigurationError))

    def _dead_letter(self, row: int, letter: Message) -> None:
        queue = self.options.dead_letter_queue or ""
        try:
            self.letters.append((row, self.publisher.submit(letter, routing_key=queue)))
        except (PublishError, ConfigurationError) as error:
            self._failed(row, letter.message_id, _not_dead_lettered(letter, error))
            self._settle(0)  # after the failure, with which dead-lettering ends
            self._check()
        self.dead_lettered += 1
        self._settle_letters(_LETTERS)

    def _settle(self, beyond: int) -> None:
        """Settle confirmations from the front, and wait while more than ``beyond`` remain."""
        confirmations = self.confirmations
        while confirmations and (confirmations[0][1].outcome is not None or len(confirmations) > beyond):
            row, confirmation = confirmations.popleft()
            self.kept -= len(confirmation.message.body)
            error = confirmation.exception()
            if error is None:
                continue
            if not self.errors and self._is_of_the_row(error):
                self.bytes -= len(confirmation.message.body)
                self._dead_letter(row, letter_of_message(confirmation, error))
            else:
                self._failed(row, confirmation.message_id, error)
                beyond = 0  # sending has stopped: wait for all outcomes
        if not confirmations:
            self._check()

    def _settle_letters(self, beyond: int) -> None:
        """Settle dead letters from the front, and wait while more than ``beyond`` remain."""
        letters = self.letters
        while letters and (letters[0][1].outcome is not None or len(letters) > beyond):
            row, confirmation = letters.popleft()
            error = confirmation.exception()
            if error is None:
                metrics = exporter(self.options.metrics_directory)
                if metrics is not None:
                    metrics.sink.dead_lettered[self.options.dead_letter_queue or ""] += 1
            else:
                self._failed(row, confirmation.message_id, _not_dead_lettered(confirmation.message, error))
                beyond = 0  # sending has stopped: wait for all outcomes
        if self.errors:
            self._settle(0)
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


def _not_dead_lettered(letter: Message, error: Exception) -> PublishError:
    reason = letter.headers[headers.DEAD_LETTER_REASON]
    return PublishError(
        f"{reason if isinstance(reason, str) else ''}; and its dead letter was not confirmed: {error}",
        message_id=letter.message_id,
    )


def _written(messages: Sequence[object], batch_id: int | None) -> tuple[str, list[WrittenPartition]]:
    what = "the batch" if batch_id is None else f"micro-batch {batch_id}"
    return what, [message for message in messages if isinstance(message, WrittenPartition)]
