"""A publisher's metrics in a scrape, compared with the events."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest
import tenacity
from prometheus_client import CollectorRegistry

from reliable_mq import ConfigurationError, Message, Publisher, PublishUnconfirmed, Queue, RetryPolicy
from reliable_mq.testing import connection_blocked, connection_unblocked
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)
BOUND = {"x-max-length": 1, "x-overflow": "reject-publish"}
FULL = Queue("full", type="classic", dead_letter=None, arguments=BOUND)
QUICK = tenacity.wait_fixed(0.05)


class Scrape:
    """Reads the metrics of one publisher from a registry."""

    def __init__(self, registry: CollectorRegistry, publisher: str = "publisher") -> None:
        self._registry = registry
        self._publisher = publisher

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(
            f"reliable_mq_publisher_{name}", {"publisher": self._publisher, **labels}
        )

    def settled(self) -> dict[str, float | None]:
        outcomes = ("confirmed", "nacked", "returned", "refused", "unknown")
        return {outcome: self("settled_total", outcome=outcome) for outcome in outcomes}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_scrape_shows_what_became_of_each_message(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, registry: CollectorRegistry
) -> None:
    """Every outcome and its causes are counted once."""
    scrape = Scrape(registry)
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(
        proxy.url,
        topology=[ORDERS, FULL],
        retry=RetryPolicy(max_attempts=2, delays=(0.01,)),
        reconnect_wait=QUICK,
        registry=registry,
    )
    assert scrape("connected") is None, "nothing is said of a publisher that was never opened"
    with publisher:
        assert publisher.publish_many((Message(b"x") for _ in range(100)), routing_key="orders").ok
        assert len(publisher.publish_many([Message(b"x")] * 4, routing_key="nowhere").failures) == 4
        assert len(publisher.publish_many([Message(b"x")] * 4, routing_key="full").failures) == 3
        assert len(publisher.publish_many([Message(b"x")] * 2, exchange="missing").failures) == 2
        assert scrape.settled() == {"confirmed": 101, "nacked": 3, "returned": 4, "refused": 2, "unknown": 0}
        assert scrape("nacks_total") == 6
        assert scrape("confirm_seconds_count") == 101
        wait_until(lambda: scrape("connected") == 1, timeout=10, what="the channel after that of the missing exchange")
        assert scrape("reconnects_total") == 0, "the connection has lived on"
        assert scrape("outstanding") == scrape("outstanding_oldest_age_seconds") == 0

        proxy.hold_confirms()
        in_doubt, republished = scrape("in_doubt_total"), scrape("republished_total")
        confirmations = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
        proxy.wait_for(lambda: proxy.held_confirms >= 1)
        with pytest.raises(PublishUnconfirmed):
            publisher.publish(Message(b"x"), routing_key="orders", timeout=0.3)
        assert scrape("outstanding") == 10
        assert 0.3 < scrape("outstanding_oldest_age_seconds") < 10
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: scrape("connected") == 0, timeout=10, what="the loss to show")
        assert scrape("reconnects_total") == 0, "lost, and not made again"
        proxy.heal()
        for confirmation in confirmations:
            confirmation.result(20)
        assert scrape("in_doubt_total") == in_doubt + 10
        assert scrape("republished_total") == republished + 10
        assert scrape("reconnects_total") == 1
        assert scrape.settled() == {"confirmed": 111, "nacked": 3, "returned": 4, "refused": 2, "unknown": 1}
    assert scrape("connected") is None, "the gauges of a closed publisher go"
    assert scrape("reconnects_total") == 1, "closing is no reconnect"
    assert scrape("settled_total", outcome="confirmed") == 111, "its counters stay"


def test_a_scrape_shows_the_blocked_state_and_its_time(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, registry: CollectorRegistry
) -> None:
    """The blocked time grows during the block and remains afterwards."""
    scrape = Scrape(registry)
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], registry=registry) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        assert (scrape("blocked"), scrape("blocked_seconds_total")) == (0, 0)
        proxy.inject("to_client", connection_blocked("low on memory"))
        wait_until(lambda: scrape("blocked") == 1, timeout=10, what="the blocked state")
        wait_until(lambda: scrape("blocked_seconds_total") > 0.2, timeout=10, what="blocked time")
        proxy.inject("to_client", connection_unblocked())
        wait_until(lambda: scrape("blocked") == 0, timeout=10, what="the end of it")
        total = scrape("blocked_seconds_total")
        publisher.publish(Message(b"x"), routing_key="orders")
        assert scrape("blocked_seconds_total") == total > 0.2


def test_two_publishers_share_a_registry(vhost: VirtualHost, registry: CollectorRegistry) -> None:
    """Different names are separate; counts of one name are added up.

    Counts of closed publishers are kept.
    """

    def publish(name: str, count: int) -> None:
        with Publisher(vhost.url, topology=[ORDERS], registry=registry, name=name) as publisher:
            assert publisher.publish_many((Message(b"x") for _ in range(count)), routing_key="orders").ok

    orders, invoices = Scrape(registry, "orders"), Scrape(registry, "invoices")
    with (
        Publisher(vhost.url, topology=[ORDERS], registry=registry, name="orders") as first,
        Publisher(vhost.url, topology=[ORDERS], registry=registry, name="orders") as second,
        Publisher(vhost.url, topology=[ORDERS], registry=registry, name="invoices") as third,
    ):
        for number, publisher in enumerate((first, second, third), 1):
            publisher.publish_many((Message(b"x") for _ in range(number)), routing_key="orders")
        assert (orders.settled()["confirmed"], invoices.settled()["confirmed"]) == (3, 3)
        assert (orders("connected"), invoices("connected")) == (1, 1)  # 0 as soon as one publisher of the name is not
    publish("orders", 5)
    assert orders.settled()["confirmed"] == 8


def test_a_publisher_never_opened_shows_counters_at_0(vhost: VirtualHost, registry: CollectorRegistry) -> None:
    """It shows no gauges; an invalid registry is refused."""
    publisher, scrape = Publisher(vhost.url, registry=registry), Scrape(registry)
    assert set(scrape.settled().values()) == {0}
    publisher.close()
    assert {sample.value for metric in registry.collect() for sample in metric.samples} == {0}
    assert scrape("connected") is None
    with pytest.raises(ConfigurationError, match="registry"):
        Publisher(vhost.url, registry="default")


def test_an_outage_is_logged_once_per_attempt_in_our_words(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """There is a line for the loss and for each failed attempt, without tracebacks.

    The driver logs nothing.
    """
    caplog.set_level(logging.INFO)
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        publisher.connect()
        caplog.clear()
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: len(caplog.records) >= 6, timeout=10, what="failed attempts")
        proxy.accept_connections()
        publisher.publish(Message(b"x"), routing_key="orders")
        lines = [record.getMessage() for record in caplog.records]
    assert {record.name.partition(".")[0] for record in caplog.records} == {"reliable_mq"}
    assert not any(record.exc_info for record in caplog.records)
    assert "connection lost" in lines[0]
    assert all("Connection refused; next attempt in" in line for line in lines[1:-1])
    assert "connected again to" in lines[-1]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}, "the end is seen where the loss is"


def test_failures_that_nobody_waits_for_are_logged_now_and_then(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of failures give one or two lines, and an error with the total.

    There is one more for every ten seconds that it takes.
    """
    publisher = Publisher(vhost.url)
    publisher.connect()
    caplog.clear()
    began = time.monotonic()
    for _ in range(5000):
        publisher.submit(Message(b"x"), routing_key="nowhere")
    with pytest.raises(Exception, match="5000 messages were not confirmed") as caught:
        publisher.close()
    assert len(caught.value.failures) == 100
    lines = [record.getMessage() for record in caplog.records if "no caller waits for" in record.getMessage()]
    assert 1 <= len(lines) <= 2 + (time.monotonic() - began) // 10
