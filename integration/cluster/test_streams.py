"""Reads of a stream on a cluster with a lagging replica or a killed leader.

They return exactly the messages that the stream has.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pika.exceptions import ChannelClosedByBroker
from pyspark.sql.streaming.datasource import ReadMaxRows

from integration.support.consuming import Handler, numbered
from integration.support.leaders import suspend_replication
from integration.support.rounds import Round
from integration.support.seeds import soaking
from integration.support.traffic import GRACE, OPTIONS, SLOW, url_of
from reliable_mq import Consumer, Message, Publisher, PublishError, Queue
from reliable_mq.spark.datasource import RabbitMQDataSource
from reliable_mq.spark.options import read_options
from reliable_mq.spark.stream_offsets import StreamRange
from reliable_mq.spark.stream_reader import RangeReader
from reliable_mq.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from reliable_mq import Delivery
    from reliable_mq.testing import Audit, RabbitMQCluster, VirtualHost

pytestmark = [pytest.mark.usefixtures("baseline"), pytest.mark.timeout(600)]

EVENTS = Queue("events", type="stream")
MORE = 100 if soaking() else 30  # messages between two steps
PAUSE = 0.005 if soaking() else 0.02  # seconds between two messages
#: RabbitMQ takes 7 s to answer a passive declaration of a stream while its leader cannot be reached, as it asks that
#: node. A client that gives up earlier cannot connect until there is another leader.
PATIENT = {**OPTIONS, "connect_timeout": 10.0}


def content(vhost: VirtualHost) -> list[tuple[int, bytes]]:
    """Read offset and body of every message of the stream with plain pika.

    A replica that is still starting is waited for. RabbitMQ's count of the messages is seconds old. So the last ones
    may be missing if the broker is silent for a second.
    """

    def read_all() -> list[tuple[int, bytes]] | None:
        try:
            return _content(vhost)
        except ChannelClosedByBroker as error:
            if "running replica" not in error.reply_text:
                raise
            return None

    return wait_until(read_all, timeout=120, what="a running replica", interval=1.0) or []


def _content(vhost: VirtualHost) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        end = channel.queue_declare(EVENTS.name, passive=True).method.message_count
        quiet = 0  # seconds
        for method, properties, body in channel.consume(
            EVENTS.name, arguments={"x-stream-offset": "first"}, inactivity_timeout=1
        ):
            if method is not None:
                found.append((properties.headers["x-stream-offset"], body))
                channel.basic_ack(method.delivery_tag)
                quiet = 0
            elif (quiet := quiet + 1) == 60 or len(found) >= end:
                break
        channel.cancel()
    assert len(found) >= end > 0
    return found


def read(url: str, end: int, **options: str) -> list[tuple[int, bytes]]:
    """Return offset and body of the rows that a Spark task reads up to an offset."""
    chosen = read_options({"url": url, "stream": EVENTS.name, **options}, streaming=False)
    reader = RangeReader(chosen, StreamRange(EVENTS.name, 0, end), ("offset", "body"), patience=300)  # type: ignore[arg-type]
    return [(row["offset"], row["body"]) for batch in reader.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("publisher_api", "consumer_api"),
    [("sync", "sync"), pytest.param("aio", "aio", marks=pytest.mark.soak)],
    indirect=True,
)
@pytest.mark.usefixtures("publisher_api", "consumer_api")
def test_f65_reads_after_a_leaders_death_give_what_is_there(
    rabbitmq_cluster: RabbitMQCluster,
    cluster_vhost: VirtualHost,
    rng: Random,
    checker: Audit,
    report: Callable[[str], None],
    record_round: Callable[[Round], None],
) -> None:
    """A consumer and a task of the Spark source read all messages of the stream.

    RabbitMQ confirms a message once a majority has it, before any node has it on disk. The test counts lost messages.
    """
    seen: list[tuple[int | None, bytes]] = []
    over = threading.Event()

    def handle(delivery: Delivery) -> None:
        seen.append((delivery.offset, delivery.body))

    def load() -> None:
        number = 0
        while not over.wait(PAUSE):
            message = Message(b"%d" % number, message_id=str(number))
            checker.attempted(message.message_id)
            publisher.submit(message, routing_key=EVENTS.name).add_done_callback(settled)
            number += 1

    def settled(confirmation: object) -> None:
        error: PublishError | None = confirmation.exception()  # type: ignore[attr-defined]
        assert error is None
        checker.confirmed(confirmation.message_id)  # type: ignore[attr-defined]

    def wait_for_more() -> None:
        wanted = publisher.statistics.confirmed + MORE
        wait_until(lambda: publisher.statistics.confirmed >= wanted, timeout=120, what=f"{MORE} more confirmed")
        handled = len(seen) + MORE
        wait_until(lambda: len(seen) >= handled, timeout=120, what=f"{MORE} more handled")

    loading = threading.Thread(target=load, name="load")
    with (
        Publisher(cluster_vhost.url, topology=[EVENTS], name="load", confirm_timeout=4.0, **PATIENT) as publisher,
        Consumer(cluster_vhost.url, EVENTS, handle, offset="first", **PATIENT),
    ):
        loading.start()
        try:
            wait_for_more()
            leader = rabbitmq_cluster.leader_of(EVENTS.name, cluster_vhost.name)
            lagging = rng.choice([node for node in rabbitmq_cluster.nodes if node is not leader])
            lagging.pause()
            threading.Event().wait(GRACE)  # for the others to continue, or to detect that one is gone
            leader.kill()
            lagging.unpause()
            wait_for_more()
            rabbitmq_cluster.start()
            rabbitmq_cluster.wait_ready()
            wait_for_more()
        finally:
            over.set()
            loading.join(SLOW)
        publisher.flush(120)
        there: list[tuple[int, bytes]] = []

        def all_handled() -> bool:
            there[:] = content(cluster_vhost)
            return len(set(seen)) == len(there)

        wait_until(all_handled, timeout=120, what=lambda: f"all handled: {len(set(seen))} of {len(there)}")
    assert read(cluster_vhost.url, there[-1][0] + 1) == there
    assert sorted(set(seen)) == there
    for _, body in there:
        checker.handled(body.decode())
    balance = checker.balance()
    report(str(balance))
    record_round(Round(65, "a replica lags, the stream's leader killed", balance.confirmed, len(balance.lost)))
    assert not balance.unexpected


def test_a_consumer_whose_replica_is_deleted_repeats_nothing(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost
) -> None:
    """RabbitMQ cancels the consumer as if the stream were deleted, and refuses its next subscription."""
    with Publisher(cluster_vhost.url, topology=[EVENTS], **OPTIONS) as publisher:
        leader = rabbitmq_cluster.leader_of(EVENTS.name, cluster_vhost.name)
        replica = next(node for node in rabbitmq_cluster.nodes if node is not leader)
        handler = Handler()
        url = url_of(cluster_vhost, [replica, leader])
        with Consumer(url, EVENTS, handler, offset="first", **OPTIONS) as consumer:
            assert publisher.publish_many(map(Message, numbered(50)), routing_key=EVENTS.name).ok
            handler.wait_done(50)
            wait_until(lambda: consumer.statistics.acked == 50, timeout=SLOW, what="acked")
            given = f'<<"{cluster_vhost.name}">>, <<"{EVENTS.name}">>, \'{replica.name}\''
            leader.evaluate(f"rabbit_stream_queue:delete_replica({given})")
            wait_until(lambda: consumer.statistics.cancelled == 1 and consumer.connected, timeout=120, what="back")
            assert publisher.publish_many(map(Message, numbered(5, first=50)), routing_key=EVENTS.name).ok
            handler.wait_done(55)
    assert handler.bodies == numbered(55)


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["cut off", "paused"])
def test_f65_filtered_reads_from_a_lagging_replica_miss_nothing(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, rng: Random, fault: str
) -> None:
    """The tasks wait until the replica's own end shows that it has the range.

    A filter skips offsets, so the offsets read do not show it.
    """
    values, part = ["a", "b", "c"], 5000

    def publish(url: str) -> None:
        messages = (
            Message(value.encode() + bytes(1000), headers={"x-stream-filter-value": value})
            for value in rng.choices(values, k=part)
        )
        with Publisher(url, topology=[EVENTS], **OPTIONS) as publisher:
            assert publisher.publish_many(messages, routing_key=EVENTS.name).ok

    publish(cluster_vhost.url)
    leader = rabbitmq_cluster.leader_of(EVENTS.name, cluster_vhost.name)
    lagging = rng.choice([node for node in rabbitmq_cluster.nodes if node is not leader])
    others = [node for node in rabbitmq_cluster.nodes if node is not lagging]
    if fault == "paused":
        lagging.pause()
    else:
        rabbitmq_cluster.partition(lagging)
    publish(url_of(cluster_vhost, others))
    there = content(cluster_vhost)
    end = there[-1][0] + 1
    assert len(there) >= 2 * part
    behind = lagging.url_of(cluster_vhost.name)
    with ThreadPoolExecutor(3) as threads:
        filtered = threads.submit(read, behind, end, streamFilter="a,b")
        rare = threads.submit(read, behind, end, streamFilter="nobody has it")
        whole = threads.submit(read, behind, end)
        try:
            threading.Event().wait(5)  # a task must not take the replica's end for the end of the range
            assert not any(task.done() for task in (filtered, rare, whole))
        finally:
            rabbitmq_cluster.heal()
        assert filtered.result(300) == [each for each in there if each[1][:1] in b"ab"]
        assert rare.result(300) == []
        assert whole.result(300) == there


@pytest.mark.parametrize("allowed", [pytest.param("true", marks=pytest.mark.soak), "false"])
def test_a_query_on_a_lagging_replica_reads_nothing_again(
    rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost, rng: Random, allowed: str
) -> None:
    """The query waits for the replica, whether or not data loss is an error.

    The plan of a batch includes the messages that other nodes have.
    """

    def publish(url: str) -> None:
        with Publisher(url, topology=[EVENTS], **OPTIONS) as publisher:
            assert publisher.publish_many((Message(b"%d" % n) for n in range(50)), routing_key=EVENTS.name).ok

    publish(cluster_vhost.url)
    leader = rabbitmq_cluster.leader_of(EVENTS.name, cluster_vhost.name)
    lagging = rng.choice([node for node in rabbitmq_cluster.nodes if node is not leader])
    given = {"stream": EVENTS.name, "startingOffsets": "earliest", "failOnDataLoss": allowed}
    behind = RabbitMQDataSource({"url": lagging.url_of(cluster_vhost.name), **given})
    query: Any = behind.streamReader(behind.schema())
    with suspend_replication(leader, lagging):
        publish(leader.url_of(cluster_vhost.name))
        assert query.latestOffset({"events": 100}, ReadMaxRows(10**6)) == {"events": 100}
        elsewhere = RabbitMQDataSource({"url": url_of(cluster_vhost, [lagging, leader]), **given})
        reader: Any = elsewhere.reader(elsewhere.schema())
        assert reader.partitions() == [StreamRange(EVENTS.name, 0, 100)]
    publish(cluster_vhost.url)
    wait_until(
        lambda: query.latestOffset({"events": 100}, ReadMaxRows(10**6)) == {"events": 150},
        timeout=60,
        what="the replica catches up",
    )
    query.stop()


def test_a_host_without_a_replica_is_passed_over(rabbitmq_cluster: RabbitMQCluster, cluster_vhost: VirtualHost) -> None:
    """As a node that joined the cluster after the stream was declared."""
    alone = Queue(EVENTS.name, type="stream", arguments={"x-initial-cluster-size": 1})
    with Publisher(cluster_vhost.url, topology=[alone], **OPTIONS) as publisher:
        assert publisher.publish_many((Message(b"%d" % n) for n in range(50)), routing_key=EVENTS.name).ok
    leader = rabbitmq_cluster.leader_of(EVENTS.name, cluster_vhost.name)
    url = url_of(cluster_vhost, [*(node for node in rabbitmq_cluster.nodes if node is not leader), leader])
    found = RabbitMQDataSource({"url": url, "stream": EVENTS.name})
    query: Any = found.streamReader(found.schema())
    assert query.initialOffset() == {"initial": {EVENTS.name: 50}}
    query.stop()
    reader: Any = found.reader(found.schema())
    assert reader.partitions() == [StreamRange(EVENTS.name, 0, 50)]
    assert [body for _, body in read(url, 50)] == [b"%d" % n for n in range(50)]
