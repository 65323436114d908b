"""A consumer of either API, with a broker that may do anything.

The tests cover acks, retries, dead letters, cancels and closes.
"""

from __future__ import annotations

import gc
import logging
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
from pamqp import commands
from prometheus_client import CollectorRegistry

from integration.support.consuming import Gate, Handler
from reliable_mq import (
    Ack,
    BrokerUnavailable,
    ConsumeError,
    Consumer,
    DeadLetter,
    IdempotencyStoreError,
    KillSwitch,
    Queue,
    RetryLater,
    RetryPolicy,
    StaleDelivery,
    TopologyMismatch,
    UsageError,
)
from reliable_mq.codec.methods import CheckQueue, Consume, QueueState
from reliable_mq.core import headers
from reliable_mq.core.consumer import delivery_watch
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.engine.pull import BasePullSubscription
from reliable_mq.engine.subscription import BaseSubscription
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.stores import MemoryStore
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker
from tests.contract.test_publishing import let_resolve
from tests.core.deliveries import BROKEN_TABLE, properties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliable_mq import Delivery
    from tests.contract.scripted_broker import Channel, Published, Settlement

NewConsumer = "Callable[..., Any]"
ORDERS = Queue("orders")
SOON = RetryPolicy(2, delays=(0.01,), backend="memory")


def verdicts(settlements: list[Settlement]) -> list[tuple[str, int, bool]]:
    return [(one.verdict, one.tag, one.multiple) for one in settlements]


def acked(settlements: list[Settlement]) -> set[int]:
    """Return the acked tags, including those of multiple acks."""
    tags: set[int] = set()
    for one in settlements:
        if one.verdict == "ack":
            tags |= set(range(1, one.tag + 1)) if one.multiple else {one.tag}
    return tags


def wait_acked(broker: ScriptedBroker, *tags: int) -> None:
    broker.wait(lambda: acked(list(broker.settlements)) == set(tags), f"acks of {tags}")


def confirming(published: Published) -> None:
    published.channel.ack(published.number)


class Fails:
    """A handler that raises, as often as it is told."""

    def __init__(self, error: Exception, times: int = 1000) -> None:
        self.error = error
        self.times = times

    def __call__(self, _: Delivery) -> None:
        self.times -= 1
        if self.times >= 0:
            raise self.error


