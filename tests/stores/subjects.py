"""The stores under test, with one interface and records that can be aged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from reliable_mq.stores import (
    AsyncSQLAlchemyStore,
    Claim,
    IdempotencyStore,
    MemoryStore,
    SQLAlchemyStore,
    SQLiteStore,
)
from reliable_mq.testing.store_contract import RETENTION, StoreOnThread, StoreUnderTest


@dataclass
class Subject(StoreUnderTest):
    """A store under test, and the resources to close after the test."""

    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stack.close()


class Bridged:
    """An asyncio store with its own event loop, for consumers on other loops."""

    def __init__(self, make: Callable[[], Any] | StoreOnThread) -> None:
        self.blocking = make if isinstance(make, StoreOnThread) else StoreOnThread(make)

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        claims: list[Claim] = await self._ask(self.blocking.store.claim_many(keys, lease))
        return claims

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        done: list[bool] = await self._ask(self.blocking.store.complete_many(claims))
        return done

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        held: list[bool] = await self._ask(self.blocking.store.release_many(claims, failed=failed))
        return held

    async def _ask(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.blocking.loop))


def memory() -> Subject:
    now = [1000.0]
    store = MemoryStore(retention=RETENTION, clock=lambda: now[0])

    def age(seconds: float) -> None:
        now[0] += seconds

    def empty() -> None:
        now[0] += 1e6
        store.claim_many([], 1.0)

    assert isinstance(store, IdempotencyStore)
    return Subject(store, age, empty)


class Records:
    """The table of a store, which tests change directly."""

    def __init__(self, engine: Engine, table: str = "reliable_mq_claims") -> None:
        self.engine, self.table = engine, table

    def age(self, seconds: float) -> None:
        shift = int(seconds * 1_000_000)
        self._do(f"UPDATE {self.table} SET lease_ends = lease_ends - {shift}, expires = expires - {shift}")

    def empty(self) -> None:
        self._do(f"DELETE FROM {self.table}")

    def rewrite(self, key: str) -> None:
        self._do(f"UPDATE {self.table} SET format = 2 WHERE claim_key = '{key}'")

    def count(self) -> int:
        with self.engine.connect() as connection:
            count: int = connection.execute(text(f"SELECT count(*) FROM {self.table}")).scalar_one()
            return count

    def _do(self, sql: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql))

    def subject(self, store: Any) -> Subject:
        return Subject(store, self.age, self.empty, self.rewrite)


def quick(engine: Engine) -> Engine:
    """Make commits fast: no test simulates a power failure."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA journal_mode = WAL").close()
        connection.execute("PRAGMA synchronous = OFF").close()

    return engine


def sqlite(directory: Path) -> Subject:
    def opened() -> SQLiteStore:
        return stack.enter_context(closing(SQLiteStore(directory / "store.db", retention=RETENTION)))

    stack = ExitStack()
    store = opened()
    store.claim_many(["x"], 1.0)
    subject = Records(create_engine(f"sqlite:///{directory / 'store.db'}", poolclass=NullPool)).subject(store)
    subject.stack, subject.another = stack, opened
    return subject


def sqlalchemy(engine: Engine) -> Subject:
    def opened() -> SQLAlchemyStore:
        return stack.enter_context(closing(SQLAlchemyStore(engine, retention=RETENTION, timeout=30)))

    stack = ExitStack()
    stack.callback(engine.dispose)
    store = opened()
    store.create_table()
    subject = Records(engine).subject(store)
    subject.stack, subject.another = stack, opened
    return subject


def sqlalchemy_sqlite(directory: Path) -> Subject:
    return sqlalchemy(quick(create_engine(f"sqlite:///{directory / 'sql.db'}")))


def sqlalchemy_async(url: str, records: Engine) -> Subject:
    """Return an asyncio store on another engine for the table of ``records``."""

    def opened() -> StoreOnThread:
        made = StoreOnThread(lambda: AsyncSQLAlchemyStore(create_async_engine(url), retention=RETENTION, timeout=30))
        stack.callback(lambda: made.end(made.store._engine.dispose()))
        return made

    stack = ExitStack()
    stack.callback(records.dispose)
    blocking = opened()
    blocking.run(blocking.store.create_table())
    subject = Records(records).subject(blocking)
    subject.stack, subject.another = stack, opened
    return subject


def sqlalchemy_async_sqlite(directory: Path) -> Subject:
    path = directory / "async.db"
    return sqlalchemy_async(
        f"sqlite+aiosqlite:///{path}", quick(create_engine(f"sqlite:///{path}", poolclass=NullPool))
    )
