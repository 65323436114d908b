"""A relay whose node dies, or loses its link to the queue's leader.

The queue requeues the relay's deliveries: RabbitMQ 4.3 after a minute, earlier versions at once. The test closes the
link repeatedly, which covers both.

The link's end also stops the node's replica of the stage, which may be away for more than a minute. The relay then
reconnects. The proxy stands for a load balancer, which leads new connections to another node.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from integration.support.seeds import soaking
from integration.support.stages import DEADLINE, check_each_once, publish, relaying, wait_emptied
from integration.support.traffic import url_of
from reliable_mq.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.stage import StageRelay
    from reliable_mq.testing import FaultProxyFactory, RabbitMQCluster, VirtualHost
    from reliable_mq.testing.cluster import ClusterNode

pytestmark = [pytest.mark.usefixtures("baseline"), pytest.mark.timeout(600)]

PART = 100
LINK_CLOSES = "erlang:disconnect_node('{name}'), ok"
PATIENCE = "application:set_env(rabbit, consumer_disconnected_timeout, {})"


@pytest.fixture
def _requeue_at_once(rabbitmq_cluster: RabbitMQCluster) -> Iterator[None]:
    """Make queues requeue at once, on every version.

    RabbitMQ 4.3 compares the settings of each queue with those of its node every five seconds.
    """
    for node in rabbitmq_cluster.nodes:
        node.evaluate(PATIENCE.format(1))
    yield
    for node in rabbitmq_cluster.nodes:
        node.evaluate(PATIENCE.format(60_000))


def moved(relay: StageRelay) -> int:
    return relay.statistics.moved + relay.statistics.moved_before


def break_link(leader: ClusterNode, node: ClusterNode) -> None:
    leader.evaluate(LINK_CLOSES.format(name=node.name))


@pytest.mark.usefixtures("_requeue_at_once")
def test_f68_broken_links_of_nodes_move_each_message_once(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The relay's channel survives; the leader redelivers on it with new tags."""
    publish(cluster_vhost.url, "orders", 1, type="quorum")
    leader, *others = rabbitmq_cluster.nodes
    # RabbitMQ may take minutes to restart the stage's replica on the leader's node, whose links were broken by then.
    steps = [*pairwise([*others, leader])][: None if soaking() else 1]
    with (
        fault_proxy(others[0].url_of(cluster_vhost.name)) as proxy,
        relaying(proxy.url, confirm_timeout=DEADLINE) as relay,
    ):

        def more_than(deliveries: int, near: ClusterNode) -> bool:
            if proxy.seen("basic.deliver") > deliveries:
                return True
            break_link(leader, near)
            return False

        wait_until(lambda: moved(relay) == 1, timeout=DEADLINE, what="the first one moved")
        for number, (near, next_node) in enumerate(steps, 1):
            rabbitmq_cluster.transfer_leader("orders", leader, cluster_vhost.name)
            proxy.hold_confirms()
            publish(url_of(cluster_vhost, [leader]), "orders", PART, first=1 + (number - 1) * PART)
            wait_until(lambda: relay.status().outstanding >= 8, timeout=DEADLINE, what="copies that are not confirmed")
            proxy.redirect(next_node.url_of(cluster_vhost.name))
            again = partial(more_than, proxy.seen("basic.deliver"), near)
            wait_until(again, timeout=DEADLINE, what="more deliveries", interval=2.0)
            proxy.release_confirms()
            wait_until(lambda n=number: moved(relay) > n * PART, timeout=DEADLINE, what="all moved")  # type: ignore[misc]
            epochs = relay.statistics.epochs
            proxy.cut()  # to the other node, if it has not moved yet
            wait_until(
                lambda n=epochs: relay.statistics.epochs > n and relay.status().active,  # type: ignore[misc]
                timeout=2 * DEADLINE,
                what="the relay active again",  # it needs confirms for that
            )
    home = rabbitmq_cluster.leader_of("stage", cluster_vhost.name)  # a replica on another node may still have to start
    check_each_once(home.url_of(cluster_vhost.name), "stage", count=1 + len(steps) * PART)
    assert relay.statistics.moved_before >= 8


@pytest.mark.soak
def test_f68_deliveries_of_a_dead_node_are_moved_once(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """RabbitMQ 4.3 requeues them after a minute, when the next relay has long been active."""
    first, second, _ = rabbitmq_cluster.nodes
    url = first.url_of(cluster_vhost.name)
    publish(url, "orders", PART, type="quorum")
    rabbitmq_cluster.transfer_leader("orders", first, cluster_vhost.name)
    with relaying(url) as relay:  # the lock of the stage is on the first node
        assert relay.wait_moved(DEADLINE)
    publish(url, "orders", PART, first=PART)
    with fault_proxy(second.url_of(cluster_vhost.name)) as proxy, relaying(proxy.url) as relay:
        wait_until(lambda: relay.active, timeout=DEADLINE, what="an active relay")
        proxy.hold_confirms()
        publish(url, "orders", PART, first=2 * PART)
        wait_until(lambda: relay.status().outstanding >= 8, timeout=DEADLINE, what="copies that are not confirmed")
        second.kill()
    with relaying(url) as relay:
        assert relay.wait_active(DEADLINE)
        wait_emptied(cluster_vhost, "orders", timeout=3 * DEADLINE)
        assert relay.statistics.moved_before >= 8
    check_each_once(url, "stage", count=3 * PART)
