"""Deliveries on request: ``Consumer.get``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.consuming import Handler, dead_letters, numbered, publish
from reliable_mq import (
    ConfigurationError,
    ConsumeError,
    Consumer,
    ConsumerCancelled,
    Delivery,
    Message,
    Publisher,
    Queue,
    RetryPolicy,
    StaleDelivery,
    UsageError,
)
from reliable_mq.engine import pull
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
HELD = RetryPolicy(3, delays=(3600,), backend="memory")
SOON = tenacity.wait_fixed(0.1)
ANSWER = pull.ANSWER  # seconds for which an answer is waited for beyond the timeout


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the answers of a busy broker."""
    monkeypatch.setattr(pull, "ANSWER", 60.0)


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def count(vhost: VirtualHost, queue: str = "orders") -> int:
    return vhost.live_counts([queue])[queue]


def test_it_gives_what_is_there_and_acks_at_the_end_of_the_block(any_vhost: VirtualHost) -> None:
    """Deliveries come in order, up to the given number; the rest stay in the queue."""
    with Consumer(any_vhost.url, ORDERS) as consumer:
        publish(any_vhost, "orders", numbered(10))
        with consumer.get(4) as deliveries:
            assert bodies(deliveries) == numbered(4)
            assert all(not delivery.redelivered and delivery.attempt == 1 for delivery in deliveries)
        wait_until(lambda: consumer.statistics.acked == 4, timeout=10, what="acked at once")
        with consumer.get(100, timeout=30) as deliveries:
            assert bodies(deliveries) == numbered(6, first=4)
        with consumer.get(100) as deliveries:
            assert deliveries == []
    assert count(any_vhost) == 0


def test_it_waits_for_the_first_and_no_longer_than_told(vhost: VirtualHost) -> None:
    """On an empty queue, get() returns the first message within the timeout, or none."""
    with Consumer(vhost.url, ORDERS) as consumer:
        started = time.monotonic()
        with consumer.get(5, timeout=0.3) as deliveries:
            assert deliveries == []
        assert 0.3 <= time.monotonic() - started < 10
        publisher = threading.Timer(0.3, publish, [vhost, "orders", numbered(1)])
        publisher.start()
        started = time.monotonic()
        with consumer.get(5, timeout=60) as deliveries:
            assert bodies(deliveries) == numbered(1)
        assert time.monotonic() - started < 30
        publisher.join()


def test_without_with_the_first_call_connects_and_close_ends_it(vhost: VirtualHost) -> None:
    """get() connects and declares; a closed consumer cannot be used again."""
    consumer = Consumer(vhost.url, ORDERS)
    with consumer.get(5) as deliveries:
        assert deliveries == []
    publish(vhost, "orders", numbered(3))
    with consumer.get(5) as deliveries:
        assert bodies(deliveries) == numbered(3)
    consumer.close()
    consumer.close()
    assert count(vhost) == 0
    with pytest.raises(UsageError, match="was stopped"), consumer.get():
        pass


def test_after_an_exception_all_that_was_not_settled_is_requeued(any_vhost: VirtualHost) -> None:
    """They are redelivered in their place, and no attempt is counted."""
    with Consumer(any_vhost.url, ORDERS) as consumer:
        publish(any_vhost, "orders", numbered(4))

        def fail() -> None:
            with consumer.get(4) as deliveries:
                deliveries[1].ack()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with consumer.get(4, timeout=10) as deliveries:
            assert sorted(bodies(deliveries)) == [b"0", b"2", b"3"]
            assert all(delivery.redelivered and delivery.attempt == 1 for delivery in deliveries)
    assert count(any_vhost) == 0


