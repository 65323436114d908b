"""A Spark application: reads a stream and writes Parquet files, until it is killed, or until there is no more.

Usage: ``python -m integration.programs.spark_stream_to_files JSON``, with ``url``, ``stream``, ``directory`` (for the
output, the checkpoint and what Spark writes), ``drain`` (whether to end when all is read), ``pause`` (seconds for a row
and task) and ``options`` of the source. With a pause, every row that a task has begun with leaves a file
``reading-*``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from reliable_mq.spark import register

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery


def main(settings: dict[str, Any]) -> None:
    directory = Path(settings["directory"])
    builder = SparkSession.builder.master("local[2]")
    for name, value in json.loads(os.environ["SPARK_TEST_SETTINGS"]).items():
        builder = builder.config(name, value)
    spark = builder.config("spark.local.dir", str(directory / "local")).getOrCreate()
    register(spark)
    query = start(spark, settings)
    query.awaitTermination()
    spark.stop()


def start(spark: SparkSession, settings: dict[str, Any]) -> StreamingQuery:
    """Start the query, in any session."""
    pause, directory = settings.get("pause", 0.0), settings["directory"]
    source = spark.readStream.format("rabbitmq").options(url=settings["url"], stream=settings["stream"])
    rows = source.options(**settings.get("options", {})).load().select("message_id", "offset", "body")

    def slowly(body: object) -> object:
        if pause:
            Path(directory, f"reading-{uuid.uuid4().hex}").touch()
            time.sleep(pause)
        return body

    return (
        rows.withColumn("body", udf(slowly, rows.schema["body"].dataType, useArrow=False)("body"))
        .writeStream.format("parquet")
        .option("path", f"{directory}/output")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(**({"availableNow": True} if settings.get("drain") else {"processingTime": "200 milliseconds"}))
        .start()
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
