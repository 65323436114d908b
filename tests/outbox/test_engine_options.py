"""An outbox uses the options and events of its engine for every connection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from reliable_mq import ConfigurationError, Message, OutboxError
from reliable_mq.outbox import SQLAlchemyOutbox


@pytest.fixture(params=["sync", "asyncio"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine | AsyncEngine]:
    """Return an engine whose tables are in ``tenant``, a schema in another file."""
    if request.param == "sync":
        plain = sa.create_engine(f"sqlite:///{tmp_path / 'main.db'}", hide_parameters=True)
        attach(plain, tmp_path)
        yield plain.execution_options(schema_translate_map={None: "tenant"})
        plain.dispose()
    else:
        url = f"sqlite+aiosqlite:///{tmp_path / 'main.db'}"
        on_loop = create_async_engine(url, hide_parameters=True, poolclass=sa.AsyncAdaptedQueuePool)
        attach(on_loop.sync_engine, tmp_path)
        yield on_loop.execution_options(schema_translate_map={None: "tenant"})
        asyncio.run(on_loop.dispose())


def attach(engine: sa.Engine, folder: Path) -> None:
    def connected(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"ATTACH DATABASE '{folder / 'tenant.db'}' AS tenant")
        cursor.close()

    sa.event.listen(engine, "connect", connected)


@pytest.fixture
def outbox(engine: sa.Engine | AsyncEngine) -> Iterator[SQLAlchemyOutbox]:
    made = SQLAlchemyOutbox(engine, create=True)
    yield made
    made.close()


def add(engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox, body: bytes) -> None:
    """Commit a message in a session of the engine."""

    async def on_a_loop(on_loop: AsyncEngine) -> None:
        async with AsyncSession(on_loop) as session:
            outbox.add(session, Message(body), routing_key="q")
            await session.commit()
        await on_loop.dispose()

    if isinstance(engine, AsyncEngine):
        asyncio.run(on_a_loop(engine))
        return
    with Session(engine) as session:
        outbox.add(session, Message(body), routing_key="q")
        session.commit()


def sync_engine(engine: sa.Engine | AsyncEngine) -> sa.Engine:
    return engine.sync_engine if isinstance(engine, AsyncEngine) else engine


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_a_relay_uses_the_schema_that_sessions_use(
    engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox, tmp_path: Path
) -> None:
    """The `schema_translate_map` applies to the relay and to sessions."""
    outbox.open()
    add(engine, outbox, b"here")
    assert "reliable_mq_outbox" in tables(tmp_path / "tenant.db")
    assert "reliable_mq_outbox" not in tables(tmp_path / "main.db")
    assert outbox.backlog()[0] == 1
    assert [row.message.body for row in outbox.claims().take(10).rows] == [b"here"]


def test_an_outbox_looks_for_its_table_in_the_translated_schema(
    engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox
) -> None:
    other = SQLAlchemyOutbox(engine)
    with pytest.raises(OutboxError, match="does not exist"):
        other.open()
    outbox.create_table()
    other.open()
    other.close()


def test_events_of_the_engine_see_the_outboxs_statements(
    engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox
) -> None:
    """Listeners that are added later apply too, such as one that selects a tenant."""
    begun: list[object] = []
    executed: list[str] = []
    sa.event.listen(sync_engine(engine), "begin", begun.append)
    outbox.open()
    assert begun

    @sa.event.listens_for(sync_engine(engine), "before_cursor_execute", retval=True)
    def marked(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> tuple[str, Any]:
        executed.append(statement)
        return f"{statement} -- marked", parameters

    outbox.status()
    assert any("reliable_mq_outbox" in statement for statement in executed)


def test_an_outbox_leaves_the_pool_of_its_engine_alone(
    engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox
) -> None:
    """The outbox does not replace the pool.

    On asyncio it takes no connections from it either, because they belong to another event loop.
    """
    pool = sync_engine(engine).pool
    outbox.open()
    outbox.close()
    outbox.status()
    outbox.close()
    assert sync_engine(engine).pool is pool
    if isinstance(engine, AsyncEngine):
        assert isinstance(pool, sa.QueuePool)
        assert pool.checkedin() == pool.checkedout() == 0


def test_an_exhausted_pool_is_named(tmp_path: Path) -> None:
    engine = sa.create_engine(
        f"sqlite:///{tmp_path / 'main.db'}", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.1
    )
    with engine.connect(), pytest.raises(OutboxError, match="QueuePool limit of size 1 overflow 0 reached"):
        SQLAlchemyOutbox(engine).open()
    engine.dispose()


def test_parameters_stay_hidden(engine: sa.Engine | AsyncEngine, outbox: SQLAlchemyOutbox) -> None:
    outbox.open()
    with pytest.raises(OutboxError) as caught:
        outbox._do(
            lambda connection: connection.execute(sa.text("SELECT :secret FROM nowhere"), {"secret": "s3"}), "x", None
        )
    assert "s3" not in str(caught.value.__cause__)


def test_a_plain_engine_with_a_driver_for_asyncio_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="engine has a driver for asyncio, aiosqlite"):
        SQLAlchemyOutbox(sa.create_engine("sqlite+aiosqlite:///x.db"))
