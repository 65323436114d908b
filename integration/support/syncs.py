"""Traces when a program syncs which files to the disk, by its system calls."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from integration.support.programs import ROOT, output_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["traced"]

_MARK: Final = re.compile(r'write\(1<[^>]*>, "(.*)\\n"')
_ENTERED: Final = re.compile(r"f(?:data)?sync\(\d+<([^>]*)>")
_LEFT: Final = re.compile(r"<\.\.\. f(?:data)?sync resumed>.* = 0")


def traced(program: str, *arguments: str, directory: Path) -> list[str]:
    """Run a program of ``integration/programs`` until it ends, and trace its threads.

    Returns the lines that it wrote to its standard output, each with one call, and ``sync PATH`` for each file whose
    contents are on the disk from then on, all in the order in which it happened.

    Raises:
        AssertionError: If the program fails.
        RuntimeError: If strace is not available on this machine. The message says what to do.
    """
    setup = subprocess.run(
        [ROOT / "integration" / "setup.sh", "strace"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if setup.returncode != 0:
        raise RuntimeError(f"no strace:\n{setup.stderr}")
    log = directory / "calls"
    # With --seccomp-bpf, the thousands of other calls of a program that starts do not stop it.
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-s", "200"]
    strace += ["-e", "trace=fsync,fdatasync,write", "-o", str(log)]
    output_of([*strace, sys.executable, "-m", f"integration.programs.{program}", *arguments])
    events: list[str] = []
    entered: dict[str, str] = {}  # by thread: the file that it is syncing
    for line in log.read_text().splitlines():
        thread, _, call = line.partition(" ")
        if mark := _MARK.search(call):
            events.append(mark.group(1))
        elif begun := _ENTERED.search(call):
            entered[thread] = begun.group(1)
            if call.endswith("= 0"):
                events.append(f"sync {entered.pop(thread)}")
        elif _LEFT.search(call):
            events.append(f"sync {entered.pop(thread)}")
    return events
