"""Background operations on queues, which requests begin, observe and stop.

Invariants:

- Operations on one queue run one after another, in the order in which they were begun. Operations of other processes
  may run at the same time, since RabbitMQ delivers each message to only one of them.
- An operation outlives the request that began it. It ends with the process, because its thread is a daemon. A replay
  that is killed in the middle loses nothing.
- The number of stored operations is bounded, and so are the number that wait for one queue and the number of exports.
"""

from __future__ import annotations

import enum
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import start_daemon
from reliable_mq.core.consumer.attempts import shown
from reliable_mq.errors import ReliableMQError, UsageError

if TYPE_CHECKING:
    from reliable_mq.deadletters import ReplayReport
    from reliable_mq.web.address import Choice

logger = get_logger(__name__)

_KEPT: Final = 100  # operations, including those that have ended
_FILES_KEPT: Final = 10  # exports that can be downloaded
_WAITING: Final = 20  # operations on one queue
_EXPORTS: Final = 4  # exports of all queues that run or wait, since each writes a file of any size


class JobState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class Job:
    """One operation on a queue. Written by its own thread, read by others.

    Attributes:
        id: A random identifier.
        kind: ``"read"``, ``"dry run"``, ``"replay"``, ``"purge"`` or ``"export"``.
        choice: The dead letters that the operation processes.
        details: The operation's options, for display and for the audit log.
        options: The same options as form fields, to repeat the operation.
        done, total: The number of messages read so far, and in total.
        count: The number of messages deleted or written.
        failures: The message id and the error of the first letters that failed.
        file: The file of a finished export.
        error: The reason for a failure.
        stopped_by: The user who stopped the operation, empty if none did.
    """

    def __init__(self, kind: str, queue: str, choice: Choice, user: str) -> None:
        self.id = secrets.token_urlsafe(9)
        self.kind = kind
        self.queue = queue
        self.choice = choice
        self.user = user
        self.details: Mapping[str, object] = {}
        self.options: tuple[tuple[str, str], ...] = ()
        self.state = JobState.WAITING
        self.begun = datetime.now(UTC)
        self.ended: datetime | None = None
        self.done = self.total = self.count = 0
        self.report: ReplayReport | None = None
        self.failures: list[tuple[str, str]] = []
        self.file: BinaryIO | None = None
        self.error = ""
        self.stop = threading.Event()
        self.stopped_by = ""
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def seconds(self) -> float:
        return ((self.ended or datetime.now(UTC)) - self.begun).total_seconds()

    def progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def stop_by(self, user: str) -> None:
        """Stop the operation, unless it is over or was stopped before."""
        if not self.is_over and not self.stop.is_set():
            self.stopped_by = user
            self.stop.set()

    def wait(self, timeout: float) -> bool:
        return self._over.wait(timeout)

    def run(self, work: Callable[[Job], object]) -> None:
        """Run the operation to its end. Store an error instead of raising it."""
        self.state, self.begun = JobState.RUNNING, datetime.now(UTC)
        state = JobState.FAILED
        try:
            work(self)
            state = JobState.STOPPED if self.stop.is_set() else JobState.DONE
        except ReliableMQError as error:
            self.error = str(error)
        except OSError as error:
            self.error = f"{error.filename or self.kind}: {error.strerror or error}"
        except BaseException as error:  # the next operation on the queue needs the thread
            logger.exception("the %s of queue %r failed", self.kind, self.queue)
            self.error = f"{shown(error)} (a bug in reliable_mq, or in the service's own store or credentials)"
        finally:
            self.end(state)

    def end(self, state: JobState) -> None:
        self.ended, self.state = datetime.now(UTC), state
        self._over.set()


class Jobs:
    """The operations of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Job] = {}
        # By queue. The first operation runs, the others wait.
        self._lines: dict[str, deque[tuple[Job, Callable[[Job], object]]]] = {}
        self._closed = False

    def begin(self, job: Job, work: Callable[[Job], Any]) -> Job:
        """Schedule an operation after the earlier ones on its queue, and return it.

        If no thread can be started for it, it has failed.

        Raises:
            UsageError: If too many operations wait for the queue, too many exports go on, or the page is closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("the page is being shut down: no new operation can start")
            line = self._lines.get(job.queue)
            if line is not None and len(line) > _WAITING:
                raise UsageError(f"{_WAITING} operations wait for queue {job.queue!r}: try again when they have ended")
            if job.kind == "export":
                exports = sum(one.kind == "export" and not one.is_over for one in self._all.values())
                if exports >= _EXPORTS:
                    raise UsageError(f"{exports} exports are running: try again when one has ended")
            self._all[job.id] = job
            self._forget_old()
            if line is not None:
                line.append((job, work))
                return job
            try:
                start_daemon(f"dead letters {job.queue}", self._run, job.queue)  # it waits for the lock
            except RuntimeError as refused:
                job.error = f"no thread can be started: {refused}"
                job.end(JobState.FAILED)
            else:
                self._lines[job.queue] = deque([(job, work)])
        return job

    def get(self, name: str) -> Job | None:
        """Return the operation with an id, or None if it is no longer stored."""
        with self._lock:
            return self._all.get(name)

    def of(self, queue: str) -> list[Job]:
        """Return the operations that run on a queue or wait for it, in order."""
        with self._lock:
            return [job for job, _ in self._lines.get(queue, ())]

    def opened_file(self, job: Job) -> int | None:
        """Return a new descriptor of an export's file, or None if it is not kept."""
        with self._lock:
            return None if job.file is None else os.dup(job.file.fileno())

    def close(self, timeout: float) -> bool:
        """Stop all operations and wait for them. Return whether all have ended."""
        with self._lock:
            self._closed = True
            left = [job for job in self._all.values() if not job.is_over]
        for job in left:
            job.stop.set()
        until = time.monotonic() + timeout
        ended = [job.wait(max(until - time.monotonic(), 0.0)) for job in left]
        with self._lock:
            for job in self._all.values():
                _close_file(job)
        return all(ended)

    def _run(self, queue: str) -> None:
        """Run the operations on one queue until none is left."""
        with self._lock:
            line = self._lines[queue]
        while line:
            job, work = line[0]
            if job.stop.is_set():
                job.end(JobState.STOPPED)
            else:
                job.run(work)
            with self._lock:
                line.popleft()
                if not line:
                    del self._lines[queue]

    def _forget_old(self) -> None:
        over = [job for job in self._all.values() if job.is_over]
        for job in over[: max(len(self._all) - _KEPT, 0)]:
            _close_file(job)
            del self._all[job.id]
        for job in [job for job in over if job.file is not None][:-_FILES_KEPT]:
            _close_file(job)


def _close_file(job: Job) -> None:
    file, job.file = job.file, None
    if file is not None:
        file.close()
