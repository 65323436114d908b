"""The dashboards for Grafana: which panels there are, and what each of them asks.

A panel is declared once, here, of what `reliable_mq.monitoring.panels` has; `reliable_mq.monitoring.grafana` writes
Grafana's JSON.

Invariants: an expression has data as soon as its metrics exist, also while all is well; the colours of thresholds mean
the same everywhere: green for healthy, yellow for look at it, red for act.
"""

from __future__ import annotations

from typing import Final

from reliable_mq.monitoring.panels import Dashboard, Panel, PanelQuery, Row, Variable, growth, quantiles, rates, stat

__all__ = ["DASHBOARDS"]

_NOT_CONFIRMED: Final = ', outcome!="confirmed"'

PUBLISHERS: Final = Dashboard(
    "publishers",
    "reliable_mq: publishers and outbox",
    "What publishers submit, what the broker confirms, and what waits in outboxes.",
    (
        Variable("job", "reliable_mq_publisher_connected"),
        Variable("instance", "reliable_mq_publisher_connected"),
        Variable("publisher", "reliable_mq_publisher_connected"),
    ),
    (
        Row(
            "Health",
            (
                stat(
                    "Not connected",
                    "Publishers that have no channel on which the broker takes messages. They go on trying.",
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
                    growth("publisher_settled", _NOT_CONFIRMED),
                    warn=1,
                ),
                stat(
                    "Set aside in outboxes",
                    "Messages that stay unpublished until an operator decides: reliable-mq outbox status.",
                    "sum(reliable_mq_outbox_set_aside{FILTER}) or vector(0)",
                    warn=1,
                ),
            ),
        ),
        Row(
            "Publishing",
            (
                Panel(
                    "Settled per second",
                    "Messages settled, by outcome. Everything but confirmed is an error for its caller.",
                    rates("outcome", ("publisher_settled", "{{outcome}}")),
                    "ops",
                ),
                Panel(
                    "Time to confirm",
                    "From submission to the confirm of the broker, median and 99th percentile. Both rise if the broker "
                    "or its disks are slow.",
                    quantiles("publisher_confirm_seconds", "publisher", "{{publisher}}"),
                    "s",
                    warn=1,
                    alarm=10,
                ),
                Panel(
                    "Outstanding",
                    "Messages submitted and not settled. A line at max_outstanding means that submit() blocks: the "
                    "broker is slower than the program.",
                    (
                        PanelQuery(
                            "sum by (instance, publisher) (reliable_mq_publisher_outstanding{FILTER})",
                            "{{publisher}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Age of the oldest outstanding message",
                    "Grows by a second per second while the broker confirms nothing.",
                    (
                        PanelQuery(
                            "max by (instance, publisher)"
                            " (reliable_mq_publisher_outstanding_oldest_age_seconds{FILTER})",
                            "{{publisher}} {{instance}}",
                        ),
                    ),
                    "s",
                    warn=10,
                    alarm=60,
                ),
                Panel(
                    "Published again",
                    "Attempts beyond the first of a message, attempts in doubt (their channel was lost before the "
                    "confirm), and nacks. Bursts belong to lost connections; a steady rate of nacks is a full queue.",
                    rates(
                        "publisher",
                        ("publisher_republished", "{{publisher}} again"),
                        ("publisher_in_doubt", "{{publisher}} in doubt"),
                        ("publisher_nacks", "{{publisher}} nacks"),
                    ),
                    "ops",
                ),
                Panel(
                    "Ignored frames per second",
                    "Returns and confirms that matched no outstanding message: late, repeated or of an older channel. "
                    "They change nothing.",
                    rates(
                        "publisher",
                        ("publisher_stray_returns", "{{publisher}} returns"),
                        ("publisher_stale_confirms", "{{publisher}} confirms"),
                    ),
                    "ops",
                ),
            ),
        ),
        Row(
            "Connections",
            (
                Panel(
                    "Connected publishers",
                    "Publishers on whose channel the broker takes messages.",
                    (
                        PanelQuery(
                            "sum by (instance, publisher) (reliable_mq_publisher_connected{FILTER})",
                            "{{publisher}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Reconnects per second",
                    "Connections lost and made again.",
                    rates("instance, publisher", ("publisher_reconnects", "{{publisher}} {{instance}}")),
                    "ops",
                ),
                Panel(
                    "Share of time blocked",
                    "By a memory or disk alarm of the broker. 100 %: nothing is published.",
                    rates("instance, publisher", ("publisher_blocked_seconds", "{{publisher}} {{instance}}")),
                    "percentunit",
                    warn=0.01,
                    alarm=0.5,
                ),
                Panel(
                    "Event loop stood still",
                    "Share of time for which the event loop was blocked, half a heartbeat or more at a time (asyncio "
                    "only). Something that blocks runs on the loop.",
                    rates(
                        "instance, publisher", ("publisher_event_loop_stalled_seconds", "{{publisher}} {{instance}}")
                    ),
                    "percentunit",
                    warn=0.001,
                ),
                Panel(
                    "Tokens renewed per second",
                    "Renewals of the tokens of open connections, by outcome. Refused by the broker, or failed (the "
                    "credentials callback gave none): the connection is lost when its token expires.",
                    rates("publisher, outcome", ("publisher_token_renewals", "{{publisher}} {{outcome}}")),
                    "ops",
                ),
            ),
        ),
        Row(
            "Outbox",
            (
                Panel(
                    "Waiting in outboxes",
                    "Rows that wait to be published; of these, rows to be tried again later, rows behind one of their "
                    "ordering key; rows set aside, and rows of a newer format.",
                    tuple(
                        PanelQuery(
                            f"sum by (publisher) (reliable_mq_outbox_{state}{{FILTER}})", f"{{{{publisher}}}} {name}"
                        )
                        for state, name in (
                            ("waiting", "waiting"),
                            ("delayed", "delayed"),
                            ("held", "held"),
                            ("set_aside", "set aside"),
                            ("unreadable", "unreadable"),
                        )
                    ),
                ),
                Panel(
                    "Age of the oldest row that waits",
                    "Above a minute, the relay does not get rid of its rows.",
                    (
                        PanelQuery(
                            "max by (instance, publisher) (reliable_mq_outbox_oldest_age_seconds{FILTER})",
                            "{{publisher}} {{instance}}",
                        ),
                    ),
                    "s",
                    warn=10,
                    alarm=60,
                ),
                Panel(
                    "Stored and relayed per second",
                    "Messages made durable, and attempts to publish a row by outcome.",
                    (
                        *rates("publisher", ("outbox_stored", "{{publisher}} stored")),
                        *rates("publisher, outcome", ("outbox_relayed", "{{publisher}} {{outcome}}")),
                    ),
                    "ops",
                ),
                Panel(
                    "Failures per second",
                    "Messages that could not be stored; pauses of the relay, because it could not reach the broker or "
                    "the outbox.",
                    rates("publisher, what", ("outbox_failures", "{{publisher}} {{what}}")),
                    "ops",
                ),
            ),
        ),
    ),
)

CONSUMERS: Final = Dashboard(
    "consumers",
    "reliable_mq: consumers, retries and dead letters",
    "What consumers handle, what fails and is tried again, and what ends as a dead letter.",
    (
        Variable("job", "reliable_mq_consumer_connected"),
        Variable("instance", "reliable_mq_consumer_connected"),
        Variable("consumer", "reliable_mq_consumer_connected"),
        Variable("queue", "reliable_mq_consumer_connected"),
    ),
    (
        Row(
            "Health",
            (
                stat(
                    "Not subscribed",
                    "Consumers that are not subscribed to their queue. They go on trying.",
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
                    "Share of deliveries whose handler failed.",
                    "sum(rate(reliable_mq_consumer_failed_attempts_total{FILTER}[$__rate_interval]))\n"
                    "/ clamp_min(sum(rate(reliable_mq_consumer_deliveries_total{FILTER}[$__rate_interval])), 1e-9)",
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
                    "Messages in the time shown that ended without a dead-letter queue of ours. The broker may have "
                    "dropped them.",
                    growth("consumer_rejected"),
                    alarm=1,
                ),
            ),
        ),
        Row(
            "Handling",
            (
                Panel(
                    "Deliveries per second",
                    "Received, handled and acked. Lines that part for long mean that handlers fall behind.",
                    rates(
                        "queue",
                        ("consumer_deliveries", "{{queue}} delivered"),
                        ("consumer_handled", "{{queue}} handled"),
                        ("consumer_acked", "{{queue}} acked"),
                    ),
                    "ops",
                ),
                Panel(
                    "Time in the handler",
                    "Per call, median and 99th percentile.",
                    quantiles("consumer_handler_seconds", "consumer", "{{consumer}}"),
                    "s",
                ),
                Panel(
                    "Unacked",
                    "Deliveries received and not acked: waiting, in a handler or held. A line at the prefetch means "
                    "that handlers are the limit.",
                    (
                        PanelQuery(
                            "sum by (instance, consumer) (reliable_mq_consumer_unacked{FILTER})",
                            "{{consumer}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Acks per second",
                    "Frames sent, and deliveries acked without a frame of their own.",
                    rates(
                        "queue",
                        ("consumer_acks_sent", "{{queue}} frames"),
                        ("consumer_acks_saved", "{{queue}} saved"),
                    ),
                    "ops",
                ),
            ),
        ),
        Row(
            "Retries and dead letters",
            (
                Panel(
                    "Failed attempts per second",
                    "Attempts that failed, failures that are tried again, and messages moved to a delay queue.",
                    rates(
                        "queue",
                        ("consumer_failed_attempts", "{{queue}} failed"),
                        ("consumer_retried", "{{queue}} retried"),
                        ("consumer_delayed", "{{queue}} delayed"),
                    ),
                    "ops",
                ),
                Panel(
                    "Dead letters per second",
                    "Messages given up; of these, messages without a handler (undecodable, too large, newer format); "
                    "messages moved to quarantine; messages rejected without a dead-letter queue of ours.",
                    rates(
                        "queue",
                        ("consumer_dead_lettered", "{{queue}} dead-lettered"),
                        ("consumer_rejected_unseen", "{{queue}} without a handler"),
                        ("consumer_quarantined", "{{queue}} quarantined"),
                        ("consumer_rejected", "{{queue}} rejected"),
                    ),
                    "ops",
                ),
                Panel(
                    "Depth of dead-letter queues",
                    "Messages that wait in dead-letter queues: reliable-mq dlq. Needs QueueDepths in one process.",
                    (
                        PanelQuery(
                            'max by (queue) (reliable_mq_queue_messages{job=~"$job", role="dead_letters"})', "{{queue}}"
                        ),
                    ),
                    warn=1,
                ),
                Panel(
                    "Depth of queues",
                    "Messages that are ready for delivery. Needs QueueDepths in one process.",
                    (
                        PanelQuery(
                            'max by (queue) (reliable_mq_queue_messages{job=~"$job", role="queue"})', "{{queue}}"
                        ),
                    ),
                ),
                Panel(
                    "Retries and dead letters that were not confirmed",
                    "Their originals stay unacked, and are tried again. A steady rate: the broker does not take them.",
                    rates("queue", ("consumer_republish_failed", "{{queue}}")),
                    "ops",
                ),
                Panel(
                    "Pauses",
                    "Consumers paused by their kill switch now, and pauses per second.",
                    (
                        PanelQuery("sum by (consumer) (reliable_mq_consumer_paused{FILTER})", "{{consumer}} paused"),
                        *rates("consumer", ("consumer_pauses", "{{consumer}} pauses")),
                    ),
                    alarm=1,
                ),
            ),
        ),
        Row(
            "Duplicates and the idempotency store",
            (
                Panel(
                    "Redelivered and duplicates per second",
                    "Deliveries that the broker flagged as redelivered, deliveries that the idempotency store has as "
                    "done, and deliveries that waited for another holder of their claim.",
                    rates(
                        "queue",
                        ("consumer_redelivered", "{{queue}} redelivered"),
                        ("consumer_duplicates", "{{queue}} duplicates"),
                        ("consumer_claims_in_progress", "{{queue}} claimed elsewhere"),
                    ),
                    "ops",
                ),
                Panel(
                    "Failures of the idempotency store per second",
                    "Nothing is acked without it: the queue grows while it fails.",
                    rates("queue", ("consumer_store_failures", "{{queue}}")),
                    "ops",
                    warn=0.001,
                ),
            ),
        ),
        Row(
            "Connections",
            (
                Panel(
                    "Subscribed consumers",
                    "Consumers that are subscribed to their queue.",
                    (
                        PanelQuery(
                            "sum by (instance, consumer) (reliable_mq_consumer_connected{FILTER})",
                            "{{consumer}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Reconnects and cancellations per second",
                    "Connections lost and made again, and subscriptions that the broker ended (queue deleted or moved, "
                    "consumer timeout).",
                    rates(
                        "consumer",
                        ("consumer_reconnects", "{{consumer}} reconnects"),
                        ("consumer_cancelled", "{{consumer}} cancelled"),
                    ),
                    "ops",
                ),
                Panel(
                    "Deliveries that come again, per second",
                    "Unsettled when their channel was lost, requeued by us, or taken back by the consumer timeout; "
                    "overdue: close to that; stale: results of an older channel, dropped.",
                    rates(
                        "consumer",
                        ("consumer_lost_deliveries", "{{consumer}} lost"),
                        ("consumer_requeued", "{{consumer}} requeued"),
                        ("consumer_timed_out", "{{consumer}} timed out"),
                        ("consumer_overdue", "{{consumer}} overdue"),
                        ("consumer_stale_acks", "{{consumer}} stale"),
                    ),
                    "ops",
                ),
                Panel(
                    "Event loop stood still",
                    "Share of time for which the event loop was blocked, half a heartbeat or more at a time (asyncio "
                    "only). Something that blocks runs on the loop.",
                    rates("instance, consumer", ("consumer_event_loop_stalled_seconds", "{{consumer}} {{instance}}")),
                    "percentunit",
                    warn=0.001,
                ),
                Panel(
                    "Tokens renewed per second",
                    "Renewals of the tokens of open connections, by outcome. Refused by the broker, or failed (the "
                    "credentials callback gave none): the connection is lost when its token expires.",
                    rates("consumer, outcome", ("consumer_token_renewals", "{{consumer}} {{outcome}}")),
                    "ops",
                ),
            ),
        ),
        Row(
            "Stages",
            (
                Panel(
                    "Moved into stages per second",
                    "Messages that a relay moved from a queue into a stream; redelivered ones that were there already; "
                    "new channels of the relay, and times that the stage did not take a message.",
                    tuple(
                        PanelQuery(
                            f"sum by (queue) (rate(reliable_mq_stage_{metric}_total[$__rate_interval]))",
                            f"{{{{queue}}}} {metric}",
                        )
                        for metric in ("moved", "moved_before", "epochs", "failures")
                    ),
                    "ops",
                ),
                Panel(
                    "State of the relays",
                    "Relays that move messages; messages that wait; deliveries not acked; bytes not confirmed.",
                    tuple(
                        PanelQuery(f"sum by (queue) (reliable_mq_stage_{metric})", f"{{{{queue}}}} {metric}")
                        for metric in ("active", "ready", "outstanding", "held_bytes")
                    ),
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = {dashboard.name: dashboard for dashboard in (PUBLISHERS, CONSUMERS)}
"""Every dashboard, by the name that the command line takes."""
