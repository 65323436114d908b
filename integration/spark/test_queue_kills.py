"""A Spark application that reads a queue is SIGKILLed in every phase of a batch, and loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.programs.spark_queue_to_files import start
from integration.support.spark_application import Application, batches_in, committed_rows
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from integration.support.checker import Checker
    from integration.support.management import VirtualHost

MESSAGES = 600
ORDERS = Queue("orders")
PHASES = ("read planned", "reading", "sink written", "commit log written")


def publish(vhost: VirtualHost, checker: Checker, queue: Queue, count: int) -> None:
    messages = [Message(b"%d" % number) for number in range(count)]
    for message in messages:
        checker.attempted(message.message_id)
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    for message in messages:
        checker.confirmed(message.message_id)


def reached(phase: str, directory: Path, skip: int) -> Callable[[], bool]:
    """Whether the batch after ``skip`` more of them has come to a phase."""
    checkpoint, metadata = directory / "checkpoint", directory / "output" / "_spark_metadata"
    batch = batches_in(checkpoint, "commits") + skip
    read = len(list(directory.glob("reading-*")))
    return {
        "read planned": lambda: batches_in(checkpoint, "offsets") > batch,
        "reading": lambda: len(list(directory.glob("reading-*"))) > read + 40 * skip,
        "sink written": (metadata / str(batch)).exists,
        "commit log written": lambda: batches_in(checkpoint, "commits") > batch,
    }[phase]


@pytest.mark.timeout(900)
def test_f60_an_application_killed_in_every_phase_of_a_batch_loses_nothing(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Checker, rng: random.Random
) -> None:
    """Restarted on the same checkpoint until all is read: 0 lost; only what was in a batch comes twice."""
    publish(vhost, checker, ORDERS, MESSAGES)
    phases = list(PHASES)
    rng.shuffle(phases)
    settings = {
        "url": vhost.url,
        "queue": ORDERS.name,
        "directory": str(tmp_path),
        "options": {"maxMessagesPerTrigger": "40", "prefetch": "100"},
        "pause": 0.003,
    }
    for phase in phases:
        condition = reached(phase, tmp_path, rng.randrange(3))
        with Application("spark_queue_to_files", settings, tmp_path / "log") as application:
            application.wait_until(condition, timeout=240, what=phase)
            application.kill(reader_too=rng.random() < 0.5)
    assert start(spark, {**settings, "drain": True, "pause": 0.0}).awaitTermination(240)
    for message_id, times in committed_rows(tmp_path / "output").items():
        for _ in range(times):
            checker.handled(message_id)
    checker.drain(vhost, [ORDERS.name], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.left == 0
    assert balance.dead_lettered == 0
    assert len(balance.duplicated) <= len(PHASES) * 40  # a batch each
