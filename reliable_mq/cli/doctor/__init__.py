"""``reliable-mq doctor``: looks at a broker through a URL, and says what loses messages and how to mend it."""

from __future__ import annotations

from typing import Annotated

import typer

from reliable_mq.cli.terminal import hide_logs

__all__ = ["doctor"]


def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="amqp:// or amqps://, several hosts separated by commas.")],
    *,
    queue: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A queue to look at; repeatable. Without: all of them.")
    ] = None,
    management_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Of the management API, to log in there: http[s]://[user:password@]host[:port]. Without: port 15672 "
            "of the AMQP hosts, or 15671 with TLS; there, the password goes to this machine, or to a host whose "
            "certificate verifies, and nowhere else.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Check a broker: hosts, TLS, credentials, permissions, version, alarms, and queues that lose messages.

    It changes nothing. The exit status is 1 where it found a problem. The arguments of queues are known to the
    management API alone; where that cannot be reached, it says what it could not check.
    """
    from reliable_mq.cli.doctor import report
    from reliable_mq.cli.doctor.finding import Status, worst
    from reliable_mq.url import parse_url

    hide_logs()
    settings = parse_url(url, connection_name="reliable-mq doctor")
    findings = report.examine(url, settings, queue or [], management_url)
    if as_json:
        report.write_json(settings, findings)
    else:
        report.show(settings, findings)
    raise typer.Exit(worst(findings) is Status.PROBLEM)
