"""Stores that cannot be created: missing packages, wrong engines, wrong URLs."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import reliable_mq.stores
from reliable_mq import ConfigurationError, Consumer, IdempotencyStoreError
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
        ("AsyncSQLAlchemyStore", "sqlalchemy", "sqlalchemy", "sql"),
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


def test_stores_implement_the_protocols() -> None:
    for kind in (RedisStore, SQLAlchemyStore, SQLiteStore):
        assert issubclass(kind, IdempotencyStore)
    for kind in (AsyncRedisStore, AsyncSQLAlchemyStore):
        assert issubclass(kind, AsyncIdempotencyStore)


def test_an_asyncio_store_is_refused_by_a_sync_consumer() -> None:
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
        ({"prefix": "\ud800"}, "prefix"),
    ],
)
def test_nonsense_is_refused_by_stores_in_redis(kind: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        kind(**{"url": "redis://localhost", **wrong})


def test_a_client_of_ones_own_must_not_be_able_to_hang() -> None:
    with pytest.raises(ConfigurationError, match="socket_timeout"):
        RedisStore(redis.Redis(socket_timeout=None))
    with pytest.raises(ConfigurationError, match="repeats a call up to 10 times"):
        RedisStore(redis.Redis(socket_timeout=5))
    once = redis.Redis(socket_timeout=5, retry=Retry(NoBackoff(), 0))
    with pytest.raises(ConfigurationError, match="ssl"):
        RedisStore(once, ssl=True)
    assert "client of yours" in repr(RedisStore(once))


def test_a_client_that_repeats_calls_after_errors_is_refused() -> None:
    """Each connection then has a retry, which the arguments of the client do not show."""
    settings: dict[str, Any] = {"socket_timeout": 1, "retry_on_error": [redis.ResponseError]}
    with pytest.raises(ConfigurationError, match="repeats a call up to 1 times"):
        RedisStore(redis.Redis.from_url("redis://localhost", **settings))
    RedisStore(redis.Redis.from_url("redis://localhost", retry=Retry(NoBackoff(), 0), **settings))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("user:secret@db/orders", "user:***@db/orders"),
        ("db/orders?password=secret", "db/orders?password=***"),
        ("db/orders?sslmode=require&sslpassword=secret", "db/orders?sslmode=require&sslpassword=***"),
    ],
)
def test_no_password_of_a_database_url_is_shown(url: str, where: str) -> None:
    store = SQLAlchemyStore(create_engine(f"postgresql+psycopg://{url}"))
    assert repr(store) == f"<SQLAlchemyStore at postgresql+psycopg://{where}>"
    assert where in str(store._failed(OSError("refused")))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://user:secret@cache:1234/0", "cache:1234"),
        ("redis://cache/0?password=secret", "cache:6379"),
        ("rediss://:secret@[::1]/0", "[::1]:6379"),
        ("unix://:secret@/run/redis.sock", "/run/redis.sock"),
    ],
)
@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_no_password_of_a_redis_url_is_shown(kind: Any, url: str, where: str) -> None:
    assert repr(kind(url)) == f"<{kind.__name__} at {where}>"


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_redirection_of_a_redis_cluster_is_explained(kind: Any) -> None:
    moved = redis.exceptions.MovedError("13526 10.0.0.2:6379")
    assert "MovedError: 13526 10.0.0.2:6379; the keys of the store are on another node" in str(
        kind("redis://cache")._failed(moved)
    )


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:S3cret/x@h/0",
        "redis://:1234/S3cret@h/0",
        "redis://:1234?S3cret@h/0",
        "redis://:1234#S3cret@h/0",
        "redis://:S3cret#4@h/0",
        "redis://:[S3cret@h/0",
        "redis://:S3cret\u2100@h/0",
        "redis://u:S3cret",
        "redis://u:p@S3cret@h:x/0",
        "unix://:pass/S3cret@/run/redis.sock",
    ],
)
def test_a_redis_url_refusal_hides_its_unencoded_password(kind: Any, url: str) -> None:
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        kind(url)
    error = caught.value
    assert "S3cret" not in f"{error} {error.__cause__} {error.__context__}"


def test_a_database_url_refusal_hides_its_unencoded_password() -> None:
    """The text after the first ``@`` would be the host, which drivers show."""
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        SQLAlchemyStore(create_engine("postgresql+psycopg://user:se@cret@db/orders"))
    assert "cret@" not in str(caught.value)


def test_an_engine_must_be_of_the_right_kind_and_database() -> None:
    with pytest.raises(ConfigurationError, match="create_engine"):
        SQLAlchemyStore(create_async_engine("sqlite+aiosqlite:///x.db"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="create_async_engine"):
        AsyncSQLAlchemyStore(create_engine("sqlite:///x.db"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="engine has a driver for asyncio, aiosqlite"):
        SQLAlchemyStore(create_engine("sqlite+aiosqlite:///x.db"))
    with pytest.raises(ConfigurationError, match="MemoryStore"):
        SQLAlchemyStore(create_engine("sqlite://"))
    for url in ("sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:"):  # where all transactions share a connection
        with pytest.raises(ConfigurationError, match="MemoryStore"):
            AsyncSQLAlchemyStore(create_async_engine(url))


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("redis://localhost", {"sssl": True}, "sssl"),
        ("redis://localhost?foo=bar", {}, "foo"),
        ("redis://localhost", {"socket_timeout": None}, "socket_timeout"),
    ],
)
def test_an_option_that_redis_has_not_is_refused(kind: Any, url: str, options: dict[str, Any], named: str) -> None:
    """The constructor refuses it. Without a timeout, a claim could wait forever."""
    with pytest.raises(ConfigurationError, match=named):
        kind(url, **options)


def test_every_asyncio_store_can_be_closed() -> None:
    async def use(store: AsyncRedisStore | AsyncSQLAlchemyStore) -> None:
        async with store as entered:
            assert entered is store

    asyncio.run(use(AsyncRedisStore("redis://localhost")))
    asyncio.run(use(AsyncSQLAlchemyStore(create_async_engine("sqlite+aiosqlite:///x.db"))))


def test_a_session_is_no_maker_of_sessions() -> None:
    engine, asynchronous = create_engine("sqlite:///x"), create_async_engine("sqlite+aiosqlite:///x")
    with pytest.raises(ConfigurationError, match="session must be a sessionmaker"):
        SQLAlchemyStore(engine, session=Session(engine))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="session must be an async_sessionmaker"):
        AsyncSQLAlchemyStore(asynchronous, session=AsyncSession(asynchronous))  # type: ignore[arg-type]


def test_a_maker_of_the_other_api_is_refused() -> None:
    """Each transaction of a handler would fail, and its message would be dead-lettered."""
    engine, asynchronous = create_engine("sqlite:///x"), create_async_engine("sqlite+aiosqlite:///x")
    with pytest.raises(ConfigurationError, match="session must be a sessionmaker"):
        SQLAlchemyStore(engine, session=async_sessionmaker(asynchronous))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="session must be an async_sessionmaker"):
        AsyncSQLAlchemyStore(asynchronous, session=sessionmaker(engine))  # type: ignore[arg-type]


def test_a_scoped_session_makes_no_sessions() -> None:
    """Its session belongs to a thread or task, and the store begins transactions on threads and tasks of its own."""
    engine, asynchronous = create_engine("sqlite:///x"), create_async_engine("sqlite+aiosqlite:///x")
    shared, tasks = scoped_session(sessionmaker(engine)), async_scoped_session(async_sessionmaker(asynchronous), object)
    with pytest.raises(ConfigurationError, match=r"session must be a sessionmaker .*scoped_session"):
        SQLAlchemyStore(engine, session=shared)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"session must be an async_sessionmaker .*scoped_session"):
        AsyncSQLAlchemyStore(asynchronous, session=tasks)  # type: ignore[arg-type]


def test_an_asyncio_call_without_an_answer_names_its_timeout() -> None:
    async def call(url: str) -> None:
        async with AsyncRedisStore(url, timeout=0.1) as store:
            with pytest.raises(IdempotencyStoreError, match=r"failed: TimeoutError: no answer within 0\.1 s"):
                await store.claim_many(["key"], 1.0)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(call(f"redis://127.0.0.1:{silent.getsockname()[1]}"))
