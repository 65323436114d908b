"""Source and sink for Apache Spark: ``format("rabbitmq")``.

Batch and streaming, at least once.

``register(spark)`` makes the format known to a session. Where this package is installed as a wheel, Spark finds it by
itself, through the top-level module ``pyspark_reliable_mq``. The manual lists options, columns and guarantees:
``docs/guides/spark.md``.

Invariant: nothing of PySpark is imported before its version is known to do.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

logger = logging.getLogger(__name__)

_LEAST: Final = (4, 2)  # read limits of sources in Python


def register(spark: SparkSession) -> None:
    """Make ``format("rabbitmq")`` known to a session. A second call does no harm.

    Warns in the log where ``spark.speculation`` is on, which sources and sinks cannot see.

    Args:
        spark: a classic session, or one of Spark Connect.

    Raises:
        UsageError: PySpark is older than 4.2, whose sources in Python cannot limit a batch.
    """
    check_version()
    from reliable_mq.spark.datasource import RabbitMQDataSource  # noqa: PLC0415

    spark.dataSource.register(RabbitMQDataSource)
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        logger.warning(
            "spark.speculation is on: the rows of a task that Spark runs a second time beside the first are published "
            "twice, with the same message ids; turn it off for queries that write to RabbitMQ, or drop what has the "
            "same id (an idempotency store does)"
        )


def check_version() -> None:
    """Check the version of PySpark before anything of it is imported.

    Raises:
        UsageError: it is not installed, or too old.
    """
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        try:
            version = importlib.metadata.version("pyspark-client")
        except importlib.metadata.PackageNotFoundError:
            return  # a Spark distribution on PYTHONPATH has no metadata: its own imports tell
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _LEAST:
        raise UsageError(
            f"PySpark {version} is too old for format('rabbitmq'): 4.2 or newer is needed, whose sources can limit "
            "what a batch reads; pip install 'reliable-mq[spark]'"
        )
