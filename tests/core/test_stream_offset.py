"""Stream offsets: no message is skipped, in whatever order they are settled."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.core.consumer.acks import StreamOffset
from reliable_mq.core.consumer.delivery import Delivery
from tests.core.deliveries import BROKEN_TABLE, delivery


def at(*offsets: int) -> list[Delivery]:
    return [delivery(tag, headers={"x-stream-offset": offset}) for tag, offset in enumerate(offsets, 1)]


def broken() -> Delivery:
    return delivery(headers=BROKEN_TABLE)


def test_a_position_that_nothing_came_to_is_unknown() -> None:
    position = StreamOffset()
    position.lost(1)
    assert (position.following, position.upcoming) == (None, None)


def test_a_start_that_moves_is_pinned_until_the_first_delivery() -> None:
    position = StreamOffset(start_moves=True)
    assert position.here is None
    position.subscribed(1005.0)
    position.lost(1)
    position.subscribed(2000.0)
    assert position.following == position.here == datetime.fromtimestamp(1000.0, UTC)
    position.delivered(at(10), 1)
    assert position.here == 11
    position.lost(1)
    position.subscribed(3000.0)
    assert position.following == position.here == 10


def test_a_start_that_stays_needs_no_time() -> None:
    position = StreamOffset()
    position.subscribed(1005.0)
    assert position.following is None


def test_what_is_not_settled_is_where_the_next_channel_begins() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11, 15), 1)
    position.lost(2)
    assert position.following == 11


def test_with_all_settled_the_next_channel_begins_past_the_last() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11, 15), 1)
    position.lost(4)
    assert position.following == 16


def test_the_upcoming_offset_follows_the_last_delivery() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11), 1)
    assert position.upcoming == 12
    assert position.following is None


def test_a_channel_without_deliveries_moves_nothing() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11), 1)
    position.lost(2)
    position.lost(1)
    assert position.following == 11


def test_a_delivery_with_broken_headers_gets_the_next_offset() -> None:
    """Its real offset is not smaller, so at worst the message is redelivered."""
    position = StreamOffset()
    unreadable = broken()
    position.delivered([*at(10), unreadable, *at(30)], 1)
    assert unreadable.flaw is None
    position.lost(2)
    assert position.following == 11


def test_what_comes_again_is_marked_as_redelivered() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11, 12), 1)
    position.lost(2)
    again = at(11, 12, 13)
    position.delivered(again, 1)
    assert [item.redelivered for item in again] == [True, True, False]


def test_a_delivery_without_a_known_offset_moves_nothing() -> None:
    position = StreamOffset()
    position.delivered([broken()], 1)
    position.lost(1)
    assert position.following is None


@pytest.mark.parametrize("start_moves", [False, True])
def test_after_a_cancel_the_next_stream_is_read_from_its_first(start_moves: bool) -> None:
    position = StreamOffset(start_moves=start_moves)
    position.delivered(at(10, 11, 12), 1)
    position.cancelled()
    position.lost(2)
    assert position.start == 0
    position.subscribed(1005.0)
    new = at(0, 1)
    position.delivered(new, 1)
    assert not any(item.redelivered for item in new)
    position.lost(2)
    assert position.start == 1


def test_a_stream_that_refuses_its_consumer_is_read_on_later() -> None:
    position = StreamOffset()
    position.delivered(at(10, 11, 12), 1)
    position.cancelled()
    position.lost(2)
    position.refused()
    assert position.start == 11


def test_what_is_settled_is_forgotten_as_more_comes_in() -> None:
    position = StreamOffset()
    for first in range(0, 10_000, 10):
        position.delivered(at(*range(first, first + 10)), first + 1)
    assert len(position._offsets) == 10


@given(
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
)
def test_every_offset_is_settled_in_the_end(gaps: list[int], cuts: list[tuple[int, int]]) -> None:
    """A stream with gaps is consumed over channels that are lost.

    Each channel delivers some messages, and settles the first of them.
    """
    stream = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    settled: set[int] = set()
    position = StreamOffset()
    for delivered, done in [*cuts, (len(stream), len(stream))]:
        rest = [offset for offset in stream if position.following is None or offset >= position.following]
        sent = rest[:delivered]
        lowest = min(done, len(sent)) + 1
        position.delivered(at(*sent), 1)
        settled.update(sent[: lowest - 1])
        position.lost(lowest)
    assert settled == set(stream)
