"""Isolation levels of SQLAlchemy's connections: to have one for a transaction, and to refuse what is none.

SQLAlchemy has levels for a connection, too, and puts the level back when the connection goes back to its pool. Where
that asks the server, as with psycopg2 and MariaDB, and fails, the pool has one place less for ever (2.1.9), and none
after some failures. So the level is set and put back here, where a failure costs the connection alone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["AUTOCOMMIT", "refuse_autocommit", "refuse_connection_in_autocommit", "transaction_at"]

AUTOCOMMIT: Final = "AUTOCOMMIT"


def refuse_autocommit(engine: Engine | AsyncEngine, so_that: str) -> None:
    """Raise ConfigurationError, which says what comes of it, where an engine is told to commit each statement."""
    if _is_autocommit(_level_of(engine)):
        raise ConfigurationError(
            f"engine commits every statement by itself (isolation_level {AUTOCOMMIT!r}), so that {so_that}: give "
            "create_engine() another isolation_level, or none"
        )


def refuse_connection_in_autocommit(connection: Connection) -> None:
    """Raise ConfigurationError where the connection of a session commits each statement, whoever told it to."""
    level = connection.get_execution_options().get("isolation_level") or _level_of(connection.engine)
    dbapi: Any = connection.connection.dbapi_connection
    said = getattr(dbapi, "get_autocommit", None) or getattr(dbapi, "autocommit", False)
    begun = getattr(connection.connection.driver_connection, "in_transaction", True)  # SQLite says
    if _is_autocommit(level) or (said() if callable(said) else said) is True or not begun:
        raise ConfigurationError(
            f"the session's connection commits every statement by itself ({AUTOCOMMIT}), so this would be no "
            "transaction: give its engine another isolation_level, or none"
        )


@contextlib.contextmanager
def transaction_at(connection: Connection, level: str | None) -> Iterator[None]:
    """Begin a transaction, and commit it at the end of the block, or roll it back where that raises.

    Args:
        connection: of a pool, and in no transaction.
        level: of isolation, of which AUTOCOMMIT is one; None for what the engine has.
    """
    if level is None:
        with connection.begin():
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
        with connection.begin():
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
    """The isolation level that an engine was given; None where it was given none."""
    given: object = engine.get_execution_options().get("isolation_level")
    return given or getattr(engine.dialect, "_on_connect_isolation_level", None)  # that of create_engine()


def _is_autocommit(level: object) -> bool:
    return isinstance(level, str) and level.upper() == AUTOCOMMIT
