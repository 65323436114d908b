"""A subscription on a connection that only records what is written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from reliable_mq import BrokerUnavailable, KillSwitch, Queue, RetryPolicy, TopologyMismatch
from reliable_mq._util.logs import LogLimit
from reliable_mq.codec import encode_ack, encode_nack
from reliable_mq.codec.methods import Cancel, Consume, SetPrefetch
from reliable_mq.core.channel_setup import ServerInfo, StepRefused
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import Work
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.lifecycle import ChannelStep, Resubscribe
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.subscription import BaseSubscription
from tests.core.deliveries import delivery, failure


class FakeConnection:
    """Runs calls at once, and records what is written."""

    peer = None

    def __init__(self, **_options: Any) -> None:
        self.written: list[bytes] = []
        self.stopped = False

    def call_soon(self, call: Callable[[], object]) -> None:
        call()

    call_and_wake = call_soon

    def call_later(self, _delay: float, _call: Callable[[], object]) -> Any:
        return threading.Timer(0, lambda: None)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def reopen_channel(self) -> None: ...

    def stop(self, _grace: float) -> None:
        self.stopped = True


class FakeHandlers:
    """Keeps work until it is recalled, and runs ``meanwhile`` at each recall."""

    def __init__(self) -> None:
        self.waiting: list[Delivery] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def put(self, work: Iterable[Work]) -> None:
        self.waiting += [item for item in work if isinstance(item, Delivery)]

    def stop_starting(self) -> None: ...

    def recall(self) -> list[Delivery]:
        self.meanwhile()
        recalled, self.waiting = self.waiting, []
        return recalled


class FakeSubscription(BaseSubscription):
    _connection_type = FakeConnection  # type: ignore[assignment]
    _event_type = threading.Event


def test_a_delivery_handled_as_the_kill_switch_trips_is_acked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pause first recalls deliveries. Acks and log lines follow."""
    options = ConsumerOptions(
        "amqp://localhost/", Queue("orders"), print, name="c", kill_switch=KillSwitch(share=0.5, minimum=2)
    )
    subscription = FakeSubscription(options)
    subscription.handlers = handlers = FakeHandlers()
    connection: Any = subscription._io
    session = subscription.session
    session.opened(1, 1)
    session.delivered([delivery(1), delivery(2)], 0.0)
    subscription.read_finished()
    first, second = handlers.waiting
    handlers.waiting = []  # both are being handled

    def end_of_both() -> None:
        if session.lifecycle.state.name == "ENDED":
            handlers.meanwhile = lambda: None
            subscription._results.extend([first, Failed(second, failure())])

    handlers.meanwhile = end_of_both
    with caplog.at_level(logging.INFO, "reliable_mq"):
        subscription.stop_now()
    assert subscription.ended.is_set()
    assert connection.stopped
    assert b"".join(connection.written) == encode_ack(1, 1, multiple=False)
    assert "kill switch pauses dispatch" in caplog.text


def test_a_store_that_is_down_is_not_logged_for_every_delivery(caplog: pytest.LogCaptureFixture) -> None:
    """Each of 300 unacked deliveries is tried six times in a minute."""
    now = 100.0
    subscription = FakeSubscription(ConsumerOptions("amqp://localhost/", Queue("orders"), print, prefetch=300))
    subscription._store_log = LogLimit(10.0, lambda: now)
    subscription.handlers = handlers = FakeHandlers()
    subscription.session.opened(1, 1)
    subscription.session.delivered([delivery(tag) for tag in range(1, 301)], 0.0)
    subscription.read_finished()
    *most, last = handlers.waiting
    for one in most:
        subscription._results.append(Skipped(one, SkipReason.STORE_FAILED, "IdempotencyStoreError: down"))
        subscription._run()
    now += 10.0
    subscription._results.append(Skipped(last, SkipReason.STORE_FAILED, "IdempotencyStoreError: away"))
    subscription._run()
    assert subscription.session.statistics.store_failures == 300
    first, summary = [record.getMessage() for record in caplog.records if "store failed" in record.getMessage()]
    assert first.endswith("idempotency store failed: IdempotencyStoreError: down")
    assert summary.endswith("IdempotencyStoreError: away; 299 such failures since the last line")


def test_a_refused_quarantine_is_left_out_for_a_while() -> None:
    """Each refusal costs the channel, and with it the acks of all running handlers."""
    subscription = FakeSubscription(ConsumerOptions("amqp://localhost/", Queue("orders"), print))
    subscription.handlers = subscription.quarantine_handlers = FakeHandlers()
    subscription.ready(1, 1, 131072, SERVER)
    subscription._subscribed_to_quarantine(StepRefused(403, "ACCESS_REFUSED - read access"))
    subscription.lost(1, ConnectionLoss(403, "ACCESS_REFUSED - read access", "channel", by_broker=True))
    subscription.ready(2, 1, 131072, SERVER)
    now = time.monotonic()
    for later, subscribes in ((10, False), (70, True)):
        changes = subscription.session.poll(now + later).subscribe
        assert (ChannelStep.SUBSCRIBE_TO_QUARANTINE in changes) == subscribes


