"""Foreign text is escaped in tables, errors, logs, JSON and other output."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from reliable_mq import Message
from reliable_mq.cli import app as application
from reliable_mq.cli.demo.display import LinesDisplay
from reliable_mq.cli.dlq.render import details, listing, statistics_json, statistics_tables, summary, summary_json
from reliable_mq.cli.doctor import examine
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.terminal import (
    URL,
    escaped,
    json_text,
    metrics_served,
    product,
    say,
    show_logs,
    without_passwords,
)
from reliable_mq.codec import encode_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.deadletters import DeadMessage
from reliable_mq.deadletters.filter import Statistics
from reliable_mq.deadletters.jsonl import write_line
from reliable_mq.errors import BrokerUnavailable
from tests.cli.hostile import HOSTILE, harmless

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)

each_hostile = pytest.mark.parametrize("text", HOSTILE, ids=ascii)


def shown(*what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=4000, force_terminal=False).print(*what)
    return out.getvalue()


def letter(text: str) -> DeadMessage:
    """Return a dead letter that has the text in every field."""
    raw = text.encode("utf-8", "surrogatepass")
    table = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: raw,
        headers.ORIGINAL_EXCHANGE: raw,
        headers.ORIGINAL_ROUTING_KEY: raw,
        headers.DEAD_LETTER_REASON: raw,
        headers.EXCEPTION_TYPE: raw,
        headers.EXCEPTION_MESSAGE: raw,
        headers.CONSUMER: raw,
        headers.PACKAGE_VERSION: raw,
        "value": raw,
        "deep": {"list": [raw, {"more": raw}]},
    }
    name = text.encode("utf-8", "replace").decode().replace("\x00", "")
    plain = name[:100]
    message = Message(
        raw, headers={**table, name: name}, message_id=plain, correlation_id=plain, content_type=plain, type=plain
    )
    delivery = Delivery("", 1, False, plain, plain, encode_properties(message), raw)
    delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
    return DeadMessage(delivery, 1)


@each_hostile
def test_text_is_escaped_and_what_prints_stays(text: str) -> None:
    assert harmless(escaped(text))
    assert "\n" not in escaped(text)
    assert len(escaped(text * 100, 64)) <= 64 * 10
    if text.isprintable():
        assert escaped(text) == text


@each_hostile
def test_a_dead_letter_is_shown_harmlessly(text: str) -> None:
    """In the list, in the details, in the statistics, and as JSON."""
    message = letter(text)
    table = listing()
    table.add_row(*summary(message, NOW))
    counted = Statistics()
    counted.add(message, NOW)
    views = [shown(table), shown(details(message, 4096)), shown(*statistics_tables(counted, NOW))]
    views += [json_text(summary_json(message)), json_text(statistics_json(counted), indent=2)]
    for view in views:
        assert harmless(view)
        view.encode()
    if text.isprintable():
        assert all(text in view for view in views[:3])


@each_hostile
def test_json_for_a_terminal_says_the_same(text: str) -> None:
    value = {text: [text, 1, None]}
    assert harmless(json_text(value))
    assert json.loads(json_text(value)) == value


@each_hostile
def test_what_is_said_is_said_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"before {text} after")
    logger = logging.getLogger("reliable_mq.hostile")
    show_logs()
    logger.warning("log %s", text)
    err = capsys.readouterr().err
    assert harmless(err)
    expected = escaped(text, keep="\n")
    assert err == f"before {expected} after\nlog {expected}\n"


@each_hostile
def test_an_error_and_a_wrong_command_line_are_shown_harmlessly(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise BrokerUnavailable(text)

    with monkeypatch.context() as patch:
        patch.setattr(application, "app", fail)
        assert application.run() == 1
    wrong = text.replace("\x00", "")
    monkeypatch.setattr(
        "sys.argv", ["reliable-mq", "dlq", "list", "amqp://localhost", "q", "--older-than", f"x{wrong}"]
    )
    assert application.run() == 2
    err = capsys.readouterr().err
    assert harmless(err)
    assert "must be a number" in err


@pytest.mark.slow
@each_hostile
def test_the_doctors_report_is_shown_harmlessly(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue names and texts of the broker are foreign text, too."""
    findings = [Finding(Status.PROBLEM, f"queue {text}", text, text, text)]
    monkeypatch.setattr(examine, "examine", lambda *_: findings)
    for options in ([], ["--json"]):
        result = CliRunner().invoke(application.app, ["doctor", "amqp://u:secret@localhost/v", *options])
        assert harmless(result.output)
        assert result.exit_code == 1


@each_hostile
def test_the_demos_lines_are_shown_harmlessly(text: str) -> None:
    out = io.StringIO()
    with LinesDisplay(Console(file=out), text) as display:
        display.tell(0.0, text)
    assert harmless(out.getvalue())


