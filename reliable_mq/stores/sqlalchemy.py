"""The idempotency store in an SQL database, by SQLAlchemy: effects that are rows there happen once and no more.

Invariants: a question is asked once, and again at once where its connection broke (after a restart of the server, say)
or a conflict with others ended it; it has its answer or its error within the timeout; a transaction of a handler is
committed only with the record that its deliveries are done, and only while their claims are its own; it begins and ends
within the timeout, on the thread of its handler.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from reliable_mq.core.claims import Commit
from reliable_mq.durations import Duration
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.deadline import Calls, Lifeline
from reliable_mq.stores.questions import DAY, claims_in_order, held_by, stored_key, taken_in_order, unique
from reliable_mq.stores.sql.questions import (
    AGAIN_AT_MOST,
    PURGED_TOGETHER,
    Questions,
    mark,
    still_open,
    try_again,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.orm import SessionTransaction, sessionmaker

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
        self._calls = None if engine.dialect.name == "sqlite" else Calls("reliable-mq-store")

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
                mark(holds, Commit.UNKNOWN)
                transaction.commit()
        except BaseException:
            self._roll_back(session, connection)
            raise
        mark(holds, Commit.DONE)
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
        mark(holds, Commit.UNKNOWN)

    def close(self) -> None:
        """End the threads. Another question starts some again. The engine is yours."""
        if self._calls is not None:
            self._calls.close()

    def _begin_in_time(self) -> tuple[Session, SessionTransaction, Connection]:
        try:
            if self._calls is None:
                return self._begin(Lifeline())
            context = copy_context()  # of the handler, for what the session's events may look up there
            return self._calls.call(lambda lifeline: context.run(self._begin, lifeline), self.timeout, beyond=True)
        except ConfigurationError:
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    def _begin(self, lifeline: Lifeline) -> tuple[Session, SessionTransaction, Connection]:
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
                    return self._ask_once(steps, Lifeline())
                left = max(deadline - time.monotonic(), 0.001)
                return self._calls.call(lambda lifeline: self._ask_once(steps, lifeline), left)
            except Exception as error:
                if not try_again(error, attempt):
                    raise
        raise TimeoutError("one conflict with others after the other")

    def _ask_once(self, steps: Callable[[int], Steps[T]], lifeline: Lifeline) -> T:
        with (
            self._engine.connect() as connection,
            lifeline.holding(connection.connection.dbapi_connection, connection.invalidate),
        ):
            return self.answer(connection, steps)
