"""Prometheus metrics of Spark's Python processes, in a text file for each.

The textfile collector of the node exporter reads them.

Spark has no hook for the metrics of a source or sink in Python, its workers come and go, and nobody could scrape them
all. So every process that reads or publishes keeps a file in a directory of its host (``metricsDirectory``), and writes
it anew every few seconds and at the end of a task.

Two files must not have the same metric with the same labels. So each process has a number of its own among those that
live on its host, which is in the file's name and in the label ``worker``; a later process takes the number and the file
of one that has died. Labels are bounded by that, and by the queues that the options name.

Invariants: a file is replaced in one step; two living processes never write the same one; an error here is logged,
once, and never stops a query.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, write_to_textfile

from reliable_mq._util.hooks import ForkStage, at_fork
from reliable_mq._util.threads import start_daemon
from reliable_mq.metrics.registry import Family, Reading, register

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import TextIOWrapper

    from prometheus_client import Metric

__all__ = ["Exporter", "QueueStatistics", "SinkStatistics", "StreamStatistics", "exporter", "queue_readings"]

logger = logging.getLogger(__name__)

_EVERY: Final = 5.0  # seconds between two writes
_MOST: Final = 1024  # processes of a host
_STEM: Final = "reliable_mq_spark"

_QUEUE: Final = ("queue",)
_STREAM: Final = ("stream",)

DELIVERIES = Family("spark_queue_deliveries", "counter", "Deliveries that the driver's reader was given.", _QUEUE)
ACKED = Family("spark_queue_acked", "counter", "Deliveries acked, since their batch was committed.", _QUEUE)
REQUEUED = Family("spark_queue_requeued", "counter", "Deliveries requeued unread.", _QUEUE)
READY = Family("spark_queue_ready", "gauge", "Messages that waited in the queue when last asked for.", _QUEUE)
BATCHES = Family("spark_queue_batches", "counter", "Batches planned in queue mode.", ())
HELD_BYTES = Family("spark_queue_held_bytes", "gauge", "Bytes of the deliveries that the driver's reader holds.", ())
CONNECTED = Family("spark_queue_connected", "gauge", "1 while subscribed.", ())
RECONNECTS = Family("spark_queue_reconnects", "counter", "Connections lost and made again.", ())
STALE_ACKS = Family(
    "spark_queue_stale_acks", "counter", "Acks dropped, since their channel was gone: these messages come again.", ()
)
STREAM_END = Family("spark_stream_end", "gauge", "The offset behind the newest message, as last looked up.", _STREAM)
STREAM_PLANNED = Family("spark_stream_planned", "gauge", "The offset up to which batches are planned.", _STREAM)
STREAM_BEGIN = Family(
    "spark_stream_begin",
    "gauge",
    "The offset of the oldest message of a stage, as last looked up: nothing is lost while it is at most that planned.",
    _STREAM,
)
STREAM_ROWS = Family("spark_stream_rows", "counter", "Rows that tasks have read.", _STREAM)
STREAM_RECONNECTS = Family("spark_stream_reconnects", "counter", "Connections of tasks lost and made again.", _STREAM)
SINK_DEAD_LETTERED = Family(
    "spark_sink_dead_lettered",
    "counter",
    "Rows that could not be sent, whose dead letters are confirmed: again where a task or a batch runs again.",
    _QUEUE,
)


@dataclass(slots=True)
class QueueStatistics:
    """Counters of the reader of queue mode: the first three by queue."""

    delivered: Counter[str] = field(default_factory=Counter)
    acked: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    stale_acks: int = 0
    reconnects: int = 0


@dataclass(slots=True)
class StreamStatistics:
    """Counters of stream mode, by stream: three on the driver, the others in tasks."""

    begin: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    reconnects: Counter[str] = field(default_factory=Counter)

    def readings(self) -> Iterator[Reading]:
        """Yield one reading of them."""
        values: tuple[tuple[Family, Mapping[str, int]], ...] = (
            (STREAM_BEGIN, self.begin),
            (STREAM_END, self.end),
            (STREAM_PLANNED, self.planned),
            (STREAM_ROWS, self.rows),
            (STREAM_RECONNECTS, self.reconnects),
        )
        for family, by_stream in values:
            for stream, value in dict(by_stream).items():
                yield Reading(family, (stream,), value)


@dataclass(slots=True)
class SinkStatistics:
    """Counters of the sink beside those of its publishers, by dead-letter queue."""

    dead_lettered: Counter[str] = field(default_factory=Counter)

    def readings(self) -> Iterator[Reading]:
        """Yield one reading of them."""
        for queue, value in dict(self.dead_lettered).items():
            yield Reading(SINK_DEAD_LETTERED, (queue,), value)


def queue_readings(
    queues: Iterable[str],
    statistics: QueueStatistics,
    *,
    ready: Mapping[str, int],
    held_bytes: int,
    connected: bool,
) -> Iterator[Reading]:
    """Yield one reading of the reader of queue mode."""
    for queue in queues:
        yield Reading(DELIVERIES, (queue,), statistics.delivered[queue])
        yield Reading(ACKED, (queue,), statistics.acked[queue])
        yield Reading(REQUEUED, (queue,), statistics.requeued[queue])
        yield Reading(READY, (queue,), ready.get(queue, 0))
    yield Reading(BATCHES, (), statistics.batches)
    yield Reading(HELD_BYTES, (), held_bytes)
    yield Reading(CONNECTED, (), connected)
    yield Reading(RECONNECTS, (), statistics.reconnects)
    yield Reading(STALE_ACKS, (), statistics.stale_acks)


class Exporter:
    """Write the metrics of this process. Thread-safe.

    Args:
        directory: of this host; made where it is missing.

    Attributes:
        registry: the metrics to write; register with it.
        path: of the file.
        streams: the counters of stream mode; registered.
        sink: the counters of the sink; registered.

    Raises:
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.registry = CollectorRegistry()
        self.streams = StreamStatistics()
        self.sink = SinkStatistics()
        register(self.registry, self.streams.readings)
        register(self.registry, self.sink.readings)
        self._worker, self._claim = _claimed(directory)
        self.path = _file(directory, self._worker)
        self._writing = threading.Lock()
        self._failed = False
        self._ended = threading.Event()
        self.write()
        start_daemon("spark-metrics", self._write_on)

    def write(self) -> None:
        """Write the file. Blocks for as long as the file system takes."""
        with self._writing:
            try:
                write_to_textfile(str(self.path), _Labelled(self.registry, self._worker))
            except OSError as error:
                if not self._failed:
                    logger.warning("metrics cannot be written to %s: %s", self.path, error)
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        """Write no more, and release the number. The file stays until it is taken again."""
        self._ended.set()
        self._claim.close()

    def _write_on(self) -> None:
        while not self._ended.wait(_EVERY):
            self.write()


