"""Runs the command line as a user does: in a separate process, with pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from integration.support.processes import Process, run
from integration.support.programs import environment

_MODULE = "reliable_mq.cli"


def run_cli(*arguments: str | bytes, stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
    """Run a command and wait until it ends."""
    env = {**environment(), "COLUMNS": "200"}
    return run(_MODULE, *arguments, given=stdin, timeout=timeout, env=env)


def start_cli(*arguments: str, stdout: int = subprocess.PIPE) -> Process:
    """Start a command with pipes for its input and output."""
    return Process(_MODULE, *arguments, stdout=stdout)


@contextmanager
def running_cli(*arguments: str) -> Iterator[Process]:
    """Start a command, and kill it at the end of the block if it still runs."""
    process = start_cli(*arguments)
    try:
        yield process
    finally:
        process.kill()
