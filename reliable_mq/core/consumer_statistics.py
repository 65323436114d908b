"""Counts that a consuming session keeps while it works.

Plain numbers, written by the thread or event loop that owns the session and read by any other: each is whole at any
moment, two of them may be a few messages apart. They only grow; what goes up and down is a property of the session.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConsumerStatistics"]


@dataclass(slots=True)
class ConsumerStatistics:
    """What a consumer has seen.

    Attributes:
        delivered: deliveries that came from the broker.
        redelivered: those of them that the broker flagged as redelivered.
        handled: deliveries that a handler finished and whose channel was still there.
        failed: attempts that failed.
        retried: failed attempts that are tried again.
        delayed: originals acked after the message that waits in a delay queue was confirmed.
        pauses: times that the kill switch began to hold deliveries back.
        isolated: originals acked after they were moved to the quarantine of their queue, confirmed.
        dead_lettered: originals acked after their dead letter was confirmed.
        quarantined: deliveries that were dead-lettered without being handed to a handler: undecodable, above a limit,
            in a newer format.
        rejected: deliveries that ended with ``basic.reject``, for want of a dead-letter queue of ours.
        republish_failed: publishes of dead letters and retries that were not confirmed.
        duplicates: deliveries acked because the idempotency store has them as done.
        claims_in_progress: deliveries that waited because another holder has claimed them.
        store_failures: times that the idempotency store failed, or refused a token, for a delivery.
        handed_back: deliveries returned to the broker with ``basic.nack``, not handled.
        acked: deliveries acknowledged.
        acks_sent: ``basic.ack`` frames that took.
        acks_saved: deliveries acknowledged without a frame of their own.
        stale: results for a channel that is gone, and second results, which changed nothing.
        lost: deliveries that were unsettled when their channel was lost.
        cancelled: subscriptions that the broker ended, because the queue was deleted or moved, or over its consumer
            timeout.
        overdue: deliveries that were unacked for most of the broker's consumer timeout, and warned of.
        timed_out: deliveries that the broker's consumer timeout took back from their handlers.
    """

    delivered: int = 0
    redelivered: int = 0
    handled: int = 0
    failed: int = 0
    retried: int = 0
    delayed: int = 0
    pauses: int = 0
    isolated: int = 0
    dead_lettered: int = 0
    quarantined: int = 0
    rejected: int = 0
    republish_failed: int = 0
    duplicates: int = 0
    claims_in_progress: int = 0
    store_failures: int = 0
    handed_back: int = 0
    acked: int = 0
    acks_sent: int = 0
    acks_saved: int = 0
    stale: int = 0
    lost: int = 0
    cancelled: int = 0
    overdue: int = 0
    timed_out: int = 0
