"""Counts and states of publishers, consumers and outboxes, with their metrics.

A ``...Statistics`` object holds counts that its owner keeps while it works. They only grow. A ``...Status`` object is a
reading at one moment. The metadata of a field (`MetricOfField`) documents the field and declares its metric. A new
metric needs a field here and the line that counts it. A `Histogram` and a `PeakAverage` sum up observations.

Invariant: the values are plain numbers. One thread or event loop owns and writes them. Any thread may read them, for
example for a scrape or a progress bar. Each value is consistent, but two of them may be a few messages apart.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds in seconds: from the round trip of a local broker to the default delivery timeout."""


_WEIGHT = 0.2  # the weight of a smaller observation in a `PeakAverage`


class TracedObservation(NamedTuple):
    """An observation of a `Histogram` within a sampled span."""

    value: float
    ids: Mapping[str, str]  # the ids of the span
    at: float  # seconds since 1970


class Histogram:
    """Observations counted by upper bound, cheap enough for one per message."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds  # ascending; a value equal to a bound is counted under it
        self.counts = [0] * (len(bounds) + 1)  # per bound, and for values above the last bound; not cumulative
        self.total = 0.0  # the sum of all observations
        self.exemplars: dict[int, TracedObservation] = {}  # the latest of each bucket, by its index in `counts`

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float]) -> None:
        """Count one or more observations, which usually share a bucket."""
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
        """Add the counts of ``other``, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        for bucket, exemplar in other.exemplars.copy().items():
            if bucket not in self.exemplars or self.exemplars[bucket].at < exemplar.at:
                self.exemplars[bucket] = exemplar

    def exemplify(self, value: float, ids: Mapping[str, str], at: float) -> None:
        """Record the trace of an observation that is counted elsewhere."""
        self.exemplars[bisect_left(self.bounds, value)] = TracedObservation(value, ids, at)


@dataclass(eq=False, slots=True)
class PeakAverage:
    """The average size of messages, which grows at once and falls slowly.

    A number of messages that is computed from it soon fits in memory when the messages grow.
    """

    value: float | None = None  # bytes; None before the first observation

    def observe(self, average: float) -> None:
        """Include the average size of the messages that were read together."""
        if self.value is None or average > self.value:
            self.value = average
        else:
            self.value += _WEIGHT * (average - self.value)


Merged: TypeAlias = Literal["sum", "highest", "lowest"]


class MetricOfField(NamedTuple):
    """The metric that shows a field."""

    kind: Literal["counter", "gauge", "histogram"]
    documentation: str  # the help text of the metric and the documentation of the field
    name: str = ""  # the name without the prefix of the owner; empty for the name of the field
    label: tuple[str, str] | tuple[()] = ()  # name and value of an extra label, if several fields share a metric
    merged: Merged = "sum"  # how readings of several owners with the same labels are merged

    @classmethod
    def of(cls, metadata: Mapping[Any, Any]) -> MetricOfField | None:
        """Return the metric in the metadata of a field, or None without one."""
        metric = metadata.get(cls)
        return metric if isinstance(metric, cls) else None


def _gauge(documentation: str, name: str = "", merged: Merged = "sum") -> dict[Any, MetricOfField]:
    return {MetricOfField: MetricOfField("gauge", documentation, name, merged=merged)}


def _level(documentation: str, *, merged: Merged) -> Any:
    """Return a field that is 0 unless given, with its metric."""
    return field(default=0, metadata=_gauge(documentation, merged=merged))


def _histogram(documentation: str) -> dict[Any, MetricOfField]:
    return {MetricOfField: MetricOfField("histogram", documentation)}


def _counter(documentation: str, name: str = "", label: tuple[str, str] | tuple[()] = ()) -> dict[Any, MetricOfField]:
    return {MetricOfField: MetricOfField("counter", documentation, name, label)}


def _count(documentation: str, name: str = "", label: tuple[str, str] | tuple[()] = ()) -> Any:
    """Return a field that counts from 0, with its metric."""
    return field(default=0, metadata=_counter(documentation, name, label))


_SETTLED = "Messages settled, by outcome."
_RECONNECTS = "Connections lost and made again."
_TOKENS = "Renewals of the token of an open connection, by outcome; failed: the credentials callback gave none."
_STALLED = "Time for which the event loop stalled, half a heartbeat or more at a time (asyncio only)."


@dataclass(slots=True)
class TokenStatistics:
    """Counts of the renewals of one connection's token, by outcome."""

    accepted: int = 0
    refused: int = 0
    failed: int = 0

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        return TokenStatistics(self.accepted + other.accepted, self.refused + other.refused, self.failed + other.failed)


