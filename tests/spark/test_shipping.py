"""What Spark pickles: it travels, and where it cannot be imported the error says what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark import cloudpickle

from reliable_mq.spark.columns import READ_SCHEMA
from reliable_mq.spark.datasource import RabbitMQDataSource

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"url": "amqp://user:s3cret@localhost/", "queue": "orders"}
_UNPICKLE = """
import pathlib, sys
from pyspark import cloudpickle
sys.modules["reliable_mq"] = None
cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
"""


def test_a_data_source_and_its_reader_travel() -> None:
    """And the reader, which executors get, has no URL with it."""
    source = cloudpickle.loads(cloudpickle.dumps(RabbitMQDataSource(OPTIONS)))
    assert source.options == OPTIONS
    pickled = cloudpickle.dumps(source.streamReader(READ_SCHEMA))
    assert b"s3cret" not in pickled
    assert list(vars(cloudpickle.loads(pickled))["_names"]) == READ_SCHEMA.fieldNames()


@pytest.mark.parametrize("what", ["source", "reader"])
def test_where_the_package_is_missing_the_error_says_what_to_do(what: str, tmp_path: Path) -> None:
    """On which host, with which Python, and how to install it."""
    source = RabbitMQDataSource(OPTIONS)
    file = tmp_path / "pickled"
    file.write_bytes(cloudpickle.dumps(source if what == "source" else source.streamReader(READ_SCHEMA)))
    done = subprocess.run([sys.executable, "-c", _UNPICKLE, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'reliable-mq[spark]' there" in done.stderr
    assert sys.executable in done.stderr
