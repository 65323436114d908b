"""Spark's stream mode on a starting broker.

AMQP is available before the replicas of streams are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq import BrokerUnavailable
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_reader import RangeReader
from reliable_mq.spark.stream_source import StreamSource
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.spark.options import StreamOptions
    from tests.contract.scripted_broker import ScriptedBroker

ANY = ReadMaxRows(2**62)
NO_REPLICA = (
    "PRECONDITION_FAILED - stream queue 'events' in vhost '/' does not have a running replica on the local node"
)
STOPPED = "NOT_FOUND - queue 'events' in vhost '/' process is stopped by supervisor"
REFUSALS = pytest.mark.parametrize(
    ("method", "code", "text"),
    [("Basic.Consume", 406, NO_REPLICA), ("Queue.Declare", 404, STOPPED)],
    ids=["no replica", "stopped"],
)


def options(broker: ScriptedBroker) -> StreamOptions:
    given: Any = read_options({"url": broker.url, "stream": "events"}, streaming=True)
    return given  # type: ignore[no-any-return]


@pytest.mark.slow
@REFUSALS
def test_nothing_is_new_while_a_stream_is_not_back_yet(
    broker: ScriptedBroker, method: str, code: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would end the query."""
    broker.refusals[method] = code, text
    reader = StreamSource(options(broker), ["body"])
    assert reader.latestOffset({"events": 5}, ANY) == {"events": 5}
    assert f"{code} {text}" in caplog.text
    broker.refusals.clear()
    ends: list[dict[str, Any]] = []
    done = threading.Event()

    def look() -> bool:
        ends.append(reader.latestOffset({"events": 5}, ANY))
        return ends[-1] == {"events": 8}

    def deliver() -> None:
        """Deliver once to each consumer."""
        served: set[tuple[object, str]] = set()
        while not done.wait(0.01):
            channel = broker.consumed
            new = set() if channel is None else {(channel, tag) for tag in channel.consumers} - served
            if channel is not None and new:
                served |= new
                channel.deliver(b"x", headers={"x-stream-offset": 7})

    delivering = threading.Thread(target=deliver)
    delivering.start()
    try:
        wait_until(look, timeout=20, what="what came after it was back")
    finally:
        done.set()
        delivering.join()
    reader.stop()


@pytest.mark.slow
def test_a_task_waits_for_a_stream_that_is_not_back_yet(
    broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """It continues once the replica runs."""
    broker.refusals["Basic.Consume"] = 406, NO_REPLICA
    reader = RangeReader(options(broker), StreamRange("events", 0, 1), ("offset", "body"))
    rows: list[dict[str, Any]] = []
    task = threading.Thread(target=lambda: rows.extend(row for each in reader.batches() for row in each.to_pylist()))
    task.start()
    wait_until(lambda: caplog.text.count("does not have a running replica") >= 2, timeout=20, what="asked twice")
    broker.refusals.clear()
    broker.consuming.deliver(b"x", headers={"x-stream-offset": 0})
    task.join(20)
    assert [(row["offset"], row["body"]) for row in rows] == [(0, b"x")]


@REFUSALS
def test_a_query_reports_a_starting_broker_not_a_missing_stream(
    broker: ScriptedBroker, method: str, code: int, text: str
) -> None:
    broker.refusals[method] = code, text
    reader = StreamSource(options(broker), ["body"])
    with pytest.raises(BrokerUnavailable, match=text) as caught:
        reader.initialOffset()
    assert not caught.value.permanent
    reader.stop()
