"""Counts of a relay's queue: empty, moved, and other consumers."""

from __future__ import annotations

from reliable_mq.codec.methods import QueueState
from reliable_mq.core.stage.counts import QueueCounts


def of(ready: int, consumers: int = 1) -> QueueState:
    return QueueState("orders", ready, consumers)


def renew(counts: QueueCounts) -> None:
    """Renew the subscription, which two empty counts in a row require."""
    assert counts.wants_renewal
    assert not counts.drained
    counts.renewed(of(0, consumers=0))
    assert not counts.wants_renewal
    assert counts.wants_count
    counts.counted(of(0), 0)
    assert not counts.wants_count


def test_a_queue_is_drained_by_two_empty_counts_in_a_row() -> None:
    counts = QueueCounts()
    for ready in (0, 3, 0):
        counts.counted(of(ready), 0)
        assert not counts.drained
        assert not counts.wants_renewal
        assert counts.ready == ready
    counts.counted(of(0), 0)
    renew(counts)
    assert counts.drained
    counts.counted(of(0), 1)
    assert not counts.drained


def test_a_delivery_between_counts_shows_a_queue_was_not_empty() -> None:
    counts = QueueCounts()
    counts.counted(of(0), 0)
    counts.delivered(1)
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    assert not counts.drained
    counts.counted(of(0), 0)
    renew(counts)
    assert counts.drained


def test_deliveries_on_their_way_show_a_queue_is_not_empty() -> None:
    """The leader still counts the earlier subscription, which has them."""
    counts = QueueCounts()
    counts.set_up(of(1, consumers=0))
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    counts.renewed(of(0, consumers=1))
    for _ in range(3):
        counts.counted(of(0, consumers=2), 0)
        assert not counts.drained
        assert not counts.others(2, 0, subscribed=True)
    counts.delivered(1)
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    renew(counts)
    assert counts.drained


def test_consumers_that_were_there_before_are_allowed_for() -> None:
    counts = QueueCounts()
    counts.set_up(of(1, consumers=2))
    counts.counted(of(0, consumers=3), 0)
    counts.counted(of(0, consumers=3), 0)
    counts.renewed(of(0, consumers=3))
    counts.counted(of(0, consumers=4), 0)
    assert not counts.drained
    counts.counted(of(0, consumers=3), 0)
    assert counts.wants_renewal
    counts.renewed(of(0, consumers=2))
    counts.counted(of(0, consumers=3), 0)
    assert counts.drained


def test_messages_returned_to_the_new_one_are_on_their_way() -> None:
    """The node returned what the earlier subscription had, and the queue gave it to the new one."""
    counts = QueueCounts()
    counts.set_up(of(1, consumers=0))
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    for between in (of(0, consumers=1), of(1, consumers=0)):  # returned after that count, or before it
        assert counts.wants_renewal
        counts.renewed(between)
        counts.counted(of(0), 0)
        assert not counts.drained
    counts.renewed(of(0, consumers=0))  # in doubt
    for consumers in (2, 2, 1):
        assert not counts.wants_renewal
        counts.counted(of(0, consumers), 0)
        assert not counts.drained
    renew(counts)
    assert counts.drained


def test_counts_of_an_earlier_activity_do_not_drain_the_queue() -> None:
    counts = QueueCounts()
    counts.set_up(of(1))
    counts.counted(of(0), 0)
    counts.activated(0)
    counts.counted(of(0), 0)
    assert not counts.drained
    assert not counts.has_moved(0)


def test_everything_is_moved_that_was_ready_or_once_it_is_empty() -> None:
    counts = QueueCounts()
    counts.set_up(of(3))
    counts.activated(10)
    assert counts.ready == 3
    assert not counts.has_moved(12)
    assert counts.has_moved(13)
    counts.counted(of(0), 0)
    counts.counted(of(0), 0)
    renew(counts)
    assert counts.has_moved(10)


