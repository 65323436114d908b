"""The kill matrix of staged mode: files have each message once.

Parts of a running query are killed at random moments. The tests run only in `make soak`, which kills each part at 20
moments or more, all seeds together.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from integration.support.processes import Process
from integration.support.seeds import soak_seeds
from integration.support.spark_application import kill_reader, kill_worker
from integration.support.spark_cluster import StandaloneCluster
from integration.support.staged_pipeline import Pipeline
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from reliable_mq.testing import RabbitMQ, VirtualHost

MOMENTS = 20  # for each kind of kill, in `make soak`


def moments() -> int:
    """Return the kills per test that give `MOMENTS` over all seeds."""
    return max(MOMENTS // soak_seeds(), 2)


@contextmanager
def relays(url: str) -> Iterator[Callable[[], None]]:
    """Run a relay as a service; yield a function that kills and replaces it.

    The relay is active when the block starts.
    """
    running: list[Process] = []

    def launch() -> None:
        running.append(Process("integration.programs.staging", url, "orders", "orders.stage", "64", stdin=0, stderr=2))

    def end() -> None:
        running[-1].kill()
        running[-1].communicate()

    def kill() -> None:
        end()
        launch()

    launch()
    try:
        assert running[0].stdout is not None
        assert running[0].stdout.readline() == b"active\n"
        yield kill
    finally:
        end()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_f68_parts_of_a_query_are_killed_and_files_have_all_once(
    spark: SparkSession,
    private_vhost: VirtualHost,
    private_broker: RabbitMQ,
    tmp_path: Path,
    rng: random.Random,
    report: Callable[[str], None],
) -> None:
    """Reader, relay, worker and broker are killed in random order.

    The query has its own relay, and another one waits or moves.
    """
    pipeline = Pipeline(private_vhost, tmp_path, rng)
    parts = rng.sample(("reader", "relay", "worker", "broker"), 4)
    with relays(private_vhost.url) as kill_relay, pipeline.in_session(spark) as running:
        for number in pipeline.moments(len(parts), running, broker=True):
            if parts[number] == "reader":
                kill_reader(spark, running)
            elif parts[number] == "relay":
                kill_relay()
            elif parts[number] == "worker":
                kill_worker(spark, running)
            else:
                private_broker.kill()
                private_broker.start()
    report(pipeline.check(spark, f"one kill each of {', '.join(parts)}"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f60_an_application_is_killed_and_files_have_all_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The reader is killed as well, or has a moment left."""
    pipeline = Pipeline(vhost, tmp_path, rng)
    with pipeline.apart(tmp_path / "log") as (running, application):
        for _ in pipeline.moments(moments(), running):
            application().kill(reader_too=rng.random() < 0.5)
    report(pipeline.check(spark, f"{moments()} kills of the application"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f68_kills_of_reader_and_relay_leave_all_once_in_files(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The query fails and is restarted."""
    pipeline = Pipeline(vhost, tmp_path, rng, kind=rng.choice(["quorum", "classic"]))
    with pipeline.in_session(spark) as running:
        for _ in pipeline.moments(moments(), running):
            kill_reader(spark, running)
    assert pipeline.restarts + pipeline.given_up >= moments() - 1
    report(pipeline.check(spark, f"{moments()} kills of the reader with its relay"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f68_kills_of_a_relay_service_leave_all_once_in_files(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The query is not affected."""
    pipeline = Pipeline(vhost, tmp_path, rng, kind=rng.choice(["quorum", "classic"]))
    with relays(vhost.url) as kill_relay, pipeline.in_session(spark, stageBy="none") as running:
        for _ in pipeline.moments(moments(), running):
            kill_relay()
    assert pipeline.restarts == 0
    report(pipeline.check(spark, f"{moments()} kills of the relay"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f59_an_executor_is_killed_and_files_have_all_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The cluster is a standalone one."""
    pipeline = Pipeline(vhost, tmp_path, rng)
    with StandaloneCluster(tmp_path) as cluster:
        spare = {"spark.task.maxFailures": "100", "spark.stage.maxConsecutiveAttempts": "100"}
        with pipeline.apart(tmp_path / "log", master=cluster.url, spark=spare) as (running, _):
            for _ in pipeline.moments(moments(), running):
                cluster.kill_executor()
    assert pipeline.restarts == 0
    report(pipeline.check(spark, f"{moments()} kills of the executor"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_f68_kills_of_the_broker_leave_all_once_in_files(
    spark: SparkSession,
    private_vhost: VirtualHost,
    private_broker: RabbitMQ,
    tmp_path: Path,
    rng: random.Random,
    report: Callable[[str], None],
    kind: str,
) -> None:
    """The query continues after each restart of the broker.

    The broker has an older stream. The first stream of a broker may be lost by a kill in its first second: row 61.
    """
    with Publisher(private_vhost.url, topology=[Queue("older", type="stream")]) as publisher:
        publisher.publish(Message(b"confirmed for good"), routing_key="older")
    pipeline = Pipeline(private_vhost, tmp_path, rng, kind)
    with pipeline.in_session(spark) as running:
        for _ in pipeline.moments(moments(), running, broker=True):
            private_broker.kill()
            private_broker.start()
    report(pipeline.check(spark, f"{moments()} kills of the broker, {kind} queue"))
