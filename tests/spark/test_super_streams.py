"""The partitions of a super stream, in the order of their bindings.

Later reads of the bindings may change them.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq.codec.methods import CheckQueue, MethodReply, Step
from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, TopologyMismatch
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.settings import TLSOptions
from reliable_mq.spark import stream_broker, stream_planner
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_broker import PartitionFinder, bound_partitions
from reliable_mq.spark.stream_source import StreamSource
from reliable_mq.url import parse_url
from tests.scripted_streams import Replica, ScriptedChannel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from reliable_mq.spark.options import StreamOptions

ANY = ReadMaxRows(2**62)


def binding(queue: str, order: object = None, kind: str = "queue") -> dict[str, Any]:
    arguments = {} if order is None else {"x-stream-partition-order": order}
    return {"destination": queue, "destination_type": kind, "arguments": arguments}


def test_partitions_are_in_the_order_of_their_bindings() -> None:
    """A queue that is bound twice occurs once; a queue without an order is last."""
    bindings = [
        binding("none"), binding("b", 10), binding("a", "9"), binding("c", 8), binding("b", 7),
        binding("other", 0, "exchange"),
    ]  # fmt: skip
    assert bound_partitions(bindings) == ["b", "c", "a", "none"]


def test_what_was_found_stays_while_the_api_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running query continues, and a new query fails."""
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr(stream_broker, "exists", lambda *_: False)
    answers: list[Any] = [[binding("a", 0)], ManagementError("away"), [binding("a", 0), binding("b", 1)]]

    def get(_api: object, *_segments: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ManagementAPI, "get", get)
    finder = PartitionFinder(parse_url("amqp://localhost/"), ["s"], "http://localhost:15672")
    channel: Any = None
    assert [finder.streams(channel) for _ in range(3)] == [["a"], ["a"], ["a", "b"]]
    answers[:] = [ManagementError("refused", 401)]
    with pytest.raises(BrokerUnavailable, match="bindings of 's' cannot be read: refused") as raised:
        PartitionFinder(parse_url("amqp://localhost/"), ["s"], "http://localhost:15672").streams(channel)
    assert raised.value.permanent
    with pytest.raises(ConfigurationError, match=r"^managementUrl must be http"):
        PartitionFinder(parse_url("amqp://localhost/"), ["s"], "localhost:15672").streams(channel)


def test_what_was_found_stays_while_a_certificate_is_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is missing when a query starts is an error."""
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr(stream_broker, "exists", lambda *_: False)
    monkeypatch.setattr(ManagementAPI, "get", lambda *_: [binding("a", 0)])
    file = tmp_path / "ca.pem"
    settings = parse_url("amqps://localhost/", tls=TLSOptions(ca_file=str(file)))
    finder = PartitionFinder(settings, ["s"], "https://localhost:15671")
    channel: Any = None
    with pytest.raises(ConfigurationError, match="ca_file"):
        finder.streams(channel)
    with monkeypatch.context() as there:
        there.setattr(TLSOptions, "build_context", lambda _: ssl.create_default_context())
        assert finder.streams(channel) == ["a"]
    assert finder.streams(channel) == ["a"]


def test_what_was_found_stays_while_a_credentials_callback_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query does not wait for it longer than for a connection."""
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr(stream_broker, "exists", lambda *_: False)
    monkeypatch.setattr(ManagementAPI, "get", lambda *_: [binding("a", 0)])
    released = threading.Event()
    hangs = False

    def credentials() -> tuple[str, str]:
        if hangs:
            released.wait(5.0)
        return "user", "password"

    settings = parse_url("amqp://localhost/", credentials=credentials, connect_timeout=0.1)
    finder = PartitionFinder(settings, ["s"], "http://localhost:15672")
    channel: Any = None
    assert finder.streams(channel) == ["a"]
    hangs = True
    began = time.monotonic()
    assert finder.streams(channel) == ["a"]
    with pytest.raises(BrokerUnavailable, match=r"no credentials for managementUrl within 0\.1 s"):
        PartitionFinder(settings, ["s"], "http://localhost:15672").streams(channel)
    assert time.monotonic() - began < 3.0
    released.set()


