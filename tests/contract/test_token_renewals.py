"""Token renewal on open connections, in either API.

The callback raises or hangs, or the broker blocks the connection.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq import Message
from reliable_mq.settings import Credentials
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.scripted_broker import Published, ScriptedBroker

NewPublisher = "Callable[..., Any]"

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
