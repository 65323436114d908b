"""The command ``reliable-mq outbox``: inspect, relay, retry or purge an outbox.

An outbox is named by the path of its SQLite file, or by a database URL in SQLAlchemy's format.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from reliable_mq._util.signals import next_signal
from reliable_mq._util.validation import seconds
from reliable_mq.cli.terminal import (
    INTERRUPTED,
    URL,
    MetricsAddress,
    MetricsPort,
    command_group,
    ended_by,
    escaped,
    hide_logs,
    json_text,
    metrics_served,
    output,
    say,
)
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, OutboxError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from reliable_mq import Publisher
    from reliable_mq.outbox import Outbox, SQLAlchemyOutbox

_ANSWERS: Final = 30.0  # seconds for a database to respond to a connection
_LEAVE: Final = 5.0  # seconds for a relay to stop; the other messages are left to another relay, or to its next start
_AGAIN: Final = 1.0  # seconds from a signal that did not end a wait until the next try

outbox = command_group("outbox", "Inspect an outbox, relay it, and retry or purge messages that were set aside.")

Where = Annotated[
    str,
    typer.Argument(
        metavar="OUTBOX",
        help="The path of a SQLite outbox, or a database URL: postgresql+psycopg://user:password@host/db.",
    ),
]
TableName = Annotated[
    str | None, typer.Option(help="The table, if OUTBOX is a database URL. Default: reliable_mq_outbox.")
]
Schema = Annotated[str | None, typer.Option(help="The schema of the table.")]
MessageIds = Annotated[
    list[str] | None, typer.Argument(metavar="MESSAGE_ID", help="The messages to select. Not with --all.")
]
All = Annotated[bool, typer.Option("--all", help="All messages that were set aside.")]


@outbox.command()
def status(
    where: Where,
    *,
    table: TableName = None,
    schema: Schema = None,
    limit: Annotated[
        int, typer.Option(min=0, max=1_000_000_000, help="Maximum number of messages that were set aside to list.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Count waiting messages, and list those that were set aside with the reason.

    The exit status is 1 if any was set aside, or is of a newer version.
    """
    with _outbox(where, table, schema) as box:
        counted, aside = box.status(), box.set_aside(limit)
    if as_json:
        print(json_text(asdict(counted) | {"messages": [one._asdict() for one in aside]}))
    else:
        counts = Table.grid(padding=(0, 2))
        for name, count in asdict(counted).items():
            text = f"{count:,.1f} s" if isinstance(count, float) else f"{count:,}"
            counts.add_row(name.replace("_", " "), text)
        output.print(counts)
        for one in aside:
            to = f"{one.exchange!r} {one.routing_key!r}"
            line = f"{one.message_id} to {to}, {one.attempts} attempts: {one.reason}"
            output.print(Text(escaped(line)), soft_wrap=True)
    if counted.set_aside or counted.unreadable:
        raise typer.Exit(1)


