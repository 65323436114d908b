"""The work of the SQLAlchemy stores on a connection, for both APIs.

Nothing here waits with a limit: the stores call it on a thread or a task that they can give up.

Invariants:

- the statements of a call are executed once, and again at once if their connection broke (for example after a restart
  of the server) or a conflict with other transactions rolled them back;
- a handler's transaction is committed only together with the record that its deliveries are done, and only while the
  handler still has their claims;
- a forked child uses no connection of its parent's pool, and closes none: the driver may tell the server to end the
  session.
"""

from __future__ import annotations

import sqlite3
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.generators import drive
from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.sqlalchemy import (
    AUTOCOMMIT,
    CONFLICTS,
    cancellable,
    error_code,
    is_in_memory,
    refuse_autocommit,
    refuse_connection_in_autocommit,
    refuse_shared_connection,
    refuse_unencoded_password,
    transaction_at,
)
from reliable_mq.core.idempotency import CommitStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError, UsageError
from reliable_mq.stores.base import Queries, held_by
from reliable_mq.stores.sql import MySQL, PostgreSQL, Query, SQLite, SQLStoreBase, Steps, checked_table
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from weakref import WeakSet

    from sqlalchemy import Connection, Pool, TextClause
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session, SessionTransaction

    from reliable_mq._util.threads import CancelHandle
    from reliable_mq._util.validation import Duration
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.idempotency import InboxClaim
    from reliable_mq.stores.sql import Transaction

logger = get_logger(__name__)

T = TypeVar("T")
ATTEMPTS: Final = 10  # at a transaction that conflicts with others

_DIALECTS: Final = {"mariadb": MySQL, "mysql": MySQL, "postgresql": PostgreSQL, "sqlite": SQLite}
# Errors if another transaction creates the table or the index at the same time, despite IF NOT EXISTS. PostgreSQL
# refuses all transactions but one. MariaDB and MySQL report that the table exists or is being changed.
_CREATED_MEANWHILE: Final = frozenset({"23505", "42710", "42P07", 1050, 1684})
_SQLITE_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_SCHEMA})


class SQLAlchemyBase(SQLStoreBase):
    """The parts without waiting: the choice of SQL, work on a connection, errors."""

    def __init__(self, engine: Engine | AsyncEngine, retention: Duration, timeout: Duration, table: str) -> None:
        dialect = _DIALECTS.get(engine.dialect.name)
        if dialect is None:
            raise ConfigurationError(f"engine is of {engine.dialect.name}: use PostgreSQL, MariaDB, MySQL or SQLite")
        if is_in_memory(engine):
            raise ConfigurationError("engine is of a database in memory; use MemoryStore, or a file")
        refuse_unencoded_password(engine)
        refuse_autocommit(engine, "no transaction of a handler would be one")
        refuse_shared_connection(engine, "a claim would commit the transaction of a handler")
        super().__init__(dialect(checked_table(table)), retention, timeout)
        self._sync_engine = engine if isinstance(engine, Engine) else engine.sync_engine
        self._where = redacted(engine.url.render_as_string(hide_password=False))
        self._base = None if isinstance(self._sql, SQLite) else 0  # of a SQLite file's clock; not known yet
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._where}>"

    @property
    def ddl(self) -> tuple[str, ...]:
        """The SQL statements that create the table, for your own migration."""
        return self._sql.ddl

    def _query(
        self, steps: Callable[..., Steps[T]], deadline: float | None = None, *, durable: bool = False
    ) -> Queries[T]:
        if self._is_forked and isinstance(self._sql, SQLite):
            raise IdempotencyStoreError(
                f"{self!r} was made before a fork, which SQLite's locks do not survive: start another process, or use "
                "SQLiteStore, which closes the file for a fork"
            )
        deadline = deadline or time.monotonic() + self._timeout
        try:
            for attempt in range(ATTEMPTS):
                try:
                    return (yield from super()._query(steps, deadline, durable=durable))
                except Exception as error:
                    if not _worth_repeating(error, attempt):
                        raise
            raise TimeoutError(f"each of {ATTEMPTS} attempts conflicted with another transaction")  # noqa: TRY301
        except IdempotencyStoreError:
            raise
        except Exception as error:  # any error of the driver
            raise self._failed(error) from error

    def _execute(self, connection: Connection, query: Transaction) -> Any:
        """Execute the statements of a query. A single statement costs one round trip."""
        level = None if self._sql.transactional or self._base is None else AUTOCOMMIT
        with transaction_at(connection, level):
            result, base = _execute_steps(self._timed(query.steps), connection)
        self._base = base  # only after the commit: after a rollback, another process may store another base
        return result

    def _timed(self, steps: Callable[..., Steps[T]]) -> Steps[tuple[T, int]]:
        """Run steps with the time if the database has no clock; also return its base."""
        if not isinstance(self._sql, SQLite):
            return (yield from steps(now=0)), 0
        base = self._base
        if base is None:
            yield from self._sql.lock()
            base = yield from self._sql.clock_base(*boot(), since_boot())
        return (yield from steps(now=base + since_boot())), base

    def _create_in(self, connection: Connection) -> None:
        for statement in self.ddl:
            connection.execute(text(statement))

    def _failed(self, error: BaseException) -> IdempotencyStoreError:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        said = " ".join(str(cause).split())
        hint = ""
        if self._sql.table in said and any(words in said for words in ("no such table", "not exist", "n't exist")):
            hint = "; create it with create_table(), or by the statements in ddl"
        return IdempotencyStoreError(f"{self!r} failed: {type(cause).__name__}: {said[:500]}{hint}")

    def _log_failed_rollback(self, error: Exception) -> None:
        """Log the error. The database rolls back by itself when the connection is gone."""
        said = error if isinstance(error, IdempotencyStoreError) else self._failed(error)
        logger.warning("failed to roll back a transaction: %s", said)

    def _begin_in(self, session: Session, handle: CancelHandle) -> tuple[SessionTransaction, Connection]:
        """Begin the transaction of a session. The handle can cancel the call."""
        transaction = session.begin()
        connection = session.connection()
        with cancellable(connection, handle):
            self._check_transaction(connection)
        return transaction, connection

    def _commit_in(
        self,
        session: Session,
        transaction: SessionTransaction,
        connection: Connection,
        inbox_claims: Sequence[InboxClaim],
    ) -> None:
        """Commit a transaction with the record that its deliveries are done.

        Raises:
            UsageError: If the handler has already ended the transaction.
        """
        if not transaction.is_active:
            raise UsageError(
                "the handler has ended the transaction itself: leave the commit to the end of the block, and raise for "
                "a rollback"
            )
        session.flush()
        self._complete_in(connection, inbox_claims)
        mark(inbox_claims, CommitStatus.UNKNOWN)
        transaction.commit()

    def _check_and_complete_in(self, connection: Connection, inbox_claims: Sequence[InboxClaim]) -> None:
        """Complete the claims of deliveries in the user's transaction."""
        self._check_transaction(connection)
        self._complete_in(connection, inbox_claims)

    def _check_transaction(self, connection: Connection) -> None:
        """Check that a connection is in a transaction. For SQLite, lock the database.

        Raises:
            ConfigurationError: If the connection is in autocommit mode, which commits each statement separately.
        """
        if isinstance(self._sql, SQLite):
            _execute_steps(self._sql.lock(), connection)
        refuse_connection_in_autocommit(connection, begun=True)

    def _complete_in(self, connection: Connection, inbox_claims: Sequence[InboxClaim]) -> None:
        """Complete the claims of deliveries in a transaction.

        A claim that is already done is accepted only if the handler has seen that commit, or if this same transaction
        made it done. Otherwise an earlier transaction, whose commit had no reply, has the handler's effect already.

        Raises:
            IdempotencyStoreError: If another holder has taken over, or an earlier transaction of the handler may be
                committed. The transaction must not be committed.
        """
        current = connection.get_transaction()
        for again in (True, False):
            some = [one for one in inbox_claims if _may_complete_again(one, current) is again]
            if not (held := held_by(one.claim for one in some)):
                continue
            completed, _ = _execute_steps(self._timed(self._completing(held, again=again)), connection)
            stale = ", ".join([one[0] for one in held if one not in completed][:10])
            if stale and any(one.commit is CommitStatus.UNKNOWN for one in some):
                raise IdempotencyStoreError(
                    "nothing is committed: an earlier transaction of this handler may be committed, or another holder "
                    f"has taken over {stale}"
                )
            if stale:
                raise IdempotencyStoreError(
                    f"nothing is committed: another holder has taken over {stale}, whose lease has ended"
                )
        for one in inbox_claims:
            one.recorded_in = connection.get_transaction()

    def _start_in_child(self) -> None:
        """Replace the pool of the engine in a forked child."""
        _pools_of_parent.append(self._sync_engine.pool)
        self._sync_engine.dispose(close=False)


