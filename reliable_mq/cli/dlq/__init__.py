"""The command ``reliable-mq dlq``: `reliable_mq.deadletters` for the shell.

``list``, ``show``, ``stats`` and ``export`` leave the queue unchanged. ``replay``, ``purge`` and ``import`` change it.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from rich.console import RenderableType
from rich.text import Text

from reliable_mq.cli.dlq.render import (
    details,
    interruptible,
    listing,
    progress_bar,
    statistics_json,
    statistics_tables,
    summary,
    summary_json,
)
from reliable_mq.cli.files import Readable, is_replaced, lines, whole_file
from reliable_mq.cli.terminal import (
    INTERRUPTED,
    URL,
    command_group,
    escaped,
    hide_logs,
    json_text,
    output,
    parse_headers,
    product,
    say,
)
from reliable_mq.errors import ConfigurationError, ReliableMQError

if TYPE_CHECKING:
    from reliable_mq.deadletters import DeadLetterQueue, Filter, ReplayReport
    from reliable_mq.stores.protocol import ResettableStore

__all__ = ["chosen", "dlq", "imported_store"]

_SHOWN: Final = 20  # maximum failures that are listed
_KEPT: Final = "nothing was taken out of the queue"

dlq = command_group("dlq", "Browse, count, replay, purge, export and import dead letters.")
QueueName: TypeAlias = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The dead-letter queue, such as orders.dead.")
]
DeadLetterFilter: TypeAlias = "Filter"  # imported when a command runs

_option: Final = functools.partial(typer.Option, rich_help_panel="Which dead letters")
Limit: TypeAlias = Annotated[int | None, _option(min=1, help="Maximum number of dead letters.")]


def chosen(
    exception: Annotated[
        str | None,
        _option(
            metavar="CLASS",
            help="By the class of the last exception, with or without its module; * and ? are wildcards.",
        ),
    ] = None,
    reason: Annotated[str | None, _option(metavar="TEXT", help="By a part of the reason.")] = None,
    from_queue: Annotated[str | None, _option(metavar="NAME", help="By the original queue.")] = None,
    message_id: Annotated[list[str] | None, _option(metavar="ID", help="By message id; repeatable.")] = None,
    header: Annotated[
        list[str] | None, _option(metavar="NAME=VALUE", help="By header; repeatable, all must match.")
    ] = None,
    older_than: Annotated[
        str | None, _option(metavar="AGE", help="By age: died longer ago than 90 (seconds), 15m, 2h, 7d, 1w.")
    ] = None,
    newer_than: Annotated[str | None, _option(metavar="AGE", help="By age: died more recently.")] = None,
) -> DeadLetterFilter:
    """Return the filter that the options describe."""
    from reliable_mq.deadletters import Filter

    for option, text in (("--exception", exception), ("--reason", reason), ("--from-queue", from_queue)):
        if text == "":
            raise typer.BadParameter(f"{option} must not be empty")
    return Filter(
        exception=exception,
        reason=reason,
        queue=from_queue,
        message_ids=message_id,
        headers=parse_headers(header or []),
        older_than=_age("--older-than", older_than),
        newer_than=_age("--newer-than", newer_than),
    )


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``which`` of a command by the options of `chosen`."""
    options = inspect.signature(chosen, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        which = chosen(**{name: given.pop(name) for name in options})
        command(which=which, **given)

    parameters = list(signature.parameters.values())
    place = list(signature.parameters).index("which")
    parameters[place : place + 1] = [option.replace(kind=option.KEYWORD_ONLY) for option in options.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dlq.command("list")
@filtered
def list_(
    url: URL,
    queue: QueueName,
    *,
    which: DeadLetterFilter,
    limit: Limit = 100,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List dead letters, one per line, from the head of the queue."""
    now, table, lines = datetime.now(UTC), listing(), []
    with _opened(url, queue) as dead, interruptible(_KEPT):
        total = len(dead)
        with progress_bar("reading") as bar:
            for message in dead.browse(which, limit=limit, progress=bar):
                if as_json:
                    lines.append(json_text(summary_json(message)))
                else:
                    table.add_row(*summary(message, now))
    if as_json:
        for line in lines:
            print(line)
        return
    output.print(table)
    output.print(Text(escaped(f"{table.row_count:,} shown; {total:,} messages in {queue}"), style="dim"))


@dlq.command()
@filtered
def show(
    url: URL,
    queue: QueueName,
    *,
    which: DeadLetterFilter,
    limit: Limit = 1,
    body_bytes: Annotated[int, typer.Option(min=0, help="Maximum bytes of a body to show.")] = 4096,
) -> None:
    """Show dead letters in full: cause, properties, headers, body.

    The exit status is 1 if there is none.
    """
    found = []
    with _opened(url, queue) as dead, interruptible(_KEPT), progress_bar("reading") as bar:
        found += [details(message, body_bytes) for message in dead.browse(which, limit=limit, progress=bar)]
    _write_apart(found)
    if not found:
        say(f"no such message in {queue}", console=output)
        raise typer.Exit(1)


@dlq.command()
@filtered
def stats(
    url: URL,
    queue: QueueName,
    *,
    which: DeadLetterFilter,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Count dead letters by cause, by original queue, and by age."""
    with _opened(url, queue) as dead, interruptible(_KEPT), progress_bar("counting") as bar:
        counted = dead.statistics(which, progress=bar)
    if as_json:
        print(json_text(statistics_json(counted), indent=2))
        return
    _write_apart(statistics_tables(counted, datetime.now(UTC)))


@dlq.command()
@filtered
def replay(
    url: URL,
    queue: QueueName,
    *,
    which: DeadLetterFilter,
    limit: Limit = None,
    to: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="Replay to this queue instead of the original ones.")
    ] = None,
    exchange: Annotated[str | None, typer.Option(help="Replay to this exchange, with --routing-key.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="The routing key for --exchange.")] = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Replay to the exchange and routing key of the first publish, and so to every queue bound there.",
        ),
    ] = False,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Maximum number of messages per second. Default: no limit.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Publish nothing, and report the number of messages.")
    ] = False,
    idempotency: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The consumer's idempotency store, as myapp.stores:store; its counts of attempts are reset.",
        ),
    ] = None,
    idempotency_namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The consumer's idempotency_namespace, if it has one."),
    ] = None,
) -> None:
    """Publish each dead letter to the queue it came from, with its attempts reset.

    Each is confirmed before it is removed from the dead-letter queue. A replay may be interrupted or killed at any time
    and run again: nothing is lost, and at most 200 messages are published twice (with --rate: those of one second).
    Messages that cannot be published stay, and are reported; the exit status is 1 then.
    """
    if (exchange is None) != (routing_key is None):
        raise typer.BadParameter("--exchange and --routing-key go together")
    if exchange is not None and to is not None:
        raise typer.BadParameter(
            "--to implies the default exchange and a routing key: omit --exchange and --routing-key"
        )
    if as_published and (to is not None or exchange is not None):
        raise typer.BadParameter("--as-published determines the target: omit --to, --exchange and --routing-key")
    store = imported_store(idempotency, idempotency_namespace)
    from reliable_mq.deadletters import ReplayReport, Target
    from reliable_mq.engine.publisher_channel import unwatched_logger

    hide_logs(unwatched_logger)
    report = ReplayReport()
    try:
        with (
            _opened(url, queue) as dead,
            interruptible("all messages that are not replayed are in the queue: run it again to continue"),
            progress_bar("would replay" if dry_run else "replaying") as bar,
        ):
            dead.replay(
                which,
                to=to if exchange is None else Target(exchange, routing_key or ""),
                as_published=as_published,
                limit=limit,
                rate=rate,
                dry_run=dry_run,
                idempotency=store,
                idempotency_namespace=idempotency_namespace,
                progress=bar,
                report=report,
            )
    except (ReliableMQError, typer.Exit):  # the latter after Ctrl-C
        if report.examined:
            _tell(report, dry_run=dry_run)
        raise
    _tell(report, dry_run=dry_run)
    raise typer.Exit(0 if report.ok else 1)


