"""Consuming a stream: the start offset, and resuming."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.consuming import Gate, Handler, numbered, publish
from reliable_mq import Consumer, DeadLetter, Publisher, Queue, RetryPolicy, TopologyMismatch
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from random import Random

    from reliable_mq import Delivery
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

EVENTS = Queue("events", type="stream")
SOON = tenacity.wait_fixed(0.1)


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        publisher.connect()


def offsets(handler: Handler) -> list[int]:
    return [delivery.offset if delivery.offset is not None else -1 for delivery in list(handler.begun)]


def test_from_the_first_every_time(any_vhost: VirtualHost) -> None:
    """A second consumer gets all messages again, with their offsets."""
    declare(any_vhost)
    publish(any_vhost, "events", numbered(50))
    for _ in range(2):
        handler = Handler()
        with Consumer(any_vhost.url, EVENTS, handler, offset="first") as consumer:
            handler.wait_done(50)
            wait_until(lambda consumer=consumer: consumer.statistics.acked == 50, timeout=10, what="acked")
        assert handler.bodies == numbered(50)
        assert offsets(handler) == list(range(50))


def test_a_stream_given_by_its_name_is_refused_without_an_offset(any_vhost: VirtualHost) -> None:
    """It would begin at the next message at each reconnect, and skip the others."""
    declare(any_vhost)
    with (
        pytest.raises(TopologyMismatch, match="queue 'events' is a stream: give offset="),
        Consumer(any_vhost.url, "events", Handler()) as consumer,
    ):
        consumer.connect()
    handler = Handler()
    with Consumer(any_vhost.url, "events", handler, offset="first"):
        publish(any_vhost, "events", [b"0"])
        handler.wait_bodies([b"0"])


def test_from_what_comes_next(any_vhost: VirtualHost) -> None:
    """This is the default of RabbitMQ."""
    declare(any_vhost)
    publish(any_vhost, "events", numbered(10))
    chosen, default = Handler(), Handler()
    with Consumer(any_vhost.url, EVENTS, chosen, offset="next"), Consumer(any_vhost.url, EVENTS, default):
        publish(any_vhost, "events", numbered(5, first=10))
        chosen.wait_done(5)
        default.wait_done(5)
    assert chosen.bodies == default.bodies == numbered(5, first=10)


def test_from_an_offset(any_vhost: VirtualHost) -> None:
    """The start is exact, in the middle of a chunk."""
    declare(any_vhost)
    publish(any_vhost, "events", numbered(100))
    handler = Handler()
    with Consumer(any_vhost.url, "events", handler, offset=77):
        handler.wait_done(23)
    assert handler.bodies == numbered(23, first=77)


def test_from_the_last_chunk(any_vhost: VirtualHost) -> None:
    """The last chunk ends with the last message."""
    declare(any_vhost)
    for number in range(5):
        publish(any_vhost, "events", [b"%d" % number])
    handler = Handler()
    with Consumer(any_vhost.url, EVENTS, handler, offset="last"):
        handler.wait_bodies([b"4"])
    assert handler.bodies == [b"4"]


def test_from_a_time(any_vhost: VirtualHost) -> None:
    """The time is in whole seconds, and the start is that of a chunk."""
    declare(any_vhost)
    publish(any_vhost, "events", numbered(5))
    earlier = time.time()
    wait_until(lambda: time.time() > earlier + 2.1, timeout=30, what="two seconds to pass")
    publish(any_vhost, "events", numbered(5, first=5))
    handler = Handler()
    with Consumer(any_vhost.url, EVENTS, handler, offset=datetime.fromtimestamp(earlier + 2, UTC)):
        handler.wait_done(5)
    assert handler.bodies == numbered(5, first=5)


@pytest.mark.parametrize("given", [None, "last"])
def test_a_loss_before_the_first_delivery_skips_no_message(
    any_vhost: VirtualHost, fault_proxy: FaultProxyFactory, given: str | None
) -> None:
    """The default start, "next", would be another position after the loss."""
    proxy = fault_proxy(any_vhost.url)
    declare(any_vhost)
    handler = Handler()
    with Consumer(proxy.url, EVENTS, handler, offset=given, prefetch=10, reconnect_wait=SOON) as consumer:
        proxy.refuse_connections()
        proxy.cut()
        publish(any_vhost, "events", numbered(20))
        proxy.accept_connections()
        handler.wait_done(20)
        assert consumer.reconnects == 1
    assert handler.bodies == numbered(20)


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_after_a_loss_it_goes_on_where_it_was(
    any_vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random, concurrency: int
) -> None:
    """No message is skipped, and at most a prefetch is repeated per loss."""
    proxy = fault_proxy(any_vhost.url)
    declare(any_vhost)
    publish(any_vhost, "events", numbered(1500))
    handler = Handler()
    cuts, prefetch = 5, 40
    with Consumer(
        proxy.url, EVENTS, handler, offset="first", prefetch=prefetch, concurrency=concurrency, reconnect_wait=SOON
    ) as consumer:
        for cut in range(1, cuts + 1):
            handler.wait_done(min(len(handler.done) + rng.randrange(50, 150), 1500))
            proxy.cut()
            wait_until(lambda cut=cut: consumer.reconnects == cut, timeout=20, what="reconnected")
        handler.wait_bodies(numbered(1500))
    assert len(handler.begun) <= 1500 + cuts * (prefetch + concurrency)


def test_a_stream_resumes_at_the_first_message_not_yet_done(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """A held-up message and a failed one are redelivered after a loss.

    Messages behind them had been handled. If the delay of the failed one is over before the loss, then it is held up,
    too, in its second attempt.
    """
    proxy = fault_proxy(vhost.url)
    declare(vhost)

    def fail_five(delivery: Delivery) -> None:
        if delivery.body == b"5" and delivery.attempt == 1:
            raise ValueError("not yet")
        gate(delivery)

    with Gate(lambda delivery: delivery.body in (b"5", b"7")) as gate:
        handler = Handler(then=fail_five)
        policy = RetryPolicy(3, delays=(2.0,))
        with Consumer(
            proxy.url, EVENTS, handler, offset="first", concurrency=3, retry=policy, reconnect_wait=SOON
        ) as consumer:
            publish(vhost, "events", numbered(20))
            wait_until(lambda: consumer.statistics.acked == 18, timeout=10, what="all but 5 and 7")
            proxy.cut()
            wait_until(lambda: consumer.reconnects == 1, timeout=10, what="reconnected")
            gate.open()
            handler.wait_bodies([b"5"])
            wait_until(lambda: consumer.statistics.acked == 18 + 15, timeout=30, what="from 5 on")
    again = [*zip(offsets(handler), handler.attempts, handler.redelivered, strict=True)][20:]
    before_the_loss = max(again.count((5, 2, True)) - 1, 0)
    assert before_the_loss <= 1
    failed = [(5, 2, True)] * (1 + before_the_loss)
    assert sorted(again) == [*failed, *((offset, 1, True) for offset in range(6, 20))]


def test_what_is_given_up_is_not_in_the_way(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """It is rejected, or dead-lettered if that is configured; the stream keeps it."""
    proxy = fault_proxy(vhost.url)
    declare(vhost)

    def refuse_odd(delivery: Delivery) -> None:
        if int(delivery.body) % 2:
            raise DeadLetter("odd")

    bin_ = Queue("bin", dead_letter=None)
    for dead_letter in (None, bin_):
        handler = Handler(then=refuse_odd)
        with Consumer(
            proxy.url, EVENTS, handler, offset="first", dead_letter=dead_letter, reconnect_wait=SOON
        ) as consumer:
            publish(vhost, "events", numbered(10))
            settled = 10 if dead_letter is None else 20
            wait_until(
                lambda consumer=consumer, settled=settled: (
                    consumer.statistics.acked + consumer.statistics.rejected == settled
                ),
                timeout=10,
                what="all settled",
            )
            proxy.cut()
            wait_until(lambda consumer=consumer: consumer.reconnects == 1, timeout=10, what="reconnected")
            publish(vhost, "events", [b"100"])
            handler.wait_bodies([b"100"])
            assert len(handler.begun) == settled + 1
            vhost_events = offsets(handler)
            assert vhost_events == sorted(vhost_events)
        if dead_letter is None:
            assert "no dead-letter queue" not in caplog.text
            with vhost.connect() as connection:
                connection.channel().queue_delete("events")
            declare(vhost)
            publish(vhost, "events", numbered(10))
    vhost.wait_for_messages("bin", 10)


def test_the_prefetch_may_change_in_flight(any_vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The consumer subscribes again; no message is skipped or repeated."""
    proxy = fault_proxy(any_vhost.url)
    declare(any_vhost)
    with Gate(lambda delivery: delivery.body == b"900") as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, EVENTS, handler, offset="first", prefetch=10) as consumer:
            publish(any_vhost, "events", numbered(1000))
            for subscriptions, prefetch in enumerate((50, 7, 200), 2):
                handler.wait_done(min(len(handler.done) + 20, 900))
                consumer.prefetch = prefetch
                proxy.wait_for(lambda count=subscriptions: proxy.seen("basic.consume-ok") == count)
            gate.open()
            handler.wait_done(1000)
            assert consumer.reconnects == 0
    assert handler.bodies == numbered(1000)


