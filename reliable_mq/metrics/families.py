"""The metrics of a consumer, on either face.

The metrics of a publisher, on either face.

The metrics of a publisher with an outbox, on either face.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.core.statistics import (
        ConsumerStatistics,
        Histogram,
        OutboxStatistics,
        OutboxStatus,
        PublisherStatistics,
    )

__all__ = ["consumer_readings", "outbox_readings", "publisher_readings"]

_CONSUMER_LABELS = ("consumer", "queue")

UNACKED = Family(
    "consumer_unacked", "gauge", "Deliveries received and not acked: waiting, in a handler or held.", _CONSUMER_LABELS
)
CONSUMER_CONNECTED = Family("consumer_connected", "gauge", "1 while subscribed.", _CONSUMER_LABELS)
PAUSED = Family("consumer_paused", "gauge", "1 while the kill switch holds deliveries back.", _CONSUMER_LABELS)
CONSUMER_RECONNECTS = Family("consumer_reconnects", "counter", "Connections lost and made again.", _CONSUMER_LABELS)
CONSUMER_LOOP_STALLED_SECONDS = Family(
    "consumer_event_loop_stalled_seconds",
    "counter",
    "Time for which the event loop stood still, half a heartbeat or more at a time (asyncio only).",
    _CONSUMER_LABELS,
)
HANDLER_SECONDS = Family("consumer_handler_seconds", "histogram", "Time in the handler, per call.", _CONSUMER_LABELS)

COUNTERS = {
    name: Family(f"consumer_{metric}", "counter", documentation, _CONSUMER_LABELS)
    for name, metric, documentation in (
        ("delivered", "deliveries", "Deliveries received."),
        ("redelivered", "redelivered", "Deliveries that the broker flagged as redelivered."),
        ("handled", "handled", "Deliveries that a handler finished."),
        ("failed", "failed_attempts", "Attempts that failed."),
        ("retried", "retried", "Failed attempts that are tried again."),
        ("delayed", "delayed", "Originals acked after the message that waits in a delay queue was confirmed."),
        ("pauses", "pauses", "Times that the kill switch began to hold deliveries back."),
        ("isolated", "isolated", "Originals acked after they were moved to the quarantine of their queue."),
        ("dead_lettered", "dead_lettered", "Originals acked after their dead letter was confirmed."),
        (
            "quarantined",
            "quarantined",
            "Deliveries dead-lettered without a handler: undecodable, too large, newer format.",
        ),
        ("rejected", "rejected", "Deliveries ended by basic.reject, for want of a dead-letter queue of ours."),
        ("republish_failed", "republish_failed", "Publishes of dead letters and retries that were not confirmed."),
        ("duplicates", "duplicates", "Deliveries acked because the idempotency store has them as done."),
        ("claims_in_progress", "claims_in_progress", "Deliveries that waited because another holder has claimed them."),
        ("store_failures", "store_failures", "Failures of the idempotency store."),
        ("handed_back", "handed_back", "Deliveries returned to the broker unhandled."),
        ("acked", "acked", "Deliveries acknowledged."),
        ("acks_sent", "acks_sent", "basic.ack frames sent."),
        ("acks_saved", "acks_saved", "Deliveries acknowledged without a frame of their own."),
        ("stale", "stale_acks", "Results of an older channel or given twice: dropped."),
        ("lost", "lost_deliveries", "Deliveries unsettled when their channel was lost; they come again."),
        ("cancelled", "cancelled", "Subscriptions that the broker ended: queue deleted or moved, or consumer timeout."),
        ("overdue", "overdue", "Deliveries unacked for most of the broker's consumer timeout."),
        ("timed_out", "timed_out", "Deliveries that the broker's consumer timeout took back from their handlers."),
    )
}


def consumer_readings(
    name: str,
    queue: str,
    statistics: ConsumerStatistics,
    handler_seconds: Histogram,
    *,
    unacked: int,
    connected: bool,
    paused: bool,
    reconnects: int,
    stalled_seconds: float | None = None,
) -> Iterator[Reading]:
    """One scrape of the consumer called ``name`` on ``queue``."""
    labels = (name, queue)
    yield Reading(UNACKED, labels, unacked)
    yield Reading(CONSUMER_CONNECTED, labels, connected)
    yield Reading(PAUSED, labels, paused)
    yield Reading(CONSUMER_RECONNECTS, labels, reconnects)
    if stalled_seconds is not None:
        yield Reading(CONSUMER_LOOP_STALLED_SECONDS, labels, stalled_seconds)
    yield Reading(HANDLER_SECONDS, labels, handler_seconds)
    for attribute, family in COUNTERS.items():
        yield Reading(family, labels, getattr(statistics, attribute))


_PUBLISHER_LABELS = ("publisher",)

OUTSTANDING = Family("publisher_outstanding", "gauge", "Messages submitted and not settled.", _PUBLISHER_LABELS)
OLDEST_AGE = Family(
    "publisher_outstanding_oldest_age_seconds",
    "gauge",
    "Age of the oldest unsettled message.",
    _PUBLISHER_LABELS,
    "highest",
)
CONNECTED = Family("publisher_connected", "gauge", "1 while the broker takes messages.", _PUBLISHER_LABELS)
BLOCKED = Family(
    "publisher_blocked", "gauge", "1 while the broker blocks publishing (memory or disk alarm).", _PUBLISHER_LABELS
)
BLOCKED_SECONDS = Family(
    "publisher_blocked_seconds", "counter", "Time for which the broker has blocked publishing.", _PUBLISHER_LABELS
)
RECONNECTS = Family("publisher_reconnects", "counter", "Connections lost and made again.", _PUBLISHER_LABELS)
LOOP_STALLED_SECONDS = Family(
    "publisher_event_loop_stalled_seconds",
    "counter",
    "Time for which the event loop stood still, half a heartbeat or more at a time (asyncio only).",
    _PUBLISHER_LABELS,
)
SETTLED = Family("publisher_settled", "counter", "Messages settled, by outcome.", (*_PUBLISHER_LABELS, "outcome"))
CONFIRM_SECONDS = Family(
    "publisher_confirm_seconds", "histogram", "From submission to the broker's confirm.", _PUBLISHER_LABELS
)
NACKS = Family("publisher_nacks", "counter", "basic.nack received, tried again or reported.", _PUBLISHER_LABELS)
IN_DOUBT = Family(
    "publisher_in_doubt", "counter", "Attempts whose channel was lost before their confirm came.", _PUBLISHER_LABELS
)
REPUBLISHED = Family("publisher_republished", "counter", "Attempts beyond a message's first.", _PUBLISHER_LABELS)
STALE_CONFIRMS = Family(
    "publisher_stale_confirms",
    "counter",
    "Confirms that were unknown, repeated or of an older channel.",
    _PUBLISHER_LABELS,
)
STRAY_RETURNS = Family(
    "publisher_stray_returns", "counter", "Returns that matched no outstanding message.", _PUBLISHER_LABELS
)


def publisher_readings(
    name: str,
    statistics: PublisherStatistics,
    *,
    outstanding: int,
    oldest_age: float,
    connected: bool,
    blocked: bool,
    blocked_seconds: float,
    reconnects: int,
    stale_confirms: int,
    stalled_seconds: float | None = None,
) -> Iterator[Reading]:
    """One scrape of the publisher called ``name``."""
    labels = (name,)
    yield Reading(OUTSTANDING, labels, outstanding)
    yield Reading(OLDEST_AGE, labels, oldest_age)
    yield Reading(CONNECTED, labels, connected)
    yield Reading(BLOCKED, labels, blocked)
    yield Reading(BLOCKED_SECONDS, labels, blocked_seconds)
    yield Reading(RECONNECTS, labels, reconnects)
    if stalled_seconds is not None:
        yield Reading(LOOP_STALLED_SECONDS, labels, stalled_seconds)
    for outcome in ("confirmed", "nacked", "returned", "refused", "unknown"):
        yield Reading(SETTLED, (name, outcome), getattr(statistics, outcome))
    yield Reading(CONFIRM_SECONDS, labels, statistics.confirm_seconds)
    yield Reading(NACKS, labels, statistics.nacks)
    yield Reading(IN_DOUBT, labels, statistics.in_doubt)
    yield Reading(REPUBLISHED, labels, statistics.republished)
    yield Reading(STALE_CONFIRMS, labels, stale_confirms)
    yield Reading(STRAY_RETURNS, labels, statistics.stray_returns)


_OUTBOX_LABELS = ("publisher",)

# Publishers of one name may share an outbox: what is in it is no sum.
GAUGES = {
    name: Family(f"outbox_{metric}", "gauge", documentation, _OUTBOX_LABELS, "highest")
    for name, metric, documentation in (
        ("rows", "waiting", "Messages that wait to be published, delayed and held ones included."),
        ("delayed", "delayed", "Of these, those that were not confirmed and wait for another attempt."),
        ("held", "held", "Of these, those behind a message of their ordering key that is set aside or unreadable."),
        ("set_aside", "set_aside", "Messages that will not be published until somebody decides."),
        ("unreadable", "unreadable", "Rows of a newer format, for a relay of a newer version."),
        ("oldest_age", "oldest_age_seconds", "Age of the oldest message that waits; 0 where none does."),
    )
}
STORED = Family("outbox_stored", "counter", "Messages that this publisher made durable.", _OUTBOX_LABELS)
RELAYED = Family(
    "outbox_relayed", "counter", "Attempts to publish a row, by what became of it.", (*_OUTBOX_LABELS, "fate")
)
FAILURES = Family(
    "outbox_failures",
    "counter",
    "Messages that could not be stored; times that the relay had to pause, as the broker or the outbox was away.",
    (*_OUTBOX_LABELS, "what"),
)


def outbox_readings(name: str, statistics: OutboxStatistics, status: OutboxStatus | None) -> Iterator[Reading]:
    """One scrape of the outbox of the publisher called ``name``; ``status`` is None where the outbox cannot say."""
    labels = (name,)
    if status is not None:
        for attribute, family in GAUGES.items():
            yield Reading(family, labels, getattr(status, attribute))
    yield Reading(STORED, labels, statistics.stored)
    for fate in ("confirmed", "delayed", "set_aside"):
        yield Reading(RELAYED, (name, fate), getattr(statistics, fate))
    yield Reading(FAILURES, (name, "store"), statistics.not_stored)
    yield Reading(FAILURES, (name, "relay"), statistics.interruptions)
