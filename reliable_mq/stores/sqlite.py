"""An idempotency store in a file, for the processes of one machine: nothing to install, and it survives them all.

Invariants: what was completed is on the disk when `complete_many` returns; a claim is safe from the death of any
process, though not from that of the machine, which ends what its holder did as well; a question waits for others no
longer than the timeout; a connection is never used by a process that did not make it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.validation import Duration, file_path, seconds
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores.keys import (
    DAY,
    PurgePace,
    UnansweredClaims,
    claims_in_order,
    held_by,
    microseconds,
    stored_key,
    taken_in_order,
    unique,
)
from reliable_mq.stores.sql import SQLite, checked_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.core.idempotency import Claim
    from reliable_mq.stores.sql import Steps

__all__ = ["SQLiteStore"]

T = TypeVar("T")
_PURGED_TOGETHER: Final = 500  # rows
_ATTEMPTS_AT_WAL: Final = 50  # to change the journal of a new file, which does not wait for others by itself


class SQLiteStore:
    """Deduplicates among all processes of this machine that use the file. Thread-safe; safe across processes and forks.

    Connects at the first question. The file must be on a local disk: SQLite's locks do not work over networks.

    Args:
        path: of the file, which is created where it is not there; it may have other tables. In memory, there is
            ``MemoryStore``.
        retention: seconds for which a done key is remembered at least, and the failures of one that is not.
        timeout: seconds that a question waits for others, at most.
        table: the name of the table.

    Raises:
        ConfigurationError: the path is no file, or another argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        table: str = "reliable_mq_claims",
    ) -> None:
        self._path = file_path(path)
        self._retention = microseconds(seconds("retention", retention, positive=True))
        self._timeout = seconds("timeout", timeout, positive=True)
        self._sql = SQLite(checked_table(table))
        self._doubts = UnansweredClaims()
        self._pace = PurgePace()
        self._made_in = os.getpid()
        self._lock = threading.Lock()  # for all below
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[sqlite3.Connection | None] = []  # of parent processes, not to be touched
        self._base = 0

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`.

        Raises:
            IdempotencyStoreError: the file cannot be read or written, or was locked for the whole timeout.
        """
        if not keys:
            return []
        stored = unique(keys)
        holders = self._doubts.holders(stored.values())

        def steps(now: int) -> Steps[list[Claim]]:
            answers = yield from self._sql.claim(holders, lease=microseconds(lease), retention=self._retention, now=now)
            if limit := self._pace.claimed(len(holders)):
                self._pace.purged((yield from self._sql.purge(limit, now=now)), limit)
            return claims_in_order(keys, {key: answers[name].claim(key) for key, name in stored.items()})

        try:
            return self._run(steps, durable=False)
        except BaseException:
            self._doubts.unanswered(holders)
            raise

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        if not held:
            return []
        return taken_in_order(
            claims, self._run(lambda now: self._sql.complete(held, retention=self._retention, now=now), durable=True)
        )

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        if not held:
            return []

        def steps(now: int) -> Steps[set[tuple[str, int]]]:
            return self._sql.release(held, failed=failed, retention=self._retention, now=now)

        return taken_in_order(claims, self._run(steps, durable=False))

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `ResettableStore.reset_many`. Errors as for `claim_many`."""
        if not keys:
            return []
        found = self._run(lambda now: self._sql.reset(list(unique(keys).values()), now=now), durable=True)
        return [stored_key(key) in found for key in keys]

    def purge(self) -> int:
        """Delete what is over; claims do so by and by, too. Returns how many rows. Errors as for `claim_many`."""
        total = 0
        while True:
            count = self._run(lambda now: self._sql.purge(_PURGED_TOGETHER, now=now), durable=False)
            total += count
            if count < _PURGED_TOGETHER:
                return total

    def close(self) -> None:
        """Close the file. Another question opens it again."""
        with self._lock:
            if self._connection is not None and os.getpid() == self._made_in:
                self._connection.close()
                self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SQLiteStore {str(self._path)!r}>"

    def _run(self, steps: Callable[[int], Steps[T]], *, durable: bool) -> T:
        """Ask in a transaction. ``durable``: it is on the disk afterwards."""
        if os.getpid() != self._made_in:
            self._begin_anew()
        deadline = time.monotonic() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            raise IdempotencyStoreError(f"{self!r} was busy for {self._timeout:g} s")
        try:
            connection = self._connection or self._connect()
            left = max(deadline - time.monotonic(), 0.001)
            connection.execute(f"PRAGMA busy_timeout = {int(left * 1000)}")
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                answer = _carried_out(steps(self._base + since_boot()), connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up_connection()
            raise IdempotencyStoreError(f"{self!r} failed: {error}") from error
        finally:
            self._lock.release()
        return answer

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        try:
            _use_wal(connection, self._timeout)
            for statement in self._sql.ddl:
                connection.execute(statement)
            self._base = _carried_out(self._sql.clock_base(*boot(), since_boot()), connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _give_up_connection(self) -> None:
        """After an error the next question begins with a new one: a file that was replaced or repaired is seen."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _begin_anew(self) -> None:
        """In a forked child: the lock may be held for ever, and the connection is the parent's."""
        self._inherited.append(self._connection)
        self._connection = None
        self._lock = threading.Lock()
        self._made_in = os.getpid()


def _carried_out(steps: Steps[T], connection: sqlite3.Connection) -> T:
    try:
        ask = next(steps)
        while True:
            ask = steps.send(connection.execute(ask.sql, ask.parameters).fetchall())
    except StopIteration as stop:
        answer: T = stop.value
        return answer


def _use_wal(connection: sqlite3.Connection, timeout: float) -> None:
    """Change the journal. Several who do so at once see it locked, whatever the busy timeout."""
    for attempt in range(_ATTEMPTS_AT_WAL):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == _ATTEMPTS_AT_WAL - 1:
                raise
            threading.Event().wait(timeout / _ATTEMPTS_AT_WAL)
        else:
            return
