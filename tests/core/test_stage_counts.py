"""Counts of a relay's queue: empty, moved, and others that consume it."""

from __future__ import annotations

from reliable_mq.core.stage.counts import QueueCounts


def test_a_queue_is_drained_by_two_empty_counts_in_a_row() -> None:
    counts = QueueCounts()
    for ready in (0, 3, 0):
        counts.counted(ready, 0)
        assert not counts.drained
        assert counts.ready == ready
    counts.counted(0, 0)
    assert counts.drained
    counts.counted(0, 1)
    assert not counts.drained


def test_a_delivery_between_two_counts_shows_that_it_was_not_empty() -> None:
    counts = QueueCounts()
    counts.counted(0, 0)
    counts.delivered(1)
    counts.counted(0, 0)
    counts.counted(0, 0)
    assert not counts.drained
    counts.counted(0, 0)
    assert counts.drained


def test_counts_of_an_earlier_activity_do_not_drain_the_queue() -> None:
    counts = QueueCounts()
    counts.set_up(1)
    counts.counted(0, 0)
    counts.activated(0)
    counts.counted(0, 0)
    assert not counts.drained
    assert not counts.has_moved(0)


def test_everything_is_moved_that_was_ready_or_once_it_is_empty() -> None:
    counts = QueueCounts()
    counts.set_up(3)
    counts.activated(10)
    assert counts.ready == 3
    assert not counts.has_moved(12)
    assert counts.has_moved(13)
    counts.counted(0, 0)
    counts.counted(0, 0)
    assert counts.has_moved(10)


def test_other_consumers_are_warned_of_once_until_they_are_gone() -> None:
    counts = QueueCounts()
    found = [counts.others(consumers, 0, subscribed=True) for consumers in (3, 3, 3, 1, 2, 2, 2)]
    assert found == [0, 2, 0, 0, 0, 1, 0]


def test_own_consumers_that_are_cancelled_are_no_others() -> None:
    counts = QueueCounts()
    counts.subscribed(5, 10)
    assert [counts.others(2, moved, subscribed=True) for moved in (5, 14, 15, 15)] == [0, 0, 0, 1]


def test_no_others_are_counted_while_the_subscription_changes() -> None:
    counts = QueueCounts()
    found = [counts.others(2, 0, subscribed=subscribed) for subscribed in (True, False, True, True)]
    assert found == [0, 0, 0, 1]
