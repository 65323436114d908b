"""The connection of either API against real brokers.

The tests check its events, their order, and that the connection always ends.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from integration.support.recorder import Recorded
from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, DeclareQueue, QueueState, SetPrefetch
from reliable_mq.core.channel_setup import consumer_setup, publisher_setup
from reliable_mq.errors import BrokerUnavailable, TopologyMismatch, UsageError
from reliable_mq.settings import Credentials
from reliable_mq.testing import Frame, basic_ack, connection_blocked, connection_unblocked
from reliable_mq.testing.waiting import wait_until
from reliable_mq.topology import Exchange, Queue

if TYPE_CHECKING:
    from collections.abc import Generator
    from random import Random

    from reliable_mq.codec.methods import Step
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.testing import FaultProxy, FaultProxyFactory, RabbitMQ, VirtualHost
    from reliable_mq.topology.queue import QueueType

pytestmark = pytest.mark.usefixtures("baseline", "connection_api")

QUICK = tenacity.wait_fixed(0.1)


def consuming(queue: Queue | str, prefetch: int = 100) -> Any:
    consume = Consume(queue.name if isinstance(queue, Queue) else queue, "tag")
    return lambda server: consumer_setup(queue, [], server.version_tuple, consume, prefetch=prefetch)


def one(step: Step) -> Generator[Step, Any, Any]:
    reply = yield step
    return reply


def ends(recorded: Recorded, grace: float) -> bool:
    """Close with a grace. Return whether it ends, at the latest 5 s later than usual.

    A machine that stalls takes longer than the usual limit, 3 s more than the grace.
    """
    return recorded.io.close(grace) or recorded.io.join(5)


# -- being ready -------------------------------------------------------------------------------------------------------


def test_it_connects_sets_up_and_says_to_whom(any_vhost: VirtualHost) -> None:
    """`ready` reports generation, channel, frame size and broker.

    A published message is confirmed, and `lost` is the last event.
    """
    queue = Queue("q", dead_letter=None)
    with Recorded(any_vhost.url, lambda server: publisher_setup([queue], server.version_tuple)) as recorded:
        generation, channel, frame_max, server = recorded.client.wait_for("ready")
        assert (generation, channel, frame_max, server.product) == (1, 1, 131072, "RabbitMQ")
        assert server.version == any_vhost.broker.version
        assert server.version_tuple >= (4, 0)
        recorded.publish("q")
        assert recorded.client.wait_for("acked") == (1, False)
        recorded.publish("missing", b"returned")
        assert recorded.client.wait_for("returned")[:4] == (312, "NO_ROUTE", "", "missing")
        assert recorded.client.wait_for("acked", 2) == (2, False)
    generation, loss = recorded.client.all("lost")[0]
    assert (generation, loss.code, loss.scope, loss.by_broker) == (1, None, "connection", False)
    assert recorded.client.names("acked", "read_finished") == ["ready", "returned", "lost"]


def test_no_delivery_comes_before_ready(vhost: VirtualHost) -> None:
    """Deliveries that arrive during set-up are reported after `ready`; none is lost."""
    with Recorded(vhost.url, lambda server: publisher_setup([Queue("q", type="classic")], ())) as publisher:
        publisher.client.wait_for("ready")
        for number in range(300):
            publisher.publish("q", b"%d" % number)
        vhost.wait_for_messages("q", 300)

    def setup(_server: ServerInfo) -> SetupGenerator:
        yield SetPrefetch(0)
        yield Consume("q", "tag")
        for _ in range(5):  # more round trips, while deliveries arrive
            yield CheckQueue("q")

    with Recorded(vhost.url, setup) as recorded:
        recorded.client.wait_for("delivered")
        wait_until(lambda: len(bodies(recorded)) == 300, timeout=10, what="all deliveries")
        assert recorded.client.names("read_finished")[0] == "ready"
        assert bodies(recorded) == [b"%d" % number for number in range(300)]


def bodies(recorded: Recorded) -> list[bytes]:
    return [delivery.body for (deliveries,) in recorded.client.all("delivered") for delivery in deliveries]


def test_one_write_may_be_larger_than_any_buffer(vhost: VirtualHost) -> None:
    """Data that the socket does not accept at once is sent later, in order.

    `write_drained` reports that all of it is sent.
    """
    body = bytes(range(256)) * 32768  # 8 MiB
    with Recorded(vhost.url, lambda server: publisher_setup([Queue("q", type="classic")], ())) as recorded:
        recorded.client.wait_for("ready")
        for _ in range(3):
            recorded.publish("q", body)
        recorded.client.wait_for("write_drained")
        wait_until(lambda: acked_to(recorded) == 3, timeout=30, what="confirms")
        assert recorded.call(recorded.io.write_buffer_size) == 0
    with Recorded(vhost.url, consuming("q")) as recorded:
        wait_until(lambda: len(bodies(recorded)) == 3, timeout=30, what="deliveries")
        assert set(bodies(recorded)) == {body}


def acked_to(recorded: Recorded) -> int:
    return max((tag for tag, _ in recorded.client.all("acked")), default=0)


# -- losing the channel ------------------------------------------------------------------------------------------------


def test_a_channel_the_broker_closes_reopens_on_its_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Thirty closes in a row need no wait.

    Finding the one bad publish among many closes the channel repeatedly.
    """
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, wait=tenacity.wait_fixed(60)) as recorded:
        began = time.monotonic()
        for generation in range(1, 31):
            assert recorded.client.wait_for("ready", generation)[0] == generation
            recorded.publish("any", exchange="missing")
            lost, loss = recorded.client.wait_for("lost", generation)
            assert lost == generation
            assert (loss.code, loss.scope, loss.by_broker) == (404, "channel", True)
            assert "missing" in loss.text
        recorded.client.wait_for("ready", 31)
        assert time.monotonic() - began < 50
        assert proxy.connections == 1


