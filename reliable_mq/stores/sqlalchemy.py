"""The idempotency store in an SQL database, by SQLAlchemy: effects that are rows there happen once and no more.

Invariants: a question is asked once, and again at once where its connection broke (after a restart of the server, say)
or a conflict with others ended it; it has its answer or its error within the timeout; a transaction of a handler is
committed only with the record that its deliveries are done, and only while their claims are its own.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from reliable_mq.durations import Duration
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.deadline import Calls, Lifeline
from reliable_mq.stores.questions import DAY, claims_in_order, held_by, stored_key, taken_in_order, unique
from reliable_mq.stores.sql.questions import (
    AGAIN_AT_MOST,
    PURGED_TOGETHER,
    Questions,
    execution_options,
    statement,
    try_again,
)
from reliable_mq.stores.sql.sqlite import SQLite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.orm import sessionmaker

    from reliable_mq.core.claims import Claim
    from reliable_mq.core.delivery import Delivery
    from reliable_mq.stores.sql.dialect import Steps

__all__ = ["SQLAlchemyStore"]

T = TypeVar("T")


class SQLAlchemyStore(Questions):
    """Deduplicates among all processes that use the same database; a handler's own writes may join it. Thread-safe.

    PostgreSQL 12, MariaDB 10.5, MySQL 8 or SQLite 3.35, or newer. The table must be there: see `create_table`, `ddl`.

    Args:
        engine: of SQLAlchemy 2; its pool should have a connection for each worker of the consumer.
        retention: seconds for which a done key is remembered at least, and the failures of one that is not.
        timeout: seconds within which the database must have answered, however often it is asked.
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
        self._calls = None if engine.dialect.name == "sqlite" else Calls("reliable-mq-store")

    def create_table(self) -> None:
        """Create the table where it is not there. Blocks; not bounded by the timeout.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database refuses.
        """
        with self._engine.begin() as connection:
            for statement in self._sql.ddl:
                connection.execute(text(statement))

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
            found = self._ask(self.claiming(holders, lease))
            if self.is_time_to_purge:
                self._purge_some()
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
            count = self._ask(self.purging)
            total += count
            if count < PURGED_TOGETHER:
                return total

    @contextmanager
    def transaction(self, *deliveries: Delivery) -> Iterator[Session]:
        """Begin a transaction that makes deliveries done when it is committed, at the end of the block.

        Args:
            deliveries: what the handler was given, one or, in a batch handler, several.

        Returns:
            A context manager of an ORM session, whose ``execute`` and ``connection()`` serve those who want no ORM.

        Raises:
            IdempotencyStoreError: at the end: another holder has taken over; nothing was committed.
            UsageError: these are no deliveries that a consumer with this store is handling.
        """
        holds = self.holds_of(deliveries)
        with Session(self._engine) if self._session is None else self._session() as session, session.begin():
            if isinstance(self._sql, SQLite):  # a lock that is taken later may be refused
                session.connection().exec_driver_sql("BEGIN IMMEDIATE")
            yield session
            session.flush()
            _carry_out(self.completed(holds), session.connection())
        for hold in holds:
            hold.completed = True

    def inbox(self, session: Session | Connection, *deliveries: Delivery) -> None:
        """Make deliveries done in a transaction of your own: in its last statement, for it locks their records.

        Where the transaction is rolled back, the handler must raise, too.

        Raises:
            IdempotencyStoreError: another holder has taken over; do not commit.
            UsageError: these are no deliveries that a consumer with this store is handling.
        """
        connection = session if isinstance(session, Connection) else session.connection()
        _carry_out(self.completed(self.holds_of(deliveries)), connection)

    def close(self) -> None:
        """End the threads. Another question starts some again. The engine is yours."""
        if self._calls is not None:
            self._calls.close()

    def _purge_some(self) -> None:
        try:
            self._ask(self.purging)
        except IdempotencyStoreError as error:
            self.not_purged(error)

    def _ask(self, steps: Callable[[int], Steps[T]]) -> T:
        try:
            return self._ask_until_answered(steps, time.monotonic() + self.timeout)
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    def _ask_until_answered(self, steps: Callable[[int], Steps[T]], deadline: float) -> T:
        for attempt in range(AGAIN_AT_MOST):
            try:
                if self._calls is None:
                    return self._ask_once(steps, Lifeline())
                left = max(deadline - time.monotonic(), 0.001)
                return self._calls.call(lambda lifeline: self._ask_once(steps, lifeline), left)
            except Exception as error:
                if not try_again(error, attempt):
                    raise
        raise TimeoutError("one conflict with others after the other")

    def _ask_once(self, steps: Callable[[int], Steps[T]], lifeline: Lifeline) -> T:
        with (
            self._engine.connect().execution_options(**execution_options(self._sql)) as connection,
            lifeline.holding(connection.connection.dbapi_connection, connection.invalidate),
            connection.begin(),
        ):
            return _carry_out(self.timed(steps), connection)


def _carry_out(steps: Steps[T], connection: Connection) -> T:
    try:
        ask = next(steps)
        while True:
            result = connection.execute(statement(ask.sql), ask.parameters)
            ask = steps.send(result.all() if result.returns_rows else ())
    except StopIteration as stop:
        answer: T = stop.value
        return answer
