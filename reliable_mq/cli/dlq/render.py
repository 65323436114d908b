"""Dead letters as tables and JSON, progress bars, and the end by Ctrl-C.

The content of a message is never interpreted as markup or control characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.terminal import INTERRUPTED, errors, escaped, plain_table, say

if TYPE_CHECKING:
    from reliable_mq.deadletters import DeadMessage, Statistics

_FACTS: Final = (
    ("reason", "reason"),
    ("exception", "exception_type"),
    ("message", "exception_message"),
    ("attempts", "attempts"),
    ("first failure", "first_failure"),
    ("last failure", "last_failure"),
    ("died at", "died_at"),
    ("consumer", "consumer"),
    ("trace id", "trace_id"),
    ("by version", "package_version"),
)
_ELSEWHERE: Final = frozenset(
    {"body", "body_base64", "exchange", "routing_key", "redelivered", "headers", "properties_base64"}
)
_UNITS: Final = ((604800, "w"), (86400, "d"), (3600, "h"), (60, "m"))


def age(died_at: datetime | None, now: datetime) -> str:
    """Return the age in its largest unit, such as ``"3h"``, or ``"?"`` if unknown."""
    if died_at is None:
        return "?"
    seconds = max((now - died_at) // timedelta(seconds=1), 0)
    size, unit = next((each for each in _UNITS if seconds >= each[0]), (1, "s"))
    return f"{seconds // size}{unit}"


def listing() -> Table:
    table = plain_table()
    table.add_column("", justify="right")
    table.add_column("message id", overflow="fold")
    table.add_column("age", justify="right")
    table.add_column("from")
    table.add_column("tries", justify="right")
    table.add_column("died of", overflow="fold", ratio=1)
    table.add_column("bytes", justify="right")
    return table


def summary(message: DeadMessage, now: datetime) -> list[Text]:
    died_of = message.cause
    if message.exception_type and message.exception_message:
        died_of += f": {message.exception_message}"
    return [
        Text(str(message.position), style="dim"),
        Text(escaped(message.message_id or "-", 64)),
        Text(age(message.died_at, now)),
        Text(escaped("?" if message.origin is None else message.origin.queue or "?", 64)),
        Text("?" if message.attempts is None else str(message.attempts)),
        Text(escaped(message.unreadable or died_of, 200)),
        Text(f"{len(message.body):,}"),
    ]


def details(message: DeadMessage, most: int) -> Table:
    """Return everything about one message, with up to ``most`` bytes of its body."""
    from reliable_mq.core.headers import PREFIX
    from reliable_mq.deadletters.jsonl import write_line

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(Text(escaped(name, 100)), Text(escaped(value, 2000)))

    table.add_row("position", Text(str(message.position), style="bold"))
    origin = message.origin
    if origin is not None:
        if origin.queue:
            row("was in queue", origin.queue)
        if origin.exchange is not None:
            row("published to", f"exchange {origin.exchange!r} with routing key {origin.routing_key!r}")
    for name, attribute in _FACTS:
        value = getattr(message, attribute)
        if value not in (None, ""):
            row(name, value)
    if message.delivery_count:
        row("delivered before", message.delivery_count)
    if message.unreadable:
        row("cannot be replayed", message.unreadable)
    line: dict[str, Any] = json.loads(write_line(message))
    for name in sorted(line.keys() - _ELSEWHERE):
        row(name.replace("_", " "), line[name])
    for name, value in sorted(message.headers.items()):
        if not name.startswith(PREFIX):  # headers with the prefix are shown above
            row(f"header {name}", value)
    table.add_row(f"body, {len(message.body):,} bytes", _body(message.body, most))
    return table


def _body(body: bytes, most: int) -> Text:
    cut = body[:most]
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        if error.start < len(cut) - 3 or len(cut) == len(body):
            text = " ".join(cut[start : start + 8].hex(" ") for start in range(0, len(cut), 8))
        else:
            text = cut[: error.start].decode()  # the cut splits a character
    return Text(escaped(text, keep="\n\t") + ("…" if len(body) > most else ""))


def statistics_tables(statistics: Statistics, now: datetime) -> list[Table | Text]:
    """Return the counts by cause, queue and age."""
    from reliable_mq.deadletters.filter import AGES

    head = Text(f"{statistics.messages:,} dead letters, {statistics.bytes:,} bytes", style="bold")
    if statistics.oldest is not None:
        head.append(f"; the oldest died {age(statistics.oldest, now)} ago, the newest {age(statistics.newest, now)}")
    shown: list[Table | Text] = [head]
    ages = {name: statistics.by_age[name] for name in AGES if statistics.by_age[name]}
    for title, counts in (
        ("died of", dict(statistics.by_cause.most_common())),
        ("from queue", {name or "unknown": count for name, count in statistics.by_queue.most_common()}),
        ("age", ages),
    ):
        table = plain_table()
        table.add_column("count", justify="right")
        table.add_column(title, overflow="fold")
        for name, count in counts.items():
            table.add_row(f"{count:,}", Text(escaped(name, 300)))
        shown.append(table)
    return shown


def statistics_json(statistics: Statistics) -> dict[str, object]:
    from reliable_mq.deadletters.filter import AGES

    return {
        "messages": statistics.messages,
        "bytes": statistics.bytes,
        "oldest": _iso(statistics.oldest),
        "newest": _iso(statistics.newest),
        "by_cause": dict(statistics.by_cause.most_common()),
        "by_queue": dict(statistics.by_queue.most_common()),
        "by_age": {name: statistics.by_age[name] for name in AGES},
    }


def summary_json(message: DeadMessage) -> dict[str, object]:
    """Return a message as JSON, without its body and headers."""
    return {
        "position": message.position,
        "message_id": message.message_id,
        **{name: getattr(message.origin, name, None) for name in ("queue", "exchange", "routing_key")},
        **{name: getattr(message, name) for name in ("reason", "exception_type", "exception_message", "attempts")},
        **{name: _iso(getattr(message, name)) for name in ("first_failure", "last_failure", "died_at")},
        "consumer": message.consumer,
        "redelivered": message.redelivered,
        "bytes": len(message.body),
    }


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat()


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if that is a terminal. The block sets its counts."""
    if not errors.is_terminal:
        yield lambda *_: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        redirect_stdout=False,  # rich would send all output of the block to stderr, even if stdout is a pipe
    ) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def interruptible(outcome: str) -> Iterator[None]:
    """Report an end by Ctrl-C. By then everything was requeued."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {outcome}")
        raise typer.Exit(INTERRUPTED) from None
