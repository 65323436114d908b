"""The consumers of a reader in queue mode, step by step.

A new subscription reveals deliveries that are on their way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, QueueState, SetPrefetch, Step
from reliable_mq.spark.queue_subscriptions import Subscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

GRANTED = 5


class LateQueue:
    """A quorum queue of one message, as its leader sees it.

    The delivery arrives after a step. If its consumer is cancelled by then, it is returned.
    """

    def __init__(self, arrives_after: type[Step]) -> None:
        self._arrives_after = arrives_after
        self._ready = 1
        self._held: dict[str, int] = {}  # by consumer tag
        self._cancelled: set[str] = set()

    def perform(self, step: Step) -> QueueState | None:
        reply = None
        if isinstance(step, Consume):
            self._held[step.consumer_tag], self._ready = self._ready, 0
        elif isinstance(step, Cancel):
            self._cancelled.add(step.consumer_tag)
        elif isinstance(step, CheckQueue):
            reply = QueueState(step.name, self._ready, len(self._held))
        if isinstance(step, self._arrives_after):
            self._ready += sum(self._held.pop(tag, 0) for tag in self._cancelled)
        return reply


def carried_out(steps: Generator[Step, Any, Any], perform: Callable[[Step], QueueState | None]) -> Any:
    """Perform the steps and return their result."""
    reply = None
    try:
        while True:
            reply = perform(steps.send(reply))
    except StopIteration as stopped:
        return stopped.value


def consumed(*queues: str, others: int = 0) -> Subscriptions:
    """Return subscriptions of queues that already had the given number of consumers."""
    subscriptions = Subscriptions("reader", queues, lambda _: True, lambda: GRANTED)
    for queue in queues:
        subscriptions.found(QueueState(queue, 1, others))
    assert outcome(subscriptions.begin(), {}) == (None, [SetPrefetch, *[Consume] * len(queues)])
    return subscriptions


def outcome(steps: Generator[Step, Any, Any], counts: Mapping[str, tuple[int, int]]) -> tuple[Any, list[type[Step]]]:
    """Return result and types of steps for these counts of messages and consumers, with the reader's consumer."""
    taken: list[type[Step]] = []
    cancelled = False

    def perform(step: Step) -> QueueState | None:
        nonlocal cancelled
        taken.append(type(step))
        cancelled = isinstance(step, Cancel) or (cancelled and not isinstance(step, Consume))
        if not isinstance(step, CheckQueue):
            return None
        messages, consumers = counts[step.name]
        return QueueState(step.name, messages, max(consumers - cancelled, 0))

    return carried_out(steps, perform), taken


def test_one_consumer_after_a_new_subscription_has_nothing_more() -> None:
    assert outcome(consumed("orders").settled(), {"orders": (0, 1)}) == (
        True,
        [Cancel, CheckQueue, SetPrefetch, Consume, CheckQueue],
    )


def test_an_earlier_consumer_still_counted_has_deliveries() -> None:
    """The deliveries may be anywhere."""
    assert outcome(consumed("orders").settled(), {"orders": (0, 2)})[0] is False


@pytest.mark.parametrize("arrives_after", [Cancel, CheckQueue, SetPrefetch, Consume])
def test_a_message_returned_between_subscriptions_settles_none(arrives_after: type[Step]) -> None:
    """The queue delivers it to the new consumer, the only one that is counted then."""
    queue = LateQueue(arrives_after)
    subscriptions = Subscriptions("reader", ["orders"], lambda _: True, lambda: GRANTED)
    subscriptions.found(QueueState("orders", 1, 0))
    carried_out(subscriptions.begin(), queue.perform)
    assert carried_out(subscriptions.settled(), queue.perform) is False


@pytest.mark.parametrize("last", [(0, 2), (1, 1), (0, 0)])
def test_the_last_count_shows_messages_despite_a_silent_leader(last: tuple[int, int]) -> None:
    """The count between the subscriptions is in doubt."""
    counts = iter([QueueState("orders", 0, 0), QueueState("orders", *last)])
    steps = consumed("orders").settled()
    assert carried_out(steps, lambda step: next(counts) if isinstance(step, CheckQueue) else None) is False


def test_another_consumer_may_become_the_single_active_one() -> None:
    """It is counted instead of the reader's, which waits."""
    count = QueueState("orders", 0, 1)
    for single_active in ([], ["orders"]):
        subscriptions = Subscriptions("reader", ["orders"], lambda _: True, lambda: GRANTED, single_active)
        subscriptions.found(QueueState("orders", 1, 0))
        assert carried_out(subscriptions.settled(), lambda _: count) is bool(single_active)


