"""Streaming queries over streams: what a file sink holds, also where the application was killed in mid-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.programs.spark_stream_to_files import start
from integration.support.spark_application import Application, batches_in, committed_rows
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from integration.support.checker import Checker
    from integration.support.management import VirtualHost

EVENTS = Queue("events", type="stream")
MESSAGES = 1200
PER_BATCH = 80
PHASES = ("read planned", "reading", "sink written", "commit log written")


def publish(vhost: VirtualHost, checker: Checker, count: int) -> None:
    messages = [Message(b"%d" % number) for number in range(count)]
    for message in messages:
        checker.attempted(message.message_id)
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        assert publisher.publish_many(messages, routing_key=EVENTS.name).ok
    for message in messages:
        checker.confirmed(message.message_id)


def reached(phase: str, directory: Path, skip: int) -> Callable[[], bool]:
    """Whether the batch after ``skip`` more of them has come to a phase."""
    checkpoint, metadata = directory / "checkpoint", directory / "output" / "_spark_metadata"
    batch = batches_in(checkpoint, "commits") + skip
    rows = len(list(directory.glob("reading-*"))) + PER_BATCH * skip
    return {
        "read planned": lambda: batches_in(checkpoint, "offsets") > batch,
        "reading": lambda: len(list(directory.glob("reading-*"))) > rows,
        "sink written": (metadata / str(batch)).exists,
        "commit log written": lambda: batches_in(checkpoint, "commits") > batch,
    }[phase]


@pytest.mark.timeout(900)
def test_f60_a_file_sink_holds_each_message_once_wherever_the_application_is_killed(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Checker, rng: random.Random
) -> None:
    """SIGKILLed in every phase of a batch, restarted on its checkpoint: 0 lost, and 0 duplicated."""
    publish(vhost, checker, MESSAGES)
    phases = list(PHASES)
    rng.shuffle(phases)
    settings = {
        "url": vhost.url,
        "stream": EVENTS.name,
        "directory": str(tmp_path),
        "options": {
            "startingOffsets": "earliest",
            "maxMessagesPerTrigger": str(PER_BATCH),
            "minPartitions": str(rng.randrange(1, 4)),
        },
        "pause": 0.003,
    }
    for phase in phases:
        condition = reached(phase, tmp_path, rng.randrange(3))
        with Application("spark_stream_to_files", settings, tmp_path / "log") as application:
            application.wait_until(condition, timeout=240, what=phase)
            application.kill()
    assert start(spark, {**settings, "drain": True, "pause": 0.0}).awaitTermination(240)
    for message_id, times in committed_rows(tmp_path / "output").items():
        for _ in range(times):
            checker.handled(message_id)
            checker.effect(message_id)
    balance = checker.close(effects_once=True)
    assert not balance.duplicated


def test_a_query_goes_on_where_its_checkpoint_ends(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Checker
) -> None:
    """Two runs with availableNow: each message once, by several tasks, under a limit, with progress that counts."""
    settings = {
        "url": vhost.url,
        "stream": EVENTS.name,
        "directory": str(tmp_path),
        "drain": True,
        "options": {"startingOffsets": "earliest", "maxMessagesPerTrigger": "100", "minPartitions": "2"},
    }
    for _ in range(2):
        publish(vhost, checker, 150)
        query = start(spark, settings)
        assert query.awaitTermination(120)
        assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [100, 50]
    rows = committed_rows(tmp_path / "output", "offset")
    assert rows == dict.fromkeys(range(300), 1)


def test_a_batch_read_is_split_among_tasks(spark: SparkSession, vhost: VirtualHost, checker: Checker) -> None:
    """All columns, or those that a schema asks for."""
    publish(vhost, checker, 1000)
    source = spark.read.format("rabbitmq").options(url=vhost.url, stream="events", minPartitions="4")
    rows = source.load()
    assert rows.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in rows.select("offset", "message_id").collect()) == list(range(1000))
    narrow = source.schema("body binary, offset bigint").load()
    assert {(row.offset, bytes(row.body)) for row in narrow.collect()} == {(n, b"%d" % n) for n in range(1000)}
