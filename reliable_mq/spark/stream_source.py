"""Stream mode, the base of staged mode: executors read ranges of streams.

The reader plans ranges of offsets in a separate process beside the driver. The executors read the ranges in parallel.
An ack removes nothing from a stream: the position of a query is only in its checkpoint.

Invariants: nothing connects before Spark requests data, and an unused reader can be pickled. A planned range is the
same at every attempt. A batch begins where the previous one ended. If a query, or a stream that it has not read before,
begins elsewhere, an empty batch first records that position. The end of a batch is one more than an offset that was
seen, or a limit below it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from reliable_mq._util.logs import get_logger
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import StreamOptions
from reliable_mq.spark.pickling import PicklableByName
from reliable_mq.spark.queue_source import on_termination
from reliable_mq.spark.stream_offsets import StreamRange, from_checkpoint, limited, marked_initial, ranges_of, split
from reliable_mq.spark.stream_planner import StreamPlanner
from reliable_mq.spark.stream_reader import RangeReader

logger = get_logger(__name__)

_AWAY: Final = 1.0  # seconds between two attempts to reach the broker
_NO_LIMIT: Final = 2**63 - 1


class _Ranges(PicklableByName):
    """The options and columns of a reader, and its work on executors."""

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)

    def _split(self, ranges: Sequence[StreamRange]) -> list[StreamRange]:
        return split(ranges, self._options.min_partitions, self._options.max_records)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, StreamRange):  # Spark substitutes another partition if a batch has none
            yield from RangeReader(self._options, partition, self._names).batches()


class StreamSource(_Ranges, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        super().__init__(options, names)
        self._planner = StreamPlanner(options)
        self._available_now = False
        self._target: dict[str, int] | None = None  # where a query with Trigger.AvailableNow ends
        self._planned_at: float | None = None  # time of the newest batch, or of the first call
        self._away_until: float | None = None  # earliest time of the next attempt while the broker is unreachable

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the positions where a new query begins, marked as such."""
        positions = self._planner.at_some_host(self._planner.starting)
        self._planner.at_some_host(self._planner.check_begun)
        return marked_initial(positions)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the options.

        A limit is always returned, because Spark interprets a call without one as trigger(once).
        """
        if self._options.max_messages is None and self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadMaxRows(self._options.max_messages or _NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Record that the query ends.

        Its end is found by `latestOffset`, which knows the streams that it has read.
        """
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, or ``start`` if nothing new is available.

        Raises:
            BrokerUnavailable: If the error is permanent, or in a query with AvailableNow, where Spark would take
                ``start`` for the end.
            ConfigurationError: If the trigger is trigger(once), or the checkpoint belongs to another source.
            ConsumeError: If a stream ends before the query's position (``failOnDataLoss``), also at its leader.
        """
        if isinstance(limit, ReadAllAvailable):
            raise ConfigurationError(
                "trigger(once=True) reads one batch without limits, and the first one of a query, which is empty: "
                "use trigger(availableNow=True)"
            )
        begin, initial = from_checkpoint(start)
        self._planner.recall(begin)
        if self._available_now and self._target is None:
            self._target = self._planner.at_some_host(lambda: self._planner.ends(sure=True))
        if initial:
            return dict(begin)
        if self._away_until is not None and time.monotonic() < self._away_until:
            return start
        try:
            end = self._planner.ends(sure=False) if self._target is None else self._target
            known, begin = begin, self._planner.reconciled(begin, end)
        except BrokerUnavailable as error:
            if error.permanent or self._target is not None:
                raise
            self._planner.pass_host()
            if self._away_until is None:
                logger.warning("cannot look for new messages: %s", error)
            self._away_until = time.monotonic() + _AWAY
            return start
        self._away_until = None
        # The batch begins at `start`. A stream that begins elsewhere is empty in this batch and is read by the next
        # one. That is recorded at once, and so is a stream that is left out.
        pinned = {name: position for name, position in begin.items() if known.get(name) != position}
        end = {name: max(position, begin[name]) for name, position in end.items() if name not in pinned}
        left_out = known.keys() - begin.keys()
        if not pinned and not left_out and self._too_few(begin, end):
            self._show(start)
            return start
        planned = pinned | limited(
            begin,
            end,
            messages=limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_messages,
            size=limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes,
            average=self._planner.averages(),
        )
        if planned != start:
            self._planned_at = time.monotonic()
        self._show(planned)
        return planned

    def _too_few(self, begin: Mapping[str, int], end: Mapping[str, int]) -> bool:
        least = self._options.min_messages
        if least is None or self._target is not None:
            return False
        now = time.monotonic()
        if self._planned_at is None:
            self._planned_at = now
        waiting = sum(position - begin[name] for name, position in end.items())
        return waiting < least and now - self._planned_at < self._options.max_trigger_delay

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._planner.known_ends() or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges of a batch: the same for the same offsets, across restarts."""
        begin, initial = from_checkpoint(start)
        finish, _ = from_checkpoint(end)
        return [] if initial else self._split(ranges_of(begin, finish))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: a stream keeps its messages, and the checkpoint has the position."""

    def stop(self) -> None:
        self._planner.close()
        self._show_no_more()

    def _show(self, planned: Mapping[str, int]) -> None:
        """Update the metrics of this query's positions, in the reader process."""
        metrics = exporter(self._options.metrics_directory)
        if metrics is None:
            return
        if not metrics.streams.planned:
            on_termination(self._show_no_more)
        metrics.show(end=self._planner.known_ends(), planned=planned)

    def _show_no_more(self) -> None:
        metrics = exporter(self._options.metrics_directory)
        if metrics is not None:
            metrics.hide()


class StreamBatch(_Ranges, DataSourceReader):
    """The batch reader of stream mode. It takes the arguments of `StreamSource`.

    It accepts no filters: Spark makes one reader for a DataFrame, so filters of one use would limit all other uses.
    """

    def partitions(self) -> Sequence[InputPartition]:
        planner = StreamPlanner(self._options)
        try:
            end = planner.at_some_host(planner.ending)
            begin = planner.at_some_host(lambda: planner.beginning(end))
        finally:
            planner.close()
        return self._split(ranges_of(begin, end))
