"""A consumer whose queue, or dead-letter queue, is deleted, changed or missing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.consuming import (
    Gate,
    Handler,
    Running,
    consumers,
    dead_letters,
    numbered,
    publish,
    run_to_its_error,
    running,
)
from reliable_mq import BrokerUnavailable, Consumer, Publisher, Queue, RetryPolicy, TopologyMismatch
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
EVENTS = Queue("events", type="stream")
SOON = tenacity.wait_fixed(0.1)
ONCE = RetryPolicy(1)


def declare(vhost: VirtualHost, *queues: Queue) -> None:
    with Publisher(vhost.url, topology=queues) as publisher:
        publisher.connect()


def subscriptions(vhost: VirtualHost) -> list[int]:
    """Return the prefetch of each subscription."""
    return [one["prefetch_count"] for one in consumers(vhost) if one["queue_name"] == "orders"]


def fail(_delivery: Delivery) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("kind", ["quorum", pytest.param("classic", marks=pytest.mark.soak)])
def test_f24_a_declared_queue_that_is_deleted_is_declared_again(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The broker's cancel is reported; the consumer continues with a new queue."""
    handler = Handler()
    orders = Queue("orders", type=kind)
    with Consumer(vhost.url, orders, handler, reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(5))
        handler.wait_done(5)
        vhost.delete_queue("orders")
        wait_until(lambda: consumer.statistics.cancelled == 1 and consumer.connected, timeout=10, what="back")
        publish(vhost, "orders", numbered(5, first=5))
        handler.wait_done(10)
    assert "was deleted or moved" in caplog.text
    # RabbitMQ can still find the deleted queue for a declare, and then close the connection for the consume.
    assert consumer.reconnects == caplog.text.count("541 INTERNAL_ERROR - failed consuming")
    assert handler.bodies == numbered(10)


