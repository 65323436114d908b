"""An outbox in one SQLite file: embedded, fast, for the processes of one machine.

Stored messages are on disk. The file is in WAL mode with ``synchronous=FULL``, so every commit is an fsync, and one
commit stores all messages that arrived in the meantime (`reliable_mq.outbox.relay`). A power cut or a kill at any
moment keeps every committed transaction and no partial one: each frame of the write-ahead log has a checksum, and a
page that a checkpoint left half written is still in the log.

Any number of processes may store in one file. One process at a time is the relay. It holds a lock on a file beside the
database, and the lock ends with the process, however it ends. The next relay takes over at once.

Invariants:

- ids grow in the order in which transactions commit, and an id is never used again;
- the connection that writes is used under a lock, and counting, which takes long, never holds that lock;
- no message is reported as stored in a file that the path no longer names;
- no connection is used in a forked child, and a fork waits for running calls, because a lock of SQLite itself that one
  of them has would stay locked in the child, for files of its own as well;
- delays use the time since the boot of the machine, which is independent of the wall clock. A row that was delayed
  before a reboot is due within two minutes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from reliable_mq._util.boottime import since_boot
from reliable_mq._util.hooks import HeldAtFork, OfOneProcess
from reliable_mq._util.validation import LONGEST_BUSY_TIMEOUT, Duration, file_path, is_text, seconds, whole_number
from reliable_mq.core.outbox import COLUMNS, FORMAT, NewRow, RowOutcome, RowSettlement, values_of
from reliable_mq.errors import ConfigurationError, OutboxError, UsageError
from reliable_mq.outbox.protocol import (
    LARGEST_NUMBER,
    FailedRow,
    OutboxStatus,
    RowLeases,
    check_ids,
    check_target,
    failed_row,
    ordering_by,
    portions,
)
from reliable_mq.outbox.sqlite_file import DiskReserve, OpenFile, is_full, outbox_error, uncertain
from reliable_mq.outbox.sqlite_relay import SQLiteRowLeases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.message import Message
    from reliable_mq.outbox.protocol import OrderingKey

T = TypeVar("T")

_APPLICATION: Final = 0x524D516F  # "RMQo": this file is an outbox
_VERSION: Final = 1  # of the tables
_FORK_WAITS: Final = 5.0  # seconds for each of the calls that run

_TABLES: Final = (
    """
    CREATE TABLE outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        format INTEGER NOT NULL,
        message_id TEXT NOT NULL,
        exchange TEXT NOT NULL,
        routing_key TEXT NOT NULL,
        mandatory INTEGER NOT NULL,
        ordering_key TEXT,
        properties BLOB,
        body BLOB NOT NULL,
        attempts INTEGER NOT NULL,
        possible_duplicate INTEGER NOT NULL,
        stored_at REAL NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        available_at REAL,
        reason TEXT
    )
    """,
    # Only few rows are not ready (state > 0), and every take looks for them.
    "CREATE INDEX outbox_not_ready ON outbox (state, available_at) WHERE state > 0",
    "CREATE INDEX outbox_in_order ON outbox (ordering_key, id) WHERE ordering_key IS NOT NULL",
    # The epoch grows with every change that may make rows before a relay's position ready again.
    "CREATE TABLE outbox_epoch (epoch INTEGER NOT NULL)",
    "INSERT INTO outbox_epoch VALUES (0)",
)

_INSERT: Final = f"INSERT INTO outbox ({', '.join(COLUMNS)}, stored_at) VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"  # noqa: S608
_REMOVE: Final = "DELETE FROM outbox WHERE id = ?"
_CHANGE: Final = """
    UPDATE outbox SET state = ?, available_at = ?, reason = ?, attempts = attempts + 1,
    possible_duplicate = max(possible_duplicate, ?) WHERE id = ?
"""
_SET_ASIDE: Final = "state > 0 AND state = 2 AND format <= ?"  # the first term is the condition of the partial index
# The first row of each key that is set aside or unreadable. It holds the later rows of the key.
_STUCK: Final = """
    WITH stuck (ordering_key, first) AS MATERIALIZED (
        SELECT ordering_key, min(id) FROM (
            SELECT ordering_key, id FROM outbox WHERE state > 0 AND state = 2 AND +ordering_key IS NOT NULL
            UNION ALL
            SELECT ordering_key, id FROM outbox WHERE format > :format AND +ordering_key IS NOT NULL
        ) GROUP BY ordering_key
    )
