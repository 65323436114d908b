"""The command line: ``reliable-mq``.

One file per command, which says what the command does and holds its options; what a command stands on lies beside it.

Invariants:

- What a command produces goes to stdout, everything else (progress, logs, errors) to stderr.
- The exit status is 0 where all went well, 1 where something failed, 2 for a wrong command line, 130 after Ctrl-C, and
  141 where the reader of standard output left before the end.
- No output shows a password: of a URL only what ``str(ConnectionSettings)`` shows.
- Nothing here is needed by the library; without the extra ``cli`` the command says how to install it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich", "typer"})


def main() -> int:
    """Run the command line with this process's arguments; return the exit status."""
    try:
        if not _hold_streams():
            print("reliable-mq: standard output is closed; /dev/null is for what nobody wants to see", file=sys.stderr)
            return 1
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
    # All is done, and its outcome is known: Ctrl-C must not interrupt the interpreter's own end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _hold_streams() -> bool:
    """Keep files and sockets from taking the place of a standard stream that is closed; False without output.

    Such a stream stays None for Python, which is how who reads standard input knows.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process lives
    return sys.stdout is not None
