"""A session inserts messages after its other statements.

Messages are ordinary objects of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, registry, relationship, scoped_session, sessionmaker

from reliable_mq import Message
from reliable_mq.outbox import SQLAlchemyOutbox

MODULES = ("app.models", "shop.models")  # sort before and after the outbox's: the ORM flushes classes by name

Models = tuple[type[Any], type[Any]]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    yield made
    made.dispose()


@pytest.fixture
def outbox(engine: sa.Engine) -> SQLAlchemyOutbox:
    made = SQLAlchemyOutbox(engine, create=True)
    made.open()
    return made


@pytest.fixture(params=MODULES)
def models(request: pytest.FixtureRequest, engine: sa.Engine) -> Models:
    """Return models with a self-referential and a many-to-many relationship."""
    made = registry()
    tables = made.metadata

    def number(name: str, **options: Any) -> sa.Column[int]:
        return sa.Column(name, sa.Integer, **options)

    account: type[Any] = type("Account", (), {"__module__": request.param})
    tag: type[Any] = type("Tag", (), {"__module__": request.param})
    owner = sa.Column("owner", sa.ForeignKey("accounts.id"))
    accounts = sa.Table("accounts", tables, number("id", primary_key=True), number("v"), owner)
    tags = sa.Table("tags", tables, number("id", primary_key=True))
    links = sa.Table(
        "links", tables, sa.Column("a", sa.ForeignKey("accounts.id")), sa.Column("t", sa.ForeignKey("tags.id"))
    )
    made.map_imperatively(tag, tags)
    properties = {
        "children": relationship(account, cascade="all, delete-orphan", single_parent=True),
        "tags": relationship(tag, secondary=links),
    }
    made.map_imperatively(account, accounts, properties=properties)
    tables.create_all(engine)
    with Session(engine) as session:
        session.add_all([new(account, id=1, v=0), new(account, id=2, v=0, owner=1), new(tag, id=1)])
        session.commit()
    return account, tag


def new(of: type[Any], **values: Any) -> Any:
    made = of()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def written(engine: sa.Engine) -> list[str]:
    """Return a list to which later changes are added, such as ``UPDATE accounts``."""
    statements: list[str] = []

    def executed(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        words = statement.replace("INSERT INTO", "INSERT").replace("DELETE FROM", "DELETE").split()
        if words[0] in ("INSERT", "UPDATE", "DELETE"):
            statements.append(f"{words[0]} {words[1]}")

    sa.event.listen(engine, "before_cursor_execute", executed)
    return statements


def update(session: Session, account: type[Any], _tag: type[Any]) -> None:
    session.get_one(account, 1).v += 1


def delete(session: Session, account: type[Any], _tag: type[Any]) -> None:
    session.delete(session.get_one(account, 2))


def replace_children(session: Session, account: type[Any], _tag: type[Any]) -> None:
    parent = session.get_one(account, 1)
    parent.children[:] = [new(account, id=3, v=0, children=[new(account, id=4, v=0)])]


def link(session: Session, account: type[Any], tag: type[Any]) -> None:
    session.get_one(account, 1).tags = [session.get_one(tag, 1), new(tag, id=2)]


CHANGES: list[tuple[Callable[[Session, type[Any], type[Any]], None], set[str]]] = [
    (update, {"UPDATE accounts"}),
    (delete, {"DELETE accounts"}),
    (replace_children, {"INSERT accounts", "DELETE accounts"}),
    (link, {"INSERT tags", "INSERT links"}),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_messages_follow_the_changes_of_their_session(
    engine: sa.Engine,
    outbox: SQLAlchemyOutbox,
    models: Models,
    change: Callable[[Session, type[Any], type[Any]], None],
    expected: set[str],
) -> None:
    """The ids order the messages, so a change gets its row lock before the id."""
    statements = written(engine)
    with Session(engine, autoflush=False) as session:
        outbox.add(session, Message(b"first"), routing_key="q")
        change(session, *models)
        outbox.add(session, Message(b"second"), routing_key="q")
        session.commit()
    messages = [statement for statement in statements if "reliable_mq_outbox" in statement]
    assert messages
    assert statements[-len(messages) :] == messages
    assert set(statements[: -len(messages)]) == expected
    assert bodies(engine, outbox) == [b"first", b"second"]


def bodies(engine: sa.Engine, outbox: SQLAlchemyOutbox) -> list[bytes]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(outbox.table.c.body).order_by(outbox.table.c.id)))


def test_messages_of_two_outboxes_follow_the_same_changes(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, models: Models
) -> None:
    other = SQLAlchemyOutbox(engine, table="other_outbox", create=True)
    other.open()
    statements = written(engine)
    with Session(engine) as session:
        update(session, *models)
        outbox.add(session, Message(b"here"), routing_key="q")
        other.add(session, Message(b"there"), routing_key="q")
        session.commit()
    assert statements[0] == "UPDATE accounts"
    assert set(statements[1:]) == {"INSERT reliable_mq_outbox", "INSERT other_outbox"}
    assert (bodies(engine, outbox), bodies(engine, other)) == ([b"here"], [b"there"])


def test_savepoints_and_rollbacks_discard_messages(engine: sa.Engine, outbox: SQLAlchemyOutbox, models: Models) -> None:
    def add(body: bytes) -> None:
        update(session, *models)
        outbox.add(session, Message(body), routing_key="q")

    with Session(engine) as session:
        add(b"rolled back")
        session.rollback()
        add(b"outside")
        with session.begin_nested() as savepoint:
            add(b"rolled back with a savepoint")
            session.flush()
            savepoint.rollback()
        with session.begin_nested() as savepoint:
            add(b"never flushed")
            savepoint.rollback()
        with session.begin_nested():
            add(b"inside")
        assert not session.new
        add(b"expunged")
        session.expunge_all()
        session.commit()
        outbox.add(session, Message(b"alone"), routing_key="q")
        assert len(session.new) == 1
        session.commit()
    assert bodies(engine, outbox) == [b"outside", b"inside", b"alone"]


def test_scoped_sessions_insert_messages_last(engine: sa.Engine, outbox: SQLAlchemyOutbox, models: Models) -> None:
    statements = written(engine)
    session = scoped_session(sessionmaker(engine))
    delete(session(), *models)
    outbox.add(session, Message(b"last"), routing_key="q")
    session.commit()
    session.remove()
    assert statements == ["DELETE accounts", "INSERT reliable_mq_outbox"]


@pytest.mark.parametrize("scoped", [False, True], ids=["session", "scoped"])
def test_asyncio_sessions_insert_messages_last(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, models: Models, scoped: bool
) -> None:
    async def scenario() -> list[str]:
        on_loop = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite"))
        statements = written(on_loop.sync_engine)
        sessions = async_sessionmaker(on_loop)
        session = async_scoped_session(sessions, asyncio.current_task) if scoped else AsyncSession(on_loop)
        await session.delete(await session.get_one(models[0], 2))
        outbox.add(session, Message(b"last"), routing_key="q")
        await session.commit()
        await session.close()
        await on_loop.dispose()
        return statements

    assert asyncio.run(scenario()) == ["DELETE accounts", "INSERT reliable_mq_outbox"]
