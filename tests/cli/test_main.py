"""The entry point: what is missing is said, errors are lines, and modules beside it do not need it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from reliable_mq import cli
from reliable_mq.cli import app
from reliable_mq.cli.terminal import hide_logs, show_logs
from reliable_mq.errors import BrokerUnavailable


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import reliable_mq.cli as c; sys.exit(c.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"reliable-mq needs {missing}, of the extra 'cli': pip install 'reliable-mq[cli]'\n"


def test_a_module_that_is_missing_for_another_reason_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reliable_mq.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reliable_mq.cli", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("publish", "consume", "doctor", "demo"):
        assert command in done.stdout


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
