"""How a relay takes rows from a SQLite outbox: in order, without a write per row.

One process at a time is the relay. It holds a lock on the file ``-relay`` beside the database. The operating system
releases the lock however the process ends, so the database needs no leases: the next relay finds the rows of a dead
one. The relay remembers the rows that it took. They and the position are its only state. If somebody deletes the lock's
file, another relay may begin, so the relay looks at the path of the lock at every take.

Invariants:

- a row is not taken again before its outcome is written or it is released;
- a row of an ordering key is not taken while an earlier row of the key is delayed, set aside or unreadable;
- every row that is ready and not held is taken eventually: a row that is passed over is noted by its key, and a row
  before the position that may be ready again sets the position back. An operator may decide about a row that was set
  aside before the relay knows that this was written, so the relay starts over when it does.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reliable_mq._util.boottime import since_boot
from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq.core.outbox import (
    COLUMNS,
    FORMAT,
    LONGEST_DELAY,
    OutboxRow,
    RowOutcome,
    RowSettlement,
    UnreadableRow,
    damaged_row,
    row_from,
)
from reliable_mq.outbox.protocol import RowBatch
from reliable_mq.outbox.sqlite_file import OpenFile, outbox_error

logger = get_logger(__name__)

_BYTES_PER_TAKE: Final = 16 * 1024 * 1024
_ROWS_PER_KEY: Final = 100  # rows of one key taken at a time; they wait for one another
_ROWS_PASSED: Final = 20_000  # rows passed over per take, at most; the next take continues there
_BYTES_PASSED: Final = 64 * 1024 * 1024

_SELECT: Final = f"SELECT id, {', '.join(COLUMNS)} FROM outbox"  # noqa: S608
_READY: Final = f"{_SELECT} WHERE id > ? AND state = 0 ORDER BY id LIMIT ?"
_DELAYED: Final = "SELECT id FROM outbox WHERE state > 0 AND state = 1 AND format <= :format AND available_at"
# Each part reads a range of the index in its order, so rows that are due later are not read.
_DUE: Final = f"""
    {_SELECT} WHERE id IN (
        SELECT id FROM ({_DELAYED} <= :now ORDER BY available_at, id LIMIT :most)
        UNION ALL SELECT id FROM ({_DELAYED} > :latest ORDER BY available_at, id LIMIT :most)
    ) ORDER BY id
"""  # noqa: S608
_OF_A_KEY: Final = f"{_SELECT} WHERE ordering_key = ? AND id >= ? AND id <= ? AND state = 0 ORDER BY id LIMIT ?"
_HELD: Final = """
    SELECT id, ordering_key FROM outbox WHERE state > 0 AND ordering_key IS NOT NULL
    UNION ALL
    SELECT min(id), ordering_key FROM outbox WHERE format > ? AND +ordering_key IS NOT NULL GROUP BY +ordering_key
