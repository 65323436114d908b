"""Refused values on the command line, interrupted purges, and imports."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
import typer

from reliable_mq.cli import app
from reliable_mq.cli import dlq as commands
from reliable_mq.cli.terminal import parse_headers
from reliable_mq.cli.web import _token
from reliable_mq.deadletters import DeadLetterQueue, ImportReport
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, StaleDelivery
from reliable_mq.stores import AsyncRedisStore
from tests.contract.scripted_broker import ScriptedBroker
from tests.web.memory_broker import MemoryBroker, letter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import BinaryIO

    Run = Callable[..., tuple[int, str]]

BROKER = "amqp://127.0.0.1:1"
QUEUE = "orders.dead"
ASYNC_STORE = AsyncRedisStore("redis://h")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns exit status and stderr."""

    def run(*line: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["reliable-mq", *line])
        status = app.run()
        return status, " ".join(capsys.readouterr().err.replace("│", " ").split())

    return run


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    made = MemoryBroker()
    made.add(QUEUE, *map(letter, range(450)))
    monkeypatch.setattr(commands, "_opened", made.open)
    return made


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("dlq", "purge", BROKER, QUEUE, "--exception", ""), "--exception must not be empty"),
        (("dlq", "list", BROKER, QUEUE, "--reason", ""), "--reason must not be empty"),
        (("dlq", "stats", BROKER, QUEUE, "--from-queue", ""), "--from-queue must not be empty"),
        (("dlq", "list", BROKER, QUEUE, "--older-than", "999999999w"), "--older-than must be at most 1e+09 seconds"),
        (("dlq", "list", BROKER, QUEUE, "--header", "a=1", "--header", "a=2"), "--header names 'a' twice"),
        (("dlq", "replay", BROKER, QUEUE, "--to", "q", "--as-published"), "--as-published determines the target"),
        (
            ("dlq", "replay", BROKER, QUEUE, "--idempotency-namespace", "n"),
            "--idempotency-namespace needs --idempotency",
        ),
        (("web", BROKER, QUEUE, "--idempotency-namespace", "n"), "--idempotency-namespace needs --idempotency"),
        (
            ("web", BROKER, QUEUE, "--management-url", "http://localhost:1"),
            "--management-url finds the queues: leave out",
        ),
        (("outbox", "relay", BROKER, "outbox", "--timeout", "5"), "--timeout needs --until-empty"),
        (("outbox", "relay", BROKER, "outbox", "--metrics-address", "::1"), "--metrics-address needs --metrics-port"),
        (("stage", BROKER, "a", "b", "--metrics-address", "::1"), "--metrics-address needs --metrics-port"),
        (("stage", BROKER, "a", "b", "--key", "routing_key"), "--key needs --partitions"),
        (("demo", "--kills", "3"), "--kills needs --kill-command"),
        (("outbox", "relay", BROKER, "outbox", "--lease", "30"), "--lease is for a database URL: leave it out for a"),
        (("outbox", "relay", BROKER, "outbox", "--create", "--table", "t"), "--table is for a database URL"),
        (("outbox", "status", "outbox", "--schema", "s"), "--schema is for a database URL"),
        (("outbox", "retry", "outbox", "--all", "--table", "t"), "--table is for a database URL"),
        (("outbox", "purge", "outbox", "--all", "--table", "t"), "--table is for a database URL"),
        (
            ("dlq", "replay", BROKER, QUEUE, "--exchange", "", "--routing-key", "q", "--as-published"),
            "--as-published determines the target",
        ),
        (("dlq", "replay", BROKER, QUEUE, "--idempotency", "stores"), "--idempotency takes MODULE:NAME, not 'stores'"),
        (("dlq", "replay", BROKER, QUEUE, "--idempotency", "redis://:hush@h/0"), "--idempotency takes MODULE:NAME, a"),
        (("dlq", "replay", BROKER, QUEUE, "--idempotency", "os:sep"), "os:sep: idempotency must be a store that can"),
        (
            ("dlq", "replay", BROKER, QUEUE, "--idempotency", f"{__name__}:ASYNC_STORE"),
            "idempotency is a store for AsyncConsumer, which a replay would never await",
        ),
        (("web", BROKER, QUEUE, "--idempotency", f"{__name__}:ASYNC_STORE"), "is a store for AsyncConsumer"),
        (("publish", BROKER, "--queue", "q", "--header", "a=1", "--header", "a="), "--header names 'a' twice"),
        (("publish", BROKER, "--queue", "q", "--timeout", "nan"), "--timeout takes seconds above 0"),
        (("publish", BROKER, "--queue", "q", "--timeout", "-1"), "--timeout takes seconds above 0"),
        (("publish", BROKER, "--queue", "q", "--timeout", "0"), "--timeout takes seconds above 0"),
        (("publish", BROKER, "--queue", "q", "--timeout", "inf"), "--timeout takes seconds above 0"),
        (("publish", BROKER, "--json", "--header", "a=1"), "--header is for lines and files"),
        (("publish", BROKER, "--json", "--content-type", "text/plain"), "--content-type is for lines and files"),
        (("publish", BROKER, "--json", "--transient"), "--transient is for lines and files"),
        (("consume", BROKER, QUEUE, "--peek", "--count", "65536"), "--count is at most 65535 with --peek"),
        (("web", BROKER, QUEUE, "--allow-editing"), "--allow-editing needs --allow-changes"),
        (("web", BROKER, QUEUE, "--host", "ä..b"), "--host takes an address or the name of a host, not 'ä..b'"),
        (("stage", BROKER, "orders", "staged", "--key", "foo"), "--key must be message_id, routing_key or header:NAME"),
        (
            ("stage", BROKER, "orders", "staged", "--key", "header:"),
            "--key must be message_id, routing_key or header:NAME",
        ),
    ],
)
def test_a_wrong_value_is_named_with_status_2(run: Run, line: tuple[str, ...], text: str) -> None:
    status, told = run(*line)
    assert status == 2
    assert text in told
    assert "hush" not in told


