"""An outbox in a table: a message is stored in the user's own transaction.

``add`` puts a message into a session. With the commit of that session's transaction it is durable, together with all
other changes; after a rollback it never was. Relays, in any number of processes, share the rows: see
`reliable_mq.outbox.sqlalchemy_relay`.

The order of a key is that of the ids, which a database assigns before the commit. Two transactions that write to the
same key at the same time have no order, unless one waits for the other, as any two writers of the same thing do (a lock
on the row that the messages are about).
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, registry, scoped_session

from reliable_mq._util.sqlalchemy import (
    CONFLICTS,
    AsyncTransactionRunner,
    SyncTransactionRunner,
    error_code,
    refuse_autocommit,
)
from reliable_mq._util.validation import Duration, is_text, seconds
from reliable_mq.codec import publish_head
from reliable_mq.core.outbox import COLUMNS, FORMAT, NewRow, RowOutcome, RowSettlement, values_of
from reliable_mq.errors import ConfigurationError, OutboxError, ReliableMQError, UsageError
from reliable_mq.message import Message
from reliable_mq.outbox.protocol import FailedRow, OutboxStatus, RowLeases, check_ids, check_number, ordering_by
from reliable_mq.outbox.sqlalchemy_relay import SQLAlchemyRowLeases
from reliable_mq.outbox.sqlalchemy_table import (
    COLLATES,
    DELAYED,
    READY,
    SET_ASIDE,
    boot_name,
    collation_of,
    database_time,
    ddl,
    exact_collation,
    outbox_table,
    portions,
)
from reliable_mq.tracing import Tracing
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.outbox.protocol import OrderingKey

__all__ = ["SQLAlchemyOutbox"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAME_CHARACTERS = 255
_SESSIONS = (Session, AsyncSession, scoped_session, async_scoped_session, Connection)
_RACES = 2  # over the table and over its index, if several processes make them
_ATTEMPTS = 4  # at a transaction that conflicts with others, but for the last


class SQLAlchemyOutbox:
    """An outbox in a table, which any number of processes may share. Thread-safe.

    ``add`` joins a transaction of yours. A publisher with this outbox (``Publisher(url, outbox=...)``) relays the
    messages of all processes, and its own ``publish`` stores in a transaction of its own. ``reliable-mq outbox relay``
    is a relay in a process of its own.

    Tested with PostgreSQL (psycopg, asyncpg), MariaDB and MySQL (PyMySQL, asyncmy) and SQLite. Relays query the
    database every ``poll_interval`` seconds.

    Args:
        engine: an ``Engine`` or an ``AsyncEngine``. With the latter, relays and the methods of this object have
            connections of their own, made as the engine's are.
        table: its name.
        schema: its schema.
        create: whether to make the table if it does not exist; else it is yours to make, see `ddl`.
        ordering_key: for messages of a publisher: a function of a message, its exchange and its routing key. Messages
            for which it returns the same text are published one after the other; None means no order.
        lease: seconds after which other relays may take the rows of a relay that died.
        poll_interval: seconds after which an idle relay looks for rows.
        tracing: a ``Tracing``, for a *create* span of every message that is added, whose context the message carries;
            None for none. Messages of a publisher have that of the publisher.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        *,
        table: str = "reliable_mq_outbox",
        schema: str | None = None,
        create: bool = False,
        ordering_key: OrderingKey | None = None,
        lease: Duration = 30.0,
        poll_interval: Duration = 0.2,
        tracing: Tracing | None = None,
    ) -> None:
        if not isinstance(engine, (Engine, AsyncEngine)):
            raise ConfigurationError(f"engine must be an Engine or an AsyncEngine of SQLAlchemy, not {engine!r}")
        refuse_autocommit(engine, "a message would stay where its transaction is rolled back")
        if not isinstance(table, str) or not table:
            raise ConfigurationError(f"table must be text that is not empty, not {table!r}")
        if schema is not None and (not isinstance(schema, str) or not schema):
            raise ConfigurationError(f"schema must be text that is not empty, or None, not {schema!r}")
        if ordering_key is not None and not callable(ordering_key):
            raise ConfigurationError(f"ordering_key must be a function or None, not {ordering_key!r}")
        if tracing is not None and not isinstance(tracing, Tracing):
            raise ConfigurationError(f"tracing must be a Tracing, not {tracing!r}")
        self.poll_interval = seconds("poll_interval", poll_interval, positive=True)
        self.table = outbox_table(table, schema)
        self._engine = engine
        self._dialect = engine.dialect
        self._runner = (
            AsyncTransactionRunner(engine) if isinstance(engine, AsyncEngine) else SyncTransactionRunner(engine)
        )
        self._create = create
        self._ordering_key = ordering_key
        self._tracing = tracing
        self._lease = seconds("lease", lease, positive=True)
        self._opened = False
        self._made_in = os.getpid()
        self._entity: type[Any] = type("OutboxMessage", (), {})
        registry().map_imperatively(self._entity, self.table)

    # For transactions of the user

    def add(
        self,
        session: Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | Connection,
        message: Message,
        *,
        exchange: str = "",
        routing_key: str = "",
        ordering_key: str | None = None,
        mandatory: bool = True,
    ) -> None:
        """Add a message to a transaction: its commit stores it. Does not block.

        Args:
            session: a session of either kind, whose flush inserts it; or a plain ``Connection``, on which it is
                inserted at once.
            message: to publish.
            exchange: the default exchange routes to the queue named by the routing key.
            routing_key: at most 255 bytes in UTF-8.
            ordering_key: messages with the same one are published one after the other; None for no order.
            mandatory: if no queue is bound for it, whether it is set aside or dropped by the broker.

        Raises:
            ConfigurationError: an argument is wrong.
        """
        if not isinstance(message, Message):
            raise ConfigurationError(f"message must be a Message, not {type(message).__name__}: wrap it, Message(body)")
        if not isinstance(mandatory, bool):
            raise ConfigurationError(f"mandatory must be True or False, not {mandatory!r}")
        publish_head(1, exchange, routing_key, mandatory)  # refuses a value that cannot be encoded, naming it
        _check_texts(message.message_id, exchange, routing_key, ordering_key)
        if not isinstance(session, _SESSIONS):
            raise ConfigurationError(
                f"session must be a Session, an AsyncSession or a Connection, not {type(session).__name__}"
            )
        if self._tracing is not None:
            message = self._tracing.create(message, exchange=exchange, routing_key=routing_key)
        values = self._values(NewRow(message, exchange, routing_key, mandatory, ordering_key), time.time())
        if isinstance(session, Connection):
            session.execute(sa.insert(self.table), values)
            return
        row = self._entity()
        for name, value in values.items():
            setattr(row, name, value)
        session.add(row)

    @property
    def ddl(self) -> str:
        """The statements that make the table, for a migration."""
        return ddl(self.table, self._dialect)

    def create_table(self) -> None:
        """Make the table and its index if they do not exist. Blocks.

        Any number of processes may do so at once.

        Raises:
            OutboxError: the database cannot, or may not.
        """
        for _ in range(_RACES):
            try:
                return self._do(self._make, "making the table")
            except OutboxError:  # another process has made it meanwhile
                if not self._exists():
                    raise
        return self._do(self._make, "making the table")

    # For a publisher

    def open(self) -> None:
        """Check that the table exists, or make it.

        Raises:
            OutboxError: it does not exist, and is not to be made; or the database cannot be reached.
            UsageError: on the wrong side of a fork.
        """
        if self._opened:
            return
        if self._create:
            self.create_table()
        elif not self._exists():
            raise OutboxError(
                f"{self!r} does not exist: make it with create_table(), create=True, or the statements in ddl"
            )
        self._do(self._inspect_table, "opening")
        self._opened = True

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Return the ordering key of a message that a publisher stores.

        Texts that do not fit into a row are refused here: in the transaction they would fail other messages, too.

        Raises:
            ConfigurationError: an argument is wrong.
        """
        key = ordering_by(self._ordering_key, message, exchange, routing_key)
        _check_texts(message.message_id, exchange, routing_key, key)
        return key

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and write the outcomes of rows, in one transaction.

        Raises:
            OutboxError: nothing is written; if ``may_have_arrived`` is set, everything may be.
        """
        now = time.time()
        new = [self._values(row, now) for row in rows]
        # In the order of their ids: transactions that lock rows in one order do not wait for each other in a circle.
        settlements = sorted(settlements, key=lambda one: one.row.id)
        removed = [one.row.id for one in settlements if one.outcome is RowOutcome.CONFIRMED]
        others = [one for one in settlements if one.outcome is not RowOutcome.CONFIRMED]
        if not (new or removed or others):
            return
        committing = False

        def work(connection: Connection) -> None:
            nonlocal committing
            committing = False
            columns = self.table.c
            if new:
                connection.execute(sa.insert(self.table), new)
            for some in portions(removed):
                connection.execute(sa.delete(self.table).where(columns.id.in_(some)))
            clock = database_time(connection) if others else 0.0
            for one in others:
                # A relay that was stopped for longer than its lease must not change rows that another took over.
                still = sa.and_(columns.id == one.row.id, columns.claimed_by == one.row.claim)
                connection.execute(sa.update(self.table).where(still).values(**self._outcome_values(one, clock)))
            committing = True

        try:
            self._do(work, f"storing {len(new)} messages" if new else "removing what was published")
        except OutboxError as error:
            error.may_have_arrived = committing
            raise

    def claims(self) -> RowLeases:
        """Return new leases, for one relay."""
        self.open()
        return SQLAlchemyRowLeases(self.table, self._do, self._lease, boot_name(self._dialect))

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Count the rows that will be published; return that, and the id of the last row."""
        columns = self.table.c
        if up_to is not None:
            check_number("up_to", up_to)

        def work(connection: Connection) -> tuple[int, int]:
            last = connection.execute(sa.select(sa.func.coalesce(sa.func.max(columns.id), 0))).scalar_one()
            limit = last if up_to is None else up_to
            rows, is_held = self._with_holds()
            moves = sa.and_(self._waits(), sa.not_(is_held))
            count = connection.execute(sa.select(sa.func.count()).select_from(rows).where(columns.id <= limit, moves))
            return count.scalar_one(), last

        return self._do(work, "reading")

    # For operators

    def status(self) -> OutboxStatus:
        """Count the rows by state."""
        columns = self.table.c
        waits = self._waits()
        rows, is_held = self._with_holds()

        def count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
            return sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0)

        query = sa.select(
            count(waits),
            count(sa.and_(waits, columns.state == DELAYED)),
            count(sa.and_(waits, is_held)),
            count(sa.and_(columns.state == SET_ASIDE, columns.format <= FORMAT)),
            count(columns.format > FORMAT),
            sa.func.min(sa.case((columns.state < SET_ASIDE, columns.stored_at))),
        ).select_from(rows)

        def work(connection: Connection) -> OutboxStatus:
            *counts, oldest = connection.execute(query).one()
            age = 0.0 if oldest is None else max(time.time() - float(oldest), 0.0)
            waiting, delayed, held, set_aside, unreadable = map(int, counts)
            return OutboxStatus(waiting, delayed, held, set_aside, unreadable, age)

        return self._do(work, "reading")

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Return the messages that are set aside, the oldest first."""
        check_number("limit", limit)
        columns = self.table.c
        names = ("message_id", "exchange", "routing_key", "attempts", "reason", "stored_at")
        query = sa.select(*(columns[name] for name in names)).where(self._is_set_aside())
        query = query.order_by(columns.id).limit(limit)

        def work(connection: Connection) -> list[FailedRow]:
            now = time.time()
            return [
                FailedRow(message_id, exchange, routing_key, attempts, reason or "", max(now - float(stored_at), 0.0))
                for message_id, exchange, routing_key, attempts, reason, stored_at in connection.execute(query)
            ]

        return self._do(work, "reading")

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put messages that are set aside back, all or those with these ids; count them."""
        back = sa.update(self.table).values(state=READY, available_at=0, reason=None, claimed_by=None, claimed_until=0)
        return self._decide(back, message_ids)

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete messages that are set aside, all or those with these ids; count them."""
        return self._decide(sa.delete(self.table), message_ids)

    def close(self) -> None:
        """Close own connections, until the next call; the engine is yours."""
        if os.getpid() == self._made_in:
            self._runner.close()

    def __repr__(self) -> str:
        where = redacted(self._engine.url.render_as_string(hide_password=False))
        return f"<SQLAlchemyOutbox {self.table.fullname!r} in {where}>"

    # Private

    def _make(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)
        for index in self.table.indexes:  # the maker of the table may have died before
            index.create(connection, checkfirst=True)

    def _exists(self) -> bool:
        return self._do(
            lambda connection: sa.inspect(connection).has_table(self.table.name, self.table.schema), "opening"
        )

    def _inspect_table(self, connection: Connection) -> None:
        """Warn of a table without the index, or whose keys are compared loosely."""
        seen, name, schema = sa.inspect(connection), self.table.name, self.table.schema
        index = ["ordering_key", "id"]
        if not any(one["column_names"][:2] == index for one in seen.get_indexes(name, schema)):
            logger.warning("%r has no index of ordering_key and id, and is slow: make the one that is in ddl", self)
        if connection.dialect.name not in COLLATES:
            return
        given = collation_of(connection, self.table.c.ordering_key)
        if given is not None and not given.endswith("_bin"):
            logger.warning(
                "%r has the collation %s, which takes some ordering keys for the same: they wait for one another. To "
                "change that: ALTER TABLE %s MODIFY ordering_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE %s",
                self,
                given,
                self.table.fullname,
                exact_collation(connection.dialect),
            )

    def _values(self, row: NewRow, now: float) -> dict[str, Any]:
        values = dict(zip(COLUMNS, values_of(row), strict=True))
        return values | {"stored_at": now, "state": READY, "available_at": 0.0, "claimed_until": 0.0}

    def _outcome_values(self, settlement: RowSettlement, now: float) -> dict[str, Any]:
        columns = self.table.c
        free: dict[str, Any] = {"claimed_by": None, "claimed_until": 0.0}
        duplicate = settlement.possible_duplicate or settlement.row.possible_duplicate
        if duplicate:  # a relay that had it before may have published it
            free["possible_duplicate"] = 1
        if settlement.outcome is RowOutcome.BACK:
            return free
        later = settlement.outcome is RowOutcome.LATER
        return free | {
            "state": DELAYED if later else SET_ASIDE,
            "available_at": now + settlement.delay if later else 0.0,
            "attempts": columns.attempts + 1,
            "reason": settlement.reason,
        }

    def _waits(self) -> sa.ColumnElement[bool]:
        return sa.and_(self.table.c.state < SET_ASIDE, self.table.c.format <= FORMAT)

    def _is_set_aside(self) -> sa.ColumnElement[bool]:
        return sa.and_(self.table.c.state == SET_ASIDE, self.table.c.format <= FORMAT)

    def _with_holds(self) -> tuple[sa.FromClause, sa.ColumnElement[bool]]:
        """Join each row with the first stuck row of its key; return the condition "held"."""
        columns, before = self.table.c, self.table.alias().c
        stuck = sa.and_(before.ordering_key.is_not(None), sa.or_(before.state == SET_ASIDE, before.format > FORMAT))
        first = sa.select(before.ordering_key, sa.func.min(before.id).label("first")).where(stuck)
        holds = first.group_by(before.ordering_key).subquery()
        joined = sa.outerjoin(self.table, holds, holds.c.ordering_key == columns.ordering_key)
        return joined, sa.and_(holds.c.first.is_not(None), holds.c.first < columns.id)

    def _decide(self, statement: Any, message_ids: Sequence[str] | None) -> int:
        ids = check_ids(message_ids)

        def work(connection: Connection) -> int:
            if ids is None:
                return int(connection.execute(statement.where(self._is_set_aside())).rowcount)
            count = 0
            columns = self.table.c
            for some in map(set, portions(ids)):
                wanted = sa.select(columns.id, columns.message_id).where(
                    self._is_set_aside(), columns.message_id.in_(some)
                )
                # The column's collation may take other texts for equal.
                found = [number for number, message_id in connection.execute(wanted) if message_id in some]
                if found:
                    count += connection.execute(statement.where(self._is_set_aside(), columns.id.in_(found))).rowcount
            return count

        return self._do(work, "changing what was set aside")

    def _do(self, work: Callable[[Connection], T], what: str) -> T:
        if os.getpid() != self._made_in:
            raise UsageError(f"{self!r} was made before fork(): its connections belong to the parent; make one here")
        # Of the usual levels this one locks least: gaps that MariaDB would lock, too, make relays wait for one another.
        isolation = None if self._dialect.name == "sqlite" else "READ COMMITTED"
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return self._runner.run(work, isolation)
                except DBAPIError as error:
                    if error_code(error) not in CONFLICTS:
                        raise
            return self._runner.run(work, isolation)
        except SQLAlchemyError as error:
            # The text of SQLAlchemy's error has the statement and its parameters, and so the bodies of messages.
            cause = getattr(error, "orig", None) or type(error).__name__
            raise OutboxError(f"{what} failed in {self!r}: {cause}") from error
        except ReliableMQError:
            raise
        except Exception as error:  # of a driver: SQLAlchemy does not wrap all that come while it connects
            said = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise OutboxError(f"{what} failed in {self!r}: {said}") from error


def _check_texts(message_id: str, exchange: str, routing_key: str, ordering_key: str | None) -> None:
    texts = {"message_id": message_id, "exchange": exchange, "routing_key": routing_key}
    if ordering_key is not None:
        texts["ordering_key"] = ordering_key
    for name, text in texts.items():
        if not is_text(text) or "\0" in text or len(text) > _NAME_CHARACTERS:
            raise ConfigurationError(
                f"{name} must be text of at most {_NAME_CHARACTERS} characters without NUL, not {text!r}"
            )
