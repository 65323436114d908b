"""A staged-mode query from a queue into files, parts of which a test kills."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from integration.programs.spark_queries import start
from integration.support.spark_application import GIVEN_UP, Application, batches_in, committed_rows, drained
from reliable_mq import Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import VirtualHost

    Running = Callable[[], object]  # starts the query if it is down

DEADLINE = 400.0
STAGED = {"queue": "orders", "stage": "orders.stage", "maxMessagesPerTrigger": "100", "minPartitions": "2"}


class Pipeline:
    """A staged-mode query from a queue into files, parts of which a test kills.

    Args:
        vhost: The virtual host of the queue.
        directory: The directory of the query.
        rng: Chooses the moments.
        kind: The type of the queue.

    Attributes:
        settings: The settings of the query, as `spark_queries` takes them.
        restarts: How often the query was restarted.
        given_up: Further restarts, after Spark had given up on a new Python process. Spark gives it 10 s to start,
            which is too little on a busy machine.
        ended: Why the query ended the last time.
    """

    def __init__(self, vhost: VirtualHost, directory: Path, rng: random.Random, kind: str = "quorum") -> None:
        self.settings: dict[str, Any] = {
            "sources": {"staged": {"url": vhost.url, **STAGED}},
            "directory": str(directory),
            "pause": 0.001,
        }
        self.restarts = self.given_up = 0
        self.ended = ""
        self._queue = Queue("orders", type=kind, dead_letter=None)  # type: ignore[arg-type]
        self._vhost = vhost
        self._rng = rng
        self._directory = directory / "staged"
        self._published: list[str] = []
        self._publish(0)  # declares the queue

    def moments(self, kills: int, running: Running, *, broker: bool = False) -> Iterator[int]:
        """Yield at random moments, while messages are published, moved and read.

        Args:
            kills: How many times to yield.
            running: Starts the query if it is down.
            broker: Whether the test kills the broker. All messages are then published before, because otherwise the
                publisher would publish some of them again.
        """
        for number in range(kills):
            for _ in range(self._rng.randrange(1, 3)):
                reached = self._commits() + 1  # not more, because one batch may read all messages
                self._publish(100, at_a_time=100)
                self._wait_for_commits(reached, running)
            with ThreadPoolExecutor(1) as thread:
                publishing = thread.submit(self._publish, 200, at_a_time=200 if broker else 2)
                if broker:
                    publishing.result(DEADLINE)
                Event().wait(self._rng.uniform(0.0, 0.2 if broker else 1.0))
                yield number
                publishing.result(DEADLINE)

    def check(self, spark: SparkSession, kills: str) -> str:
        """Read the rest, compare the files with the published messages; return a summary."""
        drained(spark, self._rest, DEADLINE)
        return self._account(kills)

    def check_apart(self, log: Path, kills: str) -> str:
        """Do the same as `check`, in a separate application."""
        while True:
            with Application("spark_queries", self._rest, log) as application:
                try:
                    application.wait(DEADLINE)
                except AssertionError:
                    if GIVEN_UP not in application.said():
                        raise
                else:
                    return self._account(kills)

    @property
    def _rest(self) -> dict[str, Any]:
        return {**self.settings, "pause": 0.0, "drain": True}

    def _account(self, kills: str) -> str:
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
        """Run the query in the session of the tests; restart it if it has failed."""
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
        """Run the query in a separate application; restart that if it has ended."""
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
        if GIVEN_UP in why:
            self.given_up += 1
        else:
            self.restarts += 1
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
