"""Consoles, logs, foreign text, metrics and options common to all commands.

Invariants:

- Logs go through the same console as a progress display, so that they do not break it.
- Foreign text (ids, headers, bodies, names, texts of a broker or an exception) is never interpreted as markup, and none
  of its characters controls the terminal: `escaped`, `say`, `json_text` and `product` escape it.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import logging
import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, TypeAlias, cast
from urllib.parse import quote

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reliable_mq._util.logs import given_up_logger
from reliable_mq._util.validation import is_text
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry

_PASSWORD: Final = "RELIABLE_MQ_PASSWORD"  # noqa: S105  # of the environment: all users of a machine see arguments
PASSWORD_HELP: Final = f"{_PASSWORD} may contain the password."
_USER_ALONE: Final = re.compile(r"(amqps?://[^:@/?#]+)(@.*)", re.DOTALL)


def with_password(url: str) -> str:
    """Return the URL. Add the environment's password if it has only a user.

    Raises:
        ConfigurationError: If that password is not UTF-8.
    """
    found = _USER_ALONE.fullmatch(url)
    password = os.environ.get(_PASSWORD)
    if found is None or password is None:
        return url
    if not is_text(password):  # the error of quote() would show a part of it
        raise ConfigurationError(
            f"{_PASSWORD} holds bytes that are not UTF-8, as of a variable in another encoding: store it in UTF-8"
        )
    return f"{found[1]}:{quote(password, safe='')}{found[2]}"


URL: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help=f"amqp:// or amqps://, with several hosts separated by commas. {PASSWORD_HELP}",
        callback=with_password,
    ),
]
MetricsPort: TypeAlias = Annotated[
    int | None, typer.Option(min=0, max=65_535, help="Serve Prometheus metrics on this port; 0 for any free port.")
]
MetricsAddress: TypeAlias = Annotated[
    str | None, typer.Option(help="The address to serve metrics on. Default: 127.0.0.1.")
]

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C."""

errors: Final = Console(stderr=True)
"""For everything but a command's product."""

_to_terminal = sys.stdout is not None and sys.stdout.isatty()
output: Final = Console(width=None if _to_terminal or "COLUMNS" in os.environ else 120)
"""For tables. In a pipe or a file, lines are longer than rich's 80 characters."""

_DRIVERS: Final = ("pika", "aio_pika", "aiormq")
_STYLES: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
# Matches up to the last "@", because a password may contain any character.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:.*@)?[^\s'\"]*", re.DOTALL)


def ended_by(signal: int) -> int:
    """Return the exit status after a signal, as a shell reports it."""
    return 128 + signal


def command_group(name: str, text: str) -> typer.Typer:
    """Return a command that has subcommands."""
    settings = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        name=name, help=text, no_args_is_help=True, rich_markup_mode="markdown", context_settings=settings
    )


def parse_headers(texts: Iterable[str]) -> dict[str, str]:
    """Return the names and values of ``--header NAME=VALUE``."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--header takes NAME=VALUE, not {text!r}")
        if name in found:
            raise typer.BadParameter(f"--header names {name!r} twice")
        found[name] = value
    return found


def plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


# -- foreign text ------------------------------------------------------------------------------------------------------


def escaped(text: object, limit: int | None = None, *, keep: str = "") -> str:
    """Escape unprintable characters: control characters, line ends, lone surrogates..."""
    text = str(text)
    if text.isprintable() and (limit is None or len(text) <= limit):
        return text
    from reliable_mq.core.consumer.attempts import printable

    if limit is not None:
        return printable(text, limit)
    return "".join(char if char in keep else printable(char) for char in text)


def say(text: str, *, console: Console = errors) -> None:
    """Print a text with unprintable characters escaped, except line ends."""
    console.print(Text(escaped(text, keep="\n")), soft_wrap=True)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Encode as JSON for standard output.

    Unprintable characters become JSON escapes, and with another encoding than UTF-8, all that are not ASCII.
    """
    in_utf_8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"  # a text in memory has no encoding
    return _printable_json(json.dumps(value, ensure_ascii=not in_utf_8, indent=indent))


