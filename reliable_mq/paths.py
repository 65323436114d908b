"""Paths as users give them, of files that SQLite is to have."""

from __future__ import annotations

import os
from pathlib import Path

from reliable_mq.errors import ConfigurationError

__all__ = ["file_path"]


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that is there or can be made; of none in memory, and of no directory.

    Raises:
        ConfigurationError: it is something else.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(given, str) and given and "\0" not in given and not given.startswith((":memory:", "file:")):
        found = Path(given)
        if not found.is_dir():
            return found
    raise ConfigurationError(f"path must be that of a file, not {given!r}")
