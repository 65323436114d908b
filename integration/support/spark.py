"""Spark for tests: a session in this process, and a look into queues.

Invariant: a session of the tests takes little: two cores, no user interface, one shuffle partition.

Run as a program, it makes what lets Spark start faster, and what it does without where they are missing:

- `CLASSES`, an archive of the classes that Spark loads. It saves half of the CPU time of a start of Java; Java ignores
  one of another Java or Spark.
- `HOME`, a ``SPARK_HOME`` that has all of PySpark's but ``python/lib/pyspark.zip``. Spark puts that file before
  whatever is installed, and each Python process that it starts compiles anew what it imports from there: 1 s of CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.support.programs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    # To compile the code of a query takes longer than to interpret it, where it has some hundred rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.log.level": "ERROR",
}


def session(directory: Path, master: str = "local[2,3]", **settings: str) -> SparkSession:
    """Start Spark in this process. ``directory`` takes what it writes."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).appName("tests")
        own = {"spark.local.dir": str(directory), "spark.sql.warehouse.dir": str(directory / "warehouse")}
        for name, value in {**SETTINGS, **own, **settings}.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()


def requeued_counts(vhost: VirtualHost) -> set[int | None]:
    """What ``x-delivery-count`` may be of a message that was read and requeued: before 4.3 that counts, too."""
    return {None, 0, 1} if vhost.broker.version.startswith("4.0.") else {None, 0}


def drain(vhost: VirtualHost, queue: str) -> list[tuple[BasicProperties, bytes]]:
    """Take everything that is ready in a queue."""
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
            elif channel.queue_declare(queue, passive=True).method.message_count == 0:
                connection.process_data_events(time_limit=0)  # what came before the reply
                if last == acked:
                    return taken


def read_to_the_end(
    options: Mapping[str, str], start: dict[str, Any] | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Play Spark with trigger(availableNow=True), on a thread of its own, which has no signals.

    Args:
        options: of a source.
        start: the position of a query that goes on.

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
    """The bodies of what `drain` gave."""
    return [body for _, body in taken]


def failing_once(rows: DataFrame, directory: Path, *, after: int, kill: bool = False) -> DataFrame:
    """The same rows; but the first task that has seen ``after`` of them fails, once. ``kill``: its process dies."""
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
    """Make `HOME`."""
    import pyspark

    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "python":
            (HOME / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(HOME)


def archive_classes(directory: Path) -> None:
    """Make `CLASSES`: run what most tests do, and have Java keep the classes that were loaded."""
    making = CLASSES.with_suffix(".new")
    making.unlink(missing_ok=True)
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={making} -Xlog:disable"
    spark = session(directory, **{"spark.driver.extraJavaOptions": options})
    files = str(directory / "rows")
    rows = spark.range(10).selectExpr("id", "cast(id as string) as text", "map('a', 'b') as headers")
    rows.write.parquet(files)
    assert spark.read.parquet(files).groupBy("text").count().count() == 10
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
