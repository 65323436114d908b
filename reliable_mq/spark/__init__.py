"""A source and a sink for Apache Spark: ``format("rabbitmq")``.

Both work in batch and in streaming queries, and deliver at least once.

``register(spark)`` registers the format with a session. If this package is installed as a wheel, Spark registers the
format itself, through the top-level module ``pyspark_reliable_mq``. The manual lists options, columns and guarantees:
``docs/guides/spark.md``.

Invariant: no part of PySpark is imported before its version has been checked.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING, Final

from reliable_mq._util.logs import get_logger
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

logger = get_logger(__name__)

_LEAST: Final = (4, 2)  # the first version with read limits for Python sources


def register(spark: SparkSession) -> None:
    """Register ``format("rabbitmq")`` with a session. A second call is harmless.

    Log a warning if ``spark.speculation`` is on, because sources and sinks cannot detect speculative tasks.

    Args:
        spark: A classic session or a Spark Connect session.

    Raises:
        UsageError: If PySpark is older than 4.2. Its Python sources cannot limit a batch.
    """
    check_version()
    from reliable_mq.spark.datasource import RabbitMQDataSource  # noqa: PLC0415

    spark.dataSource.register(RabbitMQDataSource)
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        logger.warning(
            "spark.speculation is on: rows of a task that Spark runs twice are published twice, with the same "
            "message ids; turn it off for queries that write to RabbitMQ, or drop duplicates by id in the "
            "consumer (an idempotency store does)"
        )


def check_version() -> None:
    """Check the version of PySpark before any part of it is imported.

    Raises:
        UsageError: If PySpark is too old.
    """
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        try:
            version = importlib.metadata.version("pyspark-client")
        except importlib.metadata.PackageNotFoundError:
            return  # a Spark distribution on PYTHONPATH has no metadata: an import error will report it
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _LEAST:
        raise UsageError(
            f"PySpark {version} is too old for format('rabbitmq'): 4.2 or newer is needed, whose sources can limit "
            "what a batch reads; pip install 'reliable-mq[spark]'"
        )
