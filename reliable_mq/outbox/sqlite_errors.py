"""What SQLite's errors mean for an outbox, and what to do."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import OutboxError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_full", "outbox_error", "uncertain"]

_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "the disk is full; make room. Earlier rows are safe",
    sqlite3.SQLITE_BUSY: "another process has kept the file locked for too long; find it, or raise timeout",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written to; see to the permissions",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; see to the directory and the permissions",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away with its -wal, and recover it with sqlite3's .recover",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database, or damaged; give the outbox its own file",
    sqlite3.SQLITE_IOERR: "the disk failed; see to it. What was committed before is in the file",
    sqlite3.SQLITE_TOOBIG: "a message is larger than SQLite can store",
}


def outbox_error(error: Exception, path: Path, what: str) -> OutboxError:
    """Make the error that a user sees."""
    advice = _ADVICE.get(_code(error))
    return OutboxError(f"{what} failed in outbox {path}: {error}" + (f": {advice}" if advice else ""))


def uncertain(error: BaseException) -> bool:
    """Whether it is not known what the file holds now: the commit may be there although it failed."""
    return isinstance(error, sqlite3.Error) and _code(error) not in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_TOOBIG,
    )


def is_full(error: BaseException | None) -> bool:
    """Whether there was no room on the disk."""
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def _code(error: BaseException) -> int:
    """The primary result code; 0 where there is none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
