"""Claim queues for one reader of an application: two would share their messages.

Spark makes a source of every branch of a query that reads a DataFrame, and one for every query. A stream gives each of
them every message. A queue gives each message to one of them: a join of a queue with itself would lose the rows of
both, acked. All readers of an application are on the driver's host, so a claim is a lock on a file in the application's
own directory (`SPARK_LOCAL_DIRS`), which the operating system drops with the process, however it ends.

Invariants: nobody waits for long: the reader of a query that has just ended has a few seconds to go; other
applications, and readers outside of one, are not concerned.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.settings import ConnectionSettings

__all__ = ["QueueClaims", "application_directory"]

_PATIENCE: Final = 15.0  # seconds for the reader of a query that has ended to requeue and go
_POLL: Final = 0.1


def application_directory() -> Path | None:
    """Return the directory that this application alone has; None outside of Spark."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    directory = Path(first)
    return directory if directory.name.startswith("blockmgr-") and directory.is_dir() else None


class QueueClaims:
    """The queues that a reader has claimed. Not thread-safe.

    Args:
        directory: of the application; None claims nothing.
        settings: of the connection: queues of the same name on other brokers are others.
    """

    def __init__(self, directory: Path | None, settings: ConnectionSettings) -> None:
        self._directory = directory if fcntl is not None else None
        self._broker = str(settings)
        self._files: list[int] = []

    def claim(self, queues: Sequence[str], *, patience: float = _PATIENCE) -> None:
        """Claim all queues. Blocks for ``patience`` seconds while another reader has one.

        Raises:
            ConfigurationError: another reader of this application reads one of them.
        """
        if self._directory is None:
            return
        deadline = time.monotonic() + patience
        for queue in sorted(queues):  # two readers that claim the same queues do not wait for each other
            name = hashlib.sha256(f"{self._broker}\0{queue}".encode()).hexdigest()[:24]
            file = os.open(self._directory / f"reliable-mq-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files.append(file)
            while not _locked(file):
                if time.monotonic() >= deadline:
                    self.release()
                    raise ConfigurationError(
                        f"queue {queue!r} is read twice in this application, and each message would come to one of the "
                        "two readers only. Spark makes a reader for every query, and for every branch of one (a "
                        "self-join, a union): read the queue once, in staged mode (the option stage), whose stream "
                        "gives every reader all messages; or do all that is to be done with a batch in one foreachBatch"
                    )
                threading.Event().wait(_POLL)

    def release(self) -> None:
        """Release the queues for other readers."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
