"""Queue mode: a queue is read by the driver's reader process, and acked once a batch is committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.spark.options import QueueOptions

__all__ = ["QueueSource", "refuse_batch"]


def refuse_batch(options: QueueOptions) -> NoReturn:
    """Say why a queue cannot be read by ``spark.read``.

    A batch read has no commit: Spark does not tell its source whether the job has succeeded, reads partitions again
    when a task is retried or a plan is run twice, and keeps no checkpoint. Whatever acked would lose messages.
    """
    raise ConfigurationError(
        f"queue {', '.join(options.queues)!r} cannot be read with spark.read: a batch read never says that it is done, "
        "so nothing could be acked without losing messages. Use spark.readStream with trigger(availableNow=True), "
        "which reads what is there and ends; or read a stream, with the option stream"
    )


class QueueSource(DataSourceStreamReader):
    """The reader of a query in queue mode."""

    def __init__(self, options: QueueOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Make rows of what a partition carries."""
        raise NotImplementedError
