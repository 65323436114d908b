"""Deliveries of the pull API."""

from __future__ import annotations

from typing import Any, cast

from reliable_mq import Queue, RetryPolicy
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.pull import PulledDelivery, leave
from tests.core.deliveries import delivery


class Puller:
    """A caller of ``get``, one delivery at a time, on a session without a connection."""

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        options = ConsumerOptions("amqp://localhost/", Queue("orders"), None, name="c", retry=retry or RetryPolicy())
        self.session = options.new_session()
        self.now = 0.0

    def get(self) -> PulledDelivery:
        [item] = self.session.poll(self.now).dispatch
        return PulledDelivery(cast("Any", item), cast("Any", self))

    def settle(self, _pulled: PulledDelivery, result: Any) -> None:
        self.session.finished([result], self.now)
        self.session.poll(self.now)

    def time_out(self) -> None:
        """Let the broker take back what was pulled, close the channel and deliver again."""
        self.now += 100.0
        self.session.timed_out(ConsumerTimeout(60.0), self.now, 0.0)
        self.session.lost(1)

    def deliver_again(self) -> None:
        self.now += 100.0
        self.session.opened(2, 1)
        self.session.delivered([delivery(1, redelivered=True)], self.now)


def test_a_pulled_delivery_that_timed_out_has_failed_once() -> None:
    """The late verdict belongs to the attempt that was counted as failed."""
    puller = Puller()
    puller.session.opened(1, 1)
    puller.session.delivered([delivery(1)], puller.now)
    pulled = puller.get()
    puller.time_out()
    pulled.retry()
    assert (puller.session.statistics.failed, puller.session.statistics.stale) == (1, 1)
    puller.deliver_again()
    assert puller.get().attempt == 2


def test_a_timeout_after_retries_counts_on() -> None:
    puller = Puller(RetryPolicy(max_attempts=9, delays=(1.0,), backend="memory"))
    puller.session.opened(1, 1)
    puller.session.delivered([delivery(1)], puller.now)
    for attempt in (1, 2, 3):
        pulled = puller.get()
        assert pulled.attempt == attempt
        pulled.retry()
        puller.now += 1.0
    assert puller.get().attempt == 4
    puller.time_out()
    puller.deliver_again()
    assert puller.get().attempt == 5


class SettledMeanwhile(PulledDelivery):
    """A delivery that another thread settles while the end of its block looks at it."""

    @property
    def settled(self) -> bool:
        before = super().settled
        if not before:
            self.mark_settled()
        return before


class SettledResults:
    """A subscription that keeps the results of its pulled deliveries."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def settle(self, pulled: PulledDelivery, result: Any) -> None:
        pulled.mark_settled()
        self.results.append(result)


def test_what_another_thread_settles_at_the_end_stops_no_other() -> None:
    """Otherwise the deliveries after it, which were handled, would be requeued."""
    first, second = delivery(1), delivery(2)
    subscription = SettledResults()
    kept = cast("Any", subscription)
    leave([SettledMeanwhile(first, kept), PulledDelivery(second, kept)], ack=True)
    assert subscription.results == [second]
