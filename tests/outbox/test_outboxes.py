"""Arguments of outboxes, secrets in their URLs, and the locks of a file."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, func, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

from reliable_mq import ConfigurationError, Message, OutboxError, Publisher, UsageError
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": ""},
        {"path": ":memory:"},
        {"path": 5},
        {"path": "/"},
        {"path": "a\0b"},
        {"path": "\ud800"},
        {"path": "x", "timeout": -1},
    ],
)
def test_a_file_outbox_refuses_wrong_arguments(arguments: dict[str, Any]) -> None:
    """Arguments are checked before a file is opened."""
    with pytest.raises(ConfigurationError):
        SQLiteOutbox(**arguments)


@pytest.mark.parametrize("url", ["sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:"])
def test_an_asyncio_engine_of_a_database_in_memory_is_refused(url: str) -> None:
    """A relay has its own connections, and would never see the messages."""
    with pytest.raises(ConfigurationError, match="in memory"):
        SQLAlchemyOutbox(create_async_engine(url))


@pytest.mark.parametrize("schema", [5, ""])
def test_a_schema_must_be_text(schema: Any) -> None:
    """SQLAlchemy would raise its own error, or build an incomplete name."""
    with pytest.raises(ConfigurationError, match="schema must"):
        SQLAlchemyOutbox(create_engine("sqlite://"), schema=schema)


def test_mandatory_must_be_true_or_false() -> None:
    """The column of the row is a number."""
    engine = create_engine("sqlite://")
    outbox = SQLAlchemyOutbox(engine, create=True)
    outbox.open()
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="mandatory must"):
        outbox.add(connection, Message(b""), routing_key="q", mandatory="no")  # type: ignore[arg-type]
    engine.dispose()


def test_a_message_is_added_to_a_session_or_a_connection_alone() -> None:
    """A set has a method ``add`` too, and the message would be lost."""
    engine = create_engine("sqlite://")
    outbox = SQLAlchemyOutbox(engine)
    for other in (set(), outbox, engine, sessionmaker(engine)):
        with pytest.raises(ConfigurationError, match=f"session must .*{type(other).__name__}"):
            outbox.add(other, Message(b""), routing_key="q")  # type: ignore[arg-type]
    for session in (Session(engine), scoped_session(sessionmaker(engine))):
        outbox.add(session, Message(b""), routing_key="q")
        assert len(session.new) == 1
        session.close()
    engine.dispose()


def test_a_connection_that_commits_each_statement_is_refused() -> None:
    """A rollback would leave the message in the outbox."""
    engine = create_engine("sqlite://")
    outbox = SQLAlchemyOutbox(engine, create=True)
    outbox.open()
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="commits every statement"):
        outbox.add(connection.execution_options(isolation_level="AUTOCOMMIT"), Message(b""), routing_key="q")
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(outbox.table)) == 0
    engine.dispose()


def test_a_relay_refuses_a_connection_shared_with_the_user() -> None:
    """It would commit the user's transaction. Messages can be added, as in a test of an application."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    outbox = SQLAlchemyOutbox(engine)
    outbox.create_table()
    with Session(engine) as session:
        outbox.add(session, Message(b""), routing_key="q")
        session.commit()
    publisher = Publisher("amqp://localhost", outbox=outbox)
    with pytest.raises(ConfigurationError, match="StaticPool, which shares a connection"):
        publisher.publish(Message(b""), routing_key="q")
    publisher.close()
    engine.dispose()


@pytest.mark.parametrize("by_engine", [True, False])
def test_a_session_that_commits_each_statement_is_refused(tmp_path: Path, by_engine: bool) -> None:
    """The flush fails before it has written anything."""
    engine = create_engine(f"sqlite:///{tmp_path}/orders.db")
    outbox = SQLAlchemyOutbox(engine)
    outbox.create_table()
    autocommit = create_engine(engine.url, isolation_level="AUTOCOMMIT") if by_engine else engine
    with Session(autocommit) as session:
        if not by_engine:
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        outbox.add(session, Message(b""), routing_key="q")
        with pytest.raises(ConfigurationError, match="commits every statement"):
            session.commit()
    assert outbox.status().rows == 0
    autocommit.dispose()
    engine.dispose()


