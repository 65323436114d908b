"""Stream mode on nodes that lag behind the leader or cannot reach it."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError
from reliable_mq.spark import stream_planner, stream_reader, stream_source
from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_planner import StreamPlanner
from reliable_mq.spark.stream_reader import RangeReader
from reliable_mq.spark.stream_source import StreamBatch, StreamSource
from tests.scripted_streams import Replica, ScriptedChannel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from reliable_mq.codec import RawDelivery
    from reliable_mq.spark.options import StreamOptions

ANY = ReadMaxRows(2**62)
ONE, BOTH = "amqp://u:p@near/", "amqp://u:p@near,far/"


@pytest.fixture(autouse=True)
def _channels(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"_SURE": 0.2, "_QUICK": 0.01, "_CERTAIN": 0.5, "_FRESH": -1.0, "_BETWEEN_ATTEMPTS": 0.0}
    for name, value in waits.items():
        monkeypatch.setattr(stream_planner, name, value)
    monkeypatch.setattr(stream_source, "_AWAY", 0.0)
    monkeypatch.setattr(stream_reader, "_PROBE", 0.01)
    for module in (stream_planner, stream_reader):
        monkeypatch.setattr(module, "StreamChannel", ScriptedChannel)


def cluster(monkeypatch: pytest.MonkeyPatch, **replicas: Replica) -> None:
    monkeypatch.setattr(ScriptedChannel, "replicas", replicas)


def options(url: str, **given: str) -> StreamOptions:
    return read_options({"url": url, "stream": "events", **given}, streaming=True)  # type: ignore[return-value]


@pytest.fixture(params=["true", "false"])
def source(request: pytest.FixtureRequest) -> Iterator[StreamSource]:
    """A query on both nodes, with both values of ``failOnDataLoss``."""
    reader = StreamSource(options(BOTH, failOnDataLoss=request.param), ["body"])
    yield reader
    reader.stop()


def planned_end(url: str) -> int:
    """Return the end of a batch."""
    (only,) = StreamBatch(options(url, startingOffsets="earliest"), ["body"]).partitions()
    assert isinstance(only, StreamRange)
    return only.end


class WithoutFile(ScriptedChannel):
    """A channel whose certificate file is missing."""

    def __enter__(self) -> Self:
        raise ConfigurationError("connection.certFile: no such file")


# -- the position of a query -------------------------------------------------------------------------------------------


def test_a_query_ahead_of_a_lagging_replica_loses_nothing(
    source: StreamSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader counts more messages; the query continues at another node."""
    cluster(monkeypatch, near=Replica((5, 12)), far=Replica((12, 12)))
    assert source.latestOffset({"events": 10}, ANY) == {"events": 10}
    assert "was read up to offset 9, and the replica on this node ends at 4: it lags behind" in caplog.text
    assert source.latestOffset({"events": 10}, ANY) == {"events": 12}


