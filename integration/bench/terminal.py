"""The output of a run, with rich if it is installed, as plain text otherwise."""

from __future__ import annotations

from typing import Any, Protocol, Self

from integration.bench.report import Table

__all__ = ["Terminal", "terminal"]


class Terminal(Protocol):
    """Shows the progress and the results of a run. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def progress(self, done: int, total: int, text: str) -> None:
        """Show that one more run is over."""

    def table(self, table: Table) -> None: ...

    def line(self, text: str) -> None: ...


def terminal() -> Terminal:
    try:
        return RichTerminal()
    except ImportError:
        return PlainTerminal()


class PlainTerminal:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def progress(self, done: int, total: int, text: str) -> None:
        print(f"[{done:>{len(str(total))}}/{total}] {text}", flush=True)

    def table(self, table: Table) -> None:
        lines = (table.header, *table.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{table.title}")
        for first, *others in lines:
            cells = [
                first.ljust(widths[0]),
                *[cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)],
            ]
            print("  ".join(cells))

    def line(self, text: str) -> None:
        print(text, flush=True)


class RichTerminal:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(highlight=False)
        # Tables are wider than rich's default width for a file or a pipe.
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=200)
        columns: list[Any] = [TextColumn("benchmark"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("runs", total=None, start=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def progress(self, done: int, total: int, text: str) -> None:
        self._progress.update(self._task, completed=done, total=total)
        self._console.print(text, markup=False)

    def table(self, table: Table) -> None:
        from rich.table import Table as RichTable

        grid = RichTable(title=table.title, title_justify="left", title_style="bold")
        for index, heading in enumerate(table.header):
            grid.add_column(heading, justify="right" if index else "left", no_wrap=index > 0)
        for row in table.rows:
            grid.add_row(*row)
        self._console.print(grid)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)
