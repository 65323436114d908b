"""Objects that Spark pickles, and the error if the package is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from reliable_mq.spark.columns import READ_SCHEMA
from reliable_mq.spark.datasource import RabbitMQDataSource

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"url": "amqp://user:s3cret@localhost/", "queue": "orders"}
WHAT = ("source", "queue reader", "stream reader", "batch reader", "batch writer", "stream writer")
_UNPICKLE = """
import pathlib, sys, traceback
from pyspark import cloudpickle
for file in sys.argv[1:]:
    sys.modules["reliable_mq"] = None
    try:
        cloudpickle.loads(pathlib.Path(file).read_bytes())
    except Exception as error:
        del sys.modules["reliable_mq"]  # Python 3.15 imports packages to explain why a module of theirs is missing
        pathlib.Path(file).write_text("".join(traceback.format_exception(error)))
"""


def test_a_data_source_and_its_reader_travel() -> None:
    """The pickled reader, which is sent to executors, contains no URL."""
    source = cloudpickle.loads(cloudpickle.dumps(RabbitMQDataSource(OPTIONS)))
    assert source.options == OPTIONS
    pickled = cloudpickle.dumps(source.streamReader(READ_SCHEMA))
    assert b"s3cret" not in pickled
    assert list(vars(cloudpickle.loads(pickled))["_names"]) == READ_SCHEMA.fieldNames()


def unused(what: str) -> object:
    source = RabbitMQDataSource(OPTIONS)
    stream = RabbitMQDataSource({"url": OPTIONS["url"], "stream": "events"})
    sink = RabbitMQDataSource({"url": OPTIONS["url"], "routingKey": "orders"})
    rows = StructType().add("body", "string")
    made = {
        "class": lambda: RabbitMQDataSource,
        "source": lambda: source,
        "queue reader": lambda: source.streamReader(READ_SCHEMA),
        "stream reader": lambda: stream.streamReader(READ_SCHEMA),
        "batch reader": lambda: stream.reader(READ_SCHEMA),
        "batch writer": lambda: sink.writer(rows, overwrite=False),
        "stream writer": lambda: sink.streamWriter(rows, overwrite=False),
    }
    return made[what]()


def test_the_class_travels_as_itself() -> None:
    """It is sent to the Python that creates the source, as are its subclasses."""
    assert cloudpickle.loads(cloudpickle.dumps(RabbitMQDataSource)) is RabbitMQDataSource

    class Own(RabbitMQDataSource):
        pass

    travelled = cloudpickle.loads(cloudpickle.dumps(Own))
    assert issubclass(travelled, RabbitMQDataSource)


@pytest.mark.parametrize("what", WHAT)
def test_what_travels_is_the_same_there(what: str) -> None:
    """This covers every object that Spark pickles, before it is used."""
    shipped = unused(what)
    travelled = cloudpickle.loads(cloudpickle.dumps(shipped))
    assert type(travelled) is type(shipped)
    assert vars(travelled).keys() == vars(shipped).keys()


@pytest.mark.slow
def test_where_the_package_is_missing_the_error_says_what_to_do(tmp_path: Path) -> None:
    """The error has the host, the Python, and the command to install the package."""
    files = {what: tmp_path / what for what in ("class", *WHAT)}
    for what, file in files.items():
        file.write_bytes(cloudpickle.dumps(unused(what)))
    subprocess.run([sys.executable, "-c", _UNPICKLE, *map(str, files.values())], check=True)
    for what, file in files.items():
        told = file.read_text(errors="replace")
        assert "pip install 'reliable-mq[spark]' there" in told, what
        assert sys.executable in told, what
