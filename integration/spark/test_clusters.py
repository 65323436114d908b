"""Queues and streams on Spark clusters.

Executors are separate processes, which import the package.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support.spark import drain
from integration.support.spark_application import Application, batches_in, committed_rows
from integration.support.spark_cluster import StandaloneCluster
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from reliable_mq.testing import VirtualHost

ORDERS, EVENTS, COPIES = Queue("orders"), Queue("events", type="stream"), Queue("copies")
BOTH_EXECUTORS = {
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
}
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def published(vhost: VirtualHost, count: int, queue: Queue = ORDERS, padding: bytes = b"") -> set[str]:
    messages = [Message(b"%d" % number + padding) for number in range(count)]
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return {message.message_id for message in messages}


def settings(vhost: VirtualHost, directory: Path, master: str, **kind: str) -> dict[str, object]:
    source = {"url": vhost.url, "maxMessagesPerTrigger": "200", "minPartitions": "2", **kind}
    return {"sources": {"orders": source}, "directory": str(directory), "master": master, "drain": True}


@pytest.mark.parametrize("found", [False, True], ids=["registered", "found by Spark"])
def test_a_local_cluster_reads_a_queue_to_its_end(vhost: VirtualHost, tmp_path: Path, found: bool) -> None:
    """The source is registered by the program, or found through the wheel's module."""
    expected = published(vhost, 1000)
    given = {**settings(vhost, tmp_path, "local-cluster[1,2,1024]", queue="orders"), "register": not found}
    with Application("spark_queries", given, tmp_path / "log", discovered=found) as application:
        application.wait(400)
    rows = committed_rows(tmp_path / "orders" / "output")
    assert rows.keys() == expected
    assert rows.total() == len(expected)


@contextmanager
def local_cluster(_directory: Path) -> Iterator[str]:
    yield "local-cluster[2,1,1024]"


@contextmanager
def two_hosts(directory: Path) -> Iterator[str]:
    with StandaloneCluster(directory, cores=1, hosts=("127.0.0.1", "127.0.0.2")) as cluster:
        yield cluster.url


@pytest.mark.parametrize("executors", [local_cluster, two_hosts])
def test_executors_read_a_stage_in_parallel_bypassing_the_driver(
    vhost: VirtualHost,
    tmp_path: Path,
    report: Callable[[str], None],
    executors: Callable[[Path], AbstractContextManager[str]],
) -> None:
    """Both executors read rows, and the driver sees at most 1 MiB of 20.

    Spark's event log of tasks shows it.
    """
    expected = published(vhost, 1000, padding=bytes(20_000))
    log = tmp_path / "events"
    log.mkdir()
    with executors(tmp_path) as master:
        given = settings(
            vhost, tmp_path, master, queue="orders", stage="orders.stage", minPartitions="4",
            maxMessagesPerTrigger="1000",
        )  # fmt: skip
        given["spark"] = {
            **BOTH_EXECUTORS,
            "spark.rpc.message.maxSize": "1",
            "spark.driver.maxResultSize": "1m",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": log.as_uri(),
        }
        with Application("spark_queries", {**given, "pause": 0.002}, tmp_path / "log") as application:
            application.wait(400)
    rows = committed_rows(tmp_path / "orders" / "output")
    assert rows == dict.fromkeys(expected, 1)
    events = [json.loads(line) for path in log.rglob("[!.]*") if path.is_file() for line in path.open() if line.strip()]
    tasks = [event for event in events if event["Event"] == "SparkListenerTaskEnd"]
    read: Counter[tuple[str, str]] = Counter()
    results: Counter[str] = Counter()
    for task in tasks:
        info, metrics = task["Task Info"], task["Task Metrics"]
        read[info["Host"], info["Executor ID"]] += metrics["Output Metrics"]["Records Written"]
        results[info["Host"]] += metrics["Result Size"]
    by_executor = ", ".join(f"{executor} on {host}: {count}" for (host, executor), count in sorted(read.items()))
    by_host = ", ".join(f"{host}: {size}" for host, size in sorted(results.items()))
    report(
        f"{executors.__name__}: rows by executor: {by_executor}; bytes of results of {len(tasks)} tasks to the driver, "
        f"by host: {by_host}"
    )
    assert read.total() == len(expected)
    assert len(+read) == 2
    assert len(results) == (2 if executors is two_hosts else 1)
    assert results.total() < 2**20


