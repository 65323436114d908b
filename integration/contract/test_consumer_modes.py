"""Prefetch, batched acks, automatic acks, and rejected options of a consumer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import Gate, Handler, consumers, numbered, publish
from reliable_mq import ConfigurationError, Consumer, Queue, RetryPolicy, UsageError
from reliable_mq.stores import MemoryStore
from reliable_mq.testing import Frame
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")


def seen_by_the_broker(vhost: VirtualHost) -> list[tuple[str, int, bool]]:
    seen = [(one["queue_name"], one["prefetch_count"], one["ack_required"]) for one in consumers(vhost)]
    return [one for one in seen if not one[0].endswith(".quarantine")]


# Prefetch


@pytest.mark.parametrize("kind", ["quorum", pytest.param("classic", marks=pytest.mark.soak)])
def test_the_prefetch_may_change_in_flight(any_vhost: VirtualHost, kind: str) -> None:
    """The broker uses the new prefetch; no message is lost, repeated or interrupted."""
    orders = Queue("orders", type=kind)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(any_vhost.url, orders, handler, prefetch=5) as consumer:
            publish(any_vhost, "orders", numbered(100))
            wait_until(lambda: consumer.statistics.delivered == 5, timeout=10, what="5 delivered")
            assert seen_by_the_broker(any_vhost) == [("orders", 5, True)]
            consumer.prefetch = 40
            assert consumer.prefetch == 40
            wait_until(lambda: consumer.statistics.delivered >= 40, timeout=10, what="as many as it allows")
            assert consumer.statistics.delivered <= 45, "both limits may add up, no more"
            wait_until(lambda: seen_by_the_broker(any_vhost) == [("orders", 40, True)], timeout=10, what="raised")
            consumer.prefetch = 10
            wait_until(lambda: seen_by_the_broker(any_vhost) == [("orders", 10, True)], timeout=10, what="lowered")
            gate.open()
            handler.wait_done(100)
            wait_until(lambda: consumer.statistics.acked == 100, timeout=10, what="all acked")
            assert consumer.reconnects == 0
            assert consumer.statistics.redelivered == 0
    assert handler.bodies == numbered(100)


def test_a_temporary_queue_outlives_a_change_of_prefetch(any_vhost: VirtualHost) -> None:
    """RabbitMQ deletes an auto-delete queue with its last consumer."""
    orders = Queue("orders", type="classic", auto_delete=True)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(any_vhost.url, orders, handler, prefetch=1) as consumer:
            publish(any_vhost, "orders", numbered(10))
            handler.wait_begun(1)
            consumer.prefetch = 5
            wait_until(lambda: seen_by_the_broker(any_vhost) == [("orders", 5, True)], timeout=10, what="raised")
            gate.open()
            handler.wait_done(10)
            assert consumer.reconnects == 0
    assert handler.bodies == numbered(10)


def test_the_last_prefetch_set_holds_over_a_reconnect(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The last one of several counts, set before the start or during an outage."""
    proxy = fault_proxy(vhost.url)
    consumer = Consumer(proxy.url, ORDERS, Handler(), prefetch=5)
    consumer.prefetch = 6
    with consumer:
        assert seen_by_the_broker(vhost) == [("orders", 6, True)]
        for prefetch in (7, 8, 9):
            consumer.prefetch = prefetch
        wait_until(lambda: seen_by_the_broker(vhost) == [("orders", 9, True)], timeout=10, what="9")
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: not consumer.connected, timeout=10, what="lost")
        consumer.prefetch = 11
        proxy.accept_connections()
        wait_until(lambda: consumer.connected, timeout=30, what="back")
        wait_until(lambda: seen_by_the_broker(vhost) == [("orders", 11, True)], timeout=10, what="11")