"""
_KEY: Final = COLUMNS.index("ordering_key")
_BODY: Final = COLUMNS.index("body")
_EPOCH: Final = "SELECT epoch FROM outbox_epoch"
_LAST: Final = "SELECT coalesce(max(id), 0) FROM outbox"


@dataclass(slots=True)
class _Key:
    """The taken rows of one ordering key.

    Attributes:
        taken: The number of taken rows whose outcomes are not written.
        passed: The id of the first row that was passed over or released, or None. It waits until the outcomes of the
            taken rows are written.
    """

    taken: int = 0
    passed: int | None = None


class SQLiteRowLeases:
    """The rows that the relay of a SQLite file has taken. Not thread-safe.

    Args:
        path: The path of the outbox.
        timeout: The time to wait for another process, in seconds.
        file: The files of the outbox.
        open_outbox: A function that opens the outbox if it is not open, and notes its files.
        calling: The lock to hold while the connection is used.
    """

    keep_every = float("inf")

    def __init__(
        self, path: Path, timeout: float, file: OpenFile, open_outbox: Callable[[], None], calling: threading.Lock
    ) -> None:
        self._path = path
        self._timeout = timeout
        self._file = file
        self._open_outbox = open_outbox
        self._calling = calling
        self._lock: int | None = None  # the descriptor of the locked file, if this process is the relay
        self._connection: sqlite3.Connection | None = None
        self._position = 0  # rows up to this one were taken or noted
        self._doubtful = -1  # rows up to this one may have been published by an earlier relay; -1 before a connection
        self._epoch = -1
        self._taken: set[int] = set()
        self._due: set[int] = set()  # taken rows that were delayed before
        self._keys: dict[str, _Key] = {}
        self._held: dict[str, set[int]] = {}  # by key, its rows that are delayed, set aside or unreadable
        self._unwritten: dict[int, str | None] = {}  # rows to delay or set aside, by id, and their keys
        self._overlooked: set[int] = set()  # of these, the ones at the last start from the first row
        self._again: deque[str] = deque()  # keys with rows that were passed over and can be taken now
        self._size = 0  # total size of the bodies in this take, in bytes
        self._walked = self._walked_bytes = 0  # rows passed over in this take, and the size of their bodies
        self._unreadable_logged = False
        _open_claims.add(self)
        try:
            with self._calling:
                self._reader()
        except BaseException:
            self.close()
            raise

    def take(self, limit: int, retries: int | None = None) -> RowBatch:
        """Take due rows: delayed rows, rows that waited for their key, and new rows."""
        with self._calling:
            return self._take(limit, retries)

    def _take(self, limit: int, retries: int | None) -> RowBatch:
        taken = RowBatch([], [])
        self._size = self._walked = self._walked_bytes = 0
        try:
            connection = self._reader()
            if connection is None:
                return taken
            self._file.check()
            (epoch,) = connection.execute(_EPOCH).fetchone()
            if epoch != self._epoch:
                self._start_over(connection, epoch)
            now = since_boot() / 1_000_000
            retries = limit if retries is None else min(retries, limit)
            if retries:
                most = retries + len(self._due)
                when = {"format": FORMAT, "now": now, "latest": now + 2 * LONGEST_DELAY, "most": most}
                self._take_ready(connection.execute(_DUE, when), taken, retries, delayed=True)
            while self._again and not self._is_enough(taken, limit):
                self._take_of_key(connection, self._again.popleft(), taken, limit)
            (last,) = connection.execute(_LAST).fetchone()
            before = -1
            while not self._is_enough(taken, limit) and before != self._position and not self._far:
                before = self._position
                self._take_ready(connection.execute(_READY, (before, limit)), taken, limit, delayed=False)
            if before == self._position:  # no further row up to ``last``, as read before the loop, is ready
                self._position = max(before, last)
        except Exception as error:
            self._release([*taken.rows, *(one.row for one in taken.damaged)])
            self._epoch = -1  # a row may be passed over or hold others without a note: start over
            if not isinstance(error, (sqlite3.Error, OSError)):
                raise
            self._disconnect()
            raise outbox_error(error, self._path, "reading") from error
        return taken

    def decided(self, settlements: Sequence[RowSettlement]) -> None:
        """Hold the later rows of a key after a row is delayed or set aside."""
        for settlement in settlements:
            row, key, outcome = settlement.row, settlement.row.ordering_key, settlement.outcome
            if outcome in (RowOutcome.LATER, RowOutcome.SET_ASIDE):
                self._unwritten[row.id] = key
            if key is None or outcome is RowOutcome.CONFIRMED:
                continue
            if outcome is not RowOutcome.BACK or row.id in self._due:  # a due row that goes back is still delayed
                self._hold(key, row.id)
            else:
                self._pass(self._keys[key], row.id)

    def written(self, settlements: Sequence[RowSettlement]) -> None:
        for settlement in settlements:
            row, outcome = settlement.row, settlement.outcome
            self._taken.discard(row.id)
            self._due.discard(row.id)
            self._unwritten.pop(row.id, None)
            if outcome is RowOutcome.SET_ASIDE and row.id in self._overlooked:
                self._epoch = -1  # an operator may have put it back or deleted it before that start
            if row.ordering_key is not None:
                key = self._keys[row.ordering_key]
                key.taken -= 1
                self._go_on(row.ordering_key, key)
            elif outcome is RowOutcome.BACK:
                self._position = min(self._position, row.id - 1)

    def keep(self) -> None:
        """Do nothing: the lock lasts until ``close`` or the end of the process."""

    def close(self) -> None:
        """Release the lock."""
        _open_claims.discard(self)
        with self._calling:
            self._disconnect()
        self.unlock()

    def unlock(self) -> None:
        """Close the lock's file, in a forked child so that the lock ends with the parent."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None

    # Private

    def _reader(self) -> sqlite3.Connection | None:
        """Return the connection for reading, or None if another process is the relay."""
        if self._lock is not None and not self._is_lock_file(self._lock):
            logger.error("the lock %s was deleted or replaced: another relay may have taken rows", self._lock_path)
            self.unlock()
            self._disconnect()
            self._doubtful = -1
            self._epoch = -1  # another relay may have delayed rows or set them aside
        if self._lock is None and not self._become_relay():
            return None
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    @property
    def _lock_path(self) -> str:
        return f"{self._file.real}-relay"

    def _become_relay(self) -> bool:
        descriptor = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_lock_file(descriptor):  # nobody deleted it in the meantime
                self._lock = descriptor
        except BlockingIOError:
            pass
        finally:
            if self._lock is None:
                os.close(descriptor)
        return self._lock is not None

    def _is_lock_file(self, descriptor: int) -> bool:
        try:
            named = os.stat(self._lock_path)  # noqa: PTH116  # a Path for every take
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))

    def _connect(self) -> sqlite3.Connection:
        self._open_outbox()  # opening notes the log, which closing may have removed
        self._file.check()
        connection = self._file.connect(self._timeout)
        try:
            if self._doubtful < 0:
                (self._doubtful,) = connection.execute(_LAST).fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _start_over(self, connection: sqlite3.Connection, epoch: int) -> None:
        """Start from the first row: rows that held others may be deleted or put back."""
        self._held = {}
        for number, key in connection.execute(_HELD, (FORMAT,)):
            if number not in self._due:
                self._hold(key, number)
        for number, key in self._unwritten.items():
            if key is not None:
                self._hold(key, number)
        self._overlooked = set(self._unwritten)
        self._position = 0
        self._epoch = epoch

    def _take_ready(self, cursor: sqlite3.Cursor, taken: RowBatch, limit: int, *, delayed: bool) -> None:
        with closing(cursor):
            for number, *values in cursor:
                if not delayed:
                    self._position = number
                if number in self._taken:
                    continue
                if not delayed and not self._is_free(number, values[_KEY]):
                    self._walked += 1
                    body = values[_BODY]
                    self._walked_bytes += len(body) if isinstance(body, (bytes, str)) else 0
                    if self._far:
                        return
                    continue
                row = self._read(number, values, taken)
                if row is None:
                    continue
                if delayed:
                    self._due.add(number)
                    if row.ordering_key is not None:
                        # The later rows of its key were passed over or released.
                        self._let_go(row.ordering_key, number)
                        self._keys.setdefault(row.ordering_key, _Key()).passed = number + 1
                self._add(row, taken)
                if self._is_enough(taken, limit):
                    return

    def _take_of_key(self, connection: sqlite3.Connection, name: str, taken: RowBatch, limit: int) -> None:
        key = self._keys.get(name)
        if key is None or key.taken or key.passed is None:
            return
        first, key.passed = key.passed, None
        more = False
        with closing(connection.execute(_OF_A_KEY, (name, first, self._position, _ROWS_PER_KEY))) as cursor:
            for count, (number, *values) in enumerate(cursor, 1):
                if self._is_held(name, number):
                    break
                row = None if number in self._taken else self._read(number, values, taken)
                first = number + 1
                if row is not None:
                    self._add(row, taken)
                more = count == _ROWS_PER_KEY or self._is_enough(taken, limit)
                if more:
                    break
        if more:
            key.passed = first
        self._go_on(name, key)

    def _read(self, number: int, values: Sequence[Any], taken: RowBatch) -> OutboxRow | None:
        try:
            return row_from(number, values, in_doubt=number <= self._doubtful)
        except UnreadableRow as error:
            key = values[_KEY]
            key = key if isinstance(key, str) else None
            if key is not None:
                self._hold(key, number)
            if not error.newer:
                row = damaged_row(number, values, key=key)
                if key is not None:
                    self._keys.setdefault(key, _Key()).taken += 1
                self._taken.add(number)
                taken.damaged.append(RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, str(error)))
            elif not self._unreadable_logged:
                self._unreadable_logged = True
                logger.error("outbox %s: %s", self._path, error)  # noqa: TRY400  # nothing broke here
            return None

    @property
    def _far(self) -> bool:
        """Whether this take has passed over as many rows as it may."""
        return self._walked >= _ROWS_PASSED or self._walked_bytes >= _BYTES_PASSED

    def _is_enough(self, taken: RowBatch, limit: int) -> bool:
        return len(taken.rows) >= limit or self._size >= _BYTES_PER_TAKE

    def _is_free(self, number: int, name: object) -> bool:
        if not isinstance(name, str):  # the row has no key, or a damaged one
            return True
        if self._is_held(name, number):
            return False
        key = self._keys.get(name)
        if key is None:
            return True
        if key.passed is None and key.taken < _ROWS_PER_KEY:
            return True
        self._pass(key, number)
        return False

    def _hold(self, name: str, number: int) -> None:
        self._held.setdefault(name, set()).add(number)

    def _let_go(self, name: str, number: int) -> None:
        numbers = self._held.get(name, set())  # an earlier relay may write an outcome after this one began
        numbers.discard(number)
        if not numbers:
            self._held.pop(name, None)

    def _is_held(self, name: str, number: int) -> bool:
        """Return whether an earlier row of its key holds the row."""
        return name in self._held and min(self._held[name]) < number

    @staticmethod
    def _pass(key: _Key, number: int) -> None:
        key.passed = number if key.passed is None else min(key.passed, number)

    def _add(self, row: OutboxRow, taken: RowBatch) -> None:
        if row.ordering_key is not None:
            self._keys.setdefault(row.ordering_key, _Key()).taken += 1
        self._taken.add(row.id)
        self._size += len(row.message.body)
        taken.rows.append(row)

    def _go_on(self, name: str, key: _Key) -> None:
        """Let the rows that were passed over be taken, once no row of the key is."""
        if key.taken > 0:
            return
        if key.passed is None or self._is_held(name, key.passed):
            del self._keys[name]
        else:
            self._again.append(name)

    def _release(self, rows: Iterable[OutboxRow]) -> None:
        settlements = [RowSettlement(row, RowOutcome.BACK) for row in rows]
        self.decided(settlements)
        self.written(settlements)


# In a forked child, the locks belong to the parent.
_open_claims = each_at_fork(ForkStage.RELEASE, SQLiteRowLeases.unlock)
