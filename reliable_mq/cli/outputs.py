"""A file that is written whole or not at all.

Invariants: until everything is written and on the disk, a file that was there before is untouched, whatever ends the
process; after an error nothing of the new one is left. A kill leaves the unfinished file beside it, named
``.<name>.<random>.part``. What is no regular file, such as a pipe or a terminal, is written as it is.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; at the end of the block it takes the place of what was there.

    Raises:
        OSError: it cannot be written there; the block's own errors pass.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:200]}.", suffix=".part", dir=target.parent)
    except OSError as error:
        why = f"no file can be made beside it: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from error
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _umask() -> int:
    """Read the mask of the process, which can only be done by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_directory(path: Path) -> None:
    """Have the name on the disk, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
