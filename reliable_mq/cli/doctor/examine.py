"""Run all checks of a broker, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from reliable_mq.cli.doctor.broker import HostEntry, examine_alarms, examine_host, examine_limits, examine_version
from reliable_mq.cli.doctor.cluster import examine_cluster
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import Snapshot
from reliable_mq.cli.doctor.permissions import examine_permissions
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.codec.methods import CheckQueue, QueueState
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel

__all__ = ["examine"]

_NO_API: Final = (
    "Switch on the plugin rabbitmq_management, give the user the tag 'monitoring', or give --management-url."
)


def examine(url: str, settings: ConnectionSettings, queues: Sequence[str], management_url: str | None) -> list[Finding]:
    """Run all checks. Blocks for connections and round trips.

    Args:
        url: of the broker.
        settings: the same, parsed.
        queues: by name; none for all of them.
        management_url: of the management API; None for its default address on the hosts.
    """
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
    """Run the checks that need the management API; without it, name them as unchecked."""
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
            return [
                _answering(api),
                examine_alarms(api),
                *examine_cluster(settings, snapshot),
                *examine_queues(snapshot, queues, entry.server.version_tuple),
            ]
    unseen = "alarms, the nodes of a cluster, and the arguments, policies and consumers of queues"
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
    """Explain why no password was sent to a guessed address, and which option does."""
    if not api.is_there:
        return f"no management API was found at {api}", _NO_API
    fix = (
        f"Give --management-url {api}, with http://user:password@... for a user of its own, to log in there all the "
        "same, or the URL of one with a certificate (https)."
    )
    return f"something answers at {api}, and was not sent the password: the address is a guess, and not secured", fix


def _existence(entry: HostEntry, queues: Sequence[str]) -> Iterator[Finding]:
    """Check queues by AMQP alone."""
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
    """Sort hosts first, in their order; then the broker, permissions, queues."""
    order = ("broker", "permissions")
    if finding.subject in order:
        return order.index(finding.subject) + 1, ""
    return (3, finding.subject) if finding.subject.startswith("queue") else (0, "")
