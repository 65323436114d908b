"""Duplicates with an idempotency store: one effect, and attempts counted together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from integration.support.consuming import Gate, Handler, numbered, publish, send
from reliable_mq import Consumer, IdempotencyStoreError, Message, Queue, RetryPolicy
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq import Delivery
    from reliable_mq.stores import Claim
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")


def copies(count: int, of: int) -> list[Message]:
    """Return `count` copies of each of `of` messages.

    They come round by round, so copies of a message are apart.
    """
    return [Message(b"%d" % number, message_id=f"m{number}") for _ in range(count) for number in range(of)]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_f36_each_message_is_delivered_ten_times_concurrently(
    vhost: VirtualHost, checker: Audit, together: bool
) -> None:
    """Two consumers with eight workers each share a store.

    Each message takes effect once, and every copy is acked.
    """
    messages = copies(10, of=100)
    if together:
        messages.sort(key=lambda message: message.message_id)
    handlers = [Handler(account=checker), Handler(account=checker)]
    store = MemoryStore()
    with (
        Consumer(vhost.url, ORDERS, handlers[0], concurrency=8, prefetch=50, idempotency=store, name="one") as one,
        Consumer(vhost.url, ORDERS, handlers[1], concurrency=8, prefetch=50, idempotency=store, name="other") as other,
    ):
        send(vhost, "orders", messages, checker)
        wait_until(lambda: one.statistics.acked + other.statistics.acked == 1000, timeout=60, what="all acked")
        assert one.statistics.duplicates + other.statistics.duplicates == 900
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 100


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_the_cap_on_attempts_is_exact_across_duplicates(any_vhost: VirtualHost, concurrency: int) -> None:
    """Five copies of a failing message get three attempts in total.

    Every copy is dead-lettered.
    """

    def fail(_delivery: Delivery) -> None:
        raise ValueError("no")

    handler = Handler(then=fail)
    with Consumer(
        any_vhost.url,
        ORDERS,
        handler,
        concurrency=concurrency,
        idempotency=MemoryStore(),
        retry=RetryPolicy(3, delays=(0.05,)),
    ) as consumer:
        send(any_vhost, "orders", copies(5, of=4))
        wait_until(lambda: consumer.statistics.dead_lettered == 20, timeout=30, what="all dead-lettered")
    calls = [delivery.message_id for delivery in handler.begun]
    assert {message_id: calls.count(message_id) for message_id in calls} == {f"m{number}": 3 for number in range(4)}
    for number in range(4):
        attempts = [a for a, one in zip(handler.attempts, handler.begun, strict=True) if one.message_id == f"m{number}"]
        assert sorted(attempts) == [1, 2, 3]


def test_a_copy_waits_while_another_holds_the_claim(vhost: VirtualHost) -> None:
    """The wait is no attempt; afterwards the copy counts as a duplicate."""
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(vhost.url, ORDERS, handler, concurrency=2, idempotency=MemoryStore()) as consumer:
            send(vhost, "orders", copies(2, of=1))
            wait_until(lambda: consumer.statistics.claims_in_progress >= 1, timeout=10, what="the copy waits")
            assert consumer.statistics.acked == 0, "neither the first, which is not done, nor its copy"
            gate.open()
            wait_until(lambda: consumer.statistics.duplicates == 1, timeout=10, what="the copy is acked")
            assert len(handler.begun) == 1
            assert consumer.statistics.failed == 0


class Noting(MemoryStore):
    """A store that records the keys that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        self.keys += keys
        return super().claim_many(keys, lease)


