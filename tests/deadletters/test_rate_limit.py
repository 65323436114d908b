"""The rate of a replay: a hard upper limit that is nearly reached."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.deadletters.replay import RateLimit


def times(rate: float, idle: list[float], late: float = 0.0) -> list[float]:
    """Return the times of publishes for these pauses between new messages.

    The clock wakes up late by `late` seconds.
    """
    pace, now, published = RateLimit(rate), 1000.0, []
    for pause in idle:
        now += pause
        if now < pace.due():
            now = pace.due() + late
        pace.published(now)
        published.append(now)
    return published


@given(
    rate=st.floats(0.01, 200.0),
    idle=st.lists(st.one_of(st.just(0.0), st.floats(0.0, 0.1), st.floats(0.0, 300.0)), max_size=200),
    late=st.floats(0.0, 0.02),
)
def test_it_is_never_above_the_rate_in_any_second(rate: float, idle: list[float], late: float) -> None:
    """A fractional rate holds in any window of ceil(rate) / rate seconds."""
    published = times(rate, idle, late)
    most = ceil(rate)
    for first, beyond in zip(published, published[most:], strict=False):
        assert beyond - first >= most / rate - 1e-9


def test_time_without_anything_to_publish_is_not_made_up_for() -> None:
    published = times(50, [0.0] * 100 + [80.0] + [0.0] * 200)
    after = [time - published[100] for time in published[100:]]
    assert sum(time < 1.0 - 1e-6 for time in after) == 50
    assert after[-1] == pytest.approx(200 / 50)


@pytest.mark.parametrize("rate", [0.5, 1.5, 50, 1000])
def test_it_keeps_up_with_the_rate_though_waits_take_longer(rate: float) -> None:
    count = max(int(rate * 4), 10)
    published = times(rate, [0.0] * count, late=0.0005)
    assert published[-1] - published[0] <= (count - 1) / rate * 1.01 + 0.01


def test_publishes_are_spread_over_the_second() -> None:
    published = times(10, [0.0] * 10)
    gaps = [later - earlier for earlier, later in pairwise(published)]
    assert min(gaps) > 0.09
