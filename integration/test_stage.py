"""The relay into a stage on real brokers: fault rows 68, 69 and 70, and fidelity."""

from __future__ import annotations

import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pika
import pytest

from integration.support.command_line import running_cli, start_cli
from integration.support.leaders import suspend_leader
from integration.support.processes import Process
from integration.support.seeds import soaking
from integration.support.shovels import shovel
from integration.support.stages import (
    DEADLINE,
    StageReader,
    check_each_once,
    delivered_of,
    ids,
    is_taken,
    originals,
    originals_of,
    publish,
    ready,
    relaying,
    wait_emptied,
)
from reliable_mq import Binding, Exchange, Message, Publisher, Queue
from reliable_mq.codec import Properties, RawDelivery
from reliable_mq.codec.methods import Consume, SetPrefetch
from reliable_mq.core.stage.envelope import MOST_MESSAGES, marker, unstaged
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, ReliableMQError, TopologyMismatch
from reliable_mq.stage import MissingId, StageOptions, StageRelay
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")


def message_of(delivery: RawDelivery) -> Message:
    return Message.from_wire(delivery.body, delivery.properties)


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_a_relay_moves_a_queue_into_a_stream(any_vhost: VirtualHost, kind: str) -> None:
    """Each message is moved once, in order; the queue is empty afterwards."""
    publish(any_vhost.url, "orders", 500, type=kind)
    with relaying(any_vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
        assert relay.statistics.moved == 500
    assert ready(any_vhost, "orders") == 0
    found = originals(any_vhost.url, "stage", count=500)
    read = (unstaged(one.properties, one.body) for one in delivered_of(any_vhost.url, "stage", 3))
    assert {entry.queue for entry in read if entry is not None and entry.originals} == {"orders"}
    assert list(ids(found)) == [f"m{number}" for number in range(500)]
    assert set(ids(found).values()) == {1}
    assert {(each.exchange, each.routing_key) for each in found} == {("", "orders")}


def test_a_mark_that_could_be_text_is_recognized(any_vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ returns bytes that are UTF-8 as text."""
    monkeypatch.setattr("reliable_mq.stage.client.os", SimpleNamespace(urandom=lambda _size: b"an epoch"))
    publish(any_vhost.url, "orders", 1, type="quorum")
    with relaying(any_vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
    found = delivered_of(any_vhost.url, "stage", 3)  # a marker begins the epoch, and another ends it
    marks = [each[0] for one in found if (each := unstaged(one.properties, one.body))]
    assert [(mark.epoch, mark.is_marker) for mark in marks] == [
        (b"an epoch", is_marker) for is_marker in (True, False, True)
    ]


@pytest.mark.parametrize("wait", [StageRelay.wait_active, StageRelay.wait_moved, StageRelay.wait_declared])
def test_waits_for_a_relay_end_when_it_is_closed(wait: Callable[[StageRelay, float], object]) -> None:
    """Another thread closes it, for example when a signal arrives."""
    relay = StageRelay(StageOptions(url="amqp://guest:guest@127.0.0.1:1/", queue="orders", stage="orders.stage"))
    relay.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, relay, 2 * DEADLINE)
        relay.close(0.0)
        error = waiting.exception(DEADLINE)
    if wait is StageRelay.wait_declared:
        assert "was closed before its stage was declared" in str(error)
    else:
        assert not waiting.result()


def test_a_new_stage_stays_new_for_the_next_epoch_and_relay(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Nothing is moved into it, though both find the marker of an earlier epoch."""
    publish(vhost.url, "orders", 1, type="quorum")
    with fault_proxy(vhost.url) as proxy, relaying(proxy.url, new_stage_grace=3600.0) as relay:
        wait_until(lambda: relay.tail_messages == 1, timeout=DEADLINE, what="a read tail")
        proxy.cut()
        wait_until(lambda: relay.tail_messages >= 3, timeout=DEADLINE, what="the tail read by the next epoch")
        assert not relay.wait_active(1.0)
    with relaying(vhost.url, new_stage_grace=3600.0) as relay:
        wait_until(lambda: relay.tail_messages >= 3, timeout=DEADLINE, what="the tail read by the next relay")
        assert not relay.wait_active(1.0)
    assert ready(vhost, "orders") == 1


def test_a_relay_leaves_the_next_one_no_long_tail(any_vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the copies of earlier relays are settled."""
    monkeypatch.setattr("reliable_mq.stage.relay._LONG_TAIL", 0)
    publish(any_vhost.url, "orders", 300, type="quorum")
    with relaying(any_vhost.url, max_outstanding=1) as relay:  # an entry for each message
        assert relay.wait_moved(DEADLINE)
    with relaying(any_vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
        assert relay.tail_messages > 300
        relay.wait_settled(DEADLINE)
    with relaying(any_vhost.url) as relay:
        assert relay.wait_active(DEADLINE)
        assert relay.tail_messages < 100


def test_a_relay_that_moves_messages_waits_for_no_settled_tail(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue may never be empty for long enough."""
    monkeypatch.setattr("reliable_mq.core.stage.session.SETTLED_AFTER", 3600.0)
    monkeypatch.setattr("reliable_mq.stage.relay._LONG_TAIL", 0)
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url) as relay, ThreadPoolExecutor(1) as pool:
        assert relay.wait_moved(DEADLINE)
        waiting = pool.submit(relay.wait_settled, 2 * DEADLINE)

        def is_over() -> bool:
            publish(vhost.url, "orders", 1, first=relay.statistics.moved)
            return waiting.done()

        wait_until(is_over, timeout=DEADLINE, what="the end of the wait")


@pytest.mark.parametrize("most", [1, MOST_MESSAGES])
def test_messages_come_back_byte_for_byte(any_vhost: VirtualHost, most: int) -> None:
    """This includes tables, lists, decimals, invalid properties and large headers.

    A stream carries none of them.
    """
    with any_vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.queue_declare("copied", durable=True)
        channel.exchange_declare("fan", "fanout")
        for queue in ("orders", "copied"):
            channel.queue_bind(queue, "fan")
        headers = {
            "table": {"list": [1, {"deep": b"\xff"}]},
            "decimal": Decimal("1.25"),
            "CC": ["elsewhere"],
            "x-long": "x" * 60_000,
            "second": "y" * 60_000,
        }
        everything = pika.BasicProperties(
            content_type="text/plain",
            content_encoding="gzip",
            headers=headers,
            delivery_mode=1,
            priority=9,
            correlation_id="c\udcff".encode("utf-8", "surrogateescape"),
            reply_to="reply",
            expiration="600000",
            message_id="m1",
            timestamp=2**62,
            type="type",
            user_id="guest",
            app_id="app",
        )
        for number, given in enumerate([everything, pika.BasicProperties(), pika.BasicProperties(headers=headers)]):
            channel.basic_publish("fan", f"key {number}", bytes(range(256)), given)
        channel.basic_publish("fan", "k" * 255, b"", pika.BasicProperties(message_id="empty"))
    any_vhost.wait_for_messages("copied", 4)
    with relaying(any_vhost.url, missing_id=MissingId.REPEAT, messages_per_entry=most) as relay:
        assert relay.wait_moved(DEADLINE)
    staged = originals(any_vhost.url, "stage", count=4)
    with StageReader(any_vhost.url) as reader:
        reader.perform(SetPrefetch(10))
        reader.perform(Consume("copied", "all"))
        wait_until(lambda: len(reader.arrived) == 4, timeout=DEADLINE, what="four messages")
        copied = [(each.exchange, each.routing_key, each.properties, each.body) for each in reader.arrived]
    assert [(each.exchange, each.routing_key, each.properties, each.body) for each in staged] == copied


def test_a_super_stream_puts_messages_into_their_keys_partition(vhost: VirtualHost) -> None:
    """A header's value decides; the exchange gives the partitions."""
    with Publisher(vhost.url, topology=[Queue("orders")], new_queue_grace=0) as publisher:
        messages = [Message(b"x", message_id=f"m{n}", headers={"customer": f"c{n % 7}"}) for n in range(210)]
        assert publisher.publish_many(messages, routing_key="orders").ok
    with relaying(vhost.url, partitions=3, key="header:customer", max_bytes=10_000_000) as relay:
        assert relay.wait_moved(DEADLINE)
    found = originals_of(vhost.url, "stage-0", "stage-1", "stage-2", count=210)
    assert sum(map(len, found)) == 210
    assert all(found)
    customers = [{Message.from_wire(b"", each.properties).headers["customer"] for each in part} for part in found]
    assert sum(map(len, customers)) == 7
    bindings = vhost.broker.management.call("GET", "exchanges", vhost.name, "stage", "bindings", "source")
    assert sorted(each["destination"] for each in bindings) == ["stage-0", "stage-1", "stage-2"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param("quorum", marks=pytest.mark.soak), "classic"])
def test_f68_a_killed_relay_moves_each_message_once(
    any_vhost: VirtualHost, kind: str, checker: Audit, rng: random.Random
) -> None:
    """SIGKILLs at random moments under load lose and repeat nothing in the stage."""
    kills = 12 if soaking() else 4
    total = 0
    publish(any_vhost.url, "orders", 1, first=1_000_000, type=kind)
    for _ in range(kills):
        publish(any_vhost.url, "orders", 1000, first=total)
        total += 1000
        most = str(rng.choice([1, MOST_MESSAGES]))
        process = Process("integration.programs.staging", any_vhost.url, "orders", "stage", most)
        try:
            assert process.stdout is not None
            if rng.random() < 0.8:
                assert process.stdout.readline() == b"active\n"
            Event().wait(rng.uniform(0.0, 0.4))
        finally:
            process.kill()
            process.communicate()
    with relaying(any_vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
        wait_emptied(any_vhost, "orders")
    check_each_once(any_vhost.url, "stage", count=total + 1)


@pytest.mark.timeout(1800)
def test_f68_two_hundred_kills_spend_no_message(
    vhost: VirtualHost, rng: random.Random, report: Callable[[str], None]
) -> None:
    """The relay reads the less ahead, the more often messages were returned, so none reaches the delivery limit.

    A relay that is always killed before it can move anything spends the limit. So after some such kills in a row, the
    next one waits until something is moved.
    """
    kills, limit = (200, 20) if soaking() else (12, 8)
    arguments = {
        "x-queue-type": "quorum",
        "x-delivery-limit": limit,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "dead",
    }
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("dead", durable=True)
        channel.queue_declare("orders", durable=True, arguments=arguments)
    total = left = kills * 50
    publish(vhost.url, "orders", total)
    in_vain = 0

    def some_moved() -> bool:
        return not left or vhost.live_counts(["orders"])["orders"] < left

    for _ in range(kills):
        process = Process("integration.programs.staging", vhost.url, "orders", "stage", str(MOST_MESSAGES))
        assert process.stdout is not None
        assert process.stdout.readline() == b"active\n"
        Event().wait(rng.uniform(0.0, 0.05))
        if in_vain == limit // 2:
            wait_until(some_moved, timeout=DEADLINE, what="some messages moved")
        process.kill()
        process.communicate()
        before, left = left, vhost.live_counts(["orders"])["orders"]
        in_vain = in_vain + 1 if left == before else 0
    with relaying(vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
        wait_emptied(vhost, "orders")
    assert ready(vhost, "dead") == 0
    counts = ids(originals(vhost.url, "stage", count=total))
    report(f"{kills} kills of the relay: {total} messages, {len(counts)} staged, {counts.total() - len(counts)} twice")
    assert sum(counts.values()) == len(counts) == total


@pytest.mark.parametrize("kind", ["quorum", pytest.param("classic", marks=pytest.mark.soak)])
def test_f68_a_killed_broker_costs_and_repeats_nothing(private_vhost: VirtualHost, kind: str) -> None:
    """A classic queue forgets its last acks and redelivers those messages.

    The relay finds them in the tail of the stage.
    """
    publish(private_vhost.url, "orders", 3000, type=kind)
    with relaying(private_vhost.url, new_stage_grace=2.0) as relay:
        wait_until(lambda: relay.statistics.moved > 500, timeout=DEADLINE, what="some messages moved")
        private_vhost.broker.kill()
        private_vhost.broker.start()
        wait_until(lambda: relay.active, timeout=DEADLINE, what="the relay is active again")
        # The count of the queue alone would not do: it is 0 while a quorum queue elects a leader.
        wait_until(lambda: relay.statistics.moved + relay.statistics.moved_before >= 3000, timeout=DEADLINE, what="all")
        wait_emptied(private_vhost, "orders")  # a message may be counted twice above
    check_each_once(private_vhost.url, "stage", count=3000)


def test_messages_are_ready_though_the_leader_does_not_respond(vhost: VirtualHost) -> None:
    """RabbitMQ reports no messages then."""
    publish(vhost.url, "orders", 300, type="quorum")
    suspend_leader(vhost, "orders", 2)
    with relaying(vhost.url, max_outstanding=50) as relay:
        assert relay.wait_moved(DEADLINE)
        assert relay.statistics.moved >= 300
    check_each_once(vhost.url, "stage", count=300)


def test_f68_a_cut_connection_repeats_nothing(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The cuts are between publish and confirm, and between confirm and ack."""
    publish(vhost.url, "orders", 2000, type="quorum")
    with fault_proxy(vhost.url) as proxy, relaying(proxy.url) as relay:
        counts = relay.statistics

        def has_moved(least: int) -> bool:
            return counts.moved + counts.moved_before > least

        for least in (250, 500, 750):
            # What was published but not confirmed before a cut counts as moved before.
            wait_until(partial(has_moved, least), timeout=DEADLINE, what="messages moved", interval=0.005)
            proxy.cut()
        wait_emptied(vhost, "orders")
    check_each_once(vhost.url, "stage", count=2000)


def test_f69_an_alarm_stops_the_relay_with_everything_unacked(private_vhost: VirtualHost) -> None:
    """It continues when the alarm is over."""
    publish(private_vhost.url, "orders", 100, type="classic")
    private_vhost.broker.alarm("disk")
    with relaying(private_vhost.url) as relay:
        relay.wait_declared(DEADLINE)
        assert not relay.wait_active(2.0)
        assert ready(private_vhost, "orders") == 100
        private_vhost.broker.clear_alarm("disk")
        assert relay.wait_active(DEADLINE)
        assert relay.wait_moved(DEADLINE)
    check_each_once(private_vhost.url, "stage", count=100)


def test_f69_a_deleted_stage_is_not_made_anew_in_silence(vhost: VirtualHost) -> None:
    """Unread messages are lost; the relay ends with an error and acks no more."""
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url, missing_queue_timeout=1.0) as relay:
        assert relay.wait_moved(DEADLINE)
        vhost.delete_queue("stage")
        publish(vhost.url, "orders", 10, first=10)
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, TopologyMismatch)
        assert "stage" in str(relay.error)
    vhost.wait_for_messages("orders", 10)


def test_a_differing_stage_ends_the_relay_naming_the_options(vhost: VirtualHost) -> None:
    """The error uses the user's names of the options; the queue is unchanged."""
    publish(vhost.url, "orders", 10, type="quorum")
    with vhost.connect() as connection:
        arguments = {"x-queue-type": "stream", "x-max-age": "86400s"}
        connection.channel().queue_declare("stage", durable=True, arguments=arguments)
    with relaying(vhost.url, names={"retention": "stageRetention"}) as relay:
        with pytest.raises(TopologyMismatch, match="The stage has this of stageRetention: give what") as raised:
            relay.wait_declared(DEADLINE)
        assert (raised.value.name, raised.value.argument) == ("stage", "x-max-age")
    vhost.wait_for_messages("orders", 10)


def test_a_queue_that_is_deleted_ends_the_relay_by_name(vhost: VirtualHost) -> None:
    """It ends after a timeout, because the queue may come back."""
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url, missing_queue_timeout=1.0) as relay:
        assert relay.wait_moved(DEADLINE)
        vhost.delete_queue("orders")
        assert relay.wait_ended(DEADLINE)
        assert "orders" in str(relay.error)


@pytest.mark.parametrize("before", [True, False], ids=["from the start", "made again"])
def test_a_queue_that_is_a_stream_ends_the_relay_by_name(vhost: VirtualHost, before: bool) -> None:
    """A relay would move only messages that are published later, and its acks would remove none."""
    publish(vhost.url, "orders", 10, type="stream" if before else "quorum")
    with relaying(vhost.url) as relay:
        if not before:
            assert relay.wait_moved(DEADLINE)
            vhost.delete_queue("orders")
            publish(vhost.url, "orders", 10, type="stream")
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, ConfigurationError)
        assert "'orders' is a stream, which needs no stage" in str(relay.error)


@pytest.mark.parametrize("partitions", [None, 2])
def test_a_relay_with_fewer_partitions_is_refused(vhost: VirtualHost, partitions: int | None) -> None:
    """It would move messages again that are at the end of the other partitions."""
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url, partitions=4) as relay:
        assert relay.wait_moved(DEADLINE)
    further = f"stage-{partitions or 0}"
    with relaying(vhost.url, partitions=partitions) as relay:
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, ConfigurationError)
        assert f"stage 'stage' has a partition '{further}', which would not be read" in str(relay.error)
    with relaying(vhost.url, partitions=partitions, fewer_partitions=True) as relay:
        assert relay.wait_moved(DEADLINE)


