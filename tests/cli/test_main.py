"""The entry point: missing extras, errors as one line, and independent modules."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

import reliable_mq
from reliable_mq import cli
from reliable_mq.cli import app
from reliable_mq.cli import dlq as commands
from reliable_mq.cli.terminal import hide_logs, show_logs
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.outbox import SQLiteOutbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import reliable_mq.cli as c; sys.exit(c.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"reliable-mq needs {missing}, of the extra 'cli': pip install 'reliable-mq[cli]'\n"


def test_a_module_missing_for_another_reason_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reliable_mq.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main()


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reliable_mq.cli", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("publish", "consume", "doctor", "demo"):
        assert command in done.stdout


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reliable-mq", "--version"])
    assert app.run() == 0
    assert capsys.readouterr().out == f"reliable-mq {version('reliable-mq')}\n"


@pytest.mark.slow
def test_help_imports_no_driver_and_nothing_that_a_command_needs() -> None:
    """Imports take most of the start-up time of a command."""
    code = (
        "import sys; sys.argv[1:] = ['dlq', 'replay', '--help']; import reliable_mq.cli as c; assert not c.main();"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not loaded & {"asyncio", "http.client", "pika", "prometheus_client", "sqlalchemy", "ssl", "tenacity"}
    assert not {"reliable_mq.sync", "reliable_mq.core", "reliable_mq.deadletters", "reliable_mq.outbox"} & loaded


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rich.console", "typer", "pika"])
def test_ctrl_c_during_an_import_ends_it_quietly(module: str) -> None:
    """The import of the entry point itself is outside of its control."""
    code = f"""if True:
        import os, signal, sys
        class Interrupt:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())
        sys.argv[1:] = ["doctor", "amqp://127.0.0.1:1"]
        from reliable_mq.cli import main
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130
    assert done.stderr in ("", "reliable-mq: interrupted\n")


def test_a_relay_stopped_in_an_import_has_its_own_exit_status(tmp_path: Path) -> None:
    """An import that defines a dataclass calls exec()."""
    code = """if True:
        import signal, sys
        from reliable_mq.cli import main, outbox
        outbox._connect = lambda *_, **__: exec("signal.raise_signal(signal.SIGTERM)")
        sys.exit(main())
    """
    (tmp_path / "stopped.py").write_text(code)
    with closing(SQLiteOutbox(tmp_path / "outbox")) as outbox:
        outbox.open()
    command = [sys.executable, "-m", "stopped", "outbox", "relay", "amqp://127.0.0.1:1", "outbox", "--until-empty"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(reliable_mq.__file__).parent.parent}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr


def test_a_signal_is_not_lost_with_an_exception_in_a_callback(tmp_path: Path) -> None:
    """Python drops what is raised in a callback of a weak reference, of which imports have many."""
    code = """if True:
        import signal, sys, time, weakref
        from reliable_mq.cli import main, outbox
        class Module: pass
        def connect(*_, **__):
            module = Module()
            reference = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGTERM))
            del module
            time.sleep(60)
        outbox._connect = connect
        sys.argv[1:] = ["outbox", "relay", "amqp://127.0.0.1:1", "outbox", "--create"]
        sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" in done.stderr, "it was raised elsewhere"


def test_an_error_of_ours_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise BrokerUnavailable("nobody [bold]answers[/]")

    monkeypatch.setattr(app, "app", fail)
    assert app.run() == 1
    assert capsys.readouterr().err == "reliable-mq: nobody [bold]answers[/]\n"


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (None, 1)])
def test_the_exit_status_of_a_command_is_ours(code: int | None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(**_: object) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(app, "app", end)
    assert app.run() == status


def test_a_database_driver_that_cannot_be_imported_is_no_flaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """psycopg raises ImportError without libpq."""
    (tmp_path / "psycopg.py").write_text("raise ImportError('no pq wrapper available')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.argv", ["reliable-mq", "outbox", "status", "postgresql+psycopg://u:p@127.0.0.1:1/db"])
    assert app.run() == 1
    told = "reliable-mq: the driver of OUTBOX cannot be imported: no pq wrapper available\n"
    assert capsys.readouterr().err == told


def test_a_database_url_of_another_library_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the URL of the service itself."""
    monkeypatch.setattr("sys.argv", ["reliable-mq", "outbox", "status", "postgres://user:hush@127.0.0.1:1/db"])
    assert app.run() == 1
    error = capsys.readouterr().err
    told = "OUTBOX begins with a name that SQLAlchemy does not know: Can't load plugin: sqlalchemy"
    assert error.startswith(f"reliable-mq: {told}")
    assert "hush" not in error


