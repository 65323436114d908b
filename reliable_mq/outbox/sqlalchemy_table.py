"""The table of an outbox in a database that SQLAlchemy knows, and the few things that databases do differently.

Invariants: the columns of `reliable_mq.core.outbox.COLUMNS` mean the same in every backend; leases and delays are by
one clock for all relays: that of the server, in seconds since 1970, or, where the database is a file, the time since
the boot of the machine, which no jump of the wall clock moves.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    literal_column,
    select,
)
from sqlalchemy.dialects.mysql import DOUBLE, LONGBLOB
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from reliable_mq.clock import boot, since_boot

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine import Dialect

__all__ = [
    "DELAYED",
    "LOCKS_WHAT_IT_READS",
    "READY",
    "SET_ASIDE",
    "boot_name",
    "database_time",
    "ddl",
    "outbox_table",
    "skips_locked",
]

READY: Final = 0
DELAYED: Final = 1
SET_ASIDE: Final = 2

_CLOCKS: Final = {
    "postgresql": "extract(epoch from clock_timestamp())",
    "mysql": "unix_timestamp(sysdate(6))",
    "mariadb": "unix_timestamp(sysdate(6))",
}
_FILES: Final = frozenset({"sqlite"})
_MYSQL: Final = ("mysql", "mariadb")
_SKIP_LOCKED: Final = frozenset({"postgresql", "mysql", "mariadb", "oracle"})
LOCKS_WHAT_IT_READS: Final = frozenset(_MYSQL)
"""Databases whose ``FOR UPDATE`` locks what it looks at, and reads the newest where its subqueries read a snapshot."""
_NAME: Final = 255  # AMQP's own limit, in bytes


def outbox_table(name: str, schema: str | None) -> Table:
    """Make the table, by itself."""
    binary: Any = LargeBinary().with_variant(LONGBLOB(), *_MYSQL)
    seconds: Any = Double().with_variant(DOUBLE(), *_MYSQL)
    number: Any = BigInteger().with_variant(Integer(), "sqlite")  # which counts up by itself in that type alone
    return Table(
        name,
        MetaData(schema=schema),
        Column("id", number, primary_key=True, autoincrement=True),
        Column("format", SmallInteger, nullable=False),
        Column("message_id", String(_NAME), nullable=False),
        Column("exchange", String(_NAME), nullable=False),
        Column("routing_key", String(_NAME), nullable=False),
        Column("mandatory", SmallInteger, nullable=False),
        Column("ordering_key", String(_NAME)),
        Column("properties", binary),
        Column("body", binary, nullable=False),
        Column("attempts", Integer, nullable=False, server_default="0"),
        Column("possible_duplicate", SmallInteger, nullable=False, server_default="0"),
        Column("stored_at", seconds, nullable=False),
        Column("state", SmallInteger, nullable=False, server_default="0"),
        Column("available_at", seconds, nullable=False, server_default="0"),
        Column("claimed_by", String(64)),
        Column("claimed_until", seconds, nullable=False, server_default="0"),
        Column("reason", Text),
        Index(f"{name}_in_order", "ordering_key", "id"),
        # Ids are never used again: a position in the table stays one.
        sqlite_autoincrement=True,
    )


def ddl(table: Table, dialect: Dialect) -> str:
    """Give the statements that make the table."""
    statements: list[DDLElement] = [CreateTable(table), *map(CreateIndex, table.indexes)]
    return "\n".join(f"{str(statement.compile(dialect=dialect)).strip()};" for statement in statements)


def skips_locked(connection: Connection) -> bool:
    """Whether ``FOR UPDATE SKIP LOCKED`` is to be had."""
    return connection.dialect.name in _SKIP_LOCKED


def database_time(connection: Connection) -> float:
    """Ask the database what time it is, in seconds; one that is a file has the time since the boot of the machine."""
    name = connection.dialect.name
    if name in _FILES:
        return since_boot() / 1_000_000
    clock = _CLOCKS.get(name)
    return time.time() if clock is None else float(connection.execute(select(literal_column(clock))).scalar_one())


def boot_name(dialect: Dialect) -> str:
    """Name this boot of the machine, in 12 characters, where `database_time` begins with it; else an empty text."""
    return hashlib.sha256(boot()[0].encode()).hexdigest()[:12] if dialect.name in _FILES else ""
