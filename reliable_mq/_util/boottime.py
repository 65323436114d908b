"""The time since the boot of the machine: the same for all its processes, and blind to jumps of the wall clock.

Where the processes of one machine share a file, and no server has a clock for them, it is what they agree on. What
outlives a boot needs more: a base to add to it, or the name of the boot beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

__all__ = ["boot", "since_boot"]

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> int:
    """Microseconds since some moment after the boot of the machine, the same for all its processes."""
    return time.monotonic_ns() // 1000


def boot() -> tuple[str, int]:
    """Name this boot of the machine, and say what the wall clock adds to `since_boot` now.

    Where the system does not name it, a jump of the wall clock by hours is taken for another boot.
    """
    base = time.time_ns() // 1000 - since_boot()
    try:
        return _BOOT.read_text().strip(), base
    except OSError:
        return f"about {base // 10_800_000_000}", base
