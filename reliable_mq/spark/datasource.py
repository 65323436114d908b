"""What Spark finds under ``format("rabbitmq")``: options and schemas are checked here, the work is done elsewhere.

Spark makes this object anew in several short-lived processes beside the driver and pickles it to and fro. So it does
nothing when it is made, and the readers and writers it gives do not connect when they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.columns import READ_SCHEMA, check_read_schema, check_written_schema
from reliable_mq.spark.options import QueueOptions, read_options, write_options
from reliable_mq.spark.pickling import PicklableByName, PicklableByNameMeta
from reliable_mq.spark.queue_source import QueueSource, refuse_batch
from reliable_mq.spark.sink import BatchSink, StreamSink
from reliable_mq.spark.stream_source import StreamBatch, StreamSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["RabbitMQDataSource"]


class RabbitMQDataSource(PicklableByName, DataSource, metaclass=PicklableByNameMeta):
    """RabbitMQ, to read from and to write to. See `reliable_mq.spark`. The arguments' names are Spark's."""

    @classmethod
    def name(cls) -> str:
        """Give the name for ``format()``."""
        return "rabbitmq"

    def schema(self) -> StructType:
        """Give what is read where no schema is given."""
        return READ_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Give the reader of a batch."""
        options = read_options(self.options, streaming=False)
        names = check_read_schema(schema)
        if isinstance(options, QueueOptions):
            refuse_batch(options)
        return StreamBatch(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Give the reader of a streaming query."""
        options = read_options(self.options, streaming=True)
        names = check_read_schema(schema)
        return QueueSource(options, names) if isinstance(options, QueueOptions) else StreamSource(options, names)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Give the writer of a batch."""
        if overwrite:
            raise ConfigurationError(
                "mode('overwrite') cannot be: what is in a queue is not for a publisher to delete; use mode('append')"
            )
        options = write_options(self.options)
        return BatchSink(options, check_written_schema(schema, options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Give the writer of a streaming query."""
        if overwrite:
            raise ConfigurationError(
                "outputMode('complete') cannot be: it replaces what was written before, and what is in a queue is not "
                "for a publisher to delete; use outputMode('append'), or foreachBatch with a batch write in it"
            )
        options = write_options(self.options)
        return StreamSink(options, check_written_schema(schema, options))
