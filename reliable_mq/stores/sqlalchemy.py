"""Idempotency stores in an SQL database, through SQLAlchemy.

Effects that are rows of that database happen exactly once.

Invariants:

- the statements of a call are executed once, and again at once if their connection broke (for example after a restart
  of the server) or a conflict with other transactions rolled them back;
- a handler's transaction is committed only together with the record that its deliveries are done, and only while the
  handler still has their claims;
- a call, and the beginning and the end of a handler's transaction, take at most the timeout each;
- the asyncio store never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.generators import drive
from reliable_mq._util.logs import get_logger
from reliable_mq._util.sqlalchemy import (
    AUTOCOMMIT,
    CONFLICTS,
    cancellable,
    error_code,
    is_in_memory,
    is_of_read_only_server,
    refuse_autocommit,
    refuse_connection_in_autocommit,
    refuse_shared_connection,
    transaction_at,
)
from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq.core.idempotency import CommitStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError, UsageError
from reliable_mq.stores.base import DAY, AsyncStore, Queries, SyncStore, held_by
from reliable_mq.stores.sql import MySQL, PostgreSQL, Query, SQLite, SQLStoreBase, Steps, checked_table
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import SessionTransaction, sessionmaker

    from reliable_mq._util.validation import Duration
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.idempotency import InboxClaim
    from reliable_mq.stores.sql import Transaction

__all__ = ["AsyncSQLAlchemyStore", "SQLAlchemyStore"]

logger = get_logger(__name__)

T = TypeVar("T")
_DIALECTS: Final = {"mariadb": MySQL, "mysql": MySQL, "postgresql": PostgreSQL, "sqlite": SQLite}
_ATTEMPTS: Final = 10  # at a transaction that conflicts with others
_GRACE: Final = 1.0  # seconds for a statement to end before its user rolls back on the same connection
# Errors if another transaction creates the table or the index at the same time, despite IF NOT EXISTS. PostgreSQL
# refuses all transactions but one. MariaDB and MySQL report that the table exists or is being changed.
_CREATED_MEANWHILE: Final = frozenset({"23505", "42710", "42P07", 1050, 1684})
_SQLITE_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_SCHEMA})


class _SQLAlchemyBase(SQLStoreBase):
    """The parts without waiting: the choice of SQL, work on a connection, errors."""

    def __init__(self, engine: Engine | AsyncEngine, retention: Duration, timeout: Duration, table: str) -> None:
        dialect = _DIALECTS.get(engine.dialect.name)
        if dialect is None:
            raise ConfigurationError(f"engine is of {engine.dialect.name}: use PostgreSQL, MariaDB, MySQL or SQLite")
        if is_in_memory(engine):
            raise ConfigurationError("engine is of a database in memory; use MemoryStore, or a file")
        if "@" in (engine.url.host or ""):  # a part of the password, which the driver would show
            raise ConfigurationError("engine has a URL whose password holds an '@': percent-encode it (%40)")
        refuse_autocommit(engine, "no transaction of a handler would be one")
        refuse_shared_connection(engine, "a claim would commit the transaction of a handler")
        super().__init__(dialect(checked_table(table)), retention, timeout)
        self._where = redacted(engine.url.render_as_string(hide_password=False))
        self._base = None if isinstance(self._sql, SQLite) else 0  # of a SQLite file's clock; not known yet

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._where}>"

    @property
    def ddl(self) -> tuple[str, ...]:
        """The SQL statements that create the table, for your own migration."""
        return self._sql.ddl

    def _query(
        self, steps: Callable[..., Steps[T]], deadline: float | None = None, *, durable: bool = False
    ) -> Queries[T]:
        deadline = deadline or time.monotonic() + self._timeout
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    return (yield from super()._query(steps, deadline, durable=durable))
                except Exception as error:
                    if not _worth_repeating(error, attempt):
                        raise
            raise TimeoutError(f"each of {_ATTEMPTS} attempts conflicted with another transaction")  # noqa: TRY301
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
        _mark(inbox_claims, CommitStatus.UNKNOWN)
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


def _check_maker(session: object, kind: str) -> None:
    if session is not None and (not callable(session) or isinstance(session, scoped_session | async_scoped_session)):
        raise ConfigurationError(f"session must be {kind} or None, not {session!r}")


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


def _worth_creating_again(error: DBAPIError, attempt: int) -> bool:
    """Return whether to try again, because others create the table at the same time."""
    if attempt == _ATTEMPTS - 1:
        return False
    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY  # without the bits of the extended code
    return busy or error_code(error) in _CREATED_MEANWHILE or _worth_repeating(error, attempt)


def _inbox_claims_of(deliveries: Sequence[Delivery]) -> list[InboxClaim]:
    inbox_claims = [delivery.inbox_claim for delivery in deliveries if delivery.inbox_claim is not None]
    if not deliveries or len(inbox_claims) < len(deliveries):
        raise UsageError("an inbox needs deliveries of a consumer with this store, while they are handled")
    return inbox_claims


def _may_complete_again(one: InboxClaim, current: object) -> bool:
    """Return whether the current transaction may complete a claim that is done."""
    return one.commit is CommitStatus.DONE or (current is not None and one.recorded_in is current)


def _mark(inbox_claims: Iterable[InboxClaim], commit: CommitStatus) -> None:
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


class SQLAlchemyStore(_SQLAlchemyBase, SyncStore):
    """An idempotency store for all processes that use the same database.

    Thread-safe. A handler can write its own rows in the same transaction as the record that its delivery is done.
    Requires PostgreSQL 12, MariaDB 10.5, MySQL 8 or SQLite 3.35, or newer. The table must exist: see `create_table`,
    `ddl`.

    Args:
        engine: An engine of SQLAlchemy 2. Its pool should have a connection for each worker of the consumer.
        retention: The minimum time for which done keys, and the failed attempts of other keys, are remembered, in
            seconds.
        timeout: The time within which a call ends, including repetitions, in seconds. A SQLite file has no server: a
            call waits for other calls up to the busy timeout of the engine (``connect_args``).
        table: The name of the table, with or without its schema.
        session: A function that makes a new session for each `transaction`, instead of ``Session(engine)``.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        table: str = "reliable_mq_claims",
        session: sessionmaker[Session] | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigurationError(f"engine must come from create_engine(), not be {type(engine).__name__}")
        super().__init__(engine, retention, timeout, table)
        _check_maker(session, "a sessionmaker")
        self._engine = engine
        self._session = session
        # SQLite limits its waiting itself, and has no server that could hang.
        self._executor = None if engine.dialect.name == "sqlite" else DaemonExecutor("reliable-mq-store")

    def create_table(self) -> None:
        """Create the table if it does not exist. Blocks for as long as the driver does.

        Any number of processes may call this at the same time.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: If the database cannot be reached or refuses.
        """
        for attempt in range(_ATTEMPTS):
            try:
                with self._engine.begin() as connection:
                    self._create_in(connection)
            except DBAPIError as error:
                if not _worth_creating_again(error, attempt):
                    raise
            else:
                return

    def purge(self) -> int:
        """Delete expired rows and return their number. Claims also delete some."""
        return drive(self._purge(), self._send)

    @contextmanager
    def transaction(self, *deliveries: Delivery) -> Iterator[Session]:
        """Begin a transaction whose commit also marks deliveries as done.

        The transaction is committed at the end of the block. The timeout applies to its beginning, and again to its end
        (the session's flush, the record, COMMIT or ROLLBACK). Your own statements wait for a server that hangs as long
        as the driver does, so configure a timeout in the driver.

        Args:
            deliveries: The deliveries of the handler: one or, in a batch handler, several.

        Returns:
            A context manager of an ORM session. Without the ORM, use its ``execute`` and ``connection()``.

        Raises:
            IdempotencyStoreError: At the beginning, if there is no connection in time. At the end, if another holder
                has taken over, or an earlier transaction of the handler may be committed, and nothing was committed
                now; or if there was no reply in time. The consumer finds out whether the transaction was committed.
                It counts as an attempt only if the store then answers, and still has the claim.
            ConfigurationError: If the session's connection is in autocommit mode.
            UsageError: If the deliveries are not being handled by a consumer with this store, or the block has ended
                the transaction itself.
        """
        inbox_claims = _inbox_claims_of(deliveries)
        session, transaction, connection = self._begin_in_time()
        try:
            yield session
            with self._in_time(connection):
                self._commit_in(session, transaction, connection, inbox_claims)
        except BaseException as error:
            self._roll_back(session, connection, error)
            raise
        _mark(inbox_claims, CommitStatus.DONE)
        session.close()

    def inbox(self, session: Session | Connection, *deliveries: Delivery) -> None:
        """Mark deliveries as done in your own transaction.

        Call this last, because it locks their records. The timeout applies to this call, while your COMMIT or ROLLBACK
        waits as long as the driver does. If the transaction is rolled back, the handler must raise an error, too. If
        the handler raises after the commit, or the reply to COMMIT was lost, this does not count as an attempt, because
        the store has the record.

        Raises:
            IdempotencyStoreError: If another holder has taken over, if an earlier transaction that called this may be
                committed, or if there was no reply in time. Do not commit.
            ConfigurationError: If the connection is in autocommit mode.
            UsageError: If the deliveries are not being handled by a consumer with this store.
        """
        inbox_claims = _inbox_claims_of(deliveries)
        connection = session if isinstance(session, Connection) else session.connection()
        with self._in_time(connection):
            self._check_and_complete_in(connection, inbox_claims)
        _mark(inbox_claims, CommitStatus.UNKNOWN)

    def close(self) -> None:
        """End the threads. The next call starts new ones. The engine stays open."""
        if self._executor is not None:
            self._executor.close()

    def _begin_in_time(self) -> tuple[Session, SessionTransaction, Connection]:
        try:
            if self._executor is None:
                return self._begin(CancelHandle())
            context = copy_context()  # the handler's context, which events of the session may use
            return self._executor.call(lambda handle: context.run(self._begin, handle), self._timeout, beyond=True)
        except ConfigurationError:
            raise
        except Exception as error:  # any error of the driver
            raise self._failed(error) from error

    def _begin(self, handle: CancelHandle) -> tuple[Session, SessionTransaction, Connection]:
        session = Session(self._engine) if self._session is None else self._session()
        try:
            return session, *self._begin_in(session, handle)
        except BaseException:
            session.close()
            raise

    @contextmanager
    def _in_time(self, connection: Connection) -> Iterator[None]:
        """Cut the connection and raise an error if the block exceeds the timeout."""
        if self._executor is None or connection.closed or connection.invalidated:
            yield
            return
        handle: CancelHandle | None = None
        try:
            with self._executor.cutting(self._timeout) as handle, cancellable(connection, handle):
                yield
        except Exception as error:
            if handle is None or handle.is_cut:
                late = TimeoutError(f"no answer within {self._timeout:g} s")
                raise self._failed(error if handle is None else late) from error
            raise

    def _roll_back(self, session: Session, connection: Connection, reason: BaseException) -> None:
        try:
            with self._in_time(connection):
                (session.invalidate if is_of_read_only_server(reason) else session.close)()
        except Exception as error:  # noqa: BLE001 -- whatever the driver raises; the handler's own error matters more
            with suppress(Exception):
                session.invalidate()  # does not wait for the server, which then rolls back
            self._log_failed_rollback(error)

    def _send(self, query: Transaction) -> Any:
        if self._executor is None:
            return self._send_here(query, CancelHandle())
        left = max(query.deadline - time.monotonic(), 0.001)
        return self._executor.call(partial(self._send_here, query), left)

    def _send_here(self, query: Transaction, handle: CancelHandle) -> Any:
        with self._engine.connect() as connection, cancellable(connection, handle):
            return self._execute(connection, query)


