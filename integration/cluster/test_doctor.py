"""Findings of ``reliable-mq doctor`` on the nodes and queues of a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from integration.support.command_line import run_cli
from integration.support.traffic import url_of
from reliable_mq import Publisher, Queue
from reliable_mq.testing import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import ClusterNode, RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

QUEUES = [
    *(Queue(f"orders-{number}", dead_letter=None) for number in range(3)),
    Queue("old", type="classic", dead_letter=None),
]
OF_CLUSTERS = ("nodes", "hosts", "leaders", "copies", "members")


def findings(url: str, asked: ClusterNode) -> set[tuple[str, str, str]]:
    """Return status, subject and check of each finding about the cluster."""
    done = run_cli("doctor", url, "--json", "--management-url", asked.management.url)
    return {
        (each["status"], each["subject"], each["check"])
        for each in json.loads(done.stdout)["findings"]
        if each["check"] in OF_CLUSTERS
    }


def test_the_doctor_looks_at_the_nodes_of_a_cluster(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost
) -> None:
    first, _, last = rabbitmq_cluster.nodes
    with Publisher(cluster_vhost.url, topology=QUEUES) as publisher:
        publisher.connect()
    for queue in QUEUES[:3]:
        rabbitmq_cluster.transfer_leader(queue.name, first, cluster_vhost.name)
    together = {("warning", "broker", "leaders"), ("warning", "queue 'old'", "copies")}
    one_host = ("warning", "broker", "hosts")
    # The management API shows new leaders and members with a delay.
    wait_until(
        lambda: findings(cluster_vhost.url, first) == {("ok", "broker", "nodes"), *together},
        timeout=90,
        interval=1,
        what=lambda: f"a cluster that is whole: {findings(cluster_vhost.url, first)}",
    )
    last.kill()
    alone = url_of(cluster_vhost, [first])
    offline = {("warning", f"queue '{queue.name}'", "members") for queue in QUEUES[:3]}
    wait_until(
        lambda: findings(alone, first) == {("warning", "broker", "nodes"), one_host, *together, *offline},
        timeout=90,
        interval=1,
        what=lambda: f"a node that is down: {findings(alone, first)}",
    )
