"""The reader of queue mode, called as Spark does by a program that kills itself.

These tests cover kills, outages and limits, for which Spark is slow. Other tests of queue mode use Spark.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from integration.programs.spark_reader import PHASES
from integration.support.leaders import suspend_leader
from integration.support.programs import ROOT, environment
from integration.support.seeds import seeds
from integration.support.spark import requeued_counts
from reliable_mq import Message, Publisher, Queue
from reliable_mq.errors import ConfigurationError, ConsumeError
from reliable_mq.spark.options import QueueOptions, read_options
from reliable_mq.spark.queue_checks import QueueClaims
from reliable_mq.spark.queue_reader import QueueReader
from reliable_mq.spark.queue_source import QueueSource
from reliable_mq.spark.queue_subscriptions import PrefetchChoice
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reliable_mq.testing import Audit, FaultProxy, VirtualHost

ORDERS = Queue("orders")
RESTARTS = int(os.environ.get("RELIABLE_MQ_SOAK_RESTARTS", "200"))


def publish(
    vhost: VirtualHost, count: int, checker: Audit | None = None, body: bytes = b"x" * 100, *, declared: bool = True
) -> None:
    messages = [Message(body) for _ in range(count)]
    for message in messages if checker else ():
        checker.attempted(message.message_id)
    with Publisher(vhost.url, topology=[ORDERS] if declared else []) as publisher:
        assert publisher.publish_many(messages, routing_key="orders").ok
    for message in messages if checker else ():
        checker.confirmed(message.message_id)


def source_of(url: str, **options: object) -> QueueSource:
    given = {"url": url, "queue": "orders", **{name: str(value) for name, value in options.items()}}
    parsed = read_options(given, streaming=True)
    assert isinstance(parsed, QueueOptions)
    return QueueSource(parsed, ["message_id", "redelivered"])


class Query:
    """Call the reader in this process as Spark does, one batch at a time."""

    def __init__(self, url: str, most: int = 40, **options: object) -> None:
        self.source = source_of(url, **options)
        self.position = self.source.initialOffset()
        self.rows: Counter[str] = Counter()
        self._most = most

    def batch(self, during: Callable[[], object] = lambda: None) -> int:
        """Read and commit a batch, if there is one."""
        end = self.source.latestOffset(self.position, ReadMaxRows(self._most))
        if end == self.position:
            return 0  # without a commit, which comes with the next batch
        self.source.commit(self.position)
        read = [
            row
            for part in self.source.partitions(self.position, end)
            for batch in self.source.read(part)
            for row in batch.column(0).to_pylist()
        ]
        if read:
            during()
        self.rows.update(read)
        self.position = end
        return len(read)

    def until(self, distinct: int, timeout: float = 60) -> None:
        """Read until `distinct` messages were read, then once more for the last acks."""
        wait_until(
            lambda: self.batch() < 0 or len(self.rows) >= distinct,
            timeout=timeout, what=lambda: f"{len(self.rows)} of {distinct}", interval=0,
        )  # fmt: skip
        while self.batch():
            pass


@pytest.fixture
def query() -> Iterator[Callable[..., Query]]:
    made: list[Query] = []

    def make(*args: Any, **options: Any) -> Query:
        made.append(Query(*args, **options))
        return made[-1]

    before = signal.getsignal(signal.SIGTERM)
    yield make
    for each in made:
        each.source.stop()
    signal.signal(signal.SIGTERM, before)


def life(vhost: VirtualHost, directory: Path, **settings: Any) -> dict[str, Any]:
    return {"url": vhost.url, "queue": "orders", "directory": str(directory), **settings}


def reader(vhost: VirtualHost, directory: Path, **settings: Any) -> subprocess.Popen[bytes]:
    return started(directory, life(vhost, directory, **settings))


def started(directory: Path, given: object) -> subprocess.Popen[bytes]:
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "integration.programs.spark_reader", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment(),
        )  # fmt: skip


def run_to_its_end(process: subprocess.Popen[bytes], expected: int, directory: Path, timeout: float = 100) -> None:
    process.communicate(timeout=timeout)
    assert process.returncode == expected, (directory / "log").read_text()[-3000:]


def endings(directory: Path) -> list[int]:
    """Return the exit status of each life, negative for a signal."""
    return [int(line) for line in (directory / "endings").read_text().splitlines()]


def book_sink(directory: Path, checker: Audit) -> None:
    for line in (directory / "sink").read_text().splitlines():
        checker.handled(line.split()[1])


@pytest.mark.timeout(300)
def test_f60_a_reader_killed_between_any_calls_loses_nothing(
    vhost: VirtualHost, tmp_path: Path, checker: Audit, rng: random.Random
) -> None:
    """The reader is killed in every phase of a batch, on one checkpoint.

    Each kill repeats at most one batch.
    """
    publish(vhost, 500, checker)
    deaths = [life(vhost, tmp_path, phase=phase, batch=rng.randrange(2)) for phase in rng.sample(PHASES, len(PHASES))]
    run_to_its_end(started(tmp_path, [*deaths, life(vhost, tmp_path, idle=3, until=500)]), 0, tmp_path)
    assert endings(tmp_path) == [-signal.SIGKILL] * len(deaths) + [0]
    book_sink(tmp_path, checker)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.left == balance.dead_lettered == 0
    assert len(balance.duplicated) <= 3 * 40  # three of the five phases end after the sink may be written


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ours", "limited"])
def test_f60_two_hundred_restarts_lose_nothing(vhost: VirtualHost, tmp_path: Path, checker: Audit, kind: str) -> None:
    """The queue is the library's own, or a foreign one with a delivery limit.

    Almost no message reaches that limit.
    """
    first = seeds()[0]  # one per broker line and kind, because a run takes minutes
    print(f"seed {first}")
    rng = random.Random(first)
    dead = ["orders.dead"] if kind == "limited" else []
    if kind == "limited":
        with vhost.connect() as connection:
            channel = connection.channel()
            channel.queue_declare(
                "orders.dead", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": -1}
            )
            limited = {"x-queue-type": "quorum", "x-delivery-limit": 20, "x-dead-letter-exchange": ""}
            arguments = {**limited, "x-dead-letter-routing-key": "orders.dead", "x-overflow": "reject-publish",
                         "x-dead-letter-strategy": "at-least-once"}  # fmt: skip
            channel.queue_declare("orders", durable=True, arguments=arguments)
    for first in range(0, RESTARTS, 10):  # messages for the next lives, because each needs some before it is killed
        publish(vhost, 400, checker, declared=kind == "ours")
        deaths = [
            life(vhost, tmp_path, phase=rng.choice(PHASES), batch=rng.randrange(2), idle=60, most=20)
            for _ in range(min(10, RESTARTS - first))
        ]
        run_to_its_end(started(tmp_path, deaths), signal.SIGKILL, tmp_path, timeout=600)
    assert endings(tmp_path) == [-signal.SIGKILL] * RESTARTS
    run_to_its_end(started(tmp_path, life(vhost, tmp_path, idle=3)), 0, tmp_path, timeout=600)
    book_sink(tmp_path, checker)
    checker.drain(vhost, ["orders"], dead_letters=dead)
    balance = checker.close()
    print(f"{kind}: {balance}")
    assert balance.left == 0
    assert balance.dead_lettered <= (RESTARTS // 21 if kind == "limited" else 0)


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_requeues_what_was_read_and_counts_no_delivery(
    vhost: VirtualHost, tmp_path: Path, signals: int
) -> None:
    """Spark ends a query with one or two signals in the middle of a batch."""
    publish(vhost, 100)
    process = reader(vhost, tmp_path, hold=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
    with process:  # its standard input stays open, so that it keeps the batch
        assert process.wait(30) == 0
    vhost.wait_for_messages("orders", 100)
    counts = {message["properties"].get("headers", {}).get("x-delivery-count") for message in vhost.peek("orders")}
    assert counts <= requeued_counts(vhost)


def test_the_reader_s_stop_requeues_the_last_batch_as_well(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """Spark calls stop() when the driver is gone.

    A batch counts as committed when the next one is requested.
    """
    publish(vhost, 100)
    reading = query(vhost.url)
    wait_until(reading.batch, timeout=30, what="a batch")
    reading.source.stop()
    vhost.wait_for_messages("orders", 100)


def test_a_reader_that_ends_before_it_has_counted_requeues(
    vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy]
) -> None:
    """The leader of one queue does not respond, so the count is in doubt."""
    publish(vhost, 10)
    with Publisher(vhost.url, topology=[Queue("other")]) as publisher:
        assert publisher.publish_many([Message(b"x") for _ in range(10)], routing_key="other").ok
    proxy = fault_proxy(vhost.url)
    proxy.delay(0.1)  # so that the count takes a while
    options = source_of(proxy.url, queue="other,orders")._given
    reader = QueueReader(options, "session", PrefetchChoice(50, None, 50))
    suspend_leader(vhost, "orders", 2)
    reader._io.start()
    wait_until(lambda: reader._batches.waiting, timeout=30, what="deliveries", interval=0.01)
    reader.close(5)
    assert not reader._connected
    vhost.wait_for_messages("other", 10)
    counts = {message["properties"].get("headers", {}).get("x-delivery-count") for message in vhost.peek("other")}
    assert counts <= requeued_counts(vhost)


def test_commit_alone_acks_what_lies_before_it(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """Spark calls it like this if an earlier process has planned the next batch."""
    publish(vhost, 30)
    reading = query(vhost.url, most=100)
    wait_until(lambda: reading.batch() < 0 or len(reading.rows) == 30, timeout=20, what="all read")
    reading.source.commit(reading.position)
    wait_until(lambda: not reading.source._reader._batches.held, timeout=10, what="nothing held")
    reading.source.stop()
    vhost.wait_for_messages("orders", 0)


def cut(proxy: FaultProxy, reading: Query) -> None:
    """Cut the connection, and wait until the reader notices.

    Acks written before it notices would not be known to be stale.
    """
    reader = reading.source._reader
    assert reader is not None
    before = reader.statistics.reconnects
    proxy.cut()
    wait_until(lambda: reader.statistics.reconnects > before, timeout=30, what="the cut to be noticed")


def test_f03_a_connection_cut_in_mid_batch_loses_nothing(
    vhost: VirtualHost, checker: Audit, fault_proxy: Callable[..., FaultProxy], query: Callable[..., Query]
) -> None:
    """Messages of the batch are redelivered, and no old tag is acked.

    Messages outside of a batch are dropped.
    """
    publish(vhost, 400, checker)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url, prefetch=80)

    for _ in range(3):
        wait_until(lambda: reading.batch(lambda: cut(proxy, reading)), timeout=30, what="a batch")
    reading.until(400)
    reading.source.stop()
    for message_id, times in reading.rows.items():
        for _ in range(times):
            checker.handled(message_id)
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.left == balance.dead_lettered == 0
    assert 0 < len(balance.duplicated) <= 3 * 40
    assert 0 < reading.source._reader.statistics.stale_acks <= 3 * 40


def test_available_now_leaves_a_queue_once_it_has_what_was_ready(
    vhost: VirtualHost, query: Callable[..., Query]
) -> None:
    """One of two queues keeps filling; its new messages do not delay the other."""
    publish(vhost, 20)
    other = Queue("other")
    with Publisher(vhost.url, topology=[other]) as publisher:
        assert publisher.publish_many([Message(b"x") for _ in range(60)], routing_key="other").ok
    reading = query(vhost.url, most=10, queue="orders,other", maxBytesPerTrigger=40_000)
    reading.source.prepareForTriggerAvailableNow()
    while reading.batch(lambda: publish(vhost, 50)):
        continue
    assert reading.position["queues"] == {"orders": 20, "other": 60}
    assert sum(reading.rows.values()) == 80
    reading.source.stop()
    vhost.wait_for_messages("other", 0)


def test_a_queue_that_is_left_has_what_came_meanwhile_again(
    vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy], query: Callable[..., Query]
) -> None:
    """Its last delivery may arrive together with the reply to the cancellation."""
    publish(vhost, 20)
    with vhost.connect() as connection:
        connection.channel().queue_declare("other", durable=True)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url, queue="orders,other", prefetch=10)
    assert reading.batch() > 0
    proxy.black_hole("to_client")
    with vhost.connect() as connection:
        connection.channel().basic_publish("", "other", b"later")
    proxy.wait_for(lambda: proxy.seen("basic.deliver", "to_client") > proxy.forwarded("basic.deliver", "to_client"))
    reading.source.prepareForTriggerAvailableNow()
    proxy.wait_for(lambda: proxy.seen("basic.cancel-ok", "to_client") > proxy.forwarded("basic.cancel-ok", "to_client"))
    proxy.resume()
    vhost.wait_for_messages("other", 1)


def test_a_queue_that_was_left_may_be_deleted(
    vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy], query: Callable[..., Query]
) -> None:
    """The query counts and subscribes to the other queues only."""
    publish(vhost, 100)
    with vhost.connect() as connection:
        connection.channel().queue_declare("other", durable=True)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url, most=10, queue="orders,other", prefetch=20, missingQueueTimeout="5s")
    reading.source.prepareForTriggerAvailableNow()
    vhost.wait_for_consumers("other", 0)
    vhost.delete_queue("other")
    assert reading.batch(reading.source.reportLatestOffset) > 0
    assert list(reading.source._reader.count(10.0)) == ["orders"]
    reading.batch(lambda: cut(proxy, reading))
    while reading.batch():
        continue
    assert reading.position["queues"]["other"] == 0
    assert sum(reading.rows.values()) >= 100  # acks that the cut lost come again, in place of the newest


def test_available_now_waits_for_a_leader_that_responds(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """Without a leader, RabbitMQ reports no messages for a quorum queue."""
    publish(vhost, 100)
    suspend_leader(vhost, "orders", 2)
    reading = query(vhost.url, prefetch=40)
    reading.source.prepareForTriggerAvailableNow()
    while reading.batch():
        continue
    assert reading.position["queues"] == {"orders": 100}


def test_a_queue_is_left_while_another_cannot_be_counted(
    vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy], query: Callable[..., Query]
) -> None:
    """After a reconnect, the leader of one queue does not respond; the other is read to its limit."""
    publish(vhost, 30)
    other = Queue("other")

    def publish_other() -> None:
        with Publisher(vhost.url, topology=[other]) as publisher:
            assert publisher.publish_many([Message(b"x") for _ in range(10)], routing_key="other").ok

    publish_other()
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url, queue="other,orders", prefetch=50)
    reading.source.prepareForTriggerAvailableNow()
    batches = reading.source._reader._batches

    def disturb() -> None:
        publish_other()
        suspend_leader(vhost, "orders", 2)
        proxy.delay(0.1)  # so that the count takes long enough for a batch
        cut(proxy, reading)

    assert reading.batch(disturb) > 0
    wait_until(lambda: reading.batch() < 0 or batches.remaining["other"] == 0, timeout=60, what="other", interval=0)
    vhost.wait_for_messages("other", 10)


def test_available_now_ends_over_a_lost_connection_too(
    vhost: VirtualHost, query: Callable[..., Query], fault_proxy: Callable[..., FaultProxy]
) -> None:
    """The batch is redelivered; only messages ready at the start are read."""
    publish(vhost, 200)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url, prefetch=80)
    reading.source.prepareForTriggerAvailableNow()
    first = reading.batch(lambda: cut(proxy, reading))
    assert first > 0
    publish(vhost, 50)
    while reading.batch():
        continue
    assert reading.source._reader.statistics.reconnects == 1
    assert 200 <= len(reading.rows) <= 240  # newer ones may replace redelivered ones, which are further back
    assert 200 <= sum(reading.rows.values()) <= 240
    acked = sum(reading.rows.values()) - first  # those of the first batch came on the connection that was cut
    vhost.wait_for_messages("orders", 250 - acked)


def test_a_count_does_not_wait_for_a_lost_connection(
    vhost: VirtualHost, query: Callable[..., Query], fault_proxy: Callable[..., FaultProxy]
) -> None:
    """Deliveries of the next connection would wait for it."""
    publish(vhost, 10)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url)
    assert reading.batch() > 0
    proxy.refuse_connections()
    cut(proxy, reading)
    began = time.monotonic()
    assert reading.source._reader.count(60) is None
    assert time.monotonic() - began < 30


def test_risks_of_a_queue_are_logged_when_it_is_read(
    vhost: VirtualHost, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    """The log warns of a delivery limit, a consumer timeout, and missing permissions."""
    dead = {"x-queue-type": "quorum", "x-delivery-limit": 3, "x-dead-letter-exchange": ""}
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("limited", durable=True, arguments=dead)
        channel.queue_declare("hurried", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": -1,
                                                                  "x-consumer-timeout": 60_000})  # fmt: skip
    vhost.add_user("reader")
    vhost.broker.management.call(
        "PUT", "permissions", vhost.name, "reader", body={"configure": "", "write": "", "read": ".*"}
    )
    for queue, url, said in (
        ("limited", vhost.url, "after 4 deliveries they are dead-lettered"),
        ("hurried", vhost.url, "x-consumer-timeout=60000 ms"),
        ("hurried", vhost.url.replace("guest:guest", "reader:reader"), "cannot check the arguments of queue 'hurried'"),
    ):
        caplog.clear()
        assert query(url, queue=queue).batch() == 0
        assert said in caplog.text


def test_a_prefetch_below_the_batch_size_does_not_stop_the_query(
    vhost: VirtualHost, query: Callable[..., Query]
) -> None:
    """Committed messages are acked before the next batch is planned."""
    publish(vhost, 50)
    reading = query(vhost.url, most=40, prefetch=10)
    reading.until(50, timeout=30)
    assert sum(reading.rows.values()) == 50


def test_f51_heartbeats_go_on_however_long_a_batch_takes(
    vhost: VirtualHost,
    fault_proxy: Callable[..., FaultProxy],
    query: Callable[..., Query],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a call by Spark, three heartbeats are sent, and the connection stays open.

    The batch is acked. A heartbeat is due every 2 s, and the broker waits for 8 s: this process may stop for 5 s.
    """
    publish(vhost, 10)
    proxy = fault_proxy(vhost.url)
    reading = query(proxy.url + "?heartbeat=4", prefetch=80)

    def long() -> None:
        before = proxy.seen("heartbeat", "to_broker")
        proxy.wait_for(lambda: proxy.seen("heartbeat", "to_broker") >= before + 3, timeout=30, what="three heartbeats")

    with caplog.at_level(logging.WARNING, "reliable_mq.spark"):
        wait_until(lambda: reading.batch(long), timeout=30, what="a batch")
        reading.until(10)
    assert sum(reading.rows.values()) == 10
    assert reading.source._reader.statistics.reconnects == 0
    assert reading.source._reader.statistics.stale_acks == 0
    reading.source.stop()
    vhost.wait_for_messages("orders", 0)


