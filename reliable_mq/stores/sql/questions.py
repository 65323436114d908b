"""What the stores in SQL databases have in common, whichever face asks."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from reliable_mq.clock import boot, since_boot
from reliable_mq.durations import Duration, seconds
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError, UsageError
from reliable_mq.isolation import AUTOCOMMIT, refuse_autocommit, refuse_connection_in_autocommit, transaction_at
from reliable_mq.stores.questions import Answer, Doubts, PurgePace, held_by, microseconds
from reliable_mq.stores.sql.dialect import Dialect, Held, Steps, checked_table
from reliable_mq.stores.sql.mysql import MySQL
from reliable_mq.stores.sql.postgresql import PostgreSQL
from reliable_mq.stores.sql.sqlite import SQLite
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Connection, Engine, TextClause
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSessionTransaction
    from sqlalchemy.orm import SessionTransaction

    from reliable_mq.core.claims import Commit, Hold
    from reliable_mq.core.delivery import Delivery

__all__ = [
    "AGAIN_AT_MOST",
    "PURGED_TOGETHER",
    "Questions",
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


class Questions:
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
        self.doubts = Doubts()
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

    def claiming(self, holders: Mapping[str, int], lease: float) -> Callable[[int], Steps[dict[str, Answer]]]:
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

    def holds_of(self, deliveries: Sequence[Delivery]) -> list[Hold]:
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

    def complete_in(self, connection: Connection, holds: Iterable[Hold]) -> None:
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


def mark(holds: Iterable[Hold], commit: Commit) -> None:
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
