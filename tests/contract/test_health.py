"""The health of publishers and consumers of either API, in all situations."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from reliable_mq import AsyncPublisher, KillSwitch, Message, Publisher, RetryPolicy
from reliable_mq.core import health as health_module
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, IdempotencyStoreError, OutboxError
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until
from tests.outbox.hanging import HangingOutbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reliable_mq.core.outbox import NewRow, RowSettlement
    from reliable_mq.health import Health
    from reliable_mq.stores import Claim
    from tests.contract.scripted_broker import ScriptedBroker

NewClient = "Callable[..., Any]"


def inner(client: Any) -> Any:
    """Return the publisher or consumer inside a client for other threads."""
    return getattr(client, "publisher", None) or getattr(client, "consumer", None) or client


def wait_health(client: Any, condition: Callable[[Health], bool], **arguments: Any) -> Health:
    wait_until(
        lambda: condition(inner(client).health(**arguments)), timeout=30, what=lambda: f"{inner(client).health()}"
    )
    found: Health = inner(client).health(**arguments)
    return found


def states(health: Health) -> tuple[bool, bool, bool]:
    return health.live, health.ready, health.progressing


def test_a_publisher_is_ready_while_it_is_connected(broker: ScriptedBroker, new_publisher: NewClient) -> None:
    publisher = new_publisher()
    before = inner(publisher).health()
    assert states(before) == (True, False, True)
    assert "not started" in before.reason
    with publisher:
        health = wait_health(publisher, lambda health: health.ready)
        assert states(health) == (True, True, True)
        assert abs(time.time() - health.since) < 60
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.connection.cut()
        health = wait_health(publisher, lambda health: not health.ready)
        assert states(health) == (True, False, True)
        assert "not connected" in health.reason
        del broker.refusals["Connection.Open"]
        wait_health(publisher, lambda health: health.ready)
        broker.connection.block("low on memory")
        health = wait_health(publisher, lambda health: not health.ready)
        assert states(health) == (True, False, True)
        assert "low on memory" in health.reason
        broker.connection.unblock()
        wait_health(publisher, lambda health: health.ready)
    assert states(inner(publisher).health()) == (True, False, True)
    assert inner(publisher).health().reason == "closed"
    with pytest.raises(ConfigurationError, match="stuck_after"):
        inner(publisher).health(stuck_after=0)


def test_a_publisher_without_confirms_does_not_progress(broker: ScriptedBroker, new_publisher: NewClient) -> None:
    with new_publisher() as publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key="orders")
        health = wait_health(publisher, lambda health: not health.progressing, stuck_after=0.2)
        assert states(health) == (True, True, False)
        assert inner(publisher).health().progressing  # within confirm_timeout
        [published] = broker.wait_published(1)
        published.channel.ack(1)
        assert confirmation.exception(30) is None
        assert inner(publisher).health(stuck_after=0.2).progressing


def idle_since(moment: float) -> None:
    """Wait until less is done than a client that is looked at with ``stuck_after=0.2`` must have done."""
    wait_until(lambda: time.monotonic() - moment > 0.2, timeout=10, what="an idle client")


def test_a_publisher_progresses_while_it_takes_a_message(
    broker: ScriptedBroker, new_publisher: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe on another thread may look amid any step, after hours without a message."""
    found: list[Health] = []
    broker.script = lambda published: published.channel.ack(published.number)
    with new_publisher() as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        channel = inner(publisher)._channel
        take = channel.window.take

        def take_and_look(size: int) -> None:
            take(size)
            found.append(inner(publisher).health(stuck_after=0.2))

        monkeypatch.setattr(channel.window, "take", take_and_look)
        idle_since(channel._settled_at)
        publisher.publish(Message(b"x"), routing_key="orders")
    assert [(health.progressing, health.reason) for health in found] == [(True, "")]


def test_a_publisher_that_lost_only_its_channel_says_so(
    broker: ScriptedBroker, new_publisher: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Health] = []
    with new_publisher() as publisher:
        channel = inner(publisher)._channel
        lost = channel.lost

        def lose_and_look(*arguments: Any) -> None:
            lost(*arguments)
            found.append(inner(publisher).health())

        monkeypatch.setattr(channel, "lost", lose_and_look)
        broker.script = lambda published: published.channel.ack(published.number)
        publisher.publish(Message(b"x"), routing_key="orders")
        [published] = broker.wait_published(1)
        published.channel.close(404, "NOT_FOUND - no exchange 'gone' in vhost '/'")
        wait_until(lambda: found, timeout=30, what="the loss")
    assert states(found[0]) == (True, False, True)
    assert found[0].reason == "not connected: its channel was lost, and the next one is not ready"


