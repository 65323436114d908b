"""Staged mode: a relay moves a queue into a stream, the stage; executors read it.

Invariants: nothing is moved before Spark requests data. A stage that the query has read is never silently recreated.
The relay ends with the process, or before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from reliable_mq._util.logs import get_logger
from reliable_mq.errors import ConsumeError, TopologyMismatch
from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import StagedOptions
from reliable_mq.spark.queue_source import on_termination
from reliable_mq.spark.stream_offsets import from_checkpoint
from reliable_mq.spark.stream_source import StreamSource
from reliable_mq.stage import StageOptions, StageRelay

logger = get_logger(__name__)

_DECLARED: Final = 60.0  # seconds for the stage to be declared
_ACTIVE: Final = 15.0  # seconds for this relay to become active, or for another to make progress, when a query ends
_EMPTY: Final = 2  # consecutive checks that find a queue empty
_MOVED: Final = 1.0  # seconds between two such checks of the relay
_STARVED: Final = 60.0  # seconds in which an active relay moves nothing, and no fewer messages are ready
_SETTLED: Final = 20.0  # seconds for the end of the stage to be settled: ten, and some counts of the queue
_CLOSE: Final = 5.0  # seconds for outstanding confirms
_LOOK_EVERY: Final = 30.0  # seconds between two checks of the beginning of the stage
_MOST_BYTES: Final = 0.75  # maximum unread share of the bytes that the stage keeps
_OLDEST: Final = 0.8  # maximum age of an unread message, as a share of the stage's retention
_NEAR: Final = 0.1  # minimum share of a truncated stage's messages that lies before the query's position


class StagedSource(StreamSource):
    """The reader of a query in staged mode.

    A relay moves a queue into the stream that executors read. It runs in the reader's process beside the driver, unless
    ``stageBy`` specifies that another process fills the stage. Each message that the relay moves is in the stage once
    (`reliable_mq.stage`), and the position of the query is in its checkpoint. So a batch that runs again has the same
    rows, and no row passes through the driver. At the end of a query the relay acks the messages that the stage has
    confirmed.

    A stage that the query has read must exist, and reach the position of the query, before the relay begins. The relay
    therefore waits until Spark has reported this position.
    """

    def __init__(self, options: StagedOptions, names: Sequence[str]) -> None:
        super().__init__(options.stream, names)
        self._relay_options = options.relay
        self._relay: StageRelay | None = None
        self._closed = False
        self._looked_at = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Declare the stage and return the positions where a new query begins.

        Raises:
            ConfigurationError: If the stage has more partitions than ``stagePartitions``.
        """
        self._begin(None)
        return super().initialOffset()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, or raise the error that ended the relay."""
        if isinstance(limit, ReadAllAvailable):
            return super().latestOffset(start, limit)  # always raises here
        position, initial = from_checkpoint(start)
        relay = self._begin(None if initial else position)
        if relay is not None and relay.error is not None:
            raise relay.error
        if relay is not None and self._available_now:
            self._move_ready(relay)
        try:
            planned = super().latestOffset(start, limit)
        except TopologyMismatch as error:
            if self._relay_options is None:
                raise
            raise _is_gone(self._relay_options.stage) from error
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            self._check_retention(position)
        return planned

    def stop(self) -> None:
        self._close_relay()
        super().stop()

    def _move_ready(self, relay: StageRelay) -> None:
        """Move the messages that are ready now, and end the relay."""
        assert self._relay_options is not None, "there is no relay"  # noqa: S101
        queue = self._relay_options.queue
        if self._wait_moved(relay, queue):
            relay.wait_settled(_SETTLED)
        else:
            logger.warning(
                "queue %r is not empty, but another relay is active, other consumers or a lagging node have the rest, "
                "or the broker is unavailable: reading what the stage has now",
                queue,
            )
        self._close_relay()

    def _wait_moved(self, relay: StageRelay, queue: str) -> bool:
        """Wait until the ready messages are moved. Return whether they are.

        Another consumer may keep some of them, or be the only active one. So the wait ends once this relay has moved
        nothing for a while, and no fewer messages are ready. It continues while this relay reads the end of the stage.
        The work of another relay is visible only in the depth of the queue. It is done once the queue was found empty
        twice. The wait continues as long as the depth decreases.
        """
        least, empty, tail = float("inf"), 0, 0
        moved, moved_at = 0, time.monotonic()
        until = time.monotonic() + _ACTIVE
        while time.monotonic() < until:
            if relay.wait_active(_MOVED):
                if relay.wait_moved(_MOVED):
                    return True
                now, status = time.monotonic(), relay.status()
                done = relay.statistics.moved + relay.statistics.moved_before
                ready = least if status.ready is None else status.ready
                if status.outstanding or done != moved or ready < least:
                    moved, moved_at, least = done, now, min(ready, least)
                if now - moved_at >= _STARVED:
                    return False
                until = now + _ACTIVE  # this relay may lose its connection, and another may become active
                continue
            moved_at = time.monotonic()
            if relay.tail_messages != tail:
                tail, until = relay.tail_messages, moved_at + _ACTIVE
            depth = self._planner.depth(queue)
            empty = empty + 1 if depth == 0 else 0
            if empty >= _EMPTY:
                return True
            if depth is not None and depth < least:
                least, until = depth, time.monotonic() + _ACTIVE
        return False

    def _begin(self, position: Mapping[str, int] | None) -> StageRelay | None:
        """Start the relay if necessary and return it; None if there is none.

        The position is that of a query that has read the stage, or None for a new query.
        """
        if self._relay is None and self._relay_options is not None and not self._closed:
            if position is not None:
                self._check_stage(position, self._relay_options)
            metrics = exporter(self._options.metrics_directory)
            registry = None if metrics is None else metrics.registry
            relay = StageRelay(self._relay_options, registry=registry, settings=self._options.settings())
            on_termination(self._show_no_more)
            relay.start()
            self._relay = relay
            relay.wait_declared(_DECLARED)
        return self._relay

    def _check_stage(self, position: Mapping[str, int], options: StageOptions) -> None:
        """Refuse a stage that is gone, or whose streams differ from those read before."""
        lenient = not self._options.fail_on_data_loss
        others = sorted(position.keys() - set(options.streams))
        if others and not lenient:  # with failOnDataLoss=false, the planner warns about them
            raise ConsumeError(
                f"the query has read {', '.join(others)}, and the stage is {', '.join(options.streams)} now: was "
                "stage or stagePartitions changed? Give it the value that the query began with, or more partitions "
                "than those. For fewer, or to begin with partitions, let the query read this stage to its end; then "
                "give a stage of another name, and a checkpointLocation of its own. With failOnDataLoss=false what was "
                "not read is left out"
            )
        # The relay would fill a stage that something else has declared again, until no offset shows it any more.
        read = {name: position[name] for name in options.streams if name in position}
        gone = self._planner.lost(read, _DECLARED)
        if gone and not lenient:
            raise _is_gone(options.stage, gone)
        self._planner.begin_anew(gone)

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        self._closed = True
        if relay is not None:
            relay.close(_CLOSE)

    def _show_no_more(self) -> None:
        self._close_relay()
        super()._show_no_more()

    def _check_retention(self, position: Mapping[str, int]) -> None:
        """Update the metrics of the stage; warn if unread messages are about to expire."""
        ends, beginnings = self._planner.known_ends(), self._planner.beginnings()
        at_risk: dict[str, int] = {}
        for name, first in beginnings.items():
            at, end = position.get(name, 0), ends.get(name, 0)
            why = self._risk(name, first, at, end) if at < end else None
            at_risk[name] = int(why is not None)
            if why is not None:
                logger.warning(
                    "stage %r is about to drop messages that the query has not read: %s. The query has read up to "
                    "offset %d of %d: read faster, or use a new stage with a larger stageRetention or "
                    "stageMaxBytes",
                    name,
                    why,
                    at,
                    end,
                )
        metrics = exporter(self._options.metrics_directory)
        if metrics is not None:
            metrics.show(begin=beginnings, at_risk=at_risk)

    def _risk(self, name: str, first: int, at: int, end: int) -> str | None:
        """Return why messages between two offsets are about to expire, or None.

        If another process fills the stage, its limits are unknown. In that case the stage must already have dropped
        messages.
        """
        limits = self._relay_options
        if limits is not None and limits.kept_bytes is not None:
            unread = (end - at) * self._planner.averages().get(name, 0.0)
            if unread > _MOST_BYTES * limits.kept_bytes:
                return f"{unread:.0f} bytes are unread, about, and stageMaxBytes keeps {limits.kept_bytes} for certain"
        if limits is not None and limits.max_age is not None:
            age = _OLDEST * limits.max_age
            if self._planner.is_older(name, at, age):
                return f"the oldest unread one is older than {age:.0f} s, and stageRetention is {limits.retention}"
        return f"it begins at offset {first}" if first and at - first < _NEAR * (end - first) else None


def _is_gone(stage: str, streams: Iterable[str] = ()) -> ConsumeError:
    named = ", ".join(streams) or "a stream of it"
    return ConsumeError(
        f"stage {stage!r} is gone: {named} was deleted after the query had read it, and messages that it had not read "
        "are lost. Give the query a checkpointLocation of its own, or set failOnDataLoss to false and start it again: "
        "either makes the stage anew, and reads it from its beginning"
    )
