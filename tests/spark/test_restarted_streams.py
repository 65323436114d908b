"""Stream mode with a stream that was just restarted.

For a while it delivers and counts nothing.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq.errors import ConfigurationError, ConsumeError
from reliable_mq.spark import stream_broker, stream_planner
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_source import StreamBatch, StreamSource
from tests.scripted_streams import Replica, ScriptedChannel

if TYPE_CHECKING:
    from reliable_mq.spark.options import StreamOptions

ANY = ReadMaxRows(2**62)
LATER = {"startingTimestamp": "4000000000000", "startingOffsetsByTimestampStrategy": "latest"}


@pytest.fixture(autouse=True)
def _channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_planner, "StreamChannel", ScriptedChannel)
    clock = SimpleNamespace(monotonic=lambda: ScriptedChannel.waited, sleep=time.sleep)
    for module in (stream_broker, stream_planner):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ScriptedChannel, "waited", 0.0)
    monkeypatch.setattr(ScriptedChannel, "replicas", {"localhost": Replica((12, 12), silent_for=9.0)})


def options(**given: str) -> StreamOptions:
    return read_options({"url": "amqp://localhost/", "stream": "events", **given}, streaming=True)  # type: ignore[return-value]


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that never had a message."""
    monkeypatch.setattr(ScriptedChannel, "replicas", {"localhost": Replica((0, 0), silent_for=10**6)})


def test_earliest_is_the_first_offset_of_a_restarted_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise offset 0 would be in the checkpoint, and look like data loss."""
    truncated = Replica((12, 5), first=7, silent_for=9.0)
    monkeypatch.setattr(ScriptedChannel, "replicas", {"localhost": truncated})
    query = StreamSource(options(startingOffsets="earliest"), ["body"])
    assert query.initialOffset() == {"initial": {"events": 7}}


def test_a_batch_reads_a_stream_that_was_just_restarted() -> None:
    """Otherwise the batch would be empty."""
    assert StreamBatch(options(startingOffsets="earliest"), ["body"]).partitions() == [StreamRange("events", 0, 12)]


def test_latest_is_not_the_first_offset_of_a_restarted_stream() -> None:
    """Otherwise a new query would read the whole stream."""
    assert StreamSource(options(), ["body"]).initialOffset() == {"initial": {"events": 12}}


def test_latest_is_before_what_comes_while_a_query_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is published to a silent stream, while the query waits for that stream, is read."""
    monkeypatch.setattr(ScriptedChannel, "replicas", {"localhost": Replica((12, 12), silent_for=9.0, coming=2)})
    assert StreamSource(options(), ["body"]).initialOffset() == {"initial": {"events": 10}}
    assert ScriptedChannel.waited == 9.0


def test_latest_for_a_time_is_the_end_of_a_restarted_stream() -> None:
    """No message is as new as the given time."""
    assert StreamSource(options(**LATER), ["body"]).initialOffset() == {"initial": {"events": 12}}


def test_available_now_ends_at_the_end_of_a_restarted_stream() -> None:
    """Otherwise the query would end without a row."""
    query = StreamSource(options(startingOffsets="earliest"), ["body"])
    query.prepareForTriggerAvailableNow()
    assert query.latestOffset({"events": 0}, ANY) == {"events": 12}


def test_a_query_beyond_a_restarted_stream_waits_for_it() -> None:
    """A silent stream does not count as data loss."""
    assert StreamSource(options(), ["body"]).latestOffset({"events": 12}, ANY) == {"events": 12}


@pytest.mark.usefixtures("empty")
def test_a_stream_without_messages_costs_no_more_than_it_must() -> None:
    """A running query does not wait."""
    assert StreamSource(options(), ["body"]).latestOffset({"events": 0}, ANY) == {"events": 0}
    assert ScriptedChannel.waited < 1.0
    ScriptedChannel.waited = 0.0
    assert StreamBatch(options(startingOffsets="earliest"), ["body"]).partitions() == []
    assert ScriptedChannel.waited == 12.0


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("start", "seconds"), [("0", 0.0), ('"earliest"', 12.0), ('"latest"', 12.0)])
def test_a_beginning_is_waited_for_once_and_zero_is_not(start: str, seconds: float) -> None:
    """Offset 0 is not beyond the end of any stream."""
    query = StreamSource(options(startingOffsets=f'{{"events": {start}}}'), ["body"])
    assert query.initialOffset() == {"initial": {"events": 0}}
    assert ScriptedChannel.waited == seconds


@pytest.mark.usefixtures("empty")
def test_a_checkpoint_beyond_an_empty_stream_is_data_loss() -> None:
    """The error is raised once the stream is known to be empty."""
    with pytest.raises(ConsumeError, match="was read up to offset 11 and is empty now"):
        StreamSource(options(), ["body"]).latestOffset({"events": 12}, ANY)


@pytest.mark.usefixtures("empty")
def test_a_stream_without_messages_has_none_of_a_time() -> None:
    """The same holds if all messages are older."""
    assert StreamSource(options(**LATER), ["body"]).initialOffset() == {"initial": {"events": 0}}
    with pytest.raises(ConfigurationError, match="no message as new as"):
        StreamSource(options(startingTimestamp="4000000000000"), ["body"]).initialOffset()