@outbox.command()
def relay(
    url: URL,
    where: Where,
    *,
    table: TableName = None,
    schema: Schema = None,
    create: Annotated[bool, typer.Option("--create", help="Create the outbox if it does not exist.")] = False,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when all messages are published or set aside.")
    ] = False,
    lease: Annotated[
        float | None,
        typer.Option(help="Seconds after which another relay may take the rows of a relay that died. Default: 30."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which --until-empty gives up, with exit status 1.")
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = None,
) -> None:
    """Publish the messages of an outbox, confirmed, until Ctrl-C or SIGTERM.

    Any number of relays may share a database's table. A relay stops within seconds: messages unconfirmed by then are
    for another one, or for its next start.
    """
    if timeout is not None and not until_empty:
        raise typer.BadParameter("--timeout needs --until-empty: without it, the relay runs until a signal")
    if timeout is not None:
        seconds("--timeout", timeout)
    from reliable_mq import Publisher
    from reliable_mq.codec import LARGEST_BODY

    received: SimpleQueue[int] = SimpleQueue()
    waits_for_signals = False

    def stop(number: int, _frame: FrameType | None) -> None:
        received.put(number)
        if not waits_for_signals:
            signal.signal(signal.SIGALRM, stop_again)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
            raise _Stopped  # interrupts a wait for the database, the broker, or an empty outbox

    def stop_again(_number: int, _frame: FrameType | None) -> None:
        # Python drops an exception that is raised in a callback of a weak reference, as in an import, or in __del__.
        if not waits_for_signals and not isinstance(sys.exc_info()[1], _Stopped):
            raise _Stopped

    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, stop)
    try:
        with (
            metrics_served(metrics_address, metrics_port) as registry,
            _outbox(where, table, schema, create=create, lease=lease) as box,
            _left_reported(box),
            Publisher(
                url,
                outbox=box,
                name="reliable-mq outbox relay",
                max_message_bytes=LARGEST_BODY,  # the broker applies its own limit
                registry=registry,
            ) as publisher,
        ):
            try:
                _connect(publisher, patient=not until_empty)
                if until_empty:
                    _flush(publisher, timeout)
                else:
                    waits_for_signals = True
                    say(f"relaying {box!r}")
                    number = next_signal(received)
                    publisher.close(_LEAVE)
                    raise typer.Exit(INTERRUPTED if number == signal.SIGINT else 0)
            except _Stopped:
                publisher.close(_LEAVE)
                raise
    except _Stopped:
        signal.setitimer(signal.ITIMER_REAL, 0)
        number = received.get()
        in_order = not until_empty and number == signal.SIGTERM
        raise typer.Exit(0 if in_order else ended_by(number)) from None
    except TimeoutError as error:
        raise OutboxError(str(error)) from error


def _connect(publisher: Publisher, *, patient: bool) -> None:
    """Connect. If the broker is unreachable and ``patient``, let the publisher retry."""
    try:
        publisher.connect()
    except BrokerUnavailable as error:
        if error.permanent or not patient:
            raise
        say(f"{error}; trying again")


class _Stopped(KeyboardInterrupt):
    """The relay was told to stop.

    ``python -m`` ends itself by SIGINT if a KeyboardInterrupt itself passed through exec(), even if it was caught.
    """


@outbox.command()
def retry(
    where: Where,
    message_ids: MessageIds = None,
    *,
    every: All = False,
    table: TableName = None,
    schema: Schema = None,
) -> None:
    """Put back messages that were set aside, for the next relay to publish."""
    which = _which(message_ids, every=every)
    with _outbox(where, table, schema) as box:
        _say(box.retry(which), "put back", which)


@outbox.command()
def purge(
    where: Where,
    message_ids: MessageIds = None,
    *,
    every: All = False,
    table: TableName = None,
    schema: Schema = None,
) -> None:
    """Remove messages that were set aside, for good.

    Messages that waited behind them in their order are published next.
    """
    which = _which(message_ids, every=every)
    with _outbox(where, table, schema) as box:
        _say(box.purge(which), "removed", which)


@outbox.command()
def ddl(where: Where, *, table: TableName = None, schema: Schema = None) -> None:
    """Print the statements that create the table in this database, for a migration.

    The database is neither queried nor changed.
    """
    if "://" not in where:
        raise typer.BadParameter("a SQLite outbox creates its own tables: give a database URL")
    with _in_database(where, table=table, schema=schema) as (box, _engine):
        print(box.ddl)


@contextmanager
def _outbox(
    where: str, table: str | None, schema: str | None, *, create: bool = False, lease: float | None = None
) -> Iterator[Outbox]:
    if "://" in where:
        with _in_database(where, table=table, schema=schema, create=create, lease=lease) as (box, engine):
            _wait_for_answer(box, engine)
            box.open()
            yield box
        return
    for option, given in (("--table", table), ("--schema", schema), ("--lease", lease)):
        if given is not None:
            raise typer.BadParameter(f"{option} is for a database URL: leave it out for a SQLite outbox")
    path = Path(where)
    if not path.exists():
        if not create:
            raise OutboxError(f"there is no outbox {where}: give the path of its SQLite file, or a database URL")
    elif not path.is_file():
        raise OutboxError(f"{where} is not a file: give the path of an outbox's SQLite file, or a database URL")
    from reliable_mq.outbox import SQLiteOutbox

    with closing(SQLiteOutbox(where)) as file:
        yield file


