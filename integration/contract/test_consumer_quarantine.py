"""Messages that kill their consumer are quarantined after two redeliveries.

Their deaths are bounded, and other messages are handled.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from integration.programs.killed_by_messages import LEASE
from integration.support.consuming import Gate, Handler, dead_letters, restarted, send
from integration.support.killed import Killed, Settings
from reliable_mq import Binding, Consumer, DeadLetter, Exchange, Message, Publisher, Queue, RetryPolicy
from reliable_mq.core.consumer.quarantine import AFTER, SUSPECT_FROM
from reliable_mq.stores import MemoryStore, RedisStore
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, VirtualHost

ORDERS = Queue("orders")
CLAIM_WAIT = 1.0  # seconds until a consumer retries a message that another one has claimed
LOST = "by the loss of their consumer"
REASON = "x-reliable-mq-dead-letter-reason"


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def test_f27_killers_are_dead_lettered_and_neighbours_handled(
    any_vhost: VirtualHost, tmp_path: Path, checker: Audit, consumer_api: str
) -> None:
    """Each killer is delivered twice, and ``max_attempts`` times from quarantine.

    No other message is given up.
    """
    bodies = [f"good-{number}" for number in range(100)]
    bodies.insert(10, "kill-1")
    messages = [Message(body.encode(), message_id=body) for body in bodies]
    declare(any_vhost)
    send(any_vhost, "orders", messages, checker)
    with Killed(any_vhost.url, tmp_path / "calls", Settings(attempts=2, api=consumer_api)) as program:
        program.run_until_settled(any_vhost, dead=1, patience=90)
        calls = program.counts()
    assert program.deaths == calls["kill-1"] == 2 + 2
    assert set(calls) == set(bodies)
    checker.dead_lettered([dead["properties"]["message_id"] for dead in dead_letters(any_vhost, "orders.dead", 1)])
    for body in bodies:
        if body.startswith("good"):
            checker.handled(body)
    reasons = {dead["properties"]["headers"][REASON] for dead in any_vhost.peek("orders.dead")}
    assert reasons == {f"2 of 2 attempts failed; 2 of them {LOST}"}
    checker.drain(any_vhost, ["orders", "orders.quarantine"], dead_letters=["orders.dead"])
    checker.close()


def test_restarts_in_good_order_are_no_crashes(any_vhost: VirtualHost, consumer_api: str) -> None:
    """Messages requeued by a stop are not suspect, and count no attempt.

    Up to 4.2 the broker counts such requeues like crashes, so the third consumer moves the messages to quarantine.
    """
    counted = any_vhost.broker.version.startswith("4.0.")
    declare(any_vhost)
    bodies = [b"%d" % number for number in range(30)]
    send(any_vhost, "orders", [Message(body) for body in bodies])
    handled = restarted(Consumer, any_vhost.url, ORDERS, 2 if counted else 4)
    handler = Handler()
    with Consumer(any_vhost.url, ORDERS, handler) as consumer:
        wait_until(lambda: set(handled + handler.bodies) == set(bodies), timeout=20, what="handled")
        assert bool(consumer.statistics.quarantined) == counted
    assert set(handler.attempts) == {1}
    assert not any_vhost.live_counts(["orders.dead"])["orders.dead"]


def test_restarts_without_a_store_cost_a_suspect_no_attempt(any_vhost: VirtualHost, consumer_api: str) -> None:
    """No handler has the message, which waits in the process for the store at each stop."""
    declare(any_vhost)
    send(any_vhost, "orders", [Message(b"suspect", message_id="suspect")])
    for _ in range(SUSPECT_FROM):
        with any_vhost.connect() as connection:
            connection.channel().basic_get("orders")
    down = RedisStore("redis://127.0.0.1:1")
    handler = Handler()
    for _ in range(4):
        with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(2), idempotency=down) as consumer:
            wait_until(lambda now=consumer: now.statistics.store_failures, timeout=20, what="asked the store")
    assert handler.begun == []
    with Consumer(any_vhost.url, ORDERS, handler, retry=RetryPolicy(2), idempotency=MemoryStore()) as consumer:
        handler.wait_done(1)
        assert handler.attempts == [1]
    assert not any(any_vhost.live_counts(["orders", "orders.quarantine", "orders.dead"]).values())


@pytest.mark.parametrize(("given", "key"), [({"x-dead-letter-routing-key": "failed"}, "failed"), ({}, "orders")])
def test_what_is_given_up_there_is_routed_as_by_its_queue(
    any_vhost: VirtualHost, consumer_api: str, given: dict[str, str], key: str
) -> None:
    """The arguments of the queue name the exchange for dead letters."""
    orders = Queue("orders", arguments={"x-dead-letter-exchange": "dlx", **given})
    topology = [Exchange("dlx"), Queue("bin", dead_letter=None), Binding("dlx", "bin", routing_key=key)]

    def give_up(_delivery: Delivery) -> None:
        raise DeadLetter("no")

    with Consumer(any_vhost.url, orders, give_up, topology=topology) as consumer:
        any_vhost.wait_for_consumers("orders.quarantine", 1)
        send(any_vhost, "orders.quarantine", [Message(b"suspect")])
        any_vhost.wait_for_messages("bin", 1)
        assert consumer.statistics.rejected == 1


@pytest.mark.both_lines
def test_a_deleted_quarantine_costs_prefetched_messages_nothing(any_vhost: VirtualHost) -> None:
    """Closing the channel returns them once, and the broker sends none again and again until then."""
    declare(any_vhost)
    bodies = [b"%d" % number for number in range(30)]
    send(any_vhost, "orders", [Message(body) for body in bodies])
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(any_vhost.url, ORDERS, handler) as consumer:
            handler.wait_begun(1)
            any_vhost.wait_for_consumers("orders.quarantine", 1)
            any_vhost.delete_queue("orders.quarantine")
            wait_until(lambda: consumer.statistics.cancelled == 1, timeout=20, what="cancelled")
            send(any_vhost, "orders", [Message(b"late")])
            wait_until(lambda: consumer.statistics.delivered > len(bodies), timeout=20, what="delivered")
            gate.open()
            handler.wait_bodies([*bodies, b"late"])
            statistics = consumer.statistics
    assert (statistics.requeued, statistics.quarantined) == (0, 0)
    assert statistics.delivered == 2 * len(bodies) + 1


@pytest.mark.both_lines
def test_handlers_are_acked_without_permission_for_quarantine(any_vhost: VirtualHost, consumer_api: str) -> None:
    """The refusal closes the channel, and is not repeated while the next handler runs."""
    queue = Queue("orders", dead_letter=None)
    with Publisher(any_vhost.url, topology=[queue]) as publisher:
        publisher.publish(Message(b"slow"), routing_key="orders")
    any_vhost.add_user("worker")
    allowed = {"configure": ".*", "write": ".*", "read": "^orders$"}
    any_vhost.broker.management.call("PUT", "permissions", any_vhost.name, "worker", body=allowed)

    def outlast(delivery: Delivery) -> None:
        if delivery.redelivered:
            time.sleep(1.5 * AFTER)
        else:
            wait_until(lambda: consumer.statistics.lost == 1, timeout=20, what="the channel is closed")

    handler = Handler(then=outlast)
    url = any_vhost.url.replace("guest:guest", "worker:worker")
    consumer = Consumer(url, queue, handler, retry=RetryPolicy(backend="memory"))
    with consumer:
        wait_until(lambda: consumer.statistics.acked == 1, timeout=20, what="acked")
        assert consumer.statistics.lost == 1
    assert handler.attempts == [1, 1]


# -- all kinds at once -------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Messages at a steady rate, and the settings of their consumers."""

    messages: int
    rate: int  # a second
    killers: int
    settings: Settings

    def bodies(self, rng: random.Random) -> list[str]:
        """Return bodies in random order: 5 % poison, 10 % flaky, killers, the rest good.

        Flaky messages fail once.
        """
        poison, flaky = self.messages // 20, self.messages // 10
        kinds = ["poison"] * poison + ["flaky"] * flaky + ["kill"] * self.killers
        kinds += ["good"] * (self.messages - len(kinds))
        rng.shuffle(kinds)
        return [f"{kind}-{number}" for number, kind in enumerate(kinds)]


