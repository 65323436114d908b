"""The dashboards for Grafana: the panels and their queries.

Each panel is declared once in this module. `reliable_mq.monitoring.grafana` writes Grafana's JSON. ``FILTER`` in an
expression stands for the label matchers of the dashboard's variables. ``$__rate_interval`` and ``$__range`` are
Grafana's variables.

Invariants:

- an expression has data as soon as its metrics exist, even while there are no problems;
- the colours of thresholds have the same meaning everywhere: green is healthy, yellow needs a look, red needs action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["short", "ops", "s", "percentunit", "bytes"]
"""Grafana's name of a unit: a count, a number per second, seconds, a share of 1."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """A PromQL query. In its legend, ``{{label}}`` stands for the label's value."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with one number, or with lines over time.

    Attributes:
        help: The meaning of the panel, and the values that indicate a problem.
        warn, alarm: The values from which the panel is yellow, or red; None for never.
    """

    title: str
    help: str
    queries: tuple[PanelQuery, ...]
    unit: Unit = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    warn: float | None = None
    alarm: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard for Grafana."""

    name: str
    title: str
    description: str
    metric: str
    variables: tuple[str, ...]  # labels of `metric`, whose values are selected one after another
    rows: tuple[Row, ...]


def row(title: str, *panels: Panel) -> Row:
    return Row(title, panels)


def stat(
    title: str, description: str, expression: str, unit: Unit = "short", *, warn: float | None = None,
    alarm: float | None = None,
) -> Panel:  # fmt: skip
    return Panel(title, description, (PanelQuery(expression, ""),), unit, "stat", warn, alarm)


def lines(
    title: str, description: str, queries: tuple[PanelQuery, ...], unit: Unit | None = None, *,
    warn: float | None = None, alarm: float | None = None,
) -> Panel:  # fmt: skip
    """Return a panel with lines over time. The default unit of rates is per second."""
    per_second = any("rate(" in query.expression for query in queries)
    return Panel(title, description, queries, unit or ("ops" if per_second else "short"), warn=warn, alarm=alarm)


def gauges(by: str, how: str = "sum", /, **metrics: str) -> tuple[PanelQuery, ...]:
    """Return a query for each gauge. Each value is the last word of the legend."""
    return tuple(
        PanelQuery(f"{how} by ({by}) (reliable_mq_{metric}{{FILTER}})", _legend(by, word))
        for metric, word in metrics.items()
    )


def rates(by: str, /, **metrics: str) -> tuple[PanelQuery, ...]:
    """Return a query for the rate of each counter, as ``gauges`` does."""
    return tuple(
        PanelQuery(f"sum by ({by}) (rate(reliable_mq_{metric}_total{{FILTER}}[$__rate_interval]))", _legend(by, word))
        for metric, word in metrics.items()
    )


def quantiles(by: str, metric: str) -> tuple[PanelQuery, ...]:
    """Return the queries for the median and the 99th percentile of a histogram."""
    counted = f"sum by (le, {by}) (rate(reliable_mq_{metric}_bucket{{FILTER}}[$__rate_interval]))"
    return tuple(
        PanelQuery(f"histogram_quantile({quantile}, {counted})", _legend(by, f"p{quantile * 100:g}"))
        for quantile in (0.5, 0.99)
    )


def growth(metric: str, more: str = "") -> str:
    """Return the growth of a counter over the displayed time, or 0 without data."""
    return f"sum(increase(reliable_mq_{metric}_total{{FILTER{more}}}[$__range])) or vector(0)"


def _legend(by: str, word: str) -> str:
    """Return a legend of the labels' values, with the instance last, and a word."""
    labels = sorted(by.split(", "), key=lambda label: label == "instance")
    return " ".join([*(f"{{{{{label}}}}}" for label in labels), word]).rstrip()


def _event_loop_and_tokens(owner: str) -> tuple[Panel, Panel]:
    """Return the panels that publishers and consumers have in common."""
    return (
        lines(
            "Event loop stood still",
            "Share of time for which the event loop was blocked, half a heartbeat or more at a time (asyncio only). "
            "Something that blocks runs on the loop.",
            rates(f"instance, {owner}", **{f"{owner}_event_loop_stalled_seconds": ""}),
            "percentunit",
            warn=0.001,
        ),
        lines(
            "Tokens renewed per second",
            "Renewals of the tokens of open connections, by outcome. Refused by the broker, or failed (the credentials "
            "callback gave none): the connection is lost when its token expires.",
            rates(f"{owner}, outcome", **{f"{owner}_token_renewals": ""}),
        ),
    )


