"""What a test needs to run a Python program of its own beside itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_SETUP = ROOT / "integration" / "setup.sh"


def environment() -> dict[str, str]:
    """For another Python that is to import this package and its tests, installed or not."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


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
