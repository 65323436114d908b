"""A Spark application that reads queues or streams until it is killed or done.

It writes Parquet files, or publishes to RabbitMQ.

Usage: ``python -m integration.programs.spark_queries JSON``, with:

- ``sources``: by the name of a query, its options, with ``url`` and ``queue`` or ``stream``;
- ``directory``: for Spark's own files, and for a directory per query with its output and its checkpoint;
- ``to``: options of the RabbitMQ sink, which replaces the files;
- ``drain``: whether to end when everything is read;
- ``pause``: seconds per row in each task;
- ``straggler``: whether to pause only in the first attempt of the first task;
- ``master``, ``spark`` (Spark settings) and ``register``;
- ``held``: whether to wait, with everything ready, for a line on standard input.

With a pause, each row that a task starts to process leaves a file ``reading-PARTITION-ATTEMPT-*``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from reliable_mq.spark import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

COLUMNS = ("message_id", "offset", "body")


def main(settings: dict[str, Any]) -> None:
    directory = Path(settings["directory"])
    builder = SparkSession.builder.master(settings.get("master", "local[2]"))
    for name, value in {**json.loads(os.environ["SPARK_TEST_SETTINGS"]), **settings.get("spark", {})}.items():
        builder = builder.config(name, value)
    spark = builder.config("spark.local.dir", str(directory / f"local-{os.getpid()}")).getOrCreate()
    if settings.get("register", True):
        register(spark)
    rows = {name: source(spark, options) for name, options in settings["sources"].items()}
    if settings.get("held"):
        warm_up(spark, directory)
        if not sys.stdin.readline():
            return
    for query in [written(each, directory / name, settings) for name, each in rows.items()]:
        query.awaitTermination()
    spark.stop()


def start(spark: SparkSession, settings: dict[str, Any]) -> list[StreamingQuery]:
    """Start the queries, in any session."""
    return [
        written(source(spark, options), Path(settings["directory"], name), settings)
        for name, options in settings["sources"].items()
    ]


def source(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    """Return the rows of a source. Does not connect."""
    return spark.readStream.format("rabbitmq").options(**options).load().select(*COLUMNS)


def warm_up(spark: SparkSession, directory: Path) -> None:
    """Run the slow first steps: Python workers, code generation, a Parquet file."""
    rows = spark.range(0, 2, 1, 2).selectExpr("cast(id as string) as body")
    rows.select(udf(str.strip, "string", useArrow=False)("body").alias("body")).write.parquet(
        str(directory / f"warm-up-{os.getpid()}")
    )


def written(rows: DataFrame, directory: Path, settings: dict[str, Any]) -> StreamingQuery:
    """Start to write the rows."""
    pause, straggler, noted = settings.get("pause", 0.0), settings.get("straggler", False), str(directory)
    directory.mkdir(exist_ok=True)

    @udf(rows.schema["body"].dataType, useArrow=False)
    def slowly(body: object) -> object:
        if pause:
            task = TaskContext.get()
            assert task is not None
            Path(noted, f"reading-{task.partitionId()}-{task.attemptNumber()}-{uuid.uuid4().hex}").touch()
            if not straggler or (task.partitionId(), task.attemptNumber()) == (0, 0):
                time.sleep(pause)
        return body

    rows = rows.withColumn("body", slowly("body"))
    if "to" in settings:
        writer = rows.select("message_id", "body").writeStream.format("rabbitmq").options(**settings["to"])
    else:
        writer = rows.writeStream.format("parquet").option("path", f"{directory}/output")
    return (
        writer.option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(**({"availableNow": True} if settings.get("drain") else {"processingTime": "100 milliseconds"}))
        .start()
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