def test_a_waiting_relay_is_refused_once_a_partition_was_added(vhost: VirtualHost) -> None:
    """It does not read the end of the new partition, so it must not take over."""
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url, partitions=2) as first:
        assert first.wait_moved(DEADLINE)
        with relaying(vhost.url, partitions=2) as waiting:
            waiting.wait_declared(DEADLINE)
            with relaying(vhost.url, partitions=3) as third:
                third.wait_declared(DEADLINE)
                assert waiting.wait_ended(DEADLINE)
            assert "has a partition 'stage-2', which would not be read" in str(waiting.error)


def test_f70_of_two_relays_one_moves_and_the_other_takes_over(vhost: VirtualHost) -> None:
    """The second relay waits and moves nothing."""
    publish(vhost.url, "orders", 500, type="quorum")
    with relaying(vhost.url) as first:
        assert first.wait_moved(DEADLINE)
        with relaying(vhost.url) as second:
            assert not second.wait_active(2.0)
            publish(vhost.url, "orders", 500, first=500)
            wait_until(lambda: first.statistics.moved == 1000, timeout=DEADLINE, what="the first one moves")
            first.close(10)
            assert second.wait_active(DEADLINE)
            publish(vhost.url, "orders", 500, first=1000)
            wait_until(lambda: second.statistics.moved == 500, timeout=DEADLINE, what="the second one moves")
    check_each_once(vhost.url, "stage", count=1500)