def test_what_has_given_up_is_not_live(broker: ScriptedBroker, new_publisher: NewClient) -> None:
    with new_publisher(reconnect_stop=lambda _rounds: True) as publisher:
        assert inner(publisher).health().live
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.connection.cut()
        health = wait_health(publisher, lambda health: not health.live)
        assert states(health) == (False, False, True)
        assert "given up" in health.reason


@pytest.mark.slow
def test_an_event_loop_that_stands_still_is_not_live(broker: ScriptedBroker, new_publisher: NewClient) -> None:
    """The loop is asyncio's or the I/O thread's.

    The second probe after a heartbeat detects the stall.
    """
    broker.heartbeat = 1
    go_on = threading.Event()
    with new_publisher(heartbeat=1) as publisher:
        wait_health(publisher, lambda health: health.ready)
        channel = inner(publisher)._channel
        channel._io.call_soon(lambda: go_on.wait(60))
        try:
            health = wait_health(publisher, lambda health: not health.live)
            assert "stalled" in health.reason
            assert not health.ready
        finally:
            go_on.set()
        wait_health(publisher, lambda health: health.ready)


@pytest.mark.slow
def test_an_io_thread_that_died_is_not_live(broker: ScriptedBroker) -> None:
    """The program runs in a separate process, because the sockets stay open."""
    program = """
        import sys, threading
        from reliable_mq import Publisher

        threading.excepthook = lambda _: None
        publisher = Publisher(sys.argv[1])
        publisher.connect()
        io = publisher._channel._io
        io.call_soon(sys.exit)
        io.join(60)
        health = publisher.health()
        print(health.live, health.ready, health.reason, sep="|")
        sys.stdout.flush()
        __import__("os")._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), broker.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.startswith("False|False|its I/O thread or event loop has ended"), done


def test_with_an_outbox_a_publisher_is_ready_without_a_broker(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path
) -> None:
    """Messages are stored, so only a relay that is stuck for long shows."""
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    with new_publisher(outbox=SQLiteOutbox(tmp_path / "outbox.db")) as publisher:
        publisher.publish(Message(b"stored"), routing_key="orders")
        assert states(inner(publisher).health()) == (True, True, True)
        broker.script = lambda published: published.channel.ack(published.number)
        del broker.refusals["Connection.Open"]
        publisher.flush(30)


def test_a_publisher_is_not_ready_while_its_outbox_fails(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path
) -> None:
    class Full(SQLiteOutbox):
        full = True

        def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
            if rows and self.full:
                raise OutboxError("the disk is full")
            super().write(rows, settlements)

    outbox = Full(tmp_path / "outbox.db")
    with new_publisher(outbox=outbox) as publisher:
        broker.script = lambda published: published.channel.ack(published.number)
        assert states(inner(publisher).health()) == (True, True, True)
        for _ in range(2):
            with pytest.raises(OutboxError):
                publisher.publish(Message(b"not stored"), routing_key="orders")
        health = inner(publisher).health()
        assert states(health) == (True, False, True)
        assert health.reason == "its outbox cannot store messages: the disk is full"
        assert states(inner(publisher).health(stuck_after=1e-9)) == (True, False, False)
        outbox.full = False
        publisher.publish(Message(b"stored"), routing_key="orders")
        assert states(inner(publisher).health()) == (True, True, True)


def test_a_publisher_whose_outbox_hangs_is_not_ready(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = HangingOutbox(tmp_path / "outbox.db")
    outbox.hangs = "rows"
    monkeypatch.setattr(health_module, "_STORE_FAILURE_LASTS", 0.1)
    with new_publisher(outbox=outbox, max_outstanding=1) as publisher:
        broker.script = lambda published: published.channel.ack(published.number)
        try:
            with pytest.raises(OutboxError, match="hangs"):
                publisher.publish(Message(b"late"), routing_key="orders", timeout=0.05)
            health = inner(publisher).health()
            assert states(health) == (True, False, True)
            assert "hangs" in health.reason
            with pytest.raises(OutboxError, match="was not stored: 1 messages before it"):
                publisher.publish(Message(b"no room"), routing_key="orders", timeout=0.05)
            assert inner(publisher)._outbox_channel.relay.statistics.not_stored == 2
            time.sleep(0.2)
            health = inner(publisher).health()
            assert states(health) == (True, False, True)
            assert "1 messages before it" in health.reason
            health = inner(publisher).health(stuck_after=0.2)
            assert states(health) == (True, False, False)
            assert "1 messages are not stored, and its outbox has not answered for" in health.reason
        finally:
            outbox.answers.set()
        wait_health(publisher, lambda health: health.ready)
        assert inner(publisher)._outbox_channel.relay.statistics.not_stored == 2


@pytest.mark.parametrize("call", ["take", "outcomes"])
def test_a_publisher_whose_relay_gets_no_answer_is_not_ready(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path, call: str
) -> None:
    """No message waits to be stored, so only the relay notices that the outbox hangs."""
    outbox = HangingOutbox(tmp_path / "outbox.db")
    with new_publisher(outbox=outbox) as publisher:
        broker.script = lambda published: published.channel.ack(published.number)
        publisher.publish(Message(b"before"), routing_key="orders")
        publisher.flush(30)
        outbox.hangs = call
        try:
            if call == "outcomes":
                publisher.publish(Message(b"confirmed"), routing_key="orders")
            health = wait_health(publisher, lambda health: not health.ready, stuck_after=0.2)
            assert states(health) == (True, False, False)
            assert "its outbox has not answered its relay for" in health.reason
            assert inner(publisher).health().ready  # within confirm_timeout
        finally:
            outbox.answers.set()
        wait_health(publisher, lambda health: health.ready, stuck_after=0.2)


def cause_of_failed_flush(client: Any) -> str:
    """Flush on the loop of an asyncio publisher, because asyncio drops the cause between threads."""

    async def flush(publisher: AsyncPublisher) -> str:
        with pytest.raises(TimeoutError) as caught:
            await publisher.flush(0.1)
        return str(caught.value.__cause__)

    if isinstance(inner(client), AsyncPublisher):
        return str(client._loop.call(flush(inner(client))))
    with pytest.raises(TimeoutError) as caught:
        client.flush(0.1)
    return str(caught.value.__cause__)


def test_a_flush_that_the_broker_prevents_says_why(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path
) -> None:
    """The rows of an outbox wait while the broker is away, and while it blocks publishing."""
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    with new_publisher(outbox=SQLiteOutbox(tmp_path / "outbox.db")) as publisher:
        wait_until(lambda: inner(publisher)._channel, timeout=30, what="the first attempt")
        publisher.publish(Message(b"stored"), routing_key="orders")
        assert "INTERNAL_ERROR - starting" in cause_of_failed_flush(publisher)
        del broker.refusals["Connection.Open"]
        [published] = broker.wait_published(1)
        broker.connection.block("low on memory")
        wait_until(lambda: inner(publisher).blocked, timeout=30, what="the block")
        assert "low on memory" in cause_of_failed_flush(publisher)
        broker.connection.unblock()
        published.channel.ack(published.number)


def test_an_idle_outbox_publisher_recovers_from_a_refusal(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path
) -> None:
    """Its relay has no message to find out with that the broker was put in order."""
    broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - vhost / not found"
    registry = CollectorRegistry()

    def gauge() -> float | None:
        return registry.get_sample_value("reliable_mq_publisher_connected", {"publisher": "shop"})

    outbox = SQLiteOutbox(tmp_path / "outbox.db")
    with new_publisher(outbox=outbox, registry=registry, name="shop") as publisher:
        health = wait_health(publisher, lambda health: not health.progressing, stuck_after=0.2)
        assert "vhost / not found" in health.reason
        assert not inner(publisher).connected
        assert gauge() == 0
        del broker.refusals["Connection.Open"]
        wait_health(publisher, lambda health: health.progressing, stuck_after=0.2)
        wait_until(lambda: inner(publisher).connected, timeout=30, what="a connection")
        assert gauge() == 1


def test_an_idle_outbox_publisher_recovers_from_a_later_refusal(
    broker: ScriptedBroker, new_publisher: NewClient, tmp_path: Path
) -> None:
    """Its first attempt fails for now, and the channel gives up at the next one."""
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    with new_publisher(outbox=SQLiteOutbox(tmp_path / "outbox.db")) as publisher:
        wait_until(lambda: inner(publisher)._channel, timeout=30, what="the first attempt")
        broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - vhost / not found"
        health = wait_health(publisher, lambda health: not health.progressing, stuck_after=0.2)
        assert "vhost / not found" in health.reason
        del broker.refusals["Connection.Open"]
        wait_health(publisher, lambda health: health.progressing, stuck_after=0.2)
        wait_until(lambda: inner(publisher).connected, timeout=30, what="a connection")


def test_a_consumer_is_ready_while_it_is_subscribed(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    consumer = new_consumer(lambda _delivery: None)
    assert "not started" in inner(consumer).health().reason
    with consumer:
        wait_health(consumer, lambda health: health.ready)
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.consuming.connection.cut()
        health = wait_health(consumer, lambda health: not health.ready)
        assert states(health) == (True, False, True)
        del broker.refusals["Connection.Open"]
        wait_health(consumer, lambda health: health.ready)
        inner(consumer).stop()
        assert states(inner(consumer).health()) == (True, False, True)
        assert inner(consumer).health().reason == "stopping"
    assert inner(consumer).health().reason == "stopped"


def test_a_consumer_whose_run_gave_up_is_not_live(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    """It is live again once the program has closed it."""
    consumer = new_consumer(lambda _delivery: None, reconnect_stop=lambda _rounds: True)
    consumer.connect()
    broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
    broker.consuming.connection.cut()
    with pytest.raises(BrokerUnavailable):
        consumer.run()
    health = inner(consumer).health()
    assert states(health) == (False, False, True)
    assert health.reason.startswith("given up: ")
    assert "INTERNAL_ERROR" in health.reason
    consumer.close()
    assert states(inner(consumer).health()) == (True, False, True)
    assert inner(consumer).health().reason == "stopped"


def test_a_consumer_whose_handlers_are_stuck_does_not_progress(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    go_on = threading.Event()

    def handle(_delivery: Any) -> None:
        go_on.wait(60)

    with new_consumer(handle) as consumer:
        wait_health(consumer, lambda health: health.ready)
        broker.consuming.deliver(b"stuck")
        health = wait_health(consumer, lambda health: not health.progressing, stuck_after=0.2)
        assert states(health) == (True, True, False)
        assert "1 deliveries are with handlers" in health.reason
        assert inner(consumer).health().progressing
        go_on.set()
        wait_health(consumer, lambda health: health.progressing, stuck_after=0.2)


def test_a_consumer_progresses_while_it_takes_a_delivery(
    broker: ScriptedBroker, new_consumer: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Health] = []
    handled = threading.Event()
    with new_consumer(lambda _: handled.set()) as consumer:
        wait_health(consumer, lambda health: health.ready)
        subscription = inner(consumer)._subscription
        poll = subscription.session.poll

        def poll_and_look(now: float) -> Any:
            actions = poll(now)
            if actions.dispatch:
                found.append(inner(consumer).health(stuck_after=0.2))
            return actions

        monkeypatch.setattr(subscription.session, "poll", poll_and_look)
        idle_since(time.monotonic())
        broker.consuming.deliver(b"late")
        assert handled.wait(20)
    assert [(health.progressing, health.reason) for health in found] == [(True, "")]


def test_a_consumer_that_stops_is_not_shown_as_disconnected(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    """Its handlers may run for longer than the alert waits."""
    registry, entered, go_on = CollectorRegistry(), threading.Event(), threading.Event()

    def handle(_delivery: Any) -> None:
        entered.set()
        go_on.wait(60)

    def connected() -> float | None:
        labels = {"consumer": "slow", "queue": "orders"}
        return registry.get_sample_value("reliable_mq_consumer_connected", labels)

    with new_consumer(handle, name="slow", registry=registry, stop_timeout=60) as consumer:
        broker.consuming.deliver(b"slow")
        assert entered.wait(30)
        assert connected() == 1
        inner(consumer).stop()
        try:
            wait_until(lambda: not inner(consumer).connected, timeout=30, what="the end of the subscription")
            assert connected() is None
        finally:
            go_on.set()


def test_a_paused_consumer_is_not_ready(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    def fail(_delivery: Any) -> None:
        raise ValueError("the database is away")

    switch = KillSwitch(minimum=2, share=0.5, window=60, pause=60)
    with new_consumer(fail, retry=RetryPolicy(5, delays=(60,), backend="memory"), kill_switch=switch) as consumer:
        wait_health(consumer, lambda health: health.ready)
        channel = broker.consuming
        for _ in range(3):
            channel.deliver(b"fails")
        health = wait_health(consumer, lambda health: not health.ready)
        assert states(health) == (True, False, False)
        assert "kill switch" in health.reason


def test_a_consumer_is_not_ready_while_its_store_fails(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    class Store(MemoryStore):
        down = True

        def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            if self.down:
                raise IdempotencyStoreError("no answer")
            return super().claim_many(keys, lease)

    store = Store()
    with new_consumer(lambda _: None, idempotency=store) as consumer:
        wait_health(consumer, lambda health: health.ready)
        broker.consuming.deliver(b"claimed", message_id="1")
        health = wait_health(consumer, lambda health: not health.ready)
        assert states(health) == (True, False, True)
        assert health.reason == "its idempotency store fails: IdempotencyStoreError: no answer"
        assert states(consumer.health(stuck_after=1e-9)) == (True, False, False)
        store.down = False
        wait_health(consumer, lambda health: health.ready)


def test_a_consumer_unable_to_publish_dead_letters_is_not_ready(
    broker: ScriptedBroker, new_consumer: NewClient
) -> None:
    """They use a separate connection, which is opened for the first of them."""

    def fail(_delivery: Any) -> None:
        raise ValueError("no stock")

    with new_consumer(fail, retry=RetryPolicy(1), dead_letter="orders.dead") as consumer:
        wait_health(consumer, lambda health: health.ready)
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.consuming.deliver(b"fails")
        health = wait_health(consumer, lambda health: not health.ready)
        assert states(health) == (True, False, True)
        assert health.reason.startswith("its retries and dead letters: not connected")
        broker.script = lambda published: published.channel.ack(published.number)
        del broker.refusals["Connection.Open"]
        wait_health(consumer, lambda health: health.ready)


def test_a_consumer_with_blocked_dead_letters_is_not_ready(broker: ScriptedBroker, new_consumer: NewClient) -> None:
    """It holds them between tries, since the broker does not dead-letter them itself."""

    def fail(_delivery: Any) -> None:
        raise ValueError("no stock")

    broker.script = lambda published: published.channel.ack(published.number)
    with new_consumer(fail, retry=RetryPolicy(1), dead_letter="orders.dead") as consumer:
        broker.consuming.deliver(b"opens the connection")
        broker.wait_settled(1)
        subscription = inner(consumer)._subscription
        [published] = broker.published
        published.channel.connection.block("low on disk")
        wait_until(lambda: subscription.republisher._publisher.blocked, timeout=30, what="the block")
        assert inner(consumer).health().ready
        broker.consuming.deliver(b"waits")
        wait_until(lambda: subscription.session.holds_publishes, timeout=30, what="a refused publish")
        health = inner(consumer).health()
        assert states(health) == (True, False, True)
        assert health.reason == "its retries and dead letters: the broker blocks publishing: low on disk"
        published.channel.connection.unblock()
        broker.wait_settled(2)
        assert inner(consumer).health().ready


@pytest.mark.parametrize("first", [(541, "INTERNAL_ERROR - starting"), (530, "NOT_ALLOWED - vhost / not found")])
def test_the_retry_connection_never_gives_up(
    broker: ScriptedBroker, new_consumer: NewClient, first: tuple[int, str]
) -> None:
    """The consumer is connected with the same settings, so they are not wrong."""

    def fail(_delivery: Any) -> None:
        raise ValueError("no stock")

    broker.script = lambda published: published.channel.ack(published.number)
    with new_consumer(fail, retry=RetryPolicy(1), dead_letter="orders.dead") as consumer:
        wait_health(consumer, lambda health: health.ready)
        broker.refusals["Connection.Open"] = first
        broker.consuming.deliver(b"fails")
        wait_health(consumer, lambda health: first[1] in health.reason)
        broker.refusals["Connection.Open"] = 530, "NOT_ALLOWED - refused for now"
        health = wait_health(consumer, lambda health: "refused for now" in health.reason)
        assert states(health) == (True, False, True)
        del broker.refusals["Connection.Open"]
        broker.wait_published(1)
        wait_health(consumer, lambda health: health.ready)


def test_both_apis_have_it() -> None:
    assert AsyncPublisher.health is Publisher.health
