"""``reliable-mq outbox``: its commands on a file and on a database."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from integration.support.command_line import run_cli, start_cli
from reliable_mq import Message
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from integration.support.databases import Database
    from reliable_mq.testing import FaultProxyFactory, VirtualHost


@pytest.fixture(params=["file", pytest.param("postgresql", marks=pytest.mark.soak)])
def where(request: pytest.FixtureRequest, tmp_path: Path, database: Callable[[str], Database]) -> str:
    """An outbox as named on the command line."""
    path = tmp_path / "outbox"
    match request.param:
        case "file":
            return str(path)
        case "sqlite":
            return f"sqlite:///{path}"
        case kind:
            return database(kind).fresh()


@pytest.fixture
def outbox(where: str) -> Iterator[Outbox]:
    """The outbox."""
    if "://" in where:
        engine = create_engine(where, poolclass=NullPool)
        yield SQLAlchemyOutbox(engine, create=True)
        engine.dispose()
    else:
        box = SQLiteOutbox(where)
        yield box
        box.close()


# A signal, the exit status, and options of the relay that gets it.
ENDS: list[tuple[int, int, list[str]]] = [
    (signal.SIGTERM, 0, []),
    (signal.SIGINT, 130, []),
    (signal.SIGTERM, 143, ["--until-empty"]),
]


def handles_sigterm(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has installed its own handler."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


class Relay:
    """``reliable-mq outbox relay`` in a process, from the moment that it relays."""

    def __init__(self, *arguments: str) -> None:
        self._process = start_cli("outbox", "relay", *arguments)

    def __enter__(self) -> Self:
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        assert said.startswith(b"relaying"), said + self._process.communicate(timeout=30)[1]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self, number: int) -> int:
        """Send a signal; return the exit status."""
        self._process.send_signal(number)
        self._process.communicate(timeout=30)
        return self._process.returncode


def declare(vhost: VirtualHost, queue: str) -> None:
    with vhost.connect() as connection:
        connection.channel().queue_declare(queue)


def store(outbox: Outbox, queue: str, *message_ids: str) -> None:
    outbox.open()
    outbox.write([NewRow(Message(b"", message_id=name), "", queue, True, None) for name in message_ids], [])


def test_commands_relay_an_outbox_and_settle_what_was_set_aside(vhost: VirtualHost, outbox: Outbox, where: str) -> None:
    """The outbox is relayed, and set-aside messages are listed with reasons.

    One of them is retried and the other purged.
    """
    declare(vhost, "orders")
    store(outbox, "orders", "a", "b")
    store(outbox, "later", "c", "d")
    relayed = run_cli("outbox", "relay", vhost.url, where, "--until-empty", "--timeout", "30")
    assert relayed.returncode == 0, relayed.stderr
    assert [name for name, _ in vhost.bodies("orders")] == ["a", "b"]
    status = run_cli("outbox", "status", where, "--json")
    told = json.loads(status.stdout)
    assert (status.returncode, told["rows"], told["set_aside"]) == (1, 0, 2)
    assert {one["message_id"]: "NO_ROUTE" in one["reason"] for one in told["messages"]} == {"c": True, "d": True}
    listed = run_cli("outbox", "status", where, "--limit", "1").stdout
    assert listed.count(b"NO_ROUTE") == 1
    assert run_cli("outbox", "retry", where).returncode == 2
    again = run_cli("outbox", "retry", where, "--all")
    assert (again.returncode, again.stdout) == (0, b"2 messages put back\n")
    assert run_cli("outbox", "relay", vhost.url, where, "--until-empty").returncode == 0
    assert [one.attempts for one in outbox.set_aside()] == [2, 2]
    assert run_cli("outbox", "retry", where, "c", "unknown").returncode == 1
    purged = run_cli("outbox", "purge", where, "d", "d")  # named twice, deleted once
    assert (purged.returncode, purged.stdout) == (0, b"1 messages removed\n")
    declare(vhost, "later")
    assert run_cli("outbox", "relay", vhost.url, where, "--until-empty").returncode == 0
    assert [name for name, _ in vhost.bodies("later")] == ["c"]
    assert run_cli("outbox", "status", where).returncode == 0


@pytest.mark.parametrize(
    ("where", "number", "code"), [("file", signal.SIGTERM, 0), ("sqlite", signal.SIGINT, 130)], indirect=["where"]
)
def test_a_relay_runs_until_it_is_told_to_stop(
    vhost: VirtualHost, outbox: Outbox, where: str, number: int, code: int, tmp_path: Path
) -> None:
    """It creates the outbox if asked, and publishes messages as they are stored.

    A signal ends it cleanly.
    """
    declare(vhost, "orders")
    assert not (tmp_path / "outbox").exists()
    with Relay(vhost.url, where, "--create") as relay:
        assert (tmp_path / "outbox").exists()
        store(outbox, "orders", "a")
        vhost.wait_for_messages("orders", 1)
        wait_until(lambda: outbox.status().rows == 0, timeout=20, what="an empty outbox")
        assert relay.end(number) == code


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_a_relay_whose_broker_is_away_at_its_start_waits_for_it(
    vhost: VirtualHost, outbox: Outbox, where: str, fault_proxy: FaultProxyFactory
) -> None:
    """It logs the outage, and publishes once the broker is there.

    With --until-empty it exits with status 1.
    """
    declare(vhost, "orders")
    store(outbox, "orders", "a")
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    assert run_cli("outbox", "relay", proxy.url, where, "--until-empty").returncode == 1
    relay = start_cli("outbox", "relay", proxy.url, where)
    try:
        assert relay.stderr is not None
        wait_until(lambda: b"trying again" in relay.stderr.readline(), timeout=20, what="a word of it", interval=0)
        proxy.accept_connections()
        vhost.wait_for_messages("orders", 1)
    finally:
        relay.send_signal(signal.SIGTERM)
        relay.communicate(timeout=30)
    assert relay.returncode == 0


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.soak)])
def test_a_hanging_database_is_reported_and_a_relay_can_stop(database: Callable[[str], Database], kind: str) -> None:
    """The database accepts connections and does not answer.

    Every command ends, and signals are handled.
    """
    server = database(kind)
    where = server.fresh()
    server.pause()
    status = start_cli("outbox", "status", where)
    relays = [start_cli("outbox", "relay", "amqp://localhost:1", where, *more) for _, _, more in ENDS]
    try:
        for (number, _, _), relay in zip(ENDS, relays, strict=True):
            wait_until(partial(handles_sigterm, relay), timeout=30, what="a relay that opens its outbox")
            relay.send_signal(number)
        for (_, code, _), relay in zip(ENDS, relays, strict=True):
            _, said = relay.communicate(timeout=25)
            assert relay.returncode == code, said
        _, said = status.communicate(timeout=60)
        assert (status.returncode, b"did not answer within 30 s" in said) == (1, True), said
    finally:
        for process in (status, *relays):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_a_relay_that_is_told_to_stop_while_it_connects_does_so(
    outbox: Outbox, where: str, vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The broker accepts connections and does not answer.

    The relay reports the remaining messages, whatever it is doing.
    """
    store(outbox, "orders", "a")
    proxy = fault_proxy(vhost.url)
    proxy.black_hole()
    relay = start_cli("outbox", "relay", f"{proxy.url}?connection_timeout=100000", where)
    try:
        proxy.wait_for(lambda: proxy.connections, timeout=30)
        relay.send_signal(signal.SIGTERM)
        _, said = relay.communicate(timeout=30)
        assert (relay.returncode, said.count(b"1 messages stay")) == (0, 1), said
        assert outbox.status().rows == 1
    finally:
        relay.kill()
        relay.communicate()


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_an_unconfirmed_relay_gives_up_in_time_or_on_a_signal(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, outbox: Outbox, where: str
) -> None:
    """Without a confirm the exit status is 1, and the message stays."""
    declare(vhost, "orders")
    store(outbox, "orders", "a")
    proxy = fault_proxy(vhost.url)
    proxy.hold_confirms()
    began = time.monotonic()
    late = run_cli("outbox", "relay", proxy.url, where, "--until-empty", "--timeout", "1")
    assert (late.returncode, b"1 messages are still in" in late.stderr) == (1, True), late.stderr
    assert time.monotonic() - began < 20
    so_far = proxy.seen("basic.publish")  # none if one second was too short
    relay = start_cli("outbox", "relay", proxy.url, where, "--until-empty")
    proxy.wait_for(lambda: proxy.seen("basic.publish") > so_far, timeout=30)
    assert outbox.status().rows == 1
    relay.send_signal(signal.SIGINT)
    proxy.release_confirms()  # the relay waits for it, like any publisher that is closed
    _, said = relay.communicate(timeout=30)
    assert relay.returncode == 130, said


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_a_relay_that_is_told_to_stop_does_so_soon(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, outbox: Outbox, where: str
) -> None:
    """It stops soon with many messages left and any broker.

    Other relays, or the next start, publish the rest.
    """
    declare(vhost, "orders")
    store(outbox, "orders", "a")
    proxy = fault_proxy(vhost.url)
    proxy.hold_confirms()
    with Relay(proxy.url, where) as relay:
        vhost.wait_for_messages("orders", 1)
        began = time.monotonic()
        assert relay.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 25
    assert outbox.status().rows == 1


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_status_reports_what_only_a_newer_version_can_relay(outbox: Outbox, where: str) -> None:
    """The exit status of ``status`` is 1, as for messages set aside."""
    store(outbox, "orders", "a")
    assert run_cli("outbox", "status", where).returncode == 0
    with closing(sqlite3.connect(where)) as connection, connection:
        connection.execute("UPDATE outbox SET format = 2")
    status = run_cli("outbox", "status", where, "--json")
    assert (status.returncode, json.loads(status.stdout)["unreadable"]) == (1, 1)


