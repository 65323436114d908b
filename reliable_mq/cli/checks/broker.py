"""What the broker's version, its limits and its alarms mean for publishing, retrying and poison messages.

The versions' behaviour is that of RabbitMQ 4.0.5 and 4.3.6 as observed, and of RabbitMQ's documentation for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from reliable_mq.cli.checks.finding import Finding, Status
from reliable_mq.cli.checks.management import ManagementAPI, ManagementError
from reliable_mq.core.setup import ServerInfo
from reliable_mq.settings import ConnectionSettings

__all__ = ["examine_alarms", "examine_limits", "examine_version"]

_BROKER: Final = "broker"
_MOST_HEARTBEAT: Final = 60  # seconds, above which a dead connection is noticed late
_LEAST_HEARTBEAT: Final = 5  # seconds, below which a busy peer is taken for a dead one


def examine_version(server: ServerInfo) -> Iterator[Finding]:
    """Say what the version means."""
    version = server.version_tuple
    name = f"{server.product or 'an unnamed broker'} {server.version}"
    if server.product != "RabbitMQ" or not version:
        yield Finding(
            Status.UNCHECKED,
            _BROKER,
            "version",
            f"{name}: what it does with retries, poison messages and confirms is not known here",
            "RabbitMQ 4.0 and newer are tested.",
        )
        return
    yield _support(name, version)
    yield _returning(version)
    yield _poison(version)
    yield _consumer_timeout(version)
    yield _new_queues()


def _support(name: str, version: tuple[int, ...]) -> Finding:
    if version >= (4,):
        return Finding(Status.OK, _BROKER, "version", name)
    fix = "Upgrade to RabbitMQ 4."
    if version >= (3, 12):
        text = (
            f"{name}, which is not tested and no longer maintained: queues are declared without what it does not know "
            "(x-delivery-limit=-1: its quorum queues have no limit by themselves)"
        )
        return Finding(Status.WARNING, _BROKER, "version", text, fix)
    return Finding(Status.PROBLEM, _BROKER, "version", f"{name}, which is older than anything supported here", fix)


def _returning(version: tuple[int, ...]) -> Finding:
    if version >= (4, 3):
        text = (
            "basic.reject and lost connections count against a quorum queue's delivery limit, basic.nack does not: a "
            "consumer that nacks a poison message gets it for ever; the retry policy counts for itself"
        )
    elif version >= (4,):
        text = (
            "basic.nack, basic.reject and lost connections all count against a quorum queue's delivery limit, and all "
            "show in x-delivery-count; the retry policy counts for itself"
        )
    else:
        text = "basic.nack, basic.reject and lost connections all count against a delivery limit, where one is set"
    return Finding(Status.OK, _BROKER, "retries", text)


def _poison(version: tuple[int, ...]) -> Finding:
    if version >= (4,):
        return Finding(
            Status.OK,
            _BROKER,
            "poison messages",
            "quorum queues have a delivery limit of 20 unless told otherwise; what reaches it is dropped where there "
            "is no dead-letter exchange (see the queues); queues that reliable_mq declares have no limit (-1)",
        )
    return Finding(
        Status.WARNING,
        _BROKER,
        "poison messages",
        "quorum queues have no delivery limit unless told: a message that no consumer can process comes back for ever",
        "Consume with a retry policy, which dead-letters after its last attempt.",
    )


def _consumer_timeout(version: tuple[int, ...]) -> Finding:
    end = (
        "the consumer is cancelled, and suspended until it settles them (quorum queues only)"
        if version >= (4, 3)
        else "the channel is closed with 406, and everything unacked on it comes back"
    )
    return Finding(
        Status.UNCHECKED,
        _BROKER,
        "consumer timeout",
        f"no client can read it (30 minutes unless consumer_timeout is set): for deliveries unacked that long {end}",
        "Keep the longest handler, and all the delays that a message is held in the process, below it, and tell "
        "consumers where it is not 30 minutes (consumer_timeout=...): they warn before it.",
    )


def _new_queues() -> Finding:
    return Finding(
        Status.OK,
        _BROKER,
        "new queues",
        "a quorum queue loses what was confirmed in it where the broker is killed up to a second after it was made; "
        "publishers and consumers of reliable_mq allow for it where their own process has made the queue "
        "(new_queue_grace), and cannot know of a queue that another process has made up to a second ago",
    )


def examine_limits(settings: ConnectionSettings, frame_max: int) -> Iterator[Finding]:
    """Look at what was negotiated."""
    heartbeat = settings.heartbeat
    if heartbeat < _LEAST_HEARTBEAT:
        text, fix = f"{heartbeat} s: a busy peer is taken for a dead one", "Use 10 to 20 s (heartbeat=... in the URL)."
        yield Finding(Status.WARNING, _BROKER, "heartbeat", text, fix)
    elif heartbeat > _MOST_HEARTBEAT:
        text = f"{heartbeat} s: a connection that is dead is noticed after more than two minutes"
        yield Finding(Status.WARNING, _BROKER, "heartbeat", text, "Use 10 to 20 s (heartbeat=... in the URL).")
    else:
        text = f"{heartbeat} s: a connection that is dead is noticed within {2 * heartbeat + 5} s"
        yield Finding(Status.OK, _BROKER, "heartbeat", text)
    text = f"{frame_max:,} bytes: the properties and headers of a message have to fit in one frame"
    yield Finding(Status.OK, _BROKER, "frame size", text)


def examine_alarms(api: ManagementAPI) -> Finding:
    """Ask whether a memory or disk alarm blocks publishers."""
    try:
        api.get("health", "checks", "alarms")
    except ManagementError as error:
        if error.status != 503:
            return Finding(Status.UNCHECKED, _BROKER, "alarms", f"the management API does not say: {error}")
        return Finding(
            Status.PROBLEM,
            _BROKER,
            "alarms",
            f"an alarm is in effect, publishers are blocked: {error}",
            "Free memory or disk space on the node, or consume what is queued.",
        )
    return Finding(Status.OK, _BROKER, "alarms", "none in effect: publishers are not blocked")