def test_an_ordering_key_must_be_a_function_that_gives_text(tmp_path: Path) -> None:
    """The error names the argument or the result."""
    with pytest.raises(ConfigurationError, match="ordering_key"):
        SQLiteOutbox(tmp_path / "outbox", ordering_key="key")  # type: ignore[arg-type]
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda *_: 1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="not 1"):
        outbox.ordering_key(Message(b""), "", "q")
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda *_: "\udcff")
    with pytest.raises(ConfigurationError, match="encoded"):  # it would fail the whole transaction
        outbox.ordering_key(Message(b""), "", "q")


NOWHERE = "routing_key is missing: give the name of a queue, or an exchange"


def test_a_message_that_no_queue_can_get_is_not_stored(tmp_path: Path) -> None:
    """The default exchange routes by the name of a queue, which is never empty. CC and BCC name further queues."""
    engine = create_engine("sqlite://")
    outbox = SQLAlchemyOutbox(engine)
    with Session(engine) as session:
        with pytest.raises(ConfigurationError, match=f"^{NOWHERE}$"):
            outbox.add(session, Message(b""))
        for headers in ({"CC": ["q"]}, {"BCC": ["q"]}):
            outbox.add(session, Message(b"", headers=headers))
        outbox.add(session, Message(b""), exchange="fanout")
    engine.dispose()
    file = SQLiteOutbox(tmp_path / "outbox")
    with Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=file) as publisher:
        with pytest.raises(ConfigurationError, match=f"^{NOWHERE}$"):
            publisher.publish(Message(b""))
        publisher.publish(Message(b"", headers={"CC": ["q"]}))
    assert file.status().rows == 1
    file.close()


@pytest.mark.parametrize("name", ["message_id", "ordering_key"])
def test_a_text_that_cannot_be_encoded_is_refused_when_added(name: str) -> None:
    """The flush would fail, and with it the user's transaction."""
    texts = {"message_id": "m", "ordering_key": "k", name: "\udcff"}
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match=name):
        SQLAlchemyOutbox(engine).add(
            connection,
            Message(b"", message_id=texts["message_id"]),
            routing_key="q",
            ordering_key=texts["ordering_key"],
        )
    engine.dispose()


@pytest.mark.parametrize("name", ["message_id", "exchange", "routing_key"])
def test_an_unencodable_text_is_refused_without_failing_others(tmp_path: Path, name: str) -> None:
    """It would fail the transaction that other messages share."""
    texts = {"message_id": "m", "exchange": "", "routing_key": "q", name: "\udcff"}
    message = Message(b"", message_id=texts.pop("message_id"))
    outbox = SQLiteOutbox(tmp_path / "outbox")
    with Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=outbox) as publisher:
        stored = [publisher.submit(Message(b""), routing_key="q") for _ in range(3)]
        with pytest.raises(ConfigurationError, match=name):
            publisher.publish(message, **texts)
        stored += [publisher.submit(Message(b""), routing_key="q") for _ in range(3)]
        assert [confirmation.result(20).status for confirmation in stored] == ["stored"] * 6
    assert outbox.status().rows == 6
    outbox.close()


def test_the_longest_timeout_is_one(tmp_path: Path) -> None:
    """SQLite counts milliseconds in 32 bits and does not wait at all above that."""
    outbox = SQLiteOutbox(tmp_path / "outbox", timeout=1e9)
    outbox.open()
    connection = outbox._connection
    assert connection is not None
    assert connection.execute("PRAGMA busy_timeout").fetchone()[0] > 1e9
    outbox.close()


def test_no_password_of_a_database_is_shown() -> None:
    """The password is hidden wherever the URL contains it."""
    for url in ("postgresql+psycopg://me:hush@h/x", "postgresql+psycopg://h/x?user=me&password=hush"):
        assert "hush" not in repr(SQLAlchemyOutbox(create_engine(url)))


def test_a_database_url_with_an_unencoded_password_is_refused() -> None:
    """The text after the first ``@`` would be the host, which drivers show."""
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        SQLAlchemyOutbox(create_engine("postgresql+psycopg://user:se@cret@db/orders"))
    assert "cret@" not in str(caught.value)


