"""Staged mode: a relay moves a queue into a stream, which executors read.

The relay runs in the reader's process beside the driver, unless ``stageBy`` says that something else fills the stage.
What it moves is exactly once in the stage (`reliable_mq.stage`), and the position of the query is in its checkpoint: so
a batch that runs again has the same rows, and no row passes the driver.

Invariants: as in `reliable_mq.spark.stream_source`; nothing is moved before Spark asks for something; the relay ends
with the process, or before it: at the end of a query it acks what the stage has confirmed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql.streaming.datasource import ReadLimit

from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import StagedOptions
from reliable_mq.spark.queue_source import on_termination
from reliable_mq.spark.stream_offsets import from_checkpoint
from reliable_mq.spark.stream_source import StreamSource
from reliable_mq.stage import StageRelay

__all__ = ["StagedSource"]

logger = logging.getLogger(__name__)

_DECLARED: Final = 60.0  # seconds for the stage to be declared
_ACTIVE: Final = 15.0  # seconds for this relay to be the active one, where a query reads what there is and ends
_MOVED: Final = 1.0  # seconds between two looks at the relay meanwhile
_CLOSE: Final = 5.0  # seconds for outstanding confirms
_LOOK_EVERY: Final = 30.0  # seconds between two looks at the beginning of the stage
_NEAR: Final = 0.1  # of the messages of a stage before the position of the query: fewer are too few


class StagedSource(StreamSource):
    """The reader of a query in staged mode."""

    def __init__(self, options: StagedOptions, names: Sequence[str]) -> None:
        super().__init__(options.stream, names)
        self._relay_options = options.relay
        self._relay: StageRelay | None = None
        self._closed = False
        self._looked_at = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the positions where a new query begins. The stage is declared then."""
        self._begin()
        return super().initialOffset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Move the messages that are ready now; then remember where the stage ends."""
        relay = self._begin()
        if relay is not None:
            if relay.wait_active(_ACTIVE):
                while not relay.wait_moved(_MOVED):
                    pass
            else:
                logger.warning(
                    "another relay moves messages into the stage, or the broker is away: reading what the stage has now"
                )
            self._close_relay()
        super().prepareForTriggerAvailableNow()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch.

        Raises:
            ReliableMQError: the relay has ended by itself; or as `StreamSource.latestOffset`.
        """
        relay = self._begin()
        if relay is not None and relay.error is not None:
            raise relay.error
        planned = super().latestOffset(start, limit)
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            self._check_retention(from_checkpoint(start)[0])
        return planned

    def stop(self) -> None:
        """Close the relay, and disconnect."""
        self._close_relay()
        super().stop()

    def _begin(self) -> StageRelay | None:
        """Return the relay, started; None where there is none, or no longer."""
        if self._relay is None and self._relay_options is not None and not self._closed:
            relay = StageRelay(
                self._relay_options,
                registry=self._registry(),
                settings=self._options.connection.settings(self._options.url),
            )
            on_termination(self._show_no_more)
            relay.start()
            self._relay = relay
            relay.wait_declared(_DECLARED)
        return self._relay

    def _registry(self) -> Any:
        metrics = exporter(self._options.metrics_directory)
        return None if metrics is None else metrics.registry

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        self._closed = True
        if relay is not None:
            relay.close(_CLOSE)

    def _show_no_more(self) -> None:
        """Handle the end of the process."""
        self._close_relay()
        super()._show_no_more()

    def _check_retention(self, position: Mapping[str, int]) -> None:
        """Show the stage's oldest offset; warn where unread messages are about to go."""
        ends, beginnings = self._planner.known_ends() or {}, self._planner.beginnings()
        metrics = exporter(self._options.metrics_directory)
        if metrics is not None:
            metrics.streams.begin.update(beginnings)
        for name, first in beginnings.items():
            at, end = position.get(name, 0), ends.get(name, 0)
            if first and at < end and at - first < _NEAR * (end - first):
                logger.warning(
                    "stage %r drops its oldest messages, it begins at offset %d, and the query has read up to offset "
                    "%d of %d: raise stageRetention and stageMaxBytes, or read faster",
                    name,
                    first,
                    at,
                    end,
                )
