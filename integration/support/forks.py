"""A program that is run again and again and mostly killed: it is imported once, and forked for each run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Self

from integration.support.programs import ROOT, environment

__all__ = ["Forks"]


class Forks:
    """Runs of a program in ``integration/programs``, one after the other. A context manager.

    Args:
        name: of the program, whose ``main`` takes texts.
    """

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "integration.programs.forking", name]
        self._process = subprocess.Popen(
            command,
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a run of it is in its process group
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End it."""
        if exc_info[0] is not None:
            self._kill()
        self._process.communicate()

    def begin(self, *arguments: object) -> int:
        """Begin a run; return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        what, _, number = self._read().partition(" ")
        assert what == "pid", what
        return int(number)

    def end(self, timeout: float = 100) -> tuple[int, list[str]]:
        """Wait for the end of the run; return its exit status, negative for a signal, and the lines that it wrote."""
        lines: list[str] = []
        late = threading.Timer(timeout, self._kill)
        late.start()
        try:
            while True:
                line = self._read()
                if line.startswith("exit "):
                    return int(line.removeprefix("exit ")), lines
                lines.append(line)
        finally:
            late.cancel()
            late.join()

    def run(self, *arguments: object, timeout: float = 100) -> tuple[int, list[str]]:
        """Run it to its end."""
        self.begin(*arguments)
        return self.end(timeout)

    def _kill(self) -> None:
        """Kill the program and its run, which has its output open, too."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended before its time"
        return line.rstrip("\n")
