"""The command ``reliable-mq web``: serve the page for dead letters."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from reliable_mq._util.validation import ip_address, is_host
from reliable_mq.cli.dlq import imported_store
from reliable_mq.cli.terminal import INTERRUPTED, URL, hide_logs, output, say
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.settings import ConnectionSettings

_TOKEN: Final = "RELIABLE_MQ_WEB_TOKEN"  # noqa: S105  # the name of a variable
_GRACE: Final = 15.0  # seconds for running operations


def web(
    url: URL,
    queue: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUEUE", help="The only dead-letter queues that can be opened. Default: those that RabbitMQ lists."
        ),
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Any but a loopback address requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any free port.")] = 8025,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Let users replay and delete letters. Otherwise the page is read-only."),
    ] = False,
    allow_editing: Annotated[
        bool, typer.Option("--allow-editing", help="Let users change the body of a letter when they replay it.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help=f"The file with the token for signing in. Default: the variable {_TOKEN}, if it is set.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name of the page, in addition to localhost; repeatable."),
    ] = None,
    audit_log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The file to which each change and export is appended.")
    ] = None,
    idempotency: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The consumers' idempotency store, as myapp.stores:store; a replay resets its counts of attempts.",
        ),
    ] = None,
    idempotency_namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The consumers' idempotency_namespace, if they have one."),
    ] = None,
    management_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The management API, which lists the queues; as for doctor.")
    ] = None,
) -> None:
    """Serve a page for dead letters: list, replay, export and delete them.

    It runs until Ctrl-C or SIGTERM. A running replay then finishes its current letters, and stops. Only this machine
    can reach the page, unless --host is another address, which requires a token of at least 16 characters.
    """
    if allow_editing and not allow_changes:
        raise typer.BadParameter("--allow-editing needs --allow-changes: an edited letter is replayed")
    if queue and management_url is not None:
        raise typer.BadParameter("--management-url finds the queues: leave out either this option or each QUEUE")
    try:
        from reliable_mq.cli.bounded_http import serve
        from reliable_mq.web import DeadLetterApp
    except ModuleNotFoundError as error:
        if error.name != "uvicorn":
            raise
        raise ConfigurationError("web needs uvicorn, of the extra 'web': pip install 'reliable-mq[web]'") from error
    from reliable_mq.engine.publisher_channel import unwatched_logger
    from reliable_mq.settings import Endpoint
    from reliable_mq.url import parse_url

    hide_logs(unwatched_logger)
    token = _token(token_file)
    address = ip_address(host)
    if address is None and not is_host(host):
        raise typer.BadParameter(f"--host takes an address or the name of a host, not {host!r}")
    host = host if address is None else str(address)
    is_loopback = host == "localhost" if address is None else address.is_loopback
    if token is None and not is_loopback:
        raise typer.BadParameter(f"--host {host} is not a loopback address: set {_TOKEN}, or give --token-file")
    settings = parse_url(url)
    app = DeadLetterApp(
        url,
        queue or _found_by(settings, management_url),
        any_queue=not queue,
        allow_changes=allow_changes,
        allow_editing=allow_editing,
        token=token,
        allowed_hosts=[*(allowed_host or []), *([] if address is not None and address.is_unspecified else [host])],
        audit_log=audit_log,
        idempotency=imported_store(idempotency, idempotency_namespace),
        idempotency_namespace=idempotency_namespace,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=128) as listening:
        say(f"http://{Endpoint(host, listening.getsockname()[1])}/ (Ctrl-C ends it)", console=output)
        received = serve(app, listening, _GRACE)
    if not app.close(_GRACE):
        say("an operation did not end in time; what it has not confirmed is in its queue")
    raise typer.Exit(INTERRUPTED if received == signal.SIGINT else 0)


def _token(file: Path | None) -> str | None:
    if file is None:
        token = os.environ.get(_TOKEN, "").strip()
        if not token and _TOKEN in os.environ:  # its source may have failed: the page must not be open for that
            raise typer.BadParameter(f"the variable {_TOKEN} is empty: set it to the token, or unset it")
        return token or None
    try:
        text = file.read_text("utf-8").strip()
    except UnicodeDecodeError:  # the error's text would show a part of the token
        raise ConfigurationError(f"the file given with --token-file is not UTF-8 text: {file}") from None
    if not text:
        raise typer.BadParameter(f"--token-file: {file} is empty")
    return text


def _found_by(settings: ConnectionSettings, management_url: str | None) -> Callable[[], list[str]]:
    """Return a function that finds the queues that receive dead letters."""
    from reliable_mq.cli.doctor.management import Snapshot
    from reliable_mq.cli.doctor.queues import dead_letter_queues
    from reliable_mq.monitoring.management import ManagementAPI, ManagementError
    from reliable_mq.topology import DEAD_SUFFIX

    if management_url:
        ManagementAPI.check(management_url, settings, option="--management-url")

    def find() -> list[str]:
        why = "it is not asked, since its address is a guess, and not secured"
        for api in ManagementAPI.candidates(management_url or None, settings, option="--management-url"):
            if not api.sends_password:
                continue
            try:
                snapshot = Snapshot.take(api, settings.virtual_host)
            except ManagementError as error:
                why = str(error)
                continue
            routes = {name: snapshot.dead_letter_route(view) for name, view in snapshot.queues.items()}
            named_so = (name for name in snapshot.queues if name.endswith(DEAD_SUFFIX))
            return sorted({*dead_letter_queues(snapshot, routes), *named_so})
        raise ConfigurationError(
            f"only the management API could name the dead-letter queues ({why}): open one by its name, name them on "
            "the command line, or give --management-url"
        )

    return find
