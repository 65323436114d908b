"""The faults of the lab's cluster: they begin, clients see them, and they end."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import uuid
from typing import TYPE_CHECKING, NoReturn

import docker
import pika
import pytest

from reliable_mq import Message, Publisher, Queue
from reliable_mq.errors import LabError, UsageError
from reliable_mq.testing import RabbitMQCluster, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.testing import ClusterNode, VirtualHost

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def orders(rabbitmq_cluster: RabbitMQCluster, new_vhost: Callable[[RabbitMQCluster], VirtualHost]) -> VirtualHost:
    """A virtual host with a quorum queue of three replicas."""
    vhost = new_vhost(rabbitmq_cluster)
    declare(vhost, "orders")
    return vhost


def declare(vhost: VirtualHost, queue: str, kind: str = "quorum") -> None:
    with vhost.connect() as connection:
        connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": kind})


def connect(node: ClusterNode, vhost: VirtualHost) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(node.url_of(vhost.name) + "?heartbeat=0"))


def is_confirmed(node: ClusterNode, vhost: VirtualHost, within: float) -> bool:
    """Return whether a publish through a node is confirmed within some seconds."""
    confirmed: list[int] = []
    with connect(node, vhost) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel._impl.callbacks.add(
            channel.channel_number, pika.spec.Basic.Ack, lambda *_: confirmed.append(1), one_shot=False
        )
        channel._impl.basic_publish("", "orders", b"", pika.BasicProperties(delivery_mode=2))
        try:
            wait_until(lambda: connection.process_data_events(0.1) or confirmed, timeout=within, what="a confirm")
        except TimeoutError:
            return False
    return True


def test_every_node_and_the_cluster_have_a_url(rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost) -> None:
    assert [node.name for node in rabbitmq_cluster.nodes] == ["rabbit@rabbit-1", "rabbit@rabbit-2", "rabbit@rabbit-3"]
    for node in rabbitmq_cluster.nodes:
        assert f"{node.host}:{node.port}" in orders.url
        assert is_confirmed(node, orders, within=30)
    orders.wait_for_messages("orders", 3)


def test_leaders_move_and_drained_nodes_accept_nobody(rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost) -> None:
    declare(orders, "events", "stream")
    node = rabbitmq_cluster.nodes[2]
    for queue in ("orders", "events"):
        rabbitmq_cluster.transfer_leader(queue, node, orders.name)
        assert rabbitmq_cluster.leader_of(queue, orders.name) is node

    rabbitmq_cluster.drain(node)

    assert rabbitmq_cluster.leader_of("orders", orders.name) is not node
    assert not node.answers()
    rabbitmq_cluster.revive(node)
    wait_until(node.answers, timeout=30, what="an answer")


@pytest.mark.soak
def test_a_cluster_with_a_drained_node_is_observed(rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost) -> None:
    rabbitmq_cluster.drain(rabbitmq_cluster.nodes[0])

    orders.wait_for_messages("orders", 0)
    assert orders.queue("orders") is not None


def test_a_drain_whose_end_nobody_saw_heals(rabbitmq_cluster: RabbitMQCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    node = rabbitmq_cluster.nodes[2]
    evaluate = node.evaluate

    def interrupted(expression: str) -> NoReturn:
        evaluate(expression)
        raise LabError("docker does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(node, "evaluate", interrupted)
        with pytest.raises(LabError):
            rabbitmq_cluster.drain(node)

    rabbitmq_cluster.heal()

    wait_until(node.answers, timeout=30, what="an answer")


def test_a_node_that_lost_its_packets_does_not_keep_others_dead(rabbitmq_cluster: RabbitMQCluster) -> None:
    silent, *others = rabbitmq_cluster.nodes
    silent.lose_packets(1)
    for node in others:
        node.lose_packets(1)
        node.kill()

    rabbitmq_cluster.heal()

    for node in rabbitmq_cluster.nodes:
        wait_until(node.answers, timeout=30, what=f"an answer of {node.name}")


def test_an_alarm_of_one_node_blocks_publishing_on_all(rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost) -> None:
    starved, other, _ = rabbitmq_cluster.nodes
    starved.alarm("memory")
    heard: list[str] = []

    with connect(other, orders) as connection:
        connection.add_on_connection_blocked_callback(lambda *_: heard.append("blocked"))
        connection.add_on_connection_unblocked_callback(lambda *_: heard.append("unblocked"))
        channel = connection.channel()

        def blocked() -> bool:
            channel.basic_publish("", "orders", b"")  # a node blocks a connection that publishes once it has the alarm
            connection.process_data_events(0.1)
            return bool(heard)

        wait_until(blocked, timeout=60, what="blocked")
        starved.clear_alarm("memory")
        wait_until(lambda: connection.process_data_events(0.1) or len(heard) == 2, timeout=60, what="unblocked")

    assert heard == ["blocked", "unblocked"]
    assert is_confirmed(other, orders, within=30)


@pytest.mark.soak
@pytest.mark.parametrize("one_way", [False, True])
def test_an_isolated_leader_keeps_clients_and_confirms_nothing(
    rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost, one_way: bool
) -> None:
    alone = rabbitmq_cluster.leader_of("orders", orders.name)

    rabbitmq_cluster.partition(alone, one_way=one_way)

    # The broker's failure detector needs about 10 s, and up to 75 s for nodes that have just met (net_ticktime).
    leader = rabbitmq_cluster.leader_of("orders", orders.name, timeout=150)
    assert leader is not alone
    assert is_confirmed(leader, orders, within=120)
    assert alone.answers()
    if not one_way:  # in a one-way partition, the old leader may pass messages on
        assert not is_confirmed(alone, orders, within=3)
    rabbitmq_cluster.heal()
    assert is_confirmed(alone, orders, within=120)


@pytest.mark.soak
def test_a_node_that_lost_its_disk_gets_copies_of_every_queue(
    rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost
) -> None:
    leader = rabbitmq_cluster.leader_of("orders", orders.name)
    node = next(node for node in rabbitmq_cluster.nodes if node is not leader)
    assert is_confirmed(leader, orders, within=30)

    rabbitmq_cluster.lose_disk(node)

    assert node.status() == "exited"
    assert is_confirmed(leader, orders, within=30)
    with pytest.raises(UsageError, match="a majority"):
        rabbitmq_cluster.lose_disk(leader)
    rabbitmq_cluster.heal()
    rabbitmq_cluster.transfer_leader("orders", node, orders.name)  # needs an up-to-date copy
    orders.wait_for_messages("orders", 2)


@pytest.mark.soak
def test_after_a_lost_disk_streams_survive_the_next_death(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost
) -> None:
    """The coordinator of streams has the node again, so that it keeps its majority."""
    with Publisher(cluster_vhost.url, topology=[Queue("events", type="stream")], new_queue_grace=0) as publisher:
        publisher.publish(Message(b"1"), routing_key="events")
        leader = rabbitmq_cluster.leader_of("events", cluster_vhost.name)
        node = next(node for node in rabbitmq_cluster.nodes if node is not leader)
        rabbitmq_cluster.lose_disk(node)
        rabbitmq_cluster.heal()
        rabbitmq_cluster.leader_of("events", cluster_vhost.name).kill()
        publisher.publish(Message(b"2"), routing_key="events", timeout=50)


@pytest.fixture
def image_without_volumes(rabbitmq_image: str) -> Iterator[str]:
    """The image of the brokers without its declaration of volumes, which no Dockerfile can remove."""
    name = f"reliable-mq/without-volumes:{uuid.uuid4().hex[:12]}"
    with contextlib.closing(docker.from_env()) as client:
        image = client.images.get(rabbitmq_image)
        config = image.attrs["Config"]
        changes = [f"{key.upper()} {json.dumps(config[key])}" for key in ("Entrypoint", "Cmd") if config[key]]
        changes += [f"USER {config['User']}"] if config["User"] else []
        changes += [f"ENV {key}={json.dumps(value)}" for key, _, value in (one.partition("=") for one in config["Env"])]
        container = client.containers.create(image.id)
        try:
            content = b"".join(container.export())
        finally:
            container.remove(v=True)
        repository, tag = name.split(":")
        client.api.import_image_from_data(content, repository=repository, tag=tag, changes=changes)
        yield name
        client.images.remove(name, force=True)


@pytest.mark.soak
def test_a_disk_is_lost_though_the_image_has_no_volume(image_without_volumes: str) -> None:
    with RabbitMQCluster(image=image_without_volumes) as cluster:
        node = cluster.nodes[2]

        cluster.lose_disk(node)

        chunks, _ = node.container.get_archive("/var/lib/rabbitmq")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            assert tar.getnames() == ["rabbitmq", "rabbitmq/.erlang.cookie"]


@pytest.mark.soak
@pytest.mark.parametrize("dead", [1, 2])
def test_a_lost_disk_heals_when_other_nodes_are_dead(
    rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost, dead: int
) -> None:
    lost, *others = rabbitmq_cluster.nodes
    rabbitmq_cluster.lose_disk(lost)
    for node in others[:dead]:
        node.kill()

    rabbitmq_cluster.heal()

    rabbitmq_cluster.transfer_leader("orders", lost, orders.name)
    assert is_confirmed(lost, orders, within=30)


@pytest.mark.soak
def test_what_was_confirmed_is_there_when_all_nodes_were_dead(
    rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost
) -> None:
    for node in rabbitmq_cluster.nodes:
        assert is_confirmed(node, orders, within=30)

    for node in rabbitmq_cluster.nodes:
        node.kill()

    with pytest.raises(UsageError, match="no node of the cluster runs"):
        rabbitmq_cluster.leader_of("orders", orders.name)
    rabbitmq_cluster.start()
    rabbitmq_cluster.wait_ready()
    orders.wait_for_messages("orders", 3)
    assert is_confirmed(rabbitmq_cluster.nodes[0], orders, within=30)


@pytest.mark.soak
def test_a_node_that_starts_while_it_is_cut_off_stays_cut_off(
    rabbitmq_cluster: RabbitMQCluster, orders: VirtualHost
) -> None:
    """The node waits for the others, and accepts no clients until it finds them."""
    alone, *others = rabbitmq_cluster.nodes
    rabbitmq_cluster.partition(alone)
    alone.kill()

    with pytest.raises(TimeoutError):
        alone.start(timeout=20)

    assert alone.status() == "running"
    assert alone.name not in rabbitmq_cluster.evaluate("rabbit_nodes:list_running()")
    assert is_confirmed(others[0], orders, within=30)
    rabbitmq_cluster.heal()
    assert is_confirmed(alone, orders, within=60)
