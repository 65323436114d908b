"""Helpers to run other Python programs from a test."""

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
    """Return an environment in which Python can import this package and its tests.

    The package need not be installed.
    """
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def output_of(
    command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 120
) -> str:
    """Run a program, which must succeed, and return its standard output.

    Args:
        command: The program and its arguments.
        cwd: The working directory.
        env: The environment. None for `environment`.
        timeout: Seconds.

    Raises:
        AssertionError: If the program fails. The message has all of its output.
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
    """Return environment variables that shift the wall clock of a program.

    `offset_file` has the offset in seconds, with a sign. The program reads it whenever it reads the clock.

    Raises:
        RuntimeError: If libfaketime is not available on this machine. The message says what to do.
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
