"""Output of the commands, compared with the files in ``golden/``.

``RELIABLE_MQ_GOLDEN=write`` writes the files again. The diff then shows what changes for users.
"""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from reliable_mq import Message, Queue
from reliable_mq.cli import dlq as commands
from reliable_mq.cli.app import app
from reliable_mq.cli.demo.display import BrokerStatus, DemoResult, LiveDisplay
from reliable_mq.cli.demo.scenario import BrokerState, Progress
from reliable_mq.cli.dlq.render import details, listing, statistics_tables, summary
from reliable_mq.cli.doctor import finding
from reliable_mq.cli.doctor.broker import examine_cluster, examine_limits, examine_version
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.codec import encode_properties
from reliable_mq.core import headers
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.deadletters import DeadMessage, ReplayReport
from reliable_mq.deadletters.filter import Statistics
from reliable_mq.errors import ConsumeError
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.testing.audit import Audit
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable

GOLDEN = Path(__file__).parent / "golden"
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
COMMANDS = [
    "",
    *("publish", "consume", "doctor", "health", "demo", "web", "alerts", "grafana", "stage"),
    *("dlq", "dlq list", "dlq show", "dlq stats", "dlq replay", "dlq purge", "dlq export", "dlq import"),
    *("outbox", "outbox status", "outbox relay", "outbox retry", "outbox purge", "outbox ddl"),
]


def compare(name: str, text: str) -> None:
    """Compare a text with a golden file, ignoring trailing blanks."""
    lines = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("RELIABLE_MQ_GOLDEN") == "write":
        file.write_text(lines)
    assert lines == file.read_text()


def shown(*parts: Any, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "reliable-mq")
def test_help(command: str) -> None:
    environment = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [*command.split(), "--help"], env=environment, prog_name="reliable-mq")
    assert result.exit_code == 0
    compare(f"help {command or 'reliable-mq'}".replace(" ", "-"), result.output)


# -- dlq ---------------------------------------------------------------------------------------------------------------


def letters() -> Iterable[DeadMessage]:
    """Return dead letters of a consumer, of RabbitMQ and of unknown origin."""
    ours = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: "orders",
        headers.ORIGINAL_EXCHANGE: "shop",
        headers.ORIGINAL_ROUTING_KEY: "orders.new",
        headers.DEAD_LETTER_REASON: "5 of 5 attempts failed",
        headers.EXCEPTION_TYPE: "shop.PaymentTimeout",
        headers.EXCEPTION_MESSAGE: "no answer within 30 s",
        headers.ATTEMPTS: 5,
        headers.FIRST_FAILURE: NOW - timedelta(hours=3),
        headers.LAST_FAILURE: NOW - timedelta(hours=2),
        headers.CONSUMER: "orders@host",
        headers.PACKAGE_VERSION: "0.1.0",
        "shop": "north",
    }
    death: dict[str, Any] = {
        "queue": "mails",
        "reason": "rejected",
        "exchange": "",
        "routing-keys": ["mails"],
        "count": 1,
        "time": NOW - timedelta(days=2),
    }
    tables: list[tuple[dict[str, Any], bytes]] = [
        (ours, b'{"order": 7}'),
        ({"x-death": [death]}, b"\x00\xff"),
        ({}, b"text\nof two lines"),
    ]
    for position, (table, body) in enumerate(tables, start=1):
        message = Message(body, headers=table, message_id=f"id-{position}", content_type="text/plain", priority=2)
        delivery = Delivery("", position, position == 2, "", "orders.dead", encode_properties(message), body)
        delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
        yield DeadMessage(delivery, position)


def test_dead_letters() -> None:
    table, counted = listing(), Statistics()
    found = list(letters())
    for message in found:
        table.add_row(*summary(message, NOW))
        counted.add(message, NOW)
    full = [details(message, 10) for message in found]
    compare("dlq", shown(table, "", *full, "", *statistics_tables(counted, NOW)))


