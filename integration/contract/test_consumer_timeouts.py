"""The broker's consumer timeout: a hanging handler is logged and bounded.

The consumer continues to consume.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from integration.support.consuming import Gate, Handler, dead_letters, send
from reliable_mq import Consumer, Message, Queue, RetryPolicy
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import Audit, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")
TIMEOUT = 3.0  # seconds
PREFIX = "x-reliable-mq-"
PERSISTENT = b"\x10\x00\x02"  # properties with only a delivery mode


@pytest.fixture
def impatient(any_vhost: VirtualHost) -> Iterator[VirtualHost]:
    """A virtual host with a short consumer timeout that the broker checks often.

    Before 4.3, a channel checks the timeout only once a minute.
    """
    broker: RabbitMQ = any_vhost.broker
    policy = {"pattern": ".*", "definition": {"consumer-timeout": int(TIMEOUT * 1000)}, "apply-to": "queues"}
    broker.management.call("PUT", "policies", any_vhost.name, "impatient", body=policy)
    usual = broker.evaluate("application:get_env(rabbit, channel_tick_interval, 60000)")  # channels need a value
    broker.evaluate("application:set_env(rabbit, channel_tick_interval, 250)")
    yield any_vhost
    broker.evaluate(f"application:set_env(rabbit, channel_tick_interval, {usual})")


def test_f26_a_message_that_hangs_is_bounded_and_neighbours_flow(
    impatient: VirtualHost, checker: Audit, caplog: pytest.LogCaptureFixture
) -> None:
    """Each timeout is a failed attempt; after ``max_attempts``, it is dead-lettered.

    The dead letter gives the timeout as the exception.
    """
    vhost = impatient
    with Gate(lambda delivery: delivery.body == b"hangs") as gate:
        handler = Handler(then=gate, account=checker)
        retry = RetryPolicy(2, delays=(0.1,))
        with Consumer(vhost.url, ORDERS, handler, concurrency=4, retry=retry, consumer_timeout=TIMEOUT) as consumer:
            send(vhost, "orders", [Message(b"hangs", message_id="hangs")], checker)
            send(vhost, "orders", [Message(b"%d" % number) for number in range(20)], checker)
            wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=30, what="dead-lettered")
            wait_until(lambda: consumer.connected, timeout=10, what="subscribed again")
            send(vhost, "orders", [Message(b"%d" % number) for number in range(20, 40)], checker)
            handler.wait_done(40)
            assert consumer.statistics.overdue == consumer.statistics.timed_out == 2
            assert consumer.reconnects == 0
            stale = consumer.statistics.stale
            gate.open()
            wait_until(lambda: consumer.statistics.stale == stale + 2, timeout=10, what="late results dropped")
    attempts = [number for one, number in zip(handler.begun, handler.attempts, strict=True) if one.body == b"hangs"]
    assert attempts == [1, 2]
    assert len(handler.begun) == 40 + 2
    assert "message 'hangs' of queue 'orders', for 2.25 s; the broker requeues" in caplog.text
    [dead] = dead_letters(vhost, "orders.dead", 1)
    headers = dead["properties"]["headers"]
    assert (headers[PREFIX + "attempts"], headers[PREFIX + "exception-type"]) == (2, "TimeoutError")
    assert headers[PREFIX + "dead-letter-reason"] == "2 of 2 attempts failed"
    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])
    checker.close()


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_f26_returns_bound_a_hanging_message_without_an_id(impatient: VirtualHost) -> None:
    """After two timeouts it is moved to quarantine, where each is a failed attempt.

    The consumer cannot count the attempts of a message without an id.
    """
    handler = Handler(then=lambda _: time.sleep(2 * TIMEOUT))
    retry = RetryPolicy(2, delays=(0.1,))
    with Consumer(impatient.url, ORDERS, handler, concurrency=4, retry=retry, consumer_timeout=TIMEOUT) as consumer:
        send(impatient, "orders", [Message.from_wire(b"hangs", PERSISTENT)])
        wait_until(lambda: consumer.statistics.dead_lettered == 1, timeout=60, what="dead-lettered")
        assert consumer.statistics.quarantined == 1
    assert len(handler.begun) <= 2 + 2