def test_small_reads_that_follow_closely_are_put_together(
    broker: ScriptedBroker, new_consumer: NewConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing few deliveries at a time to other threads is slower than handling them."""
    reads = []

    def counted(subscription: BaseSubscription) -> None:
        reads.append(time.monotonic())
        read_finished(subscription)

    read_finished = BaseSubscription.read_finished
    monkeypatch.setattr(BaseSubscription, "read_finished", counted)
    handler = Handler()
    with new_consumer(handler, prefetch=300):
        channel = broker.consuming
        channel.deliver(b"one that follows nothing")
        handler.wait_done(1)
        reads.clear()
        started = time.monotonic()
        for number in range(100):
            channel.deliver(b"%d" % number)
            time.sleep(2e-4)  # like a broker that delivers one at a time
        handler.wait_done(101)
        assert len(reads) <= (time.monotonic() - started) / 7.5e-4 + 2


# -- acks --------------------------------------------------------------------------------------------------------------


def test_what_is_handled_is_acked_in_one_frame_for_many(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    with Gate() as gate:
        handler = Handler(then=gate)
        with new_consumer(handler, ack_every=5, ack_interval=30, prefetch=20) as consumer:
            channel = broker.consuming
            assert channel.prefetch == 20
            for number in range(5):
                channel.deliver(b"%d" % number)
            wait_until(lambda: consumer.statistics.delivered == 5, timeout=30, what="delivered")
            gate.open()
            wait_acked(broker, *range(1, 6))
            assert handler.bodies == [b"%d" % number for number in range(5)]
        assert verdicts(broker.settlements) == [("ack", 5, True)]


def test_what_is_handled_is_acked_soon_where_no_handler_runs(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """No other ack is expected soon.

    An unacked message is handled again if the process dies.
    """
    with new_consumer(Handler(), ack_every=100, ack_interval=60, prefetch=200):
        channel = broker.consuming
        for number in range(1, 4):
            channel.deliver(b"%d" % number)
            wait_acked(broker, *range(1, number + 1))


def test_a_few_are_acked_after_the_interval(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    with new_consumer(Handler(), ack_every=100, ack_interval=0.05):
        channel = broker.consuming
        channel.deliver(b"a")
        channel.deliver(b"b")
        wait_acked(broker, 1, 2)


def test_an_ack_never_covers_what_is_not_done(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """Deliveries finished beyond a gap are acked singly, and the gap when it is done."""
    with Gate(lambda delivery: delivery.body == b"slow") as gate:
        handler = Handler(then=gate)
        with new_consumer(handler, concurrency=4, ack_every=2, ack_interval=0.05):
            channel = broker.consuming
            channel.deliver(b"a")
            channel.deliver(b"slow")
            channel.deliver(b"b")
            channel.deliver(b"c")
            handler.wait_done(3)
            wait_acked(broker, 1, 3, 4)
            assert not any(one.multiple for one in broker.settlements if one.tag > 1)
            gate.open()
            wait_acked(broker, 1, 2, 3, 4)


def test_stop_acks_what_runs_and_requeues_what_has_not_begun(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """Running handlers are finished and acked.

    Deliveries without a started handler are requeued.
    """
    with Gate() as gate:
        handler = Handler(then=gate)
        consumer = new_consumer(handler)
        with consumer:
            channel = broker.consuming
            for number in range(5):
                channel.deliver(b"%d" % number)
            handler.wait_begun(1)
            consumer.stop()
            broker.wait(lambda: "Basic.Cancel" in broker.seen, "a cancel")
            gate.open()
    assert acked(broker.settlements) == {1}
    assert handler.bodies == [b"0"]
    back = [one for one in broker.settlements if one.verdict != "ack"]
    assert all(one.requeue for one in back)
    assert broker.connections[0].closed_in_good_order


def test_a_stop_without_patience_cancels_before_it_requeues(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the broker would deliver here again, and count the end of the channel as a failure."""
    with Gate() as gate:
        handler = Handler(then=gate)
        with new_consumer(handler, stop_timeout=0):
            for number in range(3):
                broker.consuming.deliver(b"%d" % number)
            handler.wait_begun(1)
    cancelled = broker.seen.index("Basic.Cancel")
    assert "Basic.Nack" in broker.seen[cancelled:]
    assert "Basic.Nack" not in broker.seen[:cancelled]
    assert {one.tag for one in broker.settlements} == {2, 3}
    assert "1 deliveries are still being handled after 0 s; the broker will deliver them again" in caplog.text


def test_an_idle_stop_without_patience_gives_up_nothing(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    with new_consumer(Handler(), stop_timeout=0):
        assert broker.consuming
    assert "Basic.Cancel" in broker.seen
    assert "after 0 s" not in caplog.text


def test_a_copy_without_a_confirm_outlasts_a_stop_and_is_logged(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    with new_consumer(Fails(DeadLetter("no")), stop_timeout=0.2, dead_letter="dead"):
        broker.consuming.deliver(b"a")
        broker.wait_published(1)
    assert broker.settlements == []
    text = "1 retries or dead letters are not confirmed after 0.2 s; the broker will deliver them again"
    assert text in caplog.text


def test_a_stop_during_a_set_up_ends_the_new_subscription(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages requeued to it would come back at once, as long as a handler of the lost channel runs."""
    with Gate() as gate, caplog.at_level(logging.INFO, "reliable_mq"):
        handler = Handler(then=gate)
        consumer = new_consumer(handler, name="orders")
        with consumer:
            first = broker.consuming
            first.deliver(b"slow")
            handler.wait_begun(1)
            answered = broker.gates["orders"] = threading.Event()
            first.connection.cut()
            broker.wait(lambda: broker.seen.count("Basic.Consume") == 2, "another subscription")
            consumer.stop()
            wait_until(lambda: "stopping consumer" in caplog.text, timeout=30, what="the stop")
            answered.set()
            broker.wait(lambda: "Basic.Cancel" in broker.seen, "the end of the new subscription")
            gate.open()
    assert broker.connections[-1].closed_in_good_order


@pytest.mark.parametrize("kind", ["plain", "claimed", "batches"])
def test_a_handler_that_stops_the_consumer_is_the_last(
    broker: ScriptedBroker, new_consumer: NewConsumer, kind: str
) -> None:
    """All prefetched deliveries are requeued.

    This holds for quick handlers, even if the connection learns late of the stop.
    """
    handed: list[Delivery | list[Delivery]] = []
    all_there = threading.Event()

    def handle(argument: Delivery | list[Delivery]) -> None:
        assert all_there.wait(10)
        handed.append(argument)
        if len(handed) == 3:
            consumer.stop()

    options = {"claimed": {"idempotency": MemoryStore()}, "batches": {"batch_size": 2}}
    consumer = new_consumer(handle, **options.get(kind, {}))
    with consumer:
        channel = broker.consuming
        for number in range(100):
            channel.deliver(b"%d" % number, message_id=f"m{number}")
        wait_until(lambda: consumer.statistics.delivered == 100, timeout=30, what="delivered")
        all_there.set()
        wait_until(lambda: not consumer.connected, timeout=30, what="stopping")
    assert len(handed) == 3
    assert len(acked(broker.settlements)) == (6 if kind == "batches" else 3)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_delivery_is_tried_again_and_acked_once(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    handler = Handler(then=Fails(ValueError("not now"), times=1))
    with new_consumer(handler, ORDERS, retry=SOON, ack_interval=0.02):
        broker.consuming.deliver(b"x")
        wait_acked(broker, 1)
    assert handler.attempts == [1, 2]
    assert broker.published == []


def test_an_original_is_acked_after_its_dead_letter_is_confirmed(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    with new_consumer(Handler(then=Fails(ValueError("never"))), ORDERS, retry=SOON, ack_interval=0.02):
        broker.consuming.deliver(b"x", message_id="m-1", headers={"shop": "north"})
        [letter] = broker.wait_published(1)
        assert broker.settlements == []
        assert (letter.routing_key, letter.body, letter.message_id) == ("orders.dead", b"x", "m-1")
        assert letter.mandatory
        assert letter.channel.connection is not broker.consuming.connection
        told = letter.properties.headers
        assert told["shop"] == "north"
        assert told[headers.ATTEMPTS] == 2
        assert told[headers.EXCEPTION_MESSAGE] == "never"
        letter.channel.ack(letter.number)
        wait_acked(broker, 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nacked", "returned", "lost"])
def test_a_dead_letter_that_is_not_taken_keeps_its_original(
    broker: ScriptedBroker, new_consumer: NewConsumer, how: str
) -> None:
    """It is published again until it is confirmed."""

    def script(published: Published) -> None:
        if len(broker.published) > 1:
            confirming(published)
        elif how == "nacked":
            published.channel.nack(published.number)
        elif how == "returned":
            published.channel.return_(published)
            published.channel.ack(published.number)
        else:
            published.channel.connection.cut()

    broker.script = script
    with new_consumer(Handler(then=Fails(DeadLetter("no"))), ORDERS, ack_interval=0.02):
        broker.consuming.deliver(b"x")
        wait_acked(broker, 1)
    assert len(broker.published) == 2
    assert verdicts(broker.settlements) == [("ack", 1, False)]


def test_copies_that_share_an_id_are_not_blamed_on_the_caller(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """Their senders chose the ids, or none. The copies are published one after the other."""
    count = 20
    handler = Handler(then=Fails(DeadLetter("no")))

    def script(published: Published) -> None:
        handler.wait_begun(count)
        confirming(published)

    broker.script = script
    with new_consumer(handler, ORDERS, ack_interval=0.02):
        for _ in range(count):
            broker.consuming.deliver(b"x")
        wait_acked(broker, *range(1, count + 1))
    assert len(broker.published) == count
    assert "make a new Message" not in caplog.text


def test_a_handler_chooses_with_what_it_raises(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.script = confirming
    later = Handler(then=Fails(RetryLater(0.01), times=1))

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"dead":
            raise DeadLetter("of no use")
        later(delivery)

    with new_consumer(handle, ORDERS, retry=SOON, ack_interval=0.02):
        broker.consuming.deliver(b"dead")
        broker.consuming.deliver(b"later")
        wait_acked(broker, 1, 2)
    [letter] = broker.published
    assert letter.properties.headers[headers.DEAD_LETTER_REASON] == "of no use"
    assert later.attempts == [1, 2]


def test_giving_up_without_a_dead_letter_queue_rejects(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    with new_consumer(Handler(then=Fails(DeadLetter("no"))), "orders"):
        broker.consuming.deliver(b"x")
        [settled] = broker.wait_settled(1)
    assert (settled.verdict, settled.tag, settled.requeue) == ("reject", 1, False)


def test_headers_that_cannot_be_decoded_cost_their_message_alone(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """It is dead-lettered when a handler reads its headers.

    Its neighbours are handled on the same connection.
    """
    broker.script = confirming
    handler = Handler(then=lambda delivery: delivery.headers.get("shop"))
    with new_consumer(handler, ORDERS, ack_interval=0.02):
        channel = broker.consuming
        channel.deliver(b"before")
        channel.deliver_raw(b"poison", properties(headers=BROKEN_TABLE, message_id="p"))
        channel.deliver(b"behind")
        wait_acked(broker, 1, 2, 3)
        assert broker.consuming is channel
    assert handler.bodies == [b"before", b"behind"]
    [letter] = broker.published
    assert (letter.body, letter.routing_key) == (b"poison", "orders.dead")


def test_a_handler_may_retry_in_spite_of_broken_headers(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    later = Fails(RetryLater(0.01), times=1)

    def handle(delivery: Delivery) -> None:
        with pytest.raises(ConsumeError):
            _ = delivery.headers
        later(delivery)

    handler = Handler(then=handle)
    with new_consumer(handler, ORDERS, ack_interval=0.02):
        broker.consuming.deliver_raw(b"x", properties(headers=BROKEN_TABLE))
        wait_acked(broker, 1)
    assert handler.attempts == [1, 2]
    assert broker.published == []


def test_get_from_a_single_active_consumer_queue_is_refused(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """RabbitMQ never gives from it, so an empty list would hide its messages."""
    text = "basic.get operations are not supported by quorum queues with single active consumer"
    broker.refusals["Basic.Get"] = 405, f"RESOURCE_LOCKED - cannot obtain access to locked queue 'orders'. {text}"
    consumer = new_consumer(None)
    with pytest.raises(ConsumeError, match=text), consumer.get(1, timeout=1):
        pass
    consumer.close()


def test_get_from_a_queue_locked_by_another_waits(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.refusals["Basic.Get"] = 405, "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 'orders'"
    with new_consumer(None) as consumer, consumer.get(1, timeout=0.1) as deliveries:
        assert deliveries == []


FAR_TOO_LARGE = 500  # frames: 64 MB


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """Yield a call that returns the peak of Python memory since the start, in bytes."""
    gc.collect()
    tracemalloc.start()

    def grown(before: int = tracemalloc.get_traced_memory()[0]) -> int:
        return tracemalloc.get_traced_memory()[1] - before

    yield grown
    tracemalloc.stop()


def test_a_far_too_large_body_is_rejected_and_never_in_memory(
    broker: ScriptedBroker, new_consumer: NewConsumer, peak: Callable[[], int]
) -> None:
    """The broker still has the message, and dead-letters it.

    Its neighbours are handled on the same connection.
    """
    handler = Handler()
    with new_consumer(handler, ORDERS, max_body_bytes=100_000, ack_interval=0.02) as consumer:
        channel = broker.consuming
        channel.deliver(b"before")
        size = channel.deliver_large(FAR_TOO_LARGE, message_id="large")
        channel.deliver(b"behind")
        wait_acked(broker, 1, 3)
        assert broker.consuming is channel
        assert (consumer.statistics.rejected_unseen, consumer.statistics.rejected) == (1, 1)
    assert [(one.tag, one.requeue) for one in broker.settlements if one.verdict == "reject"] == [(2, False)]
    assert handler.bodies == [b"before", b"behind"]
    assert peak() < size / 8


def test_a_slightly_too_large_body_is_dead_lettered_unchanged(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """The headers hold the reason."""
    broker.script = confirming
    with new_consumer(Handler(), ORDERS, max_body_bytes=100_000, ack_interval=0.02):
        broker.consuming.deliver(b"x" * 1_000_000, message_id="large")
        wait_acked(broker, 1)
    [letter] = broker.published
    assert (letter.body, letter.routing_key) == (b"x" * 1_000_000, "orders.dead")
    assert (
        "1000000 bytes of body are above the limit of 100000" in letter.properties.headers[headers.DEAD_LETTER_REASON]
    )


def test_a_get_rejects_a_far_too_large_body_and_takes_the_next(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    broker.ready.extend([b"x" * 2_000_000, b"small"])
    with (
        new_consumer(queue=ORDERS, max_body_bytes=100_000) as consumer,
        consumer.get(timeout=10) as [delivery],
    ):
        assert delivery.body == b"small"
    broker.wait_settled(2)
    assert {(one.verdict, one.tag) for one in broker.settlements} == {("reject", 1), ("ack", 2)}


def test_an_answer_to_no_get_costs_a_reconnect_and_no_later_get(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    with new_consumer(queue=ORDERS) as consumer:
        channel = broker.wait(lambda: broker.connections and broker.connections[0].channels.get(1), "a channel")
        wait_until(lambda: consumer.connected, timeout=30, what="the connection")
        channel.send(commands.Basic.GetEmpty())
        broker.wait(lambda: len(broker.connections) == 2, "another connection")
        broker.ready.append(b"x")
        with consumer.get(timeout=10) as [delivery]:
            assert delivery.body == b"x"


@pytest.mark.parametrize(
    ("kind", "size"), [(1, 3 * 2**30), (3, 131065), (2, 2**24 + 1)], ids=["method", "body", "header"]
)
def test_a_frame_larger_than_agreed_ends_the_connection_at_once(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture, kind: int, size: int
) -> None:
    """The frame header is enough.

    The log names the frame, and the consumer continues on the next connection.
    """
    handler = Handler()
    with new_consumer(handler, ORDERS) as consumer:
        channel = broker.consuming
        channel.connection.send_bytes(struct.pack(">BHI", kind, channel.number, size) + b"x")
        broker.wait(lambda: not channel.connection.live, "the end of the connection")
        broker.wait(lambda: broker.consumed not in (None, channel), "another channel")
        broker.consuming.deliver(b"next")
        handler.wait_done(1)
        wait_until(lambda: consumer.reconnects == 1, timeout=30, what="reconnected")
    assert f"frame of type {kind} and {size} bytes on channel {channel.number}, where at most" in caplog.text


def test_a_connection_lost_between_set_ups_is_replaced_at_once(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has refused another channel, and the consumer waits before it opens the next."""
    handler = Handler()
    with new_consumer(handler, ORDERS, reconnect_wait=lambda _: 3600) as consumer:
        channel = broker.consuming
        broker.refusals["Basic.Consume"] = 404, "NOT_FOUND - no queue 'orders' in vhost '/'"
        channel.close(404, "NOT_FOUND - no exchange 'gone' in vhost '/'")
        wait_until(lambda: "next attempt in 3600.0 s" in caplog.text, timeout=30, what="the refusal")
        broker.refusals.clear()
        channel.connection.cut()
        broker.consuming.deliver(b"next")
        handler.wait_done(1)
        assert consumer.reconnects == 1


def test_the_items_of_a_batch_get_a_verdict_each(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.script = confirming
    batches: list[list[bytes]] = []

    def handle(deliveries: list[Delivery]) -> list[object]:
        batches.append([delivery.body for delivery in deliveries])
        first = {b"b": RetryLater(0.01), b"c": DeadLetter("no")}
        return [first.get(one.body, Ack) if one.attempt == 1 else Ack for one in deliveries]

    with new_consumer(handle, ORDERS, batch_size=3, batch_wait=0.05, retry=SOON, ack_interval=0.02):
        for body in (b"a", b"b", b"c"):
            broker.consuming.deliver(body)
        wait_acked(broker, 1, 2, 3)
    assert batches == [[b"a", b"b", b"c"], [b"b"]]
    assert [letter.body for letter in broker.published] == [b"c"]


# -- channels, connections and queues that end -------------------------------------------------------------------------


class Silent(MemoryStore):
    """A store that does not answer settlements until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.answers = False

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        self._ask()
        return super().complete_many(claims)

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        self._ask()
        return super().release_many(claims, failed=failed)

    def _ask(self) -> None:
        self.asked += 1
        if not self.answers:
            raise IdempotencyStoreError("no answer")


def statuses(store: MemoryStore, *ids: str) -> list[tuple[ClaimStatus, int]]:
    claims = store.claim_many([f"test|orders|{one}" for one in ids], 60.0)
    return [(claim.status, claim.attempts) for claim in claims]


def test_what_a_stopping_consumer_owes_its_store_is_told_again(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """Otherwise the messages would wait elsewhere until the lease ends.

    A handled message would then be handled again.
    """
    store = Silent()

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"bad":
            raise ValueError("no")

    options = {"idempotency": store, "idempotency_namespace": "test", "idempotency_lease": 600}
    with new_consumer(handle, dead_letter=None, **options) as consumer:
        broker.consuming.deliver(b"good", message_id="m1")
        broker.consuming.deliver(b"bad", message_id="m2")
        wait_until(lambda: store.asked >= 2, timeout=30, what="the store was told of both, and did not answer")
        consumer.stop()
        broker.wait_settled(1)  # it requeues the deliveries that it holds
        store.answers = True
    assert statuses(store, "m1", "m2") == [(ClaimStatus.DONE, 0), (ClaimStatus.NEW, 1)]


@pytest.mark.slow
def test_a_silent_store_delays_a_stop_only_up_to_its_timeout(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the consequences."""
    store = Silent()
    options = {"idempotency": store, "stop_timeout": 1.5}
    with new_consumer(Handler(), dead_letter=None, **options) as consumer:
        broker.consuming.deliver(b"good", message_id="m1")
        wait_until(lambda: store.asked, timeout=30, what="the store was told, and did not answer")
        consumer.stop()
        began = time.monotonic()
    assert 1.0 < time.monotonic() - began < 20.0
    assert "the idempotency store did not answer to 1 settlements" in caplog.text
    assert verdicts(broker.wait_settled(1)) == [("nack", 1, False)]


@pytest.mark.parametrize("how", ["channel", "connection"])
def test_a_late_result_settles_nothing_on_the_next_channel(
    broker: ScriptedBroker, new_consumer: NewConsumer, how: str
) -> None:
    """Its tag means another delivery there.

    The broker redelivers the unacked message.
    """
    with Gate(lambda delivery: delivery.body == b"slow" and not delivery.redelivered) as gate:
        handler = Handler(then=gate)
        with new_consumer(handler, concurrency=3, ack_interval=0.02) as consumer:
            old = broker.consuming
            old.deliver(b"slow")
            handler.wait_begun(1)
            if how == "channel":
                old.close(406, "PRECONDITION_FAILED - of something else")
            else:
                old.connection.cut()
            broker.wait(lambda: broker.consumed not in {None, old}, "another channel")
            new = broker.consuming
            assert (new.connection is old.connection) == (how == "channel")
            new.deliver(b"other")  # its tag is that of the slow delivery
            wait_acked(broker, 1)
            gate.open()
            wait_until(lambda: consumer.statistics.stale == 1, timeout=30, what="a late result")
            new.deliver(b"slow", redelivered=True)
            broker.wait(lambda: acked(broker.settlements) == {1, 2}, "the ack of the second")
        assert {one.channel for one in broker.settlements} == {new}


def test_deliveries_that_wait_on_a_lost_channel_reach_no_handler(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    with Gate(lambda delivery: delivery.body == b"first") as gate:
        handler = Handler(then=gate)
        with new_consumer(handler, ack_interval=0.02):
            old = broker.consuming
            for body in (b"first", b"waits", b"waits too"):
                old.deliver(body)
            handler.wait_begun(1)
            old.connection.cut()
            broker.wait(lambda: broker.consumed not in {None, old}, "another channel")
            broker.consuming.deliver(b"waits", redelivered=True)
            gate.open()
            wait_acked(broker, 1)
    assert handler.bodies in ([b"first", b"waits"], [b"waits", b"first"])


def test_a_consumer_cancelled_by_the_broker_subscribes_again(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    handler = Handler()
    with new_consumer(handler, ack_interval=0.02) as consumer:
        first = broker.consuming
        first.deliver(b"a")
        wait_acked(broker, 1)
        first.cancel()
        wait_until(lambda: broker.seen.count("Basic.Consume") == 2, timeout=30, what="another subscription")
        assert consumer.statistics.cancelled == 1
        broker.consuming.deliver(b"b")
        handler.wait_done(2)
    assert len(broker.connections) == 1


@pytest.mark.slow
def test_a_kill_switch_without_a_probe_uses_no_processor_time(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """The failed deliveries are dead-lettered, and no others came.

    The consumer waits for a delivery without polling the clock.
    """
    broker.script = confirming
    switch = KillSwitch(share=0.5, minimum=2, pause=0.1)
    with new_consumer(Handler(then=Fails(DeadLetter("no"))), ORDERS, kill_switch=switch, ack_interval=0.02) as consumer:
        channel = broker.consuming
        for body in (b"a", b"b"):
            channel.deliver(body)
        wait_acked(broker, 1, 2)
        assert consumer.statistics.pauses == 1
        began = time.process_time()
        threading.Event().wait(0.6)  # the pause is over soon, and the rest is measured
        assert time.process_time() - began < 0.3


@pytest.mark.slow
def test_a_stop_ends_a_pending_subscription_to_quarantine(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """Otherwise quarantined messages would be delivered and returned until its end.

    Each return would count as a failed attempt.
    """
    go_on = broker.gates["orders#quarantine"] = threading.Event()
    consumer = new_consumer(Handler(), ORDERS, name="orders")
    with consumer:
        channel = broker.consuming
        broker.wait(lambda: broker.seen.count("Basic.Consume") == 2, "the subscription to quarantine")
        consumer.stop()
        wait_until(lambda: not consumer.connected, timeout=30, what="stopping")
        go_on.set()
        broker.wait(lambda: broker.seen.count("Basic.Cancel") == 2, "the end of both")
    assert not channel.consumers


@pytest.mark.slow
def test_a_lost_connection_says_nothing_of_quarantine(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss came before the subscription. The next connection subscribes to both."""
    answered = broker.gates["orders#quarantine"] = threading.Event()
    with new_consumer(Handler(), ORDERS, name="orders"):
        first = broker.consuming
        broker.wait(lambda: broker.seen.count("Basic.Consume") == 2, "the subscription to quarantine")
        first.connection.cut()
        answered.set()
        broker.wait(lambda: broker.consumed not in {None, first}, "another channel")
        broker.wait(lambda: len(broker.consuming.consumers) == 2, "both subscriptions")
    assert "connection lost" in caplog.text
    assert "quarantine" not in caplog.text


@pytest.mark.slow
def test_a_refused_subscription_to_quarantine_is_logged(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    answered = broker.gates["orders#quarantine"] = threading.Event()
    with new_consumer(Handler(), ORDERS, name="orders"):
        first = broker.consuming
        broker.wait(lambda: broker.seen.count("Basic.Consume") == 2, "the subscription to quarantine")
        first.close(403, "ACCESS_REFUSED - no", over=commands.Basic.Consume)
        answered.set()
        wait_until(lambda: "cannot consume from its quarantine queue" in caplog.text, timeout=10, what="the log line")


def test_a_queue_that_came_back_with_other_arguments_ends_it(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    consumer = new_consumer(Handler(), ORDERS)
    consumer.connect()
    text = "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'orders' in vhost '/': received 'quorum'"
    broker.refusals["Queue.Declare"] = 406, f"{text} but current is 'classic'"
    broker.consuming.cancel()
    with pytest.raises(TopologyMismatch, match="x-queue-type"):
        consumer.run()


def test_a_changed_queue_that_ends_a_consumer_is_an_error(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, although the connection would try again."""
    consumer = new_consumer(Handler(), ORDERS, name="shop")
    consumer.connect()
    text = "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'orders' in vhost '/': received 'quorum'"
    broker.refusals["Queue.Declare"] = 406, f"{text} but current is 'classic'"
    broker.consuming.connection.cut()
    with pytest.raises(TopologyMismatch, match="x-queue-type"):
        consumer.run()
    [error] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert error.startswith("consumer 'shop' of queue 'orders' gives up: ")
    assert "x-queue-type" in error


def test_an_end_without_another_attempt_is_logged_once(
    broker: ScriptedBroker, new_consumer: NewConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = new_consumer(Handler(), ORDERS, reconnect_stop=lambda _: True)
    consumer.connect()
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    broker.consuming.connection.cut()
    with pytest.raises(BrokerUnavailable):
        consumer.run()
    [error] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "giving up" in error


def test_a_connect_that_is_stopped_meanwhile_says_so(new_consumer: NewConsumer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        consumer = new_consumer(Handler(), url=f"amqp://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=30)
        stopped = getattr(consumer, "consumer", consumer)

        def stop_when_connecting() -> None:
            client, _ = silent.accept()
            with client:
                stopped.stop()

        stopping = threading.Thread(target=stop_when_connecting)
        stopping.start()
        try:
            with pytest.raises(UsageError, match="was stopped"):
                consumer.connect()
        finally:
            stopping.join(30)


def test_a_run_that_ended_by_itself_is_over(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """Its gauges are free for the next consumer, and its counters stay."""
    broker.refusals["Queue.Declare"] = 404, "NOT_FOUND - no queue 'orders' in vhost '/'"
    registry = CollectorRegistry()
    consumer = new_consumer(Handler(), registry=registry)
    with pytest.raises(TopologyMismatch):
        consumer.run()
    with pytest.raises(UsageError, match="was stopped, and runs once"):
        consumer.run()
    shown = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert "reliable_mq_consumer_deliveries_total" in shown
    assert "reliable_mq_consumer_connected" not in shown


def test_a_loop_that_fails_during_a_stop_ends_the_run(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the loop could end the wait for the handler."""

    def poll() -> None:
        raise OSError("epoll is gone")

    monkeypatch.setattr("reliable_mq.sync.consumer.END_TIMEOUT", 0.1)
    with Gate() as gate:
        handler = Handler(then=gate)
        consumer = Consumer(broker.url, ORDERS, handler, stop_timeout=0.5)
        running = threading.Thread(target=consumer.run, daemon=True)
        running.start()
        broker.consuming.deliver(b"")
        handler.wait_begun(1)
        consumer.stop()
        assert consumer._subscription is not None
        loop = consumer._subscription._io._loop
        loop.call_soon(lambda: setattr(loop._poller, "poll", poll))
        running.join(10)
        assert not running.is_alive()


@pytest.mark.slow
def test_a_second_connection_is_made_for_dead_letters_only(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """An alarm blocks publishing connections, and acks must continue."""
    broker.script = confirming
    handler = Handler(then=lambda delivery: Fails(DeadLetter("no"))(delivery) if delivery.body == b"bad" else None)
    with new_consumer(handler, ORDERS, ack_interval=0.02):
        channel = broker.consuming
        channel.deliver(b"good")
        wait_acked(broker, 1)
        assert len(broker.connections) == 1
        channel.deliver(b"bad")
        wait_acked(broker, 1, 2)
        assert len(broker.connections) == 2
        broker.connection.block("low on memory")
        channel.deliver(b"bad")
        channel.deliver(b"good")
        wait_acked(broker, 1, 2, 4)
        broker.connection.unblock()
        wait_acked(broker, 1, 2, 3, 4)


# -- deliveries on request ---------------------------------------------------------------------------------------------


def test_a_get_acks_at_a_clean_end_and_requeues_after_an_error(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    broker.ready.extend([b"a", b"b", b"c"])
    with new_consumer(ack_interval=0.02) as consumer:
        with consumer.get(2, timeout=5) as deliveries:
            assert [delivery.body for delivery in deliveries] == [b"a", b"b"]
        wait_acked(broker, 1, 2)
        with pytest.raises(ZeroDivisionError), consumer.get(2, timeout=5) as deliveries:
            raise ZeroDivisionError
        back = broker.wait(lambda: [one for one in broker.settlements if one.verdict != "ack"], "what is requeued")
        assert [(one.tag, one.requeue) for one in back] == [(3, True)]
        with consumer.get(1, timeout=0.05) as deliveries:
            assert deliveries == []


def test_a_block_may_do_as_it_likes_with_the_list_of_a_get(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.ready.extend([b"a", b"b"])
    with new_consumer(ack_interval=0.02, prefetch=2) as consumer:
        with consumer.get(2, timeout=5) as deliveries:
            deliveries.clear()
        wait_acked(broker, 1, 2)
        broker.ready.append(b"c")
        with consumer.get(2, timeout=5) as [delivery]:
            assert delivery.body == b"c"


def test_acks_of_the_block_before_end_no_get(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O thread may send them before it requests anything for the new call."""
    returned = threading.Event()

    def send_acks_first(subscription: BasePullSubscription) -> None:
        subscription._run()
        returned.wait(0.2)
        ask_afresh(subscription)

    ask_afresh = BasePullSubscription._ask_afresh
    with Consumer(broker.url, ORDERS) as consumer:
        with consumer.get() as deliveries:
            assert deliveries == []
        broker.ready.append(b"a")
        monkeypatch.setattr(BasePullSubscription, "_ask_afresh", send_acks_first)
        with consumer.get() as deliveries:
            returned.set()
            assert [delivery.body for delivery in deliveries] == [b"a"]


def test_callers_that_take_turns_are_told_empty_when_it_is(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.ready.extend([b""] * 100)
    left: list[int] = []
    together = threading.Barrier(4)
    with new_consumer(prefetch=20) as consumer:

        def drain() -> None:
            together.wait(30)
            while True:
                with consumer.get(5) as deliveries:
                    if not deliveries:
                        left.append(len(broker.ready))
                        return

        threads = [threading.Thread(target=drain) for _ in range(together.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert left == [0] * 4


@pytest.mark.parametrize("delay", [60, 5])  # into the queue of the policy, and into one that is declared first
def test_retries_that_fill_the_prefetch_end_no_drain(
    broker: ScriptedBroker, new_consumer: NewConsumer, delay: float
) -> None:
    """The broker has not answered before it has confirmed them, which makes space for a request."""
    broker.script = confirming
    broker.ready.extend([b""] * 6)
    with new_consumer(queue=ORDERS, prefetch=2, retry=RetryPolicy(3, delays=(60,))) as consumer:
        while True:
            with consumer.get(2) as deliveries:
                for delivery in deliveries:
                    delivery.retry(delay)
            if not deliveries:
                break
    assert len(broker.ready) == 0


def test_what_is_present_waits_for_no_confirm_of_a_retry(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.ready.extend([b"a", b"b"])
    with new_consumer(queue=ORDERS, prefetch=2, retry=RetryPolicy(3, delays=(60,))) as consumer:
        with consumer.get() as [delivery]:
            delivery.retry()
        [copy] = broker.wait_published(1)
        began = time.monotonic()
        with consumer.get(2, timeout=60) as [delivery]:
            assert delivery.body == b"b"
        assert time.monotonic() - began < 30
        confirming(copy)


def test_what_was_pulled_on_a_lost_channel_cannot_be_acked(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    broker.ready.extend([b"a", b"b"])
    with new_consumer(ack_interval=0.02) as consumer:

        def take_and_lose_it() -> None:
            with consumer.get(1, timeout=5) as [delivery]:
                assert delivery.body == b"a"
                broker.connections[-1].cut()
                wait_until(lambda: consumer.reconnects, timeout=30, what="another connection")

        with pytest.raises(StaleDelivery):
            take_and_lose_it()
        with consumer.get(1, timeout=5) as [delivery]:
            assert delivery.body == b"b"
        wait_acked(broker, 1)


@pytest.mark.slow
def test_a_broker_has_longer_to_attach_a_consumer_to_a_stream(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """RabbitMQ takes 4 to 14 s while the node of a member is down."""
    attached = broker.gates["late"] = threading.Event()

    def attach_late() -> None:
        broker.wait(lambda: "Basic.Consume" in broker.seen, "a subscription")
        attached.wait(1.0)
        attached.set()

    late = threading.Thread(target=attach_late)
    late.start()
    handler = Handler()
    events = Queue("events", type="stream")
    with new_consumer(handler, events, offset="next", name="late", connect_timeout=0.3):
        late.join()
        broker.consuming.deliver(b"x")
        handler.wait_done(1)
    assert len(broker.connections) == 1


GUEST = Credentials("guest", "guest")
AWAY = (
    "NOT_FOUND - home node 'rabbit@b' of durable queue 'orders' in vhost '/' is down or inaccessible",
    "NOT_FOUND - failed to perform operation on queue 'orders' in vhost '/' due to timeout",
)
NO_REPLICA = (
    "PRECONDITION_FAILED - stream queue 'events' in vhost '/' does not have a running replica on the local node"
)


def test_a_consumer_leaves_a_node_without_a_replica(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    """The node may never have one, if its replica was deleted."""
    broker.refusals["Basic.Consume"] = 406, NO_REPLICA
    handler = Handler()
    with (
        ScriptedBroker() as other,
        new_consumer(handler, Queue("events", type="stream"), url=[broker.url, other.url], offset="next"),
    ):
        other.consuming.deliver(b"x")
        handler.wait_done(1)


@pytest.mark.parametrize("several", [True, False])
def test_a_stream_is_read_on_at_another_address_of_its_host(
    broker: ScriptedBroker, new_consumer: NewConsumer, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """Another node may have the replica that was deleted here. The only node has another stream."""
    hosts = ["127.0.0.1", "127.0.0.2"] if several else ["127.0.0.1"]
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, (host, broker.port)) for host in hosts])
    handler = Handler()
    url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
    with new_consumer(handler, Queue("events", type="stream"), url=url, offset="first") as consumer:
        broker.consuming.deliver(b"x", headers={"x-stream-offset": 0})
        handler.wait_done(1)
        wait_until(lambda: consumer.statistics.acked == 1, timeout=30, what="acked")
        broker.refusals["Basic.Consume"] = 406, NO_REPLICA
        broker.consuming.cancel()
        broker.wait(lambda: broker.seen.count("Basic.Consume") > 1, "a refused subscription")
        del broker.refusals["Basic.Consume"]
        broker.wait(lambda: len(broker.connections) > 1 and broker.consumed, "a subscription")
        broker.consuming.deliver(b"x", headers={"x-stream-offset": 0})
        handler.wait_done(2)
    assert handler.redelivered == [False, several]


@pytest.mark.parametrize("text", AWAY, ids=["down", "no leader"])
def test_a_queue_that_is_away_is_looked_for_on_another_host(
    broker: ScriptedBroker, new_consumer: NewConsumer, text: str
) -> None:
    """The first node may be cut off from the node of the queue, which others reach."""
    with ScriptedBroker() as other:
        broker.refusals["Queue.Declare"] = 404, text
        url = f"amqp://guest:guest@127.0.0.1:{broker.port},127.0.0.1:{other.port}/"
        with new_consumer(Handler(), "orders", url=url, dead_letter=None, reconnect_wait=lambda _: 60.0):
            assert len(broker.connections) == 1
            assert other.consumed


def test_a_ready_channel_leaves_a_node_without_a_replica(broker: ScriptedBroker) -> None:
    with ScriptedBroker() as other:
        endpoints = tuple(Endpoint("127.0.0.1", one.port) for one in (broker, other))
        with AdminChannel(ConnectionSettings(endpoints=endpoints, credentials=GUEST), name="admin") as channel:
            broker.refusals["Basic.Consume"] = 406, NO_REPLICA
            with pytest.raises(BrokerUnavailable, match="the stream has no replica on this node: 406"):
                channel.perform(Consume("events", "tag"))
            assert channel.perform(CheckQueue("events")) == QueueState("events", 0, 0)
            assert other.seen.count("Queue.Declare") == 1


def test_no_step_is_sent_to_a_channel_that_another_has_lost(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns of it before ``lost`` is called, and may go on at once."""
    ready: list[bool] = []
    lost = AdminChannel.lost

    def seen(channel: AdminChannel, *arguments: Any) -> None:
        ready.append(channel._ready)
        lost(channel, *arguments)

    monkeypatch.setattr(AdminChannel, "lost", seen)
    settings = ConnectionSettings(endpoints=(Endpoint("127.0.0.1", broker.port),), credentials=GUEST)
    with AdminChannel(settings, name="admin") as channel:
        broker.refusals["Basic.Consume"] = 406, NO_REPLICA
        with pytest.raises(BrokerUnavailable):
            channel.perform(Consume("events", "tag"))
        assert channel.perform(CheckQueue("events")) == QueueState("events", 0, 0)
    assert ready == [False, True]  # the second loss is the close


TENANT: ContextVar[str] = ContextVar("tenant", default="")


@pytest.mark.parametrize("options", [{}, {"batch_size": 5}, {"idempotency": True}], ids=["each", "batches", "store"])
def test_context_variables_do_not_reach_later_deliveries(
    broker: ScriptedBroker, new_consumer: NewConsumer, options: dict[str, Any]
) -> None:
    seen: list[str] = []

    def handle(given: Any) -> None:
        deliveries = given if isinstance(given, list) else [given]
        seen.extend(TENANT.get() for _ in deliveries)
        TENANT.set(deliveries[0].body.decode())

    if "idempotency" in options:
        options = {"idempotency": MemoryStore()}
    with new_consumer(handle, prefetch=60, concurrency=2, **options):
        for number in range(60):
            broker.consuming.deliver(b"%d" % number, message_id=str(number))
        wait_acked(broker, *range(1, 61))
    assert seen == [""] * 60


# -- random behaviour --------------------------------------------------------------------------------------------------


class Feed:
    """A queue as a broker keeps it.

    It delivers up to the prefetch, and redelivers what a lost channel had not acked.
    """

    def __init__(self, broker: ScriptedBroker, count: int) -> None:
        self.broker = broker
        self.waiting: deque[tuple[bytes, bool]] = deque((b"%d" % number, False) for number in range(count))
        self.settled: dict[bytes, str] = {}
        self._channel: Channel | None = None
        self._out: dict[int, bytes] = {}
        self._read = 0

    def turn(self) -> None:
        """Read the settlements, then deliver up to the prefetch."""
        while self._read < len(self.broker.settlements):
            one = self.broker.settlements[self._read]
            self._read += 1
            if one.channel is self._channel:
                self._take(one)
        channel = self.broker.consumed
        if channel is not self._channel and channel is not None:
            self.waiting.extendleft((body, True) for _, body in sorted(self._out.items(), reverse=True))
            self._out, self._channel = {}, channel
        if channel is not None:
            while self.waiting and len(self._out) < channel.prefetch and channel.consumers:
                body, redelivered = self.waiting.popleft()
                self._out[channel.deliver(body, redelivered=redelivered, message_id=body.decode())] = body

    def _take(self, one: Settlement) -> None:
        tags = [tag for tag in self._out if tag == one.tag or (one.multiple and tag < one.tag)]
        for tag in tags:
            body = self._out.pop(tag)
            if one.requeue:
                self.waiting.appendleft((body, True))
            else:
                self.settled[body] = one.verdict


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_only_handled_or_dead_lettered_messages_are_ever_acked(
    broker: ScriptedBroker, new_consumer: NewConsumer, seed: int
) -> None:
    """Every message is acked in the end, through lost channels and connections.

    Every ack has a tag that is outstanding.
    """
    rng = random.Random(seed)
    handled: set[bytes] = set()
    lock = threading.Lock()
    confirmed: set[bytes] = set()

    def script(published: Published) -> None:
        if rng.random() < 0.2:
            published.channel.nack(published.number)
        else:
            confirmed.add(published.body)
            published.channel.ack(published.number)

    def handle(delivery: Delivery) -> None:
        with lock:
            chance = rng.random()
        if int(delivery.body) % 29 == 0:
            raise DeadLetter("always")
        if chance < 0.1:
            raise ValueError("now and then")
        handled.add(delivery.body)

    broker.script = script
    retry = RetryPolicy(50, delays=(0.005,), backend="memory")
    feed = Feed(broker, 300)
    options = {"prefetch": 20, "concurrency": 3, "ack_every": 4, "ack_interval": 0.02, "retry": retry}
    with new_consumer(handle, ORDERS, **options):
        deadline = time.monotonic() + 30
        while len(feed.settled) < 300:
            assert time.monotonic() < deadline, f"{len(feed.settled)} settled, {len(feed.waiting)} wait"
            feed.turn()
            channel = broker.consumed
            chance = rng.random()
            if channel is not None and chance < 0.004:
                channel.connection.cut()
            elif channel is not None and chance < 0.01:
                channel.close(406, "PRECONDITION_FAILED - chaos")
            threading.Event().wait(0.002)
    assert set(feed.settled.values()) == {"ack"}
    dead = {b"%d" % number for number in range(0, 300, 29)}
    assert confirmed == dead
    assert set(feed.settled) == handled | dead


def test_a_consumer_connects_anew_where_nothing_is_delivered(
    broker: ScriptedBroker, new_consumer: NewConsumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue's member on its node is down, so assigned messages never arrive."""
    monkeypatch.setattr(delivery_watch, "CHECK_EVERY", 0.1)
    got: list[bytes] = []
    with new_consumer(lambda delivery: got.append(delivery.body), ORDERS, dead_letter=None):
        first = broker.consuming
        broker.counts.extend([(7, 1), (0, 1), (7, 1), (7, 1)])
        broker.wait(lambda: len(broker.connections) == 2, "another connection")
        assert not broker.counts
        second = broker.wait(lambda: broker.consumed not in {None, first} and broker.consumed, "another subscription")
        second.deliver(b"late")
        wait_until(lambda: got == [b"late"], timeout=30, what="its delivery")
    assert "7 messages of queue 'orders' are ready, and none is delivered" in caplog.text
