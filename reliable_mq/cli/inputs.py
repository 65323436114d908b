"""What is published from a shell: lines of standard input, lines of files, or whole files, each with its place."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

__all__ = ["Input", "lines", "size_of", "whole_files"]


class Input(NamedTuple):
    """One piece of input.

    Attributes:
        where: for a report: ``"line 3"``, ``"orders.txt, line 3"`` or ``"photo.jpg"``.
        data: without the line end.
        size: bytes that it took, for a progress bar.
    """

    where: str
    data: bytes
    size: int


def lines(files: Sequence[Path]) -> Iterator[Input]:
    """Give the lines of files, or of standard input where there are none, as soon as each is complete.

    Raises:
        OSError: a file cannot be read.
    """
    if not files:
        yield from _lines_of(_standard_input().buffer, "")
    for path in files:
        with path.open("rb") as file:
            yield from _lines_of(file, f"{path}, ")


def whole_files(files: Sequence[Path]) -> Iterator[Input]:
    """Give each file as one piece.

    Raises:
        OSError: a file cannot be read.
    """
    for path in files:
        data = path.read_bytes()
        yield Input(str(path), data, len(data))


def size_of(files: Sequence[Path]) -> int | None:
    """How many bytes there are to read; None where that cannot be known, as with a pipe."""
    found = [path.stat() for path in files] if files else [os.fstat(_standard_input().fileno())]
    return sum(each.st_size for each in found) if all(stat.S_ISREG(each.st_mode) for each in found) else None


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin


def _lines_of(file: Iterator[bytes], prefix: str) -> Iterator[Input]:
    for number, line in enumerate(file, start=1):
        yield Input(f"{prefix}line {number}", line.removesuffix(b"\n"), len(line))
