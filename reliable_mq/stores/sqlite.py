"""An idempotency store in a file, for the processes of one machine.

Invariants:

- a completed claim is on the disk when `complete_many` returns;
- a claim survives the death of any process, but not a crash of the machine, which also ends the work of its holder;
- a call waits for other calls no longer than the timeout;
- a connection is used only by the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from typing import Any, Final, TypeVar

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.validation import LONGEST_BUSY_TIMEOUT, Duration, file_path
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores.base import DAY, SyncStore, run_queries
from reliable_mq.stores.sql import SQLite, SQLStoreBase, Steps, Transaction, checked_table

__all__ = ["SQLiteStore"]

T = TypeVar("T")
_PAUSE_AT_WAL: Final = 0.01  # seconds between attempts to switch a new file to WAL mode


class SQLiteStore(SQLStoreBase, SyncStore):
    """An idempotency store for all processes of this machine that use the file.

    Thread-safe, and safe across processes and forks. Connects at the first call. The file must be on a local disk,
    because SQLite's locks do not work over networks.

    Args:
        path: The path of the file, which is created if it does not exist. The file may have other tables. For a store
            in memory, use ``MemoryStore``.
        retention: The minimum time for which done keys, and the failed attempts of other keys, are remembered, in
            seconds.
        timeout: The maximum time for which a call waits for other calls, in seconds.
        table: The name of the table.

    Raises:
        ConfigurationError: If the path is not a file path, or another argument is invalid.
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
        super().__init__(SQLite(checked_table(table)), retention, timeout)
        self._lock = threading.Lock()  # for the attributes below
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[sqlite3.Connection | None] = []  # connections of parent processes, which are never used
        self._base = 0
        _stores.add(self)

    def purge(self) -> int:
        """Delete expired rows and return their number. Claims also delete some."""
        return run_queries(self._purge(), self._send)

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __repr__(self) -> str:
        return f"<SQLiteStore {str(self._path)!r}>"

    def _send(self, query: Transaction) -> Any:
        if not self._lock.acquire(timeout=max(query.deadline - time.monotonic(), 0.0)):
            raise IdempotencyStoreError(f"{self!r} was busy for {self._timeout:g} s")
        try:
            connection = self._connection or self._connect(query.deadline)
            _wait_until(query.deadline, connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if query.durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = _execute_steps(query.steps(now=self._base + since_boot()), connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            broken, self._connection = self._connection, None  # the next call may find a replaced or repaired file
            if broken is not None:
                with contextlib.suppress(sqlite3.Error):
                    broken.close()
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
            self._base = _execute_steps(self._sql.clock_base(*boot(), since_boot()), connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _start_in_child(self) -> None:
        """Replace lock and connection in a forked child: they belong to the parent."""
        self._inherited.append(self._connection)
        self._connection = None
        self._lock = threading.Lock()


def _execute_steps(steps: Steps[T], connection: sqlite3.Connection) -> T:
    return run_queries(steps, lambda query: connection.execute(query.sql, query.parameters).fetchall())


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
        except sqlite3.OperationalError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_AT_WAL)
        else:
            return


# Called before the child has other threads. Otherwise two threads, each with its own lock, could share a connection.
_stores = each_at_fork(ForkStage.RENEW, SQLiteStore._start_in_child)  # noqa: SLF001  # of this module