PUBLISHERS: Final = Dashboard(
    "publishers",
    "reliable_mq: publishers and outbox",
    "What publishers submit, what the broker confirms, and what waits in outboxes.",
    "reliable_mq_publisher_connected",
    ("job", "instance", "publisher"),
    (
        row(
            "Health",
            stat(
                "Not connected",
                "Publishers that have no channel on which the broker takes messages. They keep trying.",
                "count(reliable_mq_publisher_connected{FILTER} == 0) or vector(0)",
                alarm=1,
            ),
            stat(
                "Blocked",
                "Publishers that the broker blocks: it has a memory or disk alarm.",
                "sum(reliable_mq_publisher_blocked{FILTER})",
                alarm=1,
            ),
            stat(
                "Oldest outstanding",
                "Age of the oldest message that is submitted and not settled. Above a minute, the broker does not "
                "confirm it.",
                "max(reliable_mq_publisher_outstanding_oldest_age_seconds{FILTER})",
                "s",
                warn=10,
                alarm=60,
            ),
            stat(
                "Confirmed per second",
                "Messages that the broker has confirmed.",
                'sum(rate(reliable_mq_publisher_settled_total{FILTER, outcome="confirmed"}[$__rate_interval]))',
                "ops",
            ),
            stat(
                "Not confirmed",
                "Messages in the time shown that were nacked, returned, refused, or have an unknown outcome. The "
                "publisher raised an error for each.",
                growth("publisher_settled", ', outcome!="confirmed"'),
                warn=1,
            ),
            stat(
                "Set aside in outboxes",
                "Messages that stay unpublished until an operator decides: reliable-mq outbox status. Publishers with "
                "one name count once, as they may share an outbox.",
                "sum(max by (job, publisher) (reliable_mq_outbox_set_aside{FILTER})) or vector(0)",
                warn=1,
            ),
        ),
        row(
            "Publishing",
            lines(
                "Settled per second",
                "Messages settled, by outcome. Everything but confirmed is an error for its caller.",
                rates("outcome", publisher_settled=""),
            ),
            lines(
                "Time to confirm",
                "From submission to the confirm of the broker, median and 99th percentile. Both rise if the broker "
                "or its disks are slow.",
                quantiles("publisher", "publisher_confirm_seconds"),
                "s",
                warn=1,
                alarm=10,
            ),
            lines(
                "Outstanding",
                "Messages submitted and not settled. A line at max_outstanding means that submit() blocks: the "
                "broker is slower than the program.",
                gauges("instance, publisher", publisher_outstanding=""),
            ),
            lines(
                "Age of the oldest outstanding message",
                "Grows by a second per second while the broker confirms nothing.",
                gauges("instance, publisher", "max", publisher_outstanding_oldest_age_seconds=""),
                "s",
                warn=10,
                alarm=60,
            ),
            lines(
                "Published again",
                "Attempts beyond the first of a message, attempts in doubt (their channel was lost before the "
                "confirm), and nacks. Bursts belong to lost connections; a steady rate of nacks is a full queue.",
                rates(
                    "publisher", publisher_republished="again", publisher_in_doubt="in doubt", publisher_nacks="nacks"
                ),
            ),
            lines(
                "Ignored frames per second",
                "Returns and confirms that matched no outstanding message: late, repeated or of an older channel. "
                "They change nothing.",
                rates("publisher", publisher_stray_returns="returns", publisher_stale_confirms="confirms"),
            ),
        ),
        row(
            "Connections",
            lines(
                "Connected publishers",
                "Publishers on whose channel the broker takes messages.",
                gauges("instance, publisher", publisher_connected=""),
            ),
            lines(
                "Reconnects per second",
                "Connections lost and made again.",
                rates("instance, publisher", publisher_reconnects=""),
            ),
            lines(
                "Share of time blocked",
                "By a memory or disk alarm of the broker. 100 %: nothing is published.",
                rates("instance, publisher", publisher_blocked_seconds=""),
                "percentunit",
                warn=0.01,
                alarm=0.5,
            ),
            *_event_loop_and_tokens("publisher"),
        ),
        row(
            "Outbox",
            lines(
                "Waiting in outboxes",
                "Rows that wait to be published; of these, rows to be tried again later, rows behind one of their "
                "ordering key; rows set aside, and rows of a newer format. Publishers that share an outbox report the "
                "same rows.",
                gauges(
                    "instance, publisher",
                    "max",
                    outbox_waiting="waiting",
                    outbox_delayed="delayed",
                    outbox_held="held",
                    outbox_set_aside="set aside",
                    outbox_unreadable="unreadable",
                ),
            ),
            lines(
                "Age of the oldest row that waits",
                "Above a minute, the relay does not get rid of its rows. No answer: the time for which the outbox has "
                "not answered the relay.",
                gauges(
                    "instance, publisher", "max", outbox_oldest_age_seconds="", outbox_unanswered_seconds="no answer"
                ),
                "s",
                warn=10,
                alarm=60,
            ),
            lines(
                "Stored and relayed per second",
                "Messages made durable, and attempts to publish a row by outcome.",
                (*rates("publisher", outbox_stored="stored"), *rates("publisher, outcome", outbox_relayed="")),
            ),
            lines(
                "Failures per second",
                "Messages that could not be stored; pauses of the relay, because the outbox failed, or the broker "
                "refused its first connection.",
                rates("publisher, what", outbox_failures=""),
            ),
        ),
    ),
)