def test_f24_a_deleted_queue_is_read_again_when_it_is_back(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The broker cancels the consumer, and the query waits."""
    publish(vhost, 5)
    reading = query(vhost.url)
    reading.until(5)
    vhost.delete_queue("orders")
    wait_until(lambda: vhost.queue("orders") is None, timeout=20, what="the queue gone")
    publish(vhost, 5)
    reading.until(10)


def test_f24_a_cancelled_queue_is_read_again_beside_a_busy_one(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The queue is subscribed to again once no batch has messages of it.

    There need not be a moment without any batch.
    """
    publish(vhost, 5000)
    other = Queue("other")

    def publish_other() -> None:
        with Publisher(vhost.url, topology=[other]) as publisher:
            assert publisher.publish_many([Message(b"x") for _ in range(5)], routing_key="other").ok

    publish_other()
    reading = query(vhost.url, most=10, queue="orders,other", prefetch=50)
    wait_until(
        lambda: reading.batch() < 0 or reading.position["queues"]["other"] == 5, timeout=60, what="other", interval=0
    )
    vhost.delete_queue("other")
    publish_other()

    def work() -> None:
        until = time.monotonic() + 0.03
        wait_until(lambda: time.monotonic() > until, timeout=5, what="a batch of some length", interval=0.005)

    while reading.position["queues"]["other"] < 10:
        reading.batch(work)  # may be empty, if the broker pauses
        assert reading.position["queues"]["orders"] < 5000, "orders was read to its end first"
    assert reading.position["queues"]["orders"] < 2000


def test_f26_only_a_batch_over_the_consumer_timeout_comes_again(
    vhost: VirtualHost, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    """The broker requeues the batch and cancels the consumer.

    If the batch came before the subscription was last changed, RabbitMQ 4.3.6 closes the channel instead. In both
    cases, waiting messages are requeued as well, and are read once, after the batch.
    """
    timeout = Queue("orders", arguments={"x-consumer-timeout": 1500})
    with Publisher(vhost.url, topology=[timeout]) as publisher:
        assert publisher.publish_many([Message(b"x") for _ in range(60)], routing_key="orders").ok
    reading = query(vhost.url, most=10)

    def late() -> int:
        """Return how often the broker has taken deliveries back."""
        cancelled = sum("the broker cancelled the consumer" in record.getMessage() for record in caplog.records)
        return cancelled + reading.source._reader.statistics.reconnects

    def long() -> None:
        wait_until(late, timeout=60, what="cancelled, or the channel is closed")

    wait_until(lambda: reading.batch(long), timeout=30, what="a batch")
    reading.until(60)
    wait_until(
        lambda: not vhost.live_counts()["orders"] or reading.batch() < 0, timeout=60, what="all acked", interval=0
    )
    # A pause makes a later batch late as well, and perhaps the acks of the one before.
    assert sum(reading.rows.values()) <= 60 + 10 * (2 * late() - 1)
    reading.source.stop()
    vhost.wait_for_messages("orders", 0)


def test_the_first_batch_fills_up_once_message_sizes_are_known(
    vhost: VirtualHost, fault_proxy: Callable[..., FaultProxy], query: Callable[..., Query]
) -> None:
    """This also holds with a distant broker.

    The reader asks for one message and then for more, which takes four round trips.
    """
    publish(vhost, 500)
    proxy = fault_proxy(vhost.url)
    proxy.delay(0.01)  # 20 ms per answer; a batch waits for 100 ms

    def first_batch() -> int:
        reading = query(proxy.url, most=1000)
        rows = reading.batch()
        reading.source.stop()  # requeues all messages
        return rows

    assert any(first_batch() > 64 for _ in range(12)), "a machine that stalls cuts one short, not twelve"


def test_a_paused_reader_does_not_subscribe_again(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The pause may begin after the broker has cancelled a consumer.

    The end of the pause consumes both queues.
    """
    publish(vhost, 200)
    with vhost.connect() as connection:
        connection.channel().queue_declare("other", durable=True)
    reading = query(vhost.url, queue="orders,other", maxBytesPerTrigger=50_000)
    reading.until(200)
    reader = reading.source._reader
    publish(vhost, 40, body=bytes(10_000))
    wait_until(lambda: reader._prefetch.paused and not reader._changing, timeout=30, what="the pause")
    reader._io.call_soon(lambda: reader._subscribe_again("other"))
    assert reader.count(10) is not None  # after all earlier changes of the subscriptions
    assert not reader._subscriptions.queues
    reading.until(240)
    vhost.wait_for_consumers("other", 1)


@pytest.mark.timeout(240)
def test_bytes_that_are_held_are_bounded_whatever_the_prefetch(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The reader holds at most 8 MiB, plus one read.

    The queue has 64 MiB in messages of 256 KiB; the prefetch is 2000, and a batch has 4 MiB.
    """
    publish(vhost, 256, body=bytes(256 * 1024))
    reading = query(vhost.url, most=2000, maxBytesPerTrigger=4 * 2**20, prefetch=2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = []
    reading.batch(lambda: held.append(reading.source._reader._batches.held))
    while len(reading.rows) < 256:
        assert reading.batch(lambda: held.append(reading.source._reader._batches.held)) <= 17
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"held at most {max(held) / 2**20:.1f} MiB, the process grew by {grown / 1024:.0f} MiB")
    assert max(held) <= 1.1 * 8 * 2**20  # also for the first batches
    assert sorted(held)[len(held) // 2] <= 8 * 2**20 + 64 * 2**10


def test_the_defaults_read_ahead_without_a_delivery_limit(
    vhost: VirtualHost, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    """Only the byte limit bounds the messages read ahead; the log says why."""
    publish(vhost, 12_000)
    reading = query(vhost.url, most=65535)
    wait_until(reading.batch, timeout=60, what="a batch")
    assert "prefetch 65535 for orders: no queue has a delivery limit: maxBytesPerTrigger bounds" in caplog.text
    batches = reading.source._reader._batches
    wait_until(lambda: len(reading.rows) + len(batches.waiting) == 12_000, timeout=60, what="all read ahead")
    if len(reading.rows) < 12_000:
        reading.batch()
    assert len(reading.rows) == 12_000


def test_a_batch_waits_for_as_many_messages_as_it_shall_have(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """It waits for ``maxTriggerDelay`` at most.

    A query with AvailableNow, or one that can hold no more, does not wait.
    """
    publish(vhost, 20)
    for options in ({"maxTriggerDelay": "100ms"}, {"maxBytesPerTrigger": 100}):
        reading = query(vhost.url, minMessagesPerTrigger=30, **options)
        wait_until(reading.batch, timeout=30, what="a batch")
        reading.source.stop()
    ending = query(vhost.url, minMessagesPerTrigger=30)
    ending.source.prepareForTriggerAvailableNow()
    wait_until(ending.batch, timeout=30, what="a batch")
    ending.source.stop()
    waiting = query(vhost.url, minMessagesPerTrigger=30)
    early = waiting.batch()  # none, unless the broker pauses while the prefetch is 1: the reader can hold no more
    wait_until(lambda: len(waiting.source._reader._batches.waiting) == 20 - early, timeout=30, what="read ahead")
    assert waiting.batch() == 0
    publish(vhost, 10 + early)
    assert wait_until(waiting.batch, timeout=30, what="a batch") == 30


def test_the_backlog_is_never_negative_after_a_restart(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The reader waits for a batch's minimum, and continues at the position of an earlier reader."""
    publish(vhost, 100)
    earlier = query(vhost.url)
    earlier.until(100)
    publish(vhost, 5)
    earlier.source.stop()
    reading = query(vhost.url, minMessagesPerTrigger=1000, maxTriggerDelay="1h")
    reading.position = earlier.position
    assert reading.batch() == 0
    latest = reading.source.reportLatestOffset()
    assert latest is not None
    assert 100 == reading.position["sequence"] <= latest["sequence"] <= 105


def test_a_checkpoint_goes_on_with_other_queues(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """It only counts messages, and keeps the count of a queue that is no longer named."""
    publish(vhost, 20)
    earlier = query(vhost.url)
    earlier.until(20)
    earlier.source.stop()
    with Publisher(vhost.url, topology=[Queue("others")]) as publisher:
        publisher.publish_many([Message(b"a"), Message(b"b")], routing_key="others").raise_for_failures()
    reading = query(vhost.url, queue="others")
    reading.position = earlier.position
    reading.until(2)
    assert (reading.position["sequence"], reading.position["queues"]) == (22, {"orders": 20, "others": 2})
    vhost.wait_for_messages("others", 0)


def test_a_batch_has_all_that_came_in_since_the_one_before(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The time until Spark asks, as with a trigger interval, does not matter.

    The rate of the messages does not matter either.
    """
    publish(vhost, 10)
    reading = query(vhost.url, most=65535)
    reading.until(10)
    batches = reading.source._reader._batches
    for waiting in range(100, 600, 100):
        publish(vhost, 100)
        wait_until(lambda: len(batches.waiting) == waiting, timeout=30, what=f"{waiting} read ahead")  # noqa: B023
    assert reading.batch() == 500


def test_a_query_whose_full_batches_come_seldom_is_told_once(
    vhost: VirtualHost, query: Callable[..., Query], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes after three such batches in a row, if messages wait."""
    monkeypatch.setattr("reliable_mq.spark.queue_intervals._SELDOM", 60.0)
    publish(vhost, 100)
    reading = query(vhost.url, most=10, prefetch=10)

    def late_batch() -> None:
        """Read a batch once more messages are known to wait, at least 0.1 s later."""
        reader, until = reading.source._reader, time.monotonic() + 0.1
        wait_until(
            lambda: reading.source.reportLatestOffset() and any(reader._ready.values()) and time.monotonic() > until,
            timeout=30, what="the count",
        )  # fmt: skip
        wait_until(reading.batch, timeout=30, what="a batch")

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if " s apart, and " in record.getMessage()]

    wait_until(reading.batch, timeout=30, what="a batch")
    monkeypatch.setattr("reliable_mq.spark.queue_intervals._SELDOM", 0.05)
    for told in (0, 0, 1, 1):
        late_batch()
        assert len(warnings()) == told, len(reading.rows)
    assert re.fullmatch(
        r"batches of \d+ messages are \d+ s apart, and \d+ more messages are ready: to read faster, shorten .*",
        *warnings(),
    )


def test_a_batch_is_never_larger_than_the_prefetch(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """The same limit holds for the unacked deliveries of a queue.

    It also holds while the first message sizes become known.
    """
    publish(vhost, 3000)
    reading = query(vhost.url, most=65535, prefetch=1000)
    unacked = []

    def hold() -> None:
        reader = reading.source._reader
        wait_until(lambda: reader._acks.outstanding >= 900, timeout=30, what="as many as are allowed")
        unacked.append(reader._acks.outstanding)

    while len(reading.rows) < 2000:
        assert reading.batch(hold) <= 1000
    assert max(unacked) <= 1000
    reading.until(3000)


def test_f24_a_queue_that_stays_deleted_fails_the_query_by_name(
    vhost: VirtualHost, query: Callable[..., Query]
) -> None:
    """The query waits for ``missingQueueTimeout`` first."""
    publish(vhost, 5)
    reading = query(vhost.url, missingQueueTimeout="2s")
    reading.until(5)
    began = time.monotonic()  # the reader may learn of the deletion before the call returns
    vhost.delete_queue("orders")
    with pytest.raises(ConsumeError, match=r"missing for 2 s \(missingQueueTimeout\).*'orders'"):
        wait_until(lambda: reading.batch() < 0, timeout=60, what="an error")
    assert time.monotonic() - began >= 2


def test_f24_a_queue_made_again_as_a_stream_fails_by_name(vhost: VirtualHost, query: Callable[..., Query]) -> None:
    """A stream would deliver only later messages."""
    publish(vhost, 5)
    reading = query(vhost.url)
    reading.until(5)
    vhost.delete_queue("orders")
    with vhost.connect() as connection:
        arguments = {"x-queue-type": "stream"}
        connection.channel().queue_declare("orders", durable=True, arguments=arguments)
    with pytest.raises(ConfigurationError, match="'orders' is a stream"):
        wait_until(lambda: reading.batch() < 0, timeout=60, what="an error")


def test_two_readers_of_one_queue_in_an_application_are_refused(
    vhost: VirtualHost, query: Callable[..., Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers would share the messages of the queue.

    Another queue, another application, or a later reader is accepted.
    """
    application = tmp_path / "blockmgr-1"
    application.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(application))
    monkeypatch.setattr(QueueClaims.claim, "__kwdefaults__", {"patience": 0.3})
    publish(vhost, 5)
    with Publisher(vhost.url, topology=[Queue("other")]) as publisher:
        publisher.connect()
    first = query(vhost.url)
    first.until(5)
    with pytest.raises(ConfigurationError, match=r"queue 'orders' is read twice .*the option stage.* foreachBatch"):
        query(vhost.url, queue="other,orders").batch()
    address = urlsplit(vhost.url).hostname or ""
    with pytest.raises(ConfigurationError, match="queue 'orders' is read twice"):
        query(vhost.url.replace(address, "localhost" if address != "localhost" else "127.0.0.1")).batch()
    assert query(vhost.url, queue="other").batch() == 0
    first.source.stop()
    second = query(vhost.url)
    publish(vhost, 5)
    second.until(5)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    assert query(vhost.url).batch() == 0


def test_queue_mode_takes_a_consumer_that_is_the_only_active_one(
    vhost: VirtualHost, query: Callable[..., Query]
) -> None:
    """A standby query reads nothing, and takes over when the other ends."""
    single = Queue("orders", single_active_consumer=True)
    with Publisher(vhost.url, topology=[single]) as publisher:
        assert publisher.publish_many([Message(b"x") for _ in range(50)], routing_key="orders").ok
    first, second = query(vhost.url, most=10), query(vhost.url, most=10)
    assert wait_until(first.batch, timeout=20, what="a batch") > 0
    assert second.batch() == 0
    first.source.stop()
    second.until(50)
