"""The commands in one application, and what becomes of an error that a command did not expect to explain itself."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from reliable_mq.cli import consume, demo, doctor, publish
from reliable_mq.cli.dlq import dlq
from reliable_mq.cli.outbox import outbox
from reliable_mq.cli.terminal import errors, show_logs
from reliable_mq.errors import ReliableMQError

__all__ = ["app", "run"]

app = typer.Typer(
    name="reliable-mq",
    help="Reliable publishing to and consuming from RabbitMQ.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # which flows paragraphs
    # Its tracebacks would show the locals of every frame, and with them the password of a URL.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (publish.publish, consume.consume, doctor.doctor, demo.demo):
    app.command()(command)
app.add_typer(dlq)
app.add_typer(outbox)


@app.callback()
def options(
    *,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log what the library does; twice: the driver as well.")
    ] = 0,
) -> None:
    """Publish to and consume from RabbitMQ, and see whether a broker keeps what it confirms."""
    show_logs(verbose)


def run() -> int:
    """Run the application with this process's arguments; return the exit status."""
    try:
        app(prog_name="reliable-mq")
    except (ReliableMQError, OSError) as error:
        errors.print(f"reliable-mq: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        _flush()
    return 0


def _flush() -> None:
    """Let a reader of our output that went away not become an error at the interpreter's exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
