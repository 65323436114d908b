"""PySpark on two cores: our source and sink, and the code they replace.

The session starts and a warm-up runs before the clock starts. The measurement is one job with its planning, or one
query from its first delivery on. CPU time includes the JVM and all Python processes. If the executors are separate
processes (`DRIVER_ALONE`), it is the CPU time of the driver alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika

from integration.bench import child
from integration.bench.broker import BenchBroker
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq import Message, Publisher
from reliable_mq.stage import StageOptions
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PERSISTENT = pika.BasicProperties(delivery_mode=2)
DRAINED = "body binary, message_id string"
DRAINED_AT_A_TIME = 10_000
SETTINGS = {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-Xshare:auto"}  # tests limit the compiler
LOOK_EVERY = 0.25  # seconds between readings of the CPU time of processes that end with a query
LOOKS_PER_COUNT = 4  # readings for each count of rows, which costs the JVM CPU time
WARMUPS = 2  # reads before the measured one
TICKS = os.sysconf("SC_CLK_TCK")
BEGUN = 60.0  # seconds for the first, empty batch of a query
RELAY = (sys.executable, "-m", "reliable_mq.cli", "stage", "--messages-per-entry", "64")


@dataclass(frozen=True, slots=True)
class Place:
    """Where tasks run, and which processes are left out of the CPU time.

    Attributes:
        master: The master of Spark.
        settings: Additional settings of Spark.
        apart: Parts of the command lines of processes that are left out, with their descendants.
        itself: Whether this process counts. It only measures where the driver alone is measured. Its looks at ``/proc``
            and at the query's progress would be a part of the result.
    """

    master: str
    settings: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    itself: bool = True


HERE = Place("local[2]")
# Master and workers are threads of the driver's JVM. Executors, with the Python processes of their tasks, are its
# descendants.
DRIVER_ALONE = Place(
    "local-cluster[2,1,1024]",
    {
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    },
    ("CoarseGrainedExecutorBackend", " ".join(RELAY[1:])),
    itself=False,
)


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


def run_queue(job: Job, place: Place = HERE) -> Sample:
    """Read all ready messages into Spark's noop sink, up to 32 MiB per batch."""
    options = {"url": job.url, "prefetch": "65535"}
    options["failOnDataLoss"] = "false"  # by default, a quorum queue drops a message after 20 failed deliveries

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

    return measure_reading(job, read, place=place)


def run_staged(job: Job, place: Place = HERE, *, partitions: int | None = None, service: bool = False) -> Sample:
    """Read all messages in staged mode with default options, while the relay runs.

    Args:
        partitions: The option ``stagePartitions``.
        service: Whether the relay is a separate process, which starts once the query has begun.
    """
    broker, queries, relays = BenchBroker(job.url), [], []

    def staged(queue: str) -> StageOptions:
        return StageOptions(url=job.url, queue=queue, stage=f"{queue}.stage", partitions=partitions)

    def read(spark: SparkSession, queue: str, expected: int, meter: Meter) -> None:
        stage = staged(queue)
        options = {"url": job.url, "queue": queue, "stage": stage.stage}
        if service:
            with Publisher(job.url, topology=stage.topology()) as publisher:
                publisher.connect()
            options["stageBy"] = "none"
        elif partitions is not None:
            options["stagePartitions"] = str(partitions)
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
        if service:
            wait_until(lambda: query.recentProgress, timeout=BEGUN, what="a query that has begun")
            relays.append(subprocess.Popen([*RELAY, job.url, queue, stage.stage], stdout=subprocess.DEVNULL))
        broker.wait_for_first_delivery(queue, expected)
        meter.start()
        rows: dict[int, int] = {}
        while sum(rows.values()) < expected:
            for _ in range(LOOKS_PER_COUNT):
                meter.look()
                if query.awaitTermination(LOOK_EVERY):
                    raise RuntimeError(f"the query has ended: {query.exception()}")
            rows |= {each["batchId"]: each["numInputRows"] for each in query.recentProgress}

    def tidy(queue: str) -> None:
        queries[-1].stop()
        for relay in relays:
            relay.terminate()
            relay.wait()
        stage = staged(queue)
        for each in (*stage.streams, stage.lock):
            broker.delete_queue(each)
        broker.delete_exchange(stage.stage)  # of a super stream

    with tempfile.TemporaryDirectory() as directory:
        try:
            return measure_reading(job, read, tidy, place)
        finally:
            for relay in relays:
                relay.kill()