class AsyncSQLAlchemyStore(_SQLAlchemyBase, AsyncStore):
    """An idempotency store like `SQLAlchemyStore`, for ``AsyncConsumer``.

    The arguments are the same, with an ``AsyncEngine``. A store belongs to one event loop.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        table: str = "reliable_mq_claims",
        session: async_sessionmaker[AsyncSession] | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(f"engine must come from create_async_engine(), not be {type(engine).__name__}")
        super().__init__(engine, retention, timeout, table)
        _check_maker(session, "an async_sessionmaker")
        self._engine = engine
        self._session = session
        self._given_up: set[asyncio.Future[Any]] = set()

    async def create_table(self) -> None:
        """Create the table if it does not exist; see `SQLAlchemyStore.create_table`."""
        for attempt in range(_ATTEMPTS):
            try:
                async with self._engine.begin() as connection:
                    await connection.run_sync(self._create_in)
            except DBAPIError as error:
                if not _worth_creating_again(error, attempt):
                    raise
            else:
                return

    async def purge(self) -> int:
        """Delete expired rows and return their number. Claims also delete some."""
        return await self._run(self._purge())

    @asynccontextmanager
    async def transaction(self, *deliveries: Delivery) -> AsyncIterator[AsyncSession]:
        """Begin a transaction whose commit also marks deliveries as done.

        See `SQLAlchemyStore.transaction`.
        """
        inbox_claims = _inbox_claims_of(deliveries)
        session, transaction, connection = await self._begin_in_time()
        try:
            yield session
        except BaseException as error:
            await self._roll_back_in_time(session, error)
            raise
        await self._in_time(self._commit(session, transaction, connection, inbox_claims))
        _mark(inbox_claims, CommitStatus.DONE)

    async def inbox(self, session: AsyncSession | AsyncConnection, *deliveries: Delivery) -> None:
        """Mark deliveries as done in your own transaction; see `SQLAlchemyStore.inbox`."""
        inbox_claims = _inbox_claims_of(deliveries)
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        await self._in_time(connection.run_sync(self._check_and_complete_in, inbox_claims), grace=_GRACE)
        _mark(inbox_claims, CommitStatus.UNKNOWN)

    async def _begin_in_time(self) -> tuple[AsyncSession, SessionTransaction, Connection]:
        beginning = asyncio.ensure_future(self._begin())
        try:
            return await self._in_time(beginning)
        except asyncio.CancelledError as error:
            if beginning.done() and not beginning.cancelled() and beginning.exception() is None:
                await self._roll_back_in_time(beginning.result()[0], error)  # it began at the cancellation
            raise
        except (ConfigurationError, IdempotencyStoreError):
            raise
        except Exception as error:  # any error of the driver
            raise self._failed(error) from error

    async def _begin(self) -> tuple[AsyncSession, SessionTransaction, Connection]:
        session = AsyncSession(self._engine) if self._session is None else self._session()
        try:
            return session, *(await session.run_sync(self._begin_in, CancelHandle()))
        except BaseException as error:
            await self._roll_back(session, error)
            raise

    async def _commit(
        self,
        session: AsyncSession,
        transaction: SessionTransaction,
        connection: Connection,
        inbox_claims: Sequence[InboxClaim],
    ) -> None:
        try:
            await session.run_sync(self._commit_in, transaction, connection, inbox_claims)
        except BaseException as error:  # rolled back here: no other task may use the session after a timeout
            await self._roll_back(session, error)
            raise
        await session.close()

    async def _roll_back_in_time(self, session: AsyncSession, reason: BaseException) -> None:
        try:
            await self._in_time(self._roll_back(session, reason))
        except IdempotencyStoreError as error:
            self._log_failed_rollback(error)

    async def _roll_back(self, session: AsyncSession, reason: BaseException) -> None:
        try:
            await (session.invalidate() if is_of_read_only_server(reason) else session.close())
        except Exception as error:  # noqa: BLE001 -- whatever the driver raises; the handler's own error matters more
            self._log_failed_rollback(error)

    async def _send(self, query: Transaction) -> Any:
        return await self._in_time(self._send_here(query), max(query.deadline - time.monotonic(), 0.001))

    async def _send_here(self, query: Transaction) -> Any:
        async with self._engine.connect() as connection:
            return await connection.run_sync(self._execute, query)

    async def _in_time(self, call: Awaitable[T], limit: float | None = None, grace: float = 0.0) -> T:
        """Await a call with a timeout, and its cancellation for up to ``grace`` seconds."""
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout if limit is None else limit)
            if not done:
                raise self._failed(TimeoutError(f"no answer within {self._timeout:g} s"))
        except (asyncio.CancelledError, IdempotencyStoreError):
            self._give_up(task)
            if grace:
                await asyncio.wait({task}, timeout=grace)
            raise
        return task.result()

    def _give_up(self, task: asyncio.Future[Any]) -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because nothing else awaits the task
