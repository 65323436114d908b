"""Where things are shown: the console for errors and progress, and the logs of the library on it.

Logs go through the same console as a progress display, which stays whole that way.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["errors", "hide_logs", "output", "show_logs"]

errors: Final = Console(stderr=True)
"""For everything that is not a command's product."""

output: Final = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
"""For a product that is made for people: tables. In a pipe or a file, lines are longer than rich's 80 characters."""

_DRIVERS: Final = ("pika", "aio_pika", "aiormq")
_STYLES: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


class _ConsoleHandler(logging.Handler):
    """One line for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        line = Text(self.format(record), style=_STYLES.get(record.levelno, "dim"))
        errors.print(line, soft_wrap=True)


def show_logs(verbose: int = 0) -> None:
    """Show the library's logs on `errors`.

    Args:
        verbose: 0 for warnings; 1 for what it does as well; 2 for what the drivers have to say, too.
    """
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(message)s" if not verbose else "%(asctime)s %(name)s: %(message)s"))
    ours = logging.getLogger("reliable_mq")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    for name in _DRIVERS:
        driver = logging.getLogger(name)
        driver.handlers[:] = [handler]
        driver.propagate = False
        # They log every reconnect at ERROR, with tracebacks; what matters in it, the library says itself.
        driver.setLevel(logging.INFO if verbose > 1 else logging.CRITICAL + 1)


def hide_logs(logger: logging.Logger | None = None) -> None:
    """Show no logs of the library, or of this logger, unless they were asked for: the command says what they would."""
    ours = logging.getLogger("reliable_mq")
    if ours.level == logging.WARNING:
        (logger or ours).setLevel(logging.CRITICAL + 1)
