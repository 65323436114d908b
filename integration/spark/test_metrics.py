"""Metrics of real Spark processes in text files.

They come from the driver's readers, and from the workers that read and publish.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from reliable_mq import Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client import Metric
    from pyspark.sql import SparkSession

    from reliable_mq.testing import VirtualHost

ORDERS, COPIES, EVENTS = Queue("orders"), Queue("copies"), Queue("events", type="stream")


def texts(directory: Path) -> Iterator[str]:
    """Yield the existing files. A new process removes those of dead ones."""
    for path in directory.glob("*.prom"):
        with contextlib.suppress(FileNotFoundError):
            yield path.read_text()


def totals(directory: Path) -> dict[str, float]:
    """Return samples of all files, summed over processes.

    A file must not have a sample twice: the exporter would refuse it.
    """
    found: dict[str, float] = defaultdict(float)
    seen: set[tuple[str, str]] = set()
    for text in texts(directory):
        families: list[Metric] = list(text_string_to_metric_families(text))
        for sample in (sample for family in families for sample in family.samples):
            key = sample.name, str(sorted(sample.labels.items()))
            assert key not in seen
            seen.add(key)
            assert sample.labels.keys() <= {"worker", "queue", "stream", "publisher", "outcome", "le"}
            where = [value for name, value in sample.labels.items() if name in ("queue", "stream", "outcome")]
            found["/".join([sample.name.removeprefix("reliable_mq_"), *where])] += sample.value
    return found


def test_readers_and_workers_leave_their_metrics_in_files(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checkpoint: str
) -> None:
    """The files count messages read, acked, published and confirmed.

    Messages go from a queue through Spark to a queue, and to a stream. No file has a secret.
    """
    vhost.broker.management.call("PUT", "users", "measured", body={"password": "s3cr3t-pass", "tags": ""})
    vhost.broker.management.call(
        "PUT", "permissions", vhost.name, "measured", body={"configure": ".*", "write": ".*", "read": ".*"}
    )
    url = vhost.url.replace("guest:guest", "measured:s3cr3t-pass")
    for queue, count in ((ORDERS, 300), (COPIES, 0), (EVENTS, 200)):
        with Publisher(url, topology=[queue]) as publisher:
            assert publisher.publish_many((Message(b"%d" % n) for n in range(count)), routing_key=queue.name).ok
    metrics = tmp_path / "metrics"
    read = {"url": url, "metricsDirectory": str(metrics)}

    query = (
        spark.readStream.format("rabbitmq")
        .options(**read, queue="orders", maxMessagesPerTrigger="100")
        .load()
        .select("body", "message_id")
        .writeStream.format("rabbitmq")
        .options(**read, routingKey="copies", checkpointLocation=checkpoint)
        .start()
    )
    published = "publisher_settled_total/confirmed"
    wait_until(
        lambda: totals(metrics)[published] >= 300 and totals(metrics)["spark_queue_deliveries_total/orders"] >= 300,
        timeout=150,
        what=lambda: str(dict(totals(metrics))),
    )
    assert totals(metrics)["spark_queue_connected"] == 1
    query.stop()
    wait_until(lambda: "spark_queue_connected" not in totals(metrics), timeout=20, what="gauges gone with their query")
    found = totals(metrics)
    acked, back = found["spark_queue_acked_total/orders"], found["spark_queue_requeued_total/orders"]
    assert acked + back == found["spark_queue_deliveries_total/orders"] == 300
    assert back <= 100
    assert 3 <= found["spark_queue_batches_total"] <= 30
    assert found["spark_queue_reconnects_total"] == found["spark_queue_stale_acks_total"] == 0

    stream = spark.read.format("rabbitmq").options(**read, stream="events", minPartitions="2").load()
    assert stream.count() == 200
    wait_until(lambda: totals(metrics)["spark_stream_rows_total/events"] == 200, timeout=20, what="rows read")
    followed = (
        spark.readStream.format("rabbitmq")
        .options(**read, stream="events", startingOffsets="earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", f"{checkpoint}-stream")
        .start()
    )
    wait_until(
        lambda: totals(metrics)["spark_stream_planned/events"] == totals(metrics)["spark_stream_end/events"] == 200,
        timeout=150,
        what=lambda: str(dict(totals(metrics))),
    )
    followed.stop()
    wait_until(lambda: "spark_stream_end/events" not in totals(metrics), timeout=20, what="its gauges gone")
    text = "".join(texts(metrics))
    assert "s3cr3t" not in text
    assert "measured" not in text
