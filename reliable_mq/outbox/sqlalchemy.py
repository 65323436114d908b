"""An outbox in a table: messages are stored in the user's own transaction.

``add`` puts a message into a session. The commit of the session's transaction makes the message durable, together with
all other changes, and a rollback discards it. Relays in any number of processes share the rows
(`reliable_mq.outbox.sqlalchemy_relay`).

Rows of a key are ordered by id, and a database assigns ids before the commit. Two concurrent transactions that write to
the same key have no order, unless one waits for the other, for example for a lock on the row that the messages are
about. So a session's flush inserts messages after all its other statements, which take such locks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, registry, scoped_session

from reliable_mq._util.hooks import OfOneProcess
from reliable_mq._util.logs import get_logger
from reliable_mq._util.sqlalchemy import (
    CONFLICTS,
    AsyncTransactionRunner,
    SyncTransactionRunner,
    error_code,
    is_in_memory,
    refuse_asyncio_driver,
    refuse_autocommit,
    refuse_connection_in_autocommit,
    refuse_shared_connection,
    refuse_unencoded_password,
)
from reliable_mq._util.validation import Duration, check_flag, is_text, seconds, whole_number
from reliable_mq.codec import publish_head
from reliable_mq.core.outbox import COLUMNS, FORMAT, NewRow, RowOutcome, RowSettlement, values_of
from reliable_mq.core.publisher.window import no_message
from reliable_mq.errors import ConfigurationError, OutboxError, ReliableMQError, UsageError
from reliable_mq.message import Message
from reliable_mq.outbox.protocol import (
    LARGEST_NUMBER,
    FailedRow,
    OutboxStatus,
    RowLeases,
    check_ids,
    check_target,
    failed_row,
    ordering_by,
    portions,
)
from reliable_mq.outbox.sqlalchemy_relay import SQLAlchemyRowLeases
from reliable_mq.outbox.sqlalchemy_table import (
    COLLATES,
    DELAYED,
    LOCKS_WHAT_IT_READS,
    READY,
    SET_ASIDE,
    any_text,
    boot_name,
    collation_of,
    database_time,
    ddl,
    delete_by_id,
    exact_collation,
    limit_lock_waits,
    outbox_table,
    refuse_old_server,
    update_by_id,
)
from reliable_mq.tracing import Tracing
from reliable_mq.url import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.orm import UOWTransaction

    from reliable_mq.outbox.protocol import OrderingKey

logger = get_logger(__name__)

T = TypeVar("T")

_NAME_CHARACTERS = 255
_SESSIONS = (Session, AsyncSession, scoped_session, async_scoped_session, Connection)
_RACES = 2  # for the table and for its index, if several processes create them
_ATTEMPTS = 5  # at a transaction that conflicts with others


class _SessionRow:
    """A row that a session inserts. Each outbox has a mapped subclass."""


class _MessagesLast:
    """A step of a flush, by which messages are inserted after all other changes.

    SQLAlchemy flushes classes that have no relationship in the order of their names, and all deletions after that.
    Messages stay objects of the session, so that a rollback, a savepoint and ``expunge`` treat them like any other.
    """

    def execute(self, flush: Any) -> bool:
        """Order the changes that are known so far.

        SQLAlchemy calls this again until it knows all of them.

        Raises:
            ConfigurationError: If the session's connection is in autocommit. Nothing was flushed yet.
        """
        actions = flush.postsort_actions.values()
        messages = [action for action in actions if _inserts_messages(action)]
        for message in messages:
            refuse_connection_in_autocommit(flush.transaction.connection(message.mapper), begun=False)
        others = [action for action in actions if not _inserts_messages(action)]
        flush.dependencies.update((other, message) for other in others for message in messages)
        return False


class SQLAlchemyOutbox(OfOneProcess):
    """An outbox in a table that any number of processes may share. Thread-safe.

    ``add`` joins your transaction. A publisher with this outbox (``Publisher(url, outbox=...)``) relays the messages of
    all processes, and its ``publish`` stores each message in a separate transaction. The command
    ``reliable-mq outbox relay`` runs a relay in a separate process.

    Tested with PostgreSQL (psycopg, asyncpg), MariaDB and MySQL (PyMySQL, asyncmy) and SQLite. Relays query the
    database every ``poll_interval`` seconds.

    Args:
        engine: An ``Engine`` or an ``AsyncEngine``. With an ``AsyncEngine``, relays and the methods of this object use
            separate connections, made like the engine's, with its execution options and its events. These events are
            called in another thread, by another event loop.
        table: The name of the table.
        schema: The schema of the table.
        create: Whether a publisher or relay that opens the outbox creates the table if it does not exist. ``add`` does
            not create it: see `create_table` and `ddl`.
        ordering_key: A function of a message, its exchange and its routing key, for messages of a publisher. Messages
            for which it returns the same text are published one after the other. None means no order.
        lease: The time after which other relays may take the rows of a relay that died, in seconds.
        poll_interval: The time after which an idle relay looks for rows, in seconds.
        timeout: The time within which a transaction of the outbox ends, in seconds, including its repetitions after
            conflicts. After that its connection is cut, and the call fails. It does not apply to ``add``,
            ``create_table``, ``retry`` and ``purge``, nor to a SQLite file, which has no server that could hang.
        tracing: A ``Tracing`` that makes a *create* span for every message passed to ``add``. The message carries the
            span's context. None makes no spans. For messages of a publisher, the publisher's tracing is used.

    Raises:
        ConfigurationError: If an argument is invalid.
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
        timeout: Duration = 30.0,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(engine, (Engine, AsyncEngine)):
            raise ConfigurationError(f"engine must be an Engine or an AsyncEngine of SQLAlchemy, not {engine!r}")
        if isinstance(engine, Engine):
            refuse_asyncio_driver(engine)
        elif is_in_memory(engine):
            raise ConfigurationError(
                "engine is of a database in memory, which the outbox's own connections would not see; use a file"
            )
        refuse_unencoded_password(engine)
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
        limit = seconds("timeout", timeout, positive=True)
        self._timeout = None if engine.dialect.name == "sqlite" else limit
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
        self._entity: type[Any] = type("OutboxMessage", (_SessionRow,), {})
        registry().map_imperatively(self._entity, self.table)

    # For the user's transactions

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
        """Add a message to a transaction, whose commit stores it.

        Does not block on a session. A plain ``Connection`` executes the statement.

        Args:
            session: A sync or asyncio session, whose flush inserts the message after its other changes, or a plain
                ``Connection``, which inserts it at once.
            message: The message to publish.
            exchange: The exchange to publish to. The default exchange routes to the queue named by the routing key.
            routing_key: The routing key, at most 255 bytes in UTF-8.
            ordering_key: Messages with the same ordering key are published one after the other. None means no order.
            mandatory: Whether the message is set aside if no queue is bound for it. If False, the broker drops it.

        Raises:
            ConfigurationError: If an argument is invalid, or the connection commits each statement by itself. For that
                of a session, the flush raises it.
        """
        if not isinstance(message, Message):
            raise no_message(message)
        check_flag("mandatory", mandatory)
        publish_head(1, exchange, routing_key, mandatory)  # raises an error that names a value it cannot encode
        _check_texts(message.message_id, exchange, routing_key, ordering_key)
        check_target(message, exchange, routing_key)
        if not isinstance(session, _SESSIONS):
            raise ConfigurationError(
                f"session must be a Session, an AsyncSession or a Connection, not {type(session).__name__}"
            )
        if isinstance(session, Connection):
            refuse_connection_in_autocommit(session, begun=False)
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
        """The SQL statements that create the table, for a migration."""
        return ddl(self.table, self._dialect)

    def create_table(self) -> None:
        """Create the table and its index if they do not exist. Blocks.

        Any number of processes may call this at the same time.

        Raises:
            OutboxError: If the table or its index cannot be created, or the database cannot be reached.
            ConfigurationError: If the server is older than MariaDB 10.6 or MySQL 8.0.1.
        """
        for _ in range(_RACES):
            try:
                return self._do(self._make, "making the table", None)
            except OutboxError:  # if the table exists, another process has created it meanwhile
                if not self._exists():
                    raise
        return self._do(self._make, "making the table", None)

    # For a publisher

    def open(self) -> None:
        """Check that the table exists, or create it if ``create`` is set.

        Raises:
            OutboxError: If the table does not exist and ``create`` is not set, or the database cannot be reached.
            ConfigurationError: If all transactions of the engine share a connection, or the server is older than
                MariaDB 10.6 or MySQL 8.0.1.
            UsageError: If called in a forked child.
        """
        if self._opened:
            return
        refuse_shared_connection(self._engine, "a relay would commit your transaction")
        if self._create:
            self.create_table()
        elif not self._exists():
            raise OutboxError(
                f"{self!r} does not exist: make it with create_table(), create=True, or the statements in ddl"
            )
        self._do_in_time(self._inspect_table, "opening")
        self._opened = True

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Return the ordering key of a message; see `Outbox.ordering_key`."""
        check_target(message, exchange, routing_key)
        key = ordering_by(self._ordering_key, message, exchange, routing_key)
        _check_texts(message.message_id, exchange, routing_key, key)
        return key

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and write outcomes in one transaction; see `Outbox.write`."""
        now = time.time()
        new = [self._values(row, now) for row in rows]
        # Sorted by id: transactions that lock rows in the same order do not deadlock.
        settlements = sorted(settlements, key=lambda one: one.row.id)
        removed = [one.row for one in settlements if one.outcome is RowOutcome.CONFIRMED]
        others: dict[tuple[Any, ...], list[RowSettlement]] = {}  # by all that they have in common
        for one in settlements:
            if one.outcome is not RowOutcome.CONFIRMED:
                others.setdefault((one.row.claim, one.outcome, one.delay, _is_doubtful(one)), []).append(one)
        if not (new or removed or others):
            return
        committing = False

        def work(connection: Connection) -> None:
            nonlocal committing
            committing = False
            if new:
                connection.execute(sa.insert(self.table), new)
            delete, row = delete_by_id(self.table, connection.dialect)
            for some in portions(removed):
                ids, message_ids = [one.id for one in some], [one.message.message_id for one in some]
                # A table that was truncated, or a server that lost its last commits, may use an id again.
                connection.execute(delete.where(row.c.id.in_(ids), row.c.message_id.in_(message_ids)))
            clock = database_time(connection) if others else 0.0
            # Not in the engine's cache of statements, because each number of reasons is another statement.
            uncached = {"compiled_cache": None}
            for alike in others.values():
                for part in portions(alike):
                    connection.execute(self._change(connection.dialect, part, clock), execution_options=uncached)
            committing = True

        try:
            self._do_in_time(work, f"storing {len(new)} messages" if new else "removing what was published")
        except OutboxError as error:
            error.may_have_arrived = committing or isinstance(error.__cause__, TimeoutError)
            raise

    def claims(self) -> RowLeases:
        """Return new leases for one relay."""
        self.open()
        return SQLAlchemyRowLeases(self.table, self._do_in_time, self._lease, boot_name(self._dialect))

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Return the number of rows that will be published, and the id of the last row."""
        columns = self.table.c
        if up_to is not None:
            whole_number("up_to", up_to, 0, LARGEST_NUMBER)

        def work(connection: Connection) -> tuple[int, int]:
            last = connection.execute(sa.select(sa.func.coalesce(sa.func.max(columns.id), 0))).scalar_one()
            limit = last if up_to is None else up_to
            rows, is_held = self._with_holds()
            moves = sa.and_(self._waits(), sa.not_(is_held))
            count = connection.execute(sa.select(sa.func.count()).select_from(rows).where(columns.id <= limit, moves))
            return count.scalar_one(), last

        return self._do_in_time(work, "reading")

    # For operators

    def status(self) -> OutboxStatus:
        """Return the number of rows in each state."""
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

        return self._do_in_time(work, "reading")

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Return the messages that are set aside, the oldest first."""
        whole_number("limit", limit, 0, LARGEST_NUMBER)
        columns = self.table.c
        names = ("message_id", "exchange", "routing_key", "attempts", "reason", "stored_at")
        query = sa.select(*(columns[name] for name in names)).where(self._is_set_aside())
        query = query.order_by(columns.id).limit(limit)

        def work(connection: Connection) -> list[FailedRow]:
            now = time.time()
            with any_text(connection):
                return [failed_row(values, now - float(stored)) for *values, stored in connection.execute(query)]

        return self._do_in_time(work, "reading")

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put set-aside messages back, all or those with these ids; return their number."""
        back = {"state": READY, "available_at": 0, "reason": None, "claimed_by": None, "claimed_until": 0}
        return self._decide(lambda dialect: (update_by_id(self.table, dialect).values(back), self.table), message_ids)

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete set-aside messages, all or those with these ids; return their number."""
        return self._decide(lambda dialect: delete_by_id(self.table, dialect), message_ids)

    def close(self) -> None:
        """Close the outbox's own connections until the next call, but not the engine."""
        if not self._is_forked:
            self._runner.close()

    def __repr__(self) -> str:
        where = redacted(self._engine.url.render_as_string(hide_password=False))
        return f"<SQLAlchemyOutbox {self.table.fullname!r} in {where}>"

    # Private

    def _make(self, connection: Connection) -> None:
        refuse_old_server(connection.dialect)
        self.table.create(connection, checkfirst=True)
        for index in self.table.indexes:  # a process may have created the table and died before it created the index
            index.create(connection, checkfirst=True)

    def _exists(self) -> bool:
        def work(connection: Connection) -> bool:
            return sa.inspect(connection).has_table(self.table.name, connection.schema_for_object(self.table))

        return self._do_in_time(work, "opening")

    def _inspect_table(self, connection: Connection) -> None:
        """Refuse an old server, and warn of a missing index or a loose collation."""
        refuse_old_server(connection.dialect)
        seen, name, schema = sa.inspect(connection), self.table.name, connection.schema_for_object(self.table)
        index = ["ordering_key", "id"]
        if not any(one["column_names"][:2] == index for one in seen.get_indexes(name, schema)):
            logger.warning("%r is slow without an index on ordering_key and id: create the one in ddl", self)
        if connection.dialect.name not in COLLATES:
            return
        given = collation_of(connection, self.table.c.ordering_key)
        if given is not None and not given.endswith("_bin"):
            logger.warning(
                "%r has the collation %s, under which some different ordering keys are equal and wait for one "
                "another. To change it: ALTER TABLE %s MODIFY ordering_key VARCHAR(255) CHARACTER SET utf8mb4 "
                "COLLATE %s",
                self,
                given,
                name if schema is None else f"{schema}.{name}",
                exact_collation(connection.dialect),
            )

    def _values(self, row: NewRow, now: float) -> dict[str, Any]:
        values = dict(zip(COLUMNS, values_of(row), strict=True))
        return values | {"stored_at": now, "state": READY, "available_at": 0.0, "claimed_until": 0.0}

    def _change(self, dialect: sa.Dialect, alike: Sequence[RowSettlement], now: float) -> sa.Update:
        """Return the UPDATE for rows of one claim that differ only in the reason."""
        columns, one = self.table.c, alike[0]
        # A relay that was stopped for longer than its lease must not change rows that another relay has taken.
        still = sa.and_(columns.id.in_([each.row.id for each in alike]), columns.claimed_by == one.row.claim)
        change = update_by_id(self.table, dialect).where(still).values(claimed_by=None, claimed_until=0.0)
        if _is_doubtful(one):
            change = change.values(possible_duplicate=1)
        if one.outcome is RowOutcome.BACK:
            return change
        later = one.outcome is RowOutcome.LATER
        return change.values(
            state=DELAYED if later else SET_ASIDE,
            available_at=now + one.delay if later else 0.0,
            attempts=columns.attempts + 1,
            reason=sa.case(*((columns.id == each.row.id, each.reason) for each in alike)),
        )

    def _waits(self) -> sa.ColumnElement[bool]:
        return sa.and_(self.table.c.state < SET_ASIDE, self.table.c.format <= FORMAT)

    def _is_set_aside(self, row: sa.FromClause | None = None) -> sa.ColumnElement[bool]:
        columns = (self.table if row is None else row).c
        return sa.and_(columns.state == SET_ASIDE, columns.format <= FORMAT)

    def _with_holds(self) -> tuple[sa.FromClause, sa.ColumnElement[bool]]:
        """Return rows joined with the first stuck row of their keys, and the held test."""
        columns, before = self.table.c, self.table.alias().c
        stuck = sa.and_(before.ordering_key.is_not(None), sa.or_(before.state == SET_ASIDE, before.format > FORMAT))
        first = sa.select(before.ordering_key, sa.func.min(before.id).label("first")).where(stuck)
        holds = first.group_by(before.ordering_key).subquery()
        joined = sa.outerjoin(self.table, holds, holds.c.ordering_key == columns.ordering_key)
        return joined, sa.and_(holds.c.first.is_not(None), holds.c.first < columns.id)

    def _decide(
        self, change: Callable[[sa.Dialect], tuple[Any, sa.FromClause]], message_ids: Sequence[str] | None
    ) -> int:
        ids = check_ids(message_ids)
        columns = self.table.c
        set_aside = sa.select(columns.id, columns.message_id).where(self._is_set_aside()).order_by(columns.id)

        def work(connection: Connection) -> int:
            statement, row = change(connection.dialect)
            statement = statement.where(self._is_set_aside(row))
            if ids is not None:
                found = []
                for some in map(set, portions(ids)):
                    wanted = set_aside.where(columns.message_id.in_(some))
                    # The column's collation may treat different texts as equal.
                    found += [number for number, message_id in connection.execute(wanted) if message_id in some]
            elif connection.dialect.name in LOCKS_WHAT_IT_READS:
                found = list(connection.execute(set_aside).scalars())
            else:
                return int(connection.execute(statement).rowcount)
            return sum(
                int(connection.execute(statement.where(row.c.id.in_(some))).rowcount) for some in portions(found)
            )

        return self._do(work, "changing what was set aside", None)

    def _do_in_time(self, work: Callable[[Connection], T], what: str) -> T:
        def limited(connection: Connection) -> T:
            if self._timeout is not None:
                limit_lock_waits(connection, self._timeout)
            return work(connection)

        return self._do(limited, what, self._timeout)

    def _do(self, work: Callable[[Connection], T], what: str, timeout: float | None) -> T:
        if self._is_forked:
            raise UsageError(f"{self!r} was made before fork(): its connections belong to the parent; make one here")
        # READ COMMITTED locks least of the usual levels. With others, MariaDB also locks gaps, and relays would wait
        # for one another.
        isolation = None if self._dialect.name == "sqlite" else "READ COMMITTED"
        deadline = None if timeout is None else time.monotonic() + timeout
        left, attempts = timeout, _ATTEMPTS
        try:
            while True:
                try:
                    return self._runner.run(work, isolation, left)
                except DBAPIError as error:
                    attempts -= 1
                    left = None if deadline is None else deadline - time.monotonic()
                    if not attempts or (left is not None and left <= 0) or error_code(error) not in CONFLICTS:
                        raise
        except SQLAlchemyError as error:
            # The text of an error of a statement contains its parameters, and so the bodies of messages.
            exhausted = isinstance(error, sa.exc.TimeoutError)  # the engine's pool
            cause = error if exhausted else getattr(error, "orig", None) or type(error).__name__
            raise OutboxError(f"{what} failed in {self!r}: {cause}") from error
        except ReliableMQError:
            raise
        except Exception as error:  # from a driver: SQLAlchemy does not wrap every error raised while it connects
            said = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise OutboxError(f"{what} failed in {self!r}: {said}") from error


@sa.event.listens_for(Session, "before_flush")  # of any session: to listen to one costs more than to add a message
def _before_flush(_session: Session, flush: UOWTransaction, _objects: object) -> None:
    flush.presort_actions[_MessagesLast] = _MessagesLast()


def _is_doubtful(settlement: RowSettlement) -> bool:
    """Return whether this or an earlier relay may have published the row."""
    return settlement.possible_duplicate or settlement.row.possible_duplicate


def _inserts_messages(action: Any) -> bool:
    mapper = getattr(action, "mapper", None)  # of an action for a relationship there is none
    return mapper is not None and issubclass(mapper.class_, _SessionRow)


def _check_texts(message_id: str, exchange: str, routing_key: str, ordering_key: str | None) -> None:
    texts = {"message_id": message_id, "exchange": exchange, "routing_key": routing_key}
    if ordering_key is not None:
        texts["ordering_key"] = ordering_key
    for name, text in texts.items():
        if not is_text(text) or "\0" in text or len(text) > _NAME_CHARACTERS:
            raise ConfigurationError(
                f"{name} must be text of at most {_NAME_CHARACTERS} characters without NUL, not {text!r}"
            )