def test_a_query_loses_nothing_where_no_leader_responds(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ then counts no messages at all."""
    cluster(monkeypatch, near=Replica((5, 0)))
    assert source.latestOffset({"events": 10}, ANY) == {"events": 10}


def test_a_count_below_the_position_is_no_loss_if_a_node_has_it(
    source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may have reached the leader's replica but not another one."""
    cluster(monkeypatch, near=Replica((5, 4)), far=Replica((12, 4), first=8))
    assert source.latestOffset({"events": 10}, ANY) == {"events": 10}


def test_available_now_fails_on_a_lagging_replica(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would end without the messages that the replica lacks."""
    cluster(monkeypatch, near=Replica((5, 12)))
    source._target = {"events": 5}
    with pytest.raises(BrokerUnavailable, match="lags behind"):
        source.latestOffset({"events": 10}, ANY)


@pytest.mark.slow
def test_a_stream_that_ends_early_at_its_leader_is_data_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream was deleted and declared again."""
    cluster(monkeypatch, near=Replica((5, 5)), far=Replica((5, 5)))
    strict = StreamSource(options(BOTH), ["body"])
    with pytest.raises(ConsumeError, match="was read up to offset 9 and ends at 4 now"):
        strict.latestOffset({"events": 10}, ANY)
    lenient = StreamSource(options(BOTH, failOnDataLoss="false"), ["body"])
    assert lenient.latestOffset({"events": 10}, ANY) == {"events": 0}


def test_a_stream_that_is_left_out_is_recorded_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A query that waits for more messages would otherwise warn about it a hundred times a second."""
    cluster(monkeypatch, near=Replica((10, 10)))
    reader = StreamSource(options(ONE, failOnDataLoss="false", minMessagesPerTrigger="100"), ["body"])
    at = reader.latestOffset({"events": 5, "old": 3}, ANY)
    assert at == {"events": 10}
    assert reader.latestOffset(at, ANY) == at
    assert caplog.text.count("'old' is in the checkpoint and no longer read") == 1


def test_the_lag_is_shown_while_a_query_waits_for_more_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster(monkeypatch, near=Replica((12, 12)))
    reader = StreamSource(options(ONE, minMessagesPerTrigger="100", metricsDirectory=str(tmp_path)), ["body"])
    assert reader.latestOffset({"events": 10}, ANY) == {"events": 10}
    metrics = exporter(str(tmp_path))
    assert metrics is not None
    assert metrics.streams.planned == {"events": 10}
    assert metrics.streams.end == {"events": 12}
    reader.stop()
    metrics.close()


def test_a_restart_looks_at_once_how_far_a_stage_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may have many partitions."""
    cluster(monkeypatch, near=Replica((10, 10)))
    monkeypatch.setattr(stream_planner, "_QUICK", 3.0)
    began = time.monotonic()
    assert StreamPlanner(options(ONE)).lost({"events": 10}, 1.0) == []
    assert time.monotonic() - began < 3.0


def test_a_certificate_that_is_being_renewed_ends_no_query(
    source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is missing when a query starts is an error."""
    cluster(monkeypatch, near=Replica((12, 12)))
    with monkeypatch.context() as renewal:
        renewal.setattr(stream_planner, "StreamChannel", WithoutFile)
        with pytest.raises(ConfigurationError, match="no such file"):
            source.latestOffset({"events": 10}, ANY)
    assert source.latestOffset({"events": 10}, ANY) == {"events": 12}
    source._planner.close()
    with monkeypatch.context() as renewal:
        renewal.setattr(stream_planner, "StreamChannel", WithoutFile)
        assert source.latestOffset({"events": 10}, ANY) == {"events": 10}
    assert source.latestOffset({"events": 10}, ANY) == {"events": 12}


def test_a_certificate_that_is_being_renewed_ends_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other hosts do not answer, as their connections need it. The batch waits for a newer end."""
    cluster(monkeypatch, near=Replica((5, 12), (12, 12)), far=Replica((5, 12)))

    class OneConnection(ScriptedChannel):
        def __enter__(self) -> Self:
            monkeypatch.setattr(stream_planner, "StreamChannel", WithoutFile)
            return super().__enter__()

    monkeypatch.setattr(stream_planner, "StreamChannel", OneConnection)
    assert planned_end(BOTH) == 12


@pytest.mark.parametrize("renewed", [True, False])
def test_a_task_waits_for_a_certificate_that_is_being_renewed(monkeypatch: pytest.MonkeyPatch, renewed: bool) -> None:
    """A file that stays missing is an error of the configuration."""
    cluster(monkeypatch, near=Replica((12, 12)))
    monkeypatch.setattr(stream_reader, "StreamChannel", WithoutFile)
    monkeypatch.setattr(stream_reader, "_RENEWAL", 0.05)

    def sleep(_seconds: float) -> None:
        if renewed:
            monkeypatch.setattr(stream_reader, "StreamChannel", ScriptedChannel)
        else:
            monkeypatch.setattr(stream_reader, "_RENEWAL", 0.0)

    monkeypatch.setattr(stream_reader.time, "sleep", sleep)
    reader = RangeReader(options(ONE), StreamRange("events", 11, 12), ("offset",))
    if renewed:
        assert [batch.to_pylist() for batch in reader.batches()] == [[{"offset": 11}]]
    else:
        with pytest.raises(ConfigurationError, match="no such file"):
            list(reader.batches())


# -- a node without a replica ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["earliest", "latest", '{"events": 12}'])
def test_a_query_begins_at_a_node_that_has_a_replica(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """A node that joined a cluster has no replicas of the streams that existed."""
    cluster(monkeypatch, near=Replica(), far=Replica((12, 12)))
    reader = StreamSource(options(BOTH, startingOffsets=start), ["body"])
    assert reader.initialOffset() == {"initial": {"events": 0 if start == "earliest" else 12}}


def test_a_query_continues_at_a_node_that_has_a_replica(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is removed from the replicas of a stream stays in the URL."""
    cluster(monkeypatch, near=Replica(), far=Replica((12, 12)))
    assert source.latestOffset({"events": 10}, ANY) == {"events": 10}
    assert source.latestOffset({"events": 10}, ANY) == {"events": 12}


def test_a_batch_is_planned_at_a_node_that_has_a_replica(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for a query with AvailableNow."""
    cluster(monkeypatch, near=Replica(), far=Replica((12, 12)))
    assert planned_end(BOTH) == 12
    source.prepareForTriggerAvailableNow()
    assert source.latestOffset({"events": 10}, ANY) == {"events": 12}


@pytest.mark.parametrize("near", [(), ((5, 12),)], ids=["no replica", "lagging"])
def test_a_restart_looks_at_a_node_that_has_a_replica(
    monkeypatch: pytest.MonkeyPatch, near: tuple[tuple[int, int], ...]
) -> None:
    """The query has read further than the replica of the first host, if there is one."""
    cluster(monkeypatch, near=Replica(*near), far=Replica((12, 12)))
    assert StreamPlanner(options(BOTH)).lost({"events": 10}, 1.0) == []


def test_a_stream_without_a_replica_at_any_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host is asked once."""
    cluster(monkeypatch, near=Replica(), far=Replica())
    with pytest.raises(BrokerUnavailable, match="no replica"):
        StreamSource(options(BOTH), ["body"]).initialOffset()


def test_a_task_reads_at_a_node_that_has_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry of the task would begin at the same host."""
    cluster(monkeypatch, near=Replica(), far=Replica((12, 12)))
    (only,) = RangeReader(options(BOTH), StreamRange("events", 11, 12), ("offset",), patience=1.0).batches()
    assert only.to_pylist() == [{"offset": 11}]


# -- the end of a batch ------------------------------------------------------------------------------------------------


def test_a_batch_ends_where_the_furthest_replica_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader counts more messages than the first node, so all nodes are asked."""
    cluster(monkeypatch, near=Replica((5, 12)), far=Replica((12, 12)))
    assert planned_end(BOTH) == 12


def test_a_batch_ends_where_a_cut_off_replica_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node has more messages than the node without a leader."""
    cluster(monkeypatch, near=Replica((5, 0)), far=Replica((12, 12)))
    assert planned_end(BOTH) == 12


def test_a_batch_waits_for_a_replica_that_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other node can be asked."""
    cluster(monkeypatch, near=Replica((5, 12), (6, 12), (6, 12), (9, 12), (12, 12)))
    assert planned_end(ONE) == 12
    cluster(monkeypatch, near=Replica((5, 12), (6, 12), (12, 12)))
    assert planned_end(BOTH) == 12


def test_a_batch_waits_until_the_leader_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ updates its counts every five seconds."""
    cluster(monkeypatch, near=Replica((5, 0), (5, 0), (5, 12), (12, 12)))
    assert planned_end(ONE) == 12


def test_a_batch_fails_where_no_leader_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would leave out messages silently."""
    cluster(monkeypatch, near=Replica((5, 0)))
    with pytest.raises(BrokerUnavailable, match="'events' has messages, and RabbitMQ counts none"):
        planned_end(ONE)


def test_a_higher_count_ends_no_batch_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The extra count is stored consumer offsets, if no node has more messages."""
    cluster(monkeypatch, near=Replica((5, 7)), far=Replica((5, 7)))
    with caplog.at_level(logging.WARNING):
        assert planned_end(BOTH) == 5
        assert "stored consumer offsets" not in caplog.text
        assert planned_end(ONE) == 5
    assert "the leaders of the streams events count more messages than this node has" in caplog.text


# -- a range -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenient", ["true", "false"])
def test_a_task_passes_over_nothing_that_a_replica_lacks(monkeypatch: pytest.MonkeyPatch, lenient: str) -> None:
    """The task fails and is retried."""
    cluster(monkeypatch, near=Replica((5, 12)))
    chosen = options(ONE, failOnDataLoss=lenient)
    with pytest.raises(ConsumeError, match=r"offsets 5 to 11 of stream 'events' did not come within 0\.1 s"):
        list(RangeReader(chosen, StreamRange("events", 5, 12), ("body",), patience=0.1).batches())


@pytest.mark.parametrize("given", [{}, {"streamFilter": "eu", "streamFilterMatchUnfiltered": "true"}])
def test_a_task_leaves_a_host_whose_replica_lags(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """A retry of the task would begin at the same host."""
    cluster(monkeypatch, near=Replica((5, 12)), far=Replica((12, 12)))
    monkeypatch.setattr(stream_reader, "_BETWEEN_ATTEMPTS", 0.01)
    reader = RangeReader(options(BOTH, **given), StreamRange("events", 11, 12), ("offset",), patience=1.0)
    assert [batch.to_pylist() for batch in reader.batches()] == [[{"offset": 11}]]


def test_a_task_of_a_process_that_was_frozen_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The freeze is no silence of the broker."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda _seconds: None)

    class FrozenChannel(ScriptedChannel):
        def take(self, timeout: float, least: int = 1, of: Collection[str] = ()) -> list[RawDelivery]:
            if not clock.now:
                clock.now = 200.0
                return []
            return super().take(timeout, least, of)

    cluster(monkeypatch, near=Replica((12, 12)))
    monkeypatch.setattr(stream_reader, "time", clock)
    monkeypatch.setattr(stream_reader, "StreamChannel", FrozenChannel)
    (only,) = RangeReader(options(ONE), StreamRange("events", 11, 12), ("offset",)).batches()
    assert only.to_pylist() == [{"offset": 11}]