def test_after_a_stop_a_stream_goes_on_without_loss_or_repeat(vhost: VirtualHost) -> None:
    """The next consumer starts after the last offset."""
    declare(vhost)
    publish(vhost, "events", numbered(500))
    first = Handler()
    with Consumer(vhost.url, EVENTS, first, offset="first", prefetch=20) as consumer:
        first.wait_done(100)
        consumer.stop()
    last = first.done[-1].offset
    assert last is not None
    second = Handler()
    with Consumer(vhost.url, EVENTS, second, offset=last + 1):
        second.wait_done(500 - last - 1)
    assert first.bodies + second.bodies == numbered(500)


def test_with_a_store_a_stream_takes_effect_once(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """This holds for any number of cuts."""
    proxy = fault_proxy(vhost.url)
    declare(vhost)
    handler = Handler()
    with Consumer(
        proxy.url, EVENTS, handler, offset="first", prefetch=30, idempotency=MemoryStore(), reconnect_wait=SOON
    ) as consumer:
        publish(vhost, "events", numbered(1000))
        for cut in range(1, 5):
            handler.wait_done(min(len(handler.done) + rng.randrange(20, 100), 1000))
            proxy.cut()
            wait_until(lambda cut=cut: consumer.reconnects == cut, timeout=20, what="reconnected")
        handler.wait_bodies(numbered(1000))
    assert handler.bodies == numbered(1000)