def test_each_delivery_may_be_settled_by_itself(vhost: VirtualHost) -> None:
    """Deliveries are acked, retried, dead-lettered or requeued; the rest are acked."""
    with Consumer(vhost.url, ORDERS, retry=RetryPolicy(3, delays=(0.1,))) as consumer:
        publish(vhost, "orders", numbered(5))
        with consumer.get(5) as deliveries:
            deliveries[0].ack()
            deliveries[1].retry()
            deliveries[2].dead_letter("it is odd")
            deliveries[3].requeue()
            assert [delivery.settled for delivery in deliveries] == [True] * 4 + [False]
            with pytest.raises(UsageError, match="settled already"):
                deliveries[0].ack()
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
        seen: dict[bytes, int] = {}
        while len(seen) < 2:
            with consumer.get(5, timeout=10) as deliveries:
                assert deliveries
                seen |= {delivery.body: delivery.attempt for delivery in deliveries}
        assert seen == {b"1": 2, b"3": 1}
    [dead] = dead_letters(vhost, "orders.dead", 1)
    assert dead["payload"] == "2"
    assert dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"] == "it is odd"
    assert count(vhost) == 0


@pytest.mark.soak
def test_retries_end_in_a_dead_letter(any_vhost: VirtualHost) -> None:
    """The policy applies as with a handler."""
    attempts: list[int] = []
    with Consumer(any_vhost.url, ORDERS, retry=RetryPolicy(3, delays=(0.05,))) as consumer:
        publish(any_vhost, "orders", numbered(1))
        while len(attempts) < 3:
            with consumer.get(1, timeout=10) as deliveries:
                for delivery in deliveries:
                    attempts.append(delivery.attempt)
                    delivery.retry()
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=10, what="dead-lettered")
    assert attempts == [1, 2, 3]
    dead_letters(any_vhost, "orders.dead", 1)


@pytest.mark.soak
def test_a_delay_may_be_chosen(vhost: VirtualHost) -> None:
    """It replaces the policy's delay, which would be an hour."""
    with Consumer(vhost.url, ORDERS, retry=RetryPolicy(3, delays=(3600,))) as consumer:
        publish(vhost, "orders", numbered(1))
        with consumer.get(1) as [delivery]:
            delivery.retry(0.05)
        with consumer.get(1, timeout=10) as [delivery]:
            assert delivery.attempt == 2


def test_no_more_are_unsettled_than_the_prefetch(vhost: VirtualHost) -> None:
    """The consumer enforces the limit, because basic.get ignores the prefetch.

    Messages held for a retry count.
    """
    with Consumer(vhost.url, ORDERS, prefetch=5, retry=HELD) as consumer:
        publish(vhost, "orders", numbered(20))
        with consumer.get(5) as first:
            with pytest.raises(UsageError, match="prefetch=5"), consumer.get(1):
                pass
            first[0].ack()
            with consumer.get(1) as second:
                assert bodies(second) == [b"5"]
            first[1].retry()
            first[2].retry()
        with consumer.get(5) as third:
            assert bodies(third) == [b"6", b"7", b"8"], "two are held"
        assert consumer.statistics.delivered == 9
        consumer.prefetch = 20
        with consumer.get(20) as rest:
            assert len(rest) == 11
    assert count(vhost) == 2


def test_without_a_prefetch_there_is_no_limit(vhost: VirtualHost) -> None:
    with Consumer(vhost.url, ORDERS, prefetch=0) as consumer:
        publish(vhost, "orders", numbered(300))
        with consumer.get(1000) as deliveries:
            assert bodies(deliveries) == numbered(300)


