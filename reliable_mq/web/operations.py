"""The operations of the page (read, replay, purge, export), and their audit log.

Each operation uses its own `DeadLetterQueue`, on the thread of its job.

Invariants:

- A change to a queue is written to the audit log before it begins, and its result after it ends. If the first entry
  cannot be written, the operation does not begin.
- An operation that may have changed a queue drops the queue's reading.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from reliable_mq._util.logs import get_logger
from reliable_mq.core.consumer.attempts import shown
from reliable_mq.deadletters import Filter, ReplayReport
from reliable_mq.errors import ConfigurationError
from reliable_mq.web.address import Choice
from reliable_mq.web.jobs import Job, Jobs
from reliable_mq.web.letters import MOST, QueueReading, QueueSummary, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.stores.protocol import ResettableStore

logger = get_logger(__name__)
_audit_logger = get_logger("reliable_mq.web.audit")

_FAILURES_KEPT: Final = 50
_ENTRIES_SHOWN: Final = 200
_ENTRIES_TAIL: Final = 256 * 1024  # bytes at the end of a file that are read for these entries
_READINGS: Final = 8  # the readings that are kept
_AT_A_TIME: Final = 8  # queues that are read for the list
_READ_ALONE: Final = 1000  # messages in a queue that is read without a user's request
_EVERYTHING: Final = Choice((), Filter())


class AuditLog:
    """The audit log: who changed or exported which dead letters, and the result.

    Thread-safe. Each operation appends one line of JSON to a file when it begins and one when it ends, and flushes it
    to the disk. Without a file, only the latest entries are kept, in memory. The logger ``reliable_mq.web.audit`` also
    logs every entry at INFO. An entry holds no body and no header.

    Raises:
        ConfigurationError: If the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._writing = threading.Lock()  # held while the disk writes, so only by writers
        self._lock = threading.Lock()
        self._latest: deque[Mapping[str, Any]] = deque(maxlen=_ENTRIES_SHOWN)
        if self._path is not None:
            try:
                self._append(b"")
                self._latest.extend(_entries(self._path))
            except OSError as error:
                raise ConfigurationError(f"audit_log: {self._path} cannot be written: {error.strerror}") from error

    @property
    def where(self) -> str:
        """The path of the file, empty without a file."""
        return "" if self._path is None else str(self._path)

    def write(self, event: str, operation: str, entry: Mapping[str, object]) -> None:
        """Append an entry about an operation. Blocks until the entry is on the disk.

        Raises:
            OSError: If the entry cannot be written.
        """
        full = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, "id": operation, **entry}
        line = json.dumps(full)
        with self._writing:
            if self._path is not None:
                try:
                    self._append(line.encode() + b"\n")
                except OSError as error:
                    error.filename = str(self._path)  # otherwise a user could think of the broker's disk
                    raise
            with self._lock:
                self._latest.append(json.loads(line))
        _audit_logger.info("%s", line)

    def latest(self) -> list[Mapping[str, Any]]:
        """Return the latest entries, newest first. Does not wait for the disk."""
        with self._lock:
            return [*reversed(self._latest)]

    def _append(self, data: bytes) -> None:
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if data:
                # The last line is incomplete if the disk was full, or if a process died, here or elsewhere.
                line = b"\n" * _is_unfinished(descriptor) + data
                written = os.write(descriptor, line)  # one write, so that lines of several processes do not mix
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_unfinished(descriptor: int) -> bool:
    """Return whether an open file ends in the middle of a line."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _entries(path: Path) -> list[Mapping[str, Any]]:
    """Read the last entries of a file. Lines that are not entries are skipped."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _ENTRIES_TAIL, 0))
        lines = file.read().splitlines()
    found: list[Mapping[str, Any]] = []
    for line in lines[-_ENTRIES_SHOWN:]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("at"), str):
            found.append(entry)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    to: str | None = None
    as_published: bool = False
    rate: float | None = None
    limit: int | None = None
    dry_run: bool = False
    body: bytes | None = None

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The options as the fields of a form, without the body."""
        target = "queue" if self.to is not None else "published" if self.as_published else "origin"
        rate = None if self.rate is None else f"{self.rate:g}"
        given = {"target": target, "to": self.to, "rate": rate, "limit": self.limit}
        return tuple((name, str(value)) for name, value in given.items() if value is not None)

    @property
    def details(self) -> dict[str, object]:
        """The options for display and for the audit log."""
        target = self.to or ("where each was first published to" if self.as_published else "the queue each came from")
        found = {"target": target, "rate": self.rate, "limit": self.limit}
        if self.body is not None:
            found |= {
                "edited_body_bytes": len(self.body),
                "edited_body_sha256": hashlib.sha256(self.body).hexdigest(),
            }
        return {name: value for name, value in found.items() if value is not None}


class Operations:
    """The operations on queues. Thread-safe.

    A replay resets the attempt counts in `store`, under keys in `namespace`.
    """

    def __init__(
        self, source: Source, audit: AuditLog, *, store: ResettableStore | None, namespace: str | None
    ) -> None:
        self.jobs = Jobs()
        self._source = source
        self._audit = audit
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._readings: dict[str, QueueReading] = {}  # the least recently used one first
        # The latest readings, also those not kept. None for an empty queue, and for one that was tried for the list.
        self._summaries: dict[str, QueueSummary | None] = {}
        self._alone: list[Job] = []  # the readings for the list that go on

    def reading(self, queue: str) -> QueueReading | None:
        """Return the latest reading of a queue, or None if there is none."""
        with self._lock:
            reading = self._readings.pop(queue, None)
            if reading is not None:
                self._readings[queue] = reading
            return reading

    def summary(self, queue: str) -> QueueSummary | None:
        """Return the summary of the latest reading of a queue, or None if there is none."""
        with self._lock:
            return self._summaries.get(queue)

    def forget_others(self, queues: Iterable[str]) -> None:
        """Forget the summaries of all other queues, which the list does not show."""
        with self._lock:
            for gone in self._summaries.keys() - set(queues):
                del self._summaries[gone]

    def read(self, queue: str, user: str) -> Job:
        """Begin to read a queue, or return the job that already reads it."""
        return self._begin_reading(Job("read", queue, _EVERYTHING, user), self._read)

    def read_alone(self, queue: str, depth: int) -> None:
        """Begin to read a small queue for the list, once, unless RabbitMQ counts reads.

        If many queues are being read, leave this one to a later call.
        """
        if not 0 < depth <= _READ_ALONE:
            return
        with self._lock:
            self._alone = [job for job in self._alone if not job.is_over]
            if queue in self._summaries or len(self._alone) >= _AT_A_TIME or self.jobs.of(queue):
                return
            self._summaries[queue] = None
            job = Job("read", queue, _EVERYTHING, "")
            self._alone.append(self.jobs.begin(job, partial(self._read, alone=True)))

    def read_letter(self, queue: str, fingerprint: str, user: str) -> Job:
        """Begin to read one letter and to keep its content, or return the job that does."""
        choice = Choice.of_pairs([("letter", fingerprint)])
        return self._begin_reading(Job("read", queue, choice, user), self._read_one)

    def replay(self, queue: str, choice: Choice, user: str, options: ReplayOptions) -> Job:
        """Begin to replay letters, or with ``dry_run`` to count them."""
        job = Job("dry run" if options.dry_run else "replay", queue, choice, user)
        report = ReplayReport()
        job.details, job.options, job.report = options.details, options.pairs, report

        def note_failures() -> None:
            for message, error in report.failures[len(job.failures) : _FAILURES_KEPT]:
                job.failures.append(((message.message_id or "without id")[:80], str(error)[:500]))

        def progress(done: int, total: int) -> None:
            note_failures()
            job.progress(done, total)

        def work(job: Job) -> None:
            try:
                with self._source.open(queue) as dead:
                    dead.replay(
                        choice.filter,
                        to=options.to,
                        as_published=options.as_published,
                        limit=options.limit,
                        rate=options.rate,
                        dry_run=options.dry_run,
                        idempotency=self._store,
                        idempotency_namespace=self._namespace,
                        body=options.body,
                        progress=progress,
                        stop=job.stop,
                        report=report,
                    )
            finally:
                note_failures()
                report.failures.clear()

        return self.jobs.begin(job, work if options.dry_run else self._audited(work))

    def purge(self, queue: str, choice: Choice, user: str) -> Job:

        def work(job: Job) -> None:
            with self._source.open(queue) as dead:
                dead.purge(
                    choice.filter, progress=job.progress, stop=job.stop, on_deleted=partial(setattr, job, "count")
                )

        return self.jobs.begin(Job("purge", queue, choice, user), self._audited(work))

    def export(self, queue: str, choice: Choice, user: str) -> Job:
        """Begin to write letters to a file for download. They stay in the queue."""

        def work(job: Job) -> None:
            # The file has no name, so nothing is left of it, however the process ends.
            file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115
            try:
                with self._source.open(queue) as dead:
                    job.count = dead.export(file, choice.filter, progress=_unless_stopped(job))
            except BaseException:
                file.close()
                if not job.stop.is_set():
                    raise
                return
            job.file = file

        return self.jobs.begin(Job("export", queue, choice, user), self._audited(work, changes=False))

    def _begin_reading(self, job: Job, work: Callable[[Job], Any]) -> Job:
        """Begin to read letters, or return the job that already reads them."""
        with self._lock:
            for one in self.jobs.of(job.queue):
                if one.kind == "read" and one.choice.pairs == job.choice.pairs:
                    return one
            return self.jobs.begin(job, work)

    def _read(self, job: Job, *, alone: bool = False) -> None:
        """Read a queue, and keep the reading.

        For the list ``alone``, a queue whose reads RabbitMQ counts is not read, and the reading is kept if there is
        room.
        """
        with self._source.open(job.queue) as dead:
            if alone and dead.counts_reads:
                return
            reading, there = QueueReading(job.queue), len(dead)
            with closing(dead.browse(limit=MOST, progress=job.progress)) as messages:  # type: ignore[type-var]
                for message in messages:
                    reading.add(message)
                    if job.stop.is_set():
                        return
        reading.total = max(reading.total, there)
        summary = reading.summary()
        with self._lock:
            self._summaries[job.queue] = summary
            self._readings.pop(job.queue, None)
            if alone and len(self._readings) >= _READINGS:
                return
            self._readings[job.queue] = reading
            while len(self._readings) > _READINGS:
                del self._readings[next(iter(self._readings))]

    def _read_one(self, job: Job) -> None:
        with self._source.open(job.queue) as dead:
            found = [*dead.browse(job.choice.filter, limit=1, progress=job.progress)]
        job.count = len(found)
        reading = self.reading(job.queue)
        if found and reading is not None:
            reading.keep(found[0])

    def _audited(self, work: Callable[[Job], None], *, changes: bool = True) -> Callable[[Job], None]:
        def audited(job: Job) -> None:
            entry = {
                "operation": job.kind,
                "queue": job.queue,
                "user": job.user,
                "letters": job.choice.words,
                "filter": job.choice.query,
                **job.details,
            }
            self._audit.write("begun", job.id, entry)
            result: dict[str, object] = {"outcome": "failed"}
            try:
                work(job)
                result = {"outcome": "stopped" if job.stop.is_set() else "done"}
            except BaseException as error:
                result["error"] = shown(error)
                raise
            finally:
                if job.stopped_by:
                    result["stopped_by"] = job.stopped_by
                if job.report is not None:
                    result |= {"replayed": job.report.replayed, "failed": job.report.failed}
                elif job.kind == "purge" or result["outcome"] != "failed":
                    result |= {"count": job.count}
                if changes:
                    with self._lock:
                        self._readings.pop(job.queue, None)
                        self._summaries.pop(job.queue, None)
                    self._source.changed()
                self._note_end(job, {**entry, **result})

        return audited

    def _note_end(self, job: Job, entry: dict[str, object]) -> None:
        try:
            self._audit.write("ended", job.id, entry)
        except OSError:
            logger.exception("failed to write the end of the %s of queue %r to the audit log", job.kind, job.queue)


def _unless_stopped(job: Job) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        job.progress(done, total)
        if job.stop.is_set():
            raise InterruptedError

    return progress
