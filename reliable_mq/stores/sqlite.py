"""An idempotency store in a file, for the processes of one machine.

Invariants:

- a completed claim is on the disk when `complete_many` returns;
- a claim survives the death of any process, but not a crash of the machine, which also ends the work of its holder;
- a call waits for other calls no longer than the timeout;
- no connection is open while the process forks. SQLite notes a process's locks in its memory, so the child would have
  the notes without the locks: it would take no locks of its own, or wait for ever for those of its parent.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, TypeVar

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.generators import drive
from reliable_mq._util.hooks import ForkStage, HeldAtFork, at_fork
from reliable_mq._util.validation import LONGEST_BUSY_TIMEOUT, Duration, file_path
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.base import DAY, SyncStore
from reliable_mq.stores.sql import SQLite, SQLStoreBase, Steps, Transaction, checked_table

T = TypeVar("T")
_PAUSE_AT_WAL: Final = 0.01  # seconds between attempts to switch a new file to WAL mode


class SQLiteStore(SQLStoreBase, SyncStore):
    """An idempotency store for all processes of this machine that use the file.

    Thread-safe, and safe across processes and forks: a fork waits for running calls and closes the file, which the next
    call of either process opens again. Connects at the first call. The file must be on a local disk, because SQLite's
    locks do not work over networks.

    Args:
        path: The path of the file, which is created if it does not exist. Its directory must exist. The file may have
            other tables. For a store in memory, use ``MemoryStore``.
        retention: The minimum time for which done keys, and the failed attempts of other keys, are remembered, in
            seconds.
        timeout: The maximum time for which a call waits for other calls, in seconds.
        table: The name of the table.

    Raises:
        ConfigurationError: If the path is not a file path in an existing directory, or another argument is invalid.
    """

    _sql: SQLite

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        table: str = "reliable_mq_claims",
    ) -> None:
        self._path = file_path(path)
        if not self._path.parent.is_dir():
            raise ConfigurationError(f"path is in {str(self._path.parent)!r}, which is no directory: create it")
        super().__init__(SQLite(checked_table(table)), retention, timeout)
        self._lock = threading.Lock()  # for the attributes below
        self._connection: sqlite3.Connection | None = None
        self._base = 0
        _stores.add(self)

    def purge(self) -> int:
        """Delete expired rows and return their number. Claims also delete some."""
        return drive(self._purge(), self._send)

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._lock:
            self._disconnect()

    def __repr__(self) -> str:
        return f"<SQLiteStore {str(self._path)!r}>"

    def _send(self, query: Transaction) -> Any:
        if _inherited and self._path.resolve() in _inherited:
            raise IdempotencyStoreError(
                f"{self!r} was in use by the parent of this process at the fork: start another process"
            )
        if not self._lock.acquire(timeout=max(query.deadline - time.monotonic(), 0.0)):
            raise IdempotencyStoreError(f"{self!r} was busy for {self._timeout:g} s")
        try:
            connection = self._connection or self._connect(query.deadline)
            _wait_until(query.deadline, connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if query.durable else 'NORMAL'}")
            try:
                connection.execute("BEGIN IMMEDIATE")
                result = _execute_steps(query.steps(now=self._base + since_boot()), connection)
                connection.execute("COMMIT")
            except BaseException:  # also of a signal handler
                if connection.in_transaction:  # after some errors, SQLite has rolled back by itself
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self._disconnect()  # the next call may find a replaced or repaired file
            raise IdempotencyStoreError(f"{self!r} failed: {error}") from error
        finally:
            self._lock.release()
        return result

    def _connect(self, deadline: float) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=0.0, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        try:
            _use_wal(connection, deadline)
            _wait_until(deadline, connection)
            for statement in self._sql.ddl:
                connection.execute(statement)
            connection.execute("BEGIN IMMEDIATE")
            self._base = _execute_steps(self._sql.clock_base(*boot(), since_boot()), connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _close_for_fork(self, after: contextlib.ExitStack) -> None:
        """Close the file until the fork is over, unless a call outlasts the timeout."""
        if self._lock.acquire(timeout=self._timeout):
            after.callback(self._lock.release)
            self._disconnect()

    def _start_in_child(self) -> None:
        """Refuse the file in a forked child if it was in use at the fork."""
        if self._lock.locked() or self._connection is not None:
            _inherited[self._path.resolve()].append(self._connection)
            self._connection = None
            self._lock = threading.Lock()


def _execute_steps(steps: Steps[T], connection: sqlite3.Connection) -> T:
    return drive(steps, lambda query: connection.execute(query.sql, query.parameters).fetchall())


def _wait_until(deadline: float, connection: sqlite3.Connection) -> None:
    """Let statements wait for locks until the deadline."""
    left = min(max(deadline - time.monotonic(), 0.001), LONGEST_BUSY_TIMEOUT)
    connection.execute(f"PRAGMA busy_timeout = {int(left * 1000)}")


def _use_wal(connection: sqlite3.Connection, deadline: float) -> None:
    """Switch the file to WAL mode.

    Connections that do so at the same time find the file locked, regardless of the busy timeout.
    """
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_AT_WAL)
        else:
            return


_stores: Final = HeldAtFork(SQLiteStore._close_for_fork)  # noqa: SLF001  # of this module
# Files that were in use at the fork of this process, with their connections, which are neither used nor closed.
_inherited: Final[defaultdict[Path, list[sqlite3.Connection | None]]] = defaultdict(list)


def _start_in_child() -> None:
    for store in _stores:
        store._start_in_child()  # noqa: SLF001  # of this module


# Called before the child has other threads. Otherwise two threads, each with its own lock, could share a connection.
at_fork(ForkStage.RENEW, _start_in_child)
