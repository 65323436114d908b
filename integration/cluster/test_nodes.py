"""Faults of cluster nodes while messages flow.

Nodes are killed, frozen, cut off, drained and restarted, or lose their disks.
"""

from __future__ import annotations

import os
import time
from threading import Event
from typing import TYPE_CHECKING

import pytest

from integration.support.seeds import soaking
from integration.support.traffic import DEAD_LETTERS, DELAY_QUEUE, DIRECT, ORDERS, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from integration.support.traffic import Traffic
    from reliable_mq.testing import ClusterNode, RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline"), pytest.mark.timeout(900)]

GOES_ON = 15.0  # seconds without a confirm that are allowed after a leader is killed, plus `Lag.worst`
AT_ONCE = 10.0  # seconds until all clients of a killed node are connected to another one, plus `Lag.worst`
MINORITY = 10.0 if soaking() else 6.0  # seconds without a majority
TRANSFERS = 10 if soaking() else 3  # of the leader, one after the other
MINUTES = "RELIABLE_MQ_MIXED_MINUTES"  # the minutes for which a soak mixes faults


def lasts(seconds: float) -> None:
    """Let a fault last for some seconds."""
    Event().wait(seconds)


def kill_leaders(flow: Traffic, node: ClusterNode) -> None:
    """Make a node the leader of all queues, and kill it; messages then flow without it."""
    for queue in (ORDERS.name, DELAY_QUEUE, DEAD_LETTERS):
        flow.cluster.transfer_leader(queue, node, flow.vhost.name)
    flow.fault(20, "leaders killed")
    node.kill()
    flow.wait_progress()


# When one of these functions returns, its fault is over: all nodes are back, and messages flow.


def leaders_are_killed(flow: Traffic, rng: Random) -> None:
    kill_leaders(flow, rng.choice(flow.cluster.nodes))
    flow.cluster.start()


def a_node_without_leaders_is_killed(flow: Traffic, rng: Random, node: ClusterNode | None = None) -> None:
    """The clients that were connected to it connect to the next host at once."""
    node = node or rng.choice(flow.cluster.nodes)
    others = [each for each in flow.cluster.nodes if each is not node]
    for queue in (ORDERS.name, PLAIN.name):
        flow.cluster.transfer_leader(queue, rng.choice(others), flow.vhost.name)
    flow.fault(67, "node without leaders killed")
    node.kill()
    flow.wait_elsewhere(node, within=AT_ONCE)
    flow.wait_progress()
    flow.cluster.start()


def a_majority_is_killed(flow: Traffic, rng: Random, seconds: float = MINORITY) -> None:
    """Calls with a deadline end by it; all others settle once the majority is back."""
    flow.fault(21, "majority killed")
    for node in rng.sample(flow.cluster.nodes, 2):
        node.kill()
    with flow.without_majority(by=DIRECT):
        lasts(seconds)
    flow.cluster.start()


def the_leader_is_cut_off(flow: Traffic, rng: Random, seconds: float = 8) -> None:
    """A publisher that knows only the leader gets no confirms.

    Other clients are on both sides of the partition, and may stay there.
    """
    leader = flow.cluster.leader_of(ORDERS.name, flow.vhost.name)
    with flow.only_on(leader) as alone:
        flow.fault(22, "leader cut off")
        flow.cluster.partition(leader, one_way=rng.random() < 0.5)
        with flow.without_majority(by=[alone]):
            lasts(seconds)
        flow.cluster.heal()


def each_node_is_restarted(flow: Traffic, rng: Random) -> None:
    """One node is drained first. It has then lost its clients, and is restarted in a soak only."""
    flow.fault(23, "node drained, each restarted")
    node = rng.choice(flow.cluster.nodes)
    flow.cluster.drain(node)
    flow.wait_progress()
    flow.cluster.revive(node)
    nodes = [each for each in flow.cluster.nodes if soaking() or each is not node]
    for each in rng.sample(nodes, len(nodes)):
        flow.cluster.wait_ready()
        each.restart()
        flow.wait_progress()


def the_leader_is_frozen(flow: Traffic, rng: Random) -> None:
    leader = flow.cluster.leader_of(ORDERS.name, flow.vhost.name)
    flow.fault(62, "leader frozen")
    leader.pause()
    lasts(rng.uniform(8, 90) if soaking() else 8)
    leader.unpause()


def a_node_loses_its_disk(flow: Traffic, rng: Random) -> None:
    """The node that has rejoined and one other node form a majority."""
    leader = flow.cluster.leader_of(ORDERS.name, flow.vhost.name)
    node = rng.choice([node for node in flow.cluster.nodes if node is not leader])
    flow.fault(63, "disk lost")
    flow.cluster.lose_disk(node)
    flow.wait_progress()
    flow.cluster.start()
    flow.cluster.wait_ready()
    leader.kill()
    flow.wait_progress()
    flow.cluster.start()


def a_disk_is_lost_then_the_others_die(flow: Traffic, rng: Random) -> None:
    """Rows 67, 63, 20 and 21 with three restarts of a node, not six."""
    leader, node, third = rng.sample(flow.cluster.nodes, 3)
    for queue in (ORDERS.name, PLAIN.name):
        flow.cluster.transfer_leader(queue, leader, flow.vhost.name)
    flow.fault(63, "disk lost by a node without leaders")
    flow.cluster.lose_disk(node)
    flow.wait_elsewhere(node, within=AT_ONCE)
    flow.wait_progress()
    flow.cluster.start()
    flow.cluster.wait_ready()
    kill_leaders(flow, leader)
    flow.fault(21, "another node killed, and so a majority")
    rng.choice([node, third]).kill()
    with flow.without_majority(by=DIRECT):
        lasts(MINORITY)
    flow.cluster.start()