class _Labelled:
    """A registry whose samples have the label ``worker``."""

    def __init__(self, registry: CollectorRegistry, worker: int) -> None:
        self._registry = registry
        self._worker = str(worker)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "worker": self._worker}) for sample in metric.samples
            ]
            yield metric


def exporter(directory: str | None) -> Exporter | None:
    """Return the exporter of this process for a directory.

    None without a directory, or if it cannot be written to, which is logged once.
    """
    if directory is None:
        return None
    with _lock:
        if directory not in _exporters:
            try:
                _exporters[directory] = Exporter(Path(directory))
            except OSError as error:
                logger.warning("there will be no metrics in %s: %s", directory, error)
                _exporters[directory] = None
        return _exporters[directory]


def _file(directory: Path, worker: int) -> Path:
    return directory / f"{_STEM}_{worker}.prom"


def _claimed(directory: Path) -> tuple[int, TextIOWrapper]:
    """Take the lowest number that no living process has; remove files of dead ones."""
    for worker in range(_MOST):
        claim = _locked(directory, worker)
        if claim is not None:
            for path in directory.glob(f"{_STEM}_*.prom"):
                number = path.stem.removeprefix(f"{_STEM}_")
                other = _locked(directory, int(number)) if number.isdecimal() and int(number) != worker else None
                if other is not None:
                    path.unlink(missing_ok=True)
                    other.close()
            return worker, claim
    raise OSError(f"{_MOST} processes write there")


def _locked(directory: Path, worker: int) -> TextIOWrapper | None:
    """Lock a number for as long as the file is open; None where another process has."""
    opened = (directory / f".{_STEM}_{worker}.lock").open("a")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    except OSError:
        opened.close()
        raise
    return opened


_lock = threading.Lock()
_exporters: dict[str, Exporter | None] = {}
at_fork(ForkStage.FORGET, _exporters.clear)
