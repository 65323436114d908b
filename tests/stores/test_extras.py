"""Stores that are not what they are asked for: missing packages, wrong engines, wrong URLs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import reliable_mq.stores
from reliable_mq import ConfigurationError, Consumer
from reliable_mq.stores import (
    AsyncIdempotencyStore,
    AsyncRedisStore,
    AsyncSQLAlchemyStore,
    IdempotencyStore,
    RedisStore,
    SQLAlchemyStore,
    SQLiteStore,
)


@pytest.mark.parametrize(
    ("name", "module", "package", "extra"),
    [
        ("RedisStore", "redis", "redis", "redis"),
        ("AsyncRedisStore", "redis", "redis", "redis"),
        ("SQLAlchemyStore", "sqlalchemy", "sqlalchemy", "sql"),
        ("AsyncSQLAlchemyStore", "sqlalchemy_async", "sqlalchemy", "sql"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    name: str, module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(reliable_mq.stores), name)
    monkeypatch.delitem(sys.modules, f"reliable_mq.stores.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{name} .*pip install 'reliable-mq\[{extra}\]'"):
        getattr(reliable_mq.stores, name)


def test_there_is_no_other_store() -> None:
    with pytest.raises(AttributeError, match="CloudStore"):
        _ = reliable_mq.stores.CloudStore


def test_stores_are_what_consumers_ask_for() -> None:
    for kind in (RedisStore, SQLAlchemyStore, SQLiteStore):
        assert issubclass(kind, IdempotencyStore)
    for kind in (AsyncRedisStore, AsyncSQLAlchemyStore):
        assert issubclass(kind, AsyncIdempotencyStore)


def test_a_store_of_the_asyncio_face_is_refused_by_a_consumer_of_the_other() -> None:
    with pytest.raises(ConfigurationError, match="AsyncConsumer"):
        Consumer("amqp://localhost", "orders", print, idempotency=AsyncRedisStore("redis://localhost"))


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"url": "http://localhost"}, "url"),
        ({"url": "redis://localhost:x"}, "url"),
        ({"url": 7}, "url"),
        ({"retention": 0}, "retention"),
        ({"timeout": 0}, "timeout"),
        ({"prefix": b"x"}, "prefix"),
    ],
)
def test_nonsense_is_refused_by_stores_in_redis(kind: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        kind(**{"url": "redis://localhost", **wrong})


def test_a_client_of_ones_own_must_not_be_able_to_hang() -> None:
    with pytest.raises(ConfigurationError, match="socket_timeout"):
        RedisStore(redis.Redis(socket_timeout=None))
    with pytest.raises(ConfigurationError, match="ssl"):
        RedisStore(redis.Redis(socket_timeout=5), ssl=True)
    assert "client of yours" in repr(RedisStore(redis.Redis(socket_timeout=5)))


def test_no_password_is_shown() -> None:
    store = RedisStore("redis://user:secret@cache:1234/0")
    assert "secret" not in repr(store)
    assert "cache:1234" in repr(store)
    assert "secret" not in repr(SQLAlchemyStore(create_engine("postgresql+psycopg://user:secret@db/orders")))


def test_an_engine_must_be_of_the_face_and_of_a_known_database() -> None:
    with pytest.raises(ConfigurationError, match="create_engine"):
        SQLAlchemyStore(create_async_engine("sqlite+aiosqlite:///x.db"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="create_async_engine"):
        AsyncSQLAlchemyStore(create_engine("sqlite:///x.db"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="MemoryStore"):
        SQLAlchemyStore(create_engine("sqlite://"))
