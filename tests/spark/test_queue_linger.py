"""The time for which a batch waits for more deliveries."""

from __future__ import annotations

import pytest

from reliable_mq.spark.queue_batches import longest_linger


@pytest.mark.parametrize(
    ("since", "backlog", "seconds"),
    [(60.0, False, 0.1), (0.5, True, 0.1), (5.0, True, 0.5), (60.0, True, 5.0), (3600.0, True, 5.0)],
)
def test_a_batch_waits_for_a_part_of_the_trigger_interval(since: float, backlog: bool, seconds: float) -> None:
    """This applies if the queue has more messages. Otherwise the wait is short."""
    assert longest_linger(since, backlog=backlog) == seconds
