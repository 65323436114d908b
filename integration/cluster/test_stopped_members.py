"""A consumer on a node whose own member of the queue is stopped.

The leader leaves the deliveries of such a consumer to that member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.support.traffic import OPTIONS, url_of
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.core.consumer import delivery_watch
from reliable_mq.testing import wait_until

if TYPE_CHECKING:
    from random import Random

    from reliable_mq.testing import RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline"), pytest.mark.timeout(300)]

ORDERS = Queue("orders", dead_letter=None)
PREFETCH = 20
_MEMBER = """
{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"orders">>)),
{{Name, _Leader}} = amqqueue:get_pid(Q), Member = {{Name, node()}}, {does}
"""


def test_a_consumer_leaves_a_node_whose_member_is_stopped(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer connects to another node because some messages stay ready.

    More messages are published than its prefetch.
    """
    monkeypatch.setattr(delivery_watch, "CHECK_EVERY", 1.0)
    leader, stopped, third = rng.sample(list(rabbitmq_cluster.nodes), 3)
    handled: list[bytes] = []

    def member(does: str) -> str:
        return stopped.evaluate(_MEMBER.format(vhost=cluster_vhost.name, does=does))

    with (
        Publisher(url_of(cluster_vhost, [leader]), topology=[ORDERS], **OPTIONS) as publisher,
        Consumer(
            url_of(cluster_vhost, [stopped, third]),
            ORDERS,
            lambda delivery: handled.append(delivery.body),
            dead_letter=None,
            prefetch=PREFETCH,
            **OPTIONS,
        ),
    ):
        publisher.publish(Message(b"first"), routing_key="orders")
        wait_until(lambda: handled == [b"first"], timeout=60, what="the first one is handled")
        rabbitmq_cluster.transfer_leader("orders", leader, cluster_vhost.name)
        assert "undefined" in member("ra:stop_server(quorum_queues, Member), whereis(Name)")
        try:
            publisher.publish_many((Message(b"x") for _ in range(2 * PREFETCH)), routing_key="orders")
            wait_until(lambda: len(handled) > 2 * PREFETCH, timeout=60, what=lambda: f"handled: {len(handled)}")
        finally:
            member("ra:restart_server(quorum_queues, Member)")
