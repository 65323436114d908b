"""Error messages if the package cannot be imported by Spark's Python processes.

It is missing in all of them, or only in tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from reliable_mq import Message, Publisher, Queue
from reliable_mq.spark import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from reliable_mq.testing import VirtualHost

EVENTS = Queue("events", type="stream")
# This module precedes the package on the workers' path. It hides the package everywhere, or only in tasks.
MISSING = """
import importlib, os, sys
from pyspark import TaskContext
if {everywhere} or TaskContext.get() is not None:
    raise ModuleNotFoundError("No module named 'reliable_mq'")
sys.path.remove(os.path.dirname(__file__))
del sys.modules["reliable_mq"]
importlib.import_module("reliable_mq")
"""


@pytest.fixture
def missing(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[[bool], None]]:
    environment = spark.sparkContext.environment
    before = dict(environment)

    def hide(everywhere: bool) -> None:
        (tmp_path / "reliable_mq.py").write_text(MISSING.format(everywhere=everywhere))
        environment.update(PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")  # the latter: without the working directory
        register(spark)

    yield hide
    environment.clear()
    environment.update(before)
    register(spark)


def write(spark: SparkSession, url: str) -> None:
    rows = spark.range(0, 3, 1, 1).selectExpr("cast(id as string) as body")
    rows.write.format("rabbitmq").options(url=url, routingKey="events").mode("append").save()


def read(spark: SparkSession, url: str) -> None:
    spark.read.format("rabbitmq").options(url=url, stream="events").load().collect()


def query(spark: SparkSession, url: str) -> None:
    rows: DataFrame = spark.readStream.format("rabbitmq").options(url=url, queue="orders").load()
    rows.writeStream.format("noop").trigger(availableNow=True).start().awaitTermination(120)


@pytest.mark.soak
@pytest.mark.parametrize(("everywhere", "act"), [(True, write), (False, write), (False, read), (False, query)])
def test_a_missing_package_error_says_where_and_what_to_install(
    spark: SparkSession,
    vhost: VirtualHost,
    missing: Callable[[bool], None],
    everywhere: bool,
    act: Callable[[SparkSession, str], None],
) -> None:
    """The first source or sink raises it, or a failing task; the URL is not shown."""
    with Publisher(vhost.url, topology=[EVENTS, Queue("orders")]) as publisher:
        for name in ("events", "orders"):
            publisher.publish(Message(b"0"), routing_key=name)
    missing(everywhere)
    with pytest.raises(PySparkException, match=r"format\('rabbitmq'\) cannot run on .* with .*python") as failed:
        act(spark, vhost.url)
    assert "pip install 'reliable-mq[spark]' there" in str(failed.value)
    assert "guest:guest" not in str(failed.value)
