"""Staged mode: its source, called as Spark would, without a session."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from integration.support.spark import read_to_the_end
from integration.support.stages import ORDERS, STAGED, left, publish_orders
from reliable_mq import Binding, ConfigurationError, ConsumeError, Exchange, Message, Publisher, Queue
from reliable_mq.codec.methods import Consume, QueueState, SetPrefetch
from reliable_mq.spark.datasource import RabbitMQDataSource
from reliable_mq.spark.metrics import exporter
from reliable_mq.stage import StageOptions, StageRelay
from reliable_mq.stage.client import RelayClient
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reliable_mq.testing import FaultProxyFactory, VirtualHost


def ended(vhost: VirtualHost, start: dict[str, Any] | None, **options: str) -> tuple[list[str], dict[str, Any]]:
    """Read to the end without a session; return the message ids and the position."""
    parts, at = read_to_the_end({"url": vhost.url, **STAGED, **options}, start)
    return list(chain(*parts)), at


def test_available_now_waits_for_what_another_relay_moves(
    vhost: VirtualHost,
    fault_proxy: FaultProxyFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run waits while the other relay moves messages, and reads all that were ready.

    It does not wait for a relay that moves none.
    """
    with fault_proxy(vhost.url) as proxy:
        options = StageOptions(url=proxy.url, queue="orders", stage="orders.stage", max_outstanding=5)
        first = publish_orders(vhost, 10)
        service = StageRelay(options)
        service.start()
        try:
            assert service.wait_active(60)
            wait_until(lambda: service.statistics.moved == 10, timeout=60, what="a stage in which the first ones are")
            proxy.throttle(4_000)
            first += publish_orders(vhost, 80)
            rows, at = ended(vhost, None)
            assert sorted(rows) == sorted(first)
            assert service.active
            assert "another relay is active" not in caplog.text
            proxy.throttle(None)
            proxy.hold_confirms()
            publish_orders(vhost, 50)
            monkeypatch.setattr("reliable_mq.spark.staged_source._ACTIVE", 3.0)
            rows, _ = ended(vhost, at)
            assert len(rows) <= 5
            assert "another relay is active" in caplog.text
        finally:
            proxy.heal()
            service.close(10)


def test_available_now_ends_though_another_has_a_message(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes after the relay's first count, and before its first subscription."""
    first = publish_orders(vhost, 10)
    lock = StageOptions(url=vhost.url, **STAGED).lock
    taken = Event()
    subscribe = RelayClient._subscribe_to_queue

    def subscribe_second(client: RelayClient) -> None:
        taken.wait(60)  # in general it is set by then, because the stage is too new for two seconds
        subscribe(client)

    monkeypatch.setattr(RelayClient, "_subscribe_to_queue", subscribe_second)

    def is_counted() -> bool:
        state = channel.counts([lock])[lock]
        return isinstance(state, QueueState) and state.consumers == 1

    with AdminChannel(parse_url(vhost.url), name="other") as channel, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ended, vhost, None)
        wait_until(is_counted, timeout=60, what="a relay that has the lock")
        channel.perform(SetPrefetch(1))
        channel.perform(Consume("orders", "other"))
        taken.set()
        wait_until(lambda: left(vhost, "orders") == 1, timeout=60, what="all others moved")
        monkeypatch.setattr("reliable_mq.spark.staged_source._STARVED", 1.0)  # from now on, a pause does not matter
        rows, _ = reading.result(60)
    assert set(rows) < set(first)
    assert len(rows) == 9
    assert "other consumers or a lagging node have the rest" in caplog.text


