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
    column,
    func,
    literal_column,
    select,
    table,
)
from sqlalchemy.dialects.mysql import DOUBLE, LONGBLOB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from reliable_mq._util.boottime import boot, since_boot

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine import Dialect

__all__ = [
    "COLLATES",
    "DELAYED",
    "READY",
    "SET_ASIDE",
    "WALKS_AN_INDEX",
    "ExactString",
    "begin_taking",
    "boot_name",
    "collation_of",
    "database_time",
    "ddl",
    "exact_collation",
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
COLLATES: Final = frozenset(_MYSQL)
"""Databases that take some texts for the same unless a column has another collation."""
_SKIP_LOCKED: Final = frozenset({"postgresql", "mysql", "mariadb", "oracle"})
WALKS_AN_INDEX: Final = frozenset({"postgresql", "sqlite"})
"""Databases that must be told how to go from key to key in an index; others do so where a query groups by the key."""
_NAME: Final = 255  # AMQP's own limit, in bytes


class ExactString(String):
    """Text that is the same for the same characters alone: MySQL and MariaDB compare loosely unless they are told."""

    cache_ok = True


@compiles(ExactString, *_MYSQL)
def _exact(kind: ExactString, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({kind.length}) CHARACTER SET utf8mb4 COLLATE {exact_collation(compiler.dialect)}"


def exact_collation(dialect: Dialect) -> str:
    """Name the collation of MariaDB or MySQL that tells all texts from one another, spaces at their ends, too."""
    return "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"


def collation_of(connection: Connection, at: Column[Any]) -> str | None:
    """Ask MariaDB or MySQL how they compare a column of a table, which may have that from its table or database."""
    names = ("collation_name", "table_schema", "table_name", "column_name")
    columns = table("columns", *map(column, names), schema="information_schema")
    found = select(columns.c.collation_name).where(
        columns.c.table_schema == (func.database() if at.table.schema is None else at.table.schema),
        columns.c.table_name == at.table.name,
        columns.c.column_name == at.name,
    )
    return connection.execute(found).scalar_one_or_none()


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
        Column("message_id", ExactString(_NAME), nullable=False),
        Column("exchange", String(_NAME), nullable=False),
        Column("routing_key", String(_NAME), nullable=False),
        Column("mandatory", SmallInteger, nullable=False),
        Column("ordering_key", ExactString(_NAME)),
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


def begin_taking(connection: Connection) -> float:
    """Ask for the time, and have PostgreSQL go by the index until the end of the transaction.

    Where it has not counted a table yet, or when it was empty, it takes few rows for granted, and would read and sort
    all of them to find the first ones.
    """
    if connection.dialect.name != "postgresql":
        return database_time(connection)
    off = [func.set_config(name, "off", True) for name in ("enable_bitmapscan", "enable_seqscan", "enable_sort", "jit")]
    return float(connection.execute(select(literal_column(_CLOCKS["postgresql"]), *off)).one()[0])


def boot_name(dialect: Dialect) -> str:
    """Name this boot of the machine, in 12 characters, where `database_time` begins with it; else an empty text."""
    return hashlib.sha256(boot()[0].encode()).hexdigest()[:12] if dialect.name in _FILES else ""
