"""Transactions on sync and asyncio SQLAlchemy engines, and their isolation levels.

The work of a transaction is a function of a plain ``Connection``. With an asyncio engine, the work runs on a separate
event loop in its own thread, with its own connections: a pool belongs to the event loop that it was made on, and the
user's loop must never wait for the work. ``close`` releases the callers that wait for a hanging database. The event
loop and the connections end when the database replies.

A connection whose peer has vanished answers nothing, for as long as the operating system sends again (15 minutes and
more). So work may have a time limit. Beyond that, its caller gets an error, and the socket of the connection is shut
down, so that the driver's call fails and SQLAlchemy drops the connection.

SQLAlchemy itself can set the isolation level of a connection, and resets the level when the connection returns to its
pool. If the reset needs a round trip, as with psycopg2 and MariaDB, and fails, the pool permanently loses a connection
slot (2.1.9); after some failures it has none left. So this module sets and resets the level, and a failure costs only
the connection.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, Pool
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import CancelHandle, DaemonExecutor, start_daemon
from reliable_mq.errors import ConfigurationError

logger = get_logger(__name__)

T = TypeVar("T")

AUTOCOMMIT: Final = "AUTOCOMMIT"
CONFLICTS: Final = frozenset({"40001", "40P01", 1205, 1213, 1020})
"""SQLSTATEs, and codes of MariaDB and MySQL, of deadlocks and other conflicts that rolled a transaction back.

It is safe to repeat. 1020 is MariaDB's for a row that is newer than the snapshot of the statement.
"""

_READ_ONLY: Final = frozenset({"25006", 1290, 1792, 1836})  # of a server, or of the transactions of a connection


def error_code(error: Exception) -> str | int | None:
    """Return the code of MariaDB and MySQL of a driver's error, or the SQLSTATE.

    PyMySQL has both from 1.2 on, and most codes share a SQLSTATE, HY000.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    number = cause.args[0] if cause is not None and cause.args else None
    if isinstance(number, int):
        return number
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return code if isinstance(code, str) else None


def is_of_read_only_server(error: BaseException) -> bool:
    """Return whether a server is read-only, because it may have become a replica.

    A new connection may reach the primary.
    """
    return isinstance(error, DBAPIError) and error_code(error) in _READ_ONLY


def is_in_memory(engine: Engine | AsyncEngine) -> bool:
    """Return whether an engine is of a SQLite database without a file."""
    return engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:")


def refuse_asyncio_driver(engine: Engine) -> None:
    """Raise ConfigurationError if a plain engine has a driver for asyncio."""
    if engine.dialect.is_async:
        raise ConfigurationError(
            f"engine has a driver for asyncio, {engine.dialect.driver}: use another driver, or create_async_engine()"
        )


def refuse_unencoded_password(engine: Engine | AsyncEngine) -> None:
    """Raise ConfigurationError if a part of a password is taken for the host."""
    if "@" in (engine.url.host or ""):
        raise ConfigurationError("engine has a URL whose password holds an '@': percent-encode it (%40)")


def refuse_autocommit(engine: Engine | AsyncEngine, so_that: str) -> None:
    """Raise ConfigurationError if an engine commits each statement by itself."""
    if _is_autocommit(_level_of(engine)):
        raise ConfigurationError(
            f"engine commits every statement by itself (isolation_level {AUTOCOMMIT!r}), so that {so_that}: give "
            "create_engine() another isolation_level, or none"
        )


def refuse_shared_connection(engine: Engine | AsyncEngine, so_that: str) -> None:
    """Raise ConfigurationError if transactions of an engine share a connection.

    The end of one of them would then end the others, too. In memory, each thread has its own SQLite database.
    """
    by_thread = isinstance(engine.pool, SingletonThreadPool) and not is_in_memory(engine)
    if by_thread or isinstance(engine.pool, StaticPool):
        raise ConfigurationError(
            f"engine has a {type(engine.pool).__name__}, which shares a connection among transactions, so that "
            f"{so_that}: give create_engine() another poolclass, or none"
        )


def refuse_connection_in_autocommit(connection: Connection, *, begun: bool) -> None:
    """Raise ConfigurationError if the connection of a session is in autocommit.

    If its transaction has ``begun``, SQLite can report that there is none.
    """
    level = connection.get_execution_options().get("isolation_level") or _level_of(connection.engine)
    dbapi: Any = connection.connection.dbapi_connection
    said = getattr(dbapi, "get_autocommit", None) or getattr(dbapi, "autocommit", False)
    in_transaction = getattr(connection.connection.driver_connection, "in_transaction", True)  # sqlite3 has this
    if _is_autocommit(level) or (said() if callable(said) else said) is True or (begun and not in_transaction):
        raise ConfigurationError(
            f"the session's connection commits every statement by itself ({AUTOCOMMIT}), so this would be no "
            "transaction: give its engine another isolation_level, or none"
        )


def cancellable(connection: Connection, handle: CancelHandle) -> contextlib.AbstractContextManager[None]:
    """Let another thread cut a connection within the block.

    A connection that was cut does not return to its pool. A call that gets one too late leaves it open.
    """

    def close() -> None:
        if not connection.closed:  # its session may have ended in the block
            connection.invalidate()

    return handle.using(connection.connection.driver_connection, close)


@contextlib.contextmanager
def transaction_at(connection: Connection, level: str | None) -> Iterator[None]:
    """Begin a transaction; commit it at the end of the block, or roll it back.

    Args:
        connection: A connection from a pool that is in no transaction. It does not return there if its server is
            read-only.
        level: The isolation level, which may be AUTOCOMMIT; None for the engine's level.
    """
    try:
        with _at_level(connection, level), connection.begin():
            yield
    except DBAPIError as error:
        if is_of_read_only_server(error):
            connection.invalidate(error)
        raise


