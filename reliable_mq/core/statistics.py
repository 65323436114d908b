"""Counts that the core keeps while it works.

Plain numbers, written by the thread that owns a session and read by any other (a metrics scrape, a progress bar): each
is whole at any moment, and two of them may be a few messages apart. They only grow.

Counts that a consuming session keeps while it works.

Plain numbers, written by the thread or event loop that owns the session and read by any other: each is whole at any
moment, two of them may be a few messages apart. They only grow; what goes up and down is a property of the session.

What is in an outbox, and what a publisher with one has counted: plain numbers that others may read at any moment.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["ConsumerStatistics", "Histogram", "OutboxStatistics", "OutboxStatus", "PublisherStatistics"]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds, in seconds, from a local broker's round trip to the default delivery timeout."""


class Histogram:
    """Observations counted by upper bound; cheap enough for one per message.

    Attributes:
        bounds: upper bounds, ascending; a value equal to a bound is counted under it.
        counts: observations per bound, and one more for those above the last. Not cumulative.
        total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float]) -> None:
        """Count many at once (at least one). Mostly they share a bucket, which makes it cheap."""
        if len(values) == 1:
            self.observe(values[0])
            return
        bucket = bisect_left(self.bounds, min(values))
        if bucket == bisect_left(self.bounds, max(values)):
            self.counts[bucket] += len(values)
            self.total += sum(values)
        else:
            for value in values:
                self.observe(value)

    def add(self, other: Histogram) -> None:
        """Count all that ``other`` has counted, under the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class PublisherStatistics:
    """What a publisher has seen.

    Attributes:
        confirmed, nacked, returned, refused, unknown: publishes settled, by outcome.
        nacks: ``basic.nack`` for a publish, whether it was tried again or reported.
        in_doubt: attempts that ended without a confirm because their channel was lost.
        republished: attempts beyond the first of a publish.
        stray_returns: returns that matched no outstanding publish.
        confirm_seconds: from acceptance to the confirm.
    """

    confirmed: int = 0
    nacked: int = 0
    returned: int = 0
    refused: int = 0
    unknown: int = 0
    nacks: int = 0
    in_doubt: int = 0
    republished: int = 0
    stray_returns: int = 0
    confirm_seconds: Histogram = field(default_factory=Histogram)


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


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """What is in an outbox.

    Attributes:
        rows: messages that wait to be published, those that are just being published included.
        delayed: of these, the ones that were not confirmed and wait for another attempt.
        held: of these, the ones that wait behind a row of their ordering key that is set aside or not readable.
        set_aside: messages that will not be published until somebody decides.
        unreadable: rows of a newer format, for a relay of a newer version.
        oldest_age: seconds since the oldest message that waits was stored; 0 where none waits. By the wall clock.
    """

    rows: int
    delayed: int = 0
    held: int = 0
    set_aside: int = 0
    unreadable: int = 0
    oldest_age: float = 0.0

    def after(self, elapsed: float) -> OutboxStatus:
        """Say the same of ``elapsed`` seconds later, as far as is known: what waits has grown older."""
        if not self.rows:
            return self
        age = self.oldest_age + elapsed
        return OutboxStatus(self.rows, self.delayed, self.held, self.set_aside, self.unreadable, age)


@dataclass(slots=True)
class OutboxStatistics:
    """Counts of one publisher with an outbox; they only grow.

    Attributes:
        stored: messages made durable.
        not_stored: messages that could not be, as far as is known.
        confirmed, delayed, set_aside: rows of its relay, by what became of each attempt.
        interruptions: times that its relay had to pause: nothing can be published, or the outbox does not answer.
    """

    stored: int = 0
    not_stored: int = 0
    confirmed: int = 0
    delayed: int = 0
    set_aside: int = 0
    interruptions: int = 0
