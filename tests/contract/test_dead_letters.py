"""A dead-letter queue whose connection is lost, or is not open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.deadletters import channel as channel_module
from reliable_mq.deadletters.channel import GetChannel
from reliable_mq.errors import StaleDelivery, UsageError
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from tests.contract.scripted_broker import ScriptedBroker

QUEUE = "orders.dead"


def test_what_a_lost_channel_held_awaits_no_other_channel(broker: ScriptedBroker) -> None:
    """RabbitMQ has requeued it, so there is nothing to ack, and nothing to requeue."""
    broker.ready.append(b"1")
    with GetChannel(parse_url(broker.url), QUEUE, name="test") as channel:
        channel._stop.patience = 5.0
        (taken,) = channel.take(1)
        broker.stop()
        wait_until(lambda: channel._loss, timeout=20, what="the loss")
        with pytest.raises(StaleDelivery):
            channel.ack([taken])
        channel.finish()
        assert channel._error is None, "it has waited until reconnecting failed"


def test_a_consumer_lost_in_a_batch_awaits_no_other_channel(broker: ScriptedBroker) -> None:
    """It has ended with its channel, so there is nothing to cancel."""
    broker.ready += [b"1", b"never delivered"]
    with GetChannel(parse_url(broker.url), QUEUE, name="test") as channel, ThreadPoolExecutor(1) as pool:
        channel._stop.patience = 5.0
        channel.by_consumers = True
        taking = pool.submit(channel.take, 2)
        assert broker.consuming
        broker.stop()
        with pytest.raises(StaleDelivery):
            taking.result(30)
        assert channel._error is None, "it has waited until reconnecting failed"


def test_a_loss_while_the_queue_requeues_awaits_no_channel(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_POLL_EVERY", 0.5)
    broker.ready.append(b"1")
    with GetChannel(parse_url(broker.url), QUEUE, name="test") as channel, ThreadPoolExecutor(1) as pool:
        channel._stop.patience = 5.0
        channel.take(1)
        finishing = pool.submit(channel.finish)
        wait_until(lambda: broker.seen.count("Queue.Declare") == 2, timeout=20, what="the first count after the nack")
        broker.stop()
        finishing.result(30)
        assert channel._error is None, "it has waited until reconnecting failed"


@pytest.mark.parametrize("entered", [False, True])
def test_outside_of_its_with_block_the_caller_is_to_blame(broker: ScriptedBroker, entered: bool) -> None:
    """Otherwise each call would wait for a connection that nobody opens, and then blame the broker."""
    dead = DeadLetterQueue(broker.url, QUEUE)
    if entered:
        with dead:
            pass
    dead._channel._timeout = dead._channel._stop.patience = 0.1
    for call in (dead.statistics, dead.replay, dead.purge, dead.__len__):
        with pytest.raises(UsageError, match="not connected: use it inside its `with` block"):
            call()
