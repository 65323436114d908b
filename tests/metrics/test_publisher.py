"""The metrics of a publisher: names, labels, and sources of values.

Dashboards depend on the names and labels.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from reliable_mq.core.statistics import PublisherStatistics, PublisherStatus
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import register

VALUES = {
    "publisher_outstanding orders": 7,
    "publisher_outstanding_oldest_age_seconds orders": 1.5,
    "publisher_connected orders": 1,
    "publisher_blocked orders": 0,
    "publisher_blocked_seconds_total orders": 2.5,
    "publisher_reconnects_total orders": 3,
    "publisher_settled_total orders confirmed": 101,
    "publisher_settled_total orders nacked": 102,
    "publisher_settled_total orders returned": 103,
    "publisher_settled_total orders refused": 104,
    "publisher_settled_total orders unknown": 105,
    "publisher_nacks_total orders": 106,
    "publisher_in_doubt_total orders": 107,
    "publisher_republished_total orders": 108,
    "publisher_stale_confirms_total orders": 4,
    "publisher_token_renewals_total orders accepted": 11,
    "publisher_token_renewals_total orders refused": 12,
    "publisher_token_renewals_total orders failed": 13,
    "publisher_stray_returns_total orders": 109,
    "publisher_confirm_seconds_count orders": 2,
    "publisher_confirm_seconds_sum orders": 0.75,
}


def test_every_count_has_its_metric() -> None:
    """The expected scrape is complete: a missing or new metric fails the test."""
    statistics = PublisherStatistics(
        confirmed=101,
        nacked=102,
        returned=103,
        refused=104,
        unknown=105,
        nacks=106,
        in_doubt=107,
        republished=108,
        stray_returns=109,
    )
    statistics.confirm_seconds.observe_all([0.25, 0.5])
    registry = CollectorRegistry()
    register(
        registry,
        lambda: readings(
            ("orders",),
            PublisherStatus(
                outstanding=7,
                oldest_age=1.5,
                connected=True,
                blocked=False,
                blocked_seconds=2.5,
                reconnects=3,
                stale_confirms=4,
                tokens_accepted=11,
                tokens_refused=12,
                tokens_failed=13,
            ),
            statistics,
        ),
    )
    shown = {
        f"{sample.name.removeprefix('reliable_mq_')} {' '.join(sample.labels.values())}": sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_bucket")
    }
    assert shown == VALUES


def test_one_of_two_publishers_that_is_not_connected_shows() -> None:
    """Both publishers have one name, and the alert fires on the value 0."""
    registry = CollectorRegistry()
    for connected in (True, False):
        status = PublisherStatus(
            outstanding=3,
            oldest_age=1.0,
            connected=connected,
            blocked=False,
            blocked_seconds=0.0,
            reconnects=0,
            stale_confirms=0,
        )
        register(registry, partial(readings, ("orders",), status, PublisherStatistics()))
    labels = {"publisher": "orders"}
    assert registry.get_sample_value("reliable_mq_publisher_connected", labels) == 0
    assert registry.get_sample_value("reliable_mq_publisher_outstanding", labels) == 6


def test_a_bucket_is_there_for_every_deadline_of_the_defaults() -> None:
    """Buckets range from a local round trip to the default delivery timeout."""
    bounds = PublisherStatistics().confirm_seconds.bounds
    assert bounds[0] <= 0.001
    assert {30.0, 120.0} <= set(bounds)
    assert list(bounds) == sorted(bounds)
