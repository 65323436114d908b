"""The command ``reliable-mq publish``: publish lines, files or JSON, pipelined."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from reliable_mq._util.validation import LONGEST
from reliable_mq.cli.files import Input, Readable, lines, size_of, whole_files
from reliable_mq.cli.terminal import INTERRUPTED, URL, errors, escaped, hide_logs, parse_headers, say
from reliable_mq.errors import ConfigurationError, PublishError, ReliableMQError

if TYPE_CHECKING:
    from reliable_mq import Confirmation, Message, Publisher

_GRACE = 5.0  # seconds for outstanding confirms after Ctrl-C


def publish(
    url: URL,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Files to publish, one message per file. Default: the lines of standard input.",
        ),
    ] = None,
    *,
    queue: Annotated[str | None, typer.Option(help="The queue to publish to, through the default exchange.")] = None,
    exchange: Annotated[str | None, typer.Option(help="The exchange to publish to.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="The routing key.")] = None,
    declare: Annotated[
        bool, typer.Option("--declare", help="Declare the queue first, as a quorum queue with a dead-letter queue.")
    ] = False,
    by_line: Annotated[bool, typer.Option("--lines", help="One message per line of the files.")] = False,
    by_json: Annotated[
        bool,
        typer.Option("--json", help='One JSON object per line: {"body": ..., "headers": ..., "routing_key": ...}.'),
    ] = False,
    content_type: Annotated[str | None, typer.Option(help="The content type of lines and files.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header of lines and files; repeatable.")
    ] = None,
    transient: Annotated[
        bool,
        typer.Option(
            "--transient", help="Publish lines and files as transient messages, which a broker restart may lose."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which to give up a message.")] = 120.0,
) -> None:
    """Publish lines, files or JSON lines, and wait until each is confirmed.

    If a message is not confirmed, its line is reported, and the exit status is 1. The options for the target override
    the fields of a JSON line. Blank lines are skipped with --json, and are empty messages otherwise.
    """
    if queue is not None and (exchange is not None or routing_key is not None):
        raise typer.BadParameter(
            "--queue implies the default exchange and a routing key: omit --exchange and --routing-key"
        )
    if declare and queue is None:
        raise typer.BadParameter("--declare needs --queue")
    if not 0 < timeout <= LONGEST:  # false for nan
        raise typer.BadParameter(f"--timeout takes seconds above 0, up to {LONGEST:g}, not {timeout:g}")
    if not (queue or exchange or routing_key or by_json):
        raise typer.BadParameter("no target: give --queue, or --exchange and --routing-key")
    for option, given in (("--content-type", content_type), ("--header", header), ("--transient", transient)):
        if by_json and given:
            raise typer.BadParameter(f"{option} is for lines and files: a JSON line has properties of its own")
    from reliable_mq import Publisher, Queue
    from reliable_mq.engine.publisher_channel import unwatched_logger

    hide_logs(unwatched_logger)
    recipe = _Recipe(
        by_json=by_json,
        exchange="" if queue is not None else exchange,
        routing_key=queue if queue is not None else routing_key,
        content_type=content_type,
        headers=parse_headers(header or []) or None,
        persistent=not transient,
    )
    paths = files or []
    inputs = Readable(lines(paths) if by_line or by_json or not paths else whole_files(paths))
    publisher = Publisher(
        url,
        topology=[Queue(queue)] if declare and queue is not None else [],
        delivery_timeout=timeout,
        name="reliable-mq publish",
    )
    raise typer.Exit(_Run(publisher, recipe, size_of(paths)).publish_all(inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """The message and the target for a piece of input."""

    by_json: bool
    exchange: str | None
    routing_key: str | None
    content_type: str | None
    headers: dict[str, str] | None
    persistent: bool

    def is_message(self, data: bytes) -> bool:
        """Return whether a piece of input is a message, which a blank line of JSON is not."""
        from reliable_mq.deadletters.jsonl import is_blank

        return not self.by_json or not is_blank(data)

    def make(self, data: bytes) -> tuple[Message, str, str]:
        """Return the message, its exchange and its routing key."""
        from reliable_mq import Message
        from reliable_mq.deadletters.jsonl import read_line

        if not self.by_json:
            message = Message(data, content_type=self.content_type, headers=self.headers, persistent=self.persistent)
            return message, self.exchange or "", self.routing_key or ""
        line = read_line(data)
        exchange = line.exchange if self.exchange is None else self.exchange
        routing_key = line.routing_key if self.routing_key is None else self.routing_key
        if not exchange and not routing_key:
            raise ConfigurationError("no routing_key in the line or as an option")
        return line.message, exchange or "", routing_key or ""


class _Run:
    """One run and its counts. Confirms arrive on another thread."""

    def __init__(self, publisher: Publisher, recipe: _Recipe, total: int | None) -> None:
        self._publisher = publisher
        self._recipe = recipe
        self._total = total  # bytes to read, if known
        self._lock = threading.Lock()
        self._read = 0
        self._read_bytes = 0
        self._confirmed = 0
        self._failed = 0
        self._first_failed = ""
        self._ended_at = ""  # the place of the input at which the publisher has ended
        self._interrupted = False
        self._began = time.monotonic()
        self._spinner = Spinner("dots")

    def publish_all(self, inputs: Readable[Input]) -> int:
        """Publish everything that can be read and return the exit status."""
        with self._progress():
            try:
                self._publisher.connect()
                self._began = time.monotonic()
                self._publish_each(inputs)
            except KeyboardInterrupt:
                self._interrupted = True
            finally:
                self._publisher.close(_GRACE)
        self._report(complete=inputs.error is None)
        if inputs.error is not None and not self._interrupted:
            raise inputs.error
        return INTERRUPTED if self._interrupted else 1 if self._failed else 0

    def _publish_each(self, inputs: Readable[Input]) -> None:
        for item in inputs:
            self._read_bytes += item.size
            if self._recipe.is_message(item.data):
                self._read += 1
                try:
                    self._publish(item)
                except ReliableMQError as error:  # the publisher has ended, as if the broker refuses its login again
                    self._fail(item.where, error)
                    self._ended_at = item.where
                    return
        self._publisher.flush()

    def _publish(self, item: Input) -> None:
        try:
            message, exchange, routing_key = self._recipe.make(item.data)
            confirmation = self._publisher.submit(message, exchange=exchange, routing_key=routing_key)
        except (ConfigurationError, PublishError) as error:
            self._fail(item.where, error)
        else:
            confirmation.add_done_callback(partial(self._settled, item.where))

    def _settled(self, where: str, confirmation: Confirmation) -> None:
        error = confirmation.exception()
        if error is not None:
            self._fail(where, error)
        else:
            with self._lock:
                self._confirmed += 1

    def _fail(self, where: str, error: ReliableMQError) -> None:
        with self._lock:
            self._failed += 1
            self._first_failed = self._first_failed or where
        if not self._interrupted:
            say(f"{where}: {error}")

    def _report(self, *, complete: bool) -> None:
        if self._interrupted:
            text = f"interrupted: {self._confirmed:,} of {self._read:,} messages are confirmed"
            if self._failed:
                text += (
                    f"; {self._failed:,} are not, and may have arrived all the same; the first: {self._first_failed}"
                )
        elif self._failed:
            text = f"{self._failed:,} of {self._read:,} messages were not confirmed"
            if self._ended_at:
                text += f"; none after {self._ended_at} was tried"
        elif not complete:
            text = f"the input ended early: {self._confirmed:,} of {self._read:,} messages are confirmed"
        elif errors.is_terminal:
            text = f"{self._confirmed:,} messages confirmed in {time.monotonic() - self._began:.1f} s"
        else:
            return
        say(text)

    def _progress(self) -> AbstractContextManager[object]:
        if not errors.is_terminal or (sys.stdin is not None and sys.stdin.isatty()):
            return nullcontext()  # no terminal to draw on, or the user types on it
        return Live(self, console=errors, transient=True, refresh_per_second=8)

    def __rich__(self) -> Table:
        """Return the current progress display."""
        elapsed = max(time.monotonic() - self._began, 0.001)
        text = Text(f"{self._confirmed:,} confirmed  {self._confirmed / elapsed:,.0f}/s")
        if self._publisher.outstanding:
            text.append(f"  {self._publisher.outstanding:,} outstanding")
        if self._failed:
            text.append(f"  {self._failed:,} failed", style="red")
        if self._publisher.blocked is not None:
            text.append(f"  blocked by the broker: {escaped(self._publisher.blocked)}", style="yellow")
        elif not self._publisher.connected:
            text.append("  not connected", style="yellow")
        row = Table.grid(padding=(0, 1))
        if self._total:
            row.add_row(ProgressBar(total=self._total, completed=self._read_bytes, width=30), text)
        else:
            row.add_row(self._spinner, text)
        return row