SMALL = Load(600, 300, 1, Settings(attempts=2, delay=0.2, prefetch=20, work=0.002, workers=3))
SLOWER = 150  # a second, with a store that writes to its file for each message
# With retries this is 480 handler calls a second; a worker manages 190. A killer takes two workers of its first queue
# within moments. With four workers, the remaining two could never keep up, and good messages would wait for capacity.
# With six workers, four remain.
WHOLE = Load(20_000, 400, 10, Settings(attempts=3, delay=0.5, prefetch=20, work=0.005, workers=6))


def publish_steadily(vhost: VirtualHost, bodies: list[str], rate: int, checker: Audit) -> dict[str, float]:
    """Publish at a steady rate; return the times of publishing, in seconds since 1970.

    All messages are confirmed.
    """
    sent: dict[str, float] = {}
    began = time.monotonic()
    with Publisher(vhost.url, topology=[ORDERS], name="test-publisher") as publisher:
        for number, body in enumerate(bodies):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))  # keeps the given rate
            checker.attempted(body)
            sent[body] = time.time()
            publisher.submit(Message(body.encode(), message_id=body), routing_key="orders")
        publisher.flush(60)
    for body in bodies:
        checker.confirmed(body)
    return sent


def run(vhost: VirtualHost, bodies: list[str], load: Load, log: Path, checker: Audit) -> tuple[Killed, float]:
    """Publish and handle the messages; return the program and a 99th percentile.

    The percentile is of the time from publishing to the first handler call of a good message, plus the time of that
    handler. That time is included because messages published at regular intervals, to consumers without faults, do
    not wait at all; waiting for a single other message would take several times as long. The consumers are started
    before publishing begins: their start takes longer than the percentile.
    """
    dead = sum(body.startswith(("poison", "kill")) for body in bodies)
    declare(vhost)
    with Killed(vhost.url, log, load.settings) as program:
        vhost.wait_for_consumers("orders", load.settings.workers, timeout=120)
        vhost.wait_for_consumers("orders.quarantine", load.settings.workers, timeout=60)
        sent = publish_steadily(vhost, bodies, load.rate, checker)
        program.run_until_settled(vhost, dead=dead, patience=60)
    first: dict[str, float] = {}
    for call in program.calls():
        first.setdefault(call.body, call.at)
        if call.body.startswith(("good", "flaky")):
            checker.handled(call.body)
    took = sorted(first[body] - sent[body] for body in bodies if body.startswith("good"))
    return program, took[len(took) * 99 // 100] + load.settings.work


def check(program: Killed, bodies: list[str], load: Load, dead: list[dict[str, Any]]) -> str:
    """Check the handler calls and the dead letters; return a summary.

    A message has two copies if its consumer was killed before it had acked the message that it had just published
    again; both copies are delivered. If a killer in quarantine kills the process of a running handler, that handler's
    message loses no attempt. A message in quarantine loses one attempt if its process is killed by something else;
    its dead letter says so. Both are rare: fewer than two per death. An attempt that a death interrupts is repeated,
    at most twice per message: then the message itself is in quarantine.
    """
    copies = Counter(one["properties"]["message_id"] for one in dead)
    lost = {one["properties"]["message_id"] for one in dead if LOST in one["properties"]["headers"][REASON]}
    attempts: defaultdict[str, list[int]] = defaultdict(list)
    for call in program.calls():
        attempts[call.body].append(call.attempt)
    assert set(attempts) == set(bodies), "some were never handled"
    most = load.settings.attempts
    deaths = program.died()
    assert all(body.startswith(("poison", "kill")) for body in copies), "neighbours were given up"
    killed = {body: attempts[body] for body in bodies if body.startswith("kill")}
    assert deaths == sum(map(len, killed.values()))
    assert all(most <= len(calls) <= (most + 2) * copies[body] for body, calls in killed.items()), killed
    poison = {body: attempts[body] for body in bodies if body.startswith("poison")}
    odd = {body: calls for body, calls in poison.items() if set(calls) != set(range(1, most + 1))}
    # A process that has both copies of a message counts their attempts together.
    shared = {body for body, calls in odd.items() if set(calls) == set(range(1, max(calls) + 1))}
    assert all(max(odd[body]) <= most * copies[body] for body in shared), odd
    assert odd.keys() <= lost | shared, odd
    twice = {body: calls for body, calls in poison.items() if len(calls) != most}
    assert len(twice) <= 2 * deaths, twice
    assert all(len(calls) - most <= (most + 1) * (copies[body] - 1) + 2 for body, calls in twice.items()), twice
    again = sum(len(attempts[body]) > 1 for body in bodies if body.startswith("good"))
    return (
        f"{deaths} deaths, {Counter(map(len, killed.values()))} calls per killer, {len(poison) - len(twice)} of "
        f"{len(poison)} poison messages with exactly {most} calls, {again} good ones handled more than once, "
        f"{copies.total() - len(copies)} dead letters twice"
    )


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("store", [pytest.param("", marks=pytest.mark.soak), "done"], ids=["plain", "idempotent"])
@pytest.mark.parametrize("load", [SMALL, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["small", "whole"])
def test_f27_f30_poison_killers_and_failures_spare_neighbours(
    vhost: VirtualHost, tmp_path: Path, checker: Audit, consumer_api: str, load: Load, store: str
) -> None:
    """With poison, killers and failures at a steady rate, good messages are handled.

    Nothing is lost, and bad messages are dead-lettered within their limits. With the whole load, the 99th percentile
    is at most twice that of a run without bad messages; a small load is too short for a percentile. With a store,
    claims of a killed consumer expire with their lease, so that time and the claim wait are added. To select one of
    the whole loads by broker line, API and store: ``make soak JOBS=1 ARGS="-k 'poison_killers and whole and 4.0 and
    aio and idempotent'"``.
    """
    shared = str(tmp_path / store) if store else ""
    load = load._replace(settings=replace(load.settings, api=consumer_api, store=shared))
    if store and load.killers > 1:
        load = load._replace(rate=SLOWER)
    clean = 0.0
    if load.killers > 1:
        _, clean = run(vhost, [f"good-{number}" for number in range(load.messages)], load, tmp_path / "clean", checker)
    bodies = [f"{body}-again" for body in load.bodies(random.Random(1))]
    program, percentile = run(vhost, bodies, load, tmp_path / "calls", checker)
    told = check(program, bodies, load, vhost.peek("orders.dead", 10_000))
    print(f"{told}; 99th percentile {percentile * 1000:.0f} ms, without any of it {clean * 1000:.0f} ms")
    checker.drain(vhost, ["orders", "orders.quarantine"], dead_letters=["orders.dead"])
    checker.close()
    if clean:  # last, because a machine that is too busy for the rate shows nothing about losses
        assert percentile <= 2 * clean + (LEASE + CLAIM_WAIT if store else 0.0)
