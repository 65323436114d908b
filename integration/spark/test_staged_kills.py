"""The kill matrix of staged mode: parts of a running query die at random moments; files have each message once.

`make soak` kills each part at 20 moments or more, all seeds together; other runs kill each once, in one query.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from integration.programs.spark_queries import start
from integration.support.processes import Process
from integration.support.seeds import soak_seeds
from integration.support.spark_application import (
    Application,
    batches_in,
    committed_rows,
    kill_reader,
    kill_worker,
)
from integration.support.spark_cluster import StandaloneCluster
from reliable_mq import Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import RabbitMQ, VirtualHost

    Running = Callable[[], object]  # starts the query where it is down

MOMENTS = 20  # for each kind of kill, in `make soak`
DEADLINE = 400.0
GIVEN_UP = "Python worker failed to connect back"
STAGED = {"queue": "orders", "stage": "orders.stage", "maxMessagesPerTrigger": "100", "minPartitions": "2"}


class Pipeline:
    """Messages on their way into files, through a query in staged mode of which a test kills parts.

    Args:
        vhost: of the queue.
        directory: of the query.
        rng: decides on the moments.
        kind: of the queue.

    Attributes:
        settings: of the query, as `spark_queries` takes them.
        restarts: of the query.
        ended: why it was down the last time.
    """

    def __init__(self, vhost: VirtualHost, directory: Path, rng: random.Random, kind: str = "quorum") -> None:
        self.settings: dict[str, Any] = {
            "sources": {"staged": {"url": vhost.url, **STAGED}},
            "directory": str(directory),
            "pause": 0.001,
        }
        self.restarts = 0
        self.ended = ""
        self._queue = Queue("orders", type=kind, dead_letter=None)  # type: ignore[arg-type]
        self._vhost = vhost
        self._rng = rng
        self._directory = directory / "staged"
        self._published: list[str] = []
        self._publish(0)  # the queue exists

    def moments(self, kills: int, running: Running, *, broker: bool = False) -> Iterator[int]:
        """Yield at a random moment while messages are published, moved and read; so many times.

        Args:
            kills: how many.
            running: starts the query where it is down.
            broker: whether it is what dies: all is published then, or the publisher would publish some again.
        """
        for number in range(kills):
            reached = self._commits() + self._rng.randrange(1, 3)
            self._publish(200)  # two batches or more
            self._wait_for_commits(reached, running)
            with ThreadPoolExecutor(1) as thread:
                publishing = thread.submit(self._publish, 200, at_a_time=200 if broker else 2)
                if broker:
                    publishing.result(DEADLINE)
                Event().wait(self._rng.uniform(0.0, 0.2 if broker else 1.0))
                yield number
                publishing.result(DEADLINE)

    def check(self, spark: SparkSession, kills: str) -> str:
        """Read the rest, compare the files with what was published, and return the account."""
        for query in start(spark, {**self.settings, "pause": 0.0, "drain": True}):
            assert query.awaitTermination(DEADLINE)
        rows = committed_rows(self._directory / "output")
        account = (
            f"staged mode, {kills}: {len(self._published)} confirmed, "
            f"{len(set(self._published) - rows.keys())} lost, {rows.total() - len(rows)} twice; "
            f"the query was started again {self.restarts} times"
        )
        assert rows == dict.fromkeys(self._published, 1), account
        assert self._vhost.live_counts(["orders"])["orders"] == 0
        return account

    @contextmanager
    def in_session(self, spark: SparkSession, **options: str) -> Iterator[Running]:
        """Run the query in the session of the tests; start it again where it has failed."""
        source = {**self.settings["sources"]["staged"], **options}
        settings = {**self.settings, "sources": {"staged": source}}
        queries: list[StreamingQuery] = []

        def running() -> None:
            if not queries or not queries[-1].isActive:
                if queries:
                    self._has_ended(str(queries[-1].exception()))
                queries.extend(start(spark, settings))

        try:
            yield running
        finally:
            if queries:
                queries[-1].stop()

    @contextmanager
    def apart(self, log: Path, **settings: Any) -> Iterator[tuple[Running, Callable[[], Application]]]:
        """Run the query in an application of its own; start that again where it has ended."""
        applications: list[Application] = []

        def running() -> None:
            if not applications or applications[-1].process.poll() is not None:
                if applications:
                    self._has_ended(applications[-1].said())
                applications.append(Application("spark_queries", {**self.settings, **settings}, log))

        try:
            yield running, lambda: applications[-1]
        finally:
            for application in applications:
                application.__exit__()

    def _has_ended(self, why: str) -> None:
        """Count a restart, unless Spark has given up on a new Python process, which on a busy machine takes it 10 s."""
        self.restarts += GIVEN_UP not in why
        self.ended = why[-2000:]

    def _publish(self, count: int, at_a_time: int = 200) -> None:
        with Publisher(self._vhost.url, topology=[self._queue]) as publisher:
            publisher.connect()
            for _ in range(count // at_a_time):
                messages = [Message(b"body") for _ in range(at_a_time)]
                assert publisher.publish_many(messages, routing_key="orders").ok
                self._published += [message.message_id for message in messages]

    def _wait_for_commits(self, count: int, running: Running) -> None:
        def committed() -> bool:
            running()
            return self._commits() >= count

        wait_until(committed, timeout=DEADLINE, what=lambda: f"{count} batches: {self}", interval=0.05)

    def __repr__(self) -> str:
        return f"{self._commits()} batches, {self.restarts} restarts, the last one since {self.ended or '-'}"

    def _commits(self) -> int:
        return batches_in(self._directory / "checkpoint", "commits")


def moments() -> int:
    """How often a test kills, so that all seeds together have `MOMENTS`."""
    return max(MOMENTS // soak_seeds(), 2)


@contextmanager
def relays(url: str) -> Iterator[Callable[[], None]]:
    """Run a relay as a service, which moves; what is yielded kills it, and starts the next one."""
    running: list[Process] = []

    def launch() -> None:
        running.append(Process("integration.programs.staging", url, "orders", "orders.stage", stdin=0, stderr=2))

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


@pytest.mark.timeout(900)
def test_f68_parts_of_a_query_are_killed_and_files_have_all_once(
    spark: SparkSession,
    private_vhost: VirtualHost,
    private_broker: RabbitMQ,
    tmp_path: Path,
    rng: random.Random,
    report: Callable[[str], None],
) -> None:
    """Reader, relay, worker and broker, in some order; the query has a relay, and another one waits, or moves."""
    pipeline = Pipeline(private_vhost, tmp_path, rng)
    parts = rng.sample(("reader", "relay", "worker", "broker"), 4)
    with relays(private_vhost.url) as kill_relay, pipeline.in_session(spark) as running:
        for number in pipeline.moments(len(parts), running, broker=True):
            if parts[number] == "reader":
                kill_reader(spark)
            elif parts[number] == "relay":
                kill_relay()
            elif parts[number] == "worker":
                kill_worker(spark)
            else:
                private_broker.kill()
                private_broker.start()
    report(pipeline.check(spark, f"one kill each of {', '.join(parts)}"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f60_an_application_is_killed_and_files_have_all_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """With its reader, or without: that has a moment left then."""
    pipeline = Pipeline(vhost, tmp_path, rng)
    with pipeline.apart(tmp_path / "log") as (running, application):
        for _ in pipeline.moments(moments(), running):
            application().kill(reader_too=rng.random() < 0.5)
    report(pipeline.check(spark, f"{moments()} kills of the application"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f68_a_reader_with_its_relay_is_killed_and_files_have_all_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The query fails, and is started again."""
    pipeline = Pipeline(vhost, tmp_path, rng, kind=rng.choice(["quorum", "classic"]))
    with pipeline.in_session(spark) as running:
        for _ in pipeline.moments(moments(), running):
            kill_reader(spark)
    assert pipeline.restarts >= moments() - 1
    report(pipeline.check(spark, f"{moments()} kills of the reader with its relay"))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_f68_a_relay_as_a_service_is_killed_and_files_have_all_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The query does not notice."""
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
    """On a standalone cluster."""
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
def test_f68_a_broker_is_killed_under_a_query_and_files_have_all_once(
    spark: SparkSession,
    private_vhost: VirtualHost,
    private_broker: RabbitMQ,
    tmp_path: Path,
    rng: random.Random,
    report: Callable[[str], None],
    kind: str,
) -> None:
    """It comes back, and the query reads on."""
    pipeline = Pipeline(private_vhost, tmp_path, rng, kind)
    with pipeline.in_session(spark) as running:
        for _ in pipeline.moments(moments(), running, broker=True):
            private_broker.kill()
            private_broker.start()
    report(pipeline.check(spark, f"{moments()} kills of the broker, {kind} queue"))
