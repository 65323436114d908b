"""Messages that kill their consumer: moved aside after two returns, bounded, and their neighbours flow."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from integration.programs.killed_by_messages import LEASE
from integration.support.consuming import Gate, Handler, dead_letters, send
from integration.support.killed import Killed, Settings
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import Audit, VirtualHost

ORDERS = Queue("orders")
CLAIM_WAIT = 1.0  # seconds until a consumer looks again at a message that another one had claimed
LOST = "by the loss of their consumer"
REASON = "x-reliable-mq-dead-letter-reason"


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def test_f27_killers_are_dead_lettered_and_neighbours_handled(
    any_vhost: VirtualHost, tmp_path: Path, checker: Audit, consumer_api: str
) -> None:
    """Each killer is handed out twice, and ``max_attempts`` times from quarantine; no neighbour is given up."""
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
    """What is requeued as a consumer stops is suspect of nothing; all is handled, and no attempt is counted.

    Up to 4.2 the broker counts it as it does crashes: there the third consumer moves it to quarantine.
    """
    counted = any_vhost.broker.version.startswith("4.0.")
    declare(any_vhost)
    bodies = [b"%d" % number for number in range(30)]
    send(any_vhost, "orders", [Message(body) for body in bodies])
    handled: list[bytes] = []
    for _ in range(2 if counted else 4):
        with Gate() as gate:
            handler = Handler(then=gate)
            with Consumer(any_vhost.url, ORDERS, handler) as consumer:
                wait_until(lambda now=consumer: now.statistics.delivered >= 10, timeout=20, what="delivered")
                handler.wait_begun(1)
                consumer.stop()
                wait_until(lambda now=consumer: not now.connected, timeout=20, what="stopping")
                gate.open()
        handled += handler.bodies
    handler = Handler()
    with Consumer(any_vhost.url, ORDERS, handler) as consumer:
        wait_until(lambda: set(handled + handler.bodies) == set(bodies), timeout=20, what="handled")
        assert bool(consumer.statistics.quarantined) == counted
    assert set(handler.attempts) == {1}
    assert not any_vhost.live_counts(["orders.dead"])["orders.dead"]


# -- all of it at once -------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Messages at a steady rate, and who handles them."""

    messages: int
    rate: int  # a second
    killers: int
    settings: Settings

    def bodies(self, rng: random.Random) -> list[str]:
        """5 % poison, 10 % that fail once, the killers, in no order; all others are good."""
        poison, flaky = self.messages // 20, self.messages // 10
        kinds = ["poison"] * poison + ["flaky"] * flaky + ["kill"] * self.killers
        kinds += ["good"] * (self.messages - len(kinds))
        rng.shuffle(kinds)
        return [f"{kind}-{number}" for number, kind in enumerate(kinds)]


SMALL = Load(600, 300, 1, Settings(attempts=2, delay=0.2, prefetch=20, work=0.002, workers=3))
SLOWER = 150  # a second, where a file is written for each
# With retries 480 handler calls a second, of 190 that a worker manages. A killer takes two of its first queue's workers
# within moments: of four, the two that are left could not keep up whatever anybody does, and good ones would wait for
# capacity; of six, four are left.
WHOLE = Load(20_000, 400, 10, Settings(attempts=3, delay=0.5, prefetch=20, work=0.005, workers=6))


def publish_steadily(vhost: VirtualHost, bodies: list[str], rate: int, checker: Audit) -> dict[str, float]:
    """Publish, confirmed; returns when each was, in seconds since 1970."""
    sent: dict[str, float] = {}
    began = time.monotonic()
    with Publisher(vhost.url, topology=[ORDERS], name="test-publisher") as publisher:
        for number, body in enumerate(bodies):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))  # the rate is what is asked for
            checker.attempted(body)
            sent[body] = time.time()
            publisher.submit(Message(body.encode(), message_id=body), routing_key="orders")
        publisher.flush(60)
    for body in bodies:
        checker.confirmed(body)
    return sent


def run(vhost: VirtualHost, bodies: list[str], load: Load, log: Path, checker: Audit) -> tuple[Killed, float]:
    """Publish and handle; answers with the 99th percentile of the time until a good message was handled first.

    Its handler's own time is in it: published by the clock to consumers that nothing happens to, a message waits for
    nobody at all, and to be behind a single other one would be several times that. The consumers are there when it
    begins: a second of theirs to start would be more than that percentile.
    """
    dead = sum(body.startswith(("poison", "kill")) for body in bodies)
    declare(vhost)
    with Killed(vhost.url, log, load.settings) as program:
        vhost.wait_for_consumers("orders", load.settings.workers)
        vhost.wait_for_consumers("orders.quarantine", load.settings.workers)
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
    """Look at the handler's calls, and at the dead letters; say what they were.

    A message of which there are two, since its consumer was killed before it had acked what it had just published
    again, is handed out for both. One whose handler ran beside quarantine, which killed its process, has lost no
    attempt; one that was in quarantine when something else killed the process has lost one, and its dead letter says
    so. There are few of each: less than two for a death. An attempt that a death interrupts is made again, of one
    message twice at most: then it is in quarantine itself.
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
    # One process counts the attempts of both copies of a message together while it has both.
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
@pytest.mark.parametrize("store", ["", "done"], ids=["plain", "idempotent"])
@pytest.mark.parametrize("load", [SMALL, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["small", "whole"])
def test_f27_f30_poison_killers_and_failures_spare_neighbours(
    vhost: VirtualHost, tmp_path: Path, checker: Audit, consumer_api: str, load: Load, store: str
) -> None:
    """At a steady rate, all at once: nothing is lost, what must is dead-lettered, within bounds, and good ones flow.

    Their 99th percentile is within twice that of a run without any of it, by the whole load: a few seconds have no such
    percentile. With a store, what a killed consumer had claimed waits for the end of its lease, and then some: so much
    more. Broker lines, APIs, with a store and without are in the names of the whole ones: ``make soak JOBS=1
    ARGS="-k 'poison_killers and whole and 4.0 and aio and idempotent'"``.
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
    if clean:  # last: a machine that is too busy for the rate says nothing of what was lost
        assert percentile <= 2 * clean + (LEASE + CLAIM_WAIT if store else 0.0)
