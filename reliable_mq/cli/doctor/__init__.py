"""The command ``reliable-mq doctor``: find and fix the causes of lost messages."""

from __future__ import annotations

from typing import Annotated

import typer

from reliable_mq.cli.terminal import URL, hide_logs

__all__ = ["doctor"]


def doctor(
    url: URL,
    *,
    queue: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A queue to check; repeatable. Default: all of them.")
    ] = None,
    management_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The management API to log in to: http[s]://[user:password@]host[:port]. Default: port 15672 "
            "of the AMQP hosts, or 15671 with TLS; then the password is sent only to this machine, or to a host with a "
            "valid certificate.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Check hosts, TLS, permissions, version, alarms, and queues that lose messages.

    It changes nothing. The exit status is 1 if it finds a problem. Only the management API knows the arguments of
    queues. If it is unavailable, the report lists the checks that were skipped.
    """
    from reliable_mq.cli.doctor.examine import examine
    from reliable_mq.cli.doctor.finding import Status, show, worst, write_json
    from reliable_mq.url import parse_url

    hide_logs()
    settings = parse_url(url)
    findings = examine(url, settings, queue or [], management_url)
    if as_json:
        write_json(settings, findings)
    else:
        show(settings, findings)
    raise typer.Exit(worst(findings) is Status.PROBLEM)