def run_drain(job: Job) -> Sample:
    """Read as a ``foreachBatch`` does that fetches its messages itself.

    All messages pass through the driver.
    """

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
def session(place: Place = HERE) -> Iterator[SparkSession]:
    from integration.support.spark import session as started
    from reliable_mq.spark import register

    with tempfile.TemporaryDirectory() as directory:
        spark = started(Path(directory), place.master, **SETTINGS, **place.settings)
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
    job: Job,
    read: Callable[[SparkSession, str, int, Meter], None],
    tidy: Callable[[str], object] = str,
    place: Place = HERE,
) -> Sample:
    """Measure ``read(spark, queue, messages, meter)``.

    ``read`` starts the clock at its first delivery. ``tidy(queue)`` runs after each read, when the clock has stopped.

    The warm-up reads as many messages, more than once, because the JVM compiles only code that has run for some time. A
    query that runs for days is no slower for its first minute.
    """
    broker, queue = BenchBroker(job.url), f"{job.queue}-warmup"
    meter = Meter(Family(place.apart, itself=place.itself).cpu_seconds)
    with session(place) as spark:
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
    """The CPU time of this process and of all its descendants.

    It includes descendants that have ended since the last reading. It does not use the totals that parents keep of
    their ended children, because a parent may not have waited for them. So a process that starts and ends between two
    readings is missing.

    Args:
        apart: Parts of the command lines of processes that are left out, with their descendants.
        itself: Whether this process counts.
    """

    def __init__(self, apart: tuple[str, ...] = (), *, itself: bool = True) -> None:
        self._apart = apart
        self._itself = itself
        self._seconds: dict[int, float] = {}

    def cpu_seconds(self) -> float:
        self._look(os.getpid())
        return sum(self._seconds.values())

    def _look(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            children = [
                int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()
            ]
        except OSError:
            return
        if any(part in command for part in self._apart):
            return
        if self._itself or pid != os.getpid():
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
        name="spark-queue",
        label="reliable_mq Spark queue mode, to a noop sink",
        role=Role.CONSUMER,
        run=run_queue,
        identified=True,
    ),
    Contender(
        name="spark-staged",
        label="reliable_mq Spark staged mode, to a noop sink",
        role=Role.CONSUMER,
        run=run_staged,
        identified=True,
    ),
    *[
        Contender(
            name=f"spark-staged-{count}",
            label=f"reliable_mq Spark staged mode, stagePartitions={count}, to a noop sink",
            role=Role.CONSUMER,
            run=partial(run_staged, partitions=count),
            identified=True,
        )
        for count in (1, 2, 4)
    ],
    *[
        Contender(
            name=f"spark-driver-{name}",
            label=f"reliable_mq Spark {label}, on two executors: CPU of the driver alone",
            role=Role.CONSUMER,
            run=run,
            identified=True,
        )
        for name, label, run in (
            ("queue", "queue mode", partial(run_queue, place=DRIVER_ALONE)),
            ("staged", "staged mode, with its relay", partial(run_staged, place=DRIVER_ALONE)),
            ("service", "staged mode, its relay a service", partial(run_staged, place=DRIVER_ALONE, service=True)),
        )
    ],
    Contender(
        name="spark-drain",
        label="pika BlockingConnection drained on the driver, createDataFrame",
        role=Role.CONSUMER,
        run=run_drain,
        identified=True,
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
    *[
        Bar(f"spark-driver-{name}", (Limit(Measure.CPU, 1 / 3, "spark-driver-queue"),))
        for name in ("staged", "service")
    ],
    *[Bar(f"spark-stream-{count}", (Limit(Measure.RATE, 0.7, "pika-stream"),)) for count in (1, 2)],
]

if __name__ == "__main__":
    child.main(CONTENDERS)