def test_a_lost_channel_makes_deliveries_stale(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """A delivery cannot be acked on another channel: settling it raises.

    The broker redelivers it.
    """
    proxy = fault_proxy(vhost.url)
    with Consumer(proxy.url, ORDERS, reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(3))
        block = consumer.get(3)
        deliveries = block.__enter__()
        proxy.cut()
        wait_until(lambda: consumer.reconnects == 1, timeout=10, what="reconnected")
        with pytest.raises(StaleDelivery, match="deliver it again"):
            deliveries[0].ack()
        with pytest.raises(StaleDelivery):
            block.__exit__(None, None, None)
        with consumer.get(3, timeout=10) as again:
            assert sorted(bodies(again)) == numbered(3)
            assert all(delivery.redelivered for delivery in again)
        assert consumer.statistics.stale >= 1
    assert count(vhost) == 0


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_a_close_inside_get_requeues_and_the_block_says_so(vhost: VirtualHost) -> None:
    """close() waits for them as for handlers, then requeues them.

    The end of the block raises StaleDelivery.
    """
    consumer = Consumer(vhost.url, ORDERS, stop_timeout=0.3)
    consumer.connect()
    publish(vhost, "orders", numbered(2))
    block = consumer.get(2, timeout=10)
    assert len(block.__enter__()) == 2
    consumer.close()
    with pytest.raises(StaleDelivery):
        block.__exit__(None, None, None)
    assert count(vhost) == 2


def test_a_request_survives_the_loss_of_its_channel(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """A waiting caller gets the deliveries of the next channel."""
    proxy = fault_proxy(vhost.url)
    with Consumer(proxy.url, ORDERS, reconnect_wait=SOON) as consumer:
        got: list[bytes] = []

        def wait_for_one() -> None:
            with consumer.get(1, timeout=30) as deliveries:
                got.extend(bodies(deliveries))

        waiting = threading.Thread(target=wait_for_one)
        waiting.start()
        proxy.wait_for(lambda: proxy.seen("basic.get") >= 2)
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: not consumer.connected, timeout=10, what="lost")
        publish(vhost, "orders", numbered(1))
        proxy.accept_connections()
        waiting.join(30)
        assert got == numbered(1)


def test_get_asks_again_for_answers_lost_with_their_channel(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The connection is cut after the first of ten answers."""
    proxy = fault_proxy(vhost.url)
    with Consumer(proxy.url, ORDERS, reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(10))
        proxy.cut_after(1, "to_client", of="basic.get-ok")
        seen: set[bytes] = set()
        deadline = time.monotonic() + 20
        while len(seen) < 10 and time.monotonic() < deadline:
            try:
                with consumer.get(10, timeout=5) as deliveries:
                    wait_until(lambda: consumer.connected, timeout=10, what="connected")
                    for delivery in deliveries:
                        delivery.ack()
                        seen.add(delivery.body)
            except StaleDelivery:
                continue
        assert seen == set(numbered(10))
    assert count(vhost) == 0


def test_an_unreachable_broker_is_waited_for_within_the_timeout(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    proxy = fault_proxy(vhost.url)
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    publish(vhost, "orders", numbered(1))
    proxy.refuse_connections()
    with Consumer(proxy.url, ORDERS, reconnect_wait=SOON) as consumer:
        started = time.monotonic()
        with consumer.get(1, timeout=0.2) as deliveries:
            assert deliveries == []
        with consumer.get(1) as deliveries:
            assert deliveries == []
        assert time.monotonic() - started < 10
        proxy.accept_connections()
        with consumer.get(1, timeout=10) as deliveries:
            assert bodies(deliveries) == numbered(1)


def test_a_get_without_an_answer_ends_in_seconds(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "ANSWER", ANSWER)
    proxy = fault_proxy(vhost.url)
    with Consumer(proxy.url, ORDERS, reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(1))
        proxy.black_hole()
        started = time.monotonic()
        with consumer.get(1) as deliveries:
            assert deliveries == []
        assert time.monotonic() - started < 20
        proxy.resume()
        with consumer.get(1, timeout=10) as deliveries:
            assert bodies(deliveries) == numbered(1), "the late answer is not lost"


def test_several_threads_take_turns(vhost: VirtualHost, checker: Audit) -> None:
    """Each message goes to one of them."""
    with Consumer(vhost.url, ORDERS, prefetch=100) as consumer:
        publish(vhost, "orders", numbered(300), checker)
        taken: list[bytes] = []

        def work() -> None:
            while len(taken) < 300:
                with consumer.get(7, timeout=1) as deliveries:
                    taken.extend(bodies(deliveries))
                    for delivery in deliveries:
                        checker.effect(delivery.message_id or "")
                        checker.handled(delivery.message_id or "")

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).handled == 300


def test_a_deleted_queue_is_declared_again(vhost: VirtualHost) -> None:
    """The 404 closes the channel; the next request declares the queue."""
    with Consumer(vhost.url, ORDERS, reconnect_wait=SOON) as consumer:
        vhost.delete_queue("orders")
        with consumer.get(1, timeout=0.5) as deliveries:
            assert deliveries == []
        wait_until(lambda: vhost.queue("orders") is not None, timeout=30, what="declared again")
        publish(vhost, "orders", numbered(1))
        with consumer.get(1, timeout=10) as deliveries:
            assert bodies(deliveries) == numbered(1)


def test_f24_a_deleted_foreign_queue_is_reported_until_remade(vhost: VirtualHost) -> None:
    """get() raises at once without a timeout, otherwise after it.

    The queue may come back until then.
    """

    def publish_first(body: bytes) -> None:
        with Publisher(vhost.url, topology=[Queue("foreign", dead_letter=None)]) as publisher:
            publisher.publish(Message(body), routing_key="foreign")

    publish_first(b"0")
    with Consumer(vhost.url, "foreign", dead_letter=None, reconnect_wait=SOON) as consumer:
        with consumer.get(1, timeout=10) as deliveries:
            assert bodies(deliveries) == [b"0"]
        vhost.delete_queue("foreign")
        for timeout in (0.0, 0.5):
            began = time.monotonic()
            with pytest.raises(ConsumerCancelled, match="queue 'foreign' was deleted"), consumer.get(1, timeout):
                pass
            assert timeout <= time.monotonic() - began < 10
        publish_first(b"1")
        with consumer.get(1, timeout=10) as deliveries:
            assert bodies(deliveries) == [b"1"]
        with consumer.get(1) as deliveries:
            assert deliveries == []


def test_a_stream_cannot_be_asked(vhost: VirtualHost) -> None:
    """A Queue is refused at once, a name when the broker refuses it."""
    events = Queue("events", type="stream")
    with Publisher(vhost.url, topology=[events]) as publisher:
        publisher.connect()
    consumer = Consumer(vhost.url, "events", reconnect_wait=SOON)
    with pytest.raises(ConsumeError, match="540"), consumer.get(1, timeout=10):
        pass
    consumer.close()


def test_a_single_active_consumer_queue_cannot_be_asked(any_vhost: VirtualHost) -> None:
    """Of quorum queues. RabbitMQ gives from a classic one."""
    for kind in ("quorum", "classic"):
        with Publisher(any_vhost.url, topology=[Queue(kind, type=kind, single_active_consumer=True)]) as publisher:
            publisher.publish(Message(b"0"), routing_key=kind)
    consumer = Consumer(any_vhost.url, "quorum", reconnect_wait=SOON)
    with pytest.raises(ConsumeError, match="405"), consumer.get(1, timeout=10):
        pass
    consumer.close()
    single = Queue("classic", type="classic", single_active_consumer=True)
    with Consumer(any_vhost.url, single) as consumer, consumer.get(1, timeout=10) as deliveries:
        assert bodies(deliveries) == [b"0"]


def test_what_does_not_go_together(vhost: VirtualHost) -> None:
    """A handler with get(), run() without one, invalid numbers, a stopped consumer."""
    with Consumer(vhost.url, ORDERS, Handler()) as consumer, pytest.raises(UsageError), consumer.get():
        pass
    with pytest.raises(UsageError, match="needs a handler"):
        Consumer(vhost.url, ORDERS).run()
    with Consumer(vhost.url, ORDERS) as consumer:
        for wrong in (0, -1, True, 1.5, "1"):
            with pytest.raises(ConfigurationError, match="max_messages"), consumer.get(wrong):  # type: ignore[arg-type]
                pass
        with pytest.raises(ConfigurationError, match="timeout"), consumer.get(1, timeout=-1):
            pass
    with pytest.raises(UsageError, match="stopped"), consumer.get():
        pass


def test_what_was_got_is_requeued_when_the_consumer_is_left(vhost: VirtualHost) -> None:
    """Deliveries that were held for a retry are requeued as well."""
    with Consumer(vhost.url, ORDERS, retry=HELD) as consumer:
        publish(vhost, "orders", numbered(3))
        with consumer.get(3) as deliveries:
            deliveries[0].retry()
    assert count(vhost) == 1
