"""The wait of a link between two reads."""

from __future__ import annotations

import pytest

from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, SetPrefetch
from reliable_mq.connection.channel import ReadThrottle


def test_without_consumers_nothing_is_waited_for() -> None:
    pace = ReadThrottle()
    pace.follow(CheckQueue("orders"))
    assert pace.gap_after(100) == 0


@pytest.mark.parametrize(("prefetch", "gap"), [(1, 2.5e-6), (200, 5e-4), (400, 1e-3), (10_000, 1e-3), (0, 1e-3)])
def test_the_gap_follows_the_prefetch_up_to_a_millisecond(prefetch: int, gap: float) -> None:
    pace = ReadThrottle()
    pace.follow(SetPrefetch(prefetch))
    assert pace.gap_after(100) == pytest.approx(gap)


def test_a_large_read_is_followed_by_the_next_one_at_once() -> None:
    pace = ReadThrottle()
    pace.follow(SetPrefetch(0))
    assert pace.gap_after(64 * 1024) == 0


def test_a_small_prefetch_does_not_slow_another_consumer_down() -> None:
    pace = ReadThrottle()
    pace.follow(SetPrefetch(400))
    pace.follow(SetPrefetch(1))
    assert pace.gap_after(100) == pytest.approx(1e-3)


def test_a_prefetch_that_was_lowered_counts() -> None:
    pace = ReadThrottle()
    pace.follow(SetPrefetch(400))
    pace.follow(Consume("orders", "tag"))
    pace.follow(Cancel("tag"))
    assert pace.gap_after(100) == 0
    pace.follow(SetPrefetch(4))
    assert pace.gap_after(100) == pytest.approx(1e-5)


def test_the_prefetch_of_a_consumer_that_replaces_another_counts() -> None:
    pace = ReadThrottle()
    for step in (SetPrefetch(400), Consume("orders", "tag"), SetPrefetch(4), Consume("orders", "tag#2")):
        pace.follow(step)
    assert pace.gap_after(100) == pytest.approx(1e-3)
    pace.follow(Cancel("tag"))
    assert pace.gap_after(100) == pytest.approx(1e-5)
