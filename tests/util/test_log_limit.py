"""Rate-limited log lines: the first at once, then one for all later ones."""

from __future__ import annotations

from reliable_mq._util.logs import LogLimit


def test_what_was_held_back_is_counted_in_the_next_line() -> None:
    now = 0.0
    limit = LogLimit(60, lambda: now)
    assert limit.count() == 1
    now = 59.0
    assert [limit.count(), limit.count(2)] == [0, 0]
    now = 60.0
    assert limit.count() == 4
    assert limit.count() == 0
    now = 120.0
    assert limit.count() == 2
