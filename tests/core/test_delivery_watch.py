"""A consumer that gets no deliveries although messages are ready.

The tests check when it connects again, and when it must not.
"""

from __future__ import annotations

import pytest

from reliable_mq.core.consumer.delivery_watch import DeliveryWatch


@pytest.fixture
def watch() -> DeliveryWatch:
    """The watch of a consumer with two hosts, after a delivery."""
    watch = DeliveryWatch(2)
    watch.subscribed(1)
    return watch


def test_two_counts_with_ready_messages_end_a_connection(watch: DeliveryWatch) -> None:
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)
    assert watch.check(1, 0)
    assert watch.counted(9, 1)


def test_a_count_without_ready_messages_begins_anew(watch: DeliveryWatch) -> None:
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)
    assert not watch.counted(0, 1)
    assert not watch.counted(5, 1)
    assert watch.counted(5, 1)


def test_a_delivery_between_two_counts_begins_anew(watch: DeliveryWatch) -> None:
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)
    assert not watch.check(2, 0)
    assert watch.check(2, 0)
    assert not watch.counted(5, 2)
    assert watch.counted(5, 2)


def test_a_delivery_that_comes_with_the_count_begins_anew(watch: DeliveryWatch) -> None:
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)
    assert watch.check(1, 0)
    assert not watch.counted(5, 2)
    assert not watch.counted(5, 2)
    assert watch.counted(5, 2)


def test_nothing_is_counted_while_a_delivery_is_unsettled(watch: DeliveryWatch) -> None:
    """The consumer may be full or paused, so the broker is not to blame."""
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)
    assert not watch.check(1, 1)
    assert watch.check(1, 0)
    assert not watch.counted(5, 1)


def test_another_subscription_begins_anew(watch: DeliveryWatch) -> None:
    assert not watch.counted(5, 1)
    watch.subscribed(1)
    assert not watch.counted(5, 1)


def test_each_host_is_tried_once_until_a_delivery(watch: DeliveryWatch) -> None:
    """Messages for another consumer must not cost a connection every minute."""
    for _host in range(2):
        assert watch.check(1, 0)
        assert not watch.counted(5, 1)
        assert watch.check(1, 0)
        assert watch.counted(5, 1)
        watch.subscribed(1)
    assert not watch.check(1, 0)
    assert not watch.check(2, 0)
    assert watch.check(2, 0), "a delivery came in the meantime"
