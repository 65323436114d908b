"""The idempotency store in an SQL database, by SQLAlchemy: effects that are rows there happen once and no more.

Invariants: a question is asked once, and again at once where its connection broke (after a restart of the server, say)
or a conflict with others ended it; it has its answer or its error within the timeout; a transaction of a handler is
committed only with the record that its deliveries are done, and only while their claims are its own; it begins and ends
within the timeout, on the thread of its handler.

What the stores in SQL databases have in common, whichever face asks.

The idempotency store in an SQL database for ``AsyncConsumer``, by SQLAlchemy's asyncio extension.

Invariants: as those of :mod:`reliable_mq.stores.sqlalchemy`; nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.sqlalchemy import AUTOCOMMIT, refuse_autocommit, refuse_connection_in_autocommit, transaction_at
from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.idempotency import CommitState
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError, UsageError
from reliable_mq.stores.keys import (
    DAY,
    ClaimAnswer,
    PurgePace,
    UnansweredClaims,
    claims_in_order,
    held_by,
    microseconds,
    stored_key,
    taken_in_order,
    the_one_loop,
    unique,
)
from reliable_mq.stores.sql import Dialect, Held, MySQL, PostgreSQL, SQLite, Steps, checked_table
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.ext.asyncio import AsyncSessionTransaction, async_sessionmaker
    from sqlalchemy.orm import SessionTransaction, sessionmaker

    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.idempotency import Claim, InboxClaim

__all__ = [
    "AGAIN_AT_MOST",
    "PURGED_TOGETHER",
    "AsyncSQLAlchemyStore",
    "SQLAlchemyStore",
    "SQLStoreBase",
    "mark",
    "still_open",
    "try_again",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DIALECTS: Final[dict[str, type[Dialect]]] = {
    "mariadb": MySQL,
    "mysql": MySQL,
    "postgresql": PostgreSQL,
    "sqlite": SQLite,
}
AGAIN_AT_MOST: Final = 10  # times
_CONFLICTS: Final = frozenset({"40001", "40P01", 1205, 1213, 1020})  # deadlocks and their like: the other one went on
PURGED_TOGETHER: Final = 500  # rows


class SQLStoreBase:
    """What both faces ask, and how they read the answers."""

    def __init__(self, engine: Engine | AsyncEngine, retention: Duration, timeout: Duration, table: str) -> None:
        dialect = _DIALECTS.get(engine.dialect.name)
        if dialect is None:
            raise ConfigurationError(
                f"engine is of {engine.dialect.name}, for which there is no store: use PostgreSQL, MariaDB, MySQL or "
                "SQLite"
            )
        if "@" in (engine.url.host or ""):  # which the driver would show
            raise ConfigurationError("engine has a URL whose password holds an '@': percent-encode it (%40)")
        refuse_autocommit(engine, "no transaction of a handler would be one")
        self._sql = dialect(checked_table(table))
        self._retention = microseconds(seconds("retention", retention, positive=True))
        self.timeout = seconds("timeout", timeout, positive=True)
        self._where = redacted(engine.url.render_as_string(hide_password=False))
        self.doubts = UnansweredClaims()
        self._base: int | None = None
        self.pace = PurgePace()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._where}>"

    @property
    def ddl(self) -> tuple[str, ...]:
        """The statements that create the table, for a migration of your own."""
        return self._sql.ddl

    def answer(self, connection: Connection, steps: Callable[[int], Steps[T]]) -> T:
        """Ask in a transaction; a question of one statement is one by itself, and one round trip."""
        with transaction_at(connection, None if self._sql.transactional else AUTOCOMMIT):
            answer, base = _carry_out(self._timed(steps), connection)
        self._base = base  # not earlier: what was rolled back another process may find otherwise
        return answer

    def _timed(self, steps: Callable[[int], Steps[T]]) -> Steps[tuple[T, int | None]]:
        """Find out the time first, where the database has none; return the base of the clock beside the answer."""
        if not isinstance(self._sql, SQLite):
            return (yield from steps(0)), None
        base = self._base
        if base is None:
            base = yield from self._sql.clock_base(*boot(), since_boot())
        return (yield from steps(base + since_boot())), base

    def claiming(self, holders: Mapping[str, int], lease: float) -> Callable[[int], Steps[dict[str, ClaimAnswer]]]:
        return lambda now: self._sql.claim(holders, lease=microseconds(lease), retention=self._retention, now=now)

    def completing(self, held: Sequence[Held]) -> Callable[[int], Steps[set[Held]]]:
        return lambda now: self._sql.complete(held, retention=self._retention, now=now)

    def releasing(self, held: Sequence[Held], failed: bool) -> Callable[[int], Steps[set[Held]]]:
        return lambda now: self._sql.release(held, failed=failed, retention=self._retention, now=now)

    def resetting(self, names: Sequence[str]) -> Callable[[int], Steps[set[str]]]:
        return lambda now: self._sql.reset(names, now=now)

    def purging(self, limit: int) -> Callable[[int], Steps[int]]:
        return lambda now: self._sql.purge(limit, now=now)

    def not_purged(self, error: IdempotencyStoreError) -> None:
        """What is over stays for now: the claims that were made are none the worse for that."""
        self.pace.failed()
        logger.warning("rows that are over were not deleted, which is tried again: %s", error)

    def not_rolled_back(self, error: Exception) -> None:
        """The database does so by itself, when it finds the connection gone; the handler's own error is raised."""
        said = error if isinstance(error, IdempotencyStoreError) else self.failed(error)
        logger.warning("a transaction was not rolled back in good order: %s", said)

    def failed(self, error: BaseException) -> IdempotencyStoreError:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        said = " ".join(str(cause).split())
        hint = ""
        if self._sql.table in said and any(words in said for words in ("no such table", "not exist", "n't exist")):
            hint = "; create it with create_table(), or by the statements in ddl"
        return IdempotencyStoreError(f"{self!r} failed: {type(cause).__name__}: {said[:500]}{hint}")

    def holds_of(self, deliveries: Sequence[Delivery]) -> list[InboxClaim]:
        holds = [delivery.hold for delivery in deliveries if delivery.hold is not None]
        if not deliveries or len(holds) < len(deliveries):
            raise UsageError("an inbox needs deliveries of a consumer with this store, while they are handled")
        return holds

    def check_transaction(self, connection: Connection) -> None:
        """Check that a transaction, which is to make deliveries done, is one; SQLite's begins here, with its lock.

        Raises:
            ConfigurationError: it is none: each of its statements would be committed by itself.
        """
        if isinstance(self._sql, SQLite):
            _carry_out(self._sql.lock(), connection)
        refuse_connection_in_autocommit(connection)

    def complete_in(self, connection: Connection, holds: Iterable[InboxClaim]) -> None:
        """Complete in a transaction.

        Raises:
            IdempotencyStoreError: it must not be committed, for another holder has taken over.
        """
        held = held_by(hold.claim for hold in holds)
        taken, _ = _carry_out(self._timed(self.completing(held)), connection)
        stale = [key for key, token in held if (key, token) not in taken]
        if stale:
            raise IdempotencyStoreError(
                f"nothing is committed: another holder has taken over {', '.join(stale[:10])}, whose lease has ended"
            )


