"""Run all checks of a broker in order. The checks of permissions are here."""

from __future__ import annotations

import http
import http.client
import secrets
import ssl
from collections.abc import Iterator, Sequence
from typing import Final

from reliable_mq.cli.doctor.broker import (
    HostEntry,
    examine_alarms,
    examine_cluster,
    examine_host,
    examine_limits,
    examine_version,
)
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import Snapshot
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.codec.methods import Consume, DeclareQueue, ReplyCode, Step
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable, PublishError, PublishRefused, PublishReturned
from reliable_mq.message import Message
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.sync.publisher import Publisher
from reliable_mq.topology.arguments import check_name

_NO_API: Final = "Enable the plugin rabbitmq_management, give the user the tag 'monitoring', or use --management-url."
_NO_ACCESS: Final = (
    "Check the password, give the user the tag 'monitoring', or pass another user in --management-url "
    "(http://user:password@...)."
)
_REFUSED: Final = frozenset({http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN})
_NOT_VERIFIED: Final = (
    "Set the certificate authority that signed it (cacertfile=... in an amqps URL), or use --management-url with the "
    "host name that it was issued for."
)
_EXPECTED: Final = frozenset({ReplyCode.NOT_FOUND, ReplyCode.PRECONDITION_FAILED})
# A broker that does not know queue types makes the queue; it is to be gone at once.
_NO_TYPE: Final = {"x-queue-type": "no-such-type", "x-expires": 1}
_NO_PRIORITY: Final = {"x-priority": "none"}
_GRANT_CONFIGURE: Final = "Grant configure; or let another user declare the queues, and pass their names only."
_GRANT_READ: Final = "Grant read, if this user consumes."
_GRANT_WRITE: Final = "Grant write on amq.default, if this user publishes to queues, retries or dead-letters."
_UNSURE: Final = " (RabbitMQ also reports this for a quorum queue whose leader does not respond)"
_PATIENCE: Final = 5.0  # seconds for the broker to return one message


def examine(url: str, settings: ConnectionSettings, queues: Sequence[str], management_url: str | None) -> list[Finding]:
    """Run all checks. Blocks for connections and round trips.

    Raises:
        ConfigurationError: If an option is invalid. Nothing was checked.
    """
    for name in queues:
        check_name("--queue", name)
    if management_url is not None:
        ManagementAPI.check(management_url, settings, option="--management-url")
    findings: list[Finding] = []
    entries: list[HostEntry] = []
    for endpoint in settings.endpoints:
        found, entry = examine_host(settings, endpoint)
        findings += found
        entries += [] if entry is None else [entry]
    if not entries:
        text = "not checked: no host could be logged in to"
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
        fix = "Finish the upgrade. The findings below are about the first host."
        yield Finding(Status.WARNING, "broker", "version", text, fix)


def _by_management(
    settings: ConnectionSettings, entry: HostEntry, queues: Sequence[str], management_url: str | None
) -> list[Finding]:
    """Run the checks that need the management API; without it, list them as unchecked."""
    why = fix = ""
    for api in ManagementAPI.candidates(management_url, settings, option="--management-url"):
        if not api.sends_password:
            why, fix = _not_asked(api)
            continue
        try:
            snapshot = Snapshot.take(api, settings.virtual_host)
        except ManagementError as error:
            why, fix = str(error), _fix_of(error)
        else:
            return [
                _answering(api),
                examine_alarms(api),
                *_statistics(snapshot),
                *examine_cluster(settings, snapshot),
                *examine_queues(snapshot, queues, entry.server.version_tuple),
            ]
    unseen = "alarms, the nodes of a cluster, and the arguments, policies and consumers of queues"
    return [
        Finding(Status.UNCHECKED, "broker", "management API", f"{why}; {unseen} could not be checked", fix),
        *_existence(entry, queues),
    ]


