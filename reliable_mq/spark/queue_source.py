"""Queue mode: the driver's reader process reads queues and acks committed batches.

Spark's calls for batch N+1, in order (PySpark 4.2 to 4.3)::

    commits/N written
    latestOffset(end of N, limit)     acks N; plans N+1 of the deliveries here
    reportLatestOffset()
    offsets/N+1 written
    commit(end of N)                  acks N, had the call above been of another process
    partitions(end of N, end of N+1)  the planned batch, as Arrow, in the tasks' descriptions
    read(partition)                   on the executors: properties become columns
    commits/N+1 written

This process does not know a batch that an earlier process planned. It returns that batch as an empty one, which Spark
commits. The batch's unacked messages are redelivered in a later batch.

At the end of a query Spark does not call ``stop()``: it sends SIGTERM, twice. The signal handler requeues uncommitted
deliveries, so that other consumers receive them at once.

Invariants:

- No delivery is acked before Spark has recorded its batch.
- The object can be pickled until it has read; its state for the tasks holds no URL.
- The signal handler does not wait for a lock or for anything else. It interrupts Spark's thread at any point, including
  inside the handler of the previous signal (`threading.Event` has a lock, and `threading` has one for starting
  threads). A second signal changes nothing. The process ends within a bounded time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from reliable_mq._util.logs import get_logger
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.errors import ConsumeError, UsageError
from reliable_mq.spark.columns import decode, raw_batch
from reliable_mq.spark.options import QueueOptions
from reliable_mq.spark.pickling import PicklableByName
from reliable_mq.spark.queue_batches import QueuePosition, size_of
from reliable_mq.spark.queue_checks import QueueClaims, application_directory, check_queues
from reliable_mq.spark.queue_reader import QueueReader
from reliable_mq.spark.queue_subscriptions import choose
from reliable_mq.spark.stream_offsets import worth_having

logger = get_logger(__name__)


def on_termination(close: Callable[[], None]) -> None:
    """Handle SIGTERM: call ``close`` on a separate thread, then end the process.

    Do nothing outside of the main thread, because only that thread may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first = threading.Lock()  # acquired by the first signal; no signal waits for it

    def end() -> None:
        try:
            close()
        except Exception:
            logger.exception("failed to requeue deliveries; the broker requeues them when the connection closes")
        finally:
            sys.stderr.flush()
            os._exit(0)

    def on_signal(_number: int, _frame: object) -> None:
        if first.acquire(blocking=False):
            start_new_thread(end, ())

    signal.signal(signal.SIGTERM, on_signal)


_IDLE: Final = 0.2  # seconds that Spark waits for the first message of a batch
_REQUEUE: Final = 5.0  # seconds to requeue deliveries
_POLL: Final = 0.05  # seconds between two polls of queues that seem empty
_COUNT: Final = 10.0  # seconds for the broker to count ready messages
_LAG: Final = 0.5  # seconds between two polls of queues that have deliveries on their way
_STARVED: Final = 60.0  # seconds without a message though some are ready, or on their way
_PARTITION: Final = 16 * 2**20  # bytes for one task: each costs a Python worker some 50 ms of CPU, whatever its size


