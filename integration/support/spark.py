"""Spark for tests: a session in this process, and helpers to read queues.

Invariant: a session of the tests uses few resources: two cores, no user interface, one shuffle partition.

Run as a program, this module creates two parts that let Spark start faster. Spark also works without them:

- `CLASSES`, an archive of the classes that Spark loads. It saves half of the CPU time of a Java start. Java ignores an
  archive of another Java or Spark.
- `HOME`, a ``SPARK_HOME`` with everything of PySpark except ``python/lib/pyspark.zip``. Spark puts that file before all
  installed packages on the path. Each Python process that Spark starts would compile the modules in it again, which
  takes 1 s of CPU time.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.programs import spark_python
from integration.support.programs import ROOT, environment
from integration.support.seeds import soaking

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pika import BasicProperties
    from pyspark.sql import DataFrame, SparkSession

    from reliable_mq.testing import VirtualHost

HOME = ROOT / ".venv" / "spark"
CLASSES = HOME / "classes.jsa"
JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -XX:SharedArchiveFile={CLASSES} -Xlog:disable"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "700m",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.streaming.stopTimeout": "30s",
    # For some hundred rows, compiling the code of a query takes longer than interpreting it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.log.level": "ERROR",
}


def session(directory: Path, master: str = "local[2,3]", python: str = sys.executable, **settings: str) -> SparkSession:
    """Start Spark in this process.

    Args:
        directory: Where Spark writes.
        master: Where Spark runs.
        python: The program for Spark's Python processes; see `forked_pythons`.
        settings: Spark settings.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    os.environ["PYTHONPATH"] = str(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own warnings
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).appName("tests")
        own = {"spark.local.dir": str(directory), "spark.sql.warehouse.dir": str(directory / "warehouse")}
        for name, value in {**SETTINGS, **own, **settings}.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()


@contextmanager
def forked_pythons(directory: Path) -> Iterator[str]:
    """Start `integration.programs.spark_server`, which forks Spark's Python processes.

    Return the program that Spark has to start for each. In `make soak` it is Python itself, because some tests kill
    these processes.
    """
    if soaking():
        yield sys.executable
        return
    client = Path(spark_python.__file__)
    python = directory / "python"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "socket"))
        listener.listen(100)
        command = [sys.executable, "-m", "integration.programs.spark_server", str(listener.fileno())]
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -ISE {client} {directory}/socket "$@"\n')
    python.chmod(0o700)
    try:
        yield str(python)
    finally:
        server.communicate()


def requeued_counts(vhost: VirtualHost) -> set[int | None]:
    """Return the possible values of ``x-delivery-count`` after a read and a requeue.

    Before RabbitMQ 4.3, the requeue is counted.
    """
    return {None, 0, 1} if vhost.broker.version.startswith("4.0.") else {None, 0}


def drain(vhost: VirtualHost, queue: str) -> list[tuple[BasicProperties, bytes]]:
    """Consume all messages that are ready in a queue, and return them."""
    taken: list[tuple[BasicProperties, bytes]] = []
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1000)
        last = acked = 0

        def on_message(_channel: object, method: object, properties: BasicProperties, body: bytes) -> None:
            nonlocal last
            last = method.delivery_tag
            taken.append((properties, body))

        channel.basic_consume(queue, on_message)
        while True:
            connection.process_data_events(time_limit=0.1)
            if last > acked:
                channel.basic_ack(last, multiple=True)
                acked = last
                continue
            count = channel.queue_declare(queue, passive=True).method
            if count.consumer_count and not count.message_count:  # without this consumer, nothing is known
                connection.process_data_events(time_limit=0)  # handle deliveries that arrived before the reply
                if last == acked:
                    return taken


def read_to_the_end(
    options: Mapping[str, str], start: dict[str, Any] | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Read a source as Spark does with trigger(availableNow=True).

    It runs on a separate thread, which receives no signals.

    Args:
        options: The options of the source.
        start: The position at which a query resumes. None for a new query.

    Returns:
        The message ids of each partition, and the position at the end.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_read_to_the_end, options, start).result()


def _read_to_the_end(
    options: Mapping[str, str], start: dict[str, Any] | None
) -> tuple[list[list[str]], dict[str, Any]]:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from reliable_mq.spark.datasource import RabbitMQDataSource

    made = RabbitMQDataSource(dict(options))
    source: Any = made.streamReader(made.schema())
    read: list[list[str]] = []
    try:
        source.prepareForTriggerAvailableNow()
        at = source.initialOffset() if start is None else start
        while (end := source.latestOffset(at, ReadMaxRows(1000))) != at:
            read += [
                [row["message_id"] for batch in source.read(part) for row in batch.to_pylist()]
                for part in source.partitions(at, end)
            ]
            at = end
    finally:
        source.stop()
    return read, at


def bodies_of(taken: Iterable[tuple[BasicProperties, bytes]]) -> list[bytes]:
    """Return the bodies of the messages from `drain`."""
    return [body for _, body in taken]


def failing_once(rows: DataFrame, directory: Path, *, after: int, kill: bool = False) -> DataFrame:
    """Return the rows; the first task that has seen ``after`` of them fails, once.

    With ``kill``, the process of the task dies instead.
    """
    from pyspark.sql.functions import udf

    marker = str(directory / "failed")
    seen = 0

    def look(body: object) -> object:
        nonlocal seen
        seen += 1
        if seen >= after and not Path(marker).exists():
            Path(marker).touch()
            if kill:
                os._exit(1)
            raise RuntimeError("the task fails, once")
        return body

    kind = rows.schema["body"].dataType
    return rows.withColumn("body", udf(look, kind, useArrow=False)("body"))


def make_home() -> None:
    """Create `HOME`."""
    import pyspark

    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "python":
            (HOME / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(HOME)


def archive_classes(directory: Path) -> None:
    """Create `CLASSES`: run what most tests do, and let Java archive loaded classes."""
    making = CLASSES.with_suffix(".new")
    making.unlink(missing_ok=True)
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={making} -Xlog:disable"
    spark = session(directory, **{"spark.driver.extraJavaOptions": options})
    files = str(directory / "rows")
    rows = spark.range(10).selectExpr("id", "cast(id as string) as text", "map('a', 'b') as headers")
    rows.write.parquet(files)
    assert spark.read.parquet(files).groupBy("text").count().count() == 10
    assert rows.mapInArrow(lambda batches: batches, rows.schema).count() == 10
    reader = spark.readStream.schema(rows.schema).parquet(files)
    writer = reader.writeStream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True)
    query = writer.foreachBatch(lambda batch, _: batch.collect()).start()
    query.awaitTermination()
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()
    jvm.wait(120)
    making.rename(CLASSES)


if __name__ == "__main__":
    make_home()
    with tempfile.TemporaryDirectory() as temporary:
        archive_classes(Path(temporary))
