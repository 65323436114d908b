"""The metrics of a consumer, on either face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.core.consumer_statistics import ConsumerStatistics
    from reliable_mq.core.statistics import Histogram

__all__ = ["consumer_readings"]

_LABELS = ("consumer", "queue")

UNACKED = Family(
    "consumer_unacked", "gauge", "Deliveries received and not acked: waiting, in a handler or held.", _LABELS
)
CONNECTED = Family("consumer_connected", "gauge", "1 while subscribed.", _LABELS)
PAUSED = Family("consumer_paused", "gauge", "1 while the kill switch holds deliveries back.", _LABELS)
RECONNECTS = Family("consumer_reconnects", "counter", "Connections lost and made again.", _LABELS)
LOOP_STALLED_SECONDS = Family(
    "consumer_event_loop_stalled_seconds",
    "counter",
    "Time for which the event loop stood still, half a heartbeat or more at a time (asyncio only).",
    _LABELS,
)
HANDLER_SECONDS = Family("consumer_handler_seconds", "histogram", "Time in the handler, per call.", _LABELS)

COUNTERS = {
    name: Family(f"consumer_{metric}", "counter", documentation, _LABELS)
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
    yield Reading(CONNECTED, labels, connected)
    yield Reading(PAUSED, labels, paused)
    yield Reading(RECONNECTS, labels, reconnects)
    if stalled_seconds is not None:
        yield Reading(LOOP_STALLED_SECONDS, labels, stalled_seconds)
    yield Reading(HANDLER_SECONDS, labels, handler_seconds)
    for attribute, family in COUNTERS.items():
        yield Reading(family, labels, getattr(statistics, attribute))