def test_a_group_that_a_pause_interrupts_waits_unacked() -> None:
    """A worker has claimed its deliveries and not begun. The broker would count each return."""
    switch = KillSwitch(share=0.5, minimum=1)
    subscription = FakeSubscription(ConsumerOptions("amqp://localhost/", Queue("orders"), print, kill_switch=switch))
    subscription.handlers = handlers = FakeHandlers()
    subscription.quarantine_handlers = FakeHandlers()
    connection: Any = subscription._io
    subscription.ready(1, 1, 131072, SERVER)
    subscription.delivered([delivery(1), delivery(2)])
    subscription.read_finished()
    [first, second], handlers.waiting = handlers.waiting, []
    subscription.report([Failed(first, failure())])
    assert subscription.session.paused
    subscription.put_back([second])
    assert b"".join(connection.written) == b""
    assert not handlers.waiting
    subscription.stop_now()
    assert b"".join(connection.written) == encode_nack(1, 2, multiple=False, requeue=True)


@pytest.mark.parametrize(("several", "start"), [(True, 11), (False, 0)])
def test_another_node_may_have_a_replica_that_this_one_lost(several: bool, start: int) -> None:
    """RabbitMQ cancels and refuses. From the only node, that means another stream."""
    options = ConsumerOptions("amqp://localhost/", Queue("events", type="stream"), print, offset="first", name="c")
    subscription = FakeSubscription(options)
    subscription.handlers = handlers = FakeHandlers()
    connection: Any = subscription._io
    connection.tries_several_addresses = several
    subscription.ready(1, 1, 131072, SERVER)
    subscription.delivered([delivery(1, headers={"x-stream-offset": 10})])
    subscription.read_finished()
    done, handlers.waiting = handlers.waiting, []
    subscription.report(done)
    subscription.cancelled("c")
    subscription.lost(1, ConnectionLoss(None, "reopened", "channel", by_broker=False))
    subscription.failed(BrokerUnavailable("the stream has no replica on this node: 406 ..."), True)
    *_, consume = subscription._subscribe(SERVER)
    assert consume.arguments["x-stream-offset"] == start


def test_no_channel_is_lost_over_a_queue_known_to_be_refused() -> None:
    options = ConsumerOptions("amqp://localhost/", Queue("orders"), print, retry=RetryPolicy(9, delays=(1,)))
    subscription = FakeSubscription(options)
    subscription.handlers = handlers = FakeHandlers()
    subscription.quarantine_handlers = FakeHandlers()
    connection: Any = subscription._io
    asked: list[Callable[[object], None]] = []
    connection.run = lambda _steps, done: asked.append(done)
    another = replace(SERVER)
    for generation, (delay, server, declares) in enumerate(
        (
            (5.0, SERVER, True),
            (20.0, SERVER, True),
            (5.0, SERVER, False),
            (20.0, SERVER, False),
            (5.0, another, True),
        ),
        1,
    ):
        subscription.ready(generation, 1, 131072, server)
        subscription.delivered([delivery(message_id=f"m{generation}")])
        subscription.read_finished()
        [item], handlers.waiting = handlers.waiting, []
        subscription.report([Failed(item, failure(delay=delay))])
        assert bool(asked) == declares
        for declared in asked:
            error = TopologyMismatch("differs", kind="queue", name="orders.retry")
            error.__cause__ = StepRefused(406, "PRECONDITION_FAILED")
            declared(error)
        asked.clear()
        subscription.lost(generation, ConnectionLoss(406, "PRECONDITION_FAILED", "channel", by_broker=True))
    assert subscription.reconnects == 1


def test_no_retry_is_published_after_a_declaration_failed() -> None:
    """The outcome may be an exception of another package."""
    options = ConsumerOptions("amqp://localhost/", Queue("orders"), print, retry=RetryPolicy(9, delays=(1,)))
    subscription = FakeSubscription(options)
    subscription.handlers = handlers = FakeHandlers()
    subscription.quarantine_handlers = FakeHandlers()
    published: list[object] = []
    subscription.republisher = SimpleNamespace(put=published.append)  # type: ignore[assignment]
    connection: Any = subscription._io
    for generation, outcome in enumerate((ValueError("no frame"), None), 1):
        asked: list[Callable[[object], None]] = []
        connection.run = lambda _steps, done, asked=asked: asked.append(done)
        subscription.ready(generation, 1, 131072, SERVER)
        subscription.delivered([delivery(message_id=f"m{generation}")])
        subscription.read_finished()
        [item], handlers.waiting = handlers.waiting, []
        subscription.report([Failed(item, failure(delay=5.0))])
        [declared] = asked
        declared(outcome)
        assert bool(published) == (outcome is None)
        subscription.lost(generation, ConnectionLoss(320, "CONNECTION_FORCED", "connection", by_broker=True))


