"""A Spark application: reads a queue and writes Parquet files, until it is killed, or until there is no more.

Usage: ``python -m integration.programs.spark_queue_to_files JSON``, with ``url``, ``queue``, ``directory`` (for the
output, the checkpoint and what Spark writes), ``drain`` (whether to end when all is read), ``pause`` (seconds for a row
and task) and ``options`` of the source. Every row that a task has begun with leaves a file ``reading-*``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from reliable_mq.spark import register


def main(settings: dict[str, Any]) -> None:
    directory = Path(settings["directory"])
    builder = SparkSession.builder.master(settings.get("master", "local[2]"))
    for name, value in json.loads(os.environ["SPARK_TEST_SETTINGS"]).items():
        builder = builder.config(name, value)
    spark = builder.config("spark.local.dir", str(directory / "local")).getOrCreate()
    register(spark)
    source = spark.readStream.format("rabbitmq").option("url", settings["url"]).option("queue", settings["queue"])
    for name, value in settings.get("options", {}).items():
        source = source.option(name, value)
    rows = source.load().select("message_id", "body")
    pause, marks = settings.get("pause", 0.0), str(directory)

    @udf(rows.schema["body"].dataType)
    def slowly(body: object) -> object:
        Path(marks, f"reading-{uuid.uuid4().hex}").touch()
        time.sleep(pause)
        return body

    query = (
        rows.withColumn("body", slowly("body"))
        .writeStream.format("parquet")
        .option("path", str(directory / "output"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(**({"availableNow": True} if settings.get("drain") else {"processingTime": "200 milliseconds"}))
        .start()
    )
    query.awaitTermination()
    print("drained", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
