"""The command line: ``reliable-mq``.

Each command has a module or package with its options and its help, which imports the rest of its code when it runs.

Invariants:

- The output of a command goes to stdout, everything else (progress, logs, errors) to stderr.
- The exit status is 0 after success, 1 after a failure or for a value that the library refuses, 2 for a wrong command
  line, 130 after Ctrl-C, 143 after SIGTERM (0 if the command runs until then), and 141 if the reader of standard output
  closed it early (0 for ``consume``, which then requeues the unwritten messages).
- A failed write to stderr (its reader left, or the disk is full) ends no command. The text is dropped.
- No output shows a password: a URL is shown as ``str(ConnectionSettings)``.
- The library does not need this package. Without the extra ``cli`` the command explains how to install it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich", "typer"})


def main() -> int:
    """Run the command line with this process's arguments and return the exit status."""
    try:
        if not _hold_streams():
            print("reliable-mq: standard output is closed; redirect it to /dev/null to discard it", file=sys.stderr)
            return 1
        if os.environ.get("COLUMNS") == "0":  # rich would show nothing, so treat the width as unknown
            del os.environ["COLUMNS"]
        from reliable_mq.cli.app import run

        status = run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"reliable-mq needs {missing}, of the extra 'cli': pip install 'reliable-mq[cli]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    # The outcome is known: Ctrl-C must not interrupt the end of the interpreter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _hold_streams() -> bool:
    """Keep standard streams from being replaced, or from failing on a character.

    No file or socket takes the descriptor of a closed stream. A closed stream stays None in Python, so that readers of
    standard input notice. Characters that a terminal's encoding lacks, such as the tick marks of ``doctor`` in ISO
    8859-1, are shown as escapes. Standard error drops text that it cannot write.

    Returns:
        Whether there is a standard output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast("TextIO", _Lossy(sys.stderr))
    return sys.stdout is not None


class _Lossy:
    """A text file whose writes drop the text if they fail."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