@pytest.mark.parametrize("remade", [False, True])
def test_f69_a_stage_deleted_between_runs_is_not_silently_remade(vhost: VirtualHost, remade: bool) -> None:
    """Each run fails and leaves the queue unchanged, also if another query has made the stage anew.

    With failOnDataLoss=false, the new stage is read from its start.
    """
    first = publish_orders(vhost, 20)
    rows, at = ended(vhost, None)
    assert sorted(rows) == sorted(first)
    vhost.delete_queue("orders.stage")
    if remade:
        ended(vhost, None)
    second = publish_orders(vhost, 60)  # more than were read before: the offsets of a new stage would not show it
    for _ in range(2):
        with pytest.raises(ConsumeError, match=r"stage 'orders\.stage' is gone: orders\.stage was deleted after"):
            ended(vhost, at)
    wait_until(lambda: left(vhost, "orders") == 60, timeout=20, what="a queue that is as it was")
    rows, _ = ended(vhost, at, failOnDataLoss="false")
    assert sorted(rows) == sorted(second)


def test_a_stage_deleted_under_a_query_is_named_with_the_way_on(vhost: VirtualHost) -> None:
    publish_orders(vhost, 20)
    made = RabbitMQDataSource({"url": vhost.url, **STAGED})
    source: Any = made.streamReader(made.schema())
    try:
        at = source.initialOffset()
        begun = at
        while at == begun:
            at = source.latestOffset(begun, ReadMaxRows(1000))
        vhost.delete_queue("orders.stage")
        with pytest.raises(ConsumeError, match=r"stage 'orders\.stage' is gone: .*checkpointLocation"):
            wait_until(lambda: source.latestOffset(at, ReadMaxRows(1000)) is None, timeout=60, what="the error")
    finally:
        source.stop()


@pytest.mark.parametrize(("before", "after"), [("", "2"), ("2", ""), ("3", "2")])
def test_a_stage_with_streams_unlike_the_checkpoints_is_refused(vhost: VirtualHost, before: str, after: str) -> None:
    """The query fails before it moves messages, and works with the old streams."""
    old, new = ({"stagePartitions": each} if each else {} for each in (before, after))
    publish_orders(vhost, 20)
    _, at = ended(vhost, None, **old)
    second = publish_orders(vhost, 20)
    with pytest.raises(ConsumeError, match=r"the query has read .* was stage or stagePartitions changed\?"):
        ended(vhost, at, **new)
    wait_until(lambda: left(vhost, "orders") == 20, timeout=20, what="a queue that is as it was")
    rows, _ = ended(vhost, at, **old)
    assert sorted(rows) == sorted(second)


def test_a_query_goes_on_with_more_partitions(vhost: VirtualHost) -> None:
    """New partitions are read from their first message.

    A stream with the stage's own name is not a partition.
    """
    publish_orders(vhost, 1, Queue("orders.stage", type="stream"))
    first = publish_orders(vhost, 20)
    rows, at = ended(vhost, None, stagePartitions="2")
    assert sorted(rows) == sorted(first)
    second = publish_orders(vhost, 40)
    rows, at = ended(vhost, at, stagePartitions="3")
    assert sorted(rows) == sorted(second)
    assert sorted(at) == ["orders.stage-0", "orders.stage-1", "orders.stage-2"]


@pytest.mark.parametrize("fewer", [{}, {"stagePartitions": "2"}])
def test_a_query_that_would_read_a_part_of_a_stage_is_refused(vhost: VirtualHost, fewer: dict[str, str]) -> None:
    """The relay of another process has given the stage more partitions."""
    relay = StageRelay(StageOptions(url=vhost.url, queue="orders", stage="orders.stage", partitions=3))
    first = publish_orders(vhost, 20)
    relay.start()
    try:
        assert relay.wait_moved(60)
        with pytest.raises(ConfigurationError, match=r"has a partition 'orders.stage-[02]', which would not be read"):
            ended(vhost, None, **fewer)
    finally:
        relay.close(10)
    rows, _ = ended(vhost, None, stagePartitions="3")
    assert sorted(rows) == sorted(first)


