"""The table of a SQLAlchemy outbox, and the differences between databases.

Invariants:

- the columns of `reliable_mq.core.outbox.COLUMNS` mean the same in every backend, and hold any text, independent of the
  default character set of MariaDB and MySQL;
- all relays use one clock for leases and delays: the server's, in seconds since 1970, or, if the database is a file,
  the time since the boot of the machine, which is independent of the wall clock;
- rows are changed and deleted by id, and no other row is waited for. Instead of looking up many ids in a small table,
  MariaDB and MySQL would read all of its rows and wait for each that another transaction has locked, for example a row
  of an open transaction of the user. So statements there force the use of the primary key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import DOUBLE, LONGBLOB, TEXT
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from reliable_mq._util.boottime import boot, since_boot
from reliable_mq._util.validation import lock_timeout
from reliable_mq.errors import ConfigurationError
from reliable_mq.outbox.protocol import text_or_bytes

READY: Final = 0
DELAYED: Final = 1
SET_ASIDE: Final = 2

UNNAMED_BOOT: Final = "unnamed boot"
"""The name of each boot for a process that cannot read the names of boots."""

# Computed from UTC: the local time of a zone repeats an hour when its summer time ends.
_MYSQL_CLOCK: Final = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) / 1000000"
_CLOCKS: Final = {
    "postgresql": "extract(epoch from clock_timestamp())",
    "mysql": _MYSQL_CLOCK,
    "mariadb": _MYSQL_CLOCK,
}
_MYSQL: Final = ("mysql", "mariadb")
COLLATES: Final = frozenset(_MYSQL)
"""Databases that take some different texts for equal, by the default collation."""
LOCKS_WHAT_IT_READS: Final = frozenset(_MYSQL)
"""Databases whose changing statements wait for every row that they read, and not only for those that they change."""
_SKIP_LOCKED: Final = frozenset({"postgresql", "mysql", "mariadb", "oracle"})
WALKS_AN_INDEX: Final = frozenset({"postgresql", "sqlite"})
"""Databases that need a recursive query to go from key to key in an index; others do so for GROUP BY."""
_NAME: Final = 255  # AMQP's own limit, in bytes


class ExactString(sa.String):
    """A text type that compares exact characters, in MySQL and MariaDB, too."""

    cache_ok = True


@compiles(ExactString, *_MYSQL)
def _exact(kind: ExactString, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({kind.length}) CHARACTER SET utf8mb4 COLLATE {exact_collation(compiler.dialect)}"


def exact_collation(dialect: Dialect) -> str:
    """Return the collation of MariaDB or MySQL that distinguishes all texts."""
    return "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"


def collation_of(connection: sa.Connection, at: sa.Column[Any]) -> str | None:
    """Return the effective collation of a column in MariaDB or MySQL."""
    names = ("collation_name", "table_schema", "table_name", "column_name")
    columns = sa.table("columns", *map(sa.column, names), schema="information_schema")
    schema = connection.schema_for_object(at.table)
    found = sa.select(columns.c.collation_name).where(
        columns.c.table_schema == (sa.func.database() if schema is None else schema),
        columns.c.table_name == at.table.name,
        columns.c.column_name == at.name,
    )
    return connection.execute(found).scalar_one_or_none()


def outbox_table(name: str, schema: str | None) -> sa.Table:
    """Return the outbox's table in a separate MetaData."""
    binary: Any = sa.LargeBinary().with_variant(LONGBLOB(), *_MYSQL)
    seconds: Any = sa.Double().with_variant(DOUBLE(), *_MYSQL)
    number: Any = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # the only type that SQLite autoincrements
    return sa.Table(
        name,
        sa.MetaData(schema=schema),
        sa.Column("id", number, primary_key=True, autoincrement=True),
        sa.Column("format", sa.SmallInteger, nullable=False),
        sa.Column("message_id", ExactString(_NAME), nullable=False),
        sa.Column("exchange", ExactString(_NAME), nullable=False),
        sa.Column("routing_key", ExactString(_NAME), nullable=False),
        sa.Column("mandatory", sa.SmallInteger, nullable=False),
        sa.Column("ordering_key", ExactString(_NAME)),
        sa.Column("properties", binary),
        sa.Column("body", binary, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("possible_duplicate", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("stored_at", seconds, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("available_at", seconds, nullable=False, server_default="0"),
        sa.Column("claimed_by", sa.String(64)),
        sa.Column("claimed_until", seconds, nullable=False, server_default="0"),
        sa.Column("reason", sa.Text().with_variant(TEXT(charset="utf8mb4"), *_MYSQL)),
        sa.Index(f"{name}_in_order", "ordering_key", "id"),
        # Ids are never used again, so a position in the table stays valid.
        sqlite_autoincrement=True,
    )


def ddl(table: sa.Table, dialect: Dialect) -> str:
    """Return the SQL statements that create the table."""
    statements: list[DDLElement] = [CreateTable(table), *map(CreateIndex, table.indexes)]
    return "\n".join(f"{str(statement.compile(dialect=dialect)).strip()};" for statement in statements)


def skips_locked(connection: sa.Connection) -> bool:
    """Return whether the database supports ``FOR UPDATE SKIP LOCKED``."""
    return connection.dialect.name in _SKIP_LOCKED


def refuse_old_server(dialect: Dialect) -> None:
    """Raise ConfigurationError if MariaDB or MySQL is older than ``SKIP LOCKED``."""
    if dialect.name not in _MYSQL:
        return
    server, first = ("MariaDB", (10, 6)) if getattr(dialect, "is_mariadb", False) else ("MySQL", (8, 0, 1))
    version = dialect.server_version_info
    if version is not None and version < first:
        raise ConfigurationError(
            f"an outbox needs {server} {_dotted(first)} or later, for SKIP LOCKED, not {_dotted(version)}"
        )


def _dotted(version: Sequence[object]) -> str:
    return ".".join(map(str, version))


def database_time(connection: sa.Connection) -> float:
    """Return the database's time in seconds, or the time since boot for a file."""
    name = connection.dialect.name
    if name == "sqlite":
        return since_boot() / 1_000_000
    clock = _CLOCKS.get(name)
    return time.time() if clock is None else float(connection.execute(sa.select(sa.literal_column(clock))).scalar_one())


def begin_taking(connection: sa.Connection) -> float:
    """Return the database's time, and make PostgreSQL use the index.

    The settings last for this transaction. If the table was never analyzed, or was empty when it was, PostgreSQL
    expects few rows, and would read and sort all of them to find the first ones.
    """
    if connection.dialect.name != "postgresql":
        return database_time(connection)
    off = [
        sa.func.set_config(name, "off", True) for name in ("enable_bitmapscan", "enable_seqscan", "enable_sort", "jit")
    ]
    return float(connection.execute(sa.select(sa.literal_column(_CLOCKS["postgresql"]), *off)).one()[0])


@contextmanager
def any_text(connection: sa.Connection) -> Iterator[None]:
    """Let SQLite return texts that are not UTF-8, as bytes, instead of failing."""
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    usual, driver.text_factory = driver.text_factory, text_or_bytes
    try:
        yield
    finally:
        driver.text_factory = usual


def limit_lock_waits(connection: sa.Connection, timeout: float) -> None:
    """Let PostgreSQL end a wait for a lock a little before ``timeout`` seconds.

    The limit lasts for this transaction; one that the connection already has is kept.
    """
    if connection.dialect.name == "postgresql":
        limit = sa.func.set_config("lock_timeout", f"{lock_timeout(timeout)}", True)
        connection.execute(sa.select(limit).where(sa.func.current_setting("lock_timeout") == "0"))


def boot_name(dialect: Dialect) -> str:
    """Return the name of this boot if `database_time` counts from it, else empty text."""
    if dialect.name != "sqlite":
        return ""
    name, _ = boot()
    return hashlib.sha256(name.encode()).hexdigest()[:12] if name else UNNAMED_BOOT


def update_by_id(table: sa.Table, dialect: Dialect) -> sa.Update:
    """Return an UPDATE of rows given by id, which waits for no other row."""
    update = sa.update(table)
    if dialect.name not in LOCKS_WHAT_IT_READS:
        return update
    return update.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect.name)


def delete_by_id(table: sa.Table, dialect: Dialect) -> tuple[sa.Delete, sa.FromClause]:
    """Return a DELETE of rows given by id, which waits for no other, and its table.

    MariaDB takes an index hint only if the DELETE names its table twice, and MySQL obeys only an optimizer hint.
    """
    if dialect.name not in LOCKS_WHAT_IT_READS:
        return sa.delete(table), table
    if getattr(dialect, "is_mariadb", False):
        row: Any = table.alias("o")
        forced = sa.delete(row).prefix_with("o").with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect.name)
        return forced, row
    name = table.name.replace("`", "``")
    return sa.delete(table).prefix_with(f"/*+ INDEX(`{name}` PRIMARY) */"), table
