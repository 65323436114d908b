"""PySpark on two cores: our source and sink, and what is written today in their place.

The session is started, and has done the same with fewer messages, before the clock starts; what is measured is one job
with its planning, or one query from its first delivery on. CPU is that of the JVM and of all Python processes, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika

from integration.bench import child
from integration.bench.broker import BenchBroker
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq import Message, Publisher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PERSISTENT = pika.BasicProperties(delivery_mode=2)
DRAINED = "body binary, message_id string"
DRAINED_AT_A_TIME = 10_000
SETTINGS = {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-Xshare:auto"}  # tests save on the compiler
LOOK_EVERY = 0.25  # seconds, for the CPU time of processes that end with a query
WARMUPS = 2  # reads before the one that is measured
TICKS = os.sysconf("SC_CLK_TCK")


def run_sink(job: Job) -> Sample:
    def write(rows: DataFrame) -> None:
        options = {"url": job.url, "routingKey": job.queue}
        rows.write.format("rabbitmq").options(**options).mode("append").save()

    return measure_writing(job, write)


def run_foreach_partition(job: Job) -> Sample:
    url, queue = job.url, job.queue

    def publish(rows: Iterator[Any]) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        channel.confirm_delivery()
        for row in rows:
            channel.basic_publish("", queue, row.body.encode(), PERSISTENT, mandatory=True)
        connection.close()

    return measure_writing(job, lambda rows: rows.foreachPartition(publish))


def run_queue(job: Job) -> Sample:
    """Read until what was ready is read, into Spark's sink that does nothing; as many in a batch as 32 MiB hold."""
    options = {"url": job.url, "prefetch": "65535"}
    options["failOnDataLoss"] = "false"  # the queue is as the broker makes it: a quorum queue drops after 20 deaths

    def read(spark: SparkSession, queue: str, expected: int, meter: Meter) -> None:
        with tempfile.TemporaryDirectory() as directory:
            query = (
                spark.readStream.format("rabbitmq")
                .schema(DRAINED)
                .options(queue=queue, **options)
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", directory)
                .trigger(availableNow=True)
                .start()
            )
            BenchBroker(job.url).wait_for_first_delivery(queue, expected)
            meter.start()
            while not query.awaitTermination(LOOK_EVERY):
                meter.look()
            count = sum(progress["numInputRows"] for progress in query.recentProgress)
        if count != expected:
            raise RuntimeError(f"{count} of {expected} messages were read")

    return measure_reading(job, read)


def run_staged(job: Job) -> Sample:
    """Read in staged mode, while the relay moves, until all is read; with default options."""
    broker, queries = BenchBroker(job.url), []

    def read(spark: SparkSession, queue: str, expected: int, meter: Meter) -> None:
        options = {"url": job.url, "queue": queue, "stage": f"{queue}.stage", "stageMissingId": "repeat"}
        query = (
            spark.readStream.format("rabbitmq")
            .schema(DRAINED)
            .options(**options)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", f"{directory}/{len(queries)}")
            .start()
        )
        queries.append(query)
        broker.wait_for_first_delivery(queue, expected)
        meter.start()
        rows: dict[int, int] = {}
        while sum(rows.values()) < expected:
            meter.look()
            if query.awaitTermination(LOOK_EVERY):
                raise RuntimeError(f"the query has ended: {query.exception()}")
            rows |= {each["batchId"]: each["numInputRows"] for each in query.recentProgress}

    def tidy(queue: str) -> None:
        queries[-1].stop()
        for each in (f"{queue}.stage", f"{queue}.stage.relay"):
            broker.delete_queue(each)

    with tempfile.TemporaryDirectory() as directory:
        return measure_reading(job, read, tidy)


def run_drain(job: Job) -> Sample:
    """What a ``foreachBatch`` does that fetches its messages itself: all of them pass through the driver."""

    def drain(spark: SparkSession, queue: str, expected: int, meter: Meter) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(job.url))
        channel = connection.channel()
        channel.basic_qos(prefetch_count=DRAINED_AT_A_TIME)
        rows: list[tuple[bytes, str | None]] = []
        done = 0
        for method, properties, body in channel.consume(queue):
            if not done and not rows:
                meter.start()
            rows.append((body, properties.message_id))
            if len(rows) == DRAINED_AT_A_TIME or done + len(rows) == expected:
                noop(spark.createDataFrame(rows, DRAINED))
                channel.basic_ack(method.delivery_tag, multiple=True)
                done += len(rows)
                rows = []
                if done == expected:
                    break
        channel.cancel()
        connection.close()

    return measure_reading(job, drain)


