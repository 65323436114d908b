"""Positions in streams: checkpoints, limits of a batch, and splits of ranges."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.stream_offsets import (
    StreamRange,
    from_checkpoint,
    limited,
    marked_initial,
    ranges_of,
    second,
    split,
    worth_having,
)

NAMES = st.sampled_from(["a", "b", "c", "d"])
BACKLOGS = st.dictionaries(NAMES, st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)), max_size=4)


def test_an_offset_survives_the_checkpoint() -> None:
    """An offset is JSON, with or without the mark of the start of a query."""
    positions = {"events": 2**62, "other": 0}
    assert from_checkpoint(json.loads(json.dumps(positions))) == (positions, False)
    assert from_checkpoint(json.loads(json.dumps(marked_initial(positions)))) == (positions, True)


def test_a_stream_may_be_called_initial() -> None:
    """Its position is a number, and the mark contains a table."""
    assert from_checkpoint({"initial": 7}) == ({"initial": 7}, False)


@pytest.mark.parametrize(
    "offset", [{"epoch": "x", "number": 1}, {"a": 1.5}, {"a": True}, {"initial": {"a": None}}, 5, [], None]
)
def test_f58_an_offset_of_another_kind_is_refused(offset: object) -> None:
    """It comes from queue mode, another source, or a newer version. Spark's socket source writes a number."""
    with pytest.raises(ConfigurationError, match="checkpointLocation"):
        from_checkpoint(offset)


@given(backlogs=BACKLOGS, messages=st.none() | st.integers(1, 10**7), size=st.none() | st.integers(1, 10**9))
def test_a_limit_holds_and_lets_something_through(
    backlogs: dict[str, tuple[int, int]], messages: int | None, size: int | None
) -> None:
    """Each stream stays in its range, and at least one message passes if any exist."""
    start = {name: first for name, (first, _) in backlogs.items()}
    end = {name: first + count for name, (first, count) in backlogs.items()}
    cut = limited(start, end, messages=messages, size=size, average={"a": 10.0, "b": 0.0})
    assert cut.keys() == end.keys()
    assert all(start[name] <= cut[name] <= end[name] for name in end)
    total, taken = (sum(there[name] - start[name] for name in end) for there in (end, cut))
    assert taken <= max(messages or total, 1)
    assert taken > 0 or total == 0
    if messages is None and size is None:
        assert cut == end


def test_every_stream_gets_its_share() -> None:
    """The share is proportional to the backlog; a small stream is not starved."""
    assert limited({"a": 0, "b": 100}, {"a": 3000, "b": 1100}, messages=400) == {"a": 300, "b": 200}
    assert limited({"a": 0, "b": 0}, {"a": 100_000, "b": 1}, messages=100) == {"a": 99, "b": 1}


def test_bytes_are_counted_by_the_average_of_each_stream() -> None:
    """1000 messages of 100 bytes, 1000 of 900 bytes, and a limit of a tenth."""
    cut = limited({"a": 0, "b": 0}, {"a": 1000, "b": 1000}, size=100_000, average={"a": 100.0, "b": 900.0})
    assert cut == {"a": 100, "b": 100}


@given(
    sizes=st.lists(st.integers(1, 10**6), max_size=5), least=st.none() | st.integers(1, 50),
    records=st.none() | st.integers(10**5, 10**7), first=st.integers(0, 10**9),
)  # fmt: skip
def test_split_ranges_cover_all_offsets_without_gap_or_overlap(
    sizes: list[int], least: int | None, records: int | None, first: int
) -> None:
    """The number of ranges is as requested, and none exceeds the maximum."""
    ranges = [StreamRange(f"s{index}", first, first + size) for index, size in enumerate(sizes)]
    pieces = split(ranges, least, records)
    for whole in ranges:
        mine = [piece for piece in pieces if piece.stream == whole.stream]
        assert (mine[0].start, mine[-1].end) == (whole.start, whole.end)
        assert all(one.end == other.start for one, other in pairwise(mine))
        assert all(piece.size > 0 for piece in mine)
    assert records is None or all(piece.size <= records for piece in pieces)
    if ranges and least is not None:
        fewest = sum(1 if records is None else -(-size // records) for size in sizes)
        assert len(pieces) == max(fewest, min(worth_having(least, sum(sizes)), sum(sizes)))


@pytest.mark.parametrize(
    ("least", "messages", "tasks"), [(2, 10, 2), (16, 10, 16), (200, 10, 16), (200, 400_000, 40), (200, 10**7, 200)]
)
def test_tasks_that_are_not_worth_their_cost_are_not_made(least: int, messages: int, tasks: int) -> None:
    """A few tasks are always allowed, because the work on the rows may be long."""
    assert worth_having(least, messages) == tasks


def test_empty_ranges_are_left_out() -> None:
    """Streams without new messages have an empty range."""
    assert ranges_of({"a": 5, "b": 3}, {"b": 9, "a": 5}) == [StreamRange("b", 3, 9)]


def test_a_range_can_be_pickled() -> None:
    """It is sent to an executor."""
    one = StreamRange("events", 3, 9)
    assert pickle.loads(pickle.dumps(one)) == one
    assert str(one) == "offsets 3 to 8 of stream 'events'"


def test_a_time_in_the_last_second_of_all_is_that_second() -> None:
    """9999-12-31 23:59:59.999 is a common notation for "until the end".

    There is no later second.
    """
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert second(253_402_300_799_999, up=True) == last
    assert second(253_402_300_798_001, up=True) == last
    assert second(253_402_300_799_999) == last
