"""The application: all commands, and the messages and exit statuses of errors."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated, Any, Final

import typer

from reliable_mq._util.version import OWN_VERSION
from reliable_mq.cli import consume, demo, doctor, health, monitoring, publish
from reliable_mq.cli.dlq import dlq
from reliable_mq.cli.outbox import outbox
from reliable_mq.cli.stage import stage
from reliable_mq.cli.terminal import INTERRUPTED, escaped, say, show_logs, without_passwords
from reliable_mq.cli.web import web
from reliable_mq.errors import ReliableMQError

_READER_LEFT: Final = 141  # the status of a tool that SIGPIPE ended
# click's class, which newer versions of typer vendor under another name.
_WrongCommandLine: Final[type[Exception]] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)

app = typer.Typer(
    name="reliable-mq",
    help="Publish to and consume from RabbitMQ without losing messages.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # which wraps paragraphs
    # Typer's tracebacks would show the locals of every frame, including the password of a URL.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    publish.publish,
    consume.consume,
    doctor.doctor,
    health.health,
    demo.demo,
    web,
    stage,
    monitoring.alerts,
    monitoring.grafana,
):
    app.command()(command)
app.add_typer(dlq)
app.add_typer(outbox)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        print(f"reliable-mq {OWN_VERSION}")
        raise typer.Exit


@app.callback()
def options(
    *,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Show the library's log; twice: also the driver's.")
    ] = 0,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """Publish to and consume from RabbitMQ, and check that a broker keeps messages."""
    show_logs(verbose)


def run() -> int:
    """Run the application with this process's arguments and return the exit status."""
    status = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer must not cause an error at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader that closed the pipe needs no more output
            _tell(f"standard output: {error.strerror}")
            status = status or 1
    return status


def _run() -> int:
    try:
        code = app(prog_name="reliable-mq", standalone_mode=False)
    except _WrongCommandLine as error:
        return _explained(error)
    except (typer.Abort, KeyboardInterrupt) as error:
        # Ctrl-C at a prompt raises Abort, as the answer "no" does.
        interrupted = isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
        _tell("interrupted" if interrupted else "aborted")
        return INTERRUPTED if interrupted else 1
    except ReliableMQError as error:
        _tell(str(error))
        return 1
    except OSError as error:
        file = "" if error.filename is None else f"{error.filename}: "
        _tell(f"{file}{error.strerror or error}")
        return 1
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer exit with 1 for it
            return _READER_LEFT
        code = 1 if end.code is None else end.code
    except Exception as error:  # noqa: BLE001  # a bug: one line for a user, the place with -v
        _tell(f"{type(error).__name__}: {error} (a bug in reliable-mq; -v shows the traceback)")
        if logging.getLogger("reliable_mq").isEnabledFor(logging.INFO):
            # Line by line, because all text from a URL to the last "@" counts as its password.
            say("\n".join(map(without_passwords, "".join(traceback.format_exception(error)).splitlines())))
        return 1
    return code if isinstance(code, int) else 0 if code is None else 1


def _explained(error: Any) -> int:
    """Explain a wrong command line, which may hold control characters and a password."""
    from typer.rich_utils import rich_format_error

    if isinstance(getattr(error, "message", None), str):
        error.message = without_passwords(escaped(error.message, keep="\n"))
    rich_format_error(error)
    return int(error.exit_code)


def _tell(text: str) -> None:
    say(f"reliable-mq: {without_passwords(text)}")