def _statistics(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.consumers is None:
        text = "disabled in the management API: the consumers of queues, and their numbers of messages, are unknown"
        fix = (
            "Check them with rabbitmqctl list_queues name messages consumers, or enable the statistics: see "
            "management_agent.disable_metrics_collector and management.disable_stats in rabbitmq.conf."
        )
        yield Finding(Status.UNCHECKED, "broker", "statistics", text, fix)


def _fix_of(error: ManagementError) -> str:
    """Return the remedy for an API that cannot be read, empty if none is known."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _NOT_VERIFIED
    if error.status in _REFUSED:
        return _NO_ACCESS
    silent = isinstance(cause, OSError | http.client.HTTPException)
    return _NO_API if silent or error.status == http.HTTPStatus.NOT_FOUND else ""


def _answering(api: ManagementAPI) -> Finding:
    if not api.is_readable_on_the_way:
        return Finding(Status.OK, "broker", "management API", f"responds at {api}")
    text = f"responds at {api}, without TLS: anyone on the network path could read the password that was just sent"
    return Finding(Status.WARNING, "broker", "management API", text, "Enable TLS for it (management.ssl.port).")


def _not_asked(api: ManagementAPI) -> tuple[str, str]:
    """Explain why no password was sent to a guessed address, and name the option."""
    if not api.is_there:
        return f"no management API was found at {api}", _NO_API
    fix = (
        f"To log in there anyway, pass --management-url {api} (http://user:password@... for another user), or use an "
        "API with a certificate (https)."
    )
    return (
        f"something responds at {api}, but was not sent the password: the address is a guess, and not secure",
        fix,
    )


def _existence(entry: HostEntry, queues: Sequence[str]) -> Iterator[Finding]:
    """Check queues by AMQP alone."""
    try:
        with AdminChannel(entry.settings, name="reliable-mq doctor") as channel:
            counts = channel.counts(queues)
    except BrokerUnavailable as error:
        fix = "Run doctor again. If the connection is lost again, see the broker's log."
        yield Finding(Status.PROBLEM, "queues", "exists", f"the connection was lost: {error}", fix)
        return
    for name, count in counts.items():
        subject = f"queue {name!r}"
        if isinstance(count, StepRefused):
            text, status, fix = f"{count.code} {count.text}", Status.PROBLEM, ""
            if count.code == ReplyCode.NOT_FOUND:
                fix = "Declare it, or check the spelling. Names are case-sensitive."
            elif count.code == ReplyCode.ACCESS_REFUSED:
                text, status = f"unknown: {text}", Status.UNCHECKED
            yield Finding(status, subject, "exists", text, fix)
        else:
            doubt = _UNSURE if count.in_doubt else ""
            text = f"{count.messages:,} messages ready, {count.consumers} consumers{doubt}"
            yield Finding(Status.OK, subject, "exists", text)


def examine_permissions(url: str, settings: ConnectionSettings, queues: Sequence[str]) -> list[Finding]:
    """Check the permissions to configure, write and read.

    The checks use operations that cannot succeed, because RabbitMQ checks permissions first. A declaration with a
    non-existent queue type is refused with 403 if the user may not configure that name, else with 406. A consumer with
    a priority that is not a number is refused with 403, else with 406 or 404. A mandatory message to a queue that does
    not exist is refused, or returned. Nothing is declared, consumed or stored. This covers every authorisation backend,
    unlike the permissions that the management API lists.

    With ``queues``, a missing permission to read or write is a problem: the queues are named because they are used. A
    queue can be used by its name without the permission to configure it.

    Raises:
        BrokerUnavailable: If the connection was lost.
    """
    made_up = f"reliable-mq-doctor-{secrets.token_hex(8)}"
    needed = Status.PROBLEM if queues else Status.WARNING
    findings = []
    with AdminChannel(settings, name="reliable-mq doctor") as channel:
        for name in queues or [made_up]:
            subject = f"queue {name!r}" if queues else "a queue with a random name"
            hint = "" if queues else " --queue NAME checks the queues that you use."
            declare, consume = DeclareQueue(name, arguments=_NO_TYPE), Consume(name, "doctor", arguments=_NO_PRIORITY)
            for check, step, done, fix, status in (
                ("configure", declare, "declared", _GRANT_CONFIGURE, Status.WARNING),
                ("read", consume, "consumed", _GRANT_READ, needed),
            ):
                reply = _refusal(channel, step)
                if reply is not None and reply.code == ReplyCode.ACCESS_REFUSED:
                    findings.append(_finding(status, check, f"{subject}: may not be {done}", fix + hint))
                elif reply is not None and reply.code in _EXPECTED:
                    findings.append(_finding(Status.OK, check, f"{subject}: may be {done}"))
                else:
                    outcome = "succeeded" if reply is None else f"failed with {reply}"
                    findings.append(_unknown(check, f"an operation that RabbitMQ should refuse {outcome}"))
    return [*findings, *_write(url, made_up, needed)]


def _refusal(channel: AdminChannel, step: Step) -> StepRefused | None:
    try:
        channel.perform(step)
    except StepRefused as refused:
        return refused
    return None


def _finding(status: Status, check: str, text: str, fix: str = "") -> Finding:
    return Finding(status, "permissions", check, text, fix)


def _unknown(check: str, why: str) -> Finding:
    fix = "Run rabbitmqctl list_permissions -p VIRTUAL_HOST."
    return _finding(Status.UNCHECKED, check, f"unknown: {why}", fix)


def _write(url: str, nowhere: str, needed: Status = Status.WARNING) -> list[Finding]:
    """Publish to a queue that does not exist, twice.

    A broker with an alarm accepts the first publish of a connection. ``needed`` is the status without the permission.
    """
    publisher = Publisher(url, name="reliable-mq doctor")
    findings: list[Finding] = []
    try:
        publisher.connect()  # before the time for the broker to return a message begins
        for _ in range(2):
            findings = [_publish(publisher, nowhere, needed)]
            if findings[0].status is not Status.OK:
                break
        if publisher.blocked is not None:
            findings = [each for each in findings if each.status is Status.OK] + [_blocked(publisher.blocked)]
    except BrokerUnavailable as error:
        return [_unknown("write", str(error))]
    finally:
        publisher.close(_PATIENCE)
    return findings


def _publish(publisher: Publisher, nowhere: str, needed: Status) -> Finding:
    try:
        publisher.publish(Message(b"", persistent=False), routing_key=nowhere, timeout=_PATIENCE)
    except PublishReturned:
        return _finding(Status.OK, "write", "the default exchange: may be published to")
    except (PublishError, BrokerUnavailable) as error:
        if isinstance(error, PublishRefused) and error.reply_code == ReplyCode.ACCESS_REFUSED:
            text = "the default exchange (amq.default): may not be published to, so queues cannot be addressed by name"
            return _finding(needed, "write", text, _GRANT_WRITE)
        return _unknown("write", str(error))
    return _unknown("write", "a message to a queue that does not exist was neither refused nor returned")


def _blocked(reason: str) -> Finding:
    text = f"publishing is blocked ({reason}): no message is accepted until the alarm is cleared"
    fix = "Free memory or disk space on the broker's node, or consume the queued messages."
    return Finding(Status.PROBLEM, "broker", "blocked", text, fix)


def _place(finding: Finding) -> tuple[int, str]:
    """Return the sort key: hosts in their order, the broker, permissions, queues."""
    order = ("broker", "permissions")
    if finding.subject in order:
        return order.index(finding.subject) + 1, ""
    is_queue = finding.subject == "queues" or finding.subject.startswith("queue ")
    return (3, finding.subject) if is_queue else (0, "")
