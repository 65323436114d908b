"""Token renewal on open connections, in either API.

The callback raises or hangs, the broker blocks the connection, or the token expires.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from reliable_mq import BrokerUnavailable, Message, Queue, RetryPolicy
from reliable_mq.codec.methods import UPDATE_SECRET, CheckQueue, QueueState
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.scripted_broker import Channel, Published, ScriptedBroker

NewPublisher = NewConsumer = "Callable[..., Any]"
ORDERS = Queue("orders", type="classic", dead_letter=None)

LIFETIME = 1.5  # seconds; a token is renewed after one


def acking(published: Published) -> None:
    published.channel.ack(published.number)


class Issuer:
    """A callback that is called at each connect, and before a token expires."""

    def __init__(self) -> None:
        self.calls = 0
        self.next: Callable[[], object] | None = None  # called instead of the first renewal

    def __call__(self) -> Credentials:
        self.calls += 1
        if self.calls > 1 and (behave := self.next) is not None:
            self.next = None
            behave()
        return Credentials("guest", f"token {self.calls}", expires_in=LIFETIME)

    def hang(self) -> tuple[threading.Event, threading.Event]:
        """Let the first renewal hang.

        Return the event that is set when it hangs, and the event that releases it.
        """
        hangs, release = threading.Event(), threading.Event()

        def hang() -> None:
            hangs.set()
            release.wait(60)

        self.next = hang
        return hangs, release


def expired(access: str) -> tuple[int, str]:
    """Return RabbitMQ's refusal of a method once the token has expired."""
    return 403, (
        f"ACCESS_REFUSED - {access} in vhost '/' refused for user 'guest', backend rabbit_auth_backend_oauth2 returned "
        'an error: "Provided JWT token has expired at timestamp 1795730978 (validated at 1795730978)"'
    )


def renewals(broker: ScriptedBroker) -> int:
    return broker.seen.count("Connection.UpdateSecret")


@pytest.mark.slow
def test_a_raising_callback_is_called_again_without_a_reconnect(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: Any
) -> None:
    def away() -> None:
        raise OSError("the authorization server is away")

    broker.script = acking
    issuer = Issuer()
    issuer.next = away
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=issuer) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
        connection = broker.connection
        broker.wait(lambda: renewals(broker) >= 1, "a renewal after the failure")
        publisher.publish(Message(b"2"), routing_key="orders", timeout=20)
        assert broker.connection is connection
    assert "the credentials callback raised OSError" in caplog.text


@pytest.mark.slow
def test_a_hanging_callback_blocks_nothing_and_is_called_again(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    issuer = Issuer()
    hangs, release = issuer.hang()
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=issuer, connect_timeout=2) as publisher:
        try:
            publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
            connection = broker.connection
            assert hangs.wait(20)
            publisher.publish(Message(b"2"), routing_key="orders", timeout=20)
            broker.wait(lambda: renewals(broker) >= 1, "a renewal while the first call hangs")
        finally:
            release.set()
        publisher.publish(Message(b"3"), routing_key="orders", timeout=20)
        assert broker.connection is connection


@pytest.mark.slow
def test_a_reconnect_does_not_wait_for_an_earlier_renewal_call(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: Any
) -> None:
    """The next connection calls the callback itself, in its first attempt."""
    broker.script = acking
    issuer = Issuer()
    hangs, release = issuer.hang()
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=issuer, connect_timeout=60) as publisher:
        try:
            publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
            assert hangs.wait(20)
            broker.connection.cut()
            wait_until(lambda: not publisher.connected, timeout=20, what="the loss of the connection")
        finally:
            release.set()
        publisher.publish(Message(b"2"), routing_key="orders", timeout=20)
    assert "not ready within" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("refused", [True, False])
