"""Nodes of a cluster die, freeze, lose their disks, are cut off, drained and restarted, while messages flow."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

import pytest

from integration.support.seeds import soaking
from integration.support.traffic import DEAD_LETTERS, DELAY_QUEUE, DIRECT, ORDERS, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from integration.support.traffic import Traffic
    from reliable_mq.testing import ClusterNode, RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("baseline"), pytest.mark.timeout(900)]


def lasts(seconds: float) -> None:
    """A fault lasts for a time, in which nothing is waited for."""
    Event().wait(seconds)


def test_f20_leaders_of_work_delay_and_dead_letter_queues_are_killed(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], rng: Random
) -> None:
    with traffic() as flow:
        node = rng.choice(rabbitmq_cluster.nodes)
        for queue in (ORDERS.name, DELAY_QUEUE, DEAD_LETTERS):
            rabbitmq_cluster.transfer_leader(queue, node, cluster_vhost.name)
        flow.fault()
        node.kill()
        flow.wait_progress()
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        flow.wait_progress()
        flow.finish()


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.soak)])
def test_f21_nothing_is_confirmed_without_a_majority(
    rabbitmq_cluster: RabbitMQCluster, traffic: Callable[..., Traffic], rng: Random, seconds: float
) -> None:
    """Calls end by their deadlines meanwhile; all others settle when it is back."""
    with traffic() as flow:
        flow.fault()
        for node in rng.sample(rabbitmq_cluster.nodes, 2):
            node.kill()
        with ExitStack() as windows:
            for history in flow.all_histories:
                windows.enter_context(history.without_majority(by=DIRECT))
            lasts(seconds)
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        flow.wait_progress()
        flow.finish()


@pytest.mark.parametrize("one_way", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_f22_a_leader_cut_off_with_its_clients_confirms_nothing(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], one_way: bool
) -> None:
    """Those of the majority go on; those of the minority do once it is healed."""

    def leader() -> ClusterNode:
        return rabbitmq_cluster.leader_of(ORDERS.name, cluster_vhost.name)

    def pinned() -> dict[str, list[ClusterNode]]:
        alone = leader()
        others = [node for node in rabbitmq_cluster.nodes if node is not alone]
        # Of each queue a consumer stays with either side: one whose node is cut off gets nothing until it is healed.
        apart = {name: [alone] for name in (DIRECT[0], "sync orders", "sync plain")}
        return apart | dict.fromkeys((DIRECT[1], "asyncio orders", "asyncio plain"), others)

    with traffic(pinned=pinned) as flow:
        alone = leader()
        flow.fault()
        rabbitmq_cluster.partition(alone, one_way=one_way)
        with ExitStack() as windows:
            for history in flow.all_histories:
                windows.enter_context(history.without_majority(by=DIRECT[:1]))
            if one_way:
                lasts(8)
            else:
                flow.wait_progress([DIRECT[1]])
                lasts(3)
        rabbitmq_cluster.heal()
        flow.wait_progress()
        flow.finish(cut_off=True)


def test_f23_a_node_is_drained_then_each_is_restarted(
    rabbitmq_cluster: RabbitMQCluster, traffic: Callable[..., Traffic], rng: Random
) -> None:
    with traffic() as flow:
        flow.fault()
        node = rng.choice(rabbitmq_cluster.nodes)
        rabbitmq_cluster.drain(node)
        flow.wait_progress()
        rabbitmq_cluster.revive(node)
        nodes = list(rabbitmq_cluster.nodes)
        for each in rng.sample(nodes, len(nodes)):
            rabbitmq_cluster.wait_ready()
            each.restart()
            flow.wait_progress()
        rabbitmq_cluster.wait_ready()
        flow.finish()


def test_f62_a_frozen_leader(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], rng: Random
) -> None:
    with traffic() as flow:
        leader = rabbitmq_cluster.leader_of(ORDERS.name, cluster_vhost.name)
        flow.fault()
        leader.pause()
        lasts(rng.uniform(8, 90) if soaking() else 8)
        leader.unpause()
        flow.wait_progress()
        rabbitmq_cluster.wait_ready()
        flow.finish(cut_off=True)


def test_f63_a_node_loses_its_disk_and_joins_again(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], rng: Random
) -> None:
    """What it has copied then is a majority together with one other node."""
    with traffic() as flow:
        leader = rabbitmq_cluster.leader_of(ORDERS.name, cluster_vhost.name)
        node = rng.choice([node for node in rabbitmq_cluster.nodes if node is not leader])
        flow.fault()
        rabbitmq_cluster.lose_disk(node)
        flow.wait_progress()
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        leader.kill()
        flow.wait_progress()
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        flow.finish()


def test_f64_the_leader_is_transferred_ten_times(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], rng: Random
) -> None:
    with traffic() as flow:
        flow.fault()
        for _ in range(10):
            leader = rabbitmq_cluster.leader_of(ORDERS.name, cluster_vhost.name)
            other = rng.choice([node for node in rabbitmq_cluster.nodes if node is not leader])
            rabbitmq_cluster.transfer_leader(ORDERS.name, other, cluster_vhost.name)
        flow.wait_progress()
        flow.finish()


def test_f67_the_node_of_the_connections_dies_and_the_leader_lives_elsewhere(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], rng: Random
) -> None:
    """Clients connect to the next host at once."""
    nodes = list(rabbitmq_cluster.nodes)
    first = rng.choice(nodes)
    order = [first, *(node for node in nodes if node is not first)]
    with traffic(order=order) as flow:
        for queue in (ORDERS.name, PLAIN.name):
            rabbitmq_cluster.transfer_leader(queue, rng.choice(order[1:]), cluster_vhost.name)
        flow.fault()
        first.kill()
        flow.wait_progress()
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        flow.finish()