def test_equal_queue_names_in_two_virtual_hosts_share_a_store(
    vhost: VirtualHost, new_vhost: Callable[[RabbitMQ], VirtualHost]
) -> None:
    """Keys name the virtual host: an id done in one is not done in the other."""
    store = Noting()
    vhosts = [vhost, new_vhost(vhost.broker)]
    for place in vhosts:
        handler = Handler()
        with Consumer(place.url, ORDERS, handler, idempotency=store) as consumer:
            send(place, "orders", copies(2, of=1))
            handler.wait_done(1)
            wait_until(lambda: consumer.statistics.acked == 2, timeout=10, what="both acked")
            assert (consumer.statistics.handled, consumer.statistics.duplicates) == (1, 1)
    assert set(store.keys) == {f"/{place.name}|orders|m0" for place in vhosts}


def test_a_namespace_of_ones_own_is_one_for_several_places(
    vhost: VirtualHost, new_vhost: Callable[[RabbitMQ], VirtualHost]
) -> None:
    """A message handled in one place is a duplicate in the other.

    One use is a cluster that takes over from another.
    """
    store = MemoryStore()
    for place, handled in ((vhost, 1), (new_vhost(vhost.broker), 0)):
        options: dict[str, Any] = {"idempotency": store, "idempotency_namespace": "shop"}
        with Consumer(place.url, ORDERS, Handler(), **options) as consumer:
            send(place, "orders", copies(1, of=1))
            wait_until(lambda: consumer.statistics.acked == 1, timeout=10, what="acked")
            assert (consumer.statistics.handled, consumer.statistics.duplicates) == (handled, 1 - handled)


def test_a_dead_holders_claim_is_taken_over_at_the_lease_end(vhost: VirtualHost) -> None:
    """The consumer asks the store again until then."""
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    store.claim_many(["test|orders|m0"], lease=1.0)
    handler = Handler()
    with Consumer(vhost.url, ORDERS, handler, idempotency=store, idempotency_namespace="test") as consumer:
        send(vhost, "orders", copies(1, of=1))
        wait_until(lambda: consumer.statistics.claims_in_progress >= 1, timeout=10, what="it waits")
        assert handler.begun == []
        now = 1.0
        handler.wait_done(1)
    assert handler.attempts == [1]


class Flaky(MemoryStore):
    """A store that fails a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}

    def _fail(self, what: str) -> None:
        if self.failing.get(what, 0):
            self.failing[what] -= 1
            raise IdempotencyStoreError("no answer")

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        self._fail("claim")
        return super().claim_many(keys, lease)

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        self._fail("complete")
        return super().complete_many(claims)

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        self._fail("release")
        return super().release_many(claims, failed=failed)


@pytest.mark.parametrize("what", ["claim", "complete"])
def test_a_store_that_fails_closes_the_way_until_it_is_back(vhost: VirtualHost, checker: Audit, what: str) -> None:
    """While the store fails, there is no ack, no attempt and no second effect.

    The consumer recovers by itself.
    """
    store = Flaky()
    store.failing[what] = 2
    handler = Handler(account=checker)
    with Consumer(vhost.url, ORDERS, handler, idempotency=store) as consumer:
        publish(vhost, "orders", numbered(20), checker)
        wait_until(lambda: consumer.statistics.store_failures > 0, timeout=10, what="the store has failed")
        wait_until(lambda: consumer.statistics.acked == 20, timeout=30, what="all acked")
        assert consumer.statistics.failed == 0
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close(effects_once=True)


def test_f35_a_loss_before_completion_costs_no_second_effect(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """The handler completes its claim although its channel is lost.

    The redelivery is then a duplicate.
    """
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(then=gate, account=checker)
        options: dict[str, Any] = {"reconnect_wait": tenacity.wait_fixed(0.1)}
        with Consumer(proxy.url, ORDERS, handler, concurrency=2, idempotency=MemoryStore(), **options) as consumer:
            publish(vhost, "orders", numbered(2), checker)
            handler.wait_begun(2)
            proxy.cut()
            wait_until(lambda: consumer.statistics.redelivered == 2, timeout=10, what="delivered again")
            gate.open()
            wait_until(lambda: consumer.statistics.duplicates == 2, timeout=10, what="known as done")
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    assert checker.close(effects_once=True).effects == 2
