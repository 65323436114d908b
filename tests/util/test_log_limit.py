"""Rate-limited log lines: the first at once, then one for all later ones."""

from __future__ import annotations

import threading

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


def test_a_signal_handler_may_count_amid_a_count() -> None:
    """Python runs it at any step, for example when the clock is read."""
    counted: list[int] = []

    def clock() -> float:
        if len(counted) < 1:
            counted.append(0)
            counted.append(limit.count())
        return 0.0

    limit = LogLimit(60, clock)
    counting = threading.Thread(target=lambda: counted.append(limit.count()), daemon=True)
    counting.start()
    counting.join(10)
    assert counted == [0, 2, 0]