def test_f24_a_named_queue_that_is_deleted_is_waited_for(vhost: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    """The consumer reports that the queue is missing, and resumes when it exists.

    A plain name is not declared.
    """
    declare(vhost, ORDERS)
    handler = Handler()
    with running(Consumer(vhost.url, "orders", handler, reconnect_wait=SOON)) as run:
        publish(vhost, "orders", numbered(5))
        handler.wait_done(5)
        vhost.delete_queue("orders")
        wait_until(lambda: caplog.text.count("no queue 'orders'") >= 2, timeout=10, what="reported as missing")
        assert not run.consumer.connected
        assert not run.returned
        declare(vhost, ORDERS)
        publish(vhost, "orders", numbered(5, first=5))
        handler.wait_done(10)


@pytest.mark.both_lines
def test_f24_a_deleted_stream_is_read_anew_from_its_first(any_vhost: VirtualHost) -> None:
    """The new one begins at offset 0. Only one of two consumers creates it."""
    first, second = Handler(), Handler()
    with (
        Consumer(any_vhost.url, EVENTS, first, reconnect_wait=SOON) as one,
        Consumer(any_vhost.url, EVENTS, second, offset="first", reconnect_wait=SOON) as other,
    ):
        publish(any_vhost, "events", numbered(50))
        first.wait_done(50)
        second.wait_done(50)
        any_vhost.delete_queue("events")
        for consumer in (one, other):
            wait_until(
                lambda consumer=consumer: consumer.statistics.cancelled == 1 and consumer.connected,
                timeout=30,
                what="back",
            )
        publish(any_vhost, "events", numbered(5, first=50))
        first.wait_done(55)
        second.wait_done(55)
    for handler in (first, second):
        assert handler.bodies == numbered(55)
        assert not any(handler.redelivered)


@pytest.mark.both_lines
def test_f24_a_named_stream_that_is_deleted_is_waited_for(
    any_vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is read from its first message."""
    declare(any_vhost, EVENTS)
    handler = Handler()
    with Consumer(any_vhost.url, "events", handler, offset="first", reconnect_wait=SOON) as consumer:
        publish(any_vhost, "events", numbered(50))
        handler.wait_done(50)
        any_vhost.delete_queue("events")
        wait_until(lambda: "no queue 'events'" in caplog.text, timeout=30, what="reported as missing")
        declare(any_vhost, EVENTS)
        wait_until(lambda: consumer.connected, timeout=30, what="back")
        publish(any_vhost, "events", numbered(5, first=50))
        handler.wait_done(55)
    assert not any(handler.redelivered)


def test_f24_a_queue_deletion_lets_the_running_handler_finish(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting deliveries are dropped (they went with the queue).

    They are recalled before the cancel is logged, as a log handler may block.
    """
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(vhost.url, ORDERS, handler) as consumer:
            publish(vhost, "orders", numbered(10))
            handler.wait_begun(1)
            wait_until(lambda: consumer.statistics.delivered == 10, timeout=10, what="delivered")
            vhost.delete_queue("orders")
            wait_until(lambda: "the broker cancelled" in caplog.text, timeout=10, what="cancelled, and recalled")
            gate.open()
            wait_until(lambda: consumer.connected, timeout=10, what="subscribed again")
            publish(vhost, "orders", numbered(1, first=10))
            handler.wait_done(2)
    assert handler.bodies == [b"0", b"10"]


def test_f24_a_hanging_handler_does_not_block_resubscribing(vhost: VirtualHost) -> None:
    """The consumer waits for it as long as for a stop, then gives up its channel."""
    with Gate(lambda delivery: delivery.body == b"0") as gate:
        handler = Handler(then=gate)
        with Consumer(vhost.url, ORDERS, handler, concurrency=2, stop_timeout=0.3) as consumer:
            publish(vhost, "orders", numbered(1))
            handler.wait_begun(1)
            vhost.delete_queue("orders")
            wait_until(lambda: consumer.statistics.cancelled == 1 and consumer.connected, timeout=10, what="back")
            publish(vhost, "orders", numbered(3, first=1))
            handler.wait_done(3)
            gate.open()
            wait_until(lambda: consumer.statistics.stale == 1, timeout=10, what="the late result is dropped")


def test_f24_a_queue_that_is_deleted_again_and_again(vhost: VirtualHost) -> None:
    """The consumer comes back with one subscription each time.

    The prefetch is changed at the same time.
    """
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler, reconnect_wait=SOON) as consumer:
        for times in range(1, 9):
            consumer.prefetch = 100 + times
            vhost.delete_queue("orders")
            wait_until(lambda: vhost.queue("orders") is not None, timeout=30, what="declared again")
            publish(vhost, "orders", numbered(5))
            handler.wait_done(5 * times)
        wait_until(lambda: subscriptions(vhost) == [108], timeout=10, what="one, with the last prefetch")


def test_f25_a_queue_remade_differently_raises_topology_mismatch(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """run() raises a TopologyMismatch that names the argument and both values."""
    proxy = fault_proxy(vhost.url)
    handler = Handler()
    run = Running(Consumer(proxy.url, ORDERS, handler, reconnect_wait=SOON)).start()
    wait_until(lambda: run.consumer.connected, timeout=10, what="consuming")
    publish(vhost, "orders", numbered(1))
    handler.wait_done(1)
    proxy.refuse_connections()
    proxy.cut()
    wait_until(lambda: not run.consumer.connected, timeout=10, what="the connection is lost")
    vhost.delete_queue("orders")
    declare(vhost, Queue("orders", arguments={"x-delivery-limit": 7}))
    proxy.accept_connections()
    error = run.join()
    assert isinstance(error, TopologyMismatch)
    assert (error.kind, error.name, error.argument) == ("queue", "orders", "x-delivery-limit")
    assert (error.declared, error.existing) == ("-1", "7")
    assert all(part in str(error) for part in ("orders", "x-delivery-limit", "'-1'", "'7'"))


def test_f25_a_queue_with_other_arguments_is_said_at_the_start(vhost: VirtualHost) -> None:
    """Every way to start the consumer raises."""
    declare(vhost, Queue("orders", type="classic", max_length=3))
    for start in ("run", "with", "get", "connect"):
        consumer = Consumer(vhost.url, ORDERS, None if start == "get" else Handler())
        begin = {
            "run": consumer.run,
            "with": consumer.__enter__,
            "get": consumer.get(timeout=30).__enter__,
            "connect": consumer.connect,
        }
        with pytest.raises(TopologyMismatch) as caught:
            begin[start]()
        found = {difference.argument: difference[1:] for difference in caught.value.differences}
        assert {"x-max-length": ("none", "3"), "x-queue-type": ("quorum", "classic")}.items() <= found.items()
        assert all(argument in str(caught.value) for argument in found)


def test_a_named_queue_that_does_not_exist_is_said_at_the_start(vhost: VirtualHost) -> None:
    """The error says what to do about it."""
    error = run_to_its_error(Consumer(vhost.url, "nowhere", Handler()), TopologyMismatch)
    assert "create the queue first; in Python, a Queue" in str(error)


def test_a_virtual_host_that_does_not_exist_is_said_at_the_start(vhost: VirtualHost) -> None:
    """run() raises at once, because a retry would not help."""
    error = run_to_its_error(Consumer(vhost.broker.url_of("nowhere"), "orders", Handler()), BrokerUnavailable)
    assert isinstance(error, BrokerUnavailable)
    assert error.permanent


def test_a_broker_that_is_given_up_on_ends_run(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """run() ends only with reconnect_stop, at the start or after a loss."""
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    stop = tenacity.stop_after_attempt(3)
    run_to_its_error(
        Consumer(proxy.url, ORDERS, Handler(), reconnect_wait=SOON, reconnect_stop=stop), BrokerUnavailable
    )
    proxy.accept_connections()
    handler = Handler()
    run = Running(Consumer(proxy.url, ORDERS, handler, reconnect_wait=SOON, reconnect_stop=stop)).start()
    wait_until(lambda: run.consumer.connected, timeout=10, what="consuming")
    proxy.refuse_connections()
    proxy.cut()
    error = run.join()
    assert isinstance(error, BrokerUnavailable)
    assert not error.permanent


def test_connect_reports_an_unreachable_broker_and_with_waits(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """connect() raises at once and leaves nothing running.

    A with block starts anyway and keeps trying.
    """
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    handler = Handler()
    consumer = Consumer(proxy.url, ORDERS, handler, reconnect_wait=SOON)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
            consumer.connect()
    with consumer:
        assert not consumer.connected
        proxy.accept_connections()
        wait_until(lambda: consumer.connected, timeout=10, what="connected")
        publish(vhost, "orders", numbered(3))
        handler.wait_done(3)


def test_connect_begins_what_run_goes_on_with(vhost: VirtualHost) -> None:
    """After connect() the consumer consumes; ``run()`` and ``with`` continue it."""
    declare(vhost, ORDERS)
    publish(vhost, "orders", numbered(3))
    handler = Handler()
    consumer = Consumer(vhost.url, ORDERS, handler)
    consumer.connect()
    consumer.connect()
    handler.wait_done(3)
    with running(consumer):
        publish(vhost, "orders", numbered(3))
        handler.wait_done(6)
    assert len(handler.begun) == 6


# Row 57


def test_f57_without_a_dead_letter_queue_no_original_is_acked(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """The named dead-letter queue is missing.

    Publishing is retried and the failure is logged, while the message stays.
    """
    caplog.set_level(logging.INFO)
    orders = Queue("orders", dead_letter=None)
    handler = Handler(then=fail)
    with Consumer(vhost.url, orders, handler, retry=ONCE, dead_letter="bin") as consumer:
        [message_id] = publish(vhost, "orders", [b"poison"])
        wait_until(lambda: consumer.statistics.republish_failed >= 2, timeout=20, what="tried twice")
        assert consumer.statistics.acked == 0
        assert len(handler.begun) == 1, "waiting for the dead-letter queue costs no attempt"
    assert "not published again, and stays unacked" in caplog.text
    vhost.wait_for_messages("orders", 1)
    declare(vhost, Queue("bin", dead_letter=None))
    with Consumer(vhost.url, orders, handler, retry=ONCE, dead_letter="bin") as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=20, what="dead-lettered")
    [dead] = dead_letters(vhost, "bin", 1)
    assert dead["payload"] == "poison"
    assert dead["properties"]["message_id"] == message_id
    assert vhost.live_counts(["orders"])["orders"] == 0


def test_f57_a_deleted_dead_letter_queue_is_declared_again(vhost: VirtualHost, checker: Audit) -> None:
    """It is deleted while the consumer runs. Messages that were given up arrive there."""

    def fail_even(delivery: Delivery) -> None:
        if int(delivery.body) % 2 == 0:
            raise ValueError("no")

    handler = Handler(then=fail_even, account=checker)
    with Consumer(vhost.url, ORDERS, handler, retry=ONCE) as consumer:
        vhost.delete_queue("orders.dead")
        publish(vhost, "orders", numbered(20), checker)
        handler.wait_done(10)
        wait_until(lambda: consumer.statistics.dead_lettered == 10, timeout=20, what="all dead-lettered")
        assert consumer.statistics.republish_failed >= 1
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert (balance.handled, balance.dead_lettered) == (10, 10)


def test_f57_a_full_dead_letter_queue_keeps_the_originals(vhost: VirtualHost) -> None:
    """Dead letters are nacked, and the originals stay until the queue has room."""
    bin_ = Queue("bin", type="classic", max_length=1, dead_letter=None)
    handler = Handler(then=fail)
    with Consumer(vhost.url, ORDERS, handler, retry=ONCE, dead_letter=bin_) as consumer:
        publish(vhost, "orders", numbered(4))
        wait_until(lambda: consumer.statistics.republish_failed >= 1, timeout=30, what="refused")
        assert consumer.statistics.dead_lettered < 4
    counts = vhost.live_counts(["orders", "bin"])
    assert counts["orders"] + counts["bin"] == 4
    assert consumer.statistics.acked == counts["bin"]