def try_again(error: Exception, attempt: int) -> bool:
    """Whether asking again is of use: once after a lost connection, more often after a conflict with others."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if code is None and cause is not None and cause.args:
        code = cause.args[0]
    if isinstance(code, str | int) and code in _CONFLICTS:
        return True
    if attempt or isinstance(error, TimeoutError):
        return False
    # What a driver raises while a connection is taken out of the pool, SQLAlchemy does not wrap.
    return error.connection_invalidated if isinstance(error, DBAPIError) else not isinstance(error, SQLAlchemyError)


def still_open(transaction: SessionTransaction | AsyncSessionTransaction) -> None:
    """Check that a handler has left the end of the transaction to us.

    Raises:
        UsageError: it has not.
    """
    if not transaction.is_active:
        raise UsageError(
            "the handler has ended the transaction itself: leave the commit to the end of the block, and raise for a "
            "rollback"
        )


def mark(holds: Iterable[InboxClaim], commit: CommitState) -> None:
    """Note for the consumer what is known of the transaction that has these claims as done."""
    for hold in holds:
        hold.commit = commit


def _carry_out(steps: Steps[T], connection: Connection) -> T:
    """Ask what the steps ask, and return what they make of it."""
    try:
        ask = next(steps)
        while True:
            result = connection.execute(_statement(ask.sql), ask.parameters)
            ask = steps.send(result.all() if result.returns_rows else ())
    except StopIteration as stop:
        answer: T = stop.value
        return answer


@lru_cache(maxsize=256)
def _statement(sql: str) -> TextClause:
    return text(sql)


class SQLAlchemyStore(SQLStoreBase):
    """Deduplicates among all processes that use the same database; a handler's own writes may join it. Thread-safe.

    PostgreSQL 12, MariaDB 10.5, MySQL 8 or SQLite 3.35, or newer. The table must be there: see `create_table`, `ddl`.

    Args:
        engine: of SQLAlchemy 2; its pool should have a connection for each worker of the consumer.
        retention: seconds for which a done key is remembered at least, and the failures of one that is not.
        timeout: seconds within which the database must have answered, however often it is asked. A SQLite file has no
            server: a question waits for others as long as the engine's own busy timeout says (``connect_args``).
        table: the name of the table, with its schema or without.
        session: makes the sessions of `transaction`, in place of ``Session(engine)``.

    Raises:
        ConfigurationError: an argument is wrong.
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
            raise ConfigurationError(f"engine must be one of create_engine(), not {type(engine).__name__}")
        super().__init__(engine, retention, timeout, table)
        if engine.url.database in (None, "", ":memory:") and engine.dialect.name == "sqlite":
            raise ConfigurationError("engine is of a database in memory; use MemoryStore, or a file")
        self._engine = engine
        self._session = session
        # SQLite waits by itself, and has no server that could hang.
        self._calls = None if engine.dialect.name == "sqlite" else DaemonExecutor("reliable-mq-store")

    def create_table(self) -> None:
        """Create the table where it is not there. Any number of processes may. Blocks; not bounded by the timeout.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database refuses.
        """
        for attempt in range(AGAIN_AT_MOST):
            try:
                with self._engine.begin() as connection:
                    for statement in self._sql.ddl:
                        connection.execute(text(statement))
            except DBAPIError:
                # Of several that create it at once, PostgreSQL refuses all but one, and SQLite all but two.
                if attempt == AGAIN_AT_MOST - 1:
                    raise
            else:
                return

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`.

        Raises:
            IdempotencyStoreError: the database cannot be reached, does not answer in time, or answers with an error.
        """
        if not keys:
            return []
        stored = unique(keys)
        holders = self.doubts.holders(stored.values())
        try:
            deadline = time.monotonic() + self.timeout
            found = self._ask(self.claiming(holders, lease), deadline)
            if limit := self.pace.claimed(len(holders)):
                self._purge_some(limit, deadline)
        except BaseException:
            self.doubts.unanswered(holders)
            raise
        return claims_in_order(keys, {key: found[name].claim(key) for key, name in stored.items()})

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        return taken_in_order(claims, self._ask(self.completing(held)) if held else ())

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        return taken_in_order(claims, self._ask(self.releasing(held, failed)) if held else ())

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `ResettableStore.reset_many`. Errors as for `claim_many`."""
        found = self._ask(self.resetting(list(unique(keys).values()))) if keys else ()
        return [stored_key(key) in found for key in keys]

    def purge(self) -> int:
        """Delete what is over; claims do so by and by, too. Returns how many rows. Errors as for `claim_many`."""
        total = 0
        while True:
            count = self._ask(self.purging(PURGED_TOGETHER))
            total += count
            if count < PURGED_TOGETHER:
                return total

    @contextmanager
    def transaction(self, *deliveries: Delivery) -> Iterator[Session]:
        """Begin a transaction that makes deliveries done when it is committed, at the end of the block.

        Its beginning and its end (the session's flush, the record, COMMIT or ROLLBACK) have the timeout each. Your own
        statements wait for a server that hangs as long as its driver does: give that a timeout, where it has one.

        Args:
            deliveries: what the handler was given, one or, in a batch handler, several.

        Returns:
            A context manager of an ORM session, whose ``execute`` and ``connection()`` serve those who want no ORM.

        Raises:
            IdempotencyStoreError: at the beginning: no connection in time. At the end: another holder has taken over,
                and nothing was committed; or nobody answered in time. Whether COMMIT was carried out is then found out
                by the consumer, and is no attempt of the handler.
            ConfigurationError: the session's connection commits each statement by itself.
            UsageError: these are no deliveries that a consumer with this store is handling, or the block has ended the
                transaction itself.
        """
        holds = self.holds_of(deliveries)
        session, transaction, connection = self._begin_in_time()
        try:
            yield session
            with self._in_time(connection):
                still_open(transaction)
                session.flush()
                self.complete_in(connection, holds)
                mark(holds, CommitState.UNKNOWN)
                transaction.commit()
        except BaseException:
            self._roll_back(session, connection)
            raise
        mark(holds, CommitState.DONE)
        session.close()

    def inbox(self, session: Session | Connection, *deliveries: Delivery) -> None:
        """Make deliveries done in a transaction of your own: in its last statement, for it locks their records.

        It has the timeout; your COMMIT, or ROLLBACK, waits as long as the driver does. Where the transaction is rolled
        back, the handler must raise, too. Where it raises though it was committed, or where nobody answered the COMMIT,
        that is no attempt: the store knows.

        Raises:
            IdempotencyStoreError: another holder has taken over, or nobody answered in time; do not commit.
            ConfigurationError: the connection commits each statement by itself.
            UsageError: these are no deliveries that a consumer with this store is handling.
        """
        holds = self.holds_of(deliveries)
        connection = session if isinstance(session, Connection) else session.connection()
        with self._in_time(connection):
            self.check_transaction(connection)
            self.complete_in(connection, holds)
        mark(holds, CommitState.UNKNOWN)

    def close(self) -> None:
        """End the threads. Another question starts some again. The engine is yours."""
        if self._calls is not None:
            self._calls.close()

    def _begin_in_time(self) -> tuple[Session, SessionTransaction, Connection]:
        try:
            if self._calls is None:
                return self._begin(CancelHandle())
            context = copy_context()  # of the handler, for what the session's events may look up there
            return self._calls.call(lambda lifeline: context.run(self._begin, lifeline), self.timeout, beyond=True)
        except ConfigurationError:
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    def _begin(self, lifeline: CancelHandle) -> tuple[Session, SessionTransaction, Connection]:
        session = Session(self._engine) if self._session is None else self._session()
        try:
            transaction = session.begin()
            connection = session.connection()
            with lifeline.holding(connection.connection.dbapi_connection, connection.invalidate):
                self.check_transaction(connection)
        except BaseException:
            session.close()
            raise
        return session, transaction, connection

    @contextmanager
    def _in_time(self, connection: Connection) -> Iterator[None]:
        """In the block, the connection has the timeout to answer; then it is shut, and an error says so."""
        if self._calls is None or connection.closed or connection.invalidated:
            yield
            return
        with self._calls.cutting(self.timeout) as lifeline:
            try:
                with lifeline.holding(connection.connection.dbapi_connection, connection.invalidate):
                    yield
            except Exception as error:
                if lifeline.is_cut:
                    raise self.failed(TimeoutError(f"no answer within {self.timeout:g} s")) from error
                raise

    def _roll_back(self, session: Session, connection: Connection) -> None:
        try:
            with self._in_time(connection):
                session.close()
        except Exception as error:  # noqa: BLE001 -- whatever the driver raises; the handler's own error matters more
            self.not_rolled_back(error)

    def _purge_some(self, limit: int, deadline: float) -> None:
        try:
            self.pace.purged(self._ask(self.purging(limit), deadline), limit)
        except IdempotencyStoreError as error:
            self.not_purged(error)

    def _ask(self, steps: Callable[[int], Steps[T]], deadline: float | None = None) -> T:
        try:
            return self._ask_until_answered(steps, deadline or time.monotonic() + self.timeout)
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    def _ask_until_answered(self, steps: Callable[[int], Steps[T]], deadline: float) -> T:
        for attempt in range(AGAIN_AT_MOST):
            try:
                if self._calls is None:
                    return self._ask_once(steps, CancelHandle())
                left = max(deadline - time.monotonic(), 0.001)
                return self._calls.call(lambda lifeline: self._ask_once(steps, lifeline), left)
            except Exception as error:
                if not try_again(error, attempt):
                    raise
        raise TimeoutError("one conflict with others after the other")

    def _ask_once(self, steps: Callable[[int], Steps[T]], lifeline: CancelHandle) -> T:
        with (
            self._engine.connect() as connection,
            lifeline.holding(connection.connection.dbapi_connection, connection.invalidate),
        ):
            return self.answer(connection, steps)


class AsyncSQLAlchemyStore(SQLStoreBase):
    """The same for ``AsyncConsumer``, on an ``AsyncEngine``, with the arguments of `SQLAlchemyStore`.

    To be used by one event loop.
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
            raise ConfigurationError(f"engine must be one of create_async_engine(), not {type(engine).__name__}")
        super().__init__(engine, retention, timeout, table)
        self._engine = engine
        self._session = session
        self._given_up: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def create_table(self) -> None:
        """See `SQLAlchemyStore.create_table`."""
        for attempt in range(AGAIN_AT_MOST):
            try:
                async with self._engine.begin() as connection:
                    for statement in self._sql.ddl:
                        await connection.execute(text(statement))
            except DBAPIError:
                if attempt == AGAIN_AT_MOST - 1:
                    raise
            else:
                return

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `SQLAlchemyStore.claim_many`."""
        if not keys:
            return []
        stored = unique(keys)
        holders = self.doubts.holders(stored.values())
        try:
            deadline = time.monotonic() + self.timeout
            found = await self._ask(self.claiming(holders, lease), deadline)
            if limit := self.pace.claimed(len(holders)):
                await self._purge_some(limit, deadline)
        except BaseException:
            self.doubts.unanswered(holders)
            raise
        return claims_in_order(keys, {key: found[name].claim(key) for key, name in stored.items()})

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `SQLAlchemyStore.complete_many`."""
        held = held_by(claims)
        return taken_in_order(claims, await self._ask(self.completing(held)) if held else ())

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `SQLAlchemyStore.release_many`."""
        held = held_by(claims)
        return taken_in_order(claims, await self._ask(self.releasing(held, failed)) if held else ())

    async def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `SQLAlchemyStore.reset_many`."""
        found = await self._ask(self.resetting(list(unique(keys).values()))) if keys else ()
        return [stored_key(key) in found for key in keys]

    async def purge(self) -> int:
        """See `SQLAlchemyStore.purge`."""
        total = 0
        while True:
            count = await self._ask(self.purging(PURGED_TOGETHER))
            total += count
            if count < PURGED_TOGETHER:
                return total

    @asynccontextmanager
    async def transaction(self, *deliveries: Delivery) -> AsyncIterator[AsyncSession]:
        """See `SQLAlchemyStore.transaction`."""
        holds = self.holds_of(deliveries)
        session, transaction, connection = await self._begin_in_time()
        try:
            yield session
        except BaseException:
            try:
                await self._in_time(self._roll_back(session))
            except IdempotencyStoreError as error:
                self.not_rolled_back(error)
            raise
        await self._in_time(self._commit(session, transaction, connection, holds))
        mark(holds, CommitState.DONE)

    async def inbox(self, session: AsyncSession | AsyncConnection, *deliveries: Delivery) -> None:
        """See `SQLAlchemyStore.inbox`."""
        holds = self.holds_of(deliveries)
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        await self._in_time(self._complete_in(connection, holds))
        mark(holds, CommitState.UNKNOWN)

    async def _begin_in_time(self) -> tuple[AsyncSession, AsyncSessionTransaction, AsyncConnection]:
        try:
            return await self._in_time(self._begin())
        except (ConfigurationError, IdempotencyStoreError):
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    async def _begin(self) -> tuple[AsyncSession, AsyncSessionTransaction, AsyncConnection]:
        session = AsyncSession(self._engine) if self._session is None else self._session()
        try:
            transaction = await session.begin()
            connection = await session.connection()
            await connection.run_sync(self.check_transaction)
        except BaseException:
            await self._roll_back(session)
            raise
        return session, transaction, connection

    async def _commit(
        self,
        session: AsyncSession,
        transaction: AsyncSessionTransaction,
        connection: AsyncConnection,
        holds: Sequence[InboxClaim],
    ) -> None:
        try:
            still_open(transaction)
            await session.flush()
            await connection.run_sync(self.complete_in, holds)
            mark(holds, CommitState.UNKNOWN)
            await transaction.commit()
        except BaseException:  # here: where nobody waits any more, nobody else is to touch the session
            await self._roll_back(session)
            raise
        await session.close()

    async def _complete_in(self, connection: AsyncConnection, holds: Sequence[InboxClaim]) -> None:
        await connection.run_sync(self.check_transaction)
        await connection.run_sync(self.complete_in, holds)

    async def _roll_back(self, session: AsyncSession) -> None:
        try:
            await session.close()
        except Exception as error:  # noqa: BLE001 -- whatever the driver raises; the handler's own error matters more
            self.not_rolled_back(error)

    async def _purge_some(self, limit: int, deadline: float) -> None:
        try:
            self.pace.purged(await self._ask(self.purging(limit), deadline), limit)
        except IdempotencyStoreError as error:
            self.not_purged(error)

    async def _ask(self, steps: Callable[[int], Steps[T]], deadline: float | None = None) -> T:
        self._loop = the_one_loop(self, self._loop)
        left = self.timeout if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            return await self._in_time(self._ask_until_answered(steps), left)
        except IdempotencyStoreError:
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    async def _in_time(self, coroutine: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Await; a driver that takes its time to be cancelled is left to itself."""
        task = asyncio.ensure_future(coroutine)
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout if limit is None else limit)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if not done:
            self._give_up(task)
            raise self.failed(TimeoutError(f"no answer within {self.timeout:g} s"))
        return task.result()

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # nobody is left to be told

    async def _ask_until_answered(self, steps: Callable[[int], Steps[T]]) -> T:
        for attempt in range(AGAIN_AT_MOST):
            try:
                return await self._ask_once(steps)
            except Exception as error:
                if not try_again(error, attempt):
                    raise
        raise TimeoutError("one conflict with others after the other")

    async def _ask_once(self, steps: Callable[[int], Steps[T]]) -> T:
        async with self._engine.connect() as connection:
            return await connection.run_sync(self.answer, steps)