# -- a partition that is deleted ---------------------------------------------------------------------------------------


class PartitionedChannel(ScriptedChannel):
    """A channel on a node with some streams. The end of a subscription has ended it."""

    streams: ClassVar[set[str]] = set()
    usable = False

    def consume(
        self, stream: str, offset: int | str | datetime, prefetch: int, arguments: Mapping[str, object] | None = None
    ) -> str:
        if stream not in self.streams:
            raise TopologyMismatch(f"no queue {stream!r}", kind="queue", name=stream)
        return super().consume(stream, offset, prefetch, arguments)

    def perform(self, step: Step) -> MethodReply:
        assert isinstance(step, CheckQueue)
        if step.name not in self.streams:
            raise StepRefused(404, f"NOT_FOUND - no queue '{step.name}'")
        return super().perform(step)


def query(monkeypatch: pytest.MonkeyPatch, **given: str) -> StreamSource:
    """Return a query that reads the partitions 0, 1 and 2 of a super stream."""
    for name, value in {"_SURE": 0.2, "_QUICK": 0.01, "_CERTAIN": 0.5, "_FRESH": -1.0}.items():
        monkeypatch.setattr(stream_planner, name, value)
    monkeypatch.setattr(PartitionedChannel, "streams", {"orders-0", "orders-1", "orders-2"})
    monkeypatch.setattr(ScriptedChannel, "replicas", {"near": Replica((12, 12))})
    monkeypatch.setattr(stream_planner, "StreamChannel", PartitionedChannel)
    options: StreamOptions = read_options(  # type: ignore[assignment]
        {"url": "amqp://u:p@near/", "stream": "orders", **given}, streaming=True
    )
    source = StreamSource(options, ["body"])
    assert source.latestOffset(positions(10, 10, 10), ANY) == positions(12, 12, 12)
    return source


def positions(*each: int) -> dict[str, int]:
    return {f"orders-{number}": position for number, position in enumerate(each)}


def test_a_query_goes_on_without_deleted_partitions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With failOnDataLoss=false, it warns once. A partition that is made later is a new one, also after a gap."""
    source = query(monkeypatch, failOnDataLoss="false")
    PartitionedChannel.streams.clear()
    PartitionedChannel.streams.add("orders-2")
    at = source.latestOffset(positions(10, 10, 10), ANY)
    assert at == {"orders-2": 12}
    assert source.latestOffset(at, ANY) == at
    lost = [record.message for record in caplog.records if "no longer read" in record.message]
    assert [text[:17] for text in lost] == ["stream 'orders-0'", "stream 'orders-1'"]
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    PartitionedChannel.streams.update({"orders-0", "orders-3"})
    with caplog.at_level(logging.INFO):
        assert source.latestOffset(at, ANY) == {"orders-0": 0, "orders-2": 12, "orders-3": 0}
    assert "super stream 'orders' has a new partition 'orders-0'" in caplog.text


def test_a_deleted_partition_is_data_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    source = query(monkeypatch)
    PartitionedChannel.streams.remove("orders-1")
    with pytest.raises(
        ConsumeError, match=r"stream 'orders-1' is in the checkpoint and no longer read: was it deleted"
    ):
        source.latestOffset(positions(10, 10, 10), ANY)


def test_partitions_that_are_shorter_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The super stream was made anew: each of its partitions is."""
    source = query(monkeypatch)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(stream_planner, "time", clock)
    monkeypatch.setattr(stream_planner, "_CERTAIN", 12.0)
    with pytest.raises(ConsumeError, match="was read up to offset 19 and ends at 11 now"):
        source.latestOffset(positions(20, 20, 20), ANY)
    assert 12.0 <= clock.now < 13.0


def test_a_super_stream_without_partitions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query keeps its position in the last one."""
    source = query(monkeypatch, failOnDataLoss="false")
    PartitionedChannel.streams.clear()
    with pytest.raises(TopologyMismatch, match="no queue 'orders-"):
        source.latestOffset(positions(10, 10, 10), ANY)
