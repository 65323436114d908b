"""The memory of Spark's Python processes with far more than a batch in the queue."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support.programs import output_of
from integration.support.spark_application import descendants
from reliable_mq import Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from reliable_mq.testing import VirtualHost

ORDERS = Queue("orders")
MIB = 2**20
SIZE, COUNT = MIB // 4, 512  # 128 MiB
LIMIT = 8 * MIB


def peaks() -> dict[int, int]:
    """Return the peak memory in bytes of each Python process of Spark, by pid."""
    found = {}
    for pid in descendants(os.getpid()):
        try:
            if "python" not in Path(f"/proc/{pid}/exe").readlink().name:  # a JVM
                continue
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        found[pid] = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    return found


def peak_of_reading(read: DataFrame, checkpoint: str, count: int) -> int:
    """Return the peak memory of the processes that the query starts.

    The largest of them is the reader.
    """
    before, most = peaks().keys(), 0
    writer = read.writeStream.format("noop").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()

    def ended() -> bool:
        nonlocal most
        most = max(most, *(peak for pid, peak in peaks().items() if pid not in before), 0)
        return not query.isActive

    wait_until(ended, timeout=120, what="all read", interval=0.02)
    assert query.exception() is None
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == count
    return most


@pytest.mark.soak  # half a minute, most of it for Spark; the test below runs the reader without Spark
def test_the_memory_of_the_reader_is_bounded_by_the_byte_limit(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path
) -> None:
    """The peak is at most eight times the byte limit above that of a small queue.

    128 MiB are in the queue, the prefetch is 2000, and the limit is 8 MiB per batch.
    """
    read = spark.readStream.format("rabbitmq").options(url=vhost.url, queue="orders", maxBytesPerTrigger=str(LIMIT))
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"small"), routing_key="orders")
        least = peak_of_reading(read.load(), str(tmp_path / "small"), 1)
        assert publisher.publish_many((Message(bytes(SIZE)) for _ in range(COUNT)), routing_key="orders").ok
        most = peak_of_reading(read.load(), str(tmp_path / "large"), COUNT)
    print(f"\n{COUNT * SIZE // MIB} MiB read; peak of the reader {most // MIB} MiB, else {least // MIB}")
    assert most - least < 8 * LIMIT


def test_the_readers_memory_alone_is_bounded_by_the_byte_limit(vhost: VirtualHost, tmp_path: Path) -> None:
    """The same limit holds for a process that calls the reader as Spark does."""

    def peak(name: str, count: int) -> int:
        (tmp_path / name).mkdir()
        options = {"maxBytesPerTrigger": str(LIMIT)}
        settings = {"url": vhost.url, "queue": "orders", "options": options, "most": 2000, "idle": 0.5, "until": count}
        given = json.dumps({**settings, "directory": str(tmp_path / name)})
        output = output_of([sys.executable, "-m", "integration.programs.spark_reader", given], timeout=100)
        return int(output.split()[-1])

    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"small"), routing_key="orders")
        least = peak("small", 1)
        assert publisher.publish_many((Message(bytes(SIZE)) for _ in range(COUNT)), routing_key="orders").ok
        most = peak("large", COUNT)
    assert len((tmp_path / "large" / "sink").read_text().splitlines()) == COUNT
    print(f"\n{COUNT * SIZE // MIB} MiB read; the reader's peak {most // MIB} MiB, else {least // MIB}")
    assert most - least < 8 * LIMIT