@pytest.mark.parametrize("where", ["postgresql"], indirect=True)
def test_f33_after_one_of_two_relays_is_killed_all_is_published(vhost: VirtualHost, outbox: Outbox, where: str) -> None:
    """Rows of the killed relay are published once their lease ends.

    Rows of a key keep their order.
    """
    declare(vhost, "orders")
    names: list[str] = []
    in_order: list[str] = []

    def store_more() -> None:
        first = len(names)
        new = [f"{number}" for number in range(first, first + 50)]
        rows = [
            NewRow(Message(b"", message_id=name), "", "orders", True, "key" if int(name) % 10 == 0 else None)
            for name in new
        ]
        outbox.write(rows, [])
        names.extend(new)
        in_order.extend(row.message.message_id for row in rows if row.ordering_key)

    outbox.open()
    store_more()
    with Relay(vhost.url, where, "--lease", "1") as killed, Relay(vhost.url, where, "--lease", "1") as other:
        for _ in range(8):
            store_more()
        assert killed.end(signal.SIGKILL) == -signal.SIGKILL
        store_more()
        wait_until(lambda: outbox.status().rows == 0, timeout=90, what="an empty outbox")
        assert other.end(signal.SIGTERM) == 0
    found = list(dict.fromkeys(name for name, _ in vhost.bodies("orders")))
    assert sorted(found, key=int) == names
    assert [name for name in found if name in set(in_order)] == in_order


