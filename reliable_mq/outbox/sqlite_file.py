"""The file of a SQLite outbox: its identity, its disk space, and its errors.

Identity: SQLite goes on writing to a file that was deleted or replaced: every commit succeeds, and no later process
finds it. The write-ahead log is a file of its own, with commits that are nowhere else.

Disk space: SQLite needs space even to delete: it appends the change to the log, and before the log can start over, its
pages have to fit into the database. The reserve is a file beside the database; when the disk is full, it is released
so that rows can be removed, and nothing more is stored until it is back.

Invariants:

- once noted, the file stays the one that was open first until `forget`: ids of one file mean nothing in another. Its
  log may be another one after the connection was closed and opened again;
- with the reserve, a log of its usual size can be copied into the database on a full disk; without it, nothing
  is stored.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from reliable_mq.errors import OutboxError

__all__ = ["DiskReserve", "OpenFile", "is_full", "outbox_error", "uncertain"]


class OpenFile:
    """The files that a path named when they were opened. Thread-safe.

    Its checks raise `OutboxError` if the path names others, or none: no later process would find their changes.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (str(path), f"{path}-wal")
        self._noted: list[tuple[int, int]] | None = None

    @property
    def noted(self) -> bool:
        return self._noted is not None

    def note(self) -> None:
        """Note the files that a new connection has open; of the same database as before."""
        found = self._identities()
        if self._noted is not None and found[0] != self._noted[0]:
            raise self._error()
        self._noted = found

    def check_file(self) -> None:
        """Check the database alone, before it is opened again."""
        if self._noted is not None and self._identities()[0] != self._noted[0]:
            raise self._error()

    def check(self) -> None:
        """Check that the path still names the noted files. Costs two calls of stat()."""
        if self._noted is not None and self._identities() != self._noted:
            raise self._error()

    def forget(self) -> None:
        """Forget the files, which are closed; the next ones may be others."""
        self._noted = None

    def _error(self) -> OutboxError:
        return OutboxError(
            f"outbox {self._paths[0]} or its -wal was deleted or replaced while it was open: nothing more is stored "
            "there. Put the files back, or close the publisher and make another; what was in deleted files and was "
            "not published is lost"
        )

    def _identities(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            try:
                seen = os.stat(path)  # noqa: PTH116  # twice for every transaction
            except FileNotFoundError:
                found.append((0, 0))
            else:
                found.append((seen.st_dev, seen.st_ino))
        return found


_BYTES: Final = 8 * 1024 * 1024  # the log: 4 MiB (SQLite's default), a transaction behind it, and room for the removal
_ZEROS: Final = bytes(1024 * 1024)
_CANNOT_ALLOCATE: Final = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)  # a file system, such as NFS; glibc then writes, musl does not


class DiskReserve:
    """Disk space for the removal of rows, shared by all processes. Thread-safe."""

    def __init__(self, database: Path) -> None:
        self._path = f"{database}-reserve"

    def available(self) -> bool:
        """Return whether it exists, or could be made just now."""
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_size >= _BYTES:  # noqa: PTH116  # once for every transaction
                return True
        return self._make()

    def release(self) -> None:
        """Return the space to the file system."""
        with suppress(OSError):
            os.truncate(self._path, 0)

    def _make(self) -> bool:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor)
        except OSError:
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True


def _allocate(descriptor: int) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, _BYTES)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
        else:
            return
    for start in range(0, _BYTES, len(_ZEROS)):
        os.pwrite(descriptor, _ZEROS, start)
    os.fsync(descriptor)  # some file systems allocate only when they write


_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "the disk is full; make room. Earlier rows are safe",
    sqlite3.SQLITE_BUSY: "another process has kept the file locked for too long; find it, or raise timeout",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written to; see to the permissions",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; see to the directory and the permissions",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away with its -wal, and recover it with sqlite3's .recover",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database, or damaged; give the outbox its own file",
    sqlite3.SQLITE_IOERR: "the disk failed; see to it. What was committed before is in the file",
    sqlite3.SQLITE_TOOBIG: "a message is larger than SQLite can store",
}


def outbox_error(error: Exception, path: Path, what: str) -> OutboxError:
    """Return the error for the user, with advice."""
    advice = _ADVICE.get(_code(error))
    return OutboxError(f"{what} failed in outbox {path}: {error}" + (f": {advice}" if advice else ""))


def uncertain(error: BaseException) -> bool:
    """Return whether a failed commit may be in the file all the same."""
    return isinstance(error, sqlite3.Error) and _code(error) not in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_TOOBIG,
    )


def is_full(error: BaseException | None) -> bool:
    """Return whether the disk was full."""
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def _code(error: BaseException) -> int:
    """Return the primary result code, 0 if there is none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
