"""The command line as a user runs it: a process of its own, with pipes for a shell's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from integration.support.processes import Process, run
from integration.support.programs import environment

_MODULE = "reliable_mq.cli"


def run_cli(*arguments: str | bytes, stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    env = {**environment(), "COLUMNS": "200"}
    return run(_MODULE, *arguments, given=stdin, timeout=timeout, env=env)


def start_cli(*arguments: str, stdout: int = subprocess.PIPE) -> Process:
    """Start a command, with pipes to it and from it."""
    return Process(_MODULE, *arguments, stdout=stdout)


@contextmanager
def running_cli(*arguments: str) -> Iterator[Process]:
    """Start a command; it is killed at the end of the block, if it still runs."""
    process = start_cli(*arguments)
    try:
        yield process
    finally:
        process.kill()