@pytest.mark.parametrize("url", ["localhost:15672", "amqp://localhost", "http://"])
def test_the_page_is_not_served_with_a_wrong_management_url(run: Run, url: str) -> None:
    status, told = run("web", BROKER, "--management-url", url)
    assert (status, told) == (1, "reliable-mq: --management-url must be http[s]://[user:password@]host[:port]")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("doctor", f"{BROKER}?name=x", "--management-url", "http://"), "--management-url must be"),
        (("web", f"{BROKER}?name=x", "--management-url", "http://"), "--management-url must be"),
        (("demo", "--url", f"{BROKER}?name=x"), "127.0.0.1:1: Connection refused"),
    ],
)
def test_the_url_may_name_the_connection(run: Run, line: tuple[str, ...], text: str) -> None:
    """Each command gets to its next error."""
    status, told = run(*line)
    assert status == 1
    assert text in told


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("doctor", "amqp://guest:guest@a..b/"), "the URL has a host"),
        (("health", "http://a..b:80/"), "the URL of the probe has a host"),
        (("doctor", BROKER, "--management-url", "http://u:p@a..b/"), "--management-url must be"),
        (("stage", BROKER, "a", "b", "--metrics-port", "0", "--metrics-address", "a..b"), "served on a..b port 0"),
    ],
)
def test_a_host_that_no_resolver_takes_is_named(run: Run, line: tuple[str, ...], text: str) -> None:
    status, told = run(*line)
    assert (status, "flaw" in told) == (1, False)
    assert text in told


@pytest.mark.parametrize(
    ("command", "options"),
    [(("consume",), ("--ack",)), (("dlq", "list"), ()), (("dlq", "import"), ()), (("stage",), ("s",))],
)
def test_a_refusal_by_the_broker_is_told_once(run: Run, command: tuple[str, ...], options: tuple[str, ...]) -> None:
    with ScriptedBroker() as broker:
        broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - vhost missing not found"
        status, told = run(*command, broker.url, QUEUE, *options)
    assert status == 1
    assert told.removeprefix("0 messages moved ").startswith("reliable-mq: 127.0.0.1:")
    assert told.count("NOT_ALLOWED") == 1


