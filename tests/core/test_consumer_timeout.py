"""The consumer timeout: overdue and forgotten deliveries, and channel closes."""

from __future__ import annotations

import random
from math import inf

import pytest

from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout, ConsumerTimeoutMonitor, consumer_timeout_of
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.reconnect import ConnectionLoss
from tests.core.sessions import items


class Channel:
    """The timeout monitor of a channel, and the deliveries on it."""

    def __init__(self, timeout: float | None = 100.0) -> None:
        self.acks = AckBatcher(ack_interval=0.0, prefetch=0)
        self.acks.opened(1)
        self.ages = ConsumerTimeoutMonitor(timeout, self.acks)
        self._last = 0

    def deliver(self, count: int, now: float) -> list[Delivery]:
        deliveries = items(count, self._last + 1)
        self._last += count
        self.acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        self.ages.delivered(deliveries, now)
        return deliveries

    def finish(self, *deliveries: Delivery) -> None:
        self.acks.finished([one.delivery_tag for one in deliveries], 0.0)
        self.acks.flush()


def test_a_delivery_is_overdue_once_at_75_percent_of_the_timeout() -> None:
    channel = Channel()
    first, second = channel.deliver(2, 10.0)
    [third] = channel.deliver(1, 20.0)
    assert channel.ages.deadline == 10.0 + 75
    assert channel.ages.newly_overdue(84.9) == []
    channel.finish(second)
    assert channel.ages.newly_overdue(85.0) == [first]
    assert channel.ages.deadline == 20.0 + 75
    assert channel.ages.newly_overdue(96.0) == [third]
    assert channel.ages.deadline == inf
    assert channel.ages.newly_overdue(1000.0) == []


def test_what_was_finished_in_time_is_forgotten() -> None:
    channel = Channel()
    channel.finish(*channel.deliver(3, 0.0))
    assert channel.ages.newly_overdue(1.0) == []
    assert channel.ages.deadline == inf


def test_what_was_finished_in_time_behind_a_gap_is_not_overdue() -> None:
    channel = Channel()
    [first] = channel.deliver(1, 0.0)
    channel.finish(*channel.deliver(3, 1.0))
    assert channel.ages.newly_overdue(80.0) == [first]
    assert channel.ages.deadline == inf


def test_where_the_broker_has_no_timeout_nothing_is_overdue() -> None:
    channel = Channel(None)
    deliveries = channel.deliver(2, 0.0)
    assert channel.ages.deadline == inf
    assert channel.ages.newly_overdue(1e9) == []
    assert channel.ages.unacked(500.0, 1000.0) == deliveries  # the broker has named its timeout


def test_what_has_timed_out_by_the_clock_of_the_broker() -> None:
    """The broker starts the clock before the delivery arrives.

    So a delivery counts as timed out a second, or a fiftieth of the timeout, early.
    """
    channel = Channel()
    first = channel.deliver(2, 0.0)
    channel.ages.newly_overdue(80.0)  # overdue
    second = channel.deliver(2, 80.0)
    channel.finish(first[0])
    assert channel.ages.unacked(100.0, 97.9) == []
    assert channel.ages.unacked(100.0, 98.0) == [first[1]]
    assert channel.ages.unacked(10.0, 89.0) == [first[1], *second]
    channel.ages.clear()
    assert channel.ages.unacked(0.0, 1000.0) == []
    assert channel.ages.deadline == inf


def test_one_that_is_never_finished_keeps_no_others() -> None:
    """The number of kept deliveries is proportional to the outstanding ones.

    The later deliveries finish in any order.
    """
    channel = Channel()
    [stuck] = channel.deliver(1, 0.0)
    chance = random.Random(1)
    open_: list[Delivery] = []
    for now in range(2000):
        open_ += channel.deliver(5, float(now))
        chance.shuffle(open_)
        while len(open_) > 10:
            channel.finish(open_.pop())
        assert channel.ages._kept <= 2 * (channel.acks.outstanding + 5) + 64
        kept = sum(len(read) for _, read in (*channel.ages._old, *channel.ages._young))
        assert kept == channel.ages._kept
        if now == 500:
            assert stuck in channel.ages.newly_overdue(float(now))
    assert set(channel.ages.unacked(0.0, 2000.0)) == {stuck, *open_}


TIMED_OUT = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 1500 ms. This"


@pytest.mark.parametrize(
    ("code", "text", "strike"),
    [
        (406, TIMED_OUT, ConsumerTimeout(1.5)),
        (406, "PRECONDITION_FAILED - consumer timed out", ConsumerTimeout(None)),
        (406, "PRECONDITION_FAILED - unknown delivery tag 7", None),
        (320, TIMED_OUT, None),
        (None, TIMED_OUT, None),
    ],
)
def test_which_loss_of_a_channel_is_a_timeout(code: int | None, text: str, strike: ConsumerTimeout | None) -> None:
    assert consumer_timeout_of(ConnectionLoss(code, text, "channel", by_broker=True)) == strike
