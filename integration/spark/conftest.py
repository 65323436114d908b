"""Fixtures for Spark: a session that all tests of one process share.

===================  =========  ========================================================================================
fixture              scope      value
===================  =========  ========================================================================================
`spark`              session    ``local[2]``, three attempts per task; ``format("rabbitmq")`` is registered
`spark_python`       session    the program that Spark starts as Python: it forks, see `support.spark.forked_pythons`
`checkpoint`         test       a directory for a query's checkpoint
===================  =========  ========================================================================================
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import pytest

from integration.support.spark import HOME, forked_pythons, session
from reliable_mq.spark import register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession


def pytest_configure() -> None:
    if HOME.exists():
        os.environ["SPARK_HOME"] = str(HOME)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # PySpark leaves sockets to the garbage collector.
    for item in items:
        if "integration/spark" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            if item.get_closest_marker("timeout") is None:
                # On a busy machine, starting Spark takes a minute. A test that is interrupted within a call to Spark
                # leaves the session unusable for later tests.
                item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def spark_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The program that Spark starts as Python."""
    with forked_pythons(tmp_path_factory.mktemp("python")) as python:
        yield python


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, spark_python: str) -> Iterator[SparkSession]:
    """The session of this process."""
    started = session(tmp_path_factory.mktemp("spark"), python=spark_python)
    register(started)
    yield started
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """The directory of a query's checkpoint."""
    return str(tmp_path / "checkpoint")
