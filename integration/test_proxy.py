"""The fault proxy between a client and a real broker: both see its faults."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pika
import pika.exceptions
import pytest

from reliable_mq.testing import Cut, basic_ack, channel_close, connection_blocked, connection_unblocked
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pika.adapters.blocking_connection import BlockingChannel

    from reliable_mq.testing import Direction, FaultProxy, FaultProxyFactory, Frame, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")


@pytest.fixture
def proxy(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> FaultProxy:
    return fault_proxy(vhost.url)


@pytest.fixture
def connect(proxy: FaultProxy) -> Iterator[Callable[[], pika.BlockingConnection]]:
    """Yield a function that connects through the proxy; close the connections."""
    made: list[pika.BlockingConnection] = []

    def connect() -> pika.BlockingConnection:
        parameters = pika.URLParameters(proxy.url)
        parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 20
        made.append(pika.BlockingConnection(parameters))
        return made[-1]

    yield connect
    proxy.heal()
    for connection in made:
        with suppress(pika.exceptions.AMQPError):
            connection.close()


@pytest.fixture
def channel(connect: Callable[[], pika.BlockingConnection]) -> BlockingChannel:
    """A channel in confirm mode, with a durable queue `orders`."""
    channel = connect().channel()
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    channel.confirm_delivery()
    return channel


def publish_in_background(channel: BlockingChannel, body: bytes) -> Callable[[], BaseException | None]:
    """Publish with confirm in a thread; return a call that waits for the outcome."""
    outcome: list[BaseException | None] = []

    def publish() -> None:
        try:
            channel.basic_publish("", "orders", body)
        except pika.exceptions.AMQPError as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=publish)
    thread.start()

    def wait() -> BaseException | None:
        thread.join(30)
        assert not thread.is_alive()
        return outcome[0]

    return wait


def test_without_a_fault_the_proxy_is_not_there(
    vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel
) -> None:
    bodies = [b"", b"small", bytes(1_000_000), *(b"%d" % number for number in range(200))]
    for body in bodies:
        channel.basic_publish("", "orders", body)
    received = [body for _, _, body in (channel.basic_get("orders", auto_ack=True) for _ in bodies)]
    assert received == bodies
    assert proxy.seen("basic.publish") == proxy.forwarded("basic.publish") == len(bodies)
    assert proxy.seen("basic.get-ok", "to_client") == len(bodies)
    assert proxy.seen() == proxy.forwarded()
    assert proxy.seen("tx.select") == 0


def test_a_held_confirm_is_of_a_message_that_the_broker_has(
    vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel
) -> None:
    proxy.hold_confirms()
    wait = publish_in_background(channel, b"once")
    proxy.wait_for(lambda: proxy.held_confirms == 1)
    vhost.wait_for_messages("orders", 1)
    proxy.release_confirms()
    assert wait() is None

    proxy.hold_confirms()
    wait = publish_in_background(channel, b"twice")
    proxy.wait_for(lambda: proxy.held_confirms == 1)
    vhost.wait_for_messages("orders", 2)
    proxy.cut()
    assert isinstance(wait(), pika.exceptions.AMQPConnectionError)
    assert proxy.held_confirms == 0


def test_a_held_return_keeps_its_content(proxy: FaultProxy, channel: BlockingChannel) -> None:
    proxy.hold_confirms()
    released = threading.Thread(
        target=lambda: (proxy.wait_for(lambda: proxy.held_confirms == 2), proxy.release_confirms())
    )
    released.start()
    with pytest.raises(pika.exceptions.UnroutableError) as caught:
        channel.basic_publish("", "nobody", b"come back", mandatory=True)
    released.join(30)
    assert [message.body for message in caught.value.messages] == [b"come back"]


def test_dropped_confirms_leave_the_publisher_waiting(
    vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel
) -> None:
    proxy.drop_confirms()
    wait = publish_in_background(channel, b"x")
    vhost.wait_for_messages("orders", 1)
    proxy.wait_for(lambda: proxy.seen("basic.ack", "to_client") == 1)
    assert proxy.forwarded("basic.ack") == 0
    proxy.cut(reset=False)
    assert isinstance(wait(), pika.exceptions.AMQPConnectionError)


def test_a_message_cut_in_its_body_is_not_stored(
    vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel
) -> None:
    channel.basic_publish("", "orders", b"whole")
    proxy.cut_in_body(0.5, nth=2)
    wait = publish_in_background(channel, bytes(300_000))  # three body frames
    assert isinstance(wait(), pika.exceptions.AMQPConnectionError)
    vhost.wait_for_messages("orders", 1)


def test_cut_after_the_nth_publish(vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel) -> None:
    proxy.cut_after(3, "to_client", of="basic.ack")
    confirmed = 0
    with suppress(pika.exceptions.AMQPConnectionError):
        for _ in range(10):
            channel.basic_publish("", "orders", b"x")
            confirmed += 1
    assert confirmed in (2, 3)  # the client may see the reset before it reads the third ack
    assert proxy.forwarded("basic.ack") == 3
    vhost.wait_for_messages("orders", 3)


def test_a_double_ack_from_outside_closes_the_channel_with_406(proxy: FaultProxy, channel: BlockingChannel) -> None:
    channel.basic_publish("", "orders", b"x")
    method, _, _ = channel.basic_get("orders")
    channel.basic_ack(method.delivery_tag)
    proxy.inject("to_broker", basic_ack(channel.channel_number, method.delivery_tag))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="unknown delivery tag 1") as caught:
        channel.queue_declare("orders", passive=True)
    assert caught.value.reply_code == 406


def test_the_clients_own_ack_doubled_closes_the_channel_with_406(proxy: FaultProxy, channel: BlockingChannel) -> None:
    channel.basic_publish("", "orders", b"x")
    method, _, _ = channel.basic_get("orders")
    remove = proxy.rewrite(lambda _, frame: [frame, frame] if frame.name == "basic.ack" else [frame], "to_broker")
    channel.basic_ack(method.delivery_tag)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="406"):
        channel.queue_declare("orders", passive=True)
    remove()


def test_a_channel_close_put_in_reaches_the_client(proxy: FaultProxy, channel: BlockingChannel) -> None:
    # The broker does not know of the close, so the client's answer is turned into a close that the broker can answer.
    def answer(_: Direction, frame: Frame) -> list[Frame]:
        return [channel_close(frame.channel, 200, "bye")] if frame.name == "channel.close-ok" else [frame]

    proxy.rewrite(answer, "to_broker")
    proxy.rewrite(lambda _, frame: [] if frame.name == "channel.close-ok" else [frame], "to_client")
    proxy.inject("to_client", channel_close(channel.channel_number, 404, "gone"))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="gone"):
        channel.queue_declare("orders", passive=True)
    proxy.wait_for(lambda: proxy.seen("channel.close-ok", "to_client") == 1)  # the number is free for the broker, too
    channel.connection.channel().queue_declare("orders", passive=True)


def test_blocked_put_in_reaches_the_client(proxy: FaultProxy, channel: BlockingChannel) -> None:
    seen: list[str] = []
    channel.connection.add_on_connection_blocked_callback(lambda _, frame: seen.append(frame.method.reason))
    channel.connection.add_on_connection_unblocked_callback(lambda *_: seen.append("unblocked"))
    proxy.inject("to_client", connection_blocked("low on patience"))
    proxy.inject("to_client", connection_unblocked())
    wait_until(lambda: channel.connection.process_data_events(0.1) or len(seen) == 2, timeout=20, what="both callbacks")
    assert seen == ["low on patience", "unblocked"]


def test_what_a_black_hole_took_arrives_when_it_is_healed(
    vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel
) -> None:
    proxy.black_hole("to_broker")
    wait = publish_in_background(channel, b"late")
    proxy.wait_for(lambda: proxy.seen("basic.publish") == 1)
    vhost.wait_for_messages("orders", 0)
    proxy.heal()
    assert wait() is None
    vhost.wait_for_messages("orders", 1)


def test_a_client_that_dies_unseen_keeps_its_exclusive_queue(
    proxy: FaultProxy, connect: Callable[[], pika.BlockingConnection]
) -> None:
    connect().channel().queue_declare("mine", exclusive=True)
    proxy.cut(side="client")
    other = connect()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="405") as caught:
        other.channel().queue_declare("mine", exclusive=True)
    assert caught.value.reply_code == 405
    other.close()
    proxy.heal()

    def declared() -> bool:
        with suppress(pika.exceptions.ChannelClosedByBroker):
            connect().channel().queue_declare("mine", exclusive=True)
            return True
        return False

    wait_until(declared, timeout=20, what="the broker has let go of the queue")


def test_refused_and_hung_connections(proxy: FaultProxy, connect: Callable[[], pika.BlockingConnection]) -> None:
    proxy.refuse_connections()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connect()
    proxy.hang_connections()
    connecting = threading.Thread(target=connect)
    connecting.start()
    proxy.wait_for(lambda: proxy.connections == 1)
    assert proxy.live_connections == 0
    proxy.accept_connections()
    connecting.join(20)
    assert not connecting.is_alive()
    assert proxy.live_connections == 1


def test_slow_line_only_makes_it_slow(vhost: VirtualHost, proxy: FaultProxy, channel: BlockingChannel) -> None:
    proxy.delay(0.05, jitter=0.04)
    proxy.throttle(500_000)
    for number in range(5):
        channel.basic_publish("", "orders", bytes(number * 10_000))
    vhost.wait_for_messages("orders", 5)
    assert proxy.connections == 1


def test_rewrite_may_cut_where_it_likes(proxy: FaultProxy, channel: BlockingChannel) -> None:
    proxy.rewrite(lambda _, frame: [Cut()] if frame.name == "header" else [frame], "to_broker")
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        channel.basic_publish("", "orders", b"x")
    assert proxy.live_connections == 0
