"""Check the user's permissions by operations that cannot succeed.

RabbitMQ checks permissions first. A declaration with a type that no queue has is refused with 403 if the user may not
configure that name, and with 406 if it may; a consumer with a priority that is no number with 403, or with 406 or 404;
a mandatory message to a queue that does not exist is refused, or returned. Nothing is declared, consumed or stored.
This covers every authorisation backend, which the management API's list does not.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.codec.methods import Consume, DeclareQueue, Step
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable, PublishError, PublishRefused, PublishReturned
from reliable_mq.message import Message
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.sync.publisher import Publisher

__all__ = ["examine_permissions"]

_ACCESS_REFUSED: Final = 403
_EXPECTED: Final = frozenset({404, 406})
_NO_TYPE: Final = {"x-queue-type": "no-such-type"}
_NO_PRIORITY: Final = {"x-priority": "none"}
_GRANT_CONFIGURE: Final = "Grant configure, or let somebody else declare and use plain names."
_GRANT_READ: Final = "Grant read, if this user is to consume."
_GRANT_WRITE: Final = "Grant write on amq.default, if this user is to publish to queues, and to retry or dead-letter."
_PATIENCE: Final = 5.0  # seconds for the broker to return one message


def examine_permissions(url: str, settings: ConnectionSettings, queues: Sequence[str]) -> list[Finding]:
    """Check the permissions to configure, write and read.

    Args:
        url: of the broker, for the publisher that tries to write.
        settings: of one host that accepts this user.
        queues: by name; without any, a random name is used.

    Raises:
        BrokerUnavailable: the connection was lost.
    """
    made_up = f"reliable-mq-doctor-{secrets.token_hex(8)}"
    findings = []
    with AdminChannel(settings, name="reliable-mq doctor") as channel:
        for name in queues or [made_up]:
            subject = f"queue {name!r}" if queues else "queues that are not named in their permissions"
            hint = "" if queues else " --queue NAME checks the queues that you use."
            for check, step, done, fix in (
                ("configure", DeclareQueue(name, arguments=_NO_TYPE), "declared", _GRANT_CONFIGURE),
                ("read", Consume(name, "doctor", arguments=_NO_PRIORITY), "consumed", _GRANT_READ),
            ):
                reply = _refusal(channel, step)
                if reply is not None and reply.code == _ACCESS_REFUSED:
                    findings.append(_finding(Status.WARNING, check, f"{subject}: may not be {done}", fix + hint))
                elif reply is not None and reply.code in _EXPECTED:
                    findings.append(_finding(Status.OK, check, f"{subject}: may be {done}"))
                else:
                    outcome = "was let through" if reply is None else f"was answered with {reply}"
                    findings.append(_unknown(check, f"an operation that only asks {outcome}"))
    return [*findings, *_write(url, made_up)]


def _refusal(channel: AdminChannel, step: Step) -> StepRefused | None:
    try:
        channel.perform(step)
    except StepRefused as refused:
        return refused
    return None


def _finding(status: Status, check: str, text: str, fix: str = "") -> Finding:
    return Finding(status, "permissions", check, text, fix)


def _unknown(check: str, why: str) -> Finding:
    fix = "rabbitmqctl list_permissions -p VIRTUAL_HOST tells it."
    return _finding(Status.UNCHECKED, check, f"cannot be told: {why}", fix)


def _write(url: str, nowhere: str) -> list[Finding]:
    """Publish to a queue that does not exist, twice.

    A broker with an alarm accepts the first publish of a connection.
    """
    publisher = Publisher(url, name="reliable-mq doctor")
    findings: list[Finding] = []
    try:
        for _ in range(2):
            findings = [_publish(publisher, nowhere)]
            if findings[0].status is not Status.OK:
                break
        if publisher.blocked is not None:
            findings = [each for each in findings if each.status is Status.OK] + [_blocked(publisher.blocked)]
    finally:
        publisher.close(_PATIENCE)
    return findings


def _publish(publisher: Publisher, nowhere: str) -> Finding:
    try:
        publisher.publish(Message(b"", persistent=False), routing_key=nowhere, timeout=_PATIENCE)
    except PublishReturned:
        return _finding(Status.OK, "write", "the default exchange may be published to")
    except (PublishError, BrokerUnavailable) as error:
        if isinstance(error, PublishRefused) and error.reply_code == _ACCESS_REFUSED:
            text = "the default exchange (amq.default) may not be published to, so no queue by its name"
            return _finding(Status.WARNING, "write", text, _GRANT_WRITE)
        return _unknown("write", str(error))
    return _unknown("write", "a message to a queue that does not exist was neither refused nor returned")


def _blocked(reason: str) -> Finding:
    return Finding(
        Status.PROBLEM,
        "broker",
        "blocked",
        f"publishing is blocked ({reason}): nothing is taken until the alarm is over",
        "Free memory or disk space on the broker's node, or consume what is queued.",
    )
