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
from reliable_mq.errors import (
    BrokerUnavailable,
    PublishError,
    PublishRefused,
    PublishReturned,
)
from reliable_mq.message import Message
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.sync.publisher import Publisher

__all__ = ["examine_permissions"]

_ACCESS_REFUSED: Final = 403
_EXPECTED: Final = frozenset({404, 406})
_NO_TYPE: Final = {"x-queue-type": "no-such-type"}
_NO_PRIORITY: Final = {"x-priority": "none"}
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
            what = f"queue {name!r}" if queues else "queues that are not named in their permissions"
            hint = "" if queues else " --queue NAME checks the queues that you use."
            findings.append(_configure(what, _ask(channel, DeclareQueue(name, arguments=_NO_TYPE)), hint))
            findings.append(_read(what, _ask(channel, Consume(name, "doctor", arguments=_NO_PRIORITY)), hint))
    return [*findings, *_write(url, made_up)]


def _ask(channel: AdminChannel, step: Step) -> StepRefused | None:
    try:
        channel.perform(step)
    except StepRefused as refused:
        return refused
    return None


def _configure(what: str, answer: StepRefused | None, hint: str) -> Finding:
    return _judged(
        "configure",
        answer,
        f"{what}: may be declared",
        f"{what}: may not be declared",
        "Grant configure, or let somebody else declare and use plain names." + hint,
    )


def _read(what: str, answer: StepRefused | None, hint: str) -> Finding:
    return _judged(
        "read",
        answer,
        f"{what}: may be consumed",
        f"{what}: may not be consumed",
        "Grant read, if this user is to consume." + hint,
    )


def _judged(check: str, answer: StepRefused | None, granted: str, refused: str, fix: str) -> Finding:
    if answer is not None and answer.code == _ACCESS_REFUSED:
        return Finding(Status.WARNING, "permissions", check, refused, fix)
    if answer is not None and answer.code in _EXPECTED:
        return Finding(Status.OK, "permissions", check, granted)
    what = "was let through" if answer is None else f"was answered with {answer}"
    return Finding(
        Status.UNCHECKED,
        "permissions",
        check,
        f"cannot be told: an operation that only asks {what}",
        "rabbitmqctl list_permissions -p VIRTUAL_HOST tells it.",
    )


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
        return Finding(Status.OK, "permissions", "write", "the default exchange may be published to")
    except PublishRefused as error:
        if error.reply_code == _ACCESS_REFUSED:
            return Finding(
                Status.WARNING,
                "permissions",
                "write",
                "the default exchange (amq.default) may not be published to, so no queue by its name",
                "Grant write on amq.default, if this user is to publish to queues, and to retry or dead-letter.",
            )
        return _write_unknown(str(error))
    except (PublishError, BrokerUnavailable) as error:
        return _write_unknown(str(error))
    return _write_unknown("a message to a queue that does not exist was neither refused nor returned")


def _blocked(reason: str) -> Finding:
    return Finding(
        Status.PROBLEM,
        "broker",
        "blocked",
        f"publishing is blocked ({reason}): nothing is taken until the alarm is over",
        "Free memory or disk space on the broker's node, or consume what is queued.",
    )


def _write_unknown(why: str) -> Finding:
    return Finding(
        Status.UNCHECKED,
        "permissions",
        "write",
        f"cannot be told: {why}",
        "rabbitmqctl list_permissions -p VIRTUAL_HOST tells it.",
    )
