"""``reliable-mq dlq list``, ``show``, ``stats`` and ``export``: they leave the queue as it was."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.dlq.options import (
    URL,
    Exceptions,
    FromQueue,
    Headers,
    Limit,
    MessageIds,
    NewerThan,
    OlderThan,
    QueueName,
    Reason,
    chosen,
)
from reliable_mq.cli.dlq.progress import interruptible, progress_bar
from reliable_mq.cli.dlq.shown import details, listing, statistics_json, statistics_tables, summary, summary_json
from reliable_mq.cli.outputs import whole_file
from reliable_mq.cli.terminal import escaped, json_text, output, product, say
from reliable_mq.deadletters import DeadLetterQueue

__all__ = ["export", "list_", "show", "stats"]

_AS_JSON: Final = "One JSON object per line."
_KEPT: Final = "nothing was taken out of the queue"


def list_(
    url: URL,
    queue: QueueName,
    *,
    exception: Exceptions = None,
    reason: Reason = None,
    from_queue: FromQueue = None,
    message_id: MessageIds = None,
    header: Headers = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Limit = 100,
    as_json: Annotated[bool, typer.Option("--json", help=_AS_JSON)] = False,
) -> None:
    """List dead letters, one per line, from the head of the queue on."""
    which = chosen(exception, reason, from_queue, message_id, header, older_than, newer_than)
    now, table = datetime.now(UTC), listing()
    with DeadLetterQueue(url, queue) as dead, interruptible(_KEPT):
        total = len(dead)
        with progress_bar("looking") as bar:
            for message in dead.browse(which, limit=limit, progress=bar):
                if as_json:
                    print(json_text(summary_json(message)))
                else:
                    table.add_row(*summary(message, now))
    if not as_json:
        _write(table, f"{table.row_count:,} shown; {total:,} messages in {queue}")


def show(
    url: URL,
    queue: QueueName,
    *,
    exception: Exceptions = None,
    reason: Reason = None,
    from_queue: FromQueue = None,
    message_id: MessageIds = None,
    header: Headers = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Limit = 1,
    body_bytes: Annotated[int, typer.Option(min=0, help="How much of a body to show.")] = 4096,
) -> None:
    """Show dead letters in full: what happened, properties, headers, body. The exit status is 1 where there is none."""
    which = chosen(exception, reason, from_queue, message_id, header, older_than, newer_than)
    found = []
    with DeadLetterQueue(url, queue) as dead, interruptible(_KEPT), progress_bar("looking") as bar:
        found += [details(message, body_bytes) for message in dead.browse(which, limit=limit, progress=bar)]
    _write_apart(found)
    if not found:
        say(f"no such message in {queue}", console=output)
        raise typer.Exit(1)


def stats(
    url: URL,
    queue: QueueName,
    *,
    exception: Exceptions = None,
    reason: Reason = None,
    from_queue: FromQueue = None,
    message_id: MessageIds = None,
    header: Headers = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Count dead letters by what they died of, by the queue they were in, and by age."""
    which = chosen(exception, reason, from_queue, message_id, header, older_than, newer_than)
    with DeadLetterQueue(url, queue) as dead, interruptible(_KEPT), progress_bar("counting") as bar:
        counted = dead.statistics(which, progress=bar)
    if as_json:
        print(json_text(statistics_json(counted), indent=2))
        return
    _write_apart(statistics_tables(counted, datetime.now(UTC)))


def export(
    url: URL,
    queue: QueueName,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", dir_okay=False, help="Without, or with '-': standard output."),
    ] = None,
    *,
    exception: Exceptions = None,
    reason: Reason = None,
    from_queue: FromQueue = None,
    message_id: MessageIds = None,
    header: Headers = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Limit = None,
) -> None:
    """Write dead letters as JSON lines, byte for byte; they stay in the queue.

    `dlq import` and `publish --json` read them. A FILE that exists is replaced when everything is written, and is as it
    was until then.
    """
    which = chosen(exception, reason, from_queue, message_id, header, older_than, newer_than)
    to_stdout = file is None or str(file) == "-"
    unfinished = "what was written is incomplete" if to_stdout else f"{file} is as it was"
    with (
        interruptible(f"{_KEPT}, and {unfinished}"),
        DeadLetterQueue(url, queue) as dead,
        nullcontext(product(as_json=True)) if file is None or to_stdout else whole_file(file) as out,
        progress_bar("exporting") as bar,
    ):
        dead.export(out, which, limit=limit, progress=bar)


def _write(table: Table, footer: str) -> None:
    output.print(table)
    output.print(Text(escaped(footer), style="dim"))


def _write_apart(parts: Iterable[RenderableType]) -> None:
    """With an empty line between two."""
    for number, part in enumerate(parts):
        output.print(*([Text()] if number else []), part, sep="\n")
