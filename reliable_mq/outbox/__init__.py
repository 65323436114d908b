"""Outboxes store messages before ``publish`` returns, and relays publish them.

``Publisher(url, outbox=SQLiteOutbox(path))`` stores every message in a file first. ``SQLAlchemyOutbox(engine)`` stores
messages in a table of your database, in your own transaction. The manual lists the guarantees of each outbox:
``docs/guides/outbox.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reliable_mq._util.validation import missing_extra
from reliable_mq.core.outbox import NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.outbox.protocol import FailedRow, Outbox, OutboxStatus, RowBatch, RowLeases
from reliable_mq.outbox.sqlite import SQLiteOutbox

if TYPE_CHECKING:
    from reliable_mq.outbox.sqlalchemy import SQLAlchemyOutbox

__all__ = [
    "FailedRow",
    "NewRow",
    "Outbox",
    "OutboxRow",
    "OutboxStatus",
    "RowBatch",
    "RowLeases",
    "RowOutcome",
    "RowSettlement",
    "SQLAlchemyOutbox",
    "SQLiteOutbox",
]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> object:
        if name != "SQLAlchemyOutbox":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:  # SQLAlchemy comes with the extra `sql`; nothing else here needs it
            value = globals()[name] = import_module("reliable_mq.outbox.sqlalchemy").SQLAlchemyOutbox
        except ImportError as error:
            raise missing_extra(name, "sql", error) from error
        return value
