"""Stream mode against a real broker, without a Spark session.

The tests cover ends, plans, ranges and data loss.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from reliable_mq import Binding, Exchange, Message, Publisher, Queue
from reliable_mq.codec.methods import CheckQueue
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, TopologyMismatch
from reliable_mq.spark import stream_broker, stream_reader
from reliable_mq.spark.datasource import RabbitMQDataSource
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_broker import EndWatch, PartitionFinder, StreamChannel, StreamEnd, end_of
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_planner import StreamPlanner
from reliable_mq.spark.stream_reader import RangeReader, ValueFilter
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from random import Random

    from reliable_mq.spark.options import StreamOptions
    from reliable_mq.spark.stream_source import StreamBatch, StreamSource
    from reliable_mq.testing import FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "quick_counts")

EVENTS = Queue("events", type="stream")
VALUE = "x-stream-filter-value"
COLUMNS = ("offset", "body", "queue")
ANY = ReadMaxRows(2**62)
WHOLE = StreamRange("events", 0, 1000)
STRICT = ("true", "false")  # failOnDataLoss


@pytest.fixture(scope="module")
def quick_counts(broker: RabbitMQ) -> None:
    """Make RabbitMQ count stream messages every 0.2 s instead of every five seconds."""
    broker.evaluate(
        "sys:replace_state(rabbit_osiris_metrics, fun (State) -> setelement(2, State, 200) end), "
        "rabbit_osiris_metrics ! tick"
    )


def publish(vhost: VirtualHost, count: int, *, first: int = 0, queue: Queue = EVENTS, size: int = 0) -> None:
    with Publisher(vhost.url, topology=[queue]) as publisher:
        numbers = range(first, first + count)
        report = publisher.publish_many((Message(b"%d" % n + b" " * size) for n in numbers), routing_key=queue.name)
        assert report.ok


def options(url: str, **given: str) -> StreamOptions:
    checked = read_options({"url": url, "stream": "events", **given}, streaming=False)
    assert not hasattr(checked, "queues")
    return checked  # type: ignore[return-value]


def source(url: str, **given: str) -> StreamSource:
    made = RabbitMQDataSource({"url": url, "stream": "events", **given})
    reader: Any = made.streamReader(made.schema())
    return cloudpickle.loads(cloudpickle.dumps(reader))  # as Spark does  # type: ignore[no-any-return]


def batch(url: str, **given: str) -> StreamBatch:
    made = RabbitMQDataSource({"url": url, "stream": "events", **given})
    reader: Any = made.reader(made.schema())
    return reader  # type: ignore[no-any-return]


def read(reader: RangeReader) -> list[tuple[int, bytes]]:
    rows = [row for each in reader.batches() for row in each.to_pylist()]
    assert {row["queue"] for row in rows} <= {"events"}
    return [(row["offset"], row["body"].rstrip()) for row in rows]


def numbered(start: int, end: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d" % number) for number in range(start, end)]


def restored(offset: dict[str, Any]) -> dict[str, Any]:
    """Return an offset as restored from the checkpoint."""
    back: dict[str, Any] = json.loads(json.dumps(offset))
    return back


def ranges_from(reader: StreamSource, start: dict[str, Any]) -> list[StreamRange]:
    """Return the ranges that a query reads from ``start`` until nothing is new."""
    ranges: list[StreamRange] = []
    while (end := restored(reader.latestOffset(start, reader.getDefaultReadLimit()))) != start:
        ranges += reader.partitions(start, end)  # type: ignore[arg-type]
        start = end
    return ranges


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_a_range_is_read_exactly(vhost: VirtualHost) -> None:
    """Ranges start and end inside chunks.

    A range has each message once, in order, however often it is read.
    """
    publish(vhost, 5000)
    for start, end, prefetch in ((0, 5000, "2000"), (1, 2, "1"), (2499, 3777, "7"), (4999, 5000, "100")):
        for _ in range(2):
            reader = RangeReader(options(vhost.url, prefetch=prefetch), StreamRange("events", start, end), COLUMNS)
            assert read(reader) == numbered(start, end)


def test_a_filter_reads_the_messages_of_its_values_and_no_other(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker skips whole chunks, and the reader filters the rest to the end."""
    values = ["a", "b", "c", None, "a", "b", "a", "a"]  # one per chunk; every tenth message has another one
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        for chunk, value in enumerate(values):
            of = [value if number % 10 else "ab"[chunk % 2] for number in range(100)]
            publisher.publish_many(
                (
                    Message(b"%d" % (100 * chunk + number), headers=None if each is None else {VALUE: each})
                    for number, each in enumerate(of)
                ),
                routing_key="events",
            )
    wanted = [value if number % 10 else "ab"[chunk % 2] for chunk, value in enumerate(values) for number in range(100)]
    seen: list[object] = []
    passes = ValueFilter.passes
    monkeypatch.setattr(ValueFilter, "passes", lambda *given: seen.append(given) or passes(*given))

    def found(prefetch: str = "2000", **given: str) -> list[int]:
        chosen = options(vhost.url, prefetch=prefetch, **given)
        return [offset for offset, _ in read(RangeReader(chosen, StreamRange("events", 5, 795), COLUMNS))]

    assert found(streamFilter="c") == [n for n in range(5, 795) if wanted[n] == "c"]
    assert len(seen) <= 100, "the broker has not filtered"
    assert found(prefetch="3", streamFilter="b, c") == [n for n in range(5, 795) if wanted[n] in ("b", "c")]
    assert found(streamFilter="nobody has it") == []
    unfiltered = found(streamFilter="c", streamFilterMatchUnfiltered="true")
    assert unfiltered == [n for n in range(5, 795) if wanted[n] in ("c", None)]