def test_reopening_gives_a_new_generation_on_the_connection(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, consuming(Queue("q", dead_letter=None))) as recorded:
        recorded.client.wait_for("ready")
        recorded.call(recorded.io.reopen_channel)
        generation, loss = recorded.client.wait_for("lost")
        assert (generation, loss.code, loss.scope, loss.by_broker) == (1, None, "channel", False)
        assert recorded.client.wait_for("ready", 2)[0] == 2
        assert proxy.connections == 1


def test_reopening_that_is_not_answered_discards_the_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, connect_timeout=1) as recorded:
        recorded.client.wait_for("ready")
        proxy.black_hole("to_client", new_connections=False)
        recorded.call(recorded.io.reopen_channel)
        recorded.call(lambda: recorded.io.write(b"never sent"))
        _, loss = recorded.client.wait_for("lost")
        assert (loss.scope, loss.by_broker) == ("connection", False)
        recorded.client.wait_for("ready", 2)


# -- losing the connection ---------------------------------------------------------------------------------------------


def test_a_connection_that_the_broker_closes_shows_its_code(vhost: VirtualHost) -> None:
    with Recorded(vhost.url, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        wait_until(lambda: vhost.close_connections("maintenance"), timeout=10, what="the broker knows of it")
        _, loss = recorded.client.wait_for("lost")
        assert (loss.code, loss.scope, loss.by_broker) == (320, "connection", True)
        assert "maintenance" in loss.text
        assert recorded.client.wait_for("ready", 2)[0] == 2


@pytest.mark.parametrize("reset", [True, False])
def test_a_connection_that_breaks_is_replaced(vhost: VirtualHost, fault_proxy: FaultProxyFactory, reset: bool) -> None:
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, wait=QUICK) as recorded:
        for generation in range(1, 6):
            recorded.client.wait_for("ready", generation)
            proxy.cut(reset=reset)
            lost, loss = recorded.client.wait_for("lost", generation)
            assert lost == generation
            assert (loss.code, loss.scope, loss.by_broker) == (None, "connection", False)
            assert str(proxy.port) in loss.text
        recorded.client.wait_for("ready", 6)


