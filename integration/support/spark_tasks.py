"""Spark tasks that fail once, after some of their rows have reached the sink."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.functions import udf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession


def interrupted(rows: DataFrame, directory: Path, *, after: int, kill: bool = False) -> DataFrame:
    """Return the bodies; the first attempt at each partition fails after some of them.

    Args:
        rows: The rows to pass on.
        directory: Where the attempts are recorded.
        after: Rows that are passed on before the failure. Spark passes on a hundred at a time, and with
            `small_arrow_batches`, also to the sink.
        kill: Whether the worker of partition 0 is killed, in place of an exception in each partition.
    """
    parent = str(directory)
    passed = 0

    def pass_on(body: str) -> str:
        nonlocal passed
        passed += 1
        if passed > after:
            context = TaskContext.get()
            number = 0 if context is None else context.partitionId()
            mark = Path(parent) / f"attempted-{number}"
            if not mark.exists() and (not kill or number == 0):
                mark.touch()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("a seeded failure")
        return body

    return rows.select(udf(pass_on, "string", useArrow=False)("body").alias("body"))


@contextmanager
def small_arrow_batches(spark: SparkSession, rows: int = 50) -> Iterator[None]:
    """Pass rows to tasks in small batches."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, str(rows))
    try:
        yield
    finally:
        spark.conf.set(name, str(before))