def test_a_provider_of_credentials_is_called_on_the_executors(vhost: VirtualHost, tmp_path: Path) -> None:
    """The provider is installed on the executors, as the package is.

    No other user may log in, and tasks of both executors do.
    """
    expected = published(vhost, 1000)
    user = "vault-of-tests"  # also the password
    vhost.add_user(user)
    vhost.broker.rabbitmqctl("clear_permissions", "-p", vhost.name, "guest")
    calls = tmp_path / "calls"
    calls.mkdir()
    installed = tmp_path / "wheel"
    installed.mkdir()
    (installed / "company_vault.py").write_text(
        "import os, tempfile\n"
        "def rabbitmq():\n"
        f"    with tempfile.NamedTemporaryFile('w', dir={str(calls)!r}, delete=False) as call:\n"
        "        call.write(os.getcwd())\n"
        f"    return {user!r}, {user!r}\n"
    )
    given = settings(
        vhost, tmp_path, "local-cluster[2,1,1024]", queue="orders", stage="orders.stage", minPartitions="4",
        url=vhost.url.replace("guest:guest@", ""), credentialsProvider="company_vault:rabbitmq",
    )  # fmt: skip
    given |= {"spark": BOTH_EXECUTORS, "pause": 0.002, "register": False}
    with Application("spark_queries", given, tmp_path / "log", discovered=True) as application:
        application.wait(400)
    assert committed_rows(tmp_path / "orders" / "output") == dict.fromkeys(expected, 1)
    directories = {Path(call.read_text()) for call in calls.iterdir()}
    executors = {each for each in directories if each.parent.name.startswith("app-")}
    assert len(executors) == 2
    assert len(directories - executors) == 1, "that of the driver"
    assert user not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_f59_an_executor_killed_in_mid_task_loses_nothing(vhost: VirtualHost, tmp_path: Path, kind: str) -> None:
    """Its tasks run on another executor with the same messages.

    The cluster is a standalone one. No message is read twice.
    """
    queue = ORDERS if kind == "queue" else EVENTS
    expected = published(vhost, 1000, queue)
    source = {kind: queue.name} | ({"startingOffsets": "earliest"} if kind == "stream" else {})
    with StandaloneCluster(tmp_path) as cluster:
        given = {**settings(vhost, tmp_path, cluster.url, **source), "pause": 0.005}
        with Application("spark_queries", given, tmp_path / "log") as application:
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


@pytest.mark.parametrize("kind", ["queue", "stream"])
@pytest.mark.parametrize("to", ["files", "queue"])
def test_a_speculative_task_reads_what_the_first_one_reads(
    vhost: VirtualHost, tmp_path: Path, kind: str, to: str
) -> None:
    """The speculative task runs at the same time on another host.

    Files have each row once; messages that a sink publishes twice have the same id.
    """
    queue = ORDERS if kind == "queue" else EVENTS
    expected = published(vhost, 1600, queue, bytes(4096))  # Spark passes rows on once it has 64 KiB of them
    source = {kind: queue.name, "maxMessagesPerTrigger": "1600", "minPartitions": "4"}
    source |= {"startingOffsets": "earliest"} if kind == "stream" else {}
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.efficiency.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10",
        "spark.sql.execution.python.udf.maxRecordsPerBatch": "10",
    }
    with StandaloneCluster(tmp_path, hosts=("127.0.0.1", "127.0.0.2")) as cluster:
        given = {**settings(vhost, tmp_path, cluster.url, **source), "pause": 0.05, "straggler": True}
        given |= {"spark": speculation}
        if to == "queue":
            with Publisher(vhost.url, topology=[COPIES]):
                given |= {"to": {"url": vhost.url, "routingKey": COPIES.name}}
        with Application("spark_queries", given, tmp_path / "log") as application:
            application.wait(400)
    assert list(tmp_path.glob("orders/reading-0-1-*")), "no task ran beside the first one"
    if to == "files":
        rows = committed_rows(tmp_path / "orders" / "output")
        assert rows.total() == len(expected)
    else:
        rows = Counter(properties.message_id for properties, _body in drain(vhost, COPIES.name))
        assert rows.total() > len(expected), "the first task was to publish some"
    assert rows.keys() == expected
