"""Spark's filters on offsets as ranges."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from reliable_mq.spark.stream_offsets import RangeFilters, StreamRange

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

WHOLE = [StreamRange("a", 0, 100), StreamRange("b", 50, 60)]
OFFSET, QUEUE = ("offset",), ("queue",)


def applied(*filters: Filter) -> list[tuple[str, int, int]]:
    noted = RangeFilters()
    for each in filters:
        noted.note(each)
    kept: RangeFilters = pickle.loads(pickle.dumps(noted))
    return [(each.stream, each.start, each.end) for each in kept.applied(WHOLE)]


@pytest.mark.parametrize(
    ("filters", "ranges"),
    [
        ([], [("a", 0, 100), ("b", 50, 60)]),
        ([GreaterThan(OFFSET, 52)], [("a", 53, 100), ("b", 53, 60)]),
        ([GreaterThanOrEqual(OFFSET, 60), LessThan(OFFSET, 70)], [("a", 60, 70)]),
        ([LessThanOrEqual(OFFSET, 50)], [("a", 0, 51), ("b", 50, 51)]),
        ([EqualTo(OFFSET, 7)], [("a", 7, 8)]),
        ([In(OFFSET, (7, 3))], [("a", 3, 8)]),
        ([EqualNullSafe(OFFSET, 55)], [("a", 55, 56), ("b", 55, 56)]),
        ([In(QUEUE, ("b", "c")), EqualTo(QUEUE, "b"), EqualTo(OFFSET, 55)], [("a", 55, 56), ("b", 55, 56)]),
        ([EqualTo(QUEUE, "c")], applied()),
        ([Not(EqualTo(OFFSET, 7)), IsNotNull(OFFSET), EqualTo(("type",), "x"), EqualTo(OFFSET, None)], applied()),
        ([GreaterThan(("priority",), 3), GreaterThan(("timestamp",), 3)], applied()),
    ],
)
def test_filters_on_offset_cut_the_ranges(filters: list[Filter], ranges: list[tuple[str, int, int]]) -> None:
    """Other filters leave the ranges unchanged.

    The queue of a row from a stage is not the name of the stream, so a filter on it is ignored.
    """
    assert applied(*filters) == ranges


_TESTS: dict[Any, Any] = {
    EqualTo: lambda offset, value: offset == value,
    GreaterThan: lambda offset, value: offset > value,
    GreaterThanOrEqual: lambda offset, value: offset >= value,
    LessThan: lambda offset, value: offset < value,
    LessThanOrEqual: lambda offset, value: offset <= value,
}


@given(st.lists(st.tuples(st.sampled_from(list(_TESTS)), st.integers(-5, 110)), max_size=4))
def test_no_offset_that_passes_all_filters_is_left_out(filters: list[tuple[Any, int]]) -> None:
    """No other offset is read."""
    passing = [n for n in range(100) if all(_TESTS[kind](n, value) for kind, value in filters)]
    read = [
        number
        for stream, start, end in applied(*(kind(OFFSET, value) for kind, value in filters))
        for number in range(start, end)
        if stream == "a"
    ]
    assert read == passing
