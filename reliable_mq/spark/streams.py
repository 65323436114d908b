"""Stream mode: stream queues are read by the executors, by offset, and can be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    from reliable_mq.spark.options import StreamOptions

__all__ = ["StreamBatch", "StreamSource"]


class StreamSource(DataSourceStreamReader):
    """The reader of a query in stream mode."""

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a range of offsets."""
        raise NotImplementedError


class StreamBatch(DataSourceReader):
    """The reader of a batch of stream mode."""

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a range of offsets."""
        raise NotImplementedError
