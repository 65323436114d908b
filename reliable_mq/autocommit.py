"""Whether an engine of SQLAlchemy commits every statement by itself, so that nothing on it is a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["AUTOCOMMIT", "is_autocommit", "level_of", "refuse_autocommit"]

AUTOCOMMIT: Final = "AUTOCOMMIT"


def level_of(engine: Engine | AsyncEngine) -> object:
    """The isolation level that an engine was given; None where it was given none."""
    given: object = engine.get_execution_options().get("isolation_level")
    return given or getattr(engine.dialect, "_on_connect_isolation_level", None)  # that of create_engine()


def is_autocommit(level: object) -> bool:
    """Whether an isolation level is none."""
    return isinstance(level, str) and level.upper() == AUTOCOMMIT


def refuse_autocommit(engine: Engine | AsyncEngine, so_that: str) -> None:
    """Raise ConfigurationError, which says what comes of it, where an engine is told to commit each statement."""
    if is_autocommit(level_of(engine)):
        raise ConfigurationError(
            f"engine commits every statement by itself (isolation_level {AUTOCOMMIT!r}), so that {so_that}: give "
            "create_engine() another isolation_level, or none"
        )
