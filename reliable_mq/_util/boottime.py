"""The time since the boot of the machine: no jump of the wall clock moves it.

It is the same for all processes of the machine, which share a file and have no server with a clock. A time that is kept
beyond a boot needs a base to add to it, or the name of the boot beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

__all__ = ["boot", "since_boot"]

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> int:
    """Return the microseconds since the boot, the same in all processes."""
    return time.monotonic_ns() // 1000


def boot() -> tuple[str, int]:
    """Return the name of this boot, and the wall clock's time of it in microseconds.

    If the system has no name for it, a jump of the wall clock by hours counts as another boot.
    """
    base = time.time_ns() // 1000 - since_boot()
    try:
        return _BOOT.read_text().strip(), base
    except OSError:
        return f"about {base // 10_800_000_000}", base
