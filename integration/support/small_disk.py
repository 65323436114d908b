"""A small file system of one process.

A program calls `mount` before it starts a thread. No other process sees the file system, which ends with the program.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

__all__ = ["mount"]

_NEW_NAMESPACES = 0x10020000  # CLONE_NEWUSER | CLONE_NEWNS


def mount(directory: str, megabytes: int) -> None:
    """Mount an empty tmpfs on a directory, in a new mount namespace.

    As in ``unshare --map-root-user``, the process becomes root in a user namespace of its own. So any user may do this,
    and no Python has to start for it, as it would with the command ``unshare``.

    Raises:
        OSError: If the system does not let users have namespaces.
    """
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACES) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in ids.items():
        Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory], check=True)
