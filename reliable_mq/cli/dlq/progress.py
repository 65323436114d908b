"""A progress bar on a terminal, and an ending for Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from reliable_mq.cli.terminal import errors, say

__all__ = ["Bar", "interruptible", "progress_bar"]

_INTERRUPTED = 130


class Bar:
    """Is told how far it is; shows that where somebody looks.

    Attributes:
        done: the last that it was told.
    """

    def __init__(self, progress: Progress | None, what: str) -> None:
        self.done = 0
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self.done = done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    """Show a bar on a terminal, on stderr, while the block runs."""
    if not errors.is_terminal:
        yield Bar(None, what)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as progress:
        yield Bar(progress, what)


@contextmanager
def interruptible(what: str) -> Iterator[None]:
    """Take Ctrl-C for a wish to stop: everything was handed back by then.

    Raises:
        typer.Exit: with the status 130.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {what}")
        raise typer.Exit(_INTERRUPTED) from None
