"""``reliable-mq doctor``: looks at a broker through a URL, and says what loses messages and how to mend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Final

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from reliable_mq.cli.doctor.broker import HostEntry, examine_alarms, examine_host, examine_limits, examine_version
from reliable_mq.cli.doctor.finding import Finding, Status, worst
from reliable_mq.cli.doctor.management import ManagementAPI, ManagementError, Snapshot
from reliable_mq.cli.doctor.permissions import examine_permissions
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.cli.terminal import escaped, hide_logs, json_text, output
from reliable_mq.codec.methods import CheckQueue, QueueState
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.url import parse_url

__all__ = ["doctor"]

_MARKS: Final = {
    Status.OK: ("✔", "green"),
    Status.UNCHECKED: ("?", "cyan"),
    Status.WARNING: ("!", "yellow"),
    Status.PROBLEM: ("✘", "red"),
}


_NO_API: Final = (
    "Switch on the plugin rabbitmq_management, give the user the tag 'monitoring', or give --management-url."
)


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
    hide_logs()
    settings = parse_url(url, connection_name="reliable-mq doctor")
    findings = _examine(url, settings, queue or [], management_url)
    if as_json:
        _write_json(settings, findings)
    else:
        _show(settings, findings)
    raise typer.Exit(worst(findings) is Status.PROBLEM)


def _examine(
    url: str, settings: ConnectionSettings, queues: Sequence[str], management_url: str | None
) -> list[Finding]:
    findings: list[Finding] = []
    entries: list[HostEntry] = []
    for endpoint in settings.endpoints:
        found, entry = examine_host(settings, endpoint)
        findings += found
        entries += [] if entry is None else [entry]
    if not entries:
        text = "nothing else could be looked at: no host lets us in"
        return sorted([*findings, Finding(Status.UNCHECKED, "broker", "everything", text)], key=_place)
    findings += _different_versions(entries)
    findings += examine_version(entries[0].server)
    findings += examine_limits(entries[0].settings, entries[0].frame_max)
    findings += _by_management(settings, entries[0], queues, management_url)
    try:
        findings += examine_permissions(url, entries[0].settings, queues)
    except BrokerUnavailable as error:
        findings.append(Finding(Status.PROBLEM, "permissions", "all", f"the connection was lost: {error}"))
    return sorted(findings, key=_place)


def _different_versions(entries: Sequence[HostEntry]) -> Iterator[Finding]:
    versions = sorted({entry.server.version for entry in entries})
    if len(versions) > 1:
        text = f"the hosts run different versions: {', '.join(versions)}"
        yield Finding(Status.WARNING, "broker", "version", text, "Finish the upgrade; what follows is about the first.")


def _by_management(
    settings: ConnectionSettings, entry: HostEntry, queues: Sequence[str], management_url: str | None
) -> list[Finding]:
    """What the management API alone knows; what could not be checked without it, where it does not answer."""
    if management_url is None:
        candidates = ManagementAPI.beside(settings)
    else:
        candidates = [ManagementAPI.at(management_url, settings)]
    why = fix = ""
    for api in candidates:
        if not api.sends_password:
            why, fix = _not_asked(api)
            continue
        try:
            snapshot = Snapshot.take(api, settings.virtual_host)
        except ManagementError as error:
            why, fix = str(error), _NO_API
        else:
            return [_answering(api), examine_alarms(api), *examine_queues(snapshot, queues, entry.server.version_tuple)]
    unseen = "alarms, and the arguments, policies and consumers of queues"
    return [
        Finding(Status.UNCHECKED, "broker", "management API", f"{why}; {unseen} could not be looked at", fix),
        *_existence(entry, queues),
    ]


def _answering(api: ManagementAPI) -> Finding:
    if not api.is_readable_on_the_way:
        return Finding(Status.OK, "broker", "management API", f"answers at {api}")
    text = f"answers at {api}, in plaintext: whoever is on the way could read the password just now"
    return Finding(Status.WARNING, "broker", "management API", text, "Switch TLS on for it (management.ssl.port).")


def _not_asked(api: ManagementAPI) -> tuple[str, str]:
    """Why no password was sent to a place that was only guessed, and which option sends it."""
    if not api.is_there:
        return f"no management API was found at {api}", _NO_API
    fix = (
        f"Give --management-url {api}, with http://user:password@... for a user of its own, to log in there all the "
        "same, or the URL of one with a certificate (https)."
    )
    return f"something answers at {api}, and was not sent the password: the address is a guess, and not secured", fix


def _existence(entry: HostEntry, queues: Sequence[str]) -> Iterator[Finding]:
    """What AMQP itself can tell of queues."""
    with AdminChannel(entry.settings, name="reliable-mq doctor") as channel:
        for name in queues:
            subject = f"queue {name!r}"
            try:
                state = channel.perform(CheckQueue(name))
            except StepRefused as refused:
                fix = "Declare it, or look for a typing error; names are case-sensitive." if refused.code == 404 else ""
                yield Finding(Status.PROBLEM, subject, "exists", f"{refused.code} {refused.text}", fix)
            else:
                counts = ""
                if isinstance(state, QueueState):
                    counts = f"{state.messages:,} messages ready, {state.consumers} consumers"
                yield Finding(Status.OK, subject, "exists", counts)


def _place(finding: Finding) -> tuple[int, str]:
    """Hosts first, in their order; then the broker, permissions, queues."""
    order = ("broker", "permissions")
    if finding.subject in order:
        return order.index(finding.subject) + 1, ""
    return (3, finding.subject) if finding.subject.startswith("queue") else (0, "")


def _write_json(settings: ConnectionSettings, findings: Sequence[Finding]) -> None:
    report = {
        "url": str(settings),
        "status": worst(findings).value,
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in findings],
    }
    print(json_text(report, indent=2))


def _show(settings: ConnectionSettings, findings: Sequence[Finding]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("finding", overflow="fold", ratio=1)
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        table.add_section()
        for number, finding in enumerate(group):
            mark, style = _MARKS[finding.status]
            text = Text(escaped(finding.text))
            if finding.fix:
                text.append(f"\n→ {escaped(finding.fix)}", style="italic")
            title = Text(escaped(subject) if number == 0 else "", style="bold")
            table.add_row(title, Text(mark, style=style), Text(escaped(finding.check)), text)
    output.print(Text(escaped(settings), style="bold"))
    output.print(table)
    counts = Counter(finding.status for finding in findings)
    output.print(
        Text("  ").join(
            Text(f"{_MARKS[status][0]} {_counted(counts[status], status)}", style=_MARKS[status][1])
            for status in Status
        )
    )


def _counted(count: int, status: Status) -> str:
    plural = "s" if status in (Status.WARNING, Status.PROBLEM) and count != 1 else ""
    return f"{count} {status.value}{plural}"