def test_a_refused_token_is_told_from_another_end(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """The connection ends while a new token is on its way. The next connection takes another one."""
    broker.script = acking
    broker.secrets_unanswered = True
    issuer = Issuer()
    with new_publisher(f"amqp://127.0.0.1:{broker.port}/", credentials=issuer, name="shop") as publisher:
        publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
        broker.wait(lambda: renewals(broker) == 1, "a renewal")
        assert issuer.calls == 2
        over = UPDATE_SECRET if refused else (0, 0)
        broker.connection.close(530, "NOT_ALLOWED - vhost '/' was deleted or the secret was refused", over)
        broker.wait(lambda: issuer.calls == 3, "a new token")
        publisher.publish(Message(b"2"), routing_key="orders", timeout=20)
    assert ("the broker refused the renewed token and closed the connection: 530" in caplog.text) is refused


@pytest.mark.slow
def test_an_unanswered_renewal_waits_while_the_broker_blocks(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """RabbitMQ does not read from a blocked connection, so it answers later."""
    broker.script = acking
    broker.secrets_unanswered = True
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=Issuer(), connect_timeout=1) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders", timeout=20)
        connection = broker.connection
        connection.block("low on memory")
        broker.wait(lambda: renewals(broker) >= 1, "a renewal")
        waiting = publisher.submit(Message(b"2"), routing_key="orders", timeout=60)
        over = threading.Event()
        timer = threading.Timer(2.5, over.set)  # more than twice the timeout of an answer
        timer.start()
        assert over.wait(60)
        timer.join()
        assert broker.connection is connection
        connection.unblock()
        assert waiting.exception(60) is None
        broker.wait(lambda: broker.connection is not connection, "another one, as no answer comes")
        broker.secrets_unanswered = False


@pytest.mark.slow
def test_a_consumer_counts_the_renewals_of_both_its_connections(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """The first one consumes, and its token does not expire. The second one publishes retries."""
    broker.script = acking
    registry = CollectorRegistry()
    lifetimes = iter([None])

    def credentials() -> Credentials:
        return Credentials("guest", "token", expires_in=next(lifetimes, LIFETIME))

    def fail(_: object) -> None:
        raise RuntimeError("try again")

    def accepted() -> float:
        labels = {"consumer": "billing", "queue": "orders", "outcome": "accepted"}
        return registry.get_sample_value("reliable_mq_consumer_token_renewals_total", labels) or 0.0

    options = {"retry": RetryPolicy(2, delays=(60,)), "registry": registry, "name": "billing"}
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_consumer(fail, ORDERS, url=url, credentials=credentials, **options):
        broker.consuming.deliver(b"x")
        wait_until(lambda: accepted() >= 1, timeout=20, what="a counted renewal")


def test_an_expired_token_refuses_no_message(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """RabbitMQ 4.0 does not disconnect then, and refuses every publish."""

    def script(published: Published) -> None:
        if len(broker.connections) == 1:
            published.channel.close(*expired("write access to exchange 'amq.default'"))
        else:
            acking(published)

    broker.script = script
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=lambda: ("guest", f"token {len(broker.connections)}")) as publisher:
        assert publisher.publish(Message(b"x"), routing_key="orders", timeout=20).status == "confirmed"
        assert len(broker.connections) == 2


class Renewing:
    """A callback whose current token expires when the test says so."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.calls = 0
        self._broker = broker

    def __call__(self) -> tuple[str, str]:
        self.calls += 1
        self._broker.refusals.clear()
        return "guest", f"token {self.calls}"

    def expire(self, channel: Channel, method: str, access: str) -> None:
        """Have the broker close a channel, and refuse a method until the next call."""
        self._broker.refusals[method] = expired(access)
        channel.close(404, "NOT_FOUND - no exchange 'gone' in vhost '/'")


def test_a_set_up_with_an_expired_token_gets_another_one(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """A channel on the same connection would be refused again."""
    broker.script = acking
    credentials = Renewing(broker)
    url = f"amqp://127.0.0.1:{broker.port}/"
    with new_publisher(url, credentials=credentials, topology=[ORDERS]) as publisher:
        publisher.connect()
        (channel,) = broker.connection.channels.values()
        credentials.expire(channel, "Queue.Declare", "configure access to queue 'orders'")
        broker.wait(lambda: credentials.calls == 2, "another token")
        publisher.publish(Message(b"x"), routing_key="orders", timeout=20)
        assert credentials.calls == 2


def test_a_consumer_with_an_expired_token_gets_another_one(broker: ScriptedBroker, new_consumer: NewConsumer) -> None:
    credentials = Renewing(broker)
    with new_consumer(lambda _: None, url=f"amqp://127.0.0.1:{broker.port}/", credentials=credentials):
        credentials.expire(broker.consuming, "Basic.Consume", "read access to queue 'orders'")
        broker.wait(lambda: broker.seen.count("Basic.Consume") == 3 and broker.consumed, "another subscription")
        assert credentials.calls == 2


def test_steps_of_a_ready_channel_do_not_see_an_expired_token(broker: ScriptedBroker) -> None:
    """The next step gets another connection."""
    credentials = Renewing(broker)
    settings = ConnectionSettings(endpoints=(Endpoint("127.0.0.1", broker.port),), credentials=credentials)
    with AdminChannel(settings, name="admin") as channel:
        broker.refusals["Queue.Declare"] = expired("read access to queue 'orders'")
        with pytest.raises(BrokerUnavailable, match="the broker cannot check a permission: 403 ACCESS_REFUSED"):
            channel.perform(CheckQueue("orders"))
        assert channel.perform(CheckQueue("orders")) == QueueState("orders", 0, 0)
        assert credentials.calls == 2