def test_a_declaration_lost_with_its_channel_moves_no_suspect(caplog: pytest.LogCaptureFixture) -> None:
    """The broker delivers the suspect again, so a copy would be a second message."""
    options = ConsumerOptions("amqp://localhost/", Queue("orders"), print, retry=RetryPolicy(9, delays=(60,)))
    subscription = FakeSubscription(options)
    subscription.handlers = subscription.quarantine_handlers = FakeHandlers()
    published: list[Any] = []
    subscription.republisher = SimpleNamespace(put=published.append)  # type: ignore[assignment]
    connection: Any = subscription._io
    asked: list[Callable[[object], None]] = []
    connection.run = lambda _steps, done: asked.append(done)
    for generation in (1, 2):
        subscription.ready(generation, 1, 131072, SERVER)
        subscription.delivered([delivery(redelivered=True, headers={"x-delivery-count": 5})])
        subscription.read_finished()
        declared = asked.pop()
        if generation == 1:
            declared(BrokerUnavailable("the connection was lost"))
            subscription.lost(generation, ConnectionLoss(None, "reset", "connection", by_broker=False))
            assert published == []
            assert "not declared" not in caplog.text
    declared(None)
    assert [one.routing_key for one in published] == ["orders.retry.1000"]


SERVER = ServerInfo("RabbitMQ", "4.3.6", (4, 3, 6))


@pytest.mark.parametrize(
    ("given", "pinned"), [(None, True), ("next", True), ("last", True), ("first", False), (7, False)]
)
def test_a_stream_that_gave_nothing_resumes_where_it_began(given: str | int | None, pinned: bool) -> None:
    """A second subscription with "next" would skip all messages since the first one."""
    options = ConsumerOptions("amqp://localhost/", Queue("events", type="stream"), print, offset=given)
    subscription = FakeSubscription(options)
    subscription.handlers = FakeHandlers()
    subscription.ready(1, 1, 131072, SERVER)
    *_, with_another_prefetch = subscription._resubscribe(Resubscribe("consumer", "consumer#2", 10))
    subscription.lost(1, ConnectionLoss(None, "gone", "connection", by_broker=False))
    *_, after_a_loss = subscription._subscribe(SERVER)
    for step in (with_another_prefetch, after_a_loss):
        assert isinstance(step, Consume)
        offset = step.arguments.get("x-stream-offset")
        assert isinstance(offset, datetime) if pinned else offset == given, offset


TEMPORARY = Queue("orders", type="classic", auto_delete=True)


@pytest.mark.parametrize(
    ("queue", "given", "order"),
    [
        (TEMPORARY, {}, [SetPrefetch, Consume, Cancel]),
        ("orders", {}, [SetPrefetch, Consume, Cancel]),
        (Queue("orders"), {}, [SetPrefetch, Consume, Cancel]),
        ("orders", {"exclusive": True}, [Cancel, SetPrefetch, Consume]),
        (Queue("events", type="stream"), {}, [Cancel, SetPrefetch, Consume]),
    ],
)
def test_a_queue_keeps_a_consumer_while_the_prefetch_changes(
    queue: Queue | str, given: dict[str, Any], order: list[type]
) -> None:
    """An auto-delete queue is deleted with its last consumer, and its messages are lost."""
    subscription = FakeSubscription(ConsumerOptions("amqp://localhost/", queue, print, **given))
    assert [type(step) for step in subscription._resubscribe(Resubscribe("c", "c#2", 10))] == order


@pytest.mark.parametrize(
    ("queue", "given"),
    [(replace(TEMPORARY, single_active_consumer=True), {}), (TEMPORARY, {"exclusive": True})],
)
def test_the_only_consumer_of_a_temporary_queue_stays(
    caplog: pytest.LogCaptureFixture, queue: Queue, given: dict[str, Any]
) -> None:
    """The new prefetch takes effect with the next channel, since no second consumer can keep the queue."""
    options = ConsumerOptions("amqp://localhost/", queue, print, prefetch=4, **given)
    subscription = FakeSubscription(options)
    subscription.handlers = FakeHandlers()
    subscription.ready(1, 1, 131072, SERVER)
    options.change_prefetch(9)
    with caplog.at_level(logging.INFO, "reliable_mq"):
        subscription.prefetch_changed()
    assert "prefetch=9 takes effect with the next channel" in caplog.text
    assert subscription.session.lifecycle.steady
    subscription.lost(1, ConnectionLoss(None, "gone", "connection", by_broker=False))
    assert SetPrefetch(9) in list(subscription._subscribe(SERVER))
