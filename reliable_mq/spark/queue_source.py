"""Queue mode: queues are read by the driver's reader process, and acked once a batch is committed.

Spark's calls, for batch N+1, as they come (PySpark 4.2 to 4.3)::

    commits/N written
    latestOffset(end of N, limit)     acks N; plans N+1 of what has come in
    reportLatestOffset()
    offsets/N+1 written
    commit(end of N)                  acks N, had the call above been of another process
    partitions(end of N, end of N+1)  what was planned, as Arrow, in the tasks' descriptions
    read(partition)                   on the executors: properties become columns
    commits/N+1 written

A batch that an earlier process has planned is not known here. It is given as an empty one, which Spark commits, and its
messages, which nobody has acked, come again in a later batch.

Invariants: nothing is acked before Spark has recorded its batch; the object pickles as long as it has not read, and
what is pickled for the tasks holds no URL.

SIGTERM, by which Spark ends the reader's process: twice, and without a word before.

Spark does not call ``stop()`` at the end of a query. So the signal hands back what was read and not committed, for
other consumers to have at once.

Invariants: the handler itself waits for no lock and for nothing else, since it runs in the middle of whatever Spark's
thread is doing, which may be itself, for the signal before (`threading.Event` has a lock, and `threading` one that all
threads start under); a second signal changes nothing; the process ends within the time given.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from reliable_mq.errors import ConfigurationError, ConsumeError, UsageError
from reliable_mq.spark.columns import decode, raw_batch
from reliable_mq.spark.pickling import PicklableByName
from reliable_mq.spark.queue_batches import QueuePosition, size_of
from reliable_mq.spark.queue_checks import check_queues
from reliable_mq.spark.queue_reader import QueueReader

if TYPE_CHECKING:
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.spark.options import QueueOptions

__all__ = ["QueuePartition", "QueueSource", "on_termination", "refuse_batch"]

logger = logging.getLogger(__name__)


def on_termination(hand_back: Callable[[], None]) -> None:
    """Have SIGTERM call ``hand_back`` on a thread of its own, and end the process then.

    Outside of the main thread, where there are no signals to handle, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first = threading.Lock()  # taken by the first signal, and waited for by none

    def end() -> None:
        try:
            hand_back()
        except Exception:
            logger.exception("what was read could not be handed back; the broker sees to it when the connection ends")
        finally:
            sys.stderr.flush()
            os._exit(0)

    def on_signal(_number: int, _frame: object) -> None:
        if first.acquire(blocking=False):
            start_new_thread(end, ())

    signal.signal(signal.SIGTERM, on_signal)


_IDLE: Final = 0.2  # seconds that Spark waits for the first message of a batch
_HAND_BACK: Final = 5.0  # seconds for what was read to go back
_POLL: Final = 0.05  # seconds between two looks at queues that seem empty
_ANSWER: Final = 10.0  # seconds for the broker to say how much is ready
_STARVED: Final = 60.0  # seconds without a message though some are ready
_PARTITION: Final = 16 * 2**20  # bytes for one task: each costs a Python worker some 50 ms of CPU, whatever is in it


def refuse_batch(options: QueueOptions) -> NoReturn:
    """Say why a queue cannot be read by ``spark.read``.

    A batch read has no commit: Spark does not tell its source whether the job has succeeded, reads partitions again
    when a task is retried or a plan is run twice, and keeps no checkpoint. Whatever acked would lose messages.
    """
    raise ConfigurationError(
        f"queue {', '.join(options.queues)!r} cannot be read with spark.read: a batch read never says that it is done, "
        "so nothing could be acked without losing messages. Use spark.readStream with trigger(availableNow=True), "
        "which reads what is there and ends; or read a stream, with the option stream"
    )