@dataclass(slots=True)
class PublisherStatistics:
    """Counts of a publisher."""

    confirmed: int = _count(_SETTLED, "settled", ("outcome", "confirmed"))
    nacked: int = _count(_SETTLED, "settled", ("outcome", "nacked"))
    returned: int = _count(_SETTLED, "settled", ("outcome", "returned"))
    refused: int = _count(_SETTLED, "settled", ("outcome", "refused"))
    unknown: int = _count(_SETTLED, "settled", ("outcome", "unknown"))
    nacks: int = _count("basic.nack received; the publish was tried again or reported.")
    in_doubt: int = _count("Attempts whose channel was lost before their confirm came.")
    republished: int = _count("Attempts beyond the first of a message.")
    stray_returns: int = _count("Returns that matched no outstanding message.")
    confirm_seconds: Histogram = field(
        default_factory=Histogram, metadata=_histogram("Time from submission to the confirm of the broker.")
    )

    def settled(self, outcome: str) -> None:
        """Count a settled publish. The outcome is the name of a field."""
        setattr(self, outcome, getattr(self, outcome) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatus:
    """State of a publisher. `event_loop_stalled_seconds` is None for the sync API."""

    outstanding: int = field(metadata=_gauge("Messages submitted and not settled."))
    oldest_age: float = field(
        metadata=_gauge("Age of the oldest unsettled message.", "outstanding_oldest_age_seconds", "highest")
    )
    connected: bool = field(metadata=_gauge("1 while the broker takes messages.", merged="lowest"))
    blocked: bool = field(metadata=_gauge("1 while the broker blocks publishing (memory or disk alarm)."))
    blocked_seconds: float = field(metadata=_counter("Time for which the broker has blocked publishing."))
    reconnects: int = field(metadata=_counter(_RECONNECTS))
    stale_confirms: int = field(metadata=_counter("Confirms that were unknown, repeated or of an older channel."))
    tokens_accepted: int = _count(_TOKENS, "token_renewals", ("outcome", "accepted"))
    tokens_refused: int = _count(_TOKENS, "token_renewals", ("outcome", "refused"))
    tokens_failed: int = _count(_TOKENS, "token_renewals", ("outcome", "failed"))
    event_loop_stalled_seconds: float | None = field(default=None, metadata=_counter(_STALLED))


@dataclass(slots=True)
class ConsumerStatistics:
    """Counts of a consumer."""

    delivered: int = _count("Deliveries received.", "deliveries")
    redelivered: int = _count("Deliveries that the broker flagged as redelivered.")
    handled: int = _count("Deliveries that a handler finished while their channel was open.")
    failed: int = _count("Attempts that failed.", "failed_attempts")
    retried: int = _count("Failed attempts that are tried again.")
    delayed: int = _count("Messages moved to a delay queue for retry: confirmed there, then acked.")
    pauses: int = _count("Times that the kill switch paused the consumer.")
    quarantined: int = _count("Messages moved to the quarantine of their queue: confirmed there, then acked.")
    dead_lettered: int = _count("Messages dead-lettered: their dead letter was confirmed, then they were acked.")
    rejected_unseen: int = _count(
        "Deliveries dead-lettered without a handler: undecodable, too large, newer format, no idempotency key."
    )
    rejected: int = _count("Deliveries ended by basic.reject: the broker dead-letters them, or drops them.")
    republish_failed: int = _count("Publishes of dead letters and retries that were not confirmed.")
    duplicates: int = _count("Deliveries acked because the idempotency store has them as done.")
    claims_in_progress: int = _count("Deliveries that waited because another holder has claimed them.")
    store_failures: int = _count("Failures of the idempotency store, or tokens that it refused, for a delivery.")
    requeued: int = _count("Deliveries requeued by basic.nack, not handled.")
    acked: int = _count("Deliveries acked.")
    acks_sent: int = _count("basic.ack frames sent.")
    acks_saved: int = _count("Deliveries acked without a frame of their own.")
    stale: int = _count("Results of an older channel or given twice: dropped.", "stale_acks")
    lost: int = _count("Deliveries unsettled when their channel was lost; they come again.", "lost_deliveries")
    cancelled: int = _count("Subscriptions that the broker ended: queue deleted or moved, or consumer timeout.")
    overdue: int = _count("Deliveries unacked for most of the consumer timeout of the broker.")
    timed_out: int = _count("Deliveries that the consumer timeout of the broker took from their handlers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """State of a consumer.

    `connected` is None while it stops, and `event_loop_stalled_seconds` for the sync API.
    """

    unacked: int = field(metadata=_gauge("Deliveries received and not acked: waiting, in a handler or held."))
    connected: bool | None = field(metadata=_gauge("1 while subscribed; missing while it stops.", merged="lowest"))
    paused: bool = field(metadata=_gauge("1 while the kill switch pauses the consumer."))
    reconnects: int = field(metadata=_counter(_RECONNECTS))
    handler_seconds: Histogram = field(metadata=_histogram("Time in the handler, per call."))
    tokens_accepted: int = _count(_TOKENS, "token_renewals", ("outcome", "accepted"))
    tokens_refused: int = _count(_TOKENS, "token_renewals", ("outcome", "refused"))
    tokens_failed: int = _count(_TOKENS, "token_renewals", ("outcome", "failed"))
    event_loop_stalled_seconds: float | None = field(default=None, metadata=_counter(_STALLED))


_ATTEMPTS = "Attempts to publish a row, by outcome."
_FAILURES = (
    "Messages that could not be stored; pauses of the relay, because the outbox failed, or the broker refused its "
    "first connection."
)


@dataclass(slots=True)
class OutboxStatistics:
    """Counts of a publisher with an outbox, and of its relay."""

    stored: int = _count("Messages that this publisher made durable.")
    not_stored: int = _count(_FAILURES, "failures", ("what", "store"))
    confirmed: int = _count(_ATTEMPTS, "relayed", ("outcome", "confirmed"))
    delayed: int = _count(_ATTEMPTS, "relayed", ("outcome", "delayed"))
    set_aside: int = _count(_ATTEMPTS, "relayed", ("outcome", "set_aside"))
    interruptions: int = _count(_FAILURES, "failures", ("what", "relay"))


# Publishers with the same name may share an outbox, so their readings must not be added up.
@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """Content of an outbox. `oldest_age` is in seconds, by the wall clock."""

    rows: int = field(
        metadata=_gauge("Messages that wait to be published, delayed and held ones included.", "waiting", "highest")
    )
    delayed: int = _level("Of these, those that were not confirmed and wait for another attempt.", merged="highest")
    held: int = _level(
        "Of these, those behind a message of their ordering key that is set aside or unreadable.", merged="highest"
    )
    set_aside: int = _level("Messages that stay unpublished until an operator decides.", merged="highest")
    unreadable: int = _level("Rows of a newer format, for a relay of a newer version.", merged="highest")
    oldest_age: float = field(
        default=0.0,
        metadata=_gauge("Age of the oldest message that waits; 0 if none does.", "oldest_age_seconds", "highest"),
    )

    def after(self, elapsed: float) -> OutboxStatus:
        """Return the status `elapsed` seconds later, when waiting rows are older."""
        return replace(self, oldest_age=self.oldest_age + elapsed) if self.rows else self


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """State of the relay of an outbox."""

    unanswered_seconds: float = field(
        metadata=_gauge(
            "Time for which the relay has waited for an answer of the outbox; 0 if it does not.", merged="highest"
        )
    )


@dataclass(slots=True)
class QueueDepthStatistics:
    """Counts of one queue whose depth is measured."""

    failures: int = _count("Measurements that the broker did not answer, or refused.", "depth_failures")


# Several processes of a registry may measure one queue, so their readings must not be added up.
@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Depth of a queue, as last reported by the broker."""

    messages: int = field(metadata=_gauge("Messages that are ready for delivery.", merged="highest"))
    consumers: int = field(metadata=_gauge("Consumers that are subscribed to the queue.", merged="highest"))


@dataclass(slots=True)
class StageStatistics:
    """Counts of a relay into a stage."""

    moved: int = _count("Messages moved: confirmed in the stage, then acked.")
    moved_before: int = _count("Redelivered messages acked only, since they were in the stage.")
    epochs: int = _count("Times that the relay became the active one, or got a new channel.")
    failures: int = _count("Times that the stage did not take a message: nacked, returned, not in time.")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The state of a relay into a stage."""

    active: int = field(metadata=_gauge("1 while this relay moves messages, 0 while it waits."))
    outstanding: int = field(metadata=_gauge("Deliveries that are not acked."))
    held_bytes: int = field(metadata=_gauge("Bytes of messages that the stage has not confirmed."))
    ready: int | None = field(
        default=None, metadata=_gauge("Messages that waited in the queue when last asked for.", merged="highest")
    )