@pytest.mark.parametrize(
    ("option", "value"), [("--for", "5"), ("--window", ""), ("--max-age", "0s"), ("--for", "\u0665m")]
)
def test_a_wrong_duration_is_named_by_its_option(run: Run, option: str, value: str) -> None:
    """Prometheus accepts ASCII digits only."""
    status, told = run("alerts", option, value)
    assert status == 1
    assert f"({option}) must be a duration of Prometheus" in told


@pytest.mark.parametrize("timeout", ["nan", "-1", "inf"])
def test_a_relay_with_a_wrong_timeout_does_not_begin(run: Run, tmp_path: Path, timeout: str) -> None:
    outbox = tmp_path / "outbox"
    status, told = run("outbox", "relay", BROKER, str(outbox), "--create", "--until-empty", "--timeout", timeout)
    assert status == 1
    assert told.startswith("reliable-mq: --timeout must be a number of seconds from 0 to 1e9")
    assert not outbox.exists()


def test_headers_of_different_names_are_taken() -> None:
    assert parse_headers(["a=1", "b=a=2", "c="]) == {"a": "1", "b": "a=2", "c": ""}


def test_spaces_around_a_token_are_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is read from a file often ends in a line break."""
    monkeypatch.setenv("RELIABLE_MQ_WEB_TOKEN", "a-token-of-some-length \r\n")
    assert _token(None) == "a-token-of-some-length"


@pytest.mark.parametrize("value", ["", " \n"])
def test_an_empty_token_does_not_open_the_page(value: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable may be filled from a file or a secret that is missing."""
    monkeypatch.setenv("RELIABLE_MQ_WEB_TOKEN", value)
    monkeypatch.setattr("reliable_mq.cli.bounded_http.serve", lambda *_: 0)
    status, told = run("web", BROKER, QUEUE, "--port", "0")
    assert status == 2
    assert "RELIABLE_MQ_WEB_TOKEN is empty" in told


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        (
            StaleDelivery("the connection was lost"),
            1,
            "at least 400 deleted, the rest is in the queue reliable-mq: the connection was lost",
        ),
        (KeyboardInterrupt(), 130, "interrupted; at least 400 deleted, the rest is in the queue"),
    ],
)
def test_a_purge_that_ends_early_says_how_many_it_deleted(
    run: Run, broker: MemoryBroker, failure: BaseException, status: int, text: str
) -> None:
    broker.fails_at_ack, broker.failure = 3, failure
    assert run("dlq", "purge", BROKER, QUEUE, "--yes") == (status, text)
    assert len(broker.queues[QUEUE]) == 50


@pytest.mark.parametrize(("answer", "status", "text"), [(KeyboardInterrupt(), 130, "interrupted"), ("n", 1, "aborted")])
def test_ctrl_c_at_the_question_of_a_purge_is_an_interrupt(
    run: Run,
    broker: MemoryBroker,
    monkeypatch: pytest.MonkeyPatch,
    answer: BaseException | str,
    status: int,
    text: str,
) -> None:
    def read(_prompt: str) -> str:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setitem(typer.confirm.__globals__, "visible_prompt_func", read)
    ended, told = run("dlq", "purge", BROKER, QUEUE)
    assert ended == status
    assert told.endswith(f"reliable-mq: {text}")
    assert len(broker.queues[QUEUE]) == 450


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize(
    ("file", "outcome"),
    [
        (["dead.jsonl"], "dead.jsonl is as it was"),
        (["/dev/null"], "the output is incomplete"),
        (["-"], "the output is incomplete"),
        ([], "the output is incomplete"),
    ],
)
def test_an_interrupted_export_says_what_its_file_holds(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: list[str], outcome: str
) -> None:
    """A pipe or a device cannot be replaced at the end, as a file is."""

    def export(_queue: DeadLetterQueue, out: BinaryIO, *_: object, **__: object) -> None:
        out.write(b"{}\n")
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DeadLetterQueue, "export", export)
    status, told = run("dlq", "export", BROKER, QUEUE, *file)
    assert status == 130
    assert told.endswith(f"interrupted; nothing was taken out of the queue, and {outcome}")
    assert not list(tmp_path.iterdir())