def the_leader_is_transferred(flow: Traffic, rng: Random) -> None:
    flow.fault(64, "leader transferred")
    for _ in range(TRANSFERS):
        leader = flow.cluster.leader_of(ORDERS.name, flow.vhost.name)
        other = rng.choice([node for node in flow.cluster.nodes if node is not leader])
        flow.cluster.transfer_leader(ORDERS.name, other, flow.vhost.name)


FAULTS = (
    leaders_are_killed,
    a_node_without_leaders_is_killed,
    a_majority_is_killed,
    the_leader_is_cut_off,
    each_node_is_restarted,
    the_leader_is_frozen,
    a_node_loses_its_disk,
    the_leader_is_transferred,
)


TOGETHER = (
    a_disk_is_lost_then_the_others_die,
    the_leader_is_cut_off,
    each_node_is_restarted,
    the_leader_is_frozen,
    the_leader_is_transferred,
)


def in_turn(rng: Random) -> Iterator[Callable[[Traffic, Random], None]]:
    """Yield faults of each row once; a soak mixes them for the configured minutes."""
    until = time.monotonic() + 60 * float(os.environ.get(MINUTES, "0"))
    faults = FAULTS if soaking() else TOGETHER
    yield from rng.sample(faults, len(faults))
    while time.monotonic() < until:
        yield rng.choice(FAULTS)


def settle(flow: Traffic) -> None:
    """Wait until the cluster is whole and messages flow."""
    flow.cluster.wait_ready()
    flow.wait_progress()


@pytest.mark.timeout(900 + 120 * float(os.environ.get(MINUTES, "0")))
def test_f20_to_f23_f62_to_f64_and_f67_one_after_the_other(traffic: Callable[..., Traffic], rng: Random) -> None:
    """`RELIABLE_MQ_MIXED_MINUTES=60` mixes the faults for an hour."""
    with traffic() as flow:
        for fault in in_turn(rng):
            fault(flow, rng)
            settle(flow)
        flow.finish(cut_off=True)
        assert flow.silence(20) < GOES_ON + flow.lag.worst


@pytest.mark.soak
def test_f20_traffic_outlives_the_kills_of_its_queues_leaders(traffic: Callable[..., Traffic], rng: Random) -> None:
    with traffic() as flow:
        leaders_are_killed(flow, rng)
        settle(flow)
        flow.finish()
        assert flow.silence(20) < GOES_ON + flow.lag.worst


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
def test_f21_nothing_is_confirmed_without_a_majority(
    traffic: Callable[..., Traffic], rng: Random, seconds: float
) -> None:
    with traffic() as flow:
        a_majority_is_killed(flow, rng, seconds)
        settle(flow)
        flow.finish()


@pytest.mark.soak
@pytest.mark.parametrize("one_way", [False, True])
def test_f22_a_leader_cut_off_with_its_clients_confirms_nothing(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, traffic: Callable[..., Traffic], one_way: bool
) -> None:
    """Clients of the minority continue after the partition; the others never stop."""

    def leader() -> ClusterNode:
        return rabbitmq_cluster.leader_of(ORDERS.name, cluster_vhost.name)

    def pinned() -> dict[str, list[ClusterNode]]:
        alone = leader()
        others = [node for node in rabbitmq_cluster.nodes if node is not alone]
        # Each queue has one consumer on each side. A consumer whose node is cut off gets nothing until the partition
        # heals.
        apart = {name: [alone] for name in (DIRECT[0], "sync orders", "sync plain")}
        return apart | dict.fromkeys((DIRECT[1], "asyncio orders", "asyncio plain"), others)

    with traffic(pinned=pinned) as flow:
        alone = leader()
        flow.fault(22, "leader cut off with its clients")
        rabbitmq_cluster.partition(alone, one_way=one_way)
        with flow.without_majority(by=DIRECT[:1]):
            if one_way:
                lasts(8)
            else:
                flow.wait_progress([DIRECT[1]])
                lasts(3)
        rabbitmq_cluster.heal()
        flow.wait_progress()
        flow.finish(cut_off=True)


@pytest.mark.soak
def test_f23_a_node_is_drained_then_each_is_restarted(traffic: Callable[..., Traffic], rng: Random) -> None:
    with traffic() as flow:
        each_node_is_restarted(flow, rng)
        settle(flow)
        flow.finish()


@pytest.mark.soak
def test_f62_a_frozen_leader(traffic: Callable[..., Traffic], rng: Random) -> None:
    with traffic() as flow:
        the_leader_is_frozen(flow, rng)
        settle(flow)
        flow.finish(cut_off=True)


@pytest.mark.soak
def test_f63_a_node_loses_its_disk_and_joins_again(traffic: Callable[..., Traffic], rng: Random) -> None:
    with traffic() as flow:
        a_node_loses_its_disk(flow, rng)
        settle(flow)
        flow.finish()


@pytest.mark.soak
def test_f64_the_leader_is_transferred_again_and_again(traffic: Callable[..., Traffic], rng: Random) -> None:
    with traffic() as flow:
        the_leader_is_transferred(flow, rng)
        settle(flow)
        flow.finish()


@pytest.mark.soak
def test_f67_traffic_outlives_the_node_of_its_connections(
    rabbitmq_cluster: RabbitMQCluster, traffic: Callable[..., Traffic], rng: Random
) -> None:
    nodes = list(rabbitmq_cluster.nodes)
    first = rng.choice(nodes)
    with traffic(order=[first, *(node for node in nodes if node is not first)]) as flow:
        assert flow.connected_to(first)
        a_node_without_leaders_is_killed(flow, rng, first)
        settle(flow)
        flow.finish()
