"""A consumer's deliveries come from its node's own member of a quorum queue.

That member may lag behind the leader, which counts a message as delivered long before it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from integration.support.leaders import resume_member, suspend_leader, suspend_member
from integration.support.stages import DEADLINE, publish, relaying
from reliable_mq.codec.methods import Cancel, CheckQueue, QueueState, Step
from reliable_mq.spark import queue_source
from reliable_mq.spark.options import QueueOptions, read_options
from reliable_mq.spark.queue_checks import check_queues
from reliable_mq.spark.queue_source import QueueSource
from reliable_mq.spark.queue_subscriptions import Subscriptions
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from reliable_mq.spark.queue_checks import QueueProfile
    from reliable_mq.testing import RabbitMQCluster, VirtualHost
    from reliable_mq.testing.cluster import ClusterNode

pytestmark = pytest.mark.timeout(600)

LAG = 4.0  # seconds
COUNT = 1  # equals the first prefetch, so that no message stays ready


@pytest.fixture
def node(rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost) -> ClusterNode:
    """A node that does not lead the queue. The queue has messages."""
    publish(cluster_vhost.url, "orders", COUNT, type="quorum")
    leader = rabbitmq_cluster.leader_of("orders", cluster_vhost.name)
    return next(node for node in rabbitmq_cluster.nodes if node is not leader)


@pytest.fixture
def source(node: ClusterNode, cluster_vhost: VirtualHost) -> Iterator[QueueSource]:
    given = {"url": node.url_of(cluster_vhost.name), "queue": "orders"}
    options = read_options(given, streaming=True)
    assert isinstance(options, QueueOptions)
    source = QueueSource(options, ["message_id"])
    yield source
    source.stop()


def read_all(source: QueueSource) -> int:
    """Read as Spark does with availableNow; return the number of messages."""
    source.prepareForTriggerAvailableNow()
    start, end = None, source.initialOffset()
    while end != start:
        start, end = end, source.latestOffset(end, ReadMaxRows(1000))
    count = end["queues"]["orders"]
    assert isinstance(count, int)
    return count


def perform(channel: AdminChannel, steps: Generator[Step, Any, Any], after: Callable[[Step], None]) -> Any:
    """Perform the steps, and call `after` with each of them. Return the result."""
    try:
        step = next(steps)
        while True:
            reply = channel.perform(step)
            after(step)
            step = steps.send(reply)
    except StopIteration as stopped:
        return stopped.value


def test_a_message_returned_between_two_subscriptions_is_found(node: ClusterNode, cluster_vhost: VirtualHost) -> None:
    """A node returns deliveries to a cancelled consumer. The queue delivers them to the next one."""
    subscriptions = Subscriptions("reader", ["orders"], lambda _: True, lambda: COUNT)
    subscriptions.found(QueueState("orders", COUNT, 0))
    suspend_member(node, cluster_vhost, "orders", DEADLINE)
    with (
        AdminChannel(parse_url(node.url_of(cluster_vhost.name)), name="reader") as channel,
        AdminChannel(parse_url(cluster_vhost.url), name="observer") as observer,
    ):

        def after(step: Step) -> None:
            if isinstance(step, Cancel):
                resume_member(node, cluster_vhost, "orders")
                returned = QueueState("orders", COUNT, 0)
                wait_until(
                    lambda: observer.perform(CheckQueue("orders")) == returned, timeout=DEADLINE, what="returned"
                )

        perform(channel, subscriptions.begin(), after)
        assert perform(channel, subscriptions.settled(), after) is False


def test_available_now_waits_for_the_deliveries_of_its_node(
    node: ClusterNode, cluster_vhost: VirtualHost, source: QueueSource
) -> None:
    suspend_member(node, cluster_vhost, "orders", LAG)
    read = read_all(source)
    assert read == COUNT, vars(source._reader)


def test_available_now_waits_for_them_after_a_count_in_doubt(
    node: ClusterNode, cluster_vhost: VirtualHost, source: QueueSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader does not respond to the reader's first count; the node's own member responds last."""

    def check(*given: Any) -> list[QueueProfile]:
        profiles = check_queues(*given)
        suspend_member(node, cluster_vhost, "orders", 2 * LAG)
        suspend_leader(cluster_vhost, "orders", LAG / 2)
        return profiles

    monkeypatch.setattr(queue_source, "check_queues", check)
    assert read_all(source) == COUNT


def test_a_relay_waits_for_the_deliveries_of_its_node(node: ClusterNode, cluster_vhost: VirtualHost) -> None:
    """The member lags for longer than the relay takes for three counts."""
    with relaying(node.url_of(cluster_vhost.name)) as relay:
        wait_until(lambda: relay.statistics.moved == COUNT, timeout=DEADLINE, what="the first messages moved")
    publish(cluster_vhost.url, "orders", COUNT, first=COUNT)
    suspend_member(node, cluster_vhost, "orders", 3 * LAG)
    with relaying(node.url_of(cluster_vhost.name)) as relay:
        assert relay.wait_moved(DEADLINE)
        assert relay.statistics.moved == COUNT