def _on_terminal(write: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the bytes that a terminal receives from standard output."""
    ours, theirs = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        while True:
            try:
                received.append(os.read(ours, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    with open(theirs, "w", encoding="utf-8") as terminal:  # noqa: PTH123
        monkeypatch.setattr("sys.stdout", terminal)
        reader.start()
        write()
    reader.join(10)
    os.close(ours)
    return b"".join(received).replace(b"\r\n", b"\n")


@each_hostile
@pytest.mark.parametrize("as_json", [False, True])
def test_a_body_reaches_a_terminal_escaped(text: str, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    message = letter(text)
    data = write_line(message) if as_json else message.body

    def write() -> None:
        out = product(as_json=as_json)
        out.write(data + b"\n")
        out.flush()

    received = _on_terminal(write, monkeypatch).decode()
    assert harmless(received)
    if as_json:
        assert json.loads(received) == json.loads(data)


def test_a_body_reaches_a_pipe_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe))
    product(as_json=False).write(b"\x1b[2J\xff\x00")
    assert pipe.getvalue() == b"\x1b[2J\xff\x00"


_WRITE_MUCH = """
import resource, sys
from reliable_mq.cli.terminal import product

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
product(as_json=False).write(b"x" * 300)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_part_of_a_message_is_not_taken_for_the_whole(unbuffered: str, tmp_path: Path) -> None:
    """Without a buffer, Python writes what fits, and reports only how much that is."""
    with (tmp_path / "out").open("wb") as out:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            [sys.executable, "-c", _WRITE_MUCH], stdout=out, stderr=subprocess.PIPE, env=environment, check=False
        )
    assert done.returncode == 1
    assert b"File too large" in done.stderr


_WRITE_TO_NOBODY = """
import sys, threading, time
from reliable_mq.cli import app
from reliable_mq.cli.terminal import product

class Out:
    def write(self, data):
        began.set()
        out.write(data)

out, began = product(as_json=False), threading.Event()
threading.Thread(target=Out().write, args=(b"x" * 1_000_000,), daemon=True).start()
began.wait()
app._run = lambda: 3
sys.stderr.write("leaving")
sys.stderr.flush()
sys.exit(app.run())
"""


def test_a_command_ends_although_nobody_reads_its_output() -> None:
    """A thread still writes into the full pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _WRITE_TO_NOBODY], env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.wait(20) == 3
        finally:
            process.kill()


_PRINT_UNDER_A_BAR = """
from reliable_mq.cli.dlq.render import progress_bar

with progress_bar("reading") as bar:
    bar(1, 2)
    print("a line")
"""


def test_output_stays_on_its_pipe_under_a_progress_bar() -> None:
    """The bar is on a terminal: ``dlq list --json | jq`` at a shell."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_UNDER_A_BAR], stdout=subprocess.PIPE, stderr=theirs, timeout=30, check=True
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.stdout == b"a line\n"


def test_without_standard_output_there_is_nothing_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(OSError, match="standard output is closed"):
        product(as_json=False)


def test_headers_and_properties_of_0_and_false_are_shown() -> None:
    message = Message(b"", headers={"zero": 0, "no": False, "empty": "", "none": None}, priority=0, persistent=False)
    delivery = Delivery("", 1, False, "", "orders.dead", encode_properties(message), b"")
    delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
    lines = {" ".join(line.split()) for line in shown(details(DeadMessage(delivery, 1), 100)).splitlines()}
    expected = {"header zero 0", "header no False", "header empty", "header none None", "priority 0"}
    assert lines >= expected | {"persistent False"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("File 'amqp://u:secret@h/v' does not exist", "File 'amqp://u:***@h/v' does not exist"),
        ("amqp://u:se cr@et@h", "amqp://u:***@h"),
        ("no URL, no secret: a@b", "no URL, no secret: a@b"),
    ],
)
def test_no_error_shows_the_password_of_a_url(text: str, expected: str) -> None:
    assert without_passwords(text) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://shop@h1,h2/v?heartbeat=5", "amqp://shop:p%40%2F%3F@h1,h2/v?heartbeat=5"),
        ("amqps://shop@h", "amqps://shop:p%40%2F%3F@h"),
        ("amqp://shop:its-own@h", "amqp://shop:its-own@h"),
        ("amqp://shop:@h", "amqp://shop:@h"),
        ("amqp://h/v", "amqp://h/v"),
        ("amqp://h/v@w", "amqp://h/v@w"),
    ],
)
def test_the_environment_password_is_for_a_user_without_one(url: str, expected: str) -> None:
    seen: list[str] = []
    command = typer.Typer()

    @command.command()
    def show(url: URL) -> None:
        seen.append(url)

    result = CliRunner().invoke(command, [url], env={"RELIABLE_MQ_PASSWORD": "p@/?"})
    assert (result.exit_code, seen) == (0, [expected])


def test_a_password_in_another_encoding_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELIABLE_MQ_PASSWORD", "ab\udcfc")
    monkeypatch.setattr("sys.argv", ["reliable-mq", "doctor", "amqp://shop@h"])
    assert application.run() == 1
    assert capsys.readouterr().err.startswith("reliable-mq: RELIABLE_MQ_PASSWORD holds bytes that are not UTF-8")


@pytest.mark.parametrize("arguments", [["publish", "--queue", "q", "u"], ["doctor", "u"], ["dlq", "list", "u", "q"]])
def test_a_url_in_the_wrong_place_keeps_its_password(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reliable-mq", *arguments, "amqp://user:canary@h/"])
    assert application.run() in (1, 2)
    captured = capsys.readouterr()
    assert "canary" not in captured.out + captured.err
    assert "user" in captured.err


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_of_the_metrics_is_shown_as_a_url(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_served(address, 0):
        url = urlsplit(capsys.readouterr().err.removeprefix("metrics: ").strip())
    assert (url.hostname, url.path) == (address, "/metrics")
    assert url.port
