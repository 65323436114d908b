"""Spark's queue mode with counts of 0 messages and 0 consumers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from reliable_mq.core.channel_setup import StepRefused
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, TopologyMismatch
from reliable_mq.spark import queue_intervals
from reliable_mq.spark.options import QueueOptions, read_options
from reliable_mq.spark.queue_batches import QueuePosition
from reliable_mq.spark.queue_reader import QueueReader
from reliable_mq.spark.queue_subscriptions import PrefetchChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.scripted_broker import ScriptedBroker


def unopened_reader(url: str = "amqp://u:p@h/", *, prefetch: int = 1, **given: str) -> QueueReader:
    options = read_options({"url": url, "queue": "orders", **given}, streaming=True)
    assert isinstance(options, QueueOptions)
    return QueueReader(options, "test", PrefetchChoice(prefetch))


def opening_reader(broker: ScriptedBroker, *, prefetch: int) -> tuple[QueueReader, threading.Thread]:
    """Return a reader of a queue, and the thread that opens it."""
    reader = unopened_reader(broker.url, prefetch=prefetch)
    opening = threading.Thread(target=reader.open)
    opening.start()
    return reader, opening


@pytest.mark.slow
def test_a_cancelled_queue_with_a_count_in_doubt_is_read_again(broker: ScriptedBroker) -> None:
    """A reliable count needs a subscription."""
    reader, opening = opening_reader(broker, prefetch=1)
    try:
        channel = broker.consuming
        before = set(channel.consumers)
        channel.cancel()
        broker.wait(lambda: set(channel.consumers) - before, "another subscription")
    finally:
        broker.count = 0, 1
        opening.join(20)
        reader.close(1.0)
    assert not opening.is_alive()


@pytest.mark.slow
def test_a_message_during_the_subscription_lets_a_query_start(broker: ScriptedBroker) -> None:
    """The queue was empty. A quorum queue counts a cancelled consumer whose delivery the reader holds."""
    broker.counts.extend([(0, 0), (0, 1)])
    broker.count = 0, 2
    reader, opening = opening_reader(broker, prefetch=100)
    try:
        broker.consuming.deliver(b"first", message_id="m1")
        opening.join(5)
        assert not opening.is_alive()
    finally:
        opening.join(20)
        reader.close(1.0)


@pytest.fixture(params=["channel closed", "consumer cancelled"])
def triggers(
    request: pytest.FixtureRequest, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Trigger batches of one message each, which a consumer timeout of 0 s takes back or not."""
    monkeypatch.setattr(queue_intervals, "_SHORTEST_TIMEOUT", 0.0)
    broker.count = 1, 1
    reader, opening = opening_reader(broker, prefetch=1)
    opening.join(20)
    at = QueuePosition.first(["orders"])

    def trigger(*, taken_back: bool) -> None:
        nonlocal at
        reader.committed(at)
        assert reader.plan(at, most=1, timeout=0.0) == at
        channel = broker.consuming
        channel.deliver(b"first", message_id="m1")
        at = reader.plan(at, most=1, timeout=20.0)
        if taken_back and request.param == "channel closed":
            channel.close(406, "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out")
            broker.wait(lambda: broker.consumed not in (None, channel), "another channel")
        elif taken_back:
            channel.cancel()
            broker.wait(lambda: reader._intervals.taken_back, "the end of the subscription")

    yield trigger
    reader.close(1.0)


def test_an_interval_above_the_consumer_timeout_is_an_error(triggers: Callable[..., None]) -> None:
    """A batch is acked at the next trigger. Otherwise every batch would have the same messages."""
    triggers(taken_back=True)
    triggers(taken_back=True)
    with pytest.raises(ConsumeError, match="2 batches in a row were redelivered before they were acked"):
        triggers(taken_back=False)


def test_batches_of_which_some_time_out_are_no_error(triggers: Callable[..., None]) -> None:
    """One that is acked comes between."""
    for taken_back in (True, False, True, False):
        triggers(taken_back=taken_back)


def test_a_queue_made_again_as_a_stream_fails_by_name(broker: ScriptedBroker) -> None:
    """The broker cancels the consumer of the queue. A stream would deliver only later messages."""
    broker.count = 1, 1
    reader, opening = opening_reader(broker, prefetch=1)
    try:
        opening.join(20)
        broker.streams.add("orders")
        broker.consuming.cancel()
        with pytest.raises(ConfigurationError, match="'orders' is a stream: read it with the option stream, not queue"):
            reader.plan(QueuePosition.first(["orders"]), most=1, timeout=20)
    finally:
        reader.close(1.0)


def test_an_outage_ends_the_time_of_a_missing_queue() -> None:
    """It is unknown whether the queue is still missing."""
    reader = unopened_reader(missingQueueTimeout="50ms")
    missing = TopologyMismatch("no queue", kind="queue", name="orders")
    missing.__cause__ = StepRefused(404, "NOT_FOUND - no queue 'orders' in vhost '/'")
    reader.failed(missing, True)
    start = QueuePosition.first(["orders"])
    with pytest.raises(ConsumeError, match="is missing"):
        reader.plan(start, most=1, timeout=0.1)
    reader.failed(BrokerUnavailable("refused"), True)
    assert reader.plan(start, most=1, timeout=0.01) == start


def test_a_certificate_that_is_being_renewed_ends_nothing() -> None:
    """Its file may be missing for a moment, or not belong to the key."""
    reader = unopened_reader()
    start = QueuePosition.first(["orders"])
    reader.failed(ConfigurationError("connection.certFile: no such file"), True)
    assert reader.plan(start, most=1, timeout=0.01) == start
    reader.failed(ConfigurationError("connection.certFile: no such file"), False)
    with pytest.raises(ConfigurationError, match="no such file"):
        reader.plan(start, most=1, timeout=0.01)
