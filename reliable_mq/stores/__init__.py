"""Idempotency stores: a message that is delivered twice takes effect once.

A consumer claims the key of a delivery before its handler runs, and completes the claim afterwards. Only then does it
ack the delivery. A claim that is never settled ends with its lease, and the next claim of the key takes over. A done
key is remembered for the retention of the store. A duplicate that arrives later takes effect again.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reliable_mq._util.validation import missing_extra
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.stores.memory import MemoryStore
from reliable_mq.stores.protocol import AsyncIdempotencyStore, IdempotencyStore

if TYPE_CHECKING:
    from reliable_mq.stores.redis import AsyncRedisStore, RedisStore
    from reliable_mq.stores.sqlalchemy import AsyncSQLAlchemyStore, SQLAlchemyStore
    from reliable_mq.stores.sqlite import SQLiteStore

__all__ = [
    "AsyncIdempotencyStore",
    "AsyncRedisStore",
    "AsyncSQLAlchemyStore",
    "Claim",
    "ClaimStatus",
    "IdempotencyStore",
    "MemoryStore",
    "RedisStore",
    "SQLAlchemyStore",
    "SQLiteStore",
]

_ON_DEMAND = {  # name: module, and the extra that it needs
    "AsyncRedisStore": ("redis", "redis"),
    "AsyncSQLAlchemyStore": ("sqlalchemy", "sql"),
    "RedisStore": ("redis", "redis"),
    "SQLAlchemyStore": ("sqlalchemy", "sql"),
    "SQLiteStore": ("sqlite", ""),
}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> object:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, extra = _ON_DEMAND[name]
        try:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        except ImportError as error:
            raise missing_extra(name, extra, error) from error
        return value
