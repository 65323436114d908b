"""On a cluster of three nodes, leaders are SIGKILLed under live queries: a queue to a queue, and a stream."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.support.set_up import broker_image
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing.fixtures import _session_rabbitmq_cluster, rabbitmq_cluster
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import Audit, RabbitMQCluster, VirtualHost

__all__ = ["_session_rabbitmq_cluster", "rabbitmq_cluster"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ORDERS, COPIES, EVENTS = Queue("orders"), Queue("copies"), Queue("events", type="stream")
MESSAGES = 300
PATIENCE = 180.0  # seconds, for a step of a query on a busy machine


@pytest.fixture(scope="session")
def rabbitmq_image() -> str:
    return broker_image("newest")


@pytest.fixture
def cluster_vhost(
    rabbitmq_cluster: RabbitMQCluster, new_vhost: Callable[[RabbitMQCluster], VirtualHost]
) -> VirtualHost:
    return new_vhost(rabbitmq_cluster)


def publish(vhost: VirtualHost, queue: Queue) -> list[str]:
    messages = [Message(b"%d" % number) for number in range(MESSAGES)]
    with Publisher(vhost.url, topology=[queue, COPIES]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return [message.message_id for message in messages]


def test_f20_leaders_killed_under_live_queries_lose_nothing(
    spark: SparkSession, rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, checker: Audit, tmp_path: Path
) -> None:
    """That of the queue, then that of the stream. Neither query fails; a batch of the queue may come twice."""
    for message_id in publish(cluster_vhost, ORDERS):
        checker.attempted(message_id)
        checker.confirmed(message_id)
    publish(cluster_vhost, EVENTS)
    killed, whole, killed_again = threading.Event(), threading.Event(), threading.Event()
    offsets: Counter[int] = Counter()
    copying: list[StreamingQuery] = []

    def kill_leader(queue: Queue) -> None:
        rabbitmq_cluster.leader_of(queue.name, cluster_vhost.name).kill()

    def collect(rows: DataFrame, batch: int) -> None:
        if batch == 1:
            copying.append(copy())
            wait_until(lambda: copying[0].lastProgress, timeout=PATIENCE, what="a batch of the other query")
            kill_leader(ORDERS)
            killed.set()
        if batch == 3:
            assert whole.wait(PATIENCE)
            kill_leader(EVENTS)
            killed_again.set()
        offsets.update(row.offset for row in rows.select("offset").collect())  # a leader is gone, or just elected

    def checkpoint(name: str) -> dict[str, str]:
        return {"checkpointLocation": str(tmp_path / name)}

    def copy() -> StreamingQuery:
        source = spark.readStream.format("rabbitmq").option("url", cluster_vhost.url)
        return (
            source.option("maxMessagesPerTrigger", 20).option("queue", "orders").load().select("body", "message_id")
            .writeStream.format("rabbitmq").options(url=cluster_vhost.url, routingKey="copies", **checkpoint("queue"))
            .start()
        )  # fmt: skip

    source = spark.readStream.format("rabbitmq").option("url", cluster_vhost.url).option("maxMessagesPerTrigger", 60)
    read = (
        source.option("stream", "events").option("startingOffsets", "earliest").load()
        .writeStream.foreachBatch(collect).options(**checkpoint("stream"))
        .start()
    )  # fmt: skip
    came: Counter[str] = Counter()

    def wait(condition: Callable[[], object], what: str) -> None:
        wait_until(
            lambda: condition() or read.exception() or (copying and copying[0].exception()),
            timeout=PATIENCE, what=lambda: f"{what}; {len(came)} and {len(offsets)} of {MESSAGES}", interval=0.3,
        )  # fmt: skip
        assert read.exception() is None
        assert not copying or copying[0].exception() is None

    with Consumer(cluster_vhost.url, COPIES, lambda copied: came.update([copied.message_id])):
        wait(killed.is_set, "the leader of the queue killed")
        assert len(came) < MESSAGES
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
        whole.set()
        wait(killed_again.is_set, "the leader of the stream killed")
        assert len(offsets) < MESSAGES
        wait(lambda: len(came) == len(offsets) == MESSAGES, "all without that node")
        copying[0].processAllAvailable()
        rabbitmq_cluster.start()
        rabbitmq_cluster.wait_ready()
    copying[0].stop()
    read.stop()
    assert set(offsets.values()) == {1}
    for message_id, times in came.items():
        for _ in range(times):
            checker.handled(message_id)
    checker.drain(cluster_vhost, ["orders", "copies"], dead_letters=["orders.dead", "copies.dead"])
    balance = checker.close()
    assert balance.left == balance.dead_lettered == 0
