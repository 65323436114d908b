"""Whether the path of an open SQLite outbox still names the file that is open.

SQLite goes on writing to a file that was deleted or replaced: every commit succeeds, and no later process finds it. The
write-ahead log is a file of its own, with commits that are nowhere else.

Invariant: once noted, the file stays the one that was open first until `forget`: ids of one file mean nothing in
another. Its log may be another one after the connection was closed and opened again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reliable_mq.errors import OutboxError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OpenFile"]


class OpenFile:
    """The files behind a path, as they were when they were opened. Thread-safe.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (str(path), f"{path}-wal")
        self._noted: list[tuple[int, int]] | None = None

    @property
    def noted(self) -> bool:
        """Whether files were noted."""
        return self._noted is not None

    def note(self) -> None:
        """Note the files, which a new connection has open.

        Raises:
            OutboxError: another file was noted before.
        """
        found = self._look()
        if self._noted is not None and found[0] != self._noted[0]:
            raise self._error()
        self._noted = found

    def check_file(self) -> None:
        """Check the database alone, which is to be opened again.

        Raises:
            OutboxError: it is another one, or none.
        """
        if self._noted is not None and self._look()[0] != self._noted[0]:
            raise self._error()

    def check(self) -> None:
        """Check that the path still names the files that were noted. Costs two looks at a directory.

        Raises:
            OutboxError: it does not, and no change of them will be found by a later process.
        """
        if self._noted is not None and self._look() != self._noted:
            raise self._error()

    def forget(self) -> None:
        """The files are closed; the next ones may be others."""
        self._noted = None

    def _error(self) -> OutboxError:
        return OutboxError(
            f"outbox {self._paths[0]} or its -wal was deleted or replaced while it was open: nothing more is stored "
            "there. Put the files back, or close the publisher and make another; what was in deleted files and was "
            "not published is lost"
        )

    def _look(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            try:
                seen = os.stat(path)  # noqa: PTH116  # twice for every transaction
            except FileNotFoundError:
                found.append((0, 0))
            else:
                found.append((seen.st_dev, seen.st_ino))
        return found
