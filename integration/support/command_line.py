"""The command line as a user runs it: a process of its own, with pipes for a shell's."""

from __future__ import annotations

import subprocess
import sys

from integration.support.programs import environment

_COMMAND = [sys.executable, "-m", "reliable_mq.cli"]


def run_cli(*arguments: str, stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    return subprocess.run(
        [*_COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
        env={**environment(), "COLUMNS": "200"},
    )


def start_cli(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a command, with pipes to it and from it."""
    return subprocess.Popen(
        [*_COMMAND, *arguments], stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, env=environment()
    )