def test_options_of_stream_mode_hold_for_a_stage(vhost: VirtualHost) -> None:
    """The start time and the maximum of a task apply to the messages in the stage."""
    publish_orders(vhost, 20)
    _, at = ended(vhost, None)
    boundary = int(time.time()) + 2  # AMQP times are whole seconds
    wait_until(lambda: time.time() > boundary + 0.1, timeout=10, what="two seconds to pass")
    second = publish_orders(vhost, 20)
    ended(vhost, at, stageMessagesPerEntry="1")
    given = {"url": vhost.url, **STAGED, "startingTimestamp": str(boundary * 1000), "maxRecordsPerPartition": "8"}
    parts, _ = read_to_the_end(given)
    assert sorted(chain(*parts)) == sorted(second)
    assert len(parts) >= 3
    assert max(map(len, parts)) <= 8


def test_a_batch_of_a_stage_waits_for_its_minimum_of_messages(vhost: VirtualHost) -> None:
    """It waits for messages that the relay has moved."""
    publish_orders(vhost, 5)
    made = RabbitMQDataSource({"url": vhost.url, **STAGED, "minMessagesPerTrigger": "10"})
    source: Any = made.streamReader(made.schema())

    def follow() -> None:
        at = source.latestOffset(source.initialOffset(), ReadMaxRows(1000))
        wait_until(
            lambda: look(at) == at and source.reportLatestOffset()["orders.stage"] > 5,  # includes the relay's marker
            timeout=60, what="five seen, and no batch",
        )  # fmt: skip
        publish_orders(vhost, 5)
        wait_until(lambda: look(at) != at, timeout=60, what="a batch of ten")

    def look(at: dict[str, Any]) -> dict[str, Any]:
        end: dict[str, Any] = source.latestOffset(at, ReadMaxRows(1000))
        return end

    try:
        with ThreadPoolExecutor(1) as thread:  # on the main thread, the source would handle its signals
            thread.submit(follow).result()
    finally:
        source.stop()


def test_a_stage_that_a_binding_fills_is_filtered_by_the_broker(vhost: VirtualHost) -> None:
    """These messages have the filter header, which a relay does not copy."""
    shop, stage = Exchange("shop"), Queue("orders.stage", type="stream")
    bindings = [Binding(shop, queue, routing_key="order") for queue in (ORDERS, stage)]
    messages = [
        Message(b"x", headers={"x-stream-filter-value": region}, message_id=f"{region}-{number}")
        for region in ("eu", "us")
        for number in range(20)
    ]
    with Publisher(vhost.url, topology=[shop, ORDERS, stage, *bindings]) as publisher:
        assert publisher.publish_many(messages, exchange="shop", routing_key="order").ok
    rows, _ = ended(vhost, None, stageBy="none", streamFilter="eu")
    assert sorted(rows) == sorted(f"eu-{number}" for number in range(20))


class Watched:
    """A query of a stage, called as Spark would, and its warnings.

    Every call checks the retention. The metrics are those of this process.
    """

    def __init__(self, vhost: VirtualHost, directory: Path, caplog: pytest.LogCaptureFixture, **options: str) -> None:
        made = RabbitMQDataSource({"url": vhost.url, "metricsDirectory": str(directory), **STAGED, **options})
        self.source: Any = made.streamReader(made.schema())
        found = exporter(str(directory))
        assert found is not None
        self.metrics = found
        self._caplog = caplog

    @property
    def begin(self) -> int | None:
        return self.metrics.streams.begin.get("orders.stage")

    def planned(self, position: int) -> int:
        """Return the end of a batch that starts at a position."""
        self._caplog.clear()
        end: int = self.source.latestOffset({"orders.stage": position}, ReadMaxRows(1000))["orders.stage"]
        return end

    def warned(self) -> bool:
        """Return whether the last batch logged a warning; check the metric as well."""
        self.metrics.write()
        [line] = [each for each in self.metrics.path.read_text().splitlines() if "spark_stage_at_risk{" in each]
        found = "is about to drop messages that the query has not read" in self._caplog.text
        assert line.endswith(" 1.0" if found else " 0.0"), line
        return found

    def filled(self) -> int:
        """Wait until the relay has moved everything; return the end of the stage."""
        self.source.initialOffset()
        while not self.source._relay.wait_moved(60):
            pass
        wait_until(lambda: self.planned(0) > 100, timeout=60, what="100 messages, and the marker of the relay, seen")
        return self.planned(0)

    def run(self, follow: Callable[[], None]) -> None:
        try:
            with ThreadPoolExecutor(1) as thread:  # on the main thread, the source would handle its signals
                thread.submit(follow).result()
        finally:
            self.source.stop()
            self.metrics.close()


