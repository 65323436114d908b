"""Room that a SQLite outbox keeps for itself on its disk, so that rows can be removed when the disk is full.

SQLite needs room even to delete: it writes the change behind what is in the log, and before the log can start over,
its pages have to fit into the database. The reserve is a file beside the database; when the disk is full, it is given
up for the sake of removing rows, and nothing more is stored until it is back.

Invariants: with the reserve there, a log of its usual size can be copied into the database on a full disk; nothing is
stored without it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Reserve"]

_BYTES: Final = 8 * 1024 * 1024  # the log: 4 MiB (SQLite's default), a transaction behind it, and room for the removal
_ZEROS: Final = bytes(1024 * 1024)


class Reserve:
    """See the module. Shared by all processes that have the outbox open; thread-safe in that no state is kept here."""

    def __init__(self, database: Path) -> None:
        self._path = f"{database}-reserve"

    def there(self) -> bool:
        """Whether it is there, or could be made just now."""
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_size >= _BYTES:  # noqa: PTH116  # once for every transaction
                return True
        return self._make()

    def give_up(self) -> None:
        """Give the room back to the file system."""
        with suppress(OSError):
            os.truncate(self._path, 0)

    def _make(self) -> bool:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, _BYTES)
            else:  # on macOS
                for start in range(0, _BYTES, len(_ZEROS)):
                    os.pwrite(descriptor, _ZEROS, start)
                os.fsync(descriptor)  # some file systems find room only when they write
        except OSError:
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True
