"""What a program had synchronised with the disk, and when: by the system calls of all of its threads."""

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
    """Run a program of ``integration/programs`` to its end.

    Returns what it wrote to its standard output, line by line as each was written by one call, and ``sync PATH`` for
    each file whose contents are on the disk from then on; in the order in which it happened.

    Raises:
        AssertionError: it failed.
        RuntimeError: strace cannot be had on this machine; the message says what to do.
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
    strace = ["strace", "-f", "-qq", "-y", "-s", "200", "-e", "trace=fsync,fdatasync,write", "-o", str(log)]
    output_of([*strace, sys.executable, "-m", f"integration.programs.{program}", *arguments])
    events: list[str] = []
    entered: dict[str, str] = {}  # by thread: the file that it is synchronising
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