@contextmanager
def _left_reported(box: Outbox) -> Iterator[None]:
    """Report how many messages remain when the relay ends, at any stage."""
    from reliable_mq.engine import outbox_channel

    hide_logs(outbox_channel.logger, below=logging.ERROR)  # the library reports it only if the publisher was opened
    try:
        yield
    except (OutboxError, TimeoutError):  # the text contains it
        raise
    except BaseException:
        _report_left(box)
        raise
    _report_left(box)


def _report_left(box: Outbox) -> None:
    from reliable_mq._util.threads import DaemonExecutor

    try:
        left, _last = DaemonExecutor("reliable_mq outbox count").call(lambda _: box.backlog(), _LEAVE)
    except (OutboxError, TimeoutError) as error:
        say(f"messages left in {box!r} cannot be counted: {error}")
    else:
        if left:
            say(f"{left} messages stay in {box!r}, to be published at the next start")


def _flush(publisher: Publisher, timeout: float | None) -> None:
    try:
        publisher.flush(timeout)
    except TimeoutError:
        publisher.close(0)  # leaving the block would take a while
        raise


@contextmanager
def _in_database(url: str, **options: Any) -> Iterator[tuple[SQLAlchemyOutbox, Engine]]:
    try:  # the extra `sql`, which nothing else here needs
        from sqlalchemy import create_engine
        from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

        from reliable_mq.outbox import SQLAlchemyOutbox
    except ImportError:
        raise ConfigurationError("a database URL needs SQLAlchemy: pip install 'reliable-mq[sql]'") from None
    try:
        engine = create_engine(url)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"OUTBOX needs the driver {error.name}, which is not installed") from None
    except ImportError as error:  # such as psycopg's without libpq
        raise ConfigurationError(f"the driver of OUTBOX cannot be imported: {error}") from None
    except NoSuchModuleError as error:  # as for postgres://, which other libraries accept
        raise ConfigurationError(f"OUTBOX begins with a name that SQLAlchemy does not know: {error}") from None
    except (SQLAlchemyError, ValueError, TypeError) as error:  # an invalid port, or an unknown driver option
        # The error's text may show the URL and its password.
        raise ConfigurationError(f"OUTBOX is not a usable database URL: {type(error).__name__}") from None
    if engine.dialect.is_async:
        raise ConfigurationError(
            f"OUTBOX has a driver for asyncio, {engine.dialect.driver}: name another one, such as postgresql+psycopg"
        )
    box = SQLAlchemyOutbox(engine, **{name: value for name, value in options.items() if value is not None})
    try:
        yield box, engine
    finally:
        box.close()
        engine.dispose()


def _wait_for_answer(box: Outbox, engine: Engine) -> None:
    """Wait until the database responds to a connection, even with an error.

    A frozen server accepts connections and never responds, and drivers wait forever. The next use of the database
    raises the error.
    """
    from reliable_mq._util.threads import DaemonExecutor

    def connect(_handle: object) -> None:
        with suppress(Exception), engine.connect():
            pass

    try:
        DaemonExecutor("reliable_mq outbox database").call(connect, _ANSWERS)
    except TimeoutError:
        raise OutboxError(f"opening failed in {box!r}: the database did not answer within {_ANSWERS:g} s") from None


def _which(message_ids: list[str] | None, *, every: bool) -> list[str] | None:
    if bool(message_ids) == every:
        raise typer.BadParameter("which messages? Give their ids, or --all")
    return list(dict.fromkeys(message_ids or ())) or None


def _say(count: int, outcome: str, which: list[str] | None) -> None:
    output.print(f"{count:,} messages {outcome}", highlight=False)
    if which is not None and count < len(which):
        raise typer.Exit(1)