class QueuePartition(InputPartition):
    """A part of a batch, with its messages, as an Arrow stream of `columns.RAW_SCHEMA`."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        batch = raw_batch(deliveries, [delivery.queue for delivery in deliveries])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        super().__init__(sink.getvalue().to_pybytes())

    def __repr__(self) -> str:
        return f"<QueuePartition of {len(self.value)} bytes>"


class QueueSource(PicklableByName, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a query in queue mode. Spark makes several, of which one reads."""

    def __init__(self, options: QueueOptions, names: Sequence[str]) -> None:
        self._options: QueueOptions | None = options
        self._names = tuple(names)
        self._pump: QueueReader | None = None
        self._available_now = False
        self._finished = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_options": None,
            "_names": self._names,
            "_pump": None,
            "_available_now": False,
            "_finished": False,
        }

    # -- in the reader process -----------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give the position of a query that has read nothing. Called more than once."""
        return QueuePosition.first(self._given.queues).as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Give ``maxMessagesPerTrigger``."""
        return ReadMaxRows(self._given.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read what is ready now, and no more."""
        self._available_now = True
        self._reading().limit_to_ready()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Ack what lies before ``start``, whose batch is committed, and plan the next batch."""
        if isinstance(limit, ReadAllAvailable):
            raise UsageError(
                "trigger(once=True) reads all that there is as one batch, however large: use "
                "trigger(availableNow=True), which makes as many batches as maxMessagesPerTrigger asks for"
            )
        position = QueuePosition.parse(start)
        pump = self._reading()
        pump.committed(position)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._given.max_messages
        if self._available_now:
            return self._next_available(pump, position, most).as_json()
        return pump.plan(position, most=most, timeout=_IDLE).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Give the position that this query would have if it had read everything: the backlog is the difference."""
        pump = self._pump
        if pump is None or self._finished:
            return None
        return pump.backlog().as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Give the batch between two positions; nothing of one that an earlier process has planned."""
        first, last = QueuePosition.parse(start), QueuePosition.parse(end)
        deliveries = [] if self._pump is None else self._pump.deliveries(first, last)
        if not deliveries:
            if last.sequence > first.sequence:
                logger.warning(
                    "%d messages were read by an earlier run, which did not commit them: they come again in a later "
                    "batch, and this one is empty",
                    last.sequence - first.sequence,
                )
            return []
        return [QueuePartition(part) for part in _split(deliveries, self._given.min_partitions)]

    def commit(self, end: dict[str, Any]) -> None:
        """Ack what lies before ``end``, whose batch is committed."""
        if self._pump is not None:
            self._pump.committed(QueuePosition.parse(end))

    def stop(self) -> None:
        """Hand back what is not committed. Spark calls it when the application dies, not when a query is stopped."""
        if self._pump is not None:
            self._pump.close(_HAND_BACK)

    @property
    def _given(self) -> QueueOptions:
        if self._options is None:
            raise UsageError("this reader was sent to an executor, which has the messages, and not the options")
        return self._options

    def _reading(self) -> QueueReader:
        """Give the pump, connected by the first call."""
        if self._pump is None:
            limit = check_queues(self._given)
            pump = QueueReader(self._given, uuid.uuid4().hex[:12], delivery_limit=limit)
            on_termination(lambda: pump.close(_HAND_BACK))
            pump.open()
            self._pump = pump
        return self._pump

    def _next_available(self, pump: QueueReader, start: QueuePosition, most: int) -> QueuePosition:
        """Plan a batch of what was ready when the query began; ``start`` where nothing of that is left.

        Other consumers may have taken it meanwhile. So a queue is at its end, too, when the broker says twice that
        nothing is ready: what it sent before it said so the first time has arrived by the second.
        """
        empty = 0
        starved_at = time.monotonic() + _STARVED
        while not self._finished and not pump.exhausted:
            end = pump.plan(start, most=most, timeout=_POLL)
            if end != start:
                return end
            if empty >= 2:
                break
            ready = pump.count(_ANSWER)
            empty = empty + 1 if ready is not None and not any(ready.values()) else 0
            if time.monotonic() > starved_at:
                raise ConsumeError(
                    f"no message came for {_STARVED:g} s, though the broker has some ready ({ready or 'not known'}): "
                    "another consumer is the only active one of the queue, or the broker is not reachable"
                )
        if not self._finished:
            self._finished = True
            pump.close(_HAND_BACK)  # what came later is for others
        return start

    # -- on executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Make rows of the messages that a partition carries."""
        if not isinstance(partition, QueuePartition):
            raise UsageError(f"{partition!r} is not a partition of queue mode")
        with pa.ipc.open_stream(partition.value) as batches:
            for batch in batches:
                yield decode(batch, self._names)


def _split(deliveries: Sequence[Delivery], least: int | None) -> Iterator[Sequence[Delivery]]:
    """Cut a batch into parts for its tasks."""
    parts = max(least or 1, -(-sum(map(size_of, deliveries)) // _PARTITION))
    parts = min(parts, len(deliveries))
    for part in range(parts):
        yield deliveries[len(deliveries) * part // parts : len(deliveries) * (part + 1) // parts]