@contextlib.contextmanager
def _at_level(connection: Connection, level: str | None) -> Iterator[None]:
    """Set the isolation level within the block, unless it is None."""
    if level is None:
        yield
        return
    dialect: Any = connection.dialect
    held = connection.connection.dbapi_connection
    try:
        dialect.set_isolation_level(held, level)
    except BaseException as error:
        connection.invalidate(error)
        raise
    try:
        yield
    finally:
        if not connection.invalidated:
            try:
                dialect.reset_isolation_level(held)
            except BaseException as error:
                connection.invalidate(error)
                if not isinstance(error, Exception):
                    raise


def _level_of(engine: Engine | AsyncEngine) -> object:
    """Return the isolation level that the engine was created with, if any."""
    given: object = engine.get_execution_options().get("isolation_level")
    return given or getattr(engine.dialect, "_on_connect_isolation_level", None)  # from create_engine()


def _is_autocommit(level: object) -> bool:
    return isinstance(level, str) and level.upper() == AUTOCOMMIT


_GRACE = 5.0  # seconds for connections to close


class SyncTransactionRunner:
    """A runner of work with connections of the user's pool.

    Work with a time limit runs on a thread of its own, because connecting can hang as well.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = DaemonExecutor("reliable_mq outbox transaction")
        self._executor.close()  # so the thread of each call ends with it, and an outbox need not be closed

    def run(self, work: Callable[[Connection], T], isolation: str | None, timeout: float | None = None) -> T:
        """Call ``work`` in a transaction, then commit it or roll it back. Blocks.

        Raises:
            TimeoutError: If that takes longer than ``timeout`` seconds. It may be committed.
        """
        if timeout is None:
            return self._run(work, isolation, CancelHandle())
        return self._executor.call(partial(self._run, work, isolation), timeout)

    def close(self) -> None:
        """Do nothing, because the pool belongs to the user."""

    def _run(self, work: Callable[[Connection], T], isolation: str | None, handle: CancelHandle) -> T:
        with (
            self._engine.connect() as connection,
            cancellable(connection, handle),
            transaction_at(connection, isolation),
        ):
            return work(connection)


class _EngineWithPool(OptionEngine):
    """An engine with the options and events of another, and its own pool."""

    def __init__(self, theirs: Engine) -> None:
        self._pool = theirs.pool.recreate()
        super().__init__(theirs, {})

    @property
    def pool(self) -> Pool:  # type: ignore[override]
        return self._pool

    def dispose(self, close: bool = True) -> None:
        """Close the connections, without an event for the other engine."""
        self._pool.dispose()


class AsyncTransactionRunner:
    """A runner of work on its own event loop, with a pool like the user's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._theirs = engine
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine: AsyncEngine | None = None
        self._running: set[concurrent.futures.Future[None]] = set()  # each cancels its call

    def run(self, work: Callable[[Connection], T], isolation: str | None, timeout: float | None = None) -> T:
        """Do the same as `SyncTransactionRunner.run`."""
        handle = CancelHandle()
        given_up: concurrent.futures.Future[None] = concurrent.futures.Future()
        ended = False
        try:
            with self._lock:
                loop, engine = self._started()
                self._running.add(given_up)
                call = asyncio.run_coroutine_threadsafe(self._run(engine, work, isolation, handle, given_up), loop)
            call.exception(timeout)
            ended = True
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {timeout:g} s") from error
        except concurrent.futures.CancelledError as error:
            raise OSError("the outbox was closed before there was an answer") from error
        finally:
            self._running.discard(given_up)
            if not ended:  # or a signal handler raised, perhaps before this thread had the call
                handle.cut()  # psycopg waits for an answer even when it is cancelled
                given_up.cancel()
        result: T = call.result()
        return result

    def close(self) -> None:
        """Cancel the running work, close the connections and end the thread."""
        with self._lock:
            loop, thread, engine = self._loop, self._thread, self._engine
            self._loop = self._thread = self._engine = None
            running, self._running = self._running, set()
        for given_up in list(running):
            given_up.cancel()
        if loop is not None and thread is not None and engine is not None:
            asyncio.run_coroutine_threadsafe(_end(engine), loop)
            thread.join(_GRACE)

    def _started(self) -> tuple[asyncio.AbstractEventLoop, AsyncEngine]:
        if self._loop is None or self._engine is None:
            engine = type(self._theirs)(_EngineWithPool(self._theirs.sync_engine))
            loop = asyncio.new_event_loop()
            try:
                self._thread = start_daemon("reliable_mq outbox database", _run_loop, loop)
            except Exception:  # later calls must not wait for a loop that does not run
                loop.close()
                raise
            self._loop, self._engine = loop, engine
        return self._loop, self._engine

    @staticmethod
    async def _run(
        engine: AsyncEngine,
        work: Callable[[Connection], Any],
        isolation: str | None,
        handle: CancelHandle,
        given_up: concurrent.futures.Future[None],
    ) -> Any:
        """Call ``work`` in a transaction, until ``given_up`` is cancelled."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "not in a task"  # noqa: S101
        given_up.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

        def in_transaction(connection: Connection) -> Any:
            with cancellable(connection, handle), transaction_at(connection, isolation):
                return work(connection)

        async with engine.connect() as connection:
            return await connection.run_sync(in_transaction)


async def _end(engine: AsyncEngine) -> None:
    """Wait for running work, close the connections, and stop the event loop."""
    try:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        await engine.dispose()
    except Exception:
        logger.exception("failed to close the connections of an outbox")
    finally:
        asyncio.get_running_loop().stop()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