class QueuePartition(InputPartition):
    """A part of a batch: its messages as an Arrow stream of `columns.RAW_SCHEMA`."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        batch = raw_batch(deliveries, [delivery.queue for delivery in deliveries])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        super().__init__(sink.getvalue().to_pybytes())

    def __repr__(self) -> str:
        return f"<QueuePartition of {len(self.value)} bytes>"


class QueueSource(PicklableByName, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a query in queue mode. Spark makes several; one of them reads."""

    def __init__(self, options: QueueOptions, names: Sequence[str]) -> None:
        self._options: QueueOptions | None = options
        self._names = tuple(names)
        self._reader: QueueReader | None = None
        self._claims: QueueClaims | None = None
        self._available_now = False
        self._finished = False

    def __getstate__(self) -> dict[str, Any]:
        return {**dict.fromkeys(self.__dict__), "_names": self._names}

    # -- in the reader process -----------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the position of a query that has read nothing. Called more than once."""
        return QueuePosition.first(self._given.queues).as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._given.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read only the messages that are ready now."""
        self._available_now = True
        self._started_reader().limit_to_ready()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Ack the committed batch before ``start`` and plan the next one."""
        if isinstance(limit, ReadAllAvailable):
            raise UsageError(
                "trigger(once=True) reads all that there is as one batch, however large: use "
                "trigger(availableNow=True), which makes as many batches as maxMessagesPerTrigger asks for"
            )
        position = QueuePosition.parse(start)
        reader = self._started_reader()
        reader.committed(position)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._given.max_messages
        if self._available_now:
            return self._next_available(reader, position, most).as_json()
        return reader.plan(position, most=most, timeout=_IDLE).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the position after all ready messages. Spark shows the backlog."""
        reader = self._reader
        if reader is None or self._finished:
            return None
        return reader.backlog().as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the batch between two positions; empty if another process planned it."""
        first, last = QueuePosition.parse(start), QueuePosition.parse(end)
        deliveries = [] if self._reader is None else self._reader.deliveries(first, last)
        if not deliveries:
            if last.sequence > first.sequence:
                logger.warning(
                    "%d messages of this batch were read by an earlier run and are no longer held: the batch is "
                    "empty, and they will be delivered again in a later one",
                    last.sequence - first.sequence,
                )
            return []
        parts = _split(deliveries, self._given.min_partitions, self._given.max_records)
        return [QueuePartition(part) for part in parts]

    def commit(self, end: dict[str, Any]) -> None:
        """Ack the committed batch before ``end``."""
        if self._reader is not None:
            self._reader.committed(QueuePosition.parse(end))

    def stop(self) -> None:
        """Requeue uncommitted deliveries.

        Spark calls it when the application dies, not when a query is stopped.
        """
        if self._reader is not None:
            self._reader.close(_REQUEUE)
        if self._claims is not None:
            self._claims.release()

    @property
    def _given(self) -> QueueOptions:
        if self._options is None:
            raise UsageError("this reader was sent to an executor, which has the messages, and not the options")
        return self._options

    def _started_reader(self) -> QueueReader:
        """Return the reader. The first call connects it."""
        if self._reader is None:
            if self._claims is None:
                self._claims = QueueClaims(application_directory(), self._given.settings())
            queues = check_queues(self._given, self._claims)
            prefetch = choose(self._given.prefetch, queues)
            # Logged as a warning, because Spark does not configure logging in this process, which then shows no lower
            # level.
            logger.warning("prefetch %d for %s: %s", prefetch.most, ", ".join(self._given.queues), prefetch.reason)
            single_active = [queue.name for queue in queues if queue.single_active_consumer]
            reader = QueueReader(self._given, uuid.uuid4().hex[:12], prefetch, single_active)
            on_termination(lambda: reader.close(_REQUEUE))
            reader.open()
            self._reader = reader
        return self._reader

    def _next_available(self, reader: QueueReader, start: QueuePosition, most: int) -> QueuePosition:
        """Plan a batch of messages that were ready when the query began.

        Return ``start`` if none of them is left.

        Other consumers may have taken some of them. So a queue is also finished when the broker reports twice that
        nothing is ready, and a new subscription shows that nothing is on its way to the one before. A member of a
        quorum queue that lags may deliver long after the report of the leader.
        """
        empty = 0
        starved_at = time.monotonic() + _STARVED
        while not self._finished and not reader.exhausted:
            end = reader.plan(start, most=most, timeout=_POLL if empty < 2 else _LAG)
            if end != start:
                return end
            if empty >= 2 and reader.settled(_COUNT):
                end = reader.plan(start, most=most, timeout=0.0)  # deliveries of the old subscription
                if end != start:
                    return end
                break
            if empty >= 2 and time.monotonic() > starved_at:
                logger.warning(
                    "nothing was delivered for %g s, though the queue is not empty: it has more consumers than "
                    "before this query, which may hold the rest, or a lagging node has yet to deliver it; ending "
                    "without the rest",
                    _STARVED,
                )
                break
            ready = reader.count(_COUNT)
            empty = empty + 1 if ready is not None and not any(ready.values()) else 0
            if time.monotonic() > starved_at:
                raise ConsumeError(
                    f"no message came for {_STARVED:g} s, though the broker has some ready ({ready or 'not known'}): "
                    "another consumer is the only active one of the queue, or the broker is not reachable"
                )
        if not self._finished:
            self._finished = True
            reader.close(_REQUEUE)  # later messages are for other consumers
        return start

    # -- on executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePartition):
            raise UsageError(f"{partition!r} is not a partition of queue mode")
        with pa.ipc.open_stream(partition.value) as batches:
            for batch in batches:
                yield decode(batch, self._names)


def _split(
    deliveries: Sequence[Delivery], least: int | None, most_records: int | None = None
) -> Iterator[Sequence[Delivery]]:
    """Split a batch into parts, one for each task."""
    count = len(deliveries)
    parts = max(worth_having(least or 1, count), -(-sum(map(size_of, deliveries)) // _PARTITION))
    if most_records is not None:
        parts = max(parts, -(-count // most_records))
    parts = min(parts, count)
    for part in range(parts):
        yield deliveries[count * part // parts : count * (part + 1) // parts]
