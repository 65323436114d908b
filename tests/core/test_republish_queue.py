"""The queue of messages to republish: each is in one place at a time."""

from __future__ import annotations

import pytest

from reliable_mq import Queue, RetryPolicy
from reliable_mq.core.consumer.delivery import ChannelGeneration, DeliveryState
from reliable_mq.core.consumer.settlement import RepublishQueue
from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishReason
from reliable_mq.core.retry.delay_queues import DelayQueues
from reliable_mq.core.retry.retry_headers import RetryState, decode_retry_headers
from tests.core.deliveries import BROKEN_TABLE, delivery
from tests.core.test_retry_headers import waited

DEAD = DeadLetters("orders.dead", consumer="c", version="0")


def opened(*delays: float) -> RepublishQueue:
    made = RepublishQueue(DEAD, DelayQueues("orders", RetryPolicy(len(delays) + 1, delays=delays)))
    made.opened()
    return made


def test_a_delay_of_the_policy_needs_no_declaration() -> None:
    out = opened(10)
    assert out.delay(delivery(), 10)
    declared, [republish] = out.take()
    assert (republish.routing_key, republish.purpose) == ("orders.retry.10000", RepublishReason.RETRY)
    assert list(declared) == []
    assert not out.idle
    out.settled(republish)
    assert out.idle


def test_another_delay_waits_for_its_queue_to_be_declared_once() -> None:
    out = opened(10)
    assert out.delay(delivery(1), 70)
    assert out.delay(delivery(2), 70)
    assert not out.idle
    [queue], published = out.take()
    assert published == []
    assert queue.name == "orders.retry.50000"
    assert out.take() == ((), ())
    assert out.declared(queue.name, ok=True) == []
    _, (first, second) = out.take()
    assert (first.delivery.delivery_tag, second.delivery.delivery_tag) == (1, 2)
    assert decode_retry_headers(waited(first.properties)) == RetryState((20_000,))
    assert out.delay(delivery(3), 70)
    assert [len(taken) for taken in out.take()] == [0, 1], "it is known now"


def test_a_refused_declaration_is_tried_once_per_channel() -> None:
    out = opened(10)
    assert out.delay(delivery(), 70)
    [queue], _ = out.take()
    [waiting] = out.declared(queue.name, ok=False)
    assert waiting.queue == queue
    assert not out.delay(delivery(), 70)
    assert out.idle
    out.opened()
    assert out.delay(delivery(), 70)


def test_a_queue_that_is_missing_is_declared_again() -> None:
    out = opened(10)
    out.delay(delivery(), 10)
    _, [republish] = out.take()
    out.settled(republish)
    out.missing(republish)
    out.again(republish)
    [queue], _ = out.take()
    assert queue.name == "orders.retry.10000"
    out.declared(queue.name, ok=True)
    assert out.take() == ([], [republish])


@pytest.mark.parametrize(
    ("declared", "again"),
    [
        ([], []),
        ([Queue("orders"), Queue("orders.dead", dead_letter=None)], ["orders.dead"]),
        ([Queue("orders.dead", type="classic", dead_letter=None)], []),
    ],
    ids=["a name", "a quorum queue", "a classic queue"],
)
def test_a_missing_dead_letter_queue_is_declared_if_known(declared: list[Queue], again: list[str]) -> None:
    """A classic one may exist on a node that is down, and its declaration would close the channel."""
    dead_letters = DeadLetters("orders.dead", consumer="c", version="0", declared=declared)
    out = RepublishQueue(dead_letters, None)
    out.opened()
    assert out.dead_letter(delivery(source=ChannelGeneration(1, 1, "orders")), "why")
    queues, [republish] = out.take()
    assert list(queues) == []
    out.settled(republish)
    out.missing(republish)
    out.again(republish)
    queues, published = out.take()
    assert [queue.name for queue in queues] == again
    for name in again:
        assert published == []
        assert out.declared(name, ok=True) == []
        _, published = out.take()
    assert published == [republish]


def test_nothing_of_a_lost_channel_is_published() -> None:
    out = opened(10)
    out.delay(delivery(), 10)
    out.delay(delivery(), 70)
    out.lost()
    assert out.idle
    assert out.take() == ((), ())
    out.opened()
    assert out.declared("orders.retry.50000", ok=True) == [], "an answer that comes late"
    assert out.take() == ((), ())


def test_what_has_to_be_held_instead() -> None:
    """There are no delay queues, no delay, or the properties would change."""
    without = RepublishQueue(None, None)
    without.opened()
    assert not without.delay(delivery(), 10)
    assert not without.forward(delivery(), (1000,))
    assert not without.dead_letter(delivery(), "why")
    out = opened(10)
    assert not out.delay(delivery(), 0)
    assert not out.delay(delivery(headers=BROKEN_TABLE), 10)
    assert not out.quarantine(delivery(headers=BROKEN_TABLE), Queue("orders.quarantine", dead_letter=None))
    assert out.idle


def test_the_state_of_a_delivery_that_is_published() -> None:
    """The delivery is ready, taken, or waiting for a declaration.

    If it was not taken, it is settled with its channel.
    """
    out = opened(10)
    items = [delivery(tag, source=ChannelGeneration(2, 1, "orders")) for tag in (1, 2, 3)]
    out.dead_letter(items[0], "why")
    out.take()
    out.dead_letter(items[1], "why")
    out.delay(items[2], 70)
    assert [item.state for item in items] == [DeliveryState.REPUBLISHING] * 3
    out.lost()
    assert [item.state for item in items] == [DeliveryState.REPUBLISHING, *[DeliveryState.SETTLED] * 2]
