"""The time since the machine's boot, which jumps of the wall clock do not change.

All processes of the machine share this time. They need one clock because they share a file, with no server whose clock
they could use. A time that is stored beyond a boot needs a base to add, or the name of the boot beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> int:
    """Return the microseconds since the boot, the same in all processes."""
    return time.monotonic_ns() // 1000


def boot() -> tuple[str, int]:
    """Return the name of this boot, and its wall-clock time in microseconds.

    The name is empty if this process cannot read it. Other processes of the same boot may be able to.
    """
    base = time.time_ns() // 1000 - since_boot()
    try:
        return _BOOT.read_text().strip(), base
    except OSError:
        return "", base