def test_any_error_of_a_connection_is_one_of_the_outbox() -> None:
    """This includes errors of asyncpg and of code that fetches a password."""

    def no_token() -> Any:
        raise LookupError("no token")

    outbox = SQLAlchemyOutbox(create_engine("postgresql+psycopg://localhost/x", creator=no_token))
    for call in (outbox.open, outbox.status, outbox.purge):
        with pytest.raises(OutboxError, match=r"failed in .*LookupError: no token"):
            call()
    with pytest.raises(OutboxError, match="no token") as caught:
        outbox.write([NewRow(Message(b""), "", "q", True, None)], [])
    assert not caught.value.may_have_arrived


def test_one_process_at_a_time_relays_a_file(tmp_path: Path) -> None:
    """The second relay gets the rows as possible duplicates when the first closes."""
    first, second = SQLiteOutbox(tmp_path / "outbox"), SQLiteOutbox(tmp_path / "outbox")
    one, two = first.claims(), second.claims()
    first.write([NewRow(Message(b""), "", "q", True, None) for _ in range(3)], [])
    assert [row.possible_duplicate for row in one.take(10).rows] == [False] * 3
    assert two.take(10).rows == []
    one.close()
    assert [row.possible_duplicate for row in two.take(10).rows] == [True] * 3
    two.close()
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_relay_without_its_lock_file_takes_no_more(tmp_path: Path, how: str) -> None:
    """Another relay may hold a lock on a new file. Afterwards, any row may have been published."""
    first, second = SQLiteOutbox(tmp_path / "outbox"), SQLiteOutbox(tmp_path / "outbox")
    first.write([NewRow(Message(b"%d" % number), "", "q", True, None) for number in range(3)], [])
    one, two = first.claims(), second.claims()
    assert len(one.take(1).rows) == 1
    lock = tmp_path / "outbox-relay"
    lock.unlink()
    if how == "replaced":
        lock.touch()
    assert len(two.take(10).rows) == 3
    assert one.take(10).rows == []
    two.close()
    assert [(row.message.body, row.possible_duplicate) for row in one.take(10).rows] == [(b"1", True), (b"2", True)]
    assert second.claims().take(10).rows == []
    one.close()
    first.close()
    second.close()


def test_a_lock_file_deleted_while_it_is_locked_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would see the lock."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b""), "", "q", True, None)], [])
    lock = fcntl.flock

    def deletes(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        (tmp_path / "outbox-relay").unlink()

    monkeypatch.setattr(fcntl, "flock", deletes)
    claims = outbox.claims()
    assert claims.take(1).rows == []
    monkeypatch.undo()
    assert len(claims.take(1).rows) == 1
    claims.close()
    outbox.close()


@pytest.mark.parametrize("call", ["write", "status", "take"])
def test_a_fork_waits_for_a_call_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A lock of SQLite would stay locked in the child, and hang it with a file of its own, too."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    claims = outbox.claims()
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: outbox.write([NewRow(Message(b""), "", "q", True, None)], []),
        "status": outbox.status,
        "take": lambda: claims.take(1),
    }
    inside, forked = threading.Event(), threading.Event()
    waited: list[bool] = []

    def slow() -> None:
        inside.set()
        waited.append(forked.wait(0.2))

    monkeypatch.setattr(outbox._file, "check", slow)
    thread = threading.Thread(target=calls[call])
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if not child:
        os._exit(0)
    forked.set()
    thread.join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert waited[0] is False
    claims.close()
    outbox.close()


def test_a_forked_child_is_refused_at_once_despite_held_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for locks that threads of the parent held at the fork."""
    monkeypatch.setattr("reliable_mq.outbox.sqlite._FORK_WAITS", 0.01)
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.open()

    def child() -> None:
        for call in (outbox.open, outbox.claims, outbox.status, outbox.purge):
            with pytest.raises(UsageError, match="fork"):
                call()
        outbox.close()

    with outbox._read_lock, outbox._lock:
        process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        process.start()
        process.join(20)
    assert process.exitcode == 0
    outbox.close()


def test_what_is_stored_is_synchronised_at_every_commit(tmp_path: Path) -> None:
    """A power failure would lose a commit that is not on the disk."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.open()
    connection = outbox._connection
    assert connection is not None
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    outbox.close()


def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    """The journal mode is stored in the file, so the owner would have another one from then on."""
    path = tmp_path / "theirs"
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    outbox = SQLiteOutbox(path)
    with pytest.raises(OutboxError, match="something else"):
        outbox.status()
    outbox.close()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
