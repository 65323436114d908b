"""Idempotency stores in an SQL database, through SQLAlchemy.

Effects that are rows of that database happen exactly once.

Invariants:

- a call, and the beginning and the end of a handler's transaction, take at most the timeout each;
- the asyncio store never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from reliable_mq._util.generators import drive
from reliable_mq._util.sqlalchemy import cancellable, is_of_read_only_server, refuse_asyncio_driver
from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq.core.idempotency import CommitStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.base import DAY, AsyncStore, SyncStore
from reliable_mq.stores.sqlalchemy_base import ATTEMPTS, SQLAlchemyBase, inbox_claims_of, mark, worth_creating_again

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

    from sqlalchemy.orm import SessionTransaction

    from reliable_mq._util.validation import Duration
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.idempotency import InboxClaim
    from reliable_mq.stores.sql import Transaction

T = TypeVar("T")
_GRACE: Final = 1.0  # seconds for a statement to end before its user rolls back on the same connection


def _check_maker(session: object, kind: str, other: type) -> None:
    refused = (scoped_session, async_scoped_session, other)
    if session is not None and (not callable(session) or isinstance(session, refused)):
        raise ConfigurationError(f"session must be {kind} or None, not {session!r}")


def _check_session(session: object, names: str, *kinds: type) -> None:
    if not isinstance(session, kinds):
        raise ConfigurationError(f"session must be {names}, not {type(session).__name__}")


class SQLAlchemyStore(SQLAlchemyBase, SyncStore):
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
        refuse_asyncio_driver(engine)
        super().__init__(engine, retention, timeout, table)
        _check_maker(session, "a sessionmaker", async_sessionmaker)
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
        for attempt in range(ATTEMPTS):
            try:
                with self._engine.begin() as connection:
                    self._create_in(connection)
            except DBAPIError as error:
                if not worth_creating_again(error, attempt):
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
        inbox_claims = inbox_claims_of(deliveries)
        session, transaction, connection = self._begin_in_time()
        try:
            yield session
            with self._in_time(connection):
                self._commit_in(session, transaction, connection, inbox_claims)
        except BaseException as error:
            self._roll_back(session, connection, error)
            raise
        mark(inbox_claims, CommitStatus.DONE)
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
            ConfigurationError: If the connection is in autocommit mode, or ``session`` is of asyncio.
            UsageError: If the deliveries are not being handled by a consumer with this store.
        """
        _check_session(session, "a Session or a Connection", Session, scoped_session, Connection)
        inbox_claims = inbox_claims_of(deliveries)
        connection = session if isinstance(session, Connection) else session.connection()
        with self._in_time(connection):
            self._check_and_complete_in(connection, inbox_claims)
        mark(inbox_claims, CommitStatus.UNKNOWN)

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


class AsyncSQLAlchemyStore(SQLAlchemyBase, AsyncStore):
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
        _check_maker(session, "an async_sessionmaker", sessionmaker)
        self._engine = engine
        self._session = session
        self._given_up: set[asyncio.Future[Any]] = set()

    async def create_table(self) -> None:
        """Create the table if it does not exist; see `SQLAlchemyStore.create_table`."""
        for attempt in range(ATTEMPTS):
            try:
                async with self._engine.begin() as connection:
                    await connection.run_sync(self._create_in)
            except DBAPIError as error:
                if not worth_creating_again(error, attempt):
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
        inbox_claims = inbox_claims_of(deliveries)
        session, transaction, connection = await self._begin_in_time()
        try:
            yield session
        except BaseException as error:
            await self._roll_back_in_time(session, error)
            raise
        await self._in_time(self._commit(session, transaction, connection, inbox_claims))
        mark(inbox_claims, CommitStatus.DONE)

    async def inbox(self, session: AsyncSession | AsyncConnection, *deliveries: Delivery) -> None:
        """Mark deliveries as done in your own transaction; see `SQLAlchemyStore.inbox`."""
        _check_session(
            session, "an AsyncSession or an AsyncConnection", AsyncSession, async_scoped_session, AsyncConnection
        )
        inbox_claims = inbox_claims_of(deliveries)
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        await self._in_time(connection.run_sync(self._check_and_complete_in, inbox_claims), grace=_GRACE)
        mark(inbox_claims, CommitStatus.UNKNOWN)

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

    def _start_in_child(self) -> None:
        super()._start_in_child()
        self._loop = None