@pytest.fixture
def hundred(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of 100 messages of 60 kB in the queue.

    The retention is checked with every batch.
    """
    monkeypatch.setattr("reliable_mq.spark.staged_source._LOOK_EVERY", 0.0)
    messages = [Message(bytes(60_000)) for _ in range(100)]
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert publisher.publish_many(messages, routing_key=ORDERS.name).ok
    return [message.message_id for message in messages]


@pytest.mark.usefixtures("hundred")
def test_f69_a_stage_without_drops_is_warned_of_by_its_bytes(
    vhost: VirtualHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """6 MB are unread, and only 7 MB are certain to be kept.

    The next segment to be dropped would be an unread one.
    """
    query = Watched(vhost, tmp_path, caplog, stageMaxBytes="8000000")

    def follow() -> None:
        query.filled()
        assert query.begin == 0
        assert query.warned()
        assert "bytes are unread, about, and stageMaxBytes keeps 7000000 for certain" in caplog.text
        query.planned(50)
        assert query.begin == 0
        assert not query.warned()

    query.run(follow)


@pytest.mark.usefixtures("hundred")
def test_f69_a_stage_without_drops_is_warned_of_by_its_age(
    vhost: VirtualHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unread messages near the end of their retention cause a warning.

    Messages that were just moved do not.
    """
    query = Watched(vhost, tmp_path, caplog, stageRetention="30s")

    def follow() -> None:
        end = query.filled()
        assert not query.warned()
        wait_until(lambda: query.planned(0) and query.warned(), timeout=60, what="a warning")
        assert "is older than 24 s, and stageRetention is 30s" in caplog.text
        assert query.begin == 0
        query.planned(end)
        assert not query.warned()

    query.run(follow)


def test_f69_dropping_unread_messages_is_warned_of_and_an_error(
    vhost: VirtualHost, tmp_path: Path, caplog: pytest.LogCaptureFixture, hundred: list[str]
) -> None:
    """A query near the oldest message warns, and one behind it fails.

    This also holds for a stage that is not filled by the query.
    """
    # RabbitMQ writes messages that arrive together in one chunk, and drops a chunk larger than the stage at once.
    small = {"publisher.maxOutstanding": "10"}
    query = Watched(vhost, tmp_path / "relay", caplog, stageMaxBytes="2000000", **small)
    other = Watched(vhost, tmp_path / "none", caplog, stageBy="none")

    def follow() -> None:
        query.filled()
        wait_until(lambda: query.planned(0) and query.begin, timeout=60, what="some dropped")
        assert query.warned()
        begin, end = query.begin, query.planned(0)
        assert "reliable_mq_spark_stream_begin{" in query.metrics.path.read_text()
        assert begin is not None
        assert begin < end
        query.planned(end)
        assert not query.warned()
        for each in (query, other):
            each.planned(begin + 1)
            assert each.warned()
        [kept] = query.source.partitions({"orders.stage": begin}, {"orders.stage": end})
        ids = [row["message_id"] for rows in query.source.read(kept) for row in rows.to_pylist()]
        assert ids == hundred[-len(ids) :]
        [gone] = query.source.partitions({"orders.stage": 0}, {"orders.stage": end})
        with pytest.raises(ConsumeError, match="are gone"):
            list(query.source.read(gone))

    try:
        query.run(follow)
    finally:
        other.run(lambda: None)
