"""The queues around a queue: where retries wait, suspects, and dead letters. Pure: a snapshot in, findings out.

A delay queue of ours is called ``<queue>.retry.<milliseconds>``; its messages expire back into its queue at least once.
``<queue>.quarantine`` holds messages that may have killed their consumer, which handles them one at a time.
A dead-letter queue is one that another queue dead-letters into and that is no work queue of a delay queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from reliable_mq.cli.checks.finding import Finding, Status
from reliable_mq.cli.checks.snapshot import QueueView, Route, Snapshot
from reliable_mq.core.ladder import DelayQueue
from reliable_mq.core.quarantine import QUARANTINE_SUFFIX
from reliable_mq.topology import DEAD_SUFFIX

__all__ = [
    "dead_letter_queues",
    "examine_dead_letters",
    "examine_delay_queue",
    "examine_quarantine",
    "waits_to_come_back",
]

_WAITING: Final = re.compile(r"delay|retry|wait|backoff", re.IGNORECASE)
_AFRESH: Final = "Let it run empty and delete it: the next connect of a consumer declares it as it is to be."


def waits_to_come_back(snapshot: Snapshot, queue: QueueView) -> bool:
    """Whether messages only wait in a queue, to come back into another: a delay queue, of ours or of others."""
    if DelayQueue.of(queue.name) is not None:
        return True
    return queue.argument("message-ttl") is not None and not snapshot.consumers_of(queue)


def dead_letter_queues(snapshot: Snapshot, routes: Mapping[str, Route | None]) -> frozenset[str]:
    """The queues that dead letters end in."""
    return frozenset(
        target
        for name, route in routes.items()
        if route is not None and not waits_to_come_back(snapshot, snapshot.queues[name])
        for target in route.targets
    )


def examine_delay_queue(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Look at a delay queue of ours, or at what may be one of others'."""
    name = DelayQueue.of(queue.name)
    if name is None:
        yield from _mixed_delays(snapshot, queue)
        return
    what = f"queue {queue.name!r}"
    if name.queue not in snapshot.queues:
        text = (
            f"its messages are to go back to queue {name.queue!r}, which does not exist: {queue.messages:,} wait for it"
        )
        fix = f"Declare {name.queue!r} again, and they go there; or delete the delay queue with what is in it."
        yield Finding(Status.PROBLEM if queue.messages else Status.WARNING, what, "delay queue", text, fix)
    for argument, (expected, meaning) in _expected(name).items():
        found = queue.argument(argument)
        if found != expected:
            text = f"x-{argument} is {found!r}, where a delay queue of this package has {expected!r}: {meaning}"
            yield Finding(Status.PROBLEM, what, "delay queue", text, _AFRESH)
    if snapshot.consumers_of(queue):
        text = "somebody consumes from this delay queue: its messages do not wait, and do not come back"
        yield Finding(Status.PROBLEM, what, "delay queue", text, f"Stop that consumer; consume from {name.queue!r}.")
    expired = queue.raw.get("messages_dlx")
    if isinstance(expired, int) and expired:
        text = f"{expired:,} messages have expired, and queue {name.queue!r} has not taken them yet"
        fix = f"If this stays: is {name.queue!r} full (a length limit), or has it lost its nodes?"
        yield Finding(Status.WARNING, what, "delay queue", text, fix)


def _expected(name: DelayQueue) -> dict[str, tuple[object, str]]:
    return {
        "message-ttl": (name.milliseconds, "messages wait for another time than their name says"),
        "dead-letter-exchange": ("", "messages do not come back"),
        "dead-letter-routing-key": (name.queue, "messages do not come back"),
        "dead-letter-strategy": ("at-least-once", "a message is lost where its queue does not take it"),
        "overflow": ("reject-publish", "a message is lost where its queue does not take it"),
    }


def _mixed_delays(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """A queue without a time to live where others' retries wait by the expiration of each message."""
    waiting = queue.argument("dead-letter-exchange") is not None and queue.argument("message-ttl") is None
    if waiting and _WAITING.search(queue.name) and not snapshot.consumers_of(queue):
        text = (
            "looks like a delay queue without x-message-ttl: where each message has an expiration of its own, one that "
            "is not due holds up all behind it, since messages expire at the head only"
        )
        fix = "Use one queue per delay, with x-message-ttl (a Consumer's RetryPolicy does)."
        yield Finding(Status.WARNING, f"queue {queue.name!r}", "delay queue", text, fix)


def examine_quarantine(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Look at a quarantine that holds messages: is somebody at it?"""
    owner = queue.name.removesuffix(QUARANTINE_SUFFIX)
    if owner == queue.name or not queue.messages or snapshot.consumers_of(queue):
        return
    text = f"{queue.messages:,} messages that may have killed their consumer wait here, and nobody consumes them"
    if owner not in snapshot.queues:
        text += f"; queue {owner!r}, whose consumer does, does not exist"
    fix = f"Run a Consumer of {owner!r} that declares it (a Queue, not its name): it handles these one at a time."
    yield Finding(Status.WARNING, f"queue {queue.name!r}", "quarantine", text, fix)


def examine_dead_letters(snapshot: Snapshot, queue: QueueView, version: tuple[int, ...]) -> Iterator[Finding]:
    """Look at a queue that dead letters end in: does it keep them, do they wait, can they go back?"""
    what = f"queue {queue.name!r}"
    ttl = queue.argument("message-ttl")
    if ttl is not None and queue.argument("dead-letter-exchange") is None:
        text = f"dead letters are gone after {int(ttl) / 1000:g} s (message TTL)"
        yield Finding(Status.WARNING, what, "dead letters kept", text, "Leave x-message-ttl out, unless that is meant.")
    limit = queue.delivery_limit(version)
    if queue.type == "quorum" and limit is not None and version < (4, 3):
        text = (
            f"a delivery limit of {limit}: up to RabbitMQ 4.2 each look at dead letters (reliable-mq dlq, the "
            f"management UI) counts, and after {limit + 1} they are dropped"
        )
        yield Finding(Status.WARNING, what, "dead letters kept", text, "Set delivery-limit -1 on it (by a policy).")
    owner = queue.name.removesuffix(DEAD_SUFFIX)
    if not queue.messages:
        return
    text = f"a dead-letter queue that holds {queue.messages:,} messages"
    if queue.growth > 0:
        text += f" and grows by {queue.growth:g} a second"
    if owner != queue.name and owner not in snapshot.queues:
        text += f"; queue {owner!r}, which they are to go back to, does not exist"
    fix = (
        f"reliable-mq dlq stats URL {queue.name}: what they died of, and when. Mend the cause, then dlq replay, or dlq "
        "purge."
    )
    yield Finding(Status.WARNING, what, "dead letters wait", text, fix)