def test_a_range_is_read_exactly_over_lost_connections(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """The reader continues after the last message that it returned."""
    publish(vhost, 6000, size=300)
    proxy = fault_proxy(vhost.url)
    reader = RangeReader(options(proxy.url, prefetch="200"), StreamRange("events", 10, 5990), COLUMNS)
    rows: list[int] = []
    cuts = sorted(rng.sample(range(100, 5500), 3))
    for each in reader.batches():
        rows += each.column("offset").to_pylist()
        if cuts and len(rows) > cuts[0]:
            cuts.pop(0)
            proxy.cut()
    assert rows == list(range(10, 5990))
    assert not cuts


def test_a_task_outlives_a_connection_lost_as_it_subscribes(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ refuses a subscription on the next connection, which has no prefetch."""
    monkeypatch.setattr(stream_reader, "_BETWEEN_ATTEMPTS", 0.0)
    publish(vhost, 10)
    proxy = fault_proxy(vhost.url)
    for _ in range(20):
        proxy.cut_after(1, "to_client", of="basic.qos-ok")
        assert read(RangeReader(options(proxy.url), StreamRange("events", 0, 10), COLUMNS)) == numbered(0, 10)


def test_slow_row_processing_does_not_use_up_broker_patience(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost during the processing, and the reader reconnects."""
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed, sleep=time.sleep)
    monkeypatch.setattr(stream_reader, "time", clock)
    publish(vhost, 1000)
    proxy = fault_proxy(vhost.url)
    reader = RangeReader(options(proxy.url, prefetch="100"), StreamRange("events", 0, 1000), COLUMNS)
    rows: list[int] = []
    for each in reader.batches():
        if not rows:
            proxy.cut()
        passed += 61.0  # seconds, longer than the patience
        rows += each.column("offset").to_pylist()
    assert rows == list(range(1000))


def test_a_task_asks_for_as_many_messages_as_it_can_hold(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for a few until it knows their size, then for 32 MiB or the prefetch."""
    asked: list[int] = []
    consume = StreamChannel.consume

    def asking(channel: StreamChannel, stream: str, offset: int, prefetch: int, *more: Any) -> str:
        asked.append(prefetch)
        return consume(channel, stream, offset, prefetch, *more)

    monkeypatch.setattr(StreamChannel, "consume", asking)
    publish(vhost, 80, size=2**20)
    publish(vhost, 500, first=80)
    for (start, end), prefetches in {(0, 80): [64, 31], (80, 580): [64, 2000]}.items():
        asked.clear()
        assert read(RangeReader(options(vhost.url), StreamRange("events", start, end), COLUMNS)) == numbered(start, end)
        assert asked == prefetches


def test_a_range_that_cannot_be_filled_is_an_error(vhost: VirtualHost) -> None:
    """The stream ends before the range does; the task must not just return less."""
    publish(vhost, 10)

    def read_what_is_there(**given: str) -> list[tuple[int, bytes]]:
        reader = RangeReader(options(vhost.url, **given), StreamRange("events", 5, 20), COLUMNS)
        rows: list[tuple[int, bytes]] = []
        for each in reader.batches():
            rows += [(row["offset"], row["body"]) for row in each.to_pylist()]
            if rows[-1][0] == 9:
                reader._patience = 1.5  # not before: the broker may be slow to connect and to deliver
        return rows

    with pytest.raises(ConsumeError, match=r"offsets 10 to 19 of stream 'events' are not there: .*ends at offset 9"):
        read_what_is_there()
    assert read_what_is_there(failOnDataLoss="false") == numbered(5, 10)


def test_a_deleted_streams_range_is_empty_if_data_may_be_lost(vhost: VirtualHost) -> None:
    """A checkpoint may have a range of a stream that the option no longer names."""
    publish(vhost, 10)
    vhost.delete_queue("events")
    deleted = StreamRange("events", 5, 10)
    with pytest.raises(TopologyMismatch, match="no queue 'events'"):
        read(RangeReader(options(vhost.url), deleted, COLUMNS))
    assert read(RangeReader(options(vhost.url, failOnDataLoss="false"), deleted, COLUMNS)) == []


@pytest.mark.parametrize(("end", "said"), [(10, "has them"), (20, "has those up to 9")])
def test_a_late_message_of_a_stream_is_never_passed_over(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, end: int, said: str
) -> None:
    """A slow broker is not data loss, whatever failOnDataLoss says.

    That also holds if the range ends after the stream.
    """
    publish(vhost, 10)
    monkeypatch.setattr(StreamChannel, "take", lambda *_: [])
    monkeypatch.setattr(stream_reader, "end_of", lambda *_: StreamEnd(10, 0.0))
    lenient = options(vhost.url, failOnDataLoss="false")
    with pytest.raises(ConsumeError, match=f"did not come within 0 s, and the stream {said}"):
        read(RangeReader(lenient, StreamRange("events", 5, end), COLUMNS, patience=0.0))


def test_a_dropped_range_of_a_stream_is_an_error_unless_allowed(vhost: VirtualHost) -> None:
    """A range that begins before the first message is data loss.

    RabbitMQ silently starts at a later offset.
    """
    short = Queue(
        "events", type="stream", arguments={"x-max-length-bytes": 200_000, "x-stream-max-segment-size-bytes": 100_000}
    )
    publish(vhost, 3000, queue=short, size=500)

    def truncated() -> list[tuple[int, bytes]]:
        publish(vhost, 50, queue=short, first=10**6, size=500)  # RabbitMQ checks the retention when it rolls a segment
        lenient = options(vhost.url, failOnDataLoss="false")
        rows, again = (read(RangeReader(lenient, StreamRange("events", 0, 3000), COLUMNS)) for _ in range(2))
        settled = rows == again and rows[:1] != [(0, b"0")]  # it may drop a segment between the two reads
        return [(-1, b""), *rows] if settled else []

    left = wait_until(truncated, timeout=30, what="the stream drops its first segment")[1:]
    offsets = [offset for offset, _ in left]
    assert offsets == sorted(set(offsets))
    assert all(0 < offset < 3000 for offset in offsets)  # higher than the bodies, because rolled segments leave gaps
    bodies = [int(body) for _, body in left if int(body) < 10**6]
    assert bodies == list(range(min(bodies, default=0), max(bodies, default=-1) + 1))
    with pytest.raises(ConsumeError, match=r"are gone, at least up to \d+: .* failOnDataLoss"):
        read(RangeReader(options(vhost.url), StreamRange("events", 0, 3000), COLUMNS))


@pytest.mark.parametrize("filtered", [False, True])
def test_a_range_that_is_dropped_while_it_is_read_is_an_error(vhost: VirtualHost, filtered: bool) -> None:
    """RabbitMQ silently continues at the first message that it still has."""
    short = Queue(
        "events", type="stream", arguments={"x-max-length-bytes": 800_000, "x-stream-max-segment-size-bytes": 100_000}
    )
    publish(vhost, 1100, queue=short, size=500)
    given = {"prefetch": "10"} | ({"streamFilter": "eu", "streamFilterMatchUnfiltered": "true"} if filtered else {})
    slow = {
        strict: RangeReader(options(vhost.url, failOnDataLoss=strict, **given), WHOLE, COLUMNS) for strict in STRICT
    }
    batches = {strict: reader.batches() for strict, reader in slow.items()}
    begun = {strict: next(each).to_pylist() for strict, each in batches.items()}
    with StreamChannel(parse_url(vhost.url), name="test") as channel:

        def beginning() -> int:
            publish(vhost, 200, queue=short, size=500)
            return stream_broker.first_offsets(channel, ("events",), 5.0)["events"]

        wait_until(lambda: beginning() > 500, timeout=30, what="the stream drops what is being read")
    with pytest.raises(ConsumeError, match=r"are gone, at least up to \d+: .* failOnDataLoss"):
        list(batches["true"])
    rest = [row for each in batches["false"] for row in each.to_pylist()]
    offsets = [row["offset"] for row in begun["false"] + rest]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] <= 999


def test_the_beginning_is_that_of_the_replica_that_is_read(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The reader keeps its connection, because another may lead to another replica.

    Each replica drops its own segments.
    """
    rolled = Queue("events", type="stream", arguments={"x-stream-max-segment-size-bytes": 100_000})
    publish(vhost, 1000, queue=rolled, size=500)
    end = batch(vhost.url).partitions()[0].end  # type: ignore[attr-defined]
    whole = options(vhost.url)
    offsets = [offset for offset, _ in read(RangeReader(whole, StreamRange("events", 0, end), COLUMNS))]
    gap = next(offset for offset in range(end) if offset not in offsets)
    proxy = fault_proxy(vhost.url)
    reader = RangeReader(options(proxy.url), StreamRange("events", gap, gap + 5), COLUMNS)
    assert [offset for offset, _ in read(reader)] == [offset for offset in offsets if gap < offset < gap + 5]
    assert proxy.connections == 1


def test_a_plain_queue_is_refused_and_keeps_its_messages(vhost: VirtualHost) -> None:
    """The error names the option to use."""
    plain = Queue("events", dead_letter=None)
    publish(vhost, 3, queue=plain)
    for call in (
        lambda: read(RangeReader(options(vhost.url), StreamRange("events", 0, 3), COLUMNS)),
        lambda: batch(vhost.url).partitions(),
    ):
        with pytest.raises(ConfigurationError, match="'events' is not a stream: read it with the option queue"):
            call()
    vhost.wait_for_messages("events", 3)


# -- batch reads -------------------------------------------------------------------------------------------------------


def test_a_batch_is_what_is_there_when_it_is_planned(vhost: VirtualHost) -> None:
    """A batch has the messages from the first to the newest at planning time.

    It is split if more partitions are requested.
    """
    publish(vhost, 100)
    assert batch(vhost.url).partitions() == [StreamRange("events", 0, 100)]
    assert batch(vhost.url, minPartitions="3").partitions() == [
        StreamRange("events", 0, 33),
        StreamRange("events", 33, 66),
        StreamRange("events", 66, 100),
    ]
    bounded = batch(vhost.url, startingOffsets='{"events": 90}', endingOffsets='{"events": 95}')
    (partition,) = bounded.partitions()
    rows = [row for each in bounded.read(partition) for row in each.to_pylist()]
    assert [(row["offset"], row["body"]) for row in rows] == numbered(90, 95)


def test_an_end_that_is_not_there_yet_is_refused(vhost: VirtualHost) -> None:
    """A batch does not wait for future messages."""
    publish(vhost, 10)
    with pytest.raises(
        ConfigurationError, match="endingOffsets of stream 'events' is 11, and its newest message has offset 9"
    ):
        batch(vhost.url, endingOffsets='{"events": 11}').partitions()


def test_an_end_that_is_the_latest_of_one_stream_may_grow(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that arrive during planning are no error and not in the batch."""
    publish(vhost, 10)
    ends = StreamPlanner.ends

    def ends_before_more(planner: StreamPlanner, *, sure: bool) -> dict[str, StreamEnd]:
        found = ends(planner, sure=sure)
        publish(vhost, 5, first=10)
        return found

    monkeypatch.setattr(StreamPlanner, "ends", ends_before_more)
    assert batch(vhost.url, endingOffsets='{"events": "latest"}').partitions() == [StreamRange("events", 0, 10)]


@pytest.mark.parametrize("given", [{}, {"endingOffsets": '{"events": 5}'}])
def test_a_beginning_behind_the_end_is_refused(vhost: VirtualHost, given: dict[str, str]) -> None:
    """The end is an option or the end of the stream.

    Otherwise the batch would silently be empty.
    """
    publish(vhost, 10)
    with pytest.raises(ConfigurationError, match="startingOffsets of stream 'events' is 11, and the batch ends before"):
        batch(vhost.url, startingOffsets='{"events": 11}', **given).partitions()
    assert batch(vhost.url, startingOffsets='{"events": 10}').partitions() == []


def test_a_stream_without_messages_is_an_empty_batch(vhost: VirtualHost) -> None:
    """After some seconds, the stream is known to be empty."""
    publish(vhost, 0)
    assert batch(vhost.url).partitions() == []


def test_a_time_to_start_at(vhost: VirtualHost) -> None:
    """It starts at the chunk of the time; a time after the newest message has none."""
    publish(vhost, 10)
    boundary = int(time.time()) + 2  # AMQP times are whole seconds
    wait_until(lambda: time.time() > boundary + 0.1, timeout=10, what="two seconds to pass")
    publish(vhost, 10, first=10)
    since = batch(vhost.url, startingTimestamp=str(boundary * 1000))
    assert since.partitions() == [StreamRange("events", 10, 20)]
    by_stream = json.dumps({"events": boundary * 1000})
    assert batch(vhost.url, startingOffsetsByTimestamp=by_stream).partitions() == since.partitions()
    until = batch(vhost.url, endingTimestamp=str(boundary * 1000))
    assert until.partitions() == [StreamRange("events", 0, 10)]  # two batches that meet at a time skip nothing
    assert batch(vhost.url, endingOffsetsByTimestamp=by_stream).partitions() == until.partitions()
    future = str(int((time.time() + 3600) * 1000))
    assert batch(vhost.url, endingTimestamp=future).partitions() == [StreamRange("events", 0, 20)]
    with pytest.raises(ConfigurationError, match=r"no message as new as .*startingOffsetsByTimestampStrategy=latest"):
        batch(vhost.url, startingTimestamp=future).partitions()
    latest = {"startingTimestamp": future, "startingOffsetsByTimestampStrategy": "latest"}
    assert batch(vhost.url, **latest).partitions() == []
    with pytest.raises(
        ConfigurationError, match="startingOffsetsByTimestamp must have a value for each of the streams"
    ):
        batch(vhost.url, startingOffsetsByTimestamp='{"other": 5}').partitions()


def test_a_task_has_no_more_messages_than_it_may(vhost: VirtualHost) -> None:
    publish(vhost, 100)
    assert [each.size for each in batch(vhost.url, maxRecordsPerPartition="40").partitions()] == [33, 33, 34]


def test_a_super_stream_is_its_partitions(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are found by their names, or some of them are named.

    An unknown name is an error.
    """
    monkeypatch.setattr("reliable_mq.spark.stream_planner._CERTAIN", 3.0)
    for number in range(3):
        publish(vhost, number, queue=Queue(f"orders-{number}", type="stream"))
    publish(vhost, 1)
    both = batch(vhost.url, stream="orders,events")
    assert both.partitions() == [
        StreamRange("events", 0, 1),
        StreamRange("orders-1", 0, 1),
        StreamRange("orders-2", 0, 2),
    ]
    assert batch(vhost.url, stream="orders-0,orders-2").partitions() == [StreamRange("orders-2", 0, 2)]
    with pytest.raises(ConfigurationError, match="there is no stream 'missing'"):
        batch(vhost.url, stream="missing").partitions()


def test_empty_partitions_are_waited_for_together(vhost: VirtualHost) -> None:
    """They are checked together, because an empty one takes seconds to detect.

    A trigger waits for less time.
    """
    orders = [Queue(f"orders-{number}", type="stream") for number in range(12)]
    with Publisher(vhost.url, topology=orders) as publisher:
        publisher.connect()
    publish(vhost, 5, queue=orders[7])
    reader = source(vhost.url, stream="orders", startingOffsets="earliest")
    began = time.monotonic()
    start = restored(reader.latestOffset(reader.initialOffset(), ANY))
    assert start == {queue.name: 0 for queue in orders}
    assert ranges_from(reader, start) == [StreamRange("orders-7", 0, 5)]
    assert time.monotonic() - began < 25, "each of eleven was waited for, which takes 33 s"
    reader.stop()
    named = source(vhost.url, stream="orders", startingOffsets=json.dumps(start))
    assert named.initialOffset() == {"initial": start}
    named.stop()


def bind(vhost: VirtualHost, partitions: dict[str, int]) -> None:
    """Bind streams to the super stream ``orders`` in order, with a message each."""
    for name, order in partitions.items():
        queue = Queue(name, type="stream")
        publish(vhost, 1, queue=queue)
        place = Binding(Exchange("orders"), queue, name, arguments={"x-stream-partition-order": order})
        with Publisher(vhost.url, topology=[place]) as publisher:
            publisher.connect()


def test_partitions_are_found_by_their_bindings(vhost: VirtualHost) -> None:
    """The management API gives the partitions, whatever their names.

    They have the order of their bindings.
    """
    bind(vhost, {"orders-de": 2, "orders-at": 1, "orders-ch": 0})
    api = vhost.broker.management.url
    settings = parse_url(vhost.url)
    with StreamChannel(settings, name="test") as channel:
        assert PartitionFinder(settings, ["orders"], api).streams(channel) == ["orders-ch", "orders-at", "orders-de"]
    publish(vhost, 1)
    both = batch(vhost.url, stream="orders,events", managementUrl=api)
    names = ["events", "orders-at", "orders-ch", "orders-de"]
    assert both.partitions() == [StreamRange(name, 0, 1) for name in names]
    with pytest.raises(ConfigurationError, match="no stream 'missing', and no super stream"):
        batch(vhost.url, stream="missing", managementUrl=api).partitions()
    wrong = f"http://nobody:s3cret@{api.removeprefix('http://').rpartition('@')[2]}"
    with pytest.raises(BrokerUnavailable, match=r"bindings of 'orders' cannot be read: .*401") as refused:
        batch(vhost.url, stream="orders", managementUrl=wrong).partitions()
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("by_bindings", [True, False])
def test_a_new_partition_is_read_by_a_query_that_runs(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, by_bindings: bool
) -> None:
    """An empty batch pins its start; then it is read from its first message.

    The other partitions continue.
    """
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    bind(vhost, {"orders-0": 0, "orders-1": 1})
    given = {"managementUrl": vhost.broker.management.url} if by_bindings else {}
    reader = source(vhost.url, stream="orders", startingOffsets="earliest", **given)
    start = restored(reader.latestOffset(restored(reader.initialOffset()), ANY))
    assert ranges_from(reader, start) == [StreamRange("orders-0", 0, 1), StreamRange("orders-1", 0, 1)]
    bind(vhost, {"orders-2": 2})
    read_so_far = {"orders-0": 1, "orders-1": 1}
    wait_until(lambda: reader.latestOffset(read_so_far, ANY) != read_so_far, timeout=60, what="it is found")
    assert ranges_from(reader, read_so_far) == [StreamRange("orders-2", 0, 1)]
    reader.stop()


@pytest.mark.parametrize("by_bindings", [True, False])
def test_a_query_goes_on_without_a_partition_that_is_deleted(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture, by_bindings: bool
) -> None:
    """The deletion ends the subscription that waits for new messages."""
    bind(vhost, {"orders-0": 0, "orders-1": 1})
    given = {"managementUrl": vhost.broker.management.url} if by_bindings else {}
    reader = source(vhost.url, stream="orders", startingOffsets="earliest", failOnDataLoss="false", **given)
    before = {"orders-0": 1, "orders-1": 1}
    wait_until(lambda: reader.latestOffset(before, ANY) == before, timeout=60, what="both are watched")
    vhost.delete_queue("orders-0")
    wait_until(lambda: reader.latestOffset(before, ANY) == {"orders-1": 1}, timeout=60, what="one is left")
    assert "stream 'orders-0' is in the checkpoint and no longer read" in caplog.text
    reader.stop()


@pytest.mark.parametrize("available_now", [False, True])
@pytest.mark.parametrize("deleted", [0, 1])
def test_a_restart_reads_the_partitions_after_a_deleted_one(
    vhost: VirtualHost, deleted: int, available_now: bool
) -> None:
    """They are found by their names, which the checkpoint has."""
    names = [f"orders-{number}" for number in range(3)]
    for name in names:
        publish(vhost, 5, queue=Queue(name, type="stream"))
    vhost.delete_queue(names[deleted])
    for strict in STRICT:
        reader = source(vhost.url, stream="orders", failOnDataLoss=strict)
        if available_now:
            reader.prepareForTriggerAvailableNow()
        if strict == "true":
            with pytest.raises(ConsumeError, match=f"stream '{names[deleted]}' is in the checkpoint and no longer"):
                ranges_from(reader, dict.fromkeys(names, 2))
        else:
            left = [StreamRange(name, 2, 5) for name in names if name != names[deleted]]
            assert ranges_from(reader, dict.fromkeys(names, 2)) == left
        reader.stop()


def test_each_trigger_reads_although_a_lookup_ends_the_channel(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By names, the query looks for a further partition. RabbitMQ closes the channel that asks for a missing one."""
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr("reliable_mq.spark.stream_planner._FRESH", 0.0)
    orders = [Queue(f"orders-{number}", type="stream") for number in range(2)]
    for queue in orders:
        publish(vhost, 1, queue=queue)
    reader = source(vhost.url, stream="orders", startingOffsets="earliest")
    reader.latestOffset(restored(reader.initialOffset()), ANY)
    before = {"orders-0": 1, "orders-1": 1}
    for _ in range(4):
        publish(vhost, 1, queue=orders[0])
        after = reader.latestOffset(before, ANY)
        assert after == {"orders-0": before["orders-0"] + 1, "orders-1": 1}
        before = restored(after)
    assert "cannot look" not in caplog.text
    assert not reader._planner._passed
    reader.stop()


# -- streaming reads ---------------------------------------------------------------------------------------------------


def test_a_query_begins_where_it_is_told_to(vhost: VirtualHost) -> None:
    """The start is an offset or a time; a future time starts at the next message."""
    publish(vhost, 10)
    later = str(int((time.time() + 3600) * 1000))
    at_the_end = {"startingTimestamp": later, "startingOffsetsByTimestampStrategy": "latest"}
    for given, first in (({"startingOffsets": '{"events": 7}'}, 7), (at_the_end, 10)):
        reader = source(vhost.url, **given)
        pinned = restored(reader.latestOffset(restored(reader.initialOffset()), ANY))
        reader.stop()
        assert pinned == {"events": first}


def test_a_time_after_the_last_message_is_not_that_of_the_next(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ begins at the next message, which may be older than the time."""
    publish(vhost, 10)
    consume = StreamChannel.consume

    def followed_by_a_message(channel: StreamChannel, stream: str, offset: Any, *more: Any) -> str:
        tag = consume(channel, stream, offset, *more)
        if isinstance(offset, datetime):
            publish(vhost, 1, first=10)
        return tag

    monkeypatch.setattr(StreamChannel, "consume", followed_by_a_message)
    reader = source(vhost.url, startingTimestamp=str(int((time.time() + 3600) * 1000)))
    with pytest.raises(ConfigurationError, match=r"no message as new as"):
        reader.initialOffset()
    reader.stop()


def test_a_query_at_a_time_reads_what_comes_while_it_starts(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These messages are newer than the time, and no message was as new when the query looked for it."""
    publish(vhost, 10)
    now = int(time.time()) + 1  # AMQP times are whole seconds
    wait_until(lambda: time.time() > now, timeout=10, what="the next second")

    def followed_by_messages(*given: Any) -> dict[str, int]:
        found = stream_broker.offsets_at(*given)
        publish(vhost, 3, first=10)
        return found

    monkeypatch.setattr("reliable_mq.spark.stream_planner.offsets_at", followed_by_messages)
    reader = source(vhost.url, startingTimestamp=f"{now}000", startingOffsetsByTimestampStrategy="latest")
    assert reader.initialOffset() == {"initial": {"events": 10}}
    reader.stop()


def test_latest_is_before_what_comes_while_a_query_starts(vhost: VirtualHost) -> None:
    """A stream without messages is waited for. A message that comes in that time is read."""
    with Publisher(vhost.url, topology=[EVENTS]) as publisher, ThreadPoolExecutor(1) as starting:
        publisher.connect()
        reader = source(vhost.url)
        start = starting.submit(reader.initialOffset)
        channel = wait_until(lambda: reader._planner._channel, timeout=10, what="the reader's channel")
        wait_until(lambda: len(channel._subscribed) == 2, timeout=10, what="the reader's subscriptions")
        publisher.publish(Message(b"new"), routing_key=EVENTS.name)
        assert restored(start.result(30)) == {"initial": {"events": 0}}
        reader.stop()


def test_a_batch_waits_for_as_many_messages_as_it_shall_have(vhost: VirtualHost) -> None:
    """It waits for ``maxTriggerDelay`` at most; AvailableNow does not wait."""
    publish(vhost, 10)
    given = {"startingOffsets": '{"events": 5}', "minMessagesPerTrigger": "6"}
    reader, hurried, ending = (
        source(vhost.url, **given),
        source(vhost.url, **given, maxTriggerDelay="100ms"),
        source(vhost.url, **given),
    )
    pinned = restored(reader.latestOffset(restored(reader.initialOffset()), ANY))
    assert reader.latestOffset(pinned, ANY) == pinned == {"events": 5}
    wait_until(lambda: hurried.latestOffset(pinned, ANY) == {"events": 10}, timeout=30, what="the delay over")
    ending.prepareForTriggerAvailableNow()
    assert ending.latestOffset(pinned, ANY) == {"events": 10}
    publish(vhost, 1, first=10)
    wait_until(lambda: reader.latestOffset(pinned, ANY) == {"events": 11}, timeout=30, what="six messages")
    for each in (reader, hurried, ending):
        each.stop()


def test_the_first_batch_is_empty_and_pins_the_start_of_a_query(vhost: VirtualHost) -> None:
    """Otherwise a restart during the first batch could lose messages with "latest".

    The restarted query would begin at a later offset.
    """
    publish(vhost, 10)
    reader = source(vhost.url)
    initial = restored(reader.initialOffset())
    publish(vhost, 2, first=10)
    pinned = restored(reader.latestOffset(initial, ANY))
    assert pinned == {"events": 10}
    assert initial != pinned, "Spark would not write a batch down in which nothing is new"
    publish(vhost, 3, first=12)
    again = source(vhost.url)  # after a crash, as another process that asks for the start again
    assert list(again.partitions(restored(again.initialOffset()), pinned)) == []
    wait_until(lambda: again.latestOffset(pinned, ANY) == {"events": 15}, timeout=10, what="what came since")
    assert again.partitions(pinned, {"events": 15}) == [StreamRange("events", 10, 15)]
    assert again.reportLatestOffset() == {"events": 15}
    reader.stop()
    again.stop()


def test_a_batch_ends_where_its_limit_says(vhost: VirtualHost) -> None:
    """A limit of messages is exact; one of bytes uses their recent average size."""
    publish(vhost, 1000, size=1000)
    reader = source(vhost.url, maxMessagesPerTrigger="300")
    assert reader.getDefaultReadLimit() == ReadMaxRows(300)
    assert reader.latestOffset({"events": 50}, ReadMaxRows(300)) == {"events": 350}
    reader.stop()
    reader = source(vhost.url, maxBytesPerTrigger="100000")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(100_000)
    taken = reader.latestOffset({"events": 0}, ReadMaxBytes(100_000))["events"]
    assert 80 <= taken <= 100
    reader.stop()


def test_available_now_ends_at_what_was_there(vhost: VirtualHost) -> None:
    """It ends there however many messages arrive; the limit determines the batches."""
    publish(vhost, 100)
    reader = source(vhost.url, maxMessagesPerTrigger="60")
    reader.prepareForTriggerAvailableNow()
    ends = [{"events": 0}, reader.latestOffset({"events": 0}, reader.getDefaultReadLimit())]
    publish(vhost, 100, first=100)
    while len(ends) < 2 or ends[-1] != ends[-2]:
        ends.append(reader.latestOffset(ends[-1], reader.getDefaultReadLimit()))
    assert ends == [{"events": 0}, {"events": 60}, {"events": 100}, {"events": 100}]
    reader.stop()


def test_available_now_at_latest_ends_though_messages_come_in(vhost: VirtualHost) -> None:
    """Spark announces that the query ends before it asks where it starts."""
    publish(vhost, 5)
    reader = source(vhost.url)
    reader.prepareForTriggerAvailableNow()
    publish(vhost, 5, first=5)
    pinned = restored(reader.latestOffset(restored(reader.initialOffset()), ANY))
    assert reader.latestOffset(pinned, ANY) == pinned == {"events": 10}
    reader.stop()


def test_trigger_once_is_refused(vhost: VirtualHost) -> None:
    """It would only read the first batch of a query, which is empty."""
    reader = source(vhost.url)
    with pytest.raises(ConfigurationError, match=r"trigger\(availableNow=True\)"):
        reader.latestOffset({"events": 0}, ReadAllAvailable())


def test_a_query_cannot_begin_at_an_offset_that_is_not_there_yet(vhost: VirtualHost) -> None:
    """The next batch would report it as data loss.

    The end of the stream itself is allowed: it is the same as "latest".
    """
    publish(vhost, 5)
    reader = source(vhost.url, startingOffsets='{"events": 6}')
    with pytest.raises(ConfigurationError, match=r"startingOffsets of stream 'events' is 6, .* offset 5"):
        reader.initialOffset()
    reader.stop()
    at_the_end = source(vhost.url, startingOffsets='{"events": 5}')
    assert at_the_end.initialOffset() == {"initial": {"events": 5}}
    at_the_end.stop()


def test_a_stream_without_new_messages_is_not_read_again(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks for the end several times a second; each message after it is found."""
    monkeypatch.setattr("reliable_mq.spark.stream_planner._FRESH", -1.0)
    more = Queue("more", type="stream")
    looks: list[str] = []

    def counted(channel: StreamChannel, stream: str, patience: float) -> StreamEnd:
        looks.append(stream)
        return end_of(channel, stream, patience)

    monkeypatch.setattr(stream_broker, "end_of", counted)
    publish(vhost, 5)
    publish(vhost, 5, queue=more)
    reader = source(vhost.url, stream="events,more")

    def seen(newer: dict[str, int]) -> bool:
        return reader.latestOffset(end, ANY) == newer

    end = {"events": 5, "more": 5}
    for _ in range(20):
        assert reader.latestOffset(end, ANY) == end
    assert looks == ["events", "more"]

    for more_end in 6, 7, 8:
        publish(vhost, 1, queue=more)
        newer = {"events": 5, "more": more_end}
        wait_until(partial(seen, newer), timeout=10, what="the new message")
    assert looks == ["events", "more", "more", "more", "more"]

    monkeypatch.setattr(stream_broker, "_LOOK_ANYWAY", 0.0)
    reader.latestOffset(end, ANY)
    assert looks[5:] == ["events", "more"]
    reader.stop()


def test_a_look_at_a_stream_acks_nothing_twice(vhost: VirtualHost) -> None:
    """Messages of others that came meanwhile are acked once. The broker closes a channel over a second ack."""
    queues = [Queue(name, type="stream") for name in ("one", "two", "three", "four")]
    with StreamChannel(parse_url(vhost.url), name="looks") as channel:
        watch = EndWatch(channel)
        for end in (1, 2):
            for queue in queues:
                publish(vhost, 1, queue=queue)
            if end == 2:
                wait_until(lambda: len(channel._arrived) == len(queues), timeout=10, what="a message of each")
            assert [watch.end_of(queue.name, 10.0).position for queue in queues] == [end] * len(queues)
        assert channel.perform(CheckQueue("one"))
        assert channel.usable


def test_the_average_size_is_that_of_messages_with_a_body(vhost: VirtualHost) -> None:
    """The last chunk of a stage may consist of the markers of its relay, which are small."""
    publish(vhost, 20, size=10_000)
    with Publisher(vhost.url) as publisher:
        publisher.publish(Message(b""), routing_key="events")
    with StreamChannel(parse_url(vhost.url), name="looks") as channel:
        end = end_of(channel, "events", 10.0)
        assert end.position == 21
        assert end.average > 10_000


def test_a_copy_of_a_stream_that_lags_behind_is_waited_for(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may not have all messages that were read; that is not data loss."""
    publish(vhost, 5)
    looks: list[StreamEnd] = []

    def end_before_more(*given: Any) -> StreamEnd:
        looks.append(stream_broker.end_of(*given))
        if len(looks) == 2:
            publish(vhost, 5, first=5)
        return looks[-1]

    monkeypatch.setattr("reliable_mq.spark.stream_planner.end_of", end_before_more)
    reader = source(vhost.url)
    assert reader.latestOffset({"events": 10}, ANY) == {"events": 10}
    reader.stop()


def test_a_stream_that_was_made_anew_is_data_loss(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offsets restart at 0; failOnDataLoss=false reads it from there."""
    monkeypatch.setattr("reliable_mq.spark.stream_planner._CERTAIN", 1.0)
    publish(vhost, 5)
    reader = source(vhost.url)
    with pytest.raises(ConsumeError, match="was read up to offset 99 and ends at 4 now"):
        reader.latestOffset({"events": 100}, ANY)
    reader.stop()
    with pytest.raises(ConsumeError, match="stream 'other' is in the checkpoint and no longer read"):
        reader.latestOffset({"events": 1, "other": 3}, ANY)
    reader.stop()
    lenient = source(vhost.url, failOnDataLoss="false")
    assert ranges_from(lenient, {"events": 100, "other": 3}) == [StreamRange("events", 0, 5)]
    lenient.stop()


def test_a_stream_made_anew_is_data_loss_for_available_now(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each run would succeed without data until the new stream is longer."""
    monkeypatch.setattr("reliable_mq.spark.stream_planner._CERTAIN", 1.0)
    publish(vhost, 5)
    vhost.wait_for_messages("events", 5)  # RabbitMQ counts late, and uncounted messages are an error after that second
    reader = source(vhost.url)
    reader.prepareForTriggerAvailableNow()
    with pytest.raises(ConsumeError, match="was read up to offset 99 and ends at 4 now"):
        reader.latestOffset({"events": 100}, ANY)
    reader.stop()
    lenient = source(vhost.url, failOnDataLoss="false")
    lenient.prepareForTriggerAvailableNow()
    assert ranges_from(lenient, {"events": 100}) == [StreamRange("events", 0, 5)]
    lenient.stop()


@pytest.mark.parametrize("strict", STRICT)
def test_a_stream_made_anew_under_a_query_is_data_loss(vhost: VirtualHost, strict: str) -> None:
    """It has more messages than were read, so only their bodies show it."""
    publish(vhost, 5)
    reader = source(vhost.url, failOnDataLoss=strict)
    read_so_far = {"events": 5}
    assert reader.latestOffset({"events": 0}, ANY) == read_so_far
    vhost.delete_queue("events")
    publish(vhost, 20, first=100)

    def planned() -> dict[str, Any] | None:
        end = reader.latestOffset(read_so_far, ANY)
        return None if end == read_so_far else end

    if strict == "true":
        with pytest.raises(ConsumeError, match="stream 'events' was read up to offset 4 and has other messages now"):
            wait_until(planned, timeout=30, what="the query sees it")
    else:
        assert wait_until(planned, timeout=30, what="the query sees it") == {"events": 0}
        assert ranges_from(reader, {"events": 0}) == [StreamRange("events", 0, 20)]
    reader.stop()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_stream_that_was_made_anew_and_is_empty_is_data_loss(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, available_now: bool
) -> None:
    """The error is raised once it is certain that the stream is empty.

    Later, when the stream has grown, it would not be detectable.
    """
    monkeypatch.setattr("reliable_mq.spark.stream_planner._CERTAIN", 1.0)
    with Publisher(vhost.url, topology=[EVENTS]) as publisher:
        publisher.connect()
    reader = source(vhost.url)
    if available_now:
        reader.prepareForTriggerAvailableNow()
    with pytest.raises(ConsumeError, match="was read up to offset 99 and is empty now"):
        reader.latestOffset({"events": 100}, ANY)
    reader.stop()
    lenient = source(vhost.url, failOnDataLoss="false")
    assert lenient.latestOffset({"events": 100}, ANY) == {"events": 0}
    lenient.stop()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_stream_that_is_new_is_read_from_its_first_message(vhost: VirtualHost, available_now: bool) -> None:
    """Spark's Kafka source treats new partitions of a topic in the same way."""
    publish(vhost, 5)
    publish(vhost, 7, queue=Queue("more", type="stream"))
    reader = source(vhost.url, stream="events,more", maxMessagesPerTrigger="4")
    if available_now:
        reader.prepareForTriggerAvailableNow()
    ranges = ranges_from(reader, {"events": 2})
    assert sum(each.size for each in ranges if each.stream == "events") == 3
    assert sum(each.size for each in ranges if each.stream == "more") == 7
    assert min(each.start for each in ranges if each.stream == "more") == 0
    reader.stop()


def test_while_the_broker_is_away_nothing_is_new(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The query survives; otherwise it would end with an error."""
    publish(vhost, 5)
    proxy = fault_proxy(vhost.url)
    reader = source(proxy.url)
    assert reader.latestOffset({"events": 0}, ANY) == {"events": 5}
    proxy.refuse_connections()
    proxy.cut()
    publish(vhost, 5, first=5)
    wait_until(lambda: reader.latestOffset({"events": 5}, ANY) == {"events": 5}, timeout=10, what="nothing is new")
    proxy.accept_connections()
    wait_until(lambda: reader.latestOffset({"events": 5}, ANY) == {"events": 10}, timeout=30, what="it goes on")
    reader.stop()


def test_available_now_does_not_end_because_the_broker_is_away(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Spark would take an unchanged offset for the end."""
    publish(vhost, 5)
    publish(vhost, 7, queue=Queue("more", type="stream"))
    proxy = fault_proxy(vhost.url)
    reader = source(proxy.url, stream="events,more")
    reader.prepareForTriggerAvailableNow()
    proxy.refuse_connections()
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        reader.latestOffset({"events": 5}, ANY)
    reader.stop()
