"""Check arguments of users: durations (seconds, or a ``timedelta``), and paths of files for SQLite.

A constructor that passes its arguments on takes its signature from the class that declares them (`declared_by`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

from reliable_mq.errors import ConfigurationError

__all__ = ["Duration", "declared_by", "file_path", "seconds"]

P = ParamSpec("P")

Duration = float | timedelta

LONGEST: Final = 1e9  # seconds, some thirty years: more than a timer can be trusted with


def seconds(field: str, value: Duration, *, positive: bool = False) -> float:
    """Return ``value`` in seconds.

    Args:
        field: the option's name, for the error.
        value: seconds or a timedelta.
        positive: whether 0 is refused too.

    Raises:
        ConfigurationError: it is no duration, negative, or longer than 1e9 seconds.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    in_range = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= LONGEST
    if not in_range or (positive and number == 0):
        least = "above 0" if positive else "from 0"
        raise ConfigurationError(f"{field} must be a number of seconds {least} to 1e9, or a timedelta, not {value!r}")
    return float(number)


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


def declared_by(
    declaration: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[Concatenate[Any, P], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a method that passes its arguments on to ``declaration``: it has the signature and docstring of that.

    For type checkers, for ``help()`` and for `inspect.signature`.
    """
    return functools.wraps(declaration, assigned=("__doc__",), updated=())
