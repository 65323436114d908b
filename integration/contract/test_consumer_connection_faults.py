"""A consumer whose broker or connection dies: the fault matrix on the network."""

from __future__ import annotations

import logging
import threading
import time
from itertools import count, product
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.acks import Acks
from integration.support.allocations import Allocations
from integration.support.consuming import Gate, Handler, numbered, publish
from integration.support.publishing import Load, book, submit
from integration.support.seeds import soaking
from reliable_mq import Consumer, DeadLetter, Publisher, Queue, RetryPolicy
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.frames import basic_ack
from reliable_mq.testing.history import History, OperationKind
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from random import Random

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, Direction, FaultProxyFactory, Frame, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

GRACE = 2.0  # for tests that kill a broker
ORDERS = Queue("orders")
SOON = tenacity.wait_fixed(0.1)


@pytest.mark.parametrize(
    ("publisher_api", "consumer_api", "graceful"),
    list(product(["sync", "aio", "uvloop"], ["sync", "aio"], [False, True]))
    if soaking()
    else [("aio", "sync", False), ("sync", "aio", True)],
    ids={False: "f01_killed", True: "f02_restarted"}.get,
    indirect=["publisher_api", "consumer_api"],
)
def test_f01_f02_broker_dies_under_publisher_and_consumer(
    private_broker: RabbitMQ,
    private_vhost: VirtualHost,
    checker: Audit,
    rng: Random,
    publisher_api: str,
    graceful: bool,
) -> None:
    """After a kill or a restart, unconfirmed messages are published again, and all are handled.

    Duplicates are allowed. The broker dies with outstanding publishes and acks, three running handlers, and dozens of
    waiting deliveries.
    """
    when, calls = rng.randrange(100, 500), count()
    gate = Gate(lambda _: next(calls) >= when)
    handler = Handler(then=gate, account=checker)
    options = {"reconnect_wait": SOON, "new_queue_grace": GRACE}
    with (
        Publisher(private_vhost.url, topology=[ORDERS], max_outstanding=100, **options) as publisher,
        gate,
        Consumer(private_vhost.url, ORDERS, handler, concurrency=3, prefetch=50, **options) as consumer,
    ):
        with Load(checker, publisher, "orders") as load:
            handler.wait_begun(when + 3)
            for _ in range(3):  # repeated if nothing was outstanding because this process was delayed
                load.wait_for_confirms(rng.randrange(1, 500))
                if graceful:
                    private_broker.stop()
                else:
                    private_broker.kill()
                gate.open()
                private_broker.start()
                load.wait_for_confirms(100)
                if graceful or publisher.statistics.in_doubt:
                    break
        assert load.errors == []
        assert graceful or publisher.statistics.in_doubt > 0
        sent = checker.balance().attempted
        wait_until(lambda: checker.balance().handled == sent, timeout=60, what="all handled", interval=0.2)
        assert consumer.reconnects >= 1
    checker.drain(private_vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f03_connection_is_reset_after_frame_n(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """All messages are handled, wherever in the connection a reset happens.

    That is in the handshake or among deliveries and acks.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    handler = Handler(account=checker)
    in_handshake, later = range(1, 14), range(14, 700)
    for frame in [*in_handshake, *rng.sample(later, 6)]:
        direction = rng.choice(["to_broker", "to_client"])
        bodies = numbered(20 if frame in in_handshake else 200, first=frame * 1000)
        publish(vhost, "orders", bodies, checker)
        proxy.cut_after(frame, direction)
        with Consumer(proxy.url, ORDERS, handler, prefetch=20, ack_every=3, reconnect_wait=SOON):
            handler.wait_bodies(bodies)
        proxy.heal()
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f03_deliveries_of_a_lost_channel_never_reach_a_handler(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The connection is lost while a handler runs.

    Deliveries that wait behind it are not handled before they are redelivered.
    """
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, prefetch=50, reconnect_wait=SOON) as consumer:
            publish(vhost, "orders", numbered(30))
            wait_until(lambda: consumer.statistics.delivered == 30, timeout=10, what="30 delivered")
            handler.wait_begun(1)
            proxy.refuse_connections()
            proxy.cut()
            wait_until(lambda: not consumer.connected, timeout=10, what="the connection is lost")
            gate.open()
            handler.wait_done(1)
            wait_until(lambda: consumer.statistics.stale == 1, timeout=10, what="the late result is dropped")
            assert len(handler.begun) == 1
            proxy.accept_connections()
            handler.wait_done(31)
            assert consumer.statistics.lost == 30
    generations = [delivery.source.generation for delivery in handler.begun]
    assert generations == [generations[0]] + [generations[-1]] * 30
    assert all(delivery.redelivered for delivery in handler.begun[1:])


def test_a_stop_during_a_set_up_requeues_each_delivery_once(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler of the lost channel still runs, so the stop takes time. The new subscription ends at once."""
    proxy = fault_proxy(vhost.url)

    def keep_answer(_direction: Direction, frame: Frame) -> list[Frame]:
        if frame.name == "basic.consume":
            proxy.black_hole("to_client")
        return [frame]

    with Gate() as gate, caplog.at_level(logging.INFO, "reliable_mq"):
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, reconnect_wait=SOON) as consumer:
            publish(vhost, "orders", numbered(30))
            wait_until(lambda: consumer.statistics.delivered == 30, timeout=10, what="30 delivered")
            handler.wait_begun(1)
            proxy.refuse_connections()
            proxy.cut()
            subscriptions = proxy.seen("basic.consume")
            proxy.rewrite(keep_answer, "to_broker")
            proxy.accept_connections()
            proxy.wait_for(lambda: proxy.seen("basic.consume") > subscriptions, timeout=20)
            consumer.stop()
            wait_until(lambda: "stopping consumer" in caplog.text, timeout=20, what="the stop")
            proxy.resume("to_client")
            wait_until(lambda: consumer.statistics.requeued >= 30, timeout=20, what="30 requeued")
            vhost.wait_for_consumers("orders", 0)
            gate.open()
    assert consumer.statistics.requeued == 30


def test_f04_late_results_settle_nothing_on_the_next_channel(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Handlers end after their connection was replaced. The broker keeps the messages, and delivers them once more.

    The delivery tags of the late results are also those of the deliveries that are being handled at that time.
    """
    proxy = fault_proxy(vhost.url)
    count = rng.randint(2, 30)
    with Gate(lambda one: not one.redelivered) as first, Gate(lambda one: one.redelivered) as second:
        handler = Handler(lambda one: (first(one), second(one)), account=checker)
        with Consumer(
            proxy.url, ORDERS, handler, concurrency=count, prefetch=count, ack_every=1, reconnect_wait=SOON
        ) as consumer:
            publish(vhost, "orders", numbered(count), checker)
            handler.wait_begun(count)
            proxy.cut()
            wait_until(lambda: consumer.statistics.delivered == 2 * count, timeout=20, what="all redelivered")
            first.open()
            handler.wait_begun(2 * count)
            known = consumer.statistics
            wait_until(lambda: known.stale + known.acked >= count, timeout=20, what="the late results to be known")
            proxy.cut()
            wait_until(lambda: consumer.statistics.delivered == 3 * count, timeout=20, what="all redelivered again")
            second.open()
            wait_until(lambda: consumer.statistics.acked == count, timeout=20, what="all acked")
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f04_connection_is_reset_between_publish_and_ack(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Messages published twice because their confirms were lost take effect once."""
    proxy = fault_proxy(vhost.url)
    confirmed, twice = rng.randrange(100), rng.randint(1, 200)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        early = [submit(checker, publisher, "orders") for _ in range(confirmed)]
        publisher.flush(30)
        proxy.hold_confirms()
        late = [submit(checker, publisher, "orders") for _ in range(twice)]
        vhost.wait_for_messages("orders", confirmed + twice)
        proxy.cut()
        proxy.heal()
        assert [book(checker, one) for one in [*early, *late]] == [None] * (confirmed + twice)
    handler = Handler(account=checker)
    total = confirmed + 2 * twice
    concurrency = rng.randint(1, 6)
    with Consumer(vhost.url, ORDERS, handler, concurrency=concurrency, idempotency=MemoryStore()) as consumer:
        wait_until(lambda: consumer.statistics.acked == total, timeout=30, what=f"{total} acked")
        assert consumer.statistics.delivered == total
        assert consumer.statistics.duplicates == twice
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close(effects_once=True)
    assert balance.effects == confirmed + twice


def test_f04_connection_is_reset_between_effect_and_ack(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Messages whose acks were lost are redelivered and take effect once."""
    proxy = fault_proxy(vhost.url)
    handler = Handler(account=checker)
    before, lost = rng.randrange(200), rng.randint(1, 200)  # at most the prefetch: no ack makes the broker deliver more
    with Consumer(proxy.url, ORDERS, handler, idempotency=MemoryStore(), reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(before), checker)
        wait_until(lambda: vhost.live_counts()["orders"] == 0, timeout=30, what="acked, for the broker")
        proxy.black_hole("to_broker", new_connections=False)
        publish(vhost, "orders", numbered(lost, first=before), checker)
        handler.wait_done(before + lost)
        proxy.cut()
        wait_until(lambda: consumer.statistics.duplicates == lost, timeout=30, what="duplicates acked")
        assert consumer.statistics.redelivered == lost
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == before + lost


def test_f04_no_ack_is_sent_before_its_handler_has_ended(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """The proxy sees no ack before its handler has ended.

    Handlers end out of order, an ack covers several messages, and connections are cut.
    """
    history = History(checker)
    proxy, acks = fault_proxy(vhost.url), Acks(history)
    proxy.rewrite(acks)
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    bodies = numbered(400)
    publish(vhost, "orders", bodies, checker)

    def work(delivery: Delivery) -> None:
        with history.during(OperationKind.HANDLE, delivery.message_id or ""):
            threading.Event().wait(rng.uniform(0, 0.01))

    with Consumer(proxy.url, ORDERS, work, concurrency=4, prefetch=50, ack_every=10, reconnect_wait=SOON) as consumer:
        for number in range(1, 4):
            proxy.wait_for(lambda number=number: acks.count >= number * 100, timeout=30)
            proxy.cut()
        wait_until(lambda: vhost.live_counts()["orders"] == 0, timeout=30, what="all acked")
        assert consumer.statistics.acks_saved > 100
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    history.result().check()
    assert checker.close().handled == len(bodies) <= acks.count


def test_f05_connection_is_reset_in_the_middle_of_a_body(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """A delivery with half a body is dropped and redelivered whole."""
    proxy = fault_proxy(vhost.url)
    wanted = [rng.randbytes(300_000) for _ in range(20)]
    handler = Handler(account=checker)
    with Consumer(proxy.url, ORDERS, handler, prefetch=4, reconnect_wait=SOON) as consumer:
        for start in range(0, 20, 4):
            proxy.cut_in_body(rng.random(), "to_client", nth=rng.randrange(1, 10))
            publish(vhost, "orders", wanted[start : start + 4], checker)
            handler.wait_bodies(wanted[: start + 4])
        assert consumer.reconnects == 5
    assert set(handler.bodies) == set(wanted)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


# pika takes twice as long as aiormq to detect it, so it has fewer rounds outside of `make soak`.
@pytest.mark.parametrize(
    ("consumer_api", "direction"),
    list(product(["sync", "aio"], ["both", "to_broker", "to_client"]))
    if soaking()
    else [("sync", "to_broker"), ("aio", "to_client")],
    indirect=["consumer_api"],
)
def test_f06_f07_connection_is_a_black_hole(
    vhost: VirtualHost,
    checker: Audit,
    fault_proxy: FaultProxyFactory,
    rng: Random,
    direction: str,
    consumer_api: str,
) -> None:
    """Heartbeats detect it in either direction, and the connection is replaced."""
    # pika allows five more seconds; then a request without an answer for ten seconds shows it as well.
    patience = 15 if consumer_api == "aio" else 30
    proxy = fault_proxy(vhost.url)
    handler = Handler(account=checker)
    with Consumer(proxy.url, ORDERS, handler, heartbeat=1, reconnect_wait=SOON) as consumer:
        early, late = rng.randint(1, 500), rng.randint(1, 500)
        publish(vhost, "orders", numbered(early), checker)
        handler.wait_done(rng.randint(1, early))
        before = consumer.reconnects
        proxy.black_hole(direction, new_connections=False)
        publish(vhost, "orders", numbered(late, first=early), checker)
        wait_until(lambda: consumer.reconnects > before, timeout=patience, what="replaced")
        handler.wait_bodies(numbered(early + late), timeout=30)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


def test_f06_a_stop_on_a_dead_connection_ends_in_time(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """A stop takes no longer than stop_timeout and the closing grace.

    The broker does not answer the cancel. The consumer is idle or busy, and traffic fails in either direction.
    """
    proxy = fault_proxy(vhost.url)
    count, direction = rng.randint(1, 1000), rng.choice(["both", "to_broker", "to_client"])
    handler = Handler()
    with Consumer(proxy.url, ORDERS, handler, stop_timeout=0.5):
        publish(vhost, "orders", numbered(count))
        handler.wait_done(rng.randint(1, count))
        proxy.black_hole(direction)
        started = time.monotonic()
    assert time.monotonic() - started < 20


def test_f08_slow_and_jittery_network(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, seed: int, publisher_api: str
) -> None:
    """A delay of 200 ms with jitter breaks no connection.

    No publish fails, and no message repeats.
    """
    publishing, consuming = (fault_proxy(vhost.url, seed=seed + number) for number in range(2))
    for proxy in (publishing, consuming):
        proxy.delay(0.2, jitter=0.1)
    handler = Handler(account=checker)
    with (
        Publisher(publishing.url, topology=[ORDERS]) as publisher,
        Consumer(consuming.url, ORDERS, handler) as consumer,
    ):
        confirmations = [submit(checker, publisher, "orders") for _ in range(2000)]
        assert [error for one in confirmations if (error := book(checker, one))] == []
        handler.wait_done(2000)
        assert (publisher.statistics.in_doubt, consumer.reconnects) == (0, 0)
    assert (publishing.connections, consuming.connections, len(handler.done)) == (1, 1, 2000)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f08_network_that_loses_packets(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit, rng: Random, publisher_api: str
) -> None:
    """With 5 % packet loss each way, no connection breaks.

    No publish fails, and no message repeats.
    """
    handler = Handler(account=checker)
    url = private_broker.direct_url_of(private_vhost.name)
    private_broker.lose_packets(0.05)
    with Publisher(url, topology=[ORDERS]) as publisher, Consumer(url, ORDERS, handler) as consumer:
        bodies = [rng.randbytes(rng.randint(1, 20_000)) for _ in range(1000)]
        confirmations = [submit(checker, publisher, "orders", body) for body in bodies]
        assert [error for one in confirmations if (error := book(checker, one))] == []
        assert (publisher.statistics.in_doubt, publisher.statistics.republished) == (0, 0)
        handler.wait_done(1000)
        assert (consumer.reconnects, len(handler.done)) == (0, 1000)
    assert private_broker.lost_packets() > 10
    private_broker.lose_packets(0)
    checker.drain(private_vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f09_narrow_network(vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random) -> None:
    """At 64 kbit/s everything arrives on one connection: the heartbeats get through."""
    proxy = fault_proxy(vhost.url)
    bodies = [b"%d/" % number + rng.randbytes(rng.randrange(200, 2000)) for number in range(40)]
    handler = Handler(account=checker)
    with Consumer(proxy.url, ORDERS, handler, prefetch=5, heartbeat=5) as consumer:
        proxy.throttle(8_000)
        publish(vhost, "orders", bodies, checker)
        handler.wait_bodies(bodies)
        assert consumer.statistics.delivered == 40
        proxy.heal()
    assert (consumer.reconnects, proxy.connections) == (0, 1)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close().left == 0


def test_f09_what_this_side_holds_is_no_more_than_was_prefetched(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Of 20 MB in the queue, the client holds about a tenth in memory.

    The connection is slow for the acks.
    """
    proxy = fault_proxy(vhost.url)
    handled: set[int] = set()
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    sizes = [rng.randrange(90_000, 110_000) for _ in range(200)]
    publish(vhost, "orders", [b"%d/" % number + bytes(size) for number, size in enumerate(sizes)])

    def handle(delivery: Delivery) -> None:
        stuck(delivery)
        handled.add(int(delivery.body.partition(b"/")[0]))

    proxy.throttle(8_000, direction="to_broker")
    with (
        Gate() as stuck,
        Allocations() as allocations,
        Consumer(proxy.url, ORDERS, handle, prefetch=10) as consumer,
    ):
        wait_until(lambda: consumer.statistics.delivered >= 10, timeout=30, what="the prefetch is full")
        full = time.monotonic()
        wait_until(lambda: time.monotonic() - full > 1, timeout=10, what="the time for more to arrive")
        stuck.open()
        wait_until(lambda: len(handled) == 200, timeout=60, what="all handled")
        assert allocations.peak() < 2_500_000
        assert (consumer.reconnects, consumer.statistics.delivered) == (0, 200)


def test_f09_a_large_delivery_takes_longer_than_any_reply(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """The consumer asks for less prefetch when it has subscribed, and the reply waits behind the delivery."""
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert book(checker, submit(checker, publisher, "orders", bytes(8_000_000)), timeout=60) is None
    proxy = fault_proxy(vhost.url)
    proxy.throttle(1_200_000)
    handler = Handler(account=checker)
    with Consumer(proxy.url, ORDERS, handler, connect_timeout=3) as consumer:
        wait_until(lambda: consumer.statistics.acked == 1, timeout=60, what="the ack")
        assert consumer.reconnects == 0
    checker.close()


def test_f10_peer_stops_reading_then_resets(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Acks and dead letters stuck in a full socket block nothing.

    The broker redelivers their messages.
    """
    proxy = fault_proxy(vhost.url)
    stuck = Gate()

    def handle(delivery: Delivery) -> None:
        stuck(delivery)
        if delivery.body.startswith(b"bad"):
            raise DeadLetter("bad")

    handler = Handler(then=handle, account=checker)
    bodies = numbered(20)
    with stuck, Consumer(proxy.url, ORDERS, handler, prefetch=40, reconnect_wait=SOON) as consumer:
        bad = [b"bad" + rng.randbytes(rng.randrange(500_000, 1_500_000)) for _ in range(20)]
        mixed = [*bodies, *bad]
        rng.shuffle(mixed)
        publish(vhost, "orders", mixed, checker)
        handler.wait_begun(1)
        wait_until(lambda: consumer.statistics.delivered == 40, timeout=30, what="everything delivered")
        proxy.stop_reading("to_broker", new_connections=False)
        stuck.open()
        handler.wait_begun(40)
        proxy.cut()
        vhost.wait_for_messages("orders", 0)
        wait_until(lambda: vhost.live_counts()["orders"] == 0, timeout=60, what="everything acked")
    handler.wait_bodies(bodies)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert (balance.left, balance.dead_lettered) == (0, 20)


@pytest.mark.parametrize("seconds", [5, pytest.param(90, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_f11_broker_is_frozen(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit, rng: Random, seconds: int
) -> None:
    """Handlers that run during the freeze have their messages acked or redelivered.

    The broker freezes while a handler runs and other deliveries wait. The consumer handles its deliveries during the
    freeze; no more arrive until it thaws, and then all messages do.
    """
    prefetch = rng.randint(1, 200)
    when = rng.randrange(1000)
    given = when + prefetch
    bodies = numbered(given + rng.randint(1, 2000))
    with Gate(lambda delivery: int(delivery.body) == when) as gate:
        handler = Handler(then=gate, account=checker)
        with Consumer(
            private_vhost.url, ORDERS, handler, prefetch=prefetch, heartbeat=5, reconnect_wait=SOON
        ) as consumer:
            publish(private_vhost, "orders", bodies, checker)
            handler.wait_begun(when + 1)
            wait_until(lambda: consumer.statistics.delivered == given, timeout=20, what="what the prefetch allows")
            private_broker.pause()
            frozen = time.monotonic()
            gate.open()
            handler.wait_done(given)
            wait_until(lambda: time.monotonic() - frozen > seconds, timeout=seconds + 5, what="the time to pass")
            assert handler.bodies == numbered(given), "it had nothing else"
            private_broker.unpause()
            handler.wait_bodies(bodies)
    checker.drain(private_vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


def test_f13_after_a_double_ack_from_outside_consuming_resumes(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """406 PRECONDITION_FAILED closes the channel, not the connection.

    No message is lost.
    """
    proxy = fault_proxy(vhost.url)
    handler = Handler(account=checker)
    with Consumer(proxy.url, ORDERS, handler) as consumer:
        for times in range(1, 4):
            publish(vhost, "orders", numbered(20, first=100 * times), checker)
            handler.wait_done(20 * times)
            wait_until(lambda: vhost.live_counts(["orders"])["orders"] == 0, timeout=10, what="acked, for the broker")
            proxy.inject("to_broker", basic_ack(handler.done[-1].source.channel, 1))
            proxy.wait_for(lambda times=times: proxy.seen("channel.close", "to_client") == times)
        publish(vhost, "orders", numbered(20), checker)
        handler.wait_done(80)
        assert (consumer.reconnects, proxy.connections) == (0, 1)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


def test_f14_a_locked_exclusive_queue_is_retried_until_free(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumer waits while the broker still has its old connection.

    After a quick reconnect, the broker answers 405 until it has noticed.
    """
    proxy = fault_proxy(vhost.url)
    handler = Handler()
    mine = Queue("mine", type="classic", exclusive=True)
    with Consumer(proxy.url, mine, handler, dead_letter=None, reconnect_wait=SOON) as consumer:
        publish(vhost, "mine", numbered(1))
        handler.wait_done(1)
        proxy.cut(side="client")
        wait_until(lambda: caplog.text.count("RESOURCE_LOCKED") >= 2, timeout=10, what="refused twice")
        assert not consumer.connected
        proxy.heal()
        wait_until(lambda: consumer.connected, timeout=10, what="consuming again")
        publish(vhost, "mine", numbered(1, first=1))
        handler.wait_done(2)


def test_f14_an_exclusive_consumer_waits_for_the_one_before(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The same with 403 "in exclusive use", also for a second consumer."""
    proxy = fault_proxy(vhost.url)
    handler, other = Handler(), Handler()
    orders = Queue("orders", type="classic")
    with Consumer(proxy.url, orders, handler, exclusive=True, reconnect_wait=SOON) as consumer:
        proxy.cut(side="client")
        wait_until(lambda: caplog.text.count("in exclusive use") >= 2, timeout=10, what="refused twice")
        proxy.heal()
        wait_until(lambda: consumer.connected, timeout=10, what="consuming again")
        publish(vhost, "orders", numbered(3))
        handler.wait_done(3)
        with Consumer(vhost.url, "orders", other, exclusive=True, reconnect_wait=SOON) as second:
            assert not second.connected
            consumer.stop()
            wait_until(lambda: second.connected, timeout=10, what="the second consumes")
            publish(vhost, "orders", numbered(3))
            other.wait_done(3)


@pytest.mark.parametrize("graceful", [False, True], ids=["reset", "closed_by_the_broker"])
def test_f37_f38_unfinished_work_returns_late_results_are_stale(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, graceful: bool
) -> None:
    """Unfinished deliveries between finished ones are not acked.

    Their late results from the old channel ack nothing either.
    """
    proxy = fault_proxy(vhost.url)
    held = {b"3", b"7", b"8"}

    def holds(delivery: Delivery) -> bool:
        return delivery.body in held and not delivery.redelivered

    with Gate(holds) as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, concurrency=8, ack_interval=0.1, reconnect_wait=SOON) as consumer:
            publish(vhost, "orders", numbered(20))
            wait_until(lambda: consumer.statistics.acked == 17, timeout=10, what="all but the three acked")
            assert consumer.statistics.acks_sent <= 17
            wait_until(lambda: vhost.live_counts(["orders"])["orders"] == 3, timeout=10, what="the broker knows of it")
            if graceful:
                wait_until(vhost.close_connections, timeout=10, what="the broker knows of the connection")
            else:
                proxy.cut()
            handler.wait_done(20)
            assert sorted(delivery.body for delivery in handler.begun if delivery.redelivered) == sorted(held)
            assert consumer.statistics.stale == 0
            gate.open()
            wait_until(lambda: consumer.statistics.stale == 3, timeout=10, what="the late results are dropped")
            wait_until(lambda: consumer.statistics.acked == 20, timeout=10, what="all acked")
        assert sorted(handler.bodies) == sorted([*numbered(20), *held])
    assert vhost.live_counts(["orders"])["orders"] == 0


@pytest.mark.soak
def test_f38_a_late_result_acks_nothing_on_the_new_channel(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Each late result has the delivery tag of an unfinished delivery.

    The broker counts tags from 1 again on the new channel.
    """
    proxy = fault_proxy(vhost.url)
    bodies = numbered(8)
    with (
        Gate(lambda delivery: delivery.body in bodies and not delivery.redelivered) as late,
        Gate(lambda delivery: delivery.redelivered) as current,
    ):
        handler = Handler(then=lambda delivery: (late(delivery), current(delivery)))
        with Consumer(proxy.url, ORDERS, handler, concurrency=20, ack_interval=0.1, reconnect_wait=SOON) as consumer:
            publish(vhost, "orders", bodies)
            handler.wait_begun(8)
            proxy.cut()
            handler.wait_begun(16)
            late.open()
            wait_until(lambda: consumer.statistics.stale == 8, timeout=30, what="the late results are dropped")
            publish(vhost, "orders", [b"one more"])
            wait_until(lambda: consumer.statistics.acked, timeout=30, what="what came after them is acked")
            assert consumer.statistics.acked == 1
            wait_until(lambda: vhost.live_counts()["orders"] == 8, timeout=30, what="the broker knows of that one")
            current.open()
            wait_until(lambda: consumer.statistics.acked == 9, timeout=30, what="all acked")
    assert vhost.live_counts()["orders"] == 0


@pytest.mark.parametrize("batch", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_f51_a_handler_that_blocks_for_long_keeps_the_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, batch: bool
) -> None:
    """Heartbeats run on the I/O thread, where user code never runs."""
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(
            proxy.url,
            ORDERS,
            (lambda deliveries: [handler(one) for one in deliveries][:0] or None) if batch else handler,
            batch_size=1 if batch else None,
            heartbeat=6,  # with a shorter one, the broker would disconnect a process that a busy machine stops for 5 s
        ) as consumer:
            publish(vhost, "orders", numbered(1))
            handler.wait_begun(1)
            before = proxy.seen("heartbeat", "to_broker")
            proxy.wait_for(lambda: proxy.seen("heartbeat", "to_broker") >= before + 2, timeout=30)
            gate.open()
            wait_until(lambda: consumer.statistics.acked == 1, timeout=10, what="acked")
            assert (consumer.reconnects, proxy.connections) == (0, 1)


def test_a_waiting_retry_keeps_its_time_and_count_over_a_loss(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A message that waits for its retry is delivered in time on the next channel."""
    proxy = fault_proxy(vhost.url)

    def fail(delivery: Delivery) -> None:
        if delivery.attempt == 1:  # otherwise its second attempt could begin before the loss
            proxy.black_hole("to_client", new_connections=False)
        if delivery.attempt < 3:
            raise ValueError("not yet")

    handler = Handler(then=fail)
    policy = RetryPolicy(3, delays=(1.0,))
    with Consumer(proxy.url, ORDERS, handler, retry=policy, reconnect_wait=SOON) as consumer:
        publish(vhost, "orders", numbered(1))
        wait_until(lambda: consumer.statistics.delayed == 1, timeout=10, what="put into its delay queue")
        # Otherwise a cut could happen before the ack, and the message would rightly be delivered twice.
        wait_until(lambda: sum(vhost.live_counts().values()) == 1, timeout=10, what="acked")
        proxy.cut()
        handler.wait_done(1)
    assert handler.attempts == [1, 2, 3]
    assert handler.redelivered == [False, True, True]


def test_a_flapping_connection_loses_nothing(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random, caplog: pytest.LogCaptureFixture
) -> None:
    """After many resets, all messages are handled or dead-lettered.

    Several handlers run during them, and some fail.
    """
    caplog.set_level(logging.CRITICAL)
    proxy = fault_proxy(vhost.url)

    def fail_some(delivery: Delivery) -> None:
        if int(delivery.body) % 50 == 0:
            raise ValueError("no")

    handler = Handler(then=fail_some, account=checker)
    policy = RetryPolicy(2, delays=(0.05,))
    good = [body for body in numbered(1500) if int(body) % 50]
    with Consumer(
        proxy.url, ORDERS, handler, concurrency=4, prefetch=40, retry=policy, reconnect_wait=SOON
    ) as consumer:
        publish(vhost, "orders", numbered(1500), checker)
        for _ in range(12):
            more = len(handler.done) + rng.randrange(1, 50)
            handler.wait_done(min(more, len(good)))  # there may be no more, if this thread was delayed
            proxy.cut()
            wait_until(lambda: consumer.connected, timeout=20, what="reconnected")
        handler.wait_bodies(good)
        wait_until(lambda: consumer.statistics.dead_lettered >= 30, timeout=30, what="dead letters")
    checker.drain(vhost, ["orders.retry.50", "orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert (balance.handled, balance.dead_lettered + balance.left) == (1470, 30)