def test_a_prefetch_that_is_set_while_it_subscribes_takes_effect(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """It is set between basic.qos and consume-ok; the consumer subscribes again."""
    proxy = fault_proxy(vhost.url)
    consumer = Consumer(proxy.url, ORDERS, Handler(), prefetch=5)

    def change(_direction: str, frame: Frame) -> list[Frame]:
        if frame.name == "basic.consume" and consumer.prefetch == 5:
            consumer.prefetch = 9
        return [frame]

    proxy.rewrite(change, "to_broker")
    with consumer:
        wait_until(lambda: seen_by_the_broker(vhost) == [("orders", 9, True)], timeout=10, what="9")


def test_a_prefetch_that_does_not_fit_is_refused_without_effect(vhost: VirtualHost) -> None:
    with Consumer(vhost.url, ORDERS, Handler(), prefetch=50, ack_every=20, batch_size=10) as consumer:
        for wrong in (-1, 19, True, "9", 65536):
            with pytest.raises(ConfigurationError):
                consumer.prefetch = wrong
        assert consumer.prefetch == 50
        assert seen_by_the_broker(vhost) == [("orders", 50, True)]


def test_a_prefetch_of_one_gives_one_at_a_time(vhost: VirtualHost) -> None:
    """The next message is delivered when the last one is acked."""
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler, prefetch=1) as consumer:
        publish(vhost, "orders", numbered(50))
        handler.wait_done(50)
        wait_until(lambda: consumer.statistics.acked == 50, timeout=10, what="acked")
        assert consumer.statistics.acks_sent == 50


