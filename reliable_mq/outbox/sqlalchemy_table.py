"""The table of a SQLAlchemy outbox, and the differences between databases.

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
"""Databases that take some different texts for equal, by the default collation."""
_SKIP_LOCKED: Final = frozenset({"postgresql", "mysql", "mariadb", "oracle"})
WALKS_AN_INDEX: Final = frozenset({"postgresql", "sqlite"})
"""Databases that need a recursive query to go from key to key in an index; others do so for GROUP BY."""
_NAME: Final = 255  # AMQP's own limit, in bytes


class ExactString(String):
    """Text that is equal for equal characters alone, in MySQL and MariaDB, too."""

    cache_ok = True


@compiles(ExactString, *_MYSQL)
def _exact(kind: ExactString, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({kind.length}) CHARACTER SET utf8mb4 COLLATE {exact_collation(compiler.dialect)}"


def exact_collation(dialect: Dialect) -> str:
    """Return the collation of MariaDB or MySQL that tells all texts apart."""
    return "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"


def collation_of(connection: Connection, at: Column[Any]) -> str | None:
    """Return the collation of a column in MariaDB or MySQL, wherever it is from."""
    names = ("collation_name", "table_schema", "table_name", "column_name")
    columns = table("columns", *map(column, names), schema="information_schema")
    found = select(columns.c.collation_name).where(
        columns.c.table_schema == (func.database() if at.table.schema is None else at.table.schema),
        columns.c.table_name == at.table.name,
        columns.c.column_name == at.name,
    )
    return connection.execute(found).scalar_one_or_none()


def outbox_table(name: str, schema: str | None) -> Table:
    """Return the table, in a MetaData of its own."""
    binary: Any = LargeBinary().with_variant(LONGBLOB(), *_MYSQL)
    seconds: Any = Double().with_variant(DOUBLE(), *_MYSQL)
    number: Any = BigInteger().with_variant(Integer(), "sqlite")  # the only type that SQLite increments by itself
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
    """Return the statements that make the table."""
    statements: list[DDLElement] = [CreateTable(table), *map(CreateIndex, table.indexes)]
    return "\n".join(f"{str(statement.compile(dialect=dialect)).strip()};" for statement in statements)


def skips_locked(connection: Connection) -> bool:
    """Return whether the database has ``FOR UPDATE SKIP LOCKED``."""
    return connection.dialect.name in _SKIP_LOCKED


def database_time(connection: Connection) -> float:
    """Return the database's time in seconds; for a file, the time since the boot."""
    name = connection.dialect.name
    if name in _FILES:
        return since_boot() / 1_000_000
    clock = _CLOCKS.get(name)
    return time.time() if clock is None else float(connection.execute(select(literal_column(clock))).scalar_one())


def begin_taking(connection: Connection) -> float:
    """Return the database's time; make PostgreSQL use the index in this transaction.

    For a table that was not analyzed yet, or was empty then, it expects few rows, and would read and sort all of them
    to find the first ones.
    """
    if connection.dialect.name != "postgresql":
        return database_time(connection)
    off = [func.set_config(name, "off", True) for name in ("enable_bitmapscan", "enable_seqscan", "enable_sort", "jit")]
    return float(connection.execute(select(literal_column(_CLOCKS["postgresql"]), *off)).one()[0])


def boot_name(dialect: Dialect) -> str:
    """Return the name of this boot if `database_time` starts with it, else no text."""
    return hashlib.sha256(boot()[0].encode()).hexdigest()[:12] if dialect.name in _FILES else ""
