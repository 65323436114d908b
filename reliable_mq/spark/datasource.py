"""The data source behind ``format("rabbitmq")``. It checks options and schemas.

Spark creates this object repeatedly in several short-lived processes beside the driver, and pickles it between them.
Its constructor therefore does nothing, and the constructors of its readers and writers do not connect.

Invariant: `streamReader` raises none of this package's errors. PySpark would raise an `UnboundLocalError` instead,
because it stops a reader that it never received. `streamReader` returns a reader that raises the error at its first
call.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from reliable_mq.errors import ConfigurationError, ReliableMQError
from reliable_mq.spark.columns import READ_SCHEMA, check_read_schema, check_written_schema
from reliable_mq.spark.options import QueueOptions, StagedOptions, read_options, write_options
from reliable_mq.spark.pickling import PicklableByName, PicklableByNameMeta
from reliable_mq.spark.queue_source import QueueSource
from reliable_mq.spark.sink import BatchSink, StreamSink
from reliable_mq.spark.staged_source import StagedSource
from reliable_mq.spark.stream_source import StreamBatch, StreamSource


class RabbitMQDataSource(PicklableByName, DataSource, metaclass=PicklableByNameMeta):
    """RabbitMQ as a data source. The argument names are Spark's."""

    @classmethod
    def name(cls) -> str:
        return "rabbitmq"

    def schema(self) -> StructType:
        """Return the schema of a read that specifies none."""
        if "provider" in self.options:  # Spark adds this key to the properties of a table
            raise ConfigurationError(
                "CREATE TABLE ... USING rabbitmq cannot be: Spark reads a table in Python without its options, and its "
                "catalog would keep the URL with the password. Use CREATE TEMPORARY VIEW name USING rabbitmq OPTIONS "
                "(url '...', stream '...')"
            )
        return READ_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return StreamBatch(read_options(self.options, streaming=False), check_read_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a query, or a `RefusedStream` if a check fails."""
        try:
            options = read_options(self.options, streaming=True)
            names = check_read_schema(schema)
        except ReliableMQError as error:
            return RefusedStream(error)
        if isinstance(options, StagedOptions):
            return StagedSource(options, names)
        return QueueSource(options, names) if isinstance(options, QueueOptions) else StreamSource(options, names)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigurationError(
                "mode('overwrite') cannot be: what is in a queue is not for a publisher to delete; use mode('append')"
            )
        options = write_options(self.options)
        return BatchSink(options, check_written_schema(schema, options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        if overwrite:
            raise ConfigurationError(
                "outputMode('complete') cannot be: it replaces what was written before, and what is in a queue is not "
                "for a publisher to delete; use outputMode('append'), or foreachBatch with a batch write in it"
            )
        options = write_options(self.options)
        return StreamSink(options, check_written_schema(schema, options))


class RefusedStream(PicklableByName, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a refused query. Its calls raise the error.

    Every method except `stop` raises, because the trigger and the checkpoint determine which one is called first.
    """

    def __init__(self, error: ReliableMQError) -> None:
        self._error = error

    def _refuse(self, *_args: Any, **_named: Any) -> NoReturn:
        raise self._error

    initialOffset = getDefaultReadLimit = prepareForTriggerAvailableNow = latestOffset = _refuse  # noqa: N815
    partitions = read = commit = _refuse

    def stop(self) -> None:
        """Do nothing: no resources are open."""