def test_no_prefetch_is_warned_of(vhost: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler()
    with Consumer(vhost.url, Queue("orders", type="classic"), handler, prefetch=0) as consumer:
        publish(vhost, "orders", numbered(3000))
        wait_until(lambda: consumer.statistics.acked == 3000, timeout=30, what="acked")
    assert "prefetch=0" in caplog.text


# Acks


def test_acks_are_batched_by_count(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Thousands of deliveries need only dozens of ack frames.

    All messages are there when the first handler ends: a consumer that waits for messages acks more often.
    """
    proxy = fault_proxy(vhost.url)
    with (
        Gate() as gate,
        Consumer(proxy.url, ORDERS, Handler(then=gate), prefetch=300, ack_every=100) as consumer,
    ):
        publish(vhost, "orders", numbered(2000))
        gate.open()
        wait_until(lambda: consumer.statistics.acked == 2000, timeout=60, what="acked")
        frames = consumer.statistics.acks_sent
        assert frames < 2000 / 20
        wait_until(lambda: proxy.forwarded("basic.ack", "to_broker") >= frames, timeout=30, what="forwarded")
        assert proxy.forwarded("basic.ack", "to_broker") == frames
        assert consumer.statistics.acks_saved == 2000 - frames


@pytest.mark.parametrize("store", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_acks_do_not_wait_for_the_next_handler(vhost: VirtualHost, store: bool) -> None:
    """A finished delivery is acked within ack_interval while the next one runs."""
    with Gate(lambda delivery: delivery.body == b"3") as gate:
        handler = Handler(then=gate)
        options: dict[str, Any] = {"idempotency": MemoryStore()} if store else {}
        with Consumer(vhost.url, ORDERS, handler, ack_interval=0.2, **options) as consumer:
            publish(vhost, "orders", numbered(10))
            handler.wait_begun(4)
            wait_until(lambda: consumer.statistics.acked == 3, timeout=10, what="what is before it is acked")
            gate.open()
            wait_until(lambda: consumer.statistics.acked == 10, timeout=10, what="acked")


def test_each_may_be_acked_by_itself(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Each ack is a frame that is sent before the next handler ends."""
    proxy = fault_proxy(vhost.url)

    def acked_before(delivery: Any) -> None:
        number = int(delivery.body)
        wait_until(lambda: proxy.forwarded("basic.ack", "to_broker") == number, timeout=10, what=f"{number} acks")

    handler = Handler(then=acked_before)
    with Consumer(proxy.url, ORDERS, handler, ack_every=1, ack_interval=0) as consumer:
        publish(vhost, "orders", numbered(20))
        handler.wait_done(20)
        wait_until(lambda: proxy.forwarded("basic.ack", "to_broker") == 20, timeout=10, what="the last ack")
        assert (consumer.statistics.acks_sent, consumer.statistics.acks_saved) == (20, 0)
        assert consumer.statistics.acked == 20
        wait_until(lambda: vhost.live_counts(["orders"])["orders"] == 0, timeout=30, what="the broker to read it")


# Automatic acks


def test_automatic_acks_are_at_most_once(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """No ack is sent, and a failure is counted and not retried."""
    proxy = fault_proxy(vhost.url)

    def fail_even(delivery: Any) -> None:
        if int(delivery.body) % 2 == 0:
            raise ValueError("no")

    handler = Handler(then=fail_even)
    with Consumer(proxy.url, ORDERS, handler, ack_mode="automatic") as consumer:
        assert [ack for _, _, ack in seen_by_the_broker(vhost)] == [False]
        publish(vhost, "orders", numbered(100))
        handler.wait_begun(100)
        handler.wait_done(50)
        wait_until(lambda: consumer.statistics.failed == 50, timeout=10, what="failures counted")
    assert len(handler.begun) == 100
    frames = ("basic.ack", "basic.nack", "basic.reject")
    assert [proxy.seen(frame, "to_broker") for frame in frames] == [0, 0, 0]
    assert vhost.live_counts(["orders", "orders.dead"]) == {"orders": 0, "orders.dead": 0}


@pytest.mark.parametrize("end", ["stop", "loss"])
def test_automatically_acked_work_is_handled_after_channel_end(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, end: str
) -> None:
    """A stop or a loss leaves the deliveries to the handlers.

    They would not be redelivered.
    """
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, ack_mode="automatic") as consumer:
            publish(vhost, "orders", numbered(30))
            wait_until(lambda: consumer.statistics.delivered == 30, timeout=10, what="delivered")
            if end == "stop":
                consumer.stop()
            else:
                proxy.cut()
                wait_until(lambda: consumer.reconnects == 1, timeout=10, what="reconnected")
            gate.open()
            handler.wait_done(30)
    assert handler.bodies == numbered(30)


def test_what_does_not_go_with_automatic_acks_is_refused() -> None:
    """The error is raised before connecting; unit tests cover the other options."""
    for option in ({"retry": RetryPolicy()}, {"idempotency": MemoryStore()}, {"batch_size": 5}):
        with pytest.raises(ConfigurationError, match="does not go with ack_mode='automatic'"):
            Consumer("amqp://guest:guest@127.0.0.1:1/", ORDERS, Handler(), ack_mode="automatic", **option)


def test_handlers_that_cannot_be_called_here_are_refused() -> None:
    """A coroutine function would be acked without having run."""

    async def handle(_delivery: object) -> None: ...

    class Handles:
        async def __call__(self, _delivery: object) -> None: ...

    url = "amqp://guest:guest@127.0.0.1:1/"
    for handler in (handle, Handles()):
        with pytest.raises(ConfigurationError, match="coroutine"):
            Consumer(url, ORDERS, handler)
    with pytest.raises(ConfigurationError, match="IdempotencyStore"):
        Consumer(url, ORDERS, Handler(), idempotency={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="wait"):
        Consumer(url, ORDERS, Handler(), reconnect_wait=5)  # type: ignore[arg-type]


# Starting and stopping


def test_a_consumer_runs_once(vhost: VirtualHost) -> None:
    consumer = Consumer(vhost.url, ORDERS, Handler())
    with consumer:
        with pytest.raises(UsageError, match="runs already"):
            consumer.run()
        with pytest.raises(UsageError, match="runs already"):
            consumer.__enter__()
    with pytest.raises(UsageError, match="was stopped"):
        consumer.run()
    unused = Consumer(vhost.url, ORDERS, Handler())
    unused.stop()
    with pytest.raises(UsageError, match="was stopped"):
        unused.run()
    Consumer(vhost.url, ORDERS, Handler()).close()


def test_what_can_be_seen(vhost: VirtualHost) -> None:
    """The repr shows the state and no secret; counts work at any time."""
    consumer = Consumer(vhost.url, ORDERS, Handler(), name="billing")
    assert "not connected" in repr(consumer)
    assert consumer.statistics.delivered == 0
    with consumer:
        assert repr(consumer).endswith(": consuming>")
        assert threading.active_count() > 1
    assert repr(consumer).endswith(": stopped>")
    assert "guest" not in repr(consumer)
    assert (consumer.connected, consumer.reconnects) == (False, 0)