def test_a_reset_in_the_handshake_is_no_wrong_password(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Only the broker's reply shows that the credentials are wrong.

    If a connection breaks while it authenticates, pika guesses that they are.
    """
    proxy = fault_proxy(vhost.url)
    for frames in range(1, 8):  # start, tune, open-ok, channel.open-ok, declare-ok twice, select-ok
        proxy.cut_after(frames, "to_client")
    setup = [Queue("q")]
    with Recorded(proxy.url, lambda server: publisher_setup(setup, server.version_tuple), wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        failures = recorded.client.all("failed")
        assert len(failures) >= 6
        assert all(will_retry and not error.permanent for error, will_retry in failures)


def test_discard_replaces_the_connection_at_once(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The old channel reports no event after the discard, even with confirms pending."""
    proxy = fault_proxy(vhost.url)
    setup = lambda server: publisher_setup([Queue("q")], server.version_tuple)  # noqa: E731
    with Recorded(proxy.url, setup, wait=tenacity.wait_fixed(60)) as recorded:
        recorded.client.wait_for("ready")
        proxy.hold_confirms()
        recorded.publish("q")

        def discard() -> None:  # one call, in which no other connection becomes ready
            recorded.io.discard("in doubt")
            proxy.release_confirms()
            recorded.io.write(b"never sent")

        recorded.call(discard)
        generation, loss = recorded.client.wait_for("lost")
        assert (generation, loss.code, loss.text, loss.scope) == (1, None, "in doubt", "connection")
        recorded.client.wait_for("ready", 2)
        recorded.call(lambda: recorded.io.discard("again"))
        recorded.client.wait_for("ready", 3)
        assert proxy.connections == 3
        assert not any(name == "acked" for name in recorded.client.names())


def test_a_channel_discarded_while_read_reports_nothing_more(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Later events of the read in which the client discarded the channel are dropped."""
    proxy = fault_proxy(vhost.url)
    setup = [Queue("q", dead_letter=None)]
    with Recorded(proxy.url, lambda server: publisher_setup(setup, server.version_tuple), wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        recorded.client.hooks["acked"] = lambda *_: recorded.io.discard("enough")
        proxy.inject("to_client", b"".join(basic_ack(1, tag).raw for tag in range(1, 50)))
        recorded.client.wait_for("ready", 2)
        assert recorded.client.names("read_finished") == ["ready", "acked", "lost", "ready"]


def test_undecodable_frames_cost_only_the_connection(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    broken = [
        bytes([1, 0, 0, 0, 0, 0, 4, 0, 99, 0, 99, 0xCE]),  # a method that pika does not know, on channel 0
        bytes([1, 0, 0, 0, 0, 0, 4, 0, 10, 0, 60, 0xCE]),  # connection.blocked without its reason
        bytes([1, 0, 0, 0, 0, 0, 2, 0, 10, 0xCE]),  # half a method number
        b"\x09garbage",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ]
    with Recorded(proxy.url, wait=QUICK) as recorded:
        for generation, data in enumerate(broken, 1):
            recorded.client.wait_for("ready", generation)
            proxy.inject("to_client", data)
            _, loss = recorded.client.wait_for("lost", generation)
            assert loss.scope == "connection"
        recorded.client.wait_for("ready", len(broken) + 1)
        assert recorded.io.callback_errors == 0


def test_a_vanished_peer_is_noticed_by_heartbeats(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """The peer of each connection vanishes until one is lost for that reason.

    The broker closes a connection itself if this process stalls for two heartbeats.
    """
    proxy = fault_proxy(vhost.url)
    recorded = Recorded(proxy.url, heartbeat=1)

    def noticed() -> bool:
        return any("heartbeat" in loss.text for _, loss in recorded.client.all("lost"))

    def vanish(*_: object) -> None:
        if not noticed():
            proxy.black_hole(new_connections=False)

    recorded.client.hooks["ready"] = vanish
    with recorded:
        wait_until(noticed, timeout=40, what="missed heartbeats")
        wait_until(lambda: is_live(recorded), timeout=15, what="ready")


def test_heartbeats_count_what_goes_past_the_driver(vhost: VirtualHost, connection_api: str) -> None:
    """A connection that carries only content counts as alive.

    The bytes of the content count as signs of life.
    """
    with Recorded(
        vhost.url, lambda server: publisher_setup([Queue("q")], server.version_tuple), heartbeat=60
    ) as recorded:
        recorded.client.wait_for("ready")
        if connection_api == "aio":
            link = recorded.io.connector._connector._link
            link._heartbeat_at = 0.0
            recorded.publish("q")
            wait_until(lambda: link._heartbeat_at > 0, timeout=10, what="aiormq is told that the peer lives")
            return
        connection = recorded.io._connector._link._connection
        before = connection.bytes_received, connection.bytes_sent
        recorded.publish("q", b"x" * 1000)
        recorded.client.wait_for("acked")
        assert connection.bytes_received - before[0] >= 21
        assert connection.bytes_sent - before[1] >= 1000


def test_ready_and_lost_alternate_under_any_faults(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """After random faults, generations never repeat, and events belong to one."""
    proxy = fault_proxy(vhost.url)
    setup = [Queue("q", dead_letter=None)]
    with Recorded(
        proxy.url, lambda server: publisher_setup(setup, server.version_tuple), wait=QUICK, connect_timeout=3
    ) as recorded:
        recorded.client.wait_for("ready")
        faults = [
            proxy.cut,
            lambda: proxy.cut(reset=False),
            lambda: recorded.call(lambda: recorded.io.discard("at random")),
            lambda: recorded.call(recorded.io.reopen_channel),
            lambda: recorded.publish("any", exchange="missing"),
            lambda: recorded.publish("q"),
            lambda: proxy.cut_after(rng.randrange(1, 12), "to_client"),
            lambda: proxy.cut_after(rng.randrange(1, 12), "to_broker"),
            lambda: recorded.io.call_soon(lambda: 1 // 0),
        ]
        for _ in range(40):
            rng.choice(faults)()
            if rng.random() < 0.7:
                wait_until(lambda: is_live(recorded), timeout=30, what="ready", interval=0.002)
        proxy.heal()
        recorded.publish("q")
        began = len(recorded.client.all("ready"))
        recorded.call(lambda: recorded.io.discard("last"))
        recorded.client.wait_for("ready", began + 1, timeout=60)
        recorded.publish("q")
    live = 0
    last = 0
    for name, arguments in recorded.client.events:
        if name == "ready":
            assert live == 0
            assert arguments[0] > last
            live = last = arguments[0]
        elif name == "lost":
            assert arguments[0] == live
            live = 0
        elif name == "failed":
            assert live == 0
            assert arguments[1]
        else:
            assert live
    assert live == 0
    assert last > 5


def is_live(recorded: Recorded) -> bool:
    return len(recorded.client.all("ready")) > len(recorded.client.all("lost"))


# -- failing to connect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "path", "text"),
    [("guest:canary-7f3", None, "403"), ("guest:guest", "no-such-vhost", "530")],
)
def test_a_permanent_refusal_at_the_start_ends_all_attempts(
    vhost: VirtualHost, user: str, path: str | None, text: str
) -> None:
    broker = vhost.broker
    url = f"amqp://{user}@{broker.host}:{broker.port}/{path or vhost.name}"
    with Recorded(url) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert not will_retry
        assert error.permanent
        assert text in str(error)
        assert f"{broker.host}:{broker.port}" in str(error)
        assert "canary" not in repr(error) + repr(error.__cause__)
    assert recorded.client.names() == ["failed"]


def test_a_refused_password_is_tried_again_once_something_worked(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Credentials are requested at every connect, so a rotated password is used."""
    proxy = fault_proxy(vhost.url)
    answers = iter([("guest", "guest"), ("guest", "stale"), ("guest", "guest")])
    options: dict[str, Any] = {"credentials": lambda: next(answers), "wait": QUICK}
    with Recorded(proxy.url.replace("guest:guest@", ""), **options) as recorded:
        recorded.client.wait_for("ready")
        proxy.cut()
        error, will_retry = recorded.client.wait_for("failed")
        assert will_retry
        assert error.permanent
        recorded.client.wait_for("ready", 2)


def test_a_credentials_callback_that_raises_is_a_failed_attempt(vhost: VirtualHost) -> None:
    calls: list[int] = []

    def credentials() -> Credentials:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("the vault is sealed")
        return Credentials("guest", "guest")

    with Recorded(vhost.url.replace("guest:guest@", ""), credentials=credentials, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        failures = recorded.client.all("failed")
        assert len(failures) == 2
        assert all(will_retry and isinstance(error, BrokerUnavailable) for error, will_retry in failures)
        assert isinstance(failures[0][0].__cause__, OSError)


def test_a_credentials_callback_that_hangs_holds_up_nothing(vhost: VirtualHost) -> None:
    """The attempt times out, and the callback is called only a few times.

    Its late answer is used, and `call_soon` works while it hangs.
    """
    go_on = threading.Event()
    calls: list[int] = []

    def credentials() -> Credentials:
        calls.append(1)
        go_on.wait(20)
        return Credentials("guest", "guest")

    options: dict[str, Any] = {"credentials": credentials, "wait": QUICK, "connect_timeout": 0.5}
    with Recorded(vhost.url.replace("guest:guest@", ""), **options) as recorded:
        error, will_retry = recorded.client.wait_for("failed", 3)
        assert will_retry
        assert "credentials" in str(error)
        assert recorded.call(lambda: 42) == 42
        assert len(calls) <= 8
        go_on.set()
        recorded.client.wait_for("ready")


def test_a_host_that_does_not_answer_is_left_for_the_next(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Every host gets its timeout and no more; the next one is tried without a wait."""
    silent, dead = fault_proxy(vhost.url), fault_proxy(vhost.url)
    silent.hang_connections()
    dead.refuse_connections()
    live = [fault_proxy(vhost.url) for _ in range(4)]  # a machine that stalls does not connect to the first in time
    urls = [silent.url, dead.url, *(proxy.url for proxy in live)]
    began = time.monotonic()
    with Recorded(urls, connect_timeout=2, wait=tenacity.wait_fixed(60)) as recorded:
        recorded.client.wait_for("ready", timeout=30)
        assert time.monotonic() - began < 30
        errors = [str(error) for error, _ in recorded.client.all("failed")]
        assert [str(silent.port) in errors[0], str(dead.port) in errors[1]] == [True, True]


def test_an_unknown_host_name_is_a_failed_attempt() -> None:
    with Recorded("amqps://user:password@broker.invalid/", stop=tenacity.stop_after_attempt(2), wait=QUICK) as recorded:
        recorded.client.wait_for("failed", 2)
        (first, will_retry), (_, at_last) = recorded.client.all("failed")
        assert (will_retry, at_last) == (True, False)
        assert "broker.invalid:5671" in str(first)


def test_a_broker_that_does_not_offer_our_mechanism_ends_it(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    proxy.rewrite(lambda _, frame: [replace(frame, payload=frame.payload.replace(b"PLAIN", b"OTHER"))], "to_client")
    with Recorded(proxy.url) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert error.permanent
        assert not will_retry
        assert "PLAIN" in str(error)


# -- set-up ------------------------------------------------------------------------------------------------------------


def test_a_queue_that_differs_ends_it_with_both_values(vhost: VirtualHost) -> None:
    with Recorded(
        vhost.url, lambda server: publisher_setup([Queue("q", type="classic", dead_letter=None)], ())
    ) as first:
        first.client.wait_for("ready")
    quorum = Queue("q", dead_letter=None)
    with Recorded(vhost.url, lambda server: publisher_setup([quorum], server.version_tuple)) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert isinstance(error, TopologyMismatch)
        assert not will_retry
        assert (error.declared, error.existing) == ("quorum", "classic")


def mismatch(url: str, *topology: Queue | Exchange) -> TopologyMismatch:
    with Recorded(url, lambda server: publisher_setup(topology, server.version_tuple)) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
    assert isinstance(error, TopologyMismatch)
    assert not will_retry
    return error


@pytest.mark.parametrize("kind", ["quorum", "classic", "stream"])
def test_every_argument_in_which_a_queue_differs_is_named(any_vhost: VirtualHost, kind: QueueType) -> None:
    """The error has both values of each.

    One connection is enough, and the queue is not changed.
    """
    declared = Queue("q", type="classic", max_length=5, message_ttl=1, dead_letter=None)
    arguments: dict[str, object] = {"x-queue-type": kind}
    if kind != "stream":
        arguments |= {"x-max-length": 7, "x-single-active-consumer": True, "x-dead-letter-exchange": "elsewhere"}
    with any_vhost.connect() as connection:
        connection.channel().queue_declare("q", durable=True, arguments=arguments)
    before = any_vhost.queue("q")
    error = mismatch(any_vhost.url, declared)
    found = {difference.argument: difference[1:] for difference in error.differences}
    expected = {"x-message-ttl": ("1000", "none"), "x-overflow": ("reject-publish", "none")}
    if kind == "stream":  # a stream has none of these arguments, so they are not compared
        expected = {"x-queue-type": ("classic", "stream")}
    else:
        expected |= {
            "x-max-length": ("5", "7"),
            "x-single-active-consumer": ("none", "true"),
            "x-dead-letter-exchange": ("none", "elsewhere"),
        }
        expected |= {} if kind == "classic" else {"x-queue-type": ("classic", "quorum")}
    assert found == expected
    assert all(part in str(error) for argument, values in found.items() for part in (argument, *values))
    assert "more may differ" not in str(error)
    after = any_vhost.queue("q")
    assert before is not None
    assert after is not None
    assert (after["arguments"], after["type"], after["durable"]) == (arguments, kind, before["durable"])


def test_every_differing_property_of_a_declaration_is_named(any_vhost: VirtualHost) -> None:
    with any_vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("q", auto_delete=True, durable=True)
        channel.exchange_declare("e", "topic", durable=False, internal=True, arguments={"alternate-exchange": "a"})
    queue = mismatch(any_vhost.url, Queue("q", type="classic", max_priority=3, dead_letter=None))
    assert {*queue.differences} == {("auto_delete", "false", "true"), ("x-max-priority", "3", "none")}
    exchange = mismatch(any_vhost.url, Exchange("e", alternate_exchange="b", auto_delete=True))
    assert {*exchange.differences} == {
        ("type", "direct", "topic"),
        ("durable", "true", "false"),
        ("auto_delete", "true", "false"),
        ("internal", "false", "true"),
        ("alternate-exchange", "b", "a"),
    }
    assert exchange.kind == "exchange"


def test_a_queue_that_differs_later_is_retried_on_its_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    proxy = fault_proxy(vhost.url)
    queue = Queue("q", dead_letter=None)
    with Recorded(proxy.url, consuming(queue), wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        vhost.delete_queue("q")
        assert recorded.client.wait_for("cancelled") == ("tag",)
        with Recorded(
            vhost.url, lambda _: publisher_setup([Queue("q", type="classic", dead_letter=None)], ())
        ) as other:
            other.client.wait_for("ready")
        recorded.call(recorded.io.reopen_channel)
        error, will_retry = recorded.client.wait_for("failed", 2)
        assert isinstance(error, TopologyMismatch)
        assert will_retry
        vhost.delete_queue("q")
        recorded.client.wait_for("ready", 2)
        assert proxy.connections == 1


def test_a_name_without_a_queue_ends_it(vhost: VirtualHost) -> None:
    with Recorded(vhost.url, consuming("missing")) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert isinstance(error, TopologyMismatch)
        assert (error.name, will_retry) == ("missing", False)


def test_a_refusal_that_costs_the_connection_is_told_by_its_step(vhost: VirtualHost) -> None:
    setup = [Exchange("e", type="x-unknown")]
    with Recorded(vhost.url, lambda server: publisher_setup(setup, server.version_tuple)) as recorded:
        error, will_retry = recorded.client.wait_for("failed")
        assert isinstance(error, TopologyMismatch)
        assert (error.kind, error.name, will_retry) == ("exchange", "e", False)


def test_an_exclusive_queue_of_another_connection_is_waited_for(vhost: VirtualHost) -> None:
    queue = Queue("mine", type="classic", exclusive=True, dead_letter=None)
    setup = lambda server: publisher_setup([queue], server.version_tuple)  # noqa: E731
    with Recorded(vhost.url, setup) as first:
        first.client.wait_for("ready")
        with Recorded(vhost.url, setup, wait=QUICK) as recorded:
            error, will_retry = recorded.client.wait_for("failed")
            assert will_retry
            assert "405" in str(error)
            first.io.close(5)
            recorded.client.wait_for("ready")


def test_a_set_up_that_hangs_ends_in_time(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    stop = proxy.rewrite(lambda _, frame: [] if frame.name == "channel.open-ok" else [frame], "to_client")
    with Recorded(proxy.url, wait=QUICK, connect_timeout=1) as recorded:
        failed = lambda: recorded.client.all("failed")  # noqa: E731
        # A busy machine may need all of the timeout to connect.
        wait_until(lambda: any("setting up" in str(error) for error, _ in failed()), timeout=15, what="a set-up hangs")
        assert all(will_retry for _, will_retry in failed())
        stop()
        recorded.client.wait_for("ready")


def test_a_set_up_that_raises_is_a_failed_attempt(vhost: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def setup(server: ServerInfo) -> SetupGenerator:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        yield from publisher_setup([], server.version_tuple)

    with Recorded(vhost.url, setup, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        ((error, will_retry),) = recorded.client.all("failed")
        assert will_retry
        assert isinstance(error.__cause__, RuntimeError)


# -- steps on the live channel -----------------------------------------------------------------------------------------


def test_steps_run_one_after_the_other_and_give_their_results(vhost: VirtualHost) -> None:
    queue = Queue("q", dead_letter=None)
    with Recorded(vhost.url, consuming(queue)) as recorded:
        recorded.client.wait_for("ready")
        state = recorded.run_steps(one(CheckQueue("q")))
        assert state == QueueState("q", 0, 1)
        results: list[Any] = []
        recorded.call(
            lambda: [
                recorded.io.run(one(step), results.append)
                for step in (SetPrefetch(5), Cancel("tag"), Consume("q", "other"), CheckQueue("q"))
            ]
        )
        wait_until(lambda: len(results) == 4, timeout=10, what="results")
        assert results == [None, None, "other", QueueState("q", 0, 1)]


def test_a_cancelled_consumer_tag_can_be_used_again_at_once(vhost: VirtualHost) -> None:
    def again() -> Generator[Step, Any, Any]:
        for _ in range(3):
            yield Cancel("tag")
            yield SetPrefetch(7)
            tag = yield Consume("q", "tag")
        return tag

    with Recorded(vhost.url, consuming(Queue("q", dead_letter=None))) as recorded:
        recorded.client.wait_for("ready")
        assert recorded.run_steps(again()) == "tag"
        vhost.delete_queue("q")
        assert recorded.client.wait_for("cancelled") == ("tag",)
        outcome = recorded.run_steps(consumer_setup(Queue("q"), [], (4, 0), Consume("q", "tag"), prefetch=1))
        assert outcome is None
        assert len(recorded.client.all("ready")) == 1


def test_a_refused_step_costs_the_channel_and_no_later_step(vhost: VirtualHost) -> None:
    with Recorded(vhost.url) as recorded:
        recorded.client.wait_for("ready")
        results: list[Any] = []
        recorded.call(
            lambda: [recorded.io.run(one(step), results.append) for step in (CheckQueue("missing"), SetPrefetch(1))]
        )
        recorded.client.wait_for("lost")
        assert "404" in str(results[0])
        assert isinstance(results[1], BrokerUnavailable)
        recorded.client.wait_for("ready", 2)
        assert recorded.run_steps(one(SetPrefetch(1))) is None


def test_steps_without_a_channel_fail_at_once(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    proxy.hang_connections()
    with Recorded(proxy.url) as recorded:
        assert isinstance(recorded.run_steps(one(SetPrefetch(1))), BrokerUnavailable)


def test_steps_that_are_not_answered_cost_the_connection(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, connect_timeout=1) as recorded:
        recorded.client.wait_for("ready")
        proxy.black_hole("to_client", new_connections=False)
        assert isinstance(recorded.run_steps(one(SetPrefetch(1))), BrokerUnavailable)
        _, loss = recorded.client.wait_for("lost")
        assert loss.scope == "connection"
        recorded.client.wait_for("ready", 2)


def test_an_unencodable_step_is_an_error_and_costs_nothing(vhost: VirtualHost) -> None:
    with Recorded(vhost.url) as recorded:
        recorded.client.wait_for("ready")
        outcome = recorded.run_steps(one(DeclareQueue("q", arguments={"x": object()})))
        assert "DeclareQueue" in str(outcome)
        assert recorded.run_steps(one(SetPrefetch(1))) is None
        assert len(recorded.client.all("ready")) == 1


# -- being blocked -----------------------------------------------------------------------------------------------------


def test_a_memory_alarm_is_reported_and_close_works_under_it(
    private_broker: RabbitMQ, private_vhost: VirtualHost
) -> None:
    """pika's own close would wait forever here."""
    setup = lambda server: publisher_setup([Queue("q")], server.version_tuple)  # noqa: E731
    with Recorded(private_vhost.url, setup) as recorded, Recorded(private_vhost.url, setup) as closed:
        recorded.client.wait_for("ready")
        closed.client.wait_for("ready")
        private_broker.alarm("memory")
        for blocked in (recorded, closed):
            blocked.publish("q")
            assert "memory" in blocked.client.wait_for("blocked")[0]
        assert ends(closed, 1.0)
        assert closed.client.names("read_finished", "acked")[-2:] == ["lost", "unblocked"]
        private_broker.clear_alarm("memory")
        recorded.client.wait_for("unblocked")
        recorded.client.wait_for("acked")


def test_a_connection_that_is_lost_is_not_blocked_any_more(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        proxy.inject("to_client", connection_blocked("low on disk"))
        assert recorded.client.wait_for("blocked") == ("low on disk",)
        proxy.cut()
        recorded.client.wait_for("ready", 2)
        assert recorded.client.names("read_finished") == ["ready", "blocked", "lost", "unblocked", "ready"]


def test_a_blocked_connection_is_exempt_from_connect_timeout(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A blocked connection answers nothing; a new one would be blocked as well."""
    proxy = fault_proxy(vhost.url)
    with Recorded(proxy.url, wait=QUICK, connect_timeout=0.5) as recorded:
        recorded.client.wait_for("ready")
        failed = len(recorded.client.all("failed"))  # this machine may be too busy to connect within the timeout
        proxy.inject("to_client", connection_blocked("low on memory"))
        recorded.client.wait_for("blocked")
        stop = proxy.rewrite(lambda _, frame: [] if frame.name == "channel.open-ok" else [frame], "to_client")
        recorded.publish("any", exchange="missing")
        recorded.client.wait_for("lost")
        much_later = threading.Event()
        recorded.call(lambda: recorded.io.call_later(1.3, much_later.set))
        assert much_later.wait(10)
        assert len(recorded.client.all("failed")) == failed
        proxy.inject("to_client", connection_unblocked())
        recorded.client.wait_for("failed", failed + 1)
        stop()
        recorded.client.wait_for("ready", 2)
        names = [name for name, _ in groupby(recorded.client.names("read_finished")[failed:])]
        assert names == ["ready", "blocked", "lost", "unblocked", "failed", "ready"]


def test_blocked_before_ready_is_reported_after_it(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)

    def setup(server: ServerInfo) -> SetupGenerator:
        proxy.inject("to_client", connection_blocked("early"))
        yield from publisher_setup([], server.version_tuple)

    with Recorded(proxy.url, setup) as recorded:
        recorded.client.wait_for("blocked")
        assert recorded.client.names("read_finished") == ["ready", "blocked"]


# -- exceptions in callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ready", "acked", "read_finished", "lost"])
def test_a_client_exception_costs_a_connection_not_the_thread(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    setup = lambda server: publisher_setup([Queue("q")], server.version_tuple)  # noqa: E731
    recorded = Recorded(vhost.url, setup, wait=QUICK)
    raised: list[int] = []

    def raise_once(*_: object) -> None:
        if not raised:
            raised.append(1)
            raise RuntimeError("a bug of the client")

    recorded.client.hooks[name] = raise_once
    with recorded, caplog.at_level(logging.ERROR, "reliable_mq"):
        recorded.client.wait_for("ready")
        if name == "acked":
            recorded.publish("q")
        elif name == "lost":
            recorded.call(lambda: recorded.io.discard("for the test"))
        recorded.client.wait_for("ready", 2)
        recorded.publish("q")
        recorded.client.wait_for("acked", 2 if name == "acked" else 1)
        assert recorded.io.callback_errors == 1
    errors = [record for record in caplog.records if record.name.startswith("reliable_mq") and record.exc_info]
    assert len(errors) == 1
    assert "ready lost ready" in " ".join(recorded.client.names("acked", "read_finished"))


def test_an_exception_of_a_queued_call_or_a_timer_skips_no_other(vhost: VirtualHost) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    ran: list[str] = []
    with Recorded(vhost.url, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        for number in range(3):
            recorded.io.call_soon(fail)
            recorded.io.call_soon(lambda number=number: ran.append(f"call {number}"))  # type: ignore[misc]
        recorded.client.wait_for("ready", 2)
        recorded.call(
            lambda: [
                recorded.io.call_later(0.1, fail),
                recorded.io.call_later(0.1, lambda: ran.append("timer")),
                recorded.io.call_later(0.1, lambda: ran.append("cancelled")).cancel(),
            ]
        )
        wait_until(lambda: "timer" in ran, timeout=20, what="the timer")
        recorded.client.wait_for("ready", 3)
        assert ran == ["call 0", "call 1", "call 2", "timer"]
        assert recorded.io.callback_errors == 4


def test_calls_queued_while_connections_die_all_run_once(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """They are queued with the loop.

    Callbacks queued with pika's connection would be lost with it.
    """
    proxy = fault_proxy(vhost.url)
    ran: list[int] = []
    count = 5000
    with Recorded(proxy.url, wait=QUICK) as recorded:
        recorded.client.wait_for("ready")
        for number in range(count):
            assert recorded.io.call_soon(lambda number=number: ran.append(number))  # type: ignore[misc]
            if number % 500 == 0:
                proxy.cut()
        recorded.io.stop()
        accepted = 0
        while recorded.io.call_soon(lambda: ran.append(-1)):
            accepted += 1
        assert recorded.io.join(10)
    assert [number for number in ran if number >= 0] == list(range(count))
    assert ran.count(-1) == accepted


# -- closing -----------------------------------------------------------------------------------------------------------


def test_it_closes_at_any_moment_of_connecting(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Whichever frame it waits for when closed, it ends at once with nothing open."""
    for frames in range(8):
        proxy = fault_proxy(vhost.url)
        if frames == 0:
            proxy.hang_connections()
        reached = swallow_from(proxy, frames)
        recorded = Recorded(proxy.url, lambda server: publisher_setup([Queue("q")], server.version_tuple))
        recorded.io.start()
        assert frames == 0 or reached.wait(10)
        assert ends(recorded, 0.3)
        assert recorded.client.names("read_finished") == []


def swallow_from(proxy: FaultProxy, frames: int) -> threading.Event:
    """Pass `frames` - 1 frames of the broker, and drop all later ones.

    The returned event is set by the first frame that is dropped.
    """
    reached = threading.Event()
    seen: list[Frame] = []

    def swallow(_: object, frame: Frame) -> list[Frame]:
        seen.append(frame)
        if len(seen) < frames:
            return [frame]
        reached.set()
        return []

    proxy.rewrite(swallow, "to_client")
    return reached


def test_it_closes_while_it_waits_and_after_it_gave_up(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    for stop in (None, tenacity.stop_after_attempt(1)):
        recorded = Recorded(proxy.url, wait=tenacity.wait_fixed(60), stop=stop)
        recorded.io.start()
        recorded.client.wait_for("failed")
        assert ends(recorded, 0)
        assert recorded.client.names() == ["failed"]


def test_it_closes_a_half_open_connection_within_its_grace(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    recorded = Recorded(proxy.url)
    recorded.io.start()
    recorded.client.wait_for("ready")
    proxy.black_hole()
    began = time.monotonic()
    assert ends(recorded, 0.5)
    assert time.monotonic() - began > 0.4
    assert recorded.client.names("read_finished") == ["ready", "lost"]


def test_closing_from_its_own_thread_does_not_wait_for_itself(vhost: VirtualHost) -> None:
    recorded = Recorded(vhost.url)
    recorded.io.start()
    recorded.client.wait_for("ready")
    assert recorded.call(lambda: recorded.io.close(5)) is False
    assert recorded.io.join(20)
    assert recorded.io.close(5)
    assert recorded.io.call_soon(lambda: None) is False


def test_it_is_closed_from_any_event(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)
    for name in ("ready", "lost", "failed"):
        recorded = Recorded(proxy.url, wait=QUICK)
        recorded.client.hooks[name] = lambda *_, recorded=recorded: recorded.io.stop()
        if name == "failed":
            proxy.refuse_connections()
        recorded.io.start()
        if name == "lost":
            recorded.client.wait_for("ready")
            proxy.cut()
        assert recorded.io.join(15)


def test_it_starts_once(vhost: VirtualHost) -> None:
    with Recorded(vhost.url) as recorded, pytest.raises(UsageError):
        recorded.io.start()
    never = Recorded(vhost.url)
    assert never.io.call_soon(lambda: None) is False
    assert never.io.join(0) is False
    assert never.io.close(0)
    with pytest.raises(UsageError):
        never.io.start()


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_no_log_of_ours_or_of_the_driver_holds_a_password(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture, connection_api: str
) -> None:
    """All loggers are at DEBUG through connect, refusal, reset, reconnect and close."""
    driver = "aiormq" if connection_api == "aio" else "pika"
    canary = "canary-0f7c9e"
    api = vhost.broker.management
    api.call("PUT", "users", "canary-user", body={"password": canary, "tags": ""})
    try:
        allowed = {"configure": ".*", "write": ".*", "read": ".*"}
        api.call("PUT", "permissions", vhost.name, "canary-user", body=allowed)
        proxy = fault_proxy(vhost.url.replace("guest:guest", f"canary-user:{canary}"))
        with caplog.at_level(logging.DEBUG):
            logging.getLogger(driver).setLevel(logging.DEBUG)
            with Recorded(proxy.url, wait=QUICK) as recorded:
                recorded.client.wait_for("ready")
                recorded.publish("any", exchange="missing")
                recorded.client.wait_for("ready", 2)
                proxy.cut()
                recorded.client.wait_for("ready", 3)
            with Recorded(proxy.url.replace(canary, f"{canary}-wrong"), wait=QUICK) as recorded:
                recorded.client.wait_for("failed")
    finally:
        logging.getLogger(driver).setLevel(logging.NOTSET)
        api.call("DELETE", "users", "canary-user")
    assert any(record.name.startswith(driver) and record.levelno == logging.DEBUG for record in caplog.records)
    formatter = logging.Formatter()
    assert not [text for text in map(formatter.format, caplog.records) if canary in text]