def test_lines_that_cannot_be_imported_are_named_by_their_file(run: Run, broker: MemoryBroker, tmp_path: Path) -> None:
    """File names and line numbers are right after an empty file, too."""
    broker.queues[QUEUE] = []
    files = []
    for number, text in enumerate(('{"body": "a"}\nno\n', "", '{"body": "b"}\n{"body": "c"}\nno')):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(text)
    status, told = run("dlq", "import", BROKER, QUEUE, *map(str, files))
    assert (status, broker.bodies(QUEUE)) == (1, [b"a", b"b", b"c"])
    assert f"{files[0]}, line 2: not JSON" in told
    assert f"{files[2]}, line 3: not JSON" in told
    assert told.endswith("3 of 5 messages confirmed")


def test_an_import_says_what_may_be_in_the_queue_twice(
    run: Run, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def import_lines(_queue: DeadLetterQueue, _lines: object, *, report: ImportReport, **_: object) -> None:
        report.confirmed, report.sent_again = 3, 2

    monkeypatch.setattr(DeadLetterQueue, "import_lines", import_lines)
    file = tmp_path / "dead.jsonl"
    file.touch()
    told = "3 of 3 messages confirmed; sent again after a lost confirm, and perhaps in the queue twice: 2"
    assert run("dlq", "import", BROKER, QUEUE, str(file)) == (0, told)


def test_lines_that_were_not_tried_are_told_in_one_line(
    run: Run, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def import_lines(_queue: DeadLetterQueue, lines: Iterable[bytes], *, report: ImportReport, **_: object) -> None:
        error = BrokerUnavailable("not tried")
        report.failures += [(number, error) for number, _line in enumerate(lines, start=1)]

    monkeypatch.setattr(DeadLetterQueue, "import_lines", import_lines)
    file = tmp_path / "dead.jsonl"
    file.write_text('{"body": "a"}\n' * 20_000)
    told = f"{file}, line 1: not tried (the same for 19,999 lines after it) 0 of 20,000 messages confirmed"
    assert run("dlq", "import", BROKER, QUEUE, str(file)) == (1, told)


@pytest.mark.parametrize(
    ("settled", "place"), [(0, "0.jsonl, line 1"), (25, "1.jsonl, line 16"), (30, "1.jsonl, line")]
)
def test_an_interrupted_import_says_where_to_go_on(
    run: Run, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settled: int, place: str
) -> None:
    """Failures up to there are reported, too, because nobody would try these lines again."""

    def import_lines(_queue: DeadLetterQueue, lines: Iterable[bytes], *, report: ImportReport, **_: object) -> None:
        if settled:
            report.lines, report.confirmed = settled, len(list(lines)) - 10
            report.failures.append((3, ConfigurationError("not JSON")))
        raise KeyboardInterrupt

    monkeypatch.setattr(DeadLetterQueue, "import_lines", import_lines)
    files = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for file, count in zip(files, (10, 20), strict=True):
        file.write_text('{"body": "a"}\n' * count)
    status, told = run("dlq", "import", BROKER, QUEUE, *map(str, files))
    assert status == 130
    assert f"interrupted; at least {20 if settled else 0} messages confirmed" in told
    assert f"go on from {tmp_path}/{place}" in told
    assert (f"{files[0]}, line 3: not JSON" in told) == bool(settled)


def test_an_import_takes_the_same_memory_for_any_number_of_lines(
    run: Run, broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = []

    def import_lines(_queue: DeadLetterQueue, lines: Iterable[bytes], *, report: ImportReport, **_: object) -> None:
        tracemalloc.start()
        try:
            report.confirmed = sum(1 for _ in lines)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(DeadLetterQueue, "import_lines", import_lines)
    broker.queues[QUEUE] = []
    file = tmp_path / "dead.jsonl"
    file.write_text('{"body": "a"}\n' * 20_000)
    told = run("dlq", "import", BROKER, QUEUE, str(file))
    assert told == (0, "20,000 of 20,000 messages confirmed")
    assert max(peaks) < 500_000
