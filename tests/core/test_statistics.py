"""Histograms, averages and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.core.statistics import (
    LATENCY_BUCKETS,
    ConsumerStatistics,
    ConsumerStatus,
    Histogram,
    MetricOfField,
    PeakAverage,
    PublisherStatistics,
    PublisherStatus,
    TokenStatistics,
)

VALUES = st.one_of(st.floats(0, 200), st.sampled_from(LATENCY_BUCKETS))


def bucket(value: float) -> int:
    return sum(value > bound for bound in LATENCY_BUCKETS)


@pytest.mark.parametrize("owner", [PublisherStatus, ConsumerStatus])
def test_of_several_connections_the_lowest_counts(owner: type) -> None:
    (metric,) = [MetricOfField.of(each.metadata) for each in fields(owner) if each.name == "connected"]
    assert metric is not None
    assert metric.merged == "lowest"


@given(st.lists(st.lists(VALUES, min_size=1), max_size=5))
def test_every_observation_is_counted_once_under_its_bound(batches: list[list[float]]) -> None:
    """A value is counted under the first bound that it does not exceed.

    Values are observed one by one or many at once.
    """
    together, singly, added = Histogram(), Histogram(), Histogram()
    for batch in batches:
        together.observe_all(batch)
        one = Histogram()
        for value in batch:
            singly.observe(value)
            one.observe(value)
        added.add(one)
    buckets = Counter(bucket(value) for batch in batches for value in batch)
    for histogram in (together, singly, added):
        assert histogram.counts == [buckets[index] for index in range(len(LATENCY_BUCKETS) + 1)]
        assert isclose(histogram.total, sum(map(sum, batches)), abs_tol=1e-9)


def test_a_value_above_all_bounds_has_a_place() -> None:
    """A value above the last bound is counted after it.

    A value equal to a bound is counted under that bound.
    """
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1, 99.0):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 2]


def test_an_average_grows_at_once_and_falls_slowly() -> None:
    average = PeakAverage()
    assert average.value is None
    seen = []
    for size in (100.0, 50.0, 300.0, 300.0, 0.0):
        average.observe(size)
        seen.append(average.value)
    assert seen == [100.0, 90.0, 300.0, 300.0, 240.0]


def test_many_observations_at_once_count_like_each_by_itself() -> None:
    for values in ([1.5], [1.1, 1.2, 2.0], [0.5, 1.5, 99.0]):
        each, at_once = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
        for value in values:
            each.observe(value)
        at_once.observe_all(values)
        assert (at_once.counts, at_once.total) == (each.counts, pytest.approx(each.total))
        at_once.add(each)
        assert (at_once.counts, at_once.total) == ([2 * one for one in each.counts], pytest.approx(2 * each.total))


def test_histograms_under_other_bounds_are_not_added() -> None:
    """Histograms with different numbers of bounds cannot be added."""
    with pytest.raises(ValueError, match="zip"):
        Histogram((1.0,)).add(Histogram((1.0, 2.0)))


def test_counts_begin_at_zero_and_are_not_shared() -> None:
    """Each publisher has separate counts."""
    one, other = PublisherStatistics(), PublisherStatistics()
    one.confirm_seconds.observe(0.1)
    one.confirmed += 1
    assert other == PublisherStatistics(confirm_seconds=other.confirm_seconds)
    assert sum(other.confirm_seconds.counts) == 0


def test_metrics_are_in_the_metadata_of_their_fields() -> None:
    by_name = {field.name: MetricOfField.of(field.metadata) for field in fields(ConsumerStatistics)}
    handled = by_name["handled"]
    assert handled is not None
    assert handled.kind == "counter"
    assert MetricOfField.of({}) is None


def test_a_bucket_exemplar_is_its_latest_traced_observation() -> None:
    first, second = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    first.exemplify(0.5, {"trace_id": "a"}, 10.0)
    first.exemplify(5.0, {"trace_id": "b"}, 11.0)
    second.exemplify(0.6, {"trace_id": "c"}, 12.0)
    second.exemplify(6.0, {"trace_id": "d"}, 9.0)
    first.add(second)
    assert {bucket: one.ids["trace_id"] for bucket, one in first.exemplars.items()} == {0: "c", 2: "b"}
    assert first.counts == [0, 0, 0]


def test_counts_of_tokens_are_added_by_outcome() -> None:
    assert TokenStatistics(1, 2, 3) + TokenStatistics(10, 20, 30) == TokenStatistics(11, 22, 33)