def without_passwords(text: str) -> str:
    """Remove the passwords of the URLs in a text."""
    from reliable_mq.url import redacted

    return _URL.sub(lambda match: redacted(match[0]), text)


def product(*, as_json: bool) -> BinaryIO:
    """Return standard output for bytes. On a terminal it escapes them."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    try:
        out = cast("BinaryIO", _WholeOutput(sys.stdout.fileno()))
    except io.UnsupportedOperation:  # sys.stdout was replaced by an object in memory
        out = sys.stdout.buffer
    return cast("BinaryIO", _TerminalProduct(out, as_json=as_json)) if sys.stdout.isatty() else out


class _WholeOutput:
    """Standard output. A write returns once the pipe or the file has all of it.

    ``sys.stdout.buffer`` does not do that. With PYTHONUNBUFFERED, it may write only a part. Otherwise, a write that
    waits for the reader of a pipe holds a lock, which the exit of the interpreter would wait for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


class _TerminalProduct:
    """Standard output as a terminal, with unprintable characters escaped."""

    def __init__(self, out: BinaryIO, *, as_json: bool) -> None:
        self._out = out
        self._as_json = as_json

    def write(self, data: bytes) -> None:
        text = data.decode("utf-8", "backslashreplace")
        shown = _printable_json(text) if self._as_json else escaped(text, keep="\n\t")
        self._out.write(shown.encode())

    def flush(self) -> None:
        self._out.flush()


def _printable_json(text: str) -> str:
    """Escape JSON. Outside of strings, only its line ends are unprintable."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


# -- logs --------------------------------------------------------------------------------------------------------------


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        line = Text(escaped(self.format(record), keep="\n"), style=_STYLES.get(record.levelno, "dim"))
        errors.print(line, soft_wrap=True)


def show_logs(verbose: int = 0) -> None:
    """Show the library's logs on `errors`.

    Args:
        verbose: The verbosity: 0 shows warnings, 1 also information, 2 everything, including the drivers' logs.
            Without it, the error that ends a connection is hidden: the command reports the same.
    """
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(message)s" if not verbose else "%(asctime)s %(name)s: %(message)s"))
    ours = logging.getLogger("reliable_mq")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    if not verbose:
        hide_logs(given_up_logger)
    for name in _DRIVERS:
        driver = logging.getLogger(name)
        driver.handlers[:] = [handler]
        driver.propagate = False
        # Drivers log every reconnect at ERROR, with tracebacks; the library logs it itself.
        driver.setLevel(logging.INFO if verbose > 1 else logging.CRITICAL + 1)


def hide_logs(logger: logging.Logger | None = None, *, below: int = logging.CRITICAL + 1) -> None:
    """Hide logs below a level unless -v was given: the command reports the same."""
    ours = logging.getLogger("reliable_mq")
    if ours.level == logging.WARNING:
        (logger or ours).setLevel(below)


# -- metrics -----------------------------------------------------------------------------------------------------------


@contextmanager
def metrics_served(address: str | None, port: int | None) -> Iterator[CollectorRegistry | None]:
    """Serve a registry over HTTP if ``port`` is given. An address alone is refused."""
    if port is None:
        if address is not None:
            raise typer.BadParameter("--metrics-address needs --metrics-port: without it, no metrics are served")
        yield None
        return
    address = "127.0.0.1" if address is None else address
    from prometheus_client import CollectorRegistry, start_http_server

    from reliable_mq.settings import Endpoint

    registry = CollectorRegistry()
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that no resolver accepts
        raise ConfigurationError(f"metrics cannot be served on {address} port {port}: {error}") from error
    say(f"metrics: http://{Endpoint(address, server.server_port)}/metrics")
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