@dlq.command()
@filtered
def purge(
    url: URL,
    queue: QueueName,
    *,
    which: DeadLetterFilter,
    limit: Limit = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete dead letters permanently, after a confirmation prompt. Export them first."""
    with _opened(url, queue) as dead:
        if not yes:
            if sys.stdin is None:
                raise OSError(errno.EBADF, "standard input is closed, so the deletion cannot be confirmed: pass --yes")
            if which.everything:
                meant = "all" if limit is None else f"the first {limit:,}"
            else:
                meant = "those that match" if limit is None else f"the first {limit:,} that match"
            question = f"{escaped(queue)} holds {len(dead):,} messages. Delete {meant} permanently?"
            typer.confirm(question, abort=True, err=True)
        deleted = _deleted(dead, which, limit)
    say(f"{deleted:,} deleted")


def _deleted(dead: DeadLetterQueue, which: DeadLetterFilter, limit: int | None) -> int:
    """Purge, and report the number deleted even after a failure or an interrupt."""
    counts = [0]
    try:
        with progress_bar("deleting") as bar:
            return dead.purge(which, limit=limit, progress=bar, on_deleted=counts.append)
    except KeyboardInterrupt:
        say(f"interrupted; at least {counts[-1]:,} deleted, the rest is in the queue")
        raise typer.Exit(INTERRUPTED) from None
    except Exception:
        say(f"at least {counts[-1]:,} deleted, the rest is in the queue")
        raise


@dlq.command()
@filtered
def export(
    url: URL,
    queue: QueueName,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", dir_okay=False, help="The file to write. Default, or with '-': standard output."
        ),
    ] = None,
    *,
    which: DeadLetterFilter,
    limit: Limit = None,
) -> None:
    """Write dead letters as JSON lines, byte for byte; they stay in the queue.

    `dlq import` and `publish --json` read them. A FILE that exists is replaced when everything is written, and is as it
    was until then, unless it is a pipe or a device.
    """
    to_stdout = file is None or str(file) == "-"
    is_kept = file is not None and not to_stdout and is_replaced(file)
    unfinished = f"{file} is as it was" if is_kept else "the output is incomplete"
    with (
        interruptible(f"{_KEPT}, and {unfinished}"),
        _opened(url, queue) as dead,
        nullcontext(product(as_json=True)) if file is None or to_stdout else whole_file(file) as out,
        progress_bar("exporting") as bar,
    ):
        dead.export(out, which, limit=limit, progress=bar)


@dlq.command("import")
def import_(
    url: URL,
    queue: QueueName,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The files to read. Default: standard input."),
    ] = None,
) -> None:
    """Publish JSON lines, as `dlq export` writes them, into a queue, byte for byte.

    A message that is not confirmed is reported by its line, and the exit status is 1. Blank lines are skipped. An
    import that is interrupted tells from which line to go on.
    """
    from reliable_mq.deadletters import ImportReport
    from reliable_mq.engine.publisher_channel import unwatched_logger

    hide_logs(unwatched_logger)
    sources = [[file] for file in files or []] or [[]]
    ends = [0]  # lines up to the end of each source

    def texts() -> Iterator[bytes]:
        count = 0
        for source in sources:
            for item in lines(source):
                count += 1
                yield item.data
            ends.append(count)

    def place(number: int) -> str:
        source = min(bisect_left(ends, number), len(sources)) - 1
        line = f"line {number - ends[source]}"
        return f"{files[source]}, {line}" if files else line

    given, report = Readable(texts()), ImportReport()
    interrupted = False
    with _opened(url, queue) as dead:
        try:
            with progress_bar("importing") as bar:
                dead.import_lines(given, progress=bar, report=report)
        except KeyboardInterrupt:
            interrupted = True
    for _, alike in groupby(report.failures, key=lambda failure: id(failure[1])):
        (number, error), *others = alike
        say(f"{place(number)}: {error}" + (f" (the same for {len(others):,} lines after it)" if others else ""))
    if interrupted:
        say(
            f"interrupted; at least {report.confirmed:,} messages confirmed, which are in the queue; go on from "
            f"{place(report.lines + 1)}: that line and later ones may have arrived, too"
        )
        raise typer.Exit(INTERRUPTED)
    text = f"{report.confirmed:,} of {report.confirmed + len(report.failures):,} messages confirmed"
    if report.sent_again:
        text += f"; sent again after a lost confirm, and perhaps in the queue twice: {report.sent_again:,}"
    say(text)
    if given.error is not None:
        raise given.error
    raise typer.Exit(0 if report.ok else 1)


def _tell(report: ReplayReport, *, dry_run: bool) -> None:
    told = report.failures[:_SHOWN]
    for message, error in told:
        say(f"{message.position}, {escaped(message.message_id or 'without id', 64)}: {escaped(error, 500)}")
    if report.failed > len(told):
        say(f"and {report.failed - len(told):,} more")
    done = "would be replayed" if dry_run else "replayed"
    text = f"{report.replayed:,} of {report.examined:,} {done}"
    if report.failed:
        text += f"; {report.failed:,} {'cannot be replayed' if dry_run else 'failed'}, and stay"
    if report.unacked:
        text += f"; of these, perhaps still in the queue after a lost connection: {report.unacked:,}"
    if report.unconfirmed:
        text += f"; not confirmed, still in the queue, and perhaps at the target, too: {report.unconfirmed:,}"
    if report.already_published:
        text += f"; delivered again after a lost connection, and not published twice: {report.already_published:,}"
    if report.sent_again:
        text += f"; sent again after a lost confirm, and perhaps at the target twice: {report.sent_again:,}"
    if report.possible_duplicates:
        text += f"; possible duplicates, held by an interrupted replay or browse: {report.possible_duplicates:,}"
    elif report.possible_duplicates is None and report.delivered_before:
        text += (
            f"; delivered before, by a browse or a replay: {report.delivered_before:,}; if a replay was interrupted, "
            "up to 200 of them are duplicates"
        )
    say(text)


def _opened(url: str, queue: str) -> DeadLetterQueue:
    from reliable_mq.deadletters import DeadLetterQueue

    return DeadLetterQueue(url, queue)


def _write_apart(parts: Iterable[RenderableType]) -> None:
    """Print parts, separated by an empty line."""
    for number, part in enumerate(parts):
        output.print(*([Text()] if number else []), part, sep="\n")


def imported_store(place: str | None, namespace: str | None) -> ResettableStore | None:
    """Import a store from the user's code, including the working directory."""
    if place is None:
        if namespace is not None:
            raise typer.BadParameter("--idempotency-namespace needs --idempotency, the store whose counts are reset")
        return None
    module, colon, name = place.partition(":")
    if "://" in place:  # a URL may hold a password
        raise typer.BadParameter("--idempotency takes MODULE:NAME, a store that your code creates, not a URL")
    if not module or not colon or not name:
        raise typer.BadParameter(f"--idempotency takes MODULE:NAME, not {place!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        store = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"--idempotency: {error}") from error
    except Exception as error:  # the user's own code
        raise typer.BadParameter(
            f"--idempotency: importing {module!r} raised {type(error).__name__}: {error}"
        ) from error
    from reliable_mq.stores.protocol import resettable

    try:
        return resettable(store)
    except ConfigurationError as error:
        raise typer.BadParameter(f"--idempotency: {place}: {error}") from error


def _age(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    from reliable_mq._util.validation import LONGEST
    from reliable_mq.deadletters.filter import age_in_seconds

    try:
        age = age_in_seconds(text)
    except ConfigurationError as error:
        raise typer.BadParameter(f"{option} must be a number followed by s, m, h, d or w, not {text!r}") from error
    if age > LONGEST:
        raise typer.BadParameter(f"{option} must be at most {LONGEST:g} seconds, not {text!r}")
    return age