def test_the_report_of_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    [message, *_] = letters()
    failures: list[Any] = [(message, ConsumeError(f"no queue {number}")) for number in range(25)]
    for replayed in (
        ReplayReport(3, 3, possible_duplicates=0),
        ReplayReport(30, 3, delivered_before=2, possible_duplicates=2, sent_again=4, already_published=1),
        ReplayReport(30, 3, delivered_before=2),
        ReplayReport(30, 5, possible_duplicates=0, failed=25, failures=failures),
        ReplayReport(30, 5, possible_duplicates=0, unacked=5, unconfirmed=20),
    ):
        for dry_run in (False, True):
            commands._tell(replayed, dry_run=dry_run)
    compare("dlq-replay", capsys.readouterr().err)


# -- doctor ------------------------------------------------------------------------------------------------------------


def queues() -> Iterable[dict[str, Any]]:
    """Return queues with every kind of finding."""

    def queue(name: str, kind: str = "quorum", arguments: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        given = {f"x-{key.replace('_', '-')}": value for key, value in (arguments or {}).items()}
        return {"name": name, "type": kind, "durable": True, "arguments": given, "messages": 7} | more

    for declared in (Queue("orders"), Queue("orders.dead", dead_letter=None)):
        made = queue(declared.name)
        yield made | {"arguments": dict(declared.arguments_for((4, 3)))}
    yield queue("bare")
    yield queue("bare.retry.1000", arguments={"message_ttl": 10, "dead_letter_strategy": "at-least-once"})
    yield queue("bare.quarantine", arguments={"overflow": "drop-head"})
    yield queue("exclusive", "classic", exclusive=True, messages_persistent=3)
    yield queue("auto", "classic", auto_delete=True, messages_persistent=3)
    yield queue("fleeting", "classic", {"expires": 1000, "message_ttl": 500, "max_length": 5}, durable=False)
    yield queue("cycle", arguments={"dead_letter_exchange": "", "dead_letter_routing_key": "cycle"})
    yield queue("nowhere", arguments={"dead_letter_exchange": "missing", "dead_letter_strategy": "at-least-once"})
    yield queue("unbound", arguments={"dead_letter_exchange": "lonely"})
    yield queue("odd", arguments={"max_priority": 300, "no_such": 1, "delivery_limit": "many", "queue_mode": "lazy"})
    yield queue("full.dead", "classic", messages=200, messages_details={"rate": 2.5})
    yield queue("log", "stream")


def test_the_doctors_report(monkeypatch: pytest.MonkeyPatch) -> None:
    consumers = [
        {"queue": {"name": "orders"}, "ack_required": False, "prefetch_count": 5},
        {"queue": {"name": "orders"}, "ack_required": True, "prefetch_count": 0},
    ]
    exchanges: dict[str, Any] = {"lonely": {"name": "lonely", "type": "topic"}}
    views = {queue["name"]: QueueView(queue) for queue in queues()}
    findings = [
        Finding(Status.OK, "localhost:5672", "reachable", "accepts connections (1 ms)"),
        *(f for v in ("4.3.6", "4.0.5", "3.13.7", "3.11.0") for f in examine_version(server(v))),
        *examine_version(ServerInfo.of({"product": "LavinMQ", "version": "2.1.0"})),
        *(f for beat in (3, 20, 120) for f in examine_limits(parse_url("amqp://localhost", heartbeat=beat), 131072)),
    ]
    snapshot = Snapshot(views, exchanges=exchanges, consumers=consumers)
    for version in ((4, 3, 6), (4, 0, 5), (3, 13, 7)):
        findings += examine_queues(snapshot, (), version)
    findings += examine_queues(snapshot, ("orders", "bare", "absent", "log"), (4, 3, 6))
    out = io.StringIO()
    monkeypatch.setattr(finding, "output", Console(file=out, width=120, force_terminal=False))
    finding.show(parse_url("amqp://user:secret@localhost/v"), findings)
    compare("doctor", out.getvalue())


def test_the_doctors_report_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"rabbit@{letter}" for letter in "abc"]

    def queue(name: str, kind: str, members: int, online: int) -> QueueView:
        found = {"members": names[:members], "online": names[:online], "leader": names[0], "node": names[0]}
        return QueueView({"name": name, "type": kind, "durable": True, "arguments": {"x-delivery-limit": -1}, **found})

    kinds = (("all", "quorum", 3, 3), ("two", "quorum", 2, 2), ("one", "stream", 1, 1), ("off", "quorum", 3, 2))
    views = [queue(*each) for each in (*kinds, ("stands", "quorum", 3, 1))]
    views.append(QueueView({"name": "old", "type": "classic", "durable": True, "node": names[0]}))
    found = []
    for states in ((True, False, False), (True, True, False), (True, True, True)):
        nodes = (
            {"name": name, "running": up, "being_drained": up and name == names[1]}
            for name, up in zip(names, states, strict=True)
        )
        snapshot = Snapshot({view.name: view for view in views}, nodes=tuple(nodes))
        found += examine_cluster(parse_url("amqp://user:secret@one.host/v"), snapshot)
    found += examine_cluster(parse_url("amqp://localhost"), Snapshot({}, nodes=None))
    found += examine_queues(snapshot, (), (4, 3, 6))
    out = io.StringIO()
    monkeypatch.setattr(finding, "output", Console(file=out, width=120, force_terminal=False))
    finding.show(parse_url("amqp://user:secret@one.host/v"), found)
    compare("doctor-cluster", out.getvalue())