_stores: WeakSet[SQLAlchemyBase] = each_at_fork(ForkStage.RENEW, lambda store: store._start_in_child())  # noqa: SLF001
_pools_of_parent: Final[list[Pool]] = []  # kept, because drivers close connections that nothing refers to


def _worth_repeating(error: Exception, attempt: int) -> bool:
    """Return whether to repeat a transaction.

    It is repeated once after a lost connection, and several times after conflicts with other transactions.
    """
    if error_code(error) in CONFLICTS:
        return True
    if attempt or isinstance(error, TimeoutError | IdempotencyStoreError):
        return False
    # SQLAlchemy does not wrap a driver's error while it takes a connection from the pool.
    return error.connection_invalidated if isinstance(error, DBAPIError) else not isinstance(error, SQLAlchemyError)


def worth_creating_again(error: DBAPIError, attempt: int) -> bool:
    """Return whether to try again, because others create the table at the same time."""
    if attempt == ATTEMPTS - 1:
        return False
    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY  # without the bits of the extended code
    return busy or error_code(error) in _CREATED_MEANWHILE or _worth_repeating(error, attempt)


def inbox_claims_of(deliveries: Sequence[Delivery]) -> list[InboxClaim]:
    inbox_claims = [delivery.inbox_claim for delivery in deliveries if delivery.inbox_claim is not None]
    if not deliveries or len(inbox_claims) < len(deliveries):
        raise UsageError("an inbox needs deliveries of a consumer with this store, while they are handled")
    return inbox_claims


def _may_complete_again(one: InboxClaim, current: object) -> bool:
    """Return whether the current transaction may complete a claim that is done."""
    return one.commit is CommitStatus.DONE or (current is not None and one.recorded_in is current)


def mark(inbox_claims: Iterable[InboxClaim], commit: CommitStatus) -> None:
    """Note the commit status of the transaction that completes these claims."""
    for one in inbox_claims:
        one.commit = commit


def _execute_steps(steps: Steps[T], connection: Connection) -> T:
    def execute(query: Query) -> Sequence[Any]:
        result = connection.execute(_statement(query.sql), query.parameters)
        return result.all() if result.returns_rows else ()

    return drive(steps, execute)


@lru_cache(maxsize=256)
def _statement(sql: str) -> TextClause:
    return text(sql)
