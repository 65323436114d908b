"""The clock of a database file: the same for all processes of the machine, and blind to jumps of the wall clock.

It is the time since the boot of the machine, added to a base that the first process after a boot leaves in the file:
the wall clock of that moment. So leases and retentions go on over a restart of the machine, too.
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