"""
_HOLDS: Final = "LEFT JOIN stuck ON stuck.ordering_key = outbox.ordering_key AND stuck.first < outbox.id"
_BACKLOG: Final = f"""
    {_STUCK} SELECT count(*) FROM outbox {_HOLDS}
    WHERE outbox.id <= :up_to AND state < 2 AND format <= :format AND stuck.first IS NULL
"""  # noqa: S608
_STATUS: Final = f"""
    {_STUCK} SELECT
        count(*) FILTER (WHERE state < 2 AND format <= :format),
        count(*) FILTER (WHERE state = 1 AND format <= :format),
        count(*) FILTER (WHERE state < 2 AND format <= :format AND stuck.first IS NOT NULL),
        count(*) FILTER (WHERE state = 2 AND format <= :format),
        count(*) FILTER (WHERE format > :format),
        min(stored_at) FILTER (WHERE state < 2)
    FROM outbox {_HOLDS}
"""  # noqa: S608


class SQLiteOutbox(OfOneProcess):
    """An outbox in a SQLite file. Thread-safe.

    Any number of processes may have the same file open, with one publisher in each process:
    ``Publisher(url, outbox=SQLiteOutbox("orders.outbox"))``. The file and its tables are created if they do not exist,
    readable by their owner only. These files belong to it and are kept beside it: SQLite's ``-wal`` and ``-shm``, the
    lock ``-relay``, and ``-reserve`` with 8 MiB (more after a message of more than 2 MiB), so that rows can be removed
    on a full disk. Put the file on a local disk: neither SQLite's locks nor the relay's lock work reliably on a network
    file system.

    Args:
        path: The path of the file.
        ordering_key: A function of a message, its exchange and its routing key. Messages for which it returns the same
            text are published one after the other, each after the previous one is confirmed. None means no order.
            `publish` calls the function on the caller's thread.
        timeout: The time to wait for another process that is writing to the file, in seconds.
        poll_interval: The time after which an idle relay looks for rows of other processes, in seconds.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ordering_key: OrderingKey | None = None,
        timeout: Duration = 30.0,
        poll_interval: Duration = 0.1,
    ) -> None:
        super().__init__()
        if ordering_key is not None and not callable(ordering_key):
            raise ConfigurationError(f"ordering_key must be a function or None, not {ordering_key!r}")
        self.path = file_path(path).absolute()
        self.poll_interval = seconds("poll_interval", poll_interval, positive=True)
        self._timeout = min(seconds("timeout", timeout, positive=True), LONGEST_BUSY_TIMEOUT)
        self._ordering_key = ordering_key
        self._file = OpenFile(self.path)
        self._reserve = DiskReserve(self._file)
        self._lock = threading.Lock()  # for the connection
        self._connection: sqlite3.Connection | None = None
        self._read_lock = threading.Lock()  # for the connection that counts; acquired before the other lock
        self._reader: sqlite3.Connection | None = None
        self._take_lock = threading.Lock()  # for the connection of the relay; acquired before the others
        _outboxes.add(self)

    # For a publisher

    def open(self) -> None:
        """Open the file, and create it if it does not exist.

        Raises:
            OutboxError: If the file cannot be opened, is damaged, is not an outbox, or has a newer format.
            UsageError: If called in a forked child.
        """
        self._check_not_forked()
        with self._lock:
            self._open()

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Return the ordering key of a message; see `Outbox.ordering_key`."""
        for name, text in (("message_id", message.message_id), ("exchange", exchange), ("routing_key", routing_key)):
            if not is_text(text):
                raise ConfigurationError(f"{name} must be text that can be encoded, not {text!r}")
        check_target(message, exchange, routing_key)
        return ordering_by(self._ordering_key, message, exchange, routing_key)

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and write outcomes in one transaction; see `Outbox.write`."""
        stored_at, now = time.time(), since_boot() / 1_000_000
        stored = [(*values_of(row), stored_at) for row in rows]
        removed = [(one.row.id,) for one in settlements if one.outcome is RowOutcome.CONFIRMED]
        changed = [
            (
                1 if one.outcome is RowOutcome.LATER else 2,
                now + one.delay if one.outcome is RowOutcome.LATER else None,
                one.reason,
                one.possible_duplicate,
                one.row.id,
            )
            for one in settlements
            if one.outcome in (RowOutcome.LATER, RowOutcome.SET_ASIDE)
        ]
        if not (stored or removed or changed):
            return
        if stored:
            self.open()
            size = sum(len(row.message.body) + len(row.message.encoded_properties or b"") for row in rows)
            self._need_reserve(size, f"storing {len(stored)} messages")

        def work(connection: sqlite3.Connection) -> None:
            if stored:
                connection.executemany(_INSERT, stored)
            if removed:
                connection.executemany(_REMOVE, removed)
            if changed:
                connection.executemany(_CHANGE, changed)

        if stored:
            self._transact(work, f"storing {len(stored)} messages")
        else:
            self._transact_on_full_disk(work, "removing what was published")

    def claims(self) -> RowLeases:
        """Return new leases for one relay."""
        self.open()
        try:
            return SQLiteRowLeases(self.path, self._timeout, self._file, self.open, self._take_lock)
        except (sqlite3.Error, OSError) as error:
            raise outbox_error(error, self.path, "opening") from error

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Return the number of rows that will be published, and the id of the last row."""
        if up_to is not None:
            whole_number("up_to", up_to, 0, LARGEST_NUMBER)

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
            limit = last[0] if last else 0
            arguments = {"format": FORMAT, "up_to": limit if up_to is None else up_to}
            (count,) = connection.execute(_BACKLOG, arguments).fetchone()
            return count, limit

        return self._read(work)

    # For operators

    def status(self) -> OutboxStatus:
        """Return the number of rows in each state."""

        def work(connection: sqlite3.Connection) -> OutboxStatus:
            found = connection.execute(_STATUS, {"format": FORMAT}).fetchone()
            rows, delayed, held, set_aside, unreadable, oldest = found
            age = 0.0 if oldest is None else max(time.time() - oldest, 0.0)
            return OutboxStatus(rows, delayed, held, set_aside, unreadable, age)

        return self._read(work)

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Return the messages that are set aside, the oldest first."""
        whole_number("limit", limit, 0, LARGEST_NUMBER)
        query = (
            "SELECT message_id, exchange, routing_key, attempts, reason, ? - stored_at FROM outbox "  # noqa: S608
            f"WHERE {_SET_ASIDE} ORDER BY id LIMIT ?"
        )
        return self._read(
            lambda connection: [
                failed_row(values, age) for *values, age in connection.execute(query, (time.time(), FORMAT, limit))
            ]
        )

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put set-aside messages back, all or those with these ids; return their number."""
        query = f"UPDATE outbox SET state = 0, available_at = NULL, reason = NULL WHERE {_SET_ASIDE}"  # noqa: S608
        return self._decide(query, message_ids)

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete set-aside messages, all or those with these ids; return their number."""
        return self._decide(f"DELETE FROM outbox WHERE {_SET_ASIDE}", message_ids)  # noqa: S608

    def close(self) -> None:
        """Close the file. The next call opens it. Does nothing in a forked child."""
        if self._is_forked:
            return
        reader = self._reader
        if reader is not None:
            with suppress(sqlite3.Error):
                reader.interrupt()  # a caller that is counting rows gets an error
        with self._read_lock, self._lock:
            self._drop_reader()
            self._drop()
            self._file.forget()

    def __repr__(self) -> str:
        return f"SQLiteOutbox({str(self.path)!r})"

    # Private

    def _decide(self, query: str, message_ids: Sequence[str] | None) -> int:
        ids = check_ids(message_ids)

        def work(connection: sqlite3.Connection) -> int:
            if ids is None:
                count = connection.execute(query, (FORMAT,)).rowcount
            else:
                count = 0
                for some in portions(ids):  # each statement reads all set-aside rows
                    wanted = f"{query} AND message_id IN ({', '.join('?' * len(some))})"
                    count += connection.execute(wanted, (FORMAT, *some)).rowcount
            if count:
                connection.execute("UPDATE outbox_epoch SET epoch = epoch + 1")
            return count

        return self._transact_on_full_disk(work, "changing what was set aside")

    def _need_reserve(self, size: int, what: str) -> None:
        try:
            available = self._reserve.available(size)
            if not available:  # the log may have grown into its space while rows were removed
                self._empty_log()
                available = self._reserve.available(size)
        except OSError as error:
            raise outbox_error(error, self.path, what) from error
        if not available:
            raise OutboxError(
                f"{what} failed in outbox {self.path}: the disk is full, except for the space reserved for removing "
                "rows: free disk space. Earlier rows are safe"
            )

    def _transact_on_full_disk(self, work: Callable[[sqlite3.Connection], T], what: str) -> T:
        """Run a transaction, and release the reserve for it if the disk is full."""
        try:
            return self._transact(work, what)
        except OutboxError as error:
            if not is_full(error.__cause__):
                raise
        self._reserve.release()
        self._empty_log()
        return self._transact(work, what)

    def _empty_log(self) -> None:
        """Try to copy the log into the database and return its space to the disk."""
        with self._lock, suppress(sqlite3.Error):
            self._open().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _transact(self, work: Callable[[sqlite3.Connection], T], what: str) -> T:
        self._check_not_forked()
        with self._lock:
            connection = self._open()
            committing = False
            try:
                self._file.check()
                connection.execute("BEGIN IMMEDIATE")
                result = work(connection)
                committing = True
                connection.execute("COMMIT")
            except BaseException as error:
                self._roll_back(connection, error)
                if not isinstance(error, sqlite3.Error):
                    raise
                failure = outbox_error(error, self.path, what)
                failure.may_have_arrived = committing and uncertain(error)
                raise failure from error
            try:
                self._file.check()
            except OutboxError as error:  # the relay also has that file open and may have taken the rows
                error.may_have_arrived = True
                raise
            return result

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Read on a separate connection, so that others can write meanwhile."""
        self._check_not_forked()
        if self._connection is None:  # opening notes the log, which closing may have removed
            self.open()
        with self._read_lock:
            try:
                self._file.check()
                if self._reader is None:
                    self._reader = self._file.connect(self._timeout)
                    self._reader.execute("PRAGMA query_only = ON")
                return work(self._reader)
            except sqlite3.Error as error:
                if uncertain(error):
                    self._drop_reader()
                raise outbox_error(error, self.path, "reading") from error

    def _roll_back(self, connection: sqlite3.Connection, error: BaseException) -> None:
        with suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        if uncertain(error):
            self._drop()  # the next call opens the file again

    def _wait_for_calls(self, after: ExitStack) -> None:
        """Let no thread call SQLite until a fork is over, unless a call takes too long."""
        for lock in (self._take_lock, self._read_lock, self._lock):
            if lock.acquire(timeout=_FORK_WAITS):
                after.callback(lock.release)

    def _check_not_forked(self) -> None:
        """Raise UsageError in a forked child, whose copy of a lock may stay locked."""
        if self._is_forked:
            raise UsageError(f"{self!r} was made before fork(): its connections belong to the parent; make one here")

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._file.check_file()  # before _connect() makes a new file in place of a deleted one
            try:
                self._connection = self._connect_on_full_disk()
            except (sqlite3.Error, OSError) as error:
                raise outbox_error(error, self.path, "opening") from error
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect_on_full_disk(self) -> sqlite3.Connection:
        """Connect, and lend space of the reserve for it if the disk is full."""
        try:
            return self._connect()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_IOERR_SHMSIZE:  # no space for the -shm
                raise
        with self._reserve.lent():
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        path = Path(self._file.real)
        new = not path.exists()
        if new:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        database = self._file.database()
        connection = self._file.connect(self._timeout)
        try:
            connection.execute("BEGIN")
            is_empty = self._is_empty(connection)  # before WAL mode, which a file of something else would keep
            connection.execute("ROLLBACK")
            _use_wal(connection, self._timeout)
            # FULL means an fsync at every commit. NORMAL has none in WAL mode, and would lose accepted messages.
            connection.execute("PRAGMA synchronous = FULL")
            # Some builds overwrite deleted data by default: removing a message would write it once more.
            connection.execute("PRAGMA secure_delete = OFF").fetchall()
            if is_empty:
                self._create(connection)
            self._file.note(database)
        except BaseException:
            connection.close()
            raise
        if new:
            _sync_directory(path.parent)
        return connection

    def _is_empty(self, connection: sqlite3.Connection) -> bool:
        """Return whether the tables are yet to be created; refuse a file of others.

        It must be called in a transaction, because another process may be creating the tables.

        Raises:
            OutboxError: If the database is of something else, or of a newer version of the tables.
        """
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application == version == 0 and not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
            return True
        if application != _APPLICATION:
            raise OutboxError(f"{self.path} is a database of something else; give the outbox a file of its own")
        if version > _VERSION:
            raise OutboxError(
                f"{self.path} has format {version}, and this version of reliable_mq knows {_VERSION}: it was made by a "
                "newer one; use that one"
            )
        return False

    def _create(self, connection: sqlite3.Connection) -> None:
        """Create the tables, unless another process did so in the meantime."""
        connection.execute("BEGIN IMMEDIATE")
        if self._is_empty(connection):
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")


_outboxes: Final = HeldAtFork(SQLiteOutbox._wait_for_calls)  # noqa: SLF001  # of this module


def _use_wal(connection: sqlite3.Connection, timeout: float) -> None:
    """Switch to WAL mode. SQLite's own timeout does not apply to this statement."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            if mode != "wal":
                raise sqlite3.OperationalError(f"its file system cannot do write-ahead logs (journal mode {mode})")
            return


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
