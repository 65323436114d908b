"""``reliable-mq outbox``: status, relay, retry, purge and ddl, on a file and on a database."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from integration.support.command_line import run_cli, start_cli
from integration.support.queues import bodies
from integration.support.waiting import wait_until
from reliable_mq import Message
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support.management import VirtualHost


@pytest.fixture(params=["file", "database"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """How the command line names an outbox."""
    path = tmp_path / "outbox"
    return str(path) if request.param == "file" else f"sqlite:///{path}"


@pytest.fixture
def outbox(where: str) -> Iterator[Outbox]:
    """That outbox."""
    if "://" in where:
        engine = create_engine(where, poolclass=NullPool)
        yield SQLAlchemyOutbox(engine, create=True)
        engine.dispose()
    else:
        box = SQLiteOutbox(where)
        yield box
        box.close()


def store(outbox: Outbox, queue: str, *message_ids: str) -> None:
    outbox.open()
    outbox.write([NewRow(Message(b"", message_id=name), "", queue, True, None) for name in message_ids], [])


def test_an_outbox_is_relayed_and_what_was_set_aside_is_decided_about(
    vhost: VirtualHost, outbox: Outbox, where: str
) -> None:
    """Relay until it is empty, see what was set aside and why, put one back, remove the other."""
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    store(outbox, "orders", "a", "b")
    store(outbox, "later", "c", "d")
    relayed = run_cli("outbox", "relay", vhost.url, where, "--until-empty", "--timeout", "30")
    assert relayed.returncode == 0, relayed.stderr
    assert [name for name, _ in bodies(vhost, "orders")] == ["a", "b"]
    status = run_cli("outbox", "status", where, "--json")
    told = json.loads(status.stdout)
    assert (status.returncode, told["rows"], told["set_aside"]) == (1, 0, 2)
    assert {one["message_id"]: "NO_ROUTE" in one["reason"] for one in told["messages"]} == {"c": True, "d": True}
    assert b"NO_ROUTE" in run_cli("outbox", "status", where).stdout
    assert run_cli("outbox", "retry", where).returncode == 2
    assert run_cli("outbox", "retry", where, "c", "unknown").returncode == 1
    purged = run_cli("outbox", "purge", where, "--all")
    assert (purged.returncode, purged.stdout) == (0, b"1 messages removed\n")
    with vhost.connect() as connection:
        connection.channel().queue_declare("later")
    assert run_cli("outbox", "relay", vhost.url, where, "--until-empty").returncode == 0
    assert [name for name, _ in bodies(vhost, "later")] == ["c"]
    assert run_cli("outbox", "status", where).returncode == 0


def test_a_relay_runs_until_it_is_told_to_stop(vhost: VirtualHost, outbox: Outbox, where: str) -> None:
    """What is stored meanwhile is published; SIGTERM ends it in good order."""
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    outbox.open()
    relay = start_cli("outbox", "relay", vhost.url, where)
    try:
        store(outbox, "orders", "a")
        vhost.wait_for_messages("orders", 1)
        wait_until(lambda: outbox.status().rows == 0, timeout=20, what="an empty outbox")
    finally:
        relay.send_signal(signal.SIGTERM)
        _, said = relay.communicate(timeout=30)
    assert relay.returncode == 0, said
    assert b"relaying" in said


def test_what_is_no_outbox_is_said_without_a_password(tmp_path: Path) -> None:
    """Nothing is made by looking, and no URL is shown."""
    missing = run_cli("outbox", "status", str(tmp_path / "missing"))
    assert (missing.returncode, b"there is no outbox" in missing.stderr) == (1, True)
    assert not (tmp_path / "missing").exists()
    for url in (
        "nonsense://me:hush@host/db",
        "postgresql+psycopg://me:hush@127.0.0.1:1/db",
        "sqlite:////nowhere/at/all",
    ):
        failed = run_cli("outbox", "status", url)
        assert failed.returncode == 1
        assert b"hush" not in failed.stderr + failed.stdout
        assert b"Traceback" not in failed.stderr


def test_the_statements_for_a_migration_are_printed(tmp_path: Path) -> None:
    """Without asking the database."""
    printed = run_cli("outbox", "ddl", "postgresql+psycopg://me@nowhere/db", "--table", "mine", "--schema", "messages")
    assert printed.returncode == 0, printed.stderr
    assert b"CREATE TABLE messages.mine" in printed.stdout
    assert b"CREATE INDEX mine_in_order ON messages.mine" in printed.stdout
    assert run_cli("outbox", "ddl", str(tmp_path)).returncode == 2
