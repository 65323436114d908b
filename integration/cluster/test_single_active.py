"""Failover of a single active consumer that loses its connection or its node."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from integration.support.acks import Acks
from integration.support.blocking_consumer import BlockingConsumer
from integration.support.lag import Lag
from integration.support.rounds import Round
from integration.support.seeds import soaking
from integration.support.traffic import GRACE, LATE, OPTIONS, SLOW, url_of
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing import wait_until
from reliable_mq.testing.history import History, OperationKind, OperationOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline"), pytest.mark.timeout(600)]

# When the node of the active consumer dies, RabbitMQ 4.3 waits 60 s before it activates the next one. A soak waits.
TAKE_OVER = {} if soaking() else {"x-consumer-disconnected-timeout": 5_000}
ORDERS = Queue("orders", single_active_consumer=True, arguments=TAKE_OVER)
MORE = 50 if soaking() else 20  # messages between two steps
PAUSE = 0.01 if soaking() else 0.03  # seconds between two messages


def test_f66_one_consumer_is_active_at_a_time_and_order_is_kept(
    rabbitmq_cluster: RabbitMQCluster,
    cluster_vhost: VirtualHost,
    fault_proxy: FaultProxyFactory,
    rng: Random,
    checker: Audit,
    report: Callable[[str], None],
    record_round: Callable[[Round], None],
) -> None:
    """Redeliveries are exempt from the order.

    First the active consumer loses its connection, then its successor loses its node.
    """
    history = History(checker)
    nodes = list(rabbitmq_cluster.nodes)
    rng.shuffle(nodes)
    home, doomed, third = nodes
    proxy, acks = fault_proxy(home.url_of(cluster_vhost.name)), Acks(history, by="sync")
    proxy.rewrite(acks)
    handled = dict.fromkeys(("sync", "asyncio"), 0)
    over = threading.Event()

    def handle(name: str, delivery: Delivery) -> None:
        with history.during(OperationKind.HANDLE, delivery.message_id or "", by=name):
            history.begin(OperationKind.EFFECT, delivery.message_id or "", by=name).end()
        handled[name] += 1

    def load() -> None:
        while not over.wait(PAUSE):
            message = Message(b"x")
            operation = history.begin(OperationKind.PUBLISH, message.message_id, key="orders", timeout=300)
            confirmation = publisher.submit(message, routing_key=ORDERS.name)
            confirmation.add_done_callback(
                lambda done, op=operation: op.end(OperationOutcome.UNKNOWN if done.exception() else OperationOutcome.OK)
            )

    def wait_for_more(name: str) -> None:
        wanted = handled[name] + MORE
        wait_until(lambda: handled[name] >= wanted, timeout=120, what=lambda: f"more handled by {name}: {handled}")

    loading = threading.Thread(target=load, name="load")
    options = {"ack_every": 1, "prefetch": 20, **OPTIONS}
    with (
        Lag() as lag,
        Publisher(
            url_of(cluster_vhost, [home, third, doomed]),
            topology=[ORDERS],
            name="load",
            confirm_timeout=4.0,
            delivery_timeout=300,
            **OPTIONS,
        ) as publisher,
        Consumer(proxy.url, ORDERS, partial(handle, "sync"), name="sync", **options) as first,
    ):
        loading.start()
        try:
            wait_for_more("sync")
            patient = {**options, "connect_timeout": 30.0}  # so that it connects to the node that dies later
            with BlockingConsumer(
                url_of(cluster_vhost, [doomed, third]), ORDERS, partial(handle, "asyncio"), name="asyncio", **patient
            ):
                threading.Event().wait(GRACE)  # until the queue no longer counts as new
                assert handled["asyncio"] == 0
                with history.disturbed(after=5):
                    proxy.cut()
                    wait_for_more("asyncio")
                wait_until(lambda: first.reconnects and first.connected, timeout=60, what="the first one is back")
                rabbitmq_cluster.transfer_leader(ORDERS.name, rng.choice([doomed, third]), cluster_vhost.name)
                wait_for_more("asyncio")
                with history.disturbed(after=5):
                    doomed.kill()
                    wait_for_more("sync")
                rabbitmq_cluster.start()
                rabbitmq_cluster.wait_ready()
                wait_for_more("sync")
                over.set()
                loading.join(SLOW)
                publisher.flush(120)
                wait_until(
                    lambda: not cluster_vhost.live_counts()[ORDERS.name], timeout=60, what="all handled", interval=0.3
                )
        finally:
            over.set()
            loading.join(SLOW)
    checker.drain(cluster_vhost, [ORDERS.name], dead_letters=["orders.dead"])
    result = history.result(tolerance=LATE + lag.worst)
    report(str(result))
    fault = "the active consumer loses its connection, then its node"
    record_round(Round.of(66, fault, history, result, effects_once=False))
    result.check(ordered=True, exclusive=True)
    assert min(handled.values()) > MORE
    assert acks.count > MORE
