"""Prometheus metrics of Spark's Python processes, in one text file per process.

The textfile collector of the node exporter reads the files.

Spark has no hook for the metrics of a source or sink in Python. Its workers are short-lived, and scraping each of them
is not possible. So every process that reads or publishes keeps a file in a directory of its host
(``metricsDirectory``), and rewrites it every few seconds and at the end of a task.

Two files must not contain the same metric with the same labels. So each process has a number that is unique among the
living processes on its host. The number is in the file's name and in the label ``worker``. A later process takes over
the number and the file of a dead one of the same user. This, and the queues that the options name, bound the number of
labels.

Invariants: a file is replaced atomically. Two living processes never write the same file. An error here is logged once
and never stops a query.
"""

# ruff: noqa: RUF009  # _counted and _gauge return fields

from __future__ import annotations

import fcntl
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Metric, write_to_textfile

from reliable_mq._util.hooks import ForkStage, at_fork, each_at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import start_daemon
from reliable_mq.metrics.registry import Family, Reading, register

logger = get_logger(__name__)

_EVERY: Final = 5.0  # seconds between two writes
_MOST: Final = 1024  # maximum processes per host
_STEM: Final = "reliable_mq_spark"

FAMILIES: Final[list[Family]] = []


def _counted(name: str, documentation: str, by: str = "", *, kind: Literal["counter", "gauge"] = "counter") -> Any:
    """Return the field of a metric: a number, or one for each value of a label."""
    FAMILIES.append(Family(f"spark_{name}", kind, documentation, (by,) if by else ()))
    by_label = Counter if kind == "counter" else dict  # `update` of a counter adds
    return field(default_factory=by_label if by else int, metadata={"family": FAMILIES[-1]})


_gauge = partial(_counted, kind="gauge")


class _SparkStatistics:
    def readings(self) -> Iterator[Reading]:
        for each in fields(self):  # type: ignore[arg-type]
            family, value = each.metadata["family"], getattr(self, each.name)
            for label, number in dict(value).items() if family.labels else [("", value)]:
                yield Reading(family, (label,) if family.labels else (), number)


@dataclass(slots=True)
class QueueStatistics(_SparkStatistics):
    """Counts and state of the reader in queue mode."""

    delivered: Counter[str] = _counted("queue_deliveries", "Deliveries that the driver's reader was given.", "queue")
    acked: Counter[str] = _counted("queue_acked", "Deliveries acked, since their batch was committed.", "queue")
    requeued: Counter[str] = _counted("queue_requeued", "Deliveries requeued unread.", "queue")
    ready: dict[str, int] = _gauge("queue_ready", "Messages that waited in the queue when last asked for.", "queue")
    batches: int = _counted("queue_batches", "Batches planned in queue mode.")
    held_bytes: int = _gauge("queue_held_bytes", "Bytes of the deliveries that the driver's reader holds.")
    connected: bool = _gauge("queue_connected", "1 while subscribed.")
    reconnects: int = _counted("queue_reconnects", "Connections lost and made again.")
    stale_acks: int = _counted(
        "queue_stale_acks", "Acks dropped, since their channel was gone: these messages come again."
    )


@dataclass(slots=True)
class StreamStatistics(_SparkStatistics):
    """Counts of stream mode: some on the driver, the others in tasks."""

    end: dict[str, int] = _gauge("stream_end", "The offset behind the newest message, as last looked up.", "stream")
    planned: dict[str, int] = _gauge("stream_planned", "The offset up to which batches are planned.", "stream")
    begin: dict[str, int] = _gauge(
        "stream_begin",
        "The offset of the oldest message of a stage, as last looked up: nothing is lost while it is at most that "
        "planned.",
        "stream",
    )
    at_risk: dict[str, int] = _gauge(
        "stage_at_risk", "1 while a stage is about to drop messages that the query has not read.", "stream"
    )
    rows: Counter[str] = _counted("stream_rows", "Rows that tasks have read.", "stream")
    reconnects: Counter[str] = _counted("stream_reconnects", "Connections of tasks lost and made again.", "stream")


