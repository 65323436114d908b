"""Two brokers with equal queue names and one idempotency store.

The keys contain the name of the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import Handler
from reliable_mq import Queue, RetryPolicy
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.stores import MemoryStore
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq import Delivery
    from tests.contract.scripted_broker import Published

NewConsumer = "Callable[..., Any]"
ORDERS = Queue("orders")
ONCE = RetryPolicy(1)


@pytest.fixture
def brokers(broker: ScriptedBroker) -> Iterator[list[ScriptedBroker]]:
    """Yield brokers of two named clusters."""
    with ScriptedBroker() as other:
        broker.cluster_name, other.cluster_name = "shop", "bank"
        broker.script = other.script = acking
        yield [broker, other]


def acking(published: Published) -> None:
    published.channel.ack(published.number)


def fail(_delivery: Delivery) -> None:
    raise ValueError("of no use")


def consume(broker: ScriptedBroker, new_consumer: Any, store: MemoryStore, handler: Handler) -> int:
    """Deliver the message ``m`` to a consumer, which settles it.

    Return how often its handler was called.
    """
    before, settled = len(handler.begun), len(broker.settlements)
    with new_consumer(handler, ORDERS, url=broker.url, retry=ONCE, idempotency=store):
        broker.consuming.deliver(b"x", message_id="m")
        broker.wait_settled(settled + 1)
    return len(handler.begun) - before


def test_equal_queue_names_in_two_clusters_share_a_store(
    brokers: list[ScriptedBroker], new_consumer: NewConsumer
) -> None:
    """An id that is done in one cluster is not done in the other."""
    store = MemoryStore()
    handler = Handler()
    assert [consume(one, new_consumer, store, handler) for one in brokers] == [1, 1]
    assert [consume(one, new_consumer, store, handler) for one in brokers] == [0, 0]


def test_nodes_of_a_cluster_without_a_name_share_keys(brokers: list[ScriptedBroker], new_consumer: NewConsumer) -> None:
    """Each node reports another name.

    An id that is done on one node is done on the others.
    """
    for number, node in enumerate(brokers):
        node.cluster_name = f"rabbit@node-{number}"
    store = MemoryStore()
    handler = Handler()
    assert [consume(one, new_consumer, store, handler) for one in brokers] == [1, 0]


def test_a_replay_resets_the_attempts_of_its_own_cluster(
    brokers: list[ScriptedBroker], new_consumer: NewConsumer
) -> None:
    """The message of the other cluster still has no attempt left."""
    store = MemoryStore()
    failing = Handler(then=fail)
    assert [consume(one, new_consumer, store, failing) for one in brokers] == [1, 1]
    own = brokers[0]
    own.ready.extend(own.published)
    with DeadLetterQueue(own.url, ORDERS) as letters:
        assert letters.replay(idempotency=store).replayed == 1
    handler = Handler()
    assert [consume(one, new_consumer, store, handler) for one in brokers] == [1, 0]
