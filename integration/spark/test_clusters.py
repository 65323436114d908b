"""Queues and streams on clusters: executors in processes of their own, which import the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.support.spark_application import Application, batches_in, committed_rows
from integration.support.spark_cluster import StandaloneCluster
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support.management import VirtualHost

ORDERS, EVENTS = Queue("orders"), Queue("events", type="stream")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def published(vhost: VirtualHost, count: int, queue: Queue = ORDERS) -> set[str]:
    messages = [Message(b"%d" % number) for number in range(count)]
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return {message.message_id for message in messages}


def settings(vhost: VirtualHost, directory: Path, master: str, **kind: str) -> dict[str, object]:
    source = {"url": vhost.url, "maxMessagesPerTrigger": "200", "minPartitions": "2", **kind}
    return {"sources": {"orders": source}, "directory": str(directory), "master": master, "drain": True}


@pytest.mark.parametrize("found", [False, True], ids=["registered", "found by Spark"])
def test_a_local_cluster_reads_a_queue_to_its_end(vhost: VirtualHost, tmp_path: Path, found: bool) -> None:
    """Registered by hand, or found as the module that the wheel brings."""
    expected = published(vhost, 1000)
    given = {**settings(vhost, tmp_path, "local-cluster[1,2,1024]", queue="orders"), "register": not found}
    with Application("spark_to_files", given, tmp_path / "log", discovered=found) as application:
        application.wait(400)
    rows = committed_rows(tmp_path / "orders" / "output")
    assert rows.keys() == expected
    assert rows.total() == len(expected)


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_f59_an_executor_killed_in_mid_task_loses_nothing(vhost: VirtualHost, tmp_path: Path, kind: str) -> None:
    """On a standalone cluster: its tasks run again elsewhere, with the same messages, and nothing is read twice."""
    queue = ORDERS if kind == "queue" else EVENTS
    expected = published(vhost, 1000, queue)
    source = {kind: queue.name} | ({"startingOffsets": "earliest"} if kind == "stream" else {})
    with StandaloneCluster(tmp_path) as cluster:
        given = {**settings(vhost, tmp_path, cluster.url, **source), "pause": 0.005}
        with Application("spark_to_files", given, tmp_path / "log") as application:
            application.wait_until(lambda: list(tmp_path.glob("orders/reading-*")), timeout=240, what="a task")
            cluster.kill_executor()
            reached = batches_in(tmp_path / "orders" / "checkpoint", "commits")
            application.wait_until(
                lambda: batches_in(tmp_path / "orders" / "checkpoint", "commits") > reached, timeout=240, what="a batch"
            )
            application.wait(400)
    rows = committed_rows(tmp_path / "orders" / "output")
    assert rows.keys() == expected
    assert rows.total() == len(expected)
