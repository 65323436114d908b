"""A cluster without containers: its state after a new launch or a lost disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from docker import DockerClient
from docker.models.containers import ContainerCollection

from reliable_mq.errors import UsageError
from reliable_mq.testing import RabbitMQCluster, containers
from reliable_mq.testing import cluster as lab

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = "[{rabbit_stream_coordinator,'rabbit@rabbit-1'}]"  # the members of the stream coordinator
REFUSED = '[{{resource,<<"/">>,queue,<<"orders">>},{error,2,timeout}}]'


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> RabbitMQCluster:
    """A cluster without containers, whose third node lost its disk and runs again."""
    cluster = RabbitMQCluster(image="none")
    for node in cluster.nodes:
        monkeypatch.setattr(node, "status", lambda: "running")
    monkeypatch.setattr(cluster, "_wait_for_members", lambda: None)
    cluster.nodes[2].disk_lost = True
    return cluster


def test_a_node_that_accepts_no_clients_is_asked_last(
    cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.ClusterNode, "evaluate", lambda *_: "ok")
    one, two, three = cluster.nodes

    cluster.drain(one)

    assert cluster.running == (two, three, one)


def test_a_new_launch_forgets_the_faults_of_the_last(cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {node.hostname: f"10.0.0.{number}" for number, node in enumerate(cluster.nodes)}
    client = DockerClient("tcp://127.0.0.1:1", version="1.40")  # connects to nothing
    network = SimpleNamespace(name="none", client=client, remove=lambda: None)
    monkeypatch.setattr(lab, "_create_network", lambda _: (network, addresses))
    docker = SimpleNamespace(client=client, host=lambda: "localhost")
    monkeypatch.setattr(containers, "connect_to_docker", lambda: docker)
    monkeypatch.setattr(containers, "has_image", lambda *_: True)
    container = SimpleNamespace(client=client, start=lambda: None, remove=lambda **_: None)
    monkeypatch.setattr(ContainerCollection, "create", lambda *_, **__: container)
    monkeypatch.setattr(lab.ClusterNode, "put_files", lambda *_: None)
    monkeypatch.setattr(lab.ClusterNode, "_in_network_of_container", lambda *_: "")
    monkeypatch.setattr(lab.ClusterNode, "evaluate", lambda *_: "ok")
    monkeypatch.setattr(cluster, "wait_ready", lambda: None)
    cluster.launch()
    with pytest.raises(UsageError, match="launched already"):
        cluster.launch()
    node = cluster.nodes[0]
    cluster.partition(node)
    cluster.drain(node)
    cluster.remove()

    cluster.launch()

    assert not cluster._links
    assert not cluster._drained
    for node in cluster.nodes:
        assert (node.cut_off, node.disk_lost, node._unreachable) == (False, False, set())


def answer(monkeypatch: pytest.MonkeyPatch, cluster: RabbitMQCluster, answers: Iterator[str]) -> None:
    monkeypatch.setattr(cluster.nodes[2], "evaluate", lambda _: next(answers))


def test_a_refused_replica_is_asked_for_again(cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([SMALL, "complete", REFUSED, "[]"])
    answer(monkeypatch, cluster, answers)

    cluster.start()

    assert not list(answers)
    assert not cluster.nodes[2].disk_lost


def test_a_missing_replica_fails_the_start(cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_TIMEOUT", 0.0)
    answer(monkeypatch, cluster, iter(["complete", REFUSED, REFUSED]))

    with pytest.raises(TimeoutError, match=r"rabbit@rabbit-3 has a replica of .*orders"):
        cluster.start()

    assert cluster.nodes[2].disk_lost  # so that the next start asks again


def test_a_small_stream_coordinator_fails_the_start(cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_TIMEOUT", 0.0)
    answer(monkeypatch, cluster, iter([SMALL] * 2))

    with pytest.raises(TimeoutError, match=r"a stream coordinator on every node: .*rabbit@rabbit-1"):
        cluster.start()

    assert cluster.nodes[2].disk_lost
