"""Leaders on a cluster of three nodes are SIGKILLed under running queries.

One query copies a queue to a queue, and one reads a stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from integration.support.live_queries import COPIES, EVENTS, MESSAGES, ORDERS, LiveQueries
from integration.support.set_up import broker_image
from reliable_mq import Consumer, Queue
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

PATIENCE = 180.0  # seconds for a step of a query on a busy machine


@pytest.fixture(scope="session")
def rabbitmq_image() -> str:
    return broker_image("newest")


@pytest.fixture
def cluster_vhost(
    rabbitmq_cluster: RabbitMQCluster, new_vhost: Callable[[RabbitMQCluster], VirtualHost]
) -> VirtualHost:
    return new_vhost(rabbitmq_cluster)


def test_f20_leaders_killed_under_live_queries_lose_nothing(
    spark: SparkSession, rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, checker: Audit, tmp_path: Path
) -> None:
    """The queue's leader dies, then the stream's; neither query fails.

    A batch of the queue may be delivered twice.
    """
    live = LiveQueries(spark, cluster_vhost, checker, tmp_path)
    came, offsets = live.came, live.offsets
    killed, whole, killed_again = threading.Event(), threading.Event(), threading.Event()
    copying: list[StreamingQuery] = []

    def kill_leader(queue: Queue) -> None:
        rabbitmq_cluster.leader_of(queue.name, cluster_vhost.name).kill()

    def collect(rows: DataFrame, batch: int) -> None:
        if batch == 1:
            copying.append(live.copy())
            wait_until(lambda: copying[0].lastProgress, timeout=PATIENCE, what="a batch of the other query")
            kill_leader(ORDERS)
            killed.set()
        if batch == 3:
            assert whole.wait(PATIENCE)
            kill_leader(EVENTS)
            killed_again.set()
        offsets.update(row.offset for row in rows.select("offset").collect())  # the leader is gone or just elected

    read = live.read(collect)

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
    live.check()