@dataclass(slots=True)
class SinkStatistics(_SparkStatistics):
    """Counts of the sink, in addition to the counts of its publishers."""

    dead_lettered: Counter[str] = _counted(
        "sink_dead_lettered",
        "Rows that could not be sent, whose dead letters are confirmed: again where a task or a batch runs again.",
        "queue",
    )


class Exporter:
    """A writer of the metrics of this process. It is thread-safe."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.registry = CollectorRegistry()
        self.streams = StreamStatistics()
        self.sink = SinkStatistics()
        register(self.registry, self.streams.readings)
        register(self.registry, self.sink.readings)
        self._worker, self._claim = _claimed(directory)
        self.path = directory / f"{_STEM}_{self._worker}.prom"
        self._writing = threading.Lock()
        self._showing = threading.Lock()  # from the removal of gauges until the file is written, nobody adds any
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
                    logger.warning("failed to write metrics to %s: %s", self.path, error)
                self._failed = True
            else:
                self._failed = False

    def show(self, **gauges: Mapping[str, int]) -> None:
        """Replace the gauges of `streams` with the names of the arguments.

        A gauge without new values is kept.
        """
        with self._showing:
            for name, values in gauges.items():
                if values:
                    setattr(self.streams, name, dict(values))

    def hide(self) -> None:
        """Remove all gauges of `streams`, and write the file without them."""
        with self._showing:
            for each in fields(self.streams):
                if each.metadata["family"].kind == "gauge":
                    getattr(self.streams, each.name).clear()
            self.write()

    def close(self) -> None:
        """Stop writing and release the number. The file remains until it is reused."""
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

    Return None without a directory, or if the directory is not writable, which is logged once.
    """
    if directory is None:
        return None
    with _lock:
        if directory not in _exporters:
            try:
                _exporters[directory] = Exporter(Path(directory))
            except OSError as error:
                logger.warning("writing no metrics to %s: %s", directory, error)
                _exporters[directory] = None
        return _exporters[directory]


def _claimed(directory: Path) -> tuple[int, TextIOWrapper]:
    """Claim the lowest number without a living process; remove files of dead ones."""
    foreign: list[Path] = []
    for worker in range(_MOST):
        claim = _claim(directory, worker, foreign)
        if claim is not None:
            for path in directory.glob(f"{_STEM}_*.prom"):
                number = path.stem.removeprefix(f"{_STEM}_")
                other = (
                    _claim(directory, int(number), foreign) if number.isdecimal() and int(number) != worker else None
                )
                if other is not None:
                    path.unlink(missing_ok=True)
                    other.close()
            if foreign:
                logger.warning(
                    "%s belongs to another user: this process writes metrics as worker %d, and cannot remove files of "
                    "that user's dead processes; give each user a metricsDirectory of its own",
                    foreign[0],
                    worker,
                )
            return worker, claim
    raise OSError(f"{_MOST} processes write there")


def _claim(directory: Path, worker: int, foreign: list[Path]) -> TextIOWrapper | None:
    """Lock a number; None if another process has it, or another user (``foreign``)."""
    path = directory / f".{_STEM}_{worker}.lock"
    try:
        return locked(path)
    except PermissionError:
        if not path.exists():  # the directory is not writable
            raise
        foreign.append(path)
        return None


def locked(path: Path) -> TextIOWrapper | None:
    """Lock a file for as long as it is open; None if another process holds the lock.

    A forked child closes its copy of the file, which would keep the lock beyond the end of this process.
    """
    opened = path.open("a")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    except OSError:
        opened.close()
        raise
    _locked_files.add(opened)
    return opened


_lock = threading.Lock()
_exporters: dict[str, Exporter | None] = {}
_locked_files = each_at_fork(ForkStage.RELEASE, TextIOWrapper.close)
at_fork(ForkStage.FORGET, _exporters.clear)
