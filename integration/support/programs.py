"""What a test needs to run a Python program of its own beside itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parent.parent.parent
_SETUP = ROOT / "integration" / "setup.sh"


def environment() -> dict[str, str]:
    """For another Python that is to import this package and its tests, installed or not."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def output_of(
    command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 60
) -> str:
    """Run a program to its end, which must be a good one; give what it printed.

    Args:
        command: with its arguments.
        cwd: where.
        env: by default that of `environment`.
        timeout: seconds.

    Raises:
        AssertionError: it ended otherwise; the text has all that it said.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def faketime(offset_file: Path) -> dict[str, str]:
    """For a program whose wall clock is off by what `offset_file` says: seconds with a sign, read at every look.

    Raises:
        RuntimeError: libfaketime cannot be had on this machine; the message says what to do.
    """
    done = subprocess.run([_SETUP, "faketime"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"no libfaketime:\n{done.stderr}")
    return {
        "LD_PRELOAD": done.stdout.strip(),
        "FAKETIME_TIMESTAMP_FILE": str(offset_file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