def test_a_count_without_the_relay_says_nothing() -> None:
    """RabbitMQ reports 0 messages and 0 consumers for a queue without a leader."""
    counts = QueueCounts()
    counts.set_up(of(3))
    counts.activated(0)
    for _ in range(3):
        counts.counted(of(0, consumers=0), 0)
        assert not counts.drained
        assert not counts.has_moved(0)
        assert counts.ready == 3


def test_what_was_ready_is_counted_again_after_a_count_in_doubt() -> None:
    """It includes deliveries, and as many as may be on their way."""
    counts = QueueCounts()
    counts.set_up(of(0, consumers=0))
    counts.activated(10)
    counts.subscribed(10, 0, 8)
    assert counts.unknown
    assert not counts.has_moved(10)
    counts.counted(of(0, consumers=0), 0)
    counts.delivered(2)
    assert counts.unknown
    counts.counted(of(5), 2)
    assert not counts.unknown
    counts.counted(of(3), 2)
    assert not counts.has_moved(24)
    assert counts.has_moved(25)
    counts.set_up(of(0, consumers=2))
    assert not counts.unknown


def test_an_empty_queue_is_known_to_be_so_after_a_renewal() -> None:
    """Until then messages may be on their way."""
    counts = QueueCounts()
    counts.set_up(of(0, consumers=0))
    counts.activated(0)
    counts.subscribed(0, 0, 8)
    for _ in range(2):
        assert not counts.has_moved(0)
        counts.counted(of(0), 0)
    assert not counts.has_moved(0)
    renew(counts)
    assert counts.has_moved(0)


def test_other_consumers_are_found_after_a_count_in_doubt() -> None:
    """The relay is one of those counted once it has subscribed."""
    for subscribed in (False, True):
        counts = QueueCounts()
        counts.set_up(of(0, consumers=0))
        counts.activated(0)
        if subscribed:
            counts.subscribed(0, 0, 8)
        counts.counted(of(0, consumers=2 + subscribed), 0)
        counts.counted(of(0, consumers=3), 0)
        counts.renewed(of(0, consumers=2))
        counts.counted(of(0, consumers=3), 0)
        assert counts.drained
        counts.counted(of(0, consumers=4), 0)
        assert not counts.drained


def test_other_consumers_are_warned_of_once_until_they_are_gone() -> None:
    counts = QueueCounts()
    found = [counts.others(consumers, 0, subscribed=True) for consumers in (3, 3, 3, 1, 2, 2, 2)]
    assert found == [0, 2, 0, 0, 0, 1, 0]


def test_others_that_a_leader_could_not_count_are_not_gone() -> None:
    counts = QueueCounts()
    found = [counts.others(consumers, 0, subscribed=True) for consumers in (3, 3, 0, 3, 3, 3)]
    assert found == [0, 2, 0, 0, 0, 0]


def test_own_consumers_that_are_cancelled_are_no_others() -> None:
    counts = QueueCounts()
    counts.subscribed(5, 10, 8)
    assert [counts.others(2, moved, subscribed=True) for moved in (5, 14, 15, 15)] == [0, 0, 0, 1]


def test_no_others_are_counted_while_the_subscription_changes() -> None:
    counts = QueueCounts()
    found = [counts.others(2, 0, subscribed=subscribed) for subscribed in (True, False, True, True)]
    assert found == [0, 0, 0, 1]


def test_a_queue_that_had_consumers_at_the_set_up_is_shared() -> None:
    """The fewest of all set-ups do not count: this relay may have been one before."""
    counts = QueueCounts()
    counts.set_up(of(1, consumers=0))
    assert not counts.shared
    counts.set_up(of(1, consumers=1))
    assert counts.shared
    counts.counted(of(0), 0)
    assert counts.shared
    counts.set_up(of(0, consumers=0))
    counts.subscribed(0, 0, 8)
    counts.counted(of(0), 0)
    assert not counts.shared
    counts.set_up(of(0, consumers=0))
    counts.subscribed(0, 0, 8)
    counts.counted(of(0, consumers=2), 0)
    assert counts.shared
