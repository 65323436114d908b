"""Stream mode while its broker dies and starts repeatedly.

AMQP is up before the replicas of the streams are.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq import Message, Publisher, Queue
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_reader import RangeReader
from reliable_mq.spark.stream_source import StreamSource
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

RESTARTS = int(os.environ.get("RELIABLE_MQ_SOAK_BROKER_RESTARTS", "10"))
STREAMS = [Queue(f"events{number}", type="stream") for number in range(20)]
MESSAGES = 20
ANY = ReadMaxRows(2**62)


def publish(vhost: VirtualHost) -> None:
    messages = ((Message(b"x"), stream.name) for stream in STREAMS for _ in range(MESSAGES))
    # The broker is killed soon, and may lose a stream that is too new.
    with Publisher(vhost.url, topology=STREAMS, connect_timeout=60, new_queue_grace=2.0) as publisher:
        confirmations = [publisher.submit(message, routing_key=name) for message, name in messages]
        assert all(confirmation.result(60) for confirmation in confirmations)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_f01_reads_outlive_a_broker_that_restarts_repeatedly(
    private_broker: RabbitMQ, private_vhost: VirtualHost
) -> None:
    """A query plans and tasks read all the time; none ends with an error."""
    publish(private_vhost)
    names = ",".join(stream.name for stream in STREAMS)
    options: Any = read_options({"url": private_vhost.url, "stream": names}, streaming=True)
    done = threading.Event()
    errors: list[BaseException] = []
    counts = {"plans": 0, "tasks": 0}
    positions: dict[str, Any] = {}

    def plan() -> None:
        query = StreamSource(options, ["offset"])
        while not done.wait(0.01):  # as Spark asks
            positions.update(query.latestOffset(dict.fromkeys([stream.name for stream in STREAMS], 1), ANY))
            counts["plans"] += 1
        query.stop()

    def read() -> None:
        while not done.is_set():
            for stream in STREAMS:
                part = StreamRange(stream.name, 0, MESSAGES)
                rows = [row for each in RangeReader(options, part, ("offset",)).batches() for row in each.to_pylist()]
                assert [row["offset"] for row in rows] == list(range(MESSAGES))
                counts["tasks"] += 1

    def run(what: Any) -> None:
        try:
            what()
        except BaseException as error:  # passed to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(what,)) for what in (plan, read, read)]
    for thread in threads:
        thread.start()
    try:
        for number in range(RESTARTS):
            before = dict(counts)
            if number % 2:
                private_broker.stop()
            else:
                private_broker.kill()
            private_broker.start()
            wait_until(
                lambda before=before: errors or all(counts[name] > before[name] for name in counts),
                timeout=90, what="all go on",
            )  # fmt: skip
            assert not errors
        publish(private_vhost)
        wait_until(lambda: errors or set(positions.values()) == {2 * MESSAGES}, timeout=60, what="the new end")
    finally:
        done.set()
        for thread in threads:
            thread.join(90)
    print(f"{RESTARTS} restarts, {counts}")
    assert not errors
