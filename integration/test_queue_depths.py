"""`QueueDepths` on a real broker: queues that fill, disappear and come back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from reliable_mq import ConfigurationError, Consumer, DeadLetter, Message, Publisher, Queue, UsageError
from reliable_mq.monitoring import QueueDepths
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")


def scraped(registry: CollectorRegistry) -> Callable[..., float | None]:
    def value(queue: str, role: str = "queue", name: str = "messages") -> float | None:
        return registry.get_sample_value(f"reliable_mq_queue_{name}", {"queue": queue, "role": role})

    return value


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_the_depths_of_a_queue_and_of_its_dead_letter_queue_show(
    any_vhost: VirtualHost, registry: CollectorRegistry
) -> None:
    """The depths count ready messages and consumers."""
    value = scraped(registry)

    def fail(_delivery: object) -> None:
        raise DeadLetter("no")

    with Publisher(any_vhost.url, topology=[ORDERS]) as publisher:
        publisher.publish_many((Message(b"x") for _ in range(5)), routing_key="orders")
    with QueueDepths(any_vhost.url, [ORDERS], registry=registry, interval=0.05):
        wait_until(lambda: value("orders") == 5, timeout=20, what="5 messages")
        assert value("orders.dead", "dead_letters") == 0
        assert value("orders", name="consumers") == 0
        with Consumer(any_vhost.url, ORDERS, fail):
            wait_until(lambda: value("orders.dead", "dead_letters") == 5, timeout=30, what="5 dead letters")
            wait_until(lambda: value("orders", name="consumers") == 1, timeout=20, what="the consumer")
        wait_until(lambda: value("orders") == 0, timeout=20, what="an empty queue")
        assert value("orders", name="depth_failures_total") == 0
    assert value("orders") is None, "the gauges of a closed one go"


def test_a_queue_that_does_not_exist_spoils_no_other(
    vhost: VirtualHost, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gauge is missing, and the failures are counted and logged once.

    Once the queue is declared, its depth appears.
    """
    value = scraped(registry)
    with vhost.connect() as connection:
        connection.channel().queue_declare("there")
    with QueueDepths(vhost.url, ["missing", "there"], registry=registry, interval=0.05):
        wait_until(lambda: (value("missing", name="depth_failures_total") or 0) >= 3, timeout=20, what="failures")
        wait_until(lambda: value("there") == 0, timeout=20, what="the depth of the other")
        assert value("missing") is None
        with vhost.connect() as connection:
            connection.channel().queue_declare("missing")
        wait_until(lambda: value("missing") == 0, timeout=20, what="its depth")
        assert value("there", name="depth_failures_total") == 0
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "failed to get the depth of queue 'missing'" in told[0]


def test_a_user_who_may_only_read_may_measure(any_vhost: VirtualHost, registry: CollectorRegistry) -> None:
    value, user, api = scraped(registry), f"measures-{any_vhost.name}", any_vhost.broker.management
    any_vhost.add_user(user)
    api.call("PUT", "permissions", any_vhost.name, user, body={"configure": "^$", "write": "^$", "read": ".*"})
    with any_vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    url = any_vhost.url.replace("guest:guest@", f"{user}:{user}@")
    with QueueDepths(url, ["orders"], registry=registry, interval=0.05):
        wait_until(lambda: value("orders") == 0, timeout=20, what="the depth")
    api.call("DELETE", "users", user)


def test_it_goes_on_when_the_broker_is_back(
    vhost: VirtualHost, registry: CollectorRegistry, fault_proxy: FaultProxyFactory
) -> None:
    """Entering does not wait for the broker; during an outage there is no gauge."""
    value = scraped(registry)
    proxy = fault_proxy(vhost.url)
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders.dead")
    proxy.refuse_connections()
    with QueueDepths(proxy.url, ["orders.dead"], registry=registry, interval=0.05):
        failures = "orders.dead", "dead_letters", "depth_failures_total"
        wait_until(lambda: (value(*failures) or 0) > 0, timeout=20, what="a failure")
        assert value("orders.dead", "dead_letters") is None
        proxy.accept_connections()
        wait_until(lambda: value("orders.dead", "dead_letters") == 0, timeout=20, what="the depth")
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: value("orders.dead", "dead_letters") is None, timeout=20, what="no gauge")
        proxy.accept_connections()
        wait_until(lambda: value("orders.dead", "dead_letters") == 0, timeout=20, what="the depth again")


def test_wrong_arguments_are_refused(vhost: VirtualHost, registry: CollectorRegistry) -> None:
    for queues in ("orders", ORDERS, [], [""], [None]):
        with pytest.raises(ConfigurationError, match="queues must"):
            QueueDepths(vhost.url, queues, registry=registry)
    with pytest.raises(ConfigurationError, match="interval"):
        QueueDepths(vhost.url, [ORDERS], registry=registry, interval=0)
    with pytest.raises(ConfigurationError, match="registry"), QueueDepths(vhost.url, [ORDERS], registry=None):
        pass
    depths = QueueDepths(vhost.url, [ORDERS], registry=registry)
    with depths:
        pass
    with pytest.raises(UsageError, match="run once"), depths:
        pass
