"""Read input by lines or files; write a file completely or not at all.

Invariants: an existing file is untouched until everything is written and on the disk, however the process ends. After
an error nothing of the new file remains. A kill leaves the unfinished file beside the old one, named
``.<name>.<random>.part``. Files that are not regular, such as a pipe or a terminal, are written directly.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TextIO, TypeVar

T = TypeVar("T")


class Input(NamedTuple):
    """One piece of input.

    Attributes:
        where: The location for reports: ``"line 3"``, ``"orders.txt, line 3"`` or ``"photo.jpg"``.
        data: The content without the line end.
        size: The number of bytes read, for a progress bar.
    """

    where: str
    data: bytes
    size: int


def lines(files: Sequence[Path]) -> Iterator[Input]:
    """Return the lines of files or standard input, each as soon as it is complete."""
    if not files:
        given = _standard_input().buffer
        with _named("standard input"):
            yield from _lines_of(given, "")
    for path in files:
        with _named(str(path)), path.open("rb") as file:
            yield from _lines_of(file, f"{path}, ")


def whole_files(files: Sequence[Path]) -> Iterator[Input]:
    """Return each file as one piece."""
    for path in files:
        with _named(str(path)):
            data = path.read_bytes()
        yield Input(str(path), data, len(data))


class Readable(Generic[T]):
    """Input up to a read error. The caller settles the input before the error.

    Attributes:
        error: The read error that ended the input, or None.
    """

    def __init__(self, pieces: Iterator[T]) -> None:
        self.error: OSError | None = None
        self._pieces = pieces

    def __iter__(self) -> Iterator[T]:
        try:
            yield from self._pieces
        except OSError as error:
            self.error = error


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Add the file's name to read errors that lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or place
        raise


def size_of(files: Sequence[Path]) -> int | None:
    """Return the number of bytes to read, or None if it is unknown, as for a pipe."""
    found = [path.stat() for path in files] if files else [os.fstat(_standard_input().fileno())]
    return sum(each.st_size for each in found) if all(stat.S_ISREG(each.st_mode) for each in found) else None


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin


def _lines_of(file: Iterator[bytes], prefix: str) -> Iterator[Input]:
    for number, line in enumerate(file, start=1):
        yield Input(f"{prefix}line {number}", line.removesuffix(b"\n"), len(line))


def is_replaced(path: Path) -> bool:
    """Return whether `whole_file` replaces a file at its end.

    It writes to a pipe or a device directly.
    """
    mode = _mode(path)
    return mode is None or stat.S_ISREG(mode)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces an existing one at the end of the block.

    Raises:
        OSError: If the file cannot be written there. Errors of the block propagate.
    """
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not is_replaced(path):
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    start = os.fsdecode(os.fsencode(target.name)[:200])  # a name has 255 bytes at most
    unfinished = target.parent / f".{start}.{secrets.token_hex(4)}.part"
    permissions = 0o666 if mode is None else stat.S_IMODE(mode)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    except OSError as error:
        why = f"no file can be created in its directory: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:  # the umask applies only to a new file
                os.fchmod(descriptor, permissions)
            yield file
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _mode(path: Path) -> int | None:
    """Return the mode of a file, or None if there is no such file."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _sync_directory(path: Path) -> None:
    """Flush a directory, and with it the name of a new file, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
