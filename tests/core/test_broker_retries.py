"""The broker's delayed retry: failures are rejected, and its count is used."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq import ConfigurationError, Queue, RetryPolicy, TopologyMismatch
from reliable_mq.codec import encode_reject
from reliable_mq.codec.methods import Consume, DeclareQueue, SetPrefetch
from reliable_mq.core.channel_setup import ServerInfo, declare, publisher_setup
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.quarantine import failures_by_broker
from reliable_mq.engine.consumer_options import ConsumerOptions
from tests.core.deliveries import BROKEN_TABLE, delivery
from tests.core.sessions import CHANNEL, deliver, fail, items, make, only_republish
from tests.core.steps import steps_of

DELAYED = Queue("orders", delayed_retry=(1, 60))


def counted(failed: int, returned: int, tag: int = 1) -> Delivery:
    return delivery(tag, redelivered=True, headers={"x-delivery-count": failed, "x-acquired-count": returned})


def test_a_failure_is_rejected_back_to_the_queue_that_counts() -> None:
    session = make(broker_retries=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=3600)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 1, requeue=True)
    assert (session.held, session.drained, session.statistics.rejected, session.statistics.retried) == (0, True, 0, 1)
    [again] = deliver(session, [counted(1, 1, tag=2)])
    assert again.attempt == 2


def test_what_a_stopped_consumer_requeued_has_not_failed() -> None:
    """The broker counts the delivery as returned, not as failed."""
    [again] = deliver(make(broker_retries=True), [counted(0, 1)])
    assert again.attempt == 1


def test_the_last_attempt_is_dead_lettered_as_ever() -> None:
    """This also holds for another process, which only knows the broker's count."""
    session = make(broker_retries=True)
    [last] = deliver(session, [counted(2, 5)])
    assert last.attempt == 3
    fail(session, last)
    assert only_republish(session).reason == "3 of 3 attempts failed"
    assert deliver(make(broker_retries=True), [counted(3, 3)]) == []


@pytest.mark.parametrize(
    ("table", "believed"),
    [
        ({"x-delivery-count": 2, "x-acquired-count": 3}, 2),
        ({"x-delivery-count": 99, "x-acquired-count": 1}, 1),
        ({"x-delivery-count": 99}, 0),
        ({"x-delivery-count": "99", "x-acquired-count": 2}, 0),
        (BROKEN_TABLE, 0),
    ],
)
def test_a_count_that_only_a_client_can_send_is_not_believed(table: Any, believed: int) -> None:
    assert failures_by_broker(delivery(headers=table)) == believed


def test_a_first_delivery_has_no_count() -> None:
    [item] = deliver(make(broker_retries=True), [delivery(headers={"x-delivery-count": 9, "x-acquired-count": 9})])
    assert item.attempt == 1


def options(queue: Queue | str, **given: Any) -> ConsumerOptions:
    return ConsumerOptions("amqp://guest:guest@localhost/", queue, print, name="c", **given)


def declared(made: ConsumerOptions, version: str = "4.3.6") -> list[str]:
    server = ServerInfo.of({"product": "RabbitMQ", "version": version})
    return [step.name for step in steps_of(made.setup(server, "tag", None)) if isinstance(step, DeclareQueue)]


def test_nothing_is_declared_beside_a_queue_that_retries_itself() -> None:
    assert declared(options(DELAYED)) == ["orders.dead", "orders"]
    assert declared(options(DELAYED, retry=RetryPolicy(backend="broker"))) == ["orders.dead", "orders"]
    assert "orders.quarantine" in declared(options(DELAYED, retry=RetryPolicy(backend="memory")))


@pytest.mark.parametrize("queue", [Queue("orders"), "orders"])
def test_the_backend_needs_the_queue(queue: Queue | str) -> None:
    with pytest.raises(ConfigurationError, match="delayed_retry"):
        options(queue, retry=RetryPolicy(backend="broker"))


@pytest.mark.parametrize("version", [(4, 0, 5), (4, 2)])
def test_a_broker_too_old_for_delayed_retries_is_refused(version: tuple[int, ...]) -> None:
    with pytest.raises(TopologyMismatch, match=r"RabbitMQ knows from 4\.3 on"):
        list(publisher_setup([DELAYED], version))
    assert list(publisher_setup([DELAYED], (4, 3)))


def test_a_return_that_was_no_failure_costs_no_attempt() -> None:
    """The message was requeued, so the broker does not count a failure."""
    [item] = deliver(make(broker_retries=True), [delivery(redelivered=True)])
    assert item.attempt == 1


def test_a_kill_switch_is_one() -> None:
    with pytest.raises(ConfigurationError, match="kill_switch must be a KillSwitch"):
        options("orders", kill_switch=True)


def test_what_a_consumer_needs_beside_its_connection() -> None:
    """A consumer may need a publisher, and a subscription to quarantine."""
    plain, named = options(Queue("orders")), options("orders")
    assert (plain.republishes, plain.has_quarantine) == (True, True)
    assert (named.republishes, named.has_quarantine) == (False, False)
    assert list(plain.subscribe_to_quarantine()) == [SetPrefetch(1), Consume("orders.quarantine", "c#quarantine")]
    assert list(named.subscribe_to_quarantine()) == []


def test_one_queue_is_declared_on_a_channel_in_use() -> None:
    [step] = declare(Queue("orders.retry.100", dead_letter="orders", message_ttl=0.1), (4, 3))
    assert isinstance(step, DeclareQueue)
    assert step.name == "orders.retry.100"
