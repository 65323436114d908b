"""The time since the boot of the machine: the same for all its processes, unaffected by jumps of the wall clock.

It is the common clock of processes that share a file without a server. A time that outlives a boot needs more: a base
to add to it, or the name of the boot beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

__all__ = ["boot", "since_boot"]

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> int:
    """Return microseconds since a moment after the boot of the machine, the same for all its processes."""
    return time.monotonic_ns() // 1000


def boot() -> tuple[str, int]:
    """Return the name of this boot, and the difference between the wall clock and `since_boot` now.

    If the system does not name it, a jump of the wall clock by hours counts as another boot.
    """
    base = time.time_ns() // 1000 - since_boot()
    try:
        return _BOOT.read_text().strip(), base
    except OSError:
        return f"about {base // 10_800_000_000}", base
