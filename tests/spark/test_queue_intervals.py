"""The time between two batches of a queue."""

from __future__ import annotations

import pytest

from reliable_mq.errors import ConsumeError
from reliable_mq.spark.queue_intervals import IntervalMonitor, longest_linger


@pytest.mark.parametrize(
    ("since", "backlog", "seconds"),
    [(60.0, False, 0.1), (0.5, True, 0.1), (5.0, True, 0.5), (60.0, True, 5.0), (3600.0, True, 5.0)],
)
def test_a_batch_waits_for_a_part_of_the_trigger_interval(since: float, backlog: bool, seconds: float) -> None:
    """This applies if the queue has more messages. Otherwise the wait is short."""
    assert longest_linger(since, backlog=backlog) == seconds


def test_a_batch_taken_back_soon_is_not_over_the_timeout() -> None:
    """Its queue was deleted, since no consumer timeout is that short."""
    intervals = IntervalMonitor()
    for unacked in (3600.0, 5.0, 5.0, 3600.0):
        intervals.taken_back = True
        intervals.committed(unacked)
    intervals.taken_back = True
    with pytest.raises(ConsumeError, match="2 batches in a row"):
        intervals.committed(3600.0)