def server(version: str) -> ServerInfo:
    return ServerInfo.of({"product": "RabbitMQ", "version": version})


# -- demo --------------------------------------------------------------------------------------------------------------


def progress(**counts: int) -> Progress:
    names = ("published", "confirmed", "handled", "dead_lettered", "retried", "republished", "duplicates")
    return Progress(**{**dict.fromkeys(names, 0), **counts})


def test_the_result_of_a_demo() -> None:
    good, bad = Audit(), Audit()
    for audit in (good, bad):
        for message_id in "abcd":
            audit.attempted(message_id)
        for message_id in "abc":
            audit.confirmed(message_id)
    for message_id in "abd":
        good.effect(message_id)
        good.handled(message_id)
    good.dead_lettered(["c"])
    bad.effect("a")
    bad.effect("a")
    bad.handled("a")
    bad.failed("d")
    bad.left(["b"])
    done = progress(retried=1400, republished=7, duplicates=2)
    results = [DemoResult(good.balance(), done, 0, 12.3), DemoResult(bad.balance(), progress(), 2, 0.4)]
    compare("demo-result", shown(*results) + "\n".join(result.so_far for result in results))


def test_the_display_of_a_demo() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=120), "10 orders", 10)
    display._live.console = Console(file=io.StringIO())
    for time, count in ((0.0, 0), (1.0, 4)):
        display.update(time, progress(published=9, confirmed=count, retried=3), BrokerStatus(RUNNING, True, True, None))
    display.tell(61.0, "the broker is [killed]")
    text = [shown(display._drawn(1.0, progress(published=9, confirmed=4, retried=3), state)) for state in STATES]
    compare("demo-display", "\n".join(text))


RUNNING = BrokerState.RUNNING
STATES = [
    BrokerStatus(RUNNING, True, True, None),
    BrokerStatus(BrokerState.KILLED, False, True, None),
    BrokerStatus(BrokerState.STARTING, True, False, "low on memory"),
]


# -- outbox ------------------------------------------------------------------------------------------------------------


def test_the_status_of_an_outbox(tmp_path: Path) -> None:
    path = str(tmp_path / "outbox.db")
    box = SQLiteOutbox(path)
    box.status()  # creates the file
    box.close()
    runner = CliRunner()
    texts = [
        runner.invoke(app, ["outbox", *arguments]).output
        for arguments in (["status", path], ["status", path, "--json"], ["retry", path, "--all"], ["purge", path, "x"])
    ]
    compare("outbox", "".join(texts))
