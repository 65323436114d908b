"""One active consumer of a queue: order, failover, and keeping the role."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import Gate, Handler, consumers, numbered, publish, restarted
from reliable_mq import Consumer, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline", "consumer_api")]


@pytest.fixture(params=["quorum", "classic"])
def orders(request: pytest.FixtureRequest) -> Iterator[Queue]:
    return Queue("orders", type=request.param, single_active_consumer=True)


def active(vhost: VirtualHost) -> list[tuple[str, int]]:
    """Return tag and prefetch of the queue's active consumers."""
    return subscribed(vhost, lambda one: one["active"])


def subscribed(vhost: VirtualHost, which: Callable[[dict[str, Any]], bool] = lambda _: True) -> list[tuple[str, int]]:
    found = [one for one in consumers(vhost) if one["queue_name"] == "orders" and which(one)]
    return [(one["consumer_tag"], one["prefetch_count"]) for one in found]


def test_one_consumer_gets_all_in_order_then_the_next_goes_on(any_vhost: VirtualHost, orders: Queue) -> None:
    one, other = Handler(), Handler()
    with (
        Consumer(any_vhost.url, orders, one, name="one") as first,
        Consumer(any_vhost.url, orders, other, name="other", prefetch=10),
    ):
        publish(any_vhost, "orders", numbered(200))
        one.wait_done(200)
        assert other.begun == []
        wait_until(lambda: first.statistics.acked == 200, timeout=10, what="all acked")
        first.close()
        publish(any_vhost, "orders", numbered(200, first=200))
        other.wait_done(200)
    assert one.bodies == numbered(200)
    assert other.bodies == numbered(200, first=200)


def test_after_a_lost_connection_the_next_active_keeps_order(
    any_vhost: VirtualHost, orders: Queue, fault_proxy: FaultProxyFactory
) -> None:
    """The next one starts at the oldest unacked message; the first waits for the role."""
    proxy = fault_proxy(any_vhost.url)
    with Gate(lambda delivery: delivery.body == b"5") as gate:
        one, other = Handler(then=gate), Handler()
        with (
            Consumer(proxy.url, orders, one, name="one", ack_every=1, ack_interval=0) as first,
            Consumer(any_vhost.url, orders, other, name="other") as second,
        ):
            publish(any_vhost, "orders", numbered(20))
            one.wait_begun(6)
            wait_until(lambda: any_vhost.live_counts(["orders"])["orders"] == 15, timeout=10, what="five acked")
            assert active(any_vhost) == [("one", 200)]
            proxy.cut()
            other.wait_done(15)
            wait_until(lambda: first.connected and first.reconnects, timeout=20, what="the first one is back")
            gate.open()
            publish(any_vhost, "orders", numbered(5, first=20))
            other.wait_done(20)
            assert [tag for tag, _ in active(any_vhost)] == ["other"]
            wait_until(lambda: second.statistics.acked == 20, timeout=10, what="all acked")
    assert one.bodies == numbered(6), "the handler that ran went on, and nothing began after it"
    assert other.bodies == numbered(20, first=5)


def test_when_the_active_one_stops_the_next_goes_on_in_order(any_vhost: VirtualHost, orders: Queue) -> None:
    """Deliveries that have not begun come before undelivered and new messages."""
    with Gate(lambda delivery: delivery.body == b"5") as gate:
        one, other = Handler(then=gate), Handler()
        with (
            Consumer(any_vhost.url, orders, one, name="one", prefetch=10) as first,
            Consumer(any_vhost.url, orders, other, name="other", prefetch=10) as second,
        ):
            wait_until(lambda: [tag for tag, _ in active(any_vhost)] == ["one"], timeout=20, what="one has the role")
            publish(any_vhost, "orders", numbered(40))
            one.wait_begun(6)
            first.stop()
            publish(any_vhost, "orders", numbered(10, first=40))
            assert second.statistics.delivered == 0
            gate.open()
            first.close()
            other.wait_done(44)
            wait_until(lambda: second.statistics.acked == 44, timeout=10, what="all acked")
    assert one.bodies == numbered(6)
    assert other.bodies == numbered(44, first=6)


def test_the_order_survives_one_restart_after_the_other(any_vhost: VirtualHost) -> None:
    """Messages that were prefetched by each are not taken for suspects, which are handled out of order."""
    orders = Queue("orders", single_active_consumer=True)
    with Publisher(any_vhost.url, topology=[orders]) as publisher:
        publisher.connect()
    publish(any_vhost, "orders", numbered(30))
    handled = restarted(Consumer, any_vhost.url, orders, 4)
    handler = Handler()
    with Consumer(any_vhost.url, orders, handler) as consumer:
        handler.wait_done(30 - len(handled))
        assert not consumer.statistics.quarantined
    assert handled + handler.bodies == numbered(30)


def test_a_new_prefetch_keeps_the_role_while_a_handler_runs(
    any_vhost: VirtualHost, orders: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefetch takes effect once nothing is unacked.

    Until then no other consumer is active, and the order holds.
    """
    caplog.set_level(logging.INFO)
    with Gate() as gate:
        one, other = Handler(then=gate), Handler()
        with (
            Consumer(any_vhost.url, orders, one, name="one", prefetch=20) as first,
            Consumer(any_vhost.url, orders, other, name="other") as second,
        ):
            publish(any_vhost, "orders", numbered(20))
            # All are unacked at first. If some came later, there would be a moment with nothing unacked before them.
            wait_until(lambda: first.statistics.delivered == 20, timeout=20, what="all delivered")
            one.wait_begun(1)
            first.prefetch = 40
            wait_until(lambda: "prefetch=40 takes effect once" in caplog.text, timeout=10, what="it is put off")
            assert active(any_vhost) == [("one", 20)]
            assert second.statistics.delivered == 0
            gate.open()
            one.wait_done(20)
            assert one.bodies == numbered(20)
            wait_until(lambda: ("one", 40) in subscribed(any_vhost), timeout=20, what="the new prefetch")
            assert first.statistics.redelivered == second.statistics.redelivered == 0
            publish(any_vhost, "orders", numbered(20, first=20))
            wait_until(lambda: len(one.done) + len(other.done) == 40, timeout=20, what="all handled, by either")
            wait_until(
                lambda: first.statistics.acked + second.statistics.acked == 40, timeout=10, what="all of them acked"
            )
            assert first.reconnects == 0
    assert one.bodies[20:] + other.bodies == numbered(20, first=20), "one of them has the role"
