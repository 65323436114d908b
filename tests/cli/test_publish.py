"""The command line of ``publish``, and how its input becomes messages."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from reliable_mq import Message
from reliable_mq.cli.app import app
from reliable_mq.cli.files import Input, Readable, lines, size_of, whole_files
from reliable_mq.cli.publish import _Recipe, _Run
from reliable_mq.errors import BrokerUnavailable, ConfigurationError

URL = "amqp://guest:guest@localhost:1"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no target"),
        (["--queue", ""], "no target"),
        (["--exchange", "", "--routing-key", ""], "no target"),
        (["--queue", "q", "--exchange", "e"], "implies the default"),
        (["--queue", "q", "--routing-key", "k"], "implies the default"),
        (["--routing-key", "k", "--declare"], "--declare needs --queue"),
        (["--queue", "q", "--header", "no value"], "NAME=VALUE"),
        (["no-such-file", "--queue", "q"], "does not exist"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["publish", URL, *arguments])
    assert result.exit_code == 2
    assert why in result.output


def recipe(**changes: object) -> _Recipe:
    given: dict[str, object] = {
        "by_json": False,
        "exchange": None,
        "routing_key": None,
        "content_type": None,
        "headers": None,
        "persistent": True,
    }
    return _Recipe(**{**given, **changes})  # type: ignore[arg-type]


def test_a_line_becomes_a_message_with_the_options_properties() -> None:
    made = recipe(routing_key="q", content_type="text/plain", headers={"a": "b"}, persistent=False)
    message, exchange, routing_key = made.make(b"text")
    assert (message.body, exchange, routing_key) == (b"text", "", "q")
    assert (message.content_type, message.headers, message.persistent) == ("text/plain", {"a": "b"}, False)


@pytest.mark.parametrize(
    ("options", "line", "target"),
    [
        ({}, b'{"body": "x", "routing_key": "k"}', ("", "k")),
        ({}, b'{"body": "x", "exchange": "e"}', ("e", "")),
        ({"routing_key": "mine"}, b'{"body": "x", "exchange": "e", "routing_key": "k"}', ("e", "mine")),
        ({"exchange": "", "routing_key": "q"}, b'{"body": "x", "exchange": "e", "routing_key": "k"}', ("", "q")),
    ],
)
def test_options_win_over_what_a_json_line_says(
    options: dict[str, object], line: bytes, target: tuple[str, str]
) -> None:
    _, exchange, routing_key = recipe(by_json=True, **options).make(line)
    assert (exchange, routing_key) == target


@pytest.mark.parametrize(
    ("by_json", "data", "is_message"), [(True, b" \r", False), (True, b"{", True), (False, b"", True)]
)
def test_a_blank_line_of_json_is_no_message(by_json: bool, data: bytes, is_message: bool) -> None:
    assert recipe(by_json=by_json).is_message(data) == is_message


def test_a_json_line_that_says_no_target_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no routing_key"):
        recipe(by_json=True).make(b'{"body": "x"}')


def test_lines_are_numbered_per_file_and_lose_only_their_newline(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\n\ntwo")
    (tmp_path / "b").write_bytes(b"\xff\n")
    files = [tmp_path / "a", tmp_path / "b"]
    assert [(each.where.removeprefix(str(tmp_path)), each.data) for each in lines(files)] == [
        ("/a, line 1", b"one\r"),
        ("/a, line 2", b""),
        ("/a, line 3", b"two"),
        ("/b, line 1", b"\xff"),
    ]
    assert size_of(files) == sum(each.size for each in lines(files)) == 11


def test_standard_input_is_read_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb")))
    assert [(each.where, each.data) for each in lines([])] == [("line 1", b"a"), ("line 2", b"b")]


def test_standard_input_that_is_closed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for read in (lambda: list(lines([])), lambda: size_of([])):
        with pytest.raises(OSError, match="standard input is closed"):
            read()


def test_a_whole_file_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(b"a\nb\n")
    assert [(each.where, each.data, each.size) for each in whole_files([path])] == [(str(path), b"a\nb\n", 4)]


def test_the_size_of_a_pipe_is_not_known() -> None:
    assert size_of([Path("/dev/null")]) is None


class EndingPublisher:
    """Confirms two messages, and ends then."""

    outstanding = 0

    def __init__(self) -> None:
        self.tried = 0

    def connect(self) -> None:
        pass

    def submit(self, _message: Message, **_: object) -> SimpleNamespace:
        self.tried += 1
        if self.tried > 2:
            raise BrokerUnavailable("the login was refused")
        confirmation = SimpleNamespace(exception=lambda: None)
        confirmation.add_done_callback = lambda settled: settled(confirmation)
        return confirmation

    def close(self, _timeout: float) -> None:
        pass


def test_a_publisher_that_ends_reports_the_line_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a user would not know from which line to go on."""
    publisher = EndingPublisher()
    inputs = Readable(Input(f"line {number}", b"x", 2) for number in range(1, 6))
    status = _Run(publisher, recipe(routing_key="q"), None).publish_all(inputs)  # type: ignore[arg-type]
    assert (status, publisher.tried) == (1, 3)
    assert capsys.readouterr().err.splitlines() == [
        "line 3: the login was refused",
        "1 of 3 messages were not confirmed; none after line 3 was tried",
    ]