CONSUMERS: Final = Dashboard(
    "consumers",
    "reliable_mq: consumers, retries and dead letters",
    "What consumers handle, what fails and is tried again, and what ends as a dead letter.",
    "reliable_mq_consumer_connected",
    ("job", "instance", "consumer", "queue"),
    (
        row(
            "Health",
            stat(
                "Not subscribed",
                "Consumers that are not subscribed to their queue. They keep trying.",
                "count(reliable_mq_consumer_connected{FILTER} == 0) or vector(0)",
                alarm=1,
            ),
            stat(
                "Paused",
                "Consumers that their kill switch pauses: nearly all handlers fail.",
                "sum(reliable_mq_consumer_paused{FILTER})",
                alarm=1,
            ),
            stat(
                "Handled per second",
                "Deliveries that a handler finished.",
                "sum(rate(reliable_mq_consumer_handled_total{FILTER}[$__rate_interval]))",
                "ops",
            ),
            stat(
                "Failed attempts",
                "Share of attempts that failed.",
                "sum(rate(reliable_mq_consumer_failed_attempts_total{FILTER}[$__rate_interval]))\n/ clamp_min("
                "sum(rate(reliable_mq_consumer_failed_attempts_total{FILTER}[$__rate_interval]))\n"
                "+ sum(rate(reliable_mq_consumer_handled_total{FILTER}[$__rate_interval])), 1e-9)",
                "percentunit",
                warn=0.1,
                alarm=0.5,
            ),
            stat(
                "Dead-lettered",
                "Messages in the time shown that were given up: reliable-mq dlq stats.",
                growth("consumer_dead_lettered"),
                warn=1,
            ),
            stat(
                "Rejected",
                "Messages in the time shown that the broker dead-letters, or drops if their queue has no dead-letter "
                "exchange.",
                growth("consumer_rejected"),
                alarm=1,
            ),
        ),
        row(
            "Handling",
            lines(
                "Deliveries per second",
                "Received, handled and acked. Lines that part for long mean that handlers fall behind.",
                rates("queue", consumer_deliveries="delivered", consumer_handled="handled", consumer_acked="acked"),
            ),
            lines(
                "Time in the handler",
                "Per call, median and 99th percentile.",
                quantiles("consumer", "consumer_handler_seconds"),
                "s",
            ),
            lines(
                "Unacked",
                "Deliveries received and not acked: waiting, in a handler or held. A line at the prefetch means that "
                "handlers are the limit.",
                gauges("instance, consumer", consumer_unacked=""),
            ),
            lines(
                "Acks per second",
                "Frames sent, and deliveries acked without a frame of their own.",
                rates("queue", consumer_acks_sent="frames", consumer_acks_saved="saved"),
            ),
        ),
        row(
            "Retries and dead letters",
            lines(
                "Failed attempts per second",
                "Attempts that failed, failures that are tried again, and messages moved to a delay queue.",
                rates(
                    "queue", consumer_failed_attempts="failed", consumer_retried="retried", consumer_delayed="delayed"
                ),
            ),
            lines(
                "Dead letters per second",
                "Messages given up; of these, messages without a handler (undecodable, too large, newer format); "
                "messages moved to quarantine; messages rejected, for the broker to dead-letter or drop.",
                rates(
                    "queue",
                    consumer_dead_lettered="dead-lettered",
                    consumer_rejected_unseen="without a handler",
                    consumer_quarantined="quarantined",
                    consumer_rejected="rejected",
                ),
            ),
            lines(
                "Depth of dead-letter queues",
                "Messages that wait in dead-letter queues: reliable-mq dlq. Needs QueueDepths in one process.",
                (
                    PanelQuery(
                        'max by (queue) (reliable_mq_queue_messages{job=~"$job", role="dead_letters"})', "{{queue}}"
                    ),
                ),
                warn=1,
            ),
            lines(
                "Depth of queues",
                "Messages that are ready for delivery. Needs QueueDepths in one process.",
                (PanelQuery('max by (queue) (reliable_mq_queue_messages{job=~"$job", role="queue"})', "{{queue}}"),),
            ),
            lines(
                "Retries and dead letters that were not confirmed",
                "Their originals stay unacked, and are tried again. A steady rate: the broker does not take them.",
                rates("queue", consumer_republish_failed=""),
            ),
            lines(
                "Pauses",
                "Consumers paused by their kill switch now, and pauses per second.",
                (*gauges("consumer", consumer_paused="paused"), *rates("consumer", consumer_pauses="pauses")),
                "short",
                alarm=1,
            ),
        ),
        row(
            "Duplicates and the idempotency store",
            lines(
                "Redelivered and duplicates per second",
                "Deliveries that the broker flagged as redelivered, deliveries that the idempotency store has as "
                "done, and deliveries that waited for another holder of their claim.",
                rates(
                    "queue",
                    consumer_redelivered="redelivered",
                    consumer_duplicates="duplicates",
                    consumer_claims_in_progress="claimed elsewhere",
                ),
            ),
            lines(
                "Failures of the idempotency store per second",
                "Nothing is acked without it: the queue grows while it fails.",
                rates("queue", consumer_store_failures=""),
                warn=0.001,
            ),
        ),
        row(
            "Connections",
            lines(
                "Subscribed consumers",
                "Consumers that are subscribed to their queue.",
                gauges("instance, consumer", consumer_connected=""),
            ),
            lines(
                "Reconnects and cancellations per second",
                "Connections lost and made again, and subscriptions that the broker ended (queue deleted or moved, "
                "consumer timeout).",
                rates("consumer", consumer_reconnects="reconnects", consumer_cancelled="cancelled"),
            ),
            lines(
                "Deliveries that come again, per second",
                "Unsettled when their channel was lost, requeued by us, or taken back by the consumer timeout; "
                "overdue: close to that; stale: results of an older channel, dropped.",
                rates(
                    "consumer",
                    consumer_lost_deliveries="lost",
                    consumer_requeued="requeued",
                    consumer_timed_out="timed out",
                    consumer_overdue="overdue",
                    consumer_stale_acks="stale",
                ),
            ),
            *_event_loop_and_tokens("consumer"),
        ),
        row(
            "Stages",
            lines(
                "Moved into stages per second",
                "Messages that a relay moved from a queue into a stream; redelivered ones that were there already; "
                "new channels of the relay, and times that the stage did not take a message.",
                tuple(
                    PanelQuery(
                        f'sum by (queue) (rate(reliable_mq_stage_{metric}_total{{job=~"$job"}}[$__rate_interval]))',
                        f"{{{{queue}}}} {metric}",
                    )
                    for metric in ("moved", "moved_before", "epochs", "failures")
                ),
            ),
            lines(
                "State of the relays",
                "Relays that move messages; messages that wait; deliveries not acked.",
                tuple(
                    PanelQuery(
                        f'{how} by (queue) (reliable_mq_stage_{metric}{{job=~"$job"}})', f"{{{{queue}}}} {metric}"
                    )
                    for metric, how in (("active", "sum"), ("ready", "max"), ("outstanding", "sum"))
                ),
            ),
            lines(
                "Bytes held by the relays",
                "Bodies that the stage has not confirmed.",
                (PanelQuery('sum by (queue) (reliable_mq_stage_held_bytes{job=~"$job"})', "{{queue}}"),),
                unit="bytes",
            ),
        ),
    ),
)

DASHBOARDS: Final = {dashboard.name: dashboard for dashboard in (PUBLISHERS, CONSUMERS)}
"""Every dashboard, by the name that the command line takes."""
