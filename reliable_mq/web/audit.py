"""The audit log: who changed or exported which dead letters, with what result.

One line of JSON when an operation begins and one when it ends, appended to a file and flushed to the disk. Without a
file, the latest entries are kept in memory only; all are logged by ``reliable_mq.web.audit`` at INFO, too.

Invariant: an operation whose beginning cannot be written does not begin. An entry holds no body and no header.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from reliable_mq.errors import ConfigurationError

__all__ = ["AuditLog"]

logger = logging.getLogger(__name__)

_SHOWN: Final = 200  # entries
_TAIL: Final = 256 * 1024  # bytes of a file that are read for those


class AuditLog:
    """A log of operations. Thread-safe.

    Args:
        path: the file to append to; None for none.

    Raises:
        ConfigurationError: it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._latest: deque[Mapping[str, Any]] = deque(maxlen=_SHOWN)
        if self._path is not None:
            try:
                self._append(b"")
                self._latest.extend(_entries(self._path))
            except OSError as error:
                raise ConfigurationError(f"audit_log: {self._path} cannot be written: {error.strerror}") from error

    @property
    def where(self) -> str:
        """The file; empty without one."""
        return "" if self._path is None else str(self._path)

    def write(self, event: str, operation: str, entry: Mapping[str, object]) -> None:
        """Append an entry. Blocks until it is on the disk.

        Args:
            event: ``"begun"`` or ``"ended"``.
            operation: the id of the operation.
            entry: what is to be known of it, as JSON.

        Raises:
            OSError: it cannot be written.
        """
        full = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, "id": operation, **entry}
        line = json.dumps(full)
        with self._lock:
            if self._path is not None:
                self._append(line.encode() + b"\n")
            self._latest.append(json.loads(line))
        logger.info("%s", line)

    def latest(self) -> list[Mapping[str, Any]]:
        """Return the latest entries, the newest first."""
        with self._lock:
            return [*reversed(self._latest)]

    def _append(self, data: bytes) -> None:
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            if data:
                os.write(descriptor, data)  # one write: lines of several processes do not mix
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    """Read the last entries of a file; lines that are none are left out."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        lines = file.read().splitlines()
    found: list[Mapping[str, Any]] = []
    for line in lines[-_SHOWN:]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("at"), str):
            found.append(entry)
    return found