def reading_stream(partitions: int) -> Callable[[Job], Sample]:
    def run(job: Job) -> Sample:
        with session() as spark:

            def read(**options: str) -> None:
                source = spark.read.format("rabbitmq").options(url=job.url, stream=job.queue, **options)
                noop(source.load())

            read(endingOffsets=f'{{"{job.queue}": {min(job.messages, 100)}}}')
            end = f'{{"{job.queue}": {job.messages}}}'
            return measured(job, lambda: read(minPartitions=str(partitions), endingOffsets=end))

    return run


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextmanager
def session() -> Iterator[SparkSession]:
    from integration.support.spark import session as started
    from reliable_mq.spark import register

    with tempfile.TemporaryDirectory() as directory:
        spark = started(Path(directory), master="local[2]", **SETTINGS)
        register(spark)
        sys.stdout.flush()
        spark.sparkContext.parallelize(range(2), 2).map(lambda number: number + 1).collect()
        try:
            yield spark
        finally:
            spark.stop()


def measure_writing(job: Job, write: Callable[[DataFrame], object]) -> Sample:
    with session() as spark:

        def rows(count: int) -> DataFrame:
            return spark.range(0, count, 1, 2).selectExpr(f"rpad(cast(id as string), {job.size}, 'x') as body")

        write(rows(job.warmup))
        return measured(job, lambda: write(rows(job.messages)))


def measure_reading(
    job: Job, read: Callable[[SparkSession, str, int, Meter], None], tidy: Callable[[str], object] = str
) -> Sample:
    """Measure ``read(spark, queue, messages, meter)``, which starts the clock at its first delivery.

    ``tidy(queue)`` comes after each, when the clock has stopped.

    It has read as many messages before, more than once: the JVM compiles what it has run for some time, and a query
    that goes on for days is no slower for its first minute.
    """
    broker, queue, meter = BenchBroker(job.url), f"{job.queue}-warmup", Meter(Family().cpu_seconds)
    with session() as spark:
        for _ in range(WARMUPS):
            broker.make_queue(queue, "classic")
            with Publisher(job.url) as publisher:
                messages = (Message(job.body) for _ in range(job.messages))
                publisher.publish_many(messages, routing_key=queue).raise_for_failures()
            read(spark, queue, job.messages, meter)
            tidy(queue)
            broker.delete_queue(queue)
        read(spark, job.queue, job.messages, meter)
        sample = meter.stop(job.messages)
        tidy(job.queue)
        return sample


def measured(job: Job, work: Callable[[], object]) -> Sample:
    meter = Meter(Family().cpu_seconds)
    meter.start()
    work()
    return meter.stop(job.messages)


def noop(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


class Family:
    """The CPU time of this process and of all below it, with those that have ended since somebody asked.

    Their parents are not asked, which may not have heard of it: what begins and ends between two questions is missing.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def cpu_seconds(self) -> float:
        self._look(os.getpid())
        return sum(self._seconds.values())

    def _look(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            children = [
                int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()
            ]
        except OSError:
            return
        self._seconds[pid] = sum(map(int, fields[11:13])) / TICKS
        for each in children:
            self._look(each)


CONTENDERS = [
    Contender(name="spark-sink", label="reliable_mq Spark sink, 2 tasks", role=Role.PUBLISHER, run=run_sink),
    Contender(
        name="spark-foreach-partition",
        label="Spark foreachPartition, pika BlockingChannel, confirms, 2 tasks",
        role=Role.PUBLISHER,
        run=run_foreach_partition,
        one_by_one=True,
    ),
    Contender(
        name="spark-queue", label="reliable_mq Spark queue mode, to a noop sink", role=Role.CONSUMER, run=run_queue
    ),
    Contender(
        name="spark-staged", label="reliable_mq Spark staged mode, to a noop sink", role=Role.CONSUMER, run=run_staged
    ),
    Contender(
        name="spark-drain",
        label="pika BlockingConnection drained on the driver, createDataFrame",
        role=Role.CONSUMER,
        run=run_drain,
    ),
    *[
        Contender(
            name=f"spark-stream-{count}",
            label=f"reliable_mq Spark stream mode, {count} partition(s), to a noop sink",
            role=Role.STREAM,
            run=reading_stream(count),
        )
        for count in (1, 2, 4)
    ],
]

BARS = [
    Bar("spark-sink", (Limit(Measure.RATE, 0.6, "ours-submit"),)),
    Bar("spark-sink", (Limit(Measure.RATE, 8, "spark-foreach-partition"),)),
    Bar("spark-queue", (Limit(Measure.RATE, 0.5, "pika-consumer"),)),
    Bar("spark-staged", (Limit(Measure.RATE, 1.0, "spark-queue"),)),
    *[Bar(f"spark-stream-{count}", (Limit(Measure.RATE, 0.7, "pika-stream"),)) for count in (1, 2)],
]

if __name__ == "__main__":
    child.main(CONTENDERS)