def test_a_late_requeue_of_a_staged_message_repeats_nothing(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue may keep the deliveries of a dead relay for minutes, and count its consumer as long."""
    monkeypatch.setattr("reliable_mq.core.stage.session.SETTLED_AFTER", 0.0)
    publish(vhost.url, "orders", 1, type="quorum")
    with ExitStack() as dead:
        held = dead.enter_context(StageReader(vhost.url))
        held.perform(SetPrefetch(1))
        held.perform(Consume("orders", "dead"))
        wait_until(lambda: held.arrived, timeout=DEADLINE, what="a delivery of the dead relay")
        publish(vhost.url, "orders", 1)  # the same message, for its copy in the stage
        with relaying(vhost.url) as first:
            wait_until(lambda: first.statistics.moved == 1, timeout=DEADLINE, what="the copy in the stage")
        with relaying(vhost.url) as second:
            wait_until(lambda: second._client.counts.drained, timeout=DEADLINE, what="a queue that seems empty")
            dead.close()
            wait_until(lambda: second._client.moved == 1, timeout=DEADLINE, what="the redelivered message")
            assert second.statistics.moved_before == 1
    check_each_once(vhost.url, "stage", count=1)


def test_a_waiting_relay_waits_for_a_queue_that_is_gone_too(vhost: VirtualHost) -> None:
    """The queue may be declared again."""
    publish(vhost.url, "orders", 10, type="quorum")
    with relaying(vhost.url) as first, relaying(vhost.url) as second:
        wait_until(lambda: first.active or second.active, timeout=DEADLINE, what="one of them moves")
        wait_emptied(vhost, "orders")
        vhost.delete_queue("orders")
        for relay in (first, second):
            wait_until(
                lambda relay=relay: isinstance(relay._client.last_error, TopologyMismatch),  # type: ignore[misc]
                timeout=DEADLINE,
                what="both miss the queue",
            )
        publish(vhost.url, "orders", 10, first=10, type="quorum")
        wait_until(lambda: first.active or second.active, timeout=DEADLINE, what="one of them moves")
        wait_emptied(vhost, "orders")
        assert first.error is second.error is None
    check_each_once(vhost.url, "stage", count=20)


@pytest.mark.parametrize("refused", ["read", "write"])
def test_a_permission_that_is_missing_ends_the_relay(vhost: VirtualHost, refused: str) -> None:
    """Otherwise it would be refused again and again. The messages stay in the queue."""
    publish(vhost.url, "orders", 10, type="quorum")
    name = f"relay-{vhost.name}"
    vhost.add_user(name)
    allowed = {"configure": ".*", "write": ".*", "read": ".*"} | {refused: r"^(?!orders|amq\.default)"}
    vhost.broker.management.call("PUT", "permissions", vhost.name, name, body=allowed)
    with relaying(vhost.url.replace("guest:guest", f"{name}:{name}")) as relay:
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, BrokerUnavailable)
        assert relay.error.permanent
        assert f"{refused} access to" in str(relay.error)
    vhost.wait_for_messages("orders", 10)
    vhost.broker.management.call("DELETE", "users", name)


@pytest.mark.parametrize("kind", ["quorum", pytest.param("classic", marks=pytest.mark.soak)])
def test_two_stages_of_one_queue_are_warned_of(vhost: VirtualHost, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both relays warn once each; two relays of one stage do not."""
    publish(vhost.url, "orders", 3000, type=kind)

    def warned() -> list[str]:
        return [text.partition(":")[0] for text in caplog.messages if "the queue has other consumers (1)" in text]

    with relaying(vhost.url, stage="one") as first:
        assert first.wait_active(DEADLINE)
        with relaying(vhost.url, stage="one") as waiting:
            wait_until(lambda: first.status().ready == 0, timeout=DEADLINE, what="a count after the last message")
            assert not waiting.active
            assert warned() == []
        with relaying(vhost.url, stage="two"):
            wait_until(lambda: len(warned()) >= 2, timeout=DEADLINE, what="two warnings")
            publish(vhost.url, "orders", 100, first=3000)
            wait_until(lambda: ready(vhost, "orders") == 0, timeout=DEADLINE, what="an empty queue")
    assert sorted(warned()) == ["<StageRelay orders -> one>", "<StageRelay orders -> two>"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_two_stages_of_a_single_active_queue_get_a_part_each(
    vhost: VirtualHost, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one moves messages as soon as it is the active consumer.

    A quorum queue does not count waiting consumers, so its relays cannot warn.
    """
    publish(vhost.url, "orders", 1000, type=kind, single_active_consumer=True)

    def warned() -> set[str]:
        text = "(the active one, if only one is active at a time)"
        return {each.partition(":")[0] for each in caplog.messages if text in each}

    with relaying(vhost.url, stage="one") as first:
        assert first.wait_moved(DEADLINE)
        with relaying(vhost.url, stage="two") as second:
            assert second.wait_active(DEADLINE)
            if kind == "classic":
                wait_until(lambda: len(warned()) == 2, timeout=DEADLINE, what="two warnings")
            first.close(10)
            publish(vhost.url, "orders", 1000, first=1000)
            wait_until(lambda: first.statistics.moved + second.statistics.moved == 2000, timeout=DEADLINE, what="moved")
        assert (first.statistics.moved, second.statistics.moved) == (1000, 1000)
    check_each_once(vhost.url, "one", "two", count=2000)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_shovel_in_place_of_the_relay_loses_nothing(
    private_vhost: VirtualHost, private_broker: RabbitMQ, report: Callable[[str], None]
) -> None:
    """After a kill with its broker, the shovel has moved messages at least once.

    Headers that are lists are lost; exchange and routing key are those of the shovel.
    """
    publish(private_vhost.url, "orders", 20_000, type="quorum")
    with Publisher(private_vhost.url, topology=[Queue("stage", type="stream")]) as publisher:
        publisher.publish(Message(b"x", message_id="headers", headers={"n": 1, "items": [1, 2]}), routing_key="orders")
    shovel(private_broker, private_vhost, "orders", "stage")
    wait_until(lambda: 0 < ready(private_vhost, "orders") < 19_000, timeout=DEADLINE, what="some messages moved")
    private_broker.kill()
    private_broker.start()
    wait_until(lambda: private_vhost.live_counts(["orders"])["orders"] == 0, timeout=120, what="an empty queue")
    found = delivered_of(private_vhost.url, "stage", 20_001)
    counts = Counter(message_of(each).message_id for each in found)
    report(f"a shovel that was killed with its broker moved {counts.total() - len(counts)} of {len(counts)} twice")
    assert len(counts) == 20_001
    [one] = [each for each in found if message_of(each).message_id == "headers"]
    headers = message_of(one).headers
    assert headers["n"] == 1
    assert "items" not in headers
    assert (one.exchange, one.routing_key) == ("", "stage")


@pytest.mark.soak
def test_a_confirm_covers_a_binding_in_place_of_the_relay(private_vhost: VirtualHost, private_broker: RabbitMQ) -> None:
    """Confirmed messages are once in the queue and once in the stage.

    This holds even if the broker is killed right after the confirm.
    """
    exchange, orders, stage = Exchange("shop"), Queue("orders"), Queue("stage", type="stream")
    bindings = [Binding(exchange, queue, routing_key="order") for queue in (orders, stage)]
    with Publisher(private_vhost.url, topology=[exchange, orders, stage, *bindings], new_queue_grace=2) as publisher:
        messages = (Message(b"x", message_id=f"m{n}", headers={"n": n, "items": [1]}) for n in range(3000))
        assert publisher.publish_many(messages, exchange="shop", routing_key="order").ok
        private_broker.kill()
    private_broker.start()
    found = delivered_of(private_vhost.url, "stage", 3000)
    assert [message_of(each).message_id for each in found] == [f"m{n}" for n in range(3000)]
    assert {(each.exchange, each.routing_key) for each in found} == {("shop", "order")}
    assert [name for name in message_of(found[7]).headers if name != "x-stream-offset"] == ["n"]
    assert private_vhost.live_counts(["orders"])["orders"] == 3000


def test_a_message_without_id_ends_the_relay(vhost: VirtualHost) -> None:
    """That message and all later ones stay in the queue."""
    publish(vhost.url, "orders", 1, type="quorum")
    with vhost.connect() as connection:
        connection.channel().basic_publish("", "orders", b"no id")
    with relaying(vhost.url) as relay:
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, ConsumeError)
        assert "message_id" in str(relay.error)
        with pytest.raises(ReliableMQError):
            relay.wait_active(1.0)
    vhost.wait_for_messages("orders", 1)


def test_a_message_too_large_for_a_stage_ends_the_relay(vhost: VirtualHost) -> None:
    """Its properties exceed a frame, so they are in the body, which was the largest. It would be refused for ever."""
    publish(vhost.url, "orders", 0, type="quorum")
    with relaying(vhost.url) as relay, vhost.connect() as connection:
        channel = connection.channel()
        for name, headers in (("largest", None), ("larger", {"h": "x" * 131_000})):
            properties = pika.BasicProperties(message_id=name, headers=headers)
            channel.basic_publish("", "orders", bytes(16 * 2**20), properties)
            wait_until(lambda: relay.statistics.moved or relay.error, timeout=DEADLINE, what="the first message")
        assert relay.wait_ended(DEADLINE)
        assert relay.statistics.moved == 1
        assert isinstance(relay.error, ConsumeError)
        assert "a message of queue 'orders' is too large" in str(relay.error)
    vhost.wait_for_messages("orders", 1)


def test_a_stage_of_a_newer_version_ends_the_relay(vhost: VirtualHost) -> None:
    """The error says what to install; the queue is unchanged."""
    publish(vhost.url, "orders", 1, type="quorum")
    with relaying(vhost.url) as relay:
        assert relay.wait_moved(DEADLINE)
    newer = Message.from_wire(b"", marker(b"formerly").replace(b"\xff\1\0\xff", b"\xff\2\0\xff"))
    with Publisher(vhost.url) as publisher:
        publisher.publish(newer, routing_key="stage")
    publish(vhost.url, "orders", 1, first=1)
    with relaying(vhost.url) as relay:
        assert relay.wait_ended(DEADLINE)
        assert isinstance(relay.error, ConfigurationError)
        assert "install the version of reliable-mq that its relay has" in str(relay.error)
    vhost.wait_for_messages("orders", 1)


def test_the_command_moves_queues_until_sigterm(vhost: VirtualHost) -> None:
    """It moves two queues, serves metrics, and drains. Other programs can read the messages in the streams."""
    publish(vhost.url, "orders", 300, type="quorum")
    publish(vhost.url, "invoices", 300, type="classic")
    command = ["stage", vhost.url, "orders", "orders.stage", "invoices", "invoices.stage", "--metrics-port", "0"]
    with running_cli(*command) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"metrics: http://127.0.0.1:")
        wait_until(lambda: is_taken(vhost, "orders", "invoices"), timeout=DEADLINE, what="empty queues")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    assert b"600 messages moved" in said
    for queue in ("orders", "invoices"):
        assert len(originals(vhost.url, f"{queue}.stage", count=300)) == 300
        delivered = [each for each in delivered_of(vhost.url, f"{queue}.stage", 301) if each.body == b"body"]
        assert len(delivered) == len({Properties(each.properties).message_id for each in delivered}) == 300


def test_an_interrupted_stage_command_drains_and_exits_with_130(vhost: VirtualHost) -> None:
    publish(vhost.url, "orders", 1, type="quorum")
    with running_cli("stage", vhost.url, "orders", "orders.stage") as process:
        wait_until(lambda: is_taken(vhost, "orders"), timeout=DEADLINE, what="an empty queue")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, said
    assert b"1 messages moved" in said


def test_the_command_ends_with_the_error_of_a_relay(vhost: VirtualHost) -> None:
    """The queue stays missing for longer than its timeout."""
    process = start_cli("stage", vhost.url, "nowhere", "stage", "--missing-queue-timeout", "1")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"nowhere" in said