def test_ready_messages_or_counts_in_doubt_settle_no_queue() -> None:
    for count in ((1, 1), (0, 0)):
        assert outcome(consumed("orders").settled(), {"orders": count})[0] is False


def test_consumers_of_others_that_were_there_are_allowed_for() -> None:
    """The lowest number counts: a channel that was just lost may be one of them."""
    subscriptions = consumed("orders", others=2)
    assert outcome(subscriptions.settled(), {"orders": (0, 3)})[0] is True
    subscriptions.lost()
    subscriptions.found(QueueState("orders", 0, 3))
    outcome(subscriptions.begin(), {})
    assert outcome(subscriptions.settled(), {"orders": (0, 4)})[0] is False


def test_consumers_that_have_left_are_not_allowed_for() -> None:
    subscriptions = consumed("orders", others=1)
    assert outcome(subscriptions.settled(), {"orders": (0, 2)})[0] is True
    assert outcome(subscriptions.ready({}), {"orders": (0, 1)})[0] == {"orders": 0}
    assert outcome(subscriptions.settled(), {"orders": (0, 2)})[0] is False


def test_consumers_are_counted_later_after_a_count_in_doubt() -> None:
    subscriptions = Subscriptions("reader", ["orders"], lambda _: True, lambda: GRANTED)
    subscriptions.found(QueueState("orders", 0, 0))
    outcome(subscriptions.begin(), {})
    assert outcome(subscriptions.certain_counts(["orders"]), {"orders": (0, 3)})[0] == {"orders": 0}
    assert outcome(subscriptions.settled(), {"orders": (0, 4)})[0] is False


def test_each_queue_must_be_settled() -> None:
    counts = {"orders": (0, 1), "other": (0, 2)}
    assert outcome(consumed("orders", "other").settled(), counts)[0] is False
    assert outcome(consumed("orders", "other").settled(["orders"]), counts)[0] is True


def test_a_certain_count_has_the_messages_on_their_way() -> None:
    """It adds the prefetch, or nothing once the queue is settled."""
    for count, found in (((3, 1), 3 + GRANTED), ((0, 1), 0), ((0, 2), GRANTED)):
        assert outcome(consumed("orders").certain_counts(["orders"]), {"orders": count})[0] == {"orders": found}
    assert outcome(consumed("orders").certain_counts(["orders"]), {"orders": (0, 0)})[0] is None


def test_messages_on_their_way_are_those_of_the_first_prefetch() -> None:
    """The renewed subscription may have a smaller one."""
    granted = iter([64, 1])
    subscriptions = Subscriptions("reader", ["orders"], lambda _: True, lambda: next(granted))
    subscriptions.found(QueueState("orders", 1, 0))
    outcome(subscriptions.begin(), {})
    assert outcome(subscriptions.certain_counts(["orders"]), {"orders": (0, 2)})[0] == {"orders": 64}


def test_a_queue_is_subscribed_to_again_once() -> None:
    """Another change of the subscriptions may have come first."""
    subscriptions = consumed("orders")
    assert outcome(subscriptions.resume("orders"), {"orders": (0, 0)}) == (None, [])
    assert subscriptions.cancelled("reader-1") == "orders"
    assert outcome(subscriptions.resume("orders"), {"orders": (0, 0)})[1] == [CheckQueue, SetPrefetch, Consume]


def test_a_queue_that_is_no_longer_wanted_is_left_alone() -> None:
    """The broker may cancel a consumer before the queue reaches its limit."""
    wanted = {"orders"}
    subscriptions = Subscriptions("reader", ["orders"], wanted.__contains__, lambda: GRANTED)
    outcome(subscriptions.begin(), {})
    assert subscriptions.cancelled("reader-1") == "orders"
    wanted.clear()
    assert outcome(subscriptions.resume("orders"), {"orders": (0, 0)}) == (None, [])


def test_a_cancelled_consumer_is_known_until_the_reply() -> None:
    """Deliveries may come until then; afterwards, its tag would only take memory."""
    subscriptions = consumed("orders")

    def perform(step: Step) -> None:
        if isinstance(step, Cancel):
            assert subscriptions.queue("reader-1") == "orders"

    carried_out(subscriptions.renew(), perform)
    assert subscriptions.queue("reader-2") == "orders"
    with pytest.raises(KeyError):
        subscriptions.queue("reader-1")
