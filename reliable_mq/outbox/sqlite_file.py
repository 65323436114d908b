"""The file of a SQLite outbox: its identity, its disk space, and its errors.

Identity: SQLite keeps writing to a file that was deleted or replaced. Every commit succeeds, but no later process
finds it. The write-ahead log is a separate file, with commits that are nowhere else. If the path is a symbolic link,
the files beside the database are those beside the file that it names, as they are for SQLite.

Disk space: SQLite needs space even to delete rows. It appends the change to the log, and before the log can start
over, its pages have to fit into the database. The reserve is a file beside the database. When the disk is full, the
reserve is released so that rows can be removed, and nothing more is stored until it is restored. A little of it is used
to open the file, for SQLite's ``-shm``.

Invariants:

- once noted, the database file stays the same until `forget`, because ids of one file mean nothing in another. The log
  may be a different file after the connection was closed and opened again;
- with the reserve, the log can be copied into the database on a full disk: the reserve grows with the log, which grows
  while somebody reads and keeps its size, and with the transaction. Without the reserve, nothing is stored.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from reliable_mq.errors import OutboxError
from reliable_mq.outbox.protocol import text_or_bytes


class OpenFile:
    """The files that a path named when they were opened. Thread-safe.

    The checks raise `OutboxError` if the path now names other files or none, or cannot be read: no later process would
    find changes to the open files.
    """

    def __init__(self, path: Path) -> None:
        self.real = self._path = str(path)  # ``real`` is the path without links, from `check_file`
        self._noted: list[tuple[int, int]] | None = None

    def connect(self, timeout: float) -> sqlite3.Connection:
        """Return a new connection, which waits up to ``timeout`` seconds for others."""
        connection = sqlite3.connect(self.real, timeout=timeout, isolation_level=None, check_same_thread=False)
        connection.text_factory = text_or_bytes  # invalid UTF-8 in one row must not fail the others
        return connection

    def database(self) -> tuple[int, int]:
        """Return the identity of the database file, to pass it to `note`."""
        return self._identities(self.real)[0]

    def note(self, before: tuple[int, int]) -> None:
        """Note a new connection's files. They must be of the same database as before.

        Args:
            before: The identity of the database file before the connection was made.
        """
        found = self._identities(self.real)
        if found[0] != (before if self._noted is None else self._noted[0]):
            raise self._error()
        self._noted = found

    def check_file(self) -> None:
        """Find the database file before it is opened; check it if it was open before."""
        if self._noted is None:
            self.real = os.path.realpath(self._path)
        elif self._identities(self._path)[0] != self._noted[0]:
            raise self._error()

    def check(self) -> None:
        """Check that the path still names the noted files. Costs two stat() calls."""
        if self._noted is not None and self._identities(self._path) != self._noted:
            raise self._error()

    def forget(self) -> None:
        """Forget the files after they were closed. The next files may be different."""
        self._noted = None

    def _error(self) -> OutboxError:
        return OutboxError(
            f"outbox {self._path} or its -wal was deleted or replaced while it was open: nothing more is stored "
            "there. Put the files back, or close the publisher and make another; what was in deleted files and was "
            "not published is lost"
        )

    def _identities(self, database: str) -> list[tuple[int, int]]:
        found = []
        for path in (database, f"{self.real}-wal"):
            try:
                seen = os.stat(path)  # noqa: PTH116  # twice for every transaction
            except FileNotFoundError:
                found.append((0, 0))
            except OSError as error:
                raise outbox_error(error, Path(self._path), "finding the files") from error
            else:
                found.append((seen.st_dev, seen.st_ino))
        return found


_BYTES: Final = 8 * 1024 * 1024  # at least: enough for most transactions
_BYTES_OF_LOG: Final = 4 * 1024 * 1024  # SQLite's default
_BYTES_BESIDES: Final = 2 * 1024 * 1024  # space for the removal
_BYTES_TO_OPEN: Final = 128 * 1024  # the -shm of a log of 60 MiB
_ZEROS: Final = bytes(1024 * 1024)
_CANNOT_ALLOCATE: Final = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)  # from file systems such as NFS, where glibc writes the bytes instead and musl does not


class DiskReserve:
    """Reserved disk space for removing rows, shared by all processes. Thread-safe."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file

    @property
    def _path(self) -> str:
        return f"{self._file.real}-reserve"

    def available(self, size: int) -> bool:
        """Try to make the reserve enough to store ``size`` bytes; return whether it is."""
        found = _size(self._path)
        needed = max(_BYTES, max(_size(f"{self._file.real}-wal"), _BYTES_OF_LOG) + size + _BYTES_BESIDES)
        return found >= needed or self._extend(found, needed)

    def release(self) -> None:
        """Return the space to the file system."""
        with suppress(OSError):
            os.truncate(self._path, 0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return the space to the file system for the block, which needs a little of it."""
        size = _size(self._path)
        self.release()
        try:
            yield
        finally:
            with suppress(OSError):
                self._extend(0, size - _BYTES_TO_OPEN)

    def _extend(self, found: int, needed: int) -> bool:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor, needed)
        except OSError:
            os.ftruncate(descriptor, found)
            return False
        finally:
            os.close(descriptor)
        return True


def _size(path: str) -> int:
    """Return the size of a file, or 0 if there is none."""
    with suppress(FileNotFoundError):
        return os.stat(path).st_size  # noqa: PTH116  # twice for every transaction
    return 0


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
        else:
            return
    for start in range(0, size, len(_ZEROS)):
        os.pwrite(descriptor, _ZEROS, start)
    os.fsync(descriptor)  # some file systems allocate space only when they write to the disk


_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "the disk is full: free disk space. Earlier rows are safe",
    sqlite3.SQLITE_BUSY: "another process has kept the file locked for too long; find it, or raise timeout",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written to; see to the permissions",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; see to the directory and the permissions",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away with its -wal, and recover it with sqlite3's .recover",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database, or is damaged; give the outbox its own file",
    sqlite3.SQLITE_IOERR: "the disk failed or is full, or a quota is used up; see to it. Earlier rows are in the file",
    sqlite3.SQLITE_TOOBIG: "a message is larger than SQLite can store",
}


def outbox_error(error: Exception, path: Path, what: str) -> OutboxError:
    """Return the error to raise to the user, with advice."""
    advice = _ADVICE.get(_code(error))
    return OutboxError(f"{what} failed in outbox {path}: {error}" + (f": {advice}" if advice else ""))


def uncertain(error: BaseException) -> bool:
    """Return whether a failed commit may be in the file nevertheless."""
    certain = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_TOOBIG)
    return isinstance(error, sqlite3.Error) and not is_full(error) and _code(error) not in certain


def is_full(error: BaseException | None) -> bool:
    """Return whether a write failed, so that there is no commit.

    The disk is full, or a quota is used up, which SQLite does not tell from other failures of a write.
    """
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def _code(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0 if the error has none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