def test_warnings_are_shown_and_drivers_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs()
    logging.getLogger("reliable_mq.sync").warning("the connection [x] is lost")
    logging.getLogger("reliable_mq.sync").info("connecting")
    logging.getLogger("pika.adapters").critical("a traceback")
    assert capsys.readouterr().err == "the connection [x] is lost\n"


def test_more_is_shown_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs(2)
    hide_logs()
    logging.getLogger("reliable_mq.sync").debug("a detail")
    logging.getLogger("pika").info("a frame")
    shown = capsys.readouterr().err
    assert "reliable_mq.sync: a detail" in shown
    assert "pika: a frame" in shown


def test_logs_are_hidden_behind_a_display(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs()
    hide_logs()
    logging.getLogger("reliable_mq.sync").error("the connection is lost")
    assert capsys.readouterr().err == ""


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command line in which ``$CLI`` is the command."""
    command = f"CLI='{sys.executable} -m reliable_mq.cli'; {line}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)


def assert_is_in_a_line(text: str, told: str) -> None:
    """Assert that an error is told in a line of its own words."""
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    assert "a bug in" not in told
    assert text in told
    assert "\x1b" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("$CLI --help >&-", 1, "standard output is closed"),
        ("$CLI --help >/dev/full", 1, "reliable-mq: "),
        pytest.param(
            "$CLI doctor amqp://localhost:1 --json >/dev/full", 1, "No space left on device", marks=pytest.mark.soak
        ),
        ("$CLI --help 2>&- <&-", 0, ""),
        ("$CLI dlq list http://h q 2>&-", 1, ""),
        ("$CLI --help | head -0; exit ${PIPESTATUS[0]}", None, ""),
        ("COLUMNS=0 $CLI --help >&2", 0, "Publish to and consume from RabbitMQ without losing messages."),
        ("$CLI dlq show amqp://u:canary@h $'\\xff\\xfe'", 1, "reliable-mq: queue must be valid UTF-8"),
        ("PYTHONIOENCODING=ascii $CLI doctor amqp://127.0.0.1:1", 1, ""),
        ("LC_ALL=C PYTHONIOENCODING=latin-1 $CLI health http://127.0.0.1:1", 1, "no response from 127.0.0.1"),
    ],
)
def test_streams_that_fail_and_names_that_are_none_end_in_a_line(line: str, status: int | None, text: str) -> None:
    done = shell(line)
    assert status in (None, done.returncode)
    assert_is_in_a_line(text, done.stderr)


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("outbox status /dev/null", 1, "/dev/null is not a file"),
        ("outbox status sqlite+aiosqlite:///x", 1, "OUTBOX has a driver for asyncio, aiosqlite: name another one"),
        ("dlq list amqp://u@h q", 1, "user 'u' in the URL has no password"),
        ("dlq list \udcff\x1b[2J q", 1, "reliable-mq: the URL"),
        ("web amqp://h --token-file token", 1, "the file given with --token-file is not UTF-8 text"),
        ("stage amqp://h orders one orders two", 1, "orders is named twice"),
        ("stage amqp://h orders one --retention 7", 1, "--retention must be a number with a unit"),
        ("dlq replay amqp://h q --idempotency ..:x", 2, "--idempotency: importing '..' raised"),
    ],
)
def test_an_argument_that_is_wrong_ends_in_a_line(
    line: str,
    status: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reliable-mq", *line.split(" ")])
    assert app.run() == status
    assert_is_in_a_line(text, capsys.readouterr().err)


@pytest.mark.slow
def test_a_closed_output_pipe_ends_a_command_as_sigpipe_would(tmp_path: Path) -> None:
    outbox = SQLiteOutbox(tmp_path / "outbox.db")
    outbox.status()  # creates the file
    outbox.close()
    done = shell(f"set -o pipefail; {{ sleep 0.2; $CLI outbox status {tmp_path}/outbox.db; }} | true")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_that_leaves_in_the_middle_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(commands, "_opened", write)
    monkeypatch.setattr("sys.argv", ["reliable-mq", "dlq", "export", "amqp://localhost", "q"])
    monkeypatch.setattr("sys.stdout", sys.stdout)  # typer wraps it
    monkeypatch.setattr("sys.stderr", sys.stderr)
    assert app.run() == 141
    assert capsys.readouterr().err == ""


@pytest.fixture(params=["the reader left", "the disk is full"])
def failing_log(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield a descriptor that takes nothing."""
    if request.param == "the reader left":
        reader, log = os.pipe()
        os.close(reader)
    else:
        log = os.open("/dev/full", os.O_WRONLY)
    yield log
    os.close(log)


@pytest.mark.slow
def test_a_log_that_cannot_be_written_changes_nothing_else(failing_log: int) -> None:
    code = (
        "import sys; import reliable_mq.cli as c; from reliable_mq.cli import app, terminal;"
        "app._run = lambda: terminal.say('to stderr') or print('to stdout') or 3; sys.exit(c.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=failing_log, check=False)
    assert (done.returncode, done.stdout) == (3, b"to stdout\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_every_encoding_of_stdout(encoding: str) -> None:
    """JSON has no escape such as ``\\xfc``."""
    value = {"queue": "f\u00fcr \u65e5\u672c"}
    code = (
        "import sys; import reliable_mq.cli as c; from reliable_mq.cli import app, terminal;"
        f"app._run = lambda: print(terminal.json_text({value})) or 0; sys.exit(c.main())"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, check=True)
    assert json.loads(done.stdout) == value
    assert ("\u00fc".encode() in done.stdout) is (encoding == "utf-8")


@pytest.mark.slow
def test_a_log_that_cannot_be_written_does_not_end_reconnecting(failing_log: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker:
        broker.settimeout(20)
        url = f"amqp://u:p@127.0.0.1:{broker.getsockname()[1]}/"
        command = [sys.executable, "-m", "reliable_mq.cli", "consume", url, "q", "--ack"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=failing_log)
        try:
            for _ in range(3):  # each lost attempt is a warning
                broker.accept()[0].close()
            process.terminate()
            assert process.wait(20) == 143
        finally:
            process.kill()
            process.wait()


def test_a_flaw_is_a_line_and_with_v_the_place_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ValueError("amqp://guest:hush@h")

    monkeypatch.setattr(app, "app", fail)
    assert app.run() == 1
    told = "reliable-mq: ValueError: amqp://guest:***@h (a bug in reliable-mq; -v shows the traceback)\n"
    assert capsys.readouterr().err == told
    show_logs(1)
    assert app.run() == 1
    shown = capsys.readouterr().err
    assert shown.startswith(told + "Traceback")
    assert shown.rstrip().endswith("\nValueError: amqp://guest:***@h")
    assert "hush" not in shown


@pytest.mark.parametrize(("error", "status"), [(typer.Abort(), 1), (KeyboardInterrupt(), 130)])
def test_an_end_by_the_user_has_its_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(**_: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", end)
    assert app.run() == status
    assert capsys.readouterr().err.count("\n") == 1
