"""A publisher whose connection dies, hangs or is slow.

These are the rows of the fault matrix about the network and the broker.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from integration.support.allocations import Allocations
from integration.support.publishing import Load, book, submit
from reliable_mq import Message, PublishDisconnected, Publisher, PublishUnconfirmed, Queue, TLSOptions
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from integration.support.certificates import Authority
    from reliable_mq import Confirmation
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api")

ORDERS = Queue("orders", dead_letter=None)
QUICK = {"confirm_timeout": 1.5, "heartbeat": 5}


def bodies(rng: Random, count: int, *, least: int = 1, most: int = 400) -> Iterator[bytes]:
    """Yield random bodies of `least` to `most` bytes."""
    for _ in range(count):
        yield rng.randbytes(rng.randint(least, most))


def test_f03_connection_is_reset_after_frame_n(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Everything is confirmed, wherever the reset happens in the connection.

    That is in the handshake or among publishes.
    """
    proxy = fault_proxy(vhost.url)
    in_handshake, early, later = range(1, 8), range(8, 12), range(12, 600)
    for frame in [*in_handshake, *early, *rng.sample(later, 6)]:
        proxy.cut_after(frame, rng.choice(["to_broker", "to_client"]))
        count = 20 if frame in in_handshake else 200
        with Publisher(proxy.url, topology=[ORDERS]) as publisher:
            confirmations = [submit(checker, publisher, "orders") for _ in range(count)]
            assert [error for one in confirmations if (error := book(checker, one))] == [], f"cut after frame {frame}"
        proxy.heal()
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f04_each_confirm_settles_its_own_message(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """Three of six confirms arrive before the connection is lost.

    The other three messages are published again. Each message is counted as confirmed once.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], new_queue_grace=0) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        confirmations = []
        for number in range(1, 7):  # one by one, to get a confirm each
            confirmations.append(submit(checker, publisher, "orders"))
            proxy.wait_for(lambda number=number: proxy.held_confirms == number, timeout=30)
        proxy.release_confirms(3)
        wait_until(confirmations[2].done, timeout=30, what="the third is confirmed")
        proxy.cut()
        proxy.heal()
        assert [book(checker, one) for one in confirmations] == [None] * 6
        assert [one.result().possible_duplicate for one in confirmations] == [False] * 3 + [True] * 3
        assert publisher.statistics.confirmed == 6
    checker.drain(vhost, ["orders"])
    assert len(checker.close().duplicated) == 3


def test_f04_connection_is_reset_between_publish_and_ack(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Messages whose acks are lost are published again and marked as duplicates.

    None is lost.
    """
    count = rng.randrange(20, 300)
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        confirmations = [submit(checker, publisher, "orders") for _ in range(count)]
        vhost.wait_for_messages("orders", count)
        proxy.wait_for(lambda: proxy.held_confirms > 0)
        proxy.release_confirms(rng.randrange(proxy.held_confirms))
        proxy.cut()
        proxy.heal()
        assert [book(checker, one) for one in confirmations] == [None] * count
        again = sum(one.result().possible_duplicate for one in confirmations)
        assert 0 < again == publisher.statistics.republished
    marked = [message for message in vhost.peek("orders") if message["properties"].get("headers")]
    assert len(marked) == again
    checker.drain(vhost, ["orders"])
    assert len(checker.close().duplicated) == again


def test_f04_without_a_connection_new_messages_may_fail_at_once(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """With on_disconnected="raise", new messages are refused.

    Messages accepted before are confirmed in the end.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], on_disconnected="raise", delivery_timeout=60.0) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        before = [submit(checker, publisher, "orders") for _ in range(50)]
        proxy.wait_for(lambda: proxy.held_confirms > 0)
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: not publisher.connected, timeout=30, what="the loss")
        with pytest.raises(PublishDisconnected, match="no connection to the broker"):
            publisher.publish(Message(b"not accepted"), routing_key="orders")
        proxy.heal()
        assert [book(checker, one) for one in before] == [None] * 50
        publisher.connect()
        assert book(checker, submit(checker, publisher, "orders")) is None
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f05_connection_is_reset_in_the_middle_of_a_body(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """A message is published again if half of its body was sent."""
    proxy = fault_proxy(vhost.url)
    body = rng.randbytes(300_000)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        for _ in range(5):
            proxy.cut_in_body(rng.random(), nth=rng.randrange(1, 6))
            confirmations = [submit(checker, publisher, "orders", body) for _ in range(4)]
            assert [book(checker, one) for one in confirmations] == [None] * 4
    with vhost.connect() as connection:
        channel = connection.channel()
        for _, _, received in channel.consume("orders", auto_ack=False, inactivity_timeout=1):
            if received is None:
                break
            assert received == body
    checker.drain(vhost, ["orders"])
    checker.close()


@pytest.mark.parametrize("direction", [pytest.param("both", marks=pytest.mark.soak), "to_broker", "to_client"])
def test_f06_f07_connection_is_a_black_hole(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random, direction: str
) -> None:
    """The publisher replaces the connection within the confirm timeout.

    No call hangs. The fault begins before the first message or with messages outstanding.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], **QUICK) as publisher:
        publisher.connect()
        before = rng.choice([0, rng.randrange(1, 500)])
        confirmations = [submit(checker, publisher, "orders", body) for body in bodies(rng, before)]
        some = rng.randint(0, before)
        wait_until(lambda: publisher.statistics.confirmed >= some, timeout=20, what=f"{some} of {before} confirmed")
        proxy.black_hole(direction, new_connections=False)
        started = time.monotonic()
        confirmations += [submit(checker, publisher, "orders", body) for body in bodies(rng, 50, most=5000)]
        assert [book(checker, one) for one in confirmations] == [None] * (before + 50)
        assert publisher.statistics.in_doubt > 0
        assert time.monotonic() - started < 25
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f06_every_connection_is_a_black_hole(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Publishes end with an error at their deadline, and closing does not hang."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], delivery_timeout=5, **QUICK) as publisher:
        publisher.connect()
        early = [submit(checker, publisher, "orders", body, timeout=60) for body in bodies(rng, rng.randrange(50))]
        assert [book(checker, one, timeout=70) for one in early] == [None] * len(early)
        started = time.monotonic()
        proxy.black_hole()
        confirmations = [submit(checker, publisher, "orders", body) for body in bodies(rng, rng.randint(1, 100))]
        errors = [book(checker, one, timeout=20) for one in confirmations]
        assert {type(error) for error in errors} == {PublishUnconfirmed}
    assert time.monotonic() - started < 60
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f09_narrow_network(vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random) -> None:
    """At 64 kbit/s, the window limits the memory for messages that cannot be sent yet."""
    proxy = fault_proxy(vhost.url)
    confirmations: list[Confirmation] = []
    with (
        Publisher(proxy.url, topology=[ORDERS], max_outstanding_bytes=20_000, confirm_timeout=10) as publisher,
        ThreadPoolExecutor(1) as thread,
    ):
        publisher.connect()
        proxy.throttle(8_000)
        with Allocations() as allocations:
            offering = thread.submit(
                lambda: confirmations.extend(
                    submit(checker, publisher, "orders", body) for body in bodies(rng, 1000, least=2000, most=5000)
                )
            )
            wait_until(lambda: publisher.statistics.confirmed >= 10, timeout=30, what="ten got through")
            assert publisher.outstanding <= 10
            assert allocations.peak() < 1_000_000, "of the 3 MB that are offered"
            assert not offering.done()
        proxy.heal()
        offering.result(60)
        assert [error for one in confirmations if (error := book(checker, one))] == []
        assert publisher.statistics.in_doubt == 0
    checker.drain(vhost, ["orders"])
    checker.close()


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_f09_sending_may_take_longer_than_the_confirm_timeout(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, authority: Authority, secured: bool
) -> None:
    own = authority.issue("proxy", "127.0.0.1")
    proxy = fault_proxy(vhost.url, **({"cert_file": own.cert_file, "key_file": own.key_file} if secured else {}))
    proxy.throttle(1_000_000)  # the client's kernel holds some MB, which take seconds
    tls = TLSOptions(ca_file=authority.file) if secured else None
    with Publisher(proxy.url, tls=tls, topology=[ORDERS], confirm_timeout=11) as publisher:
        publisher.connect()
        started = time.monotonic()
        confirmation = submit(checker, publisher, "orders", bytes(15_000_000))
        health = partial(getattr(publisher, "publisher", publisher).health, stuck_after=12)
        wait_until(lambda: not health().progressing or confirmation.done(), timeout=60, what="the confirm")
        assert health().progressing
        assert book(checker, confirmation) is None
        assert time.monotonic() - started > 12
        assert publisher.statistics.in_doubt == 0
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f10_peer_stops_reading_then_resets(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Publishes stuck in a full socket are published again on the next connection."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        early = [submit(checker, publisher, "orders", body) for body in bodies(rng, rng.randrange(100))]
        assert [error for one in early if (error := book(checker, one))] == []
        proxy.stop_reading("to_broker", new_connections=False)
        large = bodies(rng, 500, least=30_000, most=70_000)
        confirmations = [submit(checker, publisher, "orders", body) for body in large]
        wait_until(lambda: publisher.outstanding == 500, timeout=10, what="everything outstanding")
        proxy.cut()
        assert [error for one in confirmations if (error := book(checker, one))] == []
    checker.drain(vhost, ["orders"])
    checker.close()


@pytest.mark.parametrize("seconds", [5, pytest.param(90, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_f11_broker_is_frozen(
    private_broker: RabbitMQ, private_vhost: VirtualHost, checker: Audit, rng: Random, seconds: int
) -> None:
    """Unknown outcomes are resolved after the thaw, and no call hangs."""
    with Publisher(private_vhost.url, topology=[ORDERS], **QUICK) as publisher:
        with Load(checker, publisher, "orders", body=rng.randbytes(rng.randint(1, 2000))) as load:
            load.wait_for_confirms(rng.randrange(1, 1000))
            private_broker.pause()
            frozen = time.monotonic()
            wait_until(lambda: time.monotonic() - frozen > seconds, timeout=seconds + 5, what="the time to pass")
            private_broker.unpause()
            load.wait_for_confirms(100)
        assert load.errors == []
    checker.drain(private_vhost, ["orders"])
    checker.close()