def test_what_is_no_outbox_is_said_without_a_password(tmp_path: Path) -> None:
    """The status command creates no outbox and shows no URL."""
    missing = run_cli("outbox", "status", str(tmp_path / "missing"))
    assert (missing.returncode, b"there is no outbox" in missing.stderr) == (1, True)
    assert not (tmp_path / "missing").exists()
    for url in (
        "nonsense://me:hush@host/db",
        "postgresql+psycopg://me:hush@127.0.0.1:1/db",
        "postgresql+psycopg://127.0.0.1:1/db?user=me&password=hush",
        "postgresql+psycopg://me:right@127.0.0.1:hush/db",
        "postgresql+psycopg://me@127.0.0.1:1/db?no_such_option=hush",
        "sqlite:////nowhere/at/all",
    ):
        failed = run_cli("outbox", "status", url)
        assert failed.returncode == 1
        assert b"hush" not in failed.stderr + failed.stdout
        assert b"Traceback" not in failed.stderr


@pytest.mark.parametrize("where", ["file"], indirect=True)
def test_nothing_that_others_wrote_reaches_the_terminal_as_it_is(outbox: Outbox, where: str) -> None:
    """Escape sequences in ids and reasons are shown as text.

    They do not affect the terminal, and JSON stays JSON.
    """
    store(outbox, "orders", "\x1b[2Jgone", "[/evil]", "\u202eleft")
    claims = outbox.claims()
    reason = "refused: \x1b]0;title\x07\r\n\x9b31m"
    outbox.write([], [RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, reason) for row in claims.take(10).rows])
    claims.close()
    for arguments in ((), ("--json",)):
        shown = run_cli("outbox", "status", where, *arguments).stdout.decode()
        assert "gone" in shown
        assert "[/evil]" in shown
        assert all(char.isprintable() or char == "\n" for char in shown), shown
    told = json.loads(run_cli("outbox", "status", where, "--json").stdout)
    assert {one["reason"] for one in told["messages"]} == {reason}
    assert run_cli("outbox", "purge", where, "\x1b[2Jgone").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--limit", "-1"),
        ("status", "--limit", "99999999999999999999"),
        ("relay", "--timeout", "-1", "--until-empty"),
        ("relay", "--timeout", "nan", "--until-empty"),
        ("relay", "--metrics-port", "-1"),
        ("purge", b"\xff"),
    ],
)
def test_numbers_and_ids_that_mean_nothing_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The error is one line, and nothing is done."""
    path = tmp_path / "outbox"
    box = SQLiteOutbox(path)
    box.open()
    box.close()
    command, *options = arguments
    url = ("amqp://guest:guest@127.0.0.1:1/",) if command == "relay" else ()
    refused = run_cli("outbox", command, *url, str(path), *options)
    assert refused.returncode in (1, 2)
    assert b"Traceback" not in refused.stderr
    assert b"a flaw" not in refused.stderr


def test_the_statements_for_a_migration_are_printed(tmp_path: Path) -> None:
    """This does not need the database."""
    printed = run_cli("outbox", "ddl", "postgresql+psycopg://me@nowhere/db", "--table", "mine", "--schema", "messages")
    assert printed.returncode == 0, printed.stderr
    assert b"CREATE TABLE messages.mine" in printed.stdout
    assert b"CREATE INDEX mine_in_order ON messages.mine" in printed.stdout
    assert run_cli("outbox", "ddl", str(tmp_path)).returncode == 2
