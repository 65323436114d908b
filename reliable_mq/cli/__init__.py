"""The command line: ``reliable-mq``.

One file per command, which says what the command does and holds its options; what a command stands on lies beside it.

Invariants:

- What a command produces goes to stdout, everything else (progress, logs, errors) to stderr.
- The exit status is 0 where all went well, 1 where something failed, 2 for a wrong command line, 130 after Ctrl-C.
- No output shows a password: of a URL only what ``str(ConnectionSettings)`` shows.
- Nothing here is needed by the library; without the extra ``cli`` the command says how to install it.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich", "typer"})


def main() -> int:
    """Run the command line with this process's arguments; return the exit status."""
    try:
        from reliable_mq.cli.app import run  # noqa: PLC0415  # what it needs may be missing, which is said here
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"reliable-mq needs {missing}, of the extra 'cli': pip install 'reliable-mq[cli]'", file=sys.stderr)
        return 1
    return run()
