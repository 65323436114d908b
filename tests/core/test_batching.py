"""Batches, which are ready when full or after a wait, and batch verdicts."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reliable_mq import Ack, DeadLetter, RetryLater, UsageError
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import Batcher, deliveries_of, verdicts
from tests.core.deliveries import delivery
from tests.properties import machine


class ReadyBatcher(Batcher):
    """Keeps the batches that are ready, like the dispatcher."""

    def __init__(self, batch_size: int, batch_wait: float) -> None:
        super().__init__(batch_size, batch_wait)
        self.ready: list[list[Delivery]] = []

    def add(self, deliveries: list[Delivery], now: float) -> list[list[Delivery]]:
        self.ready += super().add(deliveries, now)
        return []

    def due(self, now: float) -> list[list[Delivery]]:
        self.ready += super().due(now)
        return []

    def clear(self) -> list[Delivery]:
        ready, self.ready = self.ready, []
        return [*(delivery for batch in ready for delivery in batch), *super().clear()]


def test_full_batches_are_ready_at_once_and_the_rest_waits() -> None:
    batcher = ReadyBatcher(2, 5.0)
    items = [delivery(tag) for tag in range(1, 6)]
    batcher.add(items, 10.0)
    assert batcher.ready == [items[0:2], items[2:4]]
    assert batcher.deadline == 15.0
    batcher.due(14.9)
    assert len(batcher.ready) == 2
    batcher.due(15.0)
    assert batcher.ready[2] == items[4:]
    assert batcher.deadline == inf


def test_the_wait_begins_with_the_first_of_a_batch() -> None:
    batcher = Batcher(3, 5.0)
    batcher.add([delivery(1)], 10.0)
    batcher.add([delivery(2)], 13.0)
    assert batcher.deadline == 15.0
    batcher.add([delivery(3), delivery(4)], 14.0)
    assert batcher.deadline == 19.0


def test_nothing_is_due_where_nothing_waits() -> None:
    batcher = ReadyBatcher(3, 0.0)
    batcher.due(100.0)
    assert batcher.ready == []


def batch(count: int) -> list[Delivery]:
    return [delivery(tag) for tag in range(1, count + 1)]


def read(answer: object, count: int) -> list[Exception | None]:
    """Return the verdicts of a handler that leaves its list unchanged, in order."""
    deliveries = batch(count)
    found = verdicts(answer, deliveries, list(deliveries))
    assert [one for one, _ in found] == deliveries
    return [verdict for _, verdict in found]


def test_no_answer_and_acks_are_acks() -> None:
    assert read(None, 2) == [None, None]
    assert read([Ack, Ack(), None], 3) == [None, None, None]


def test_other_verdicts_are_what_they_say() -> None:
    later, dead, error = RetryLater(3), DeadLetter("why"), KeyError("k")
    assert read((later, dead, error), 3) == [later, dead, error]
    [bare] = read([RetryLater], 1)
    assert isinstance(bare, RetryLater)
    assert bare.delay is None


@pytest.mark.parametrize("item", [True, False, "ack", 1, DeadLetter, KeyboardInterrupt()], ids=repr)
def test_what_is_no_verdict_is_never_an_ack(item: object) -> None:
    [verdict] = read([item], 1)
    assert isinstance(verdict, UsageError)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([], id="too few"),
        pytest.param([Ack, Ack, Ack], id="too many"),
        pytest.param("ok", id="str"),
        pytest.param(b"ok", id="bytes"),
        pytest.param(True, id="bool"),
        pytest.param(3, id="int"),
        pytest.param(iter([Ack, Ack]), id="iterator"),
        pytest.param({Ack}, id="set"),
    ],
)
def test_an_answer_of_another_shape_is_an_error(answer: Any) -> None:
    with pytest.raises(UsageError):
        read(answer, 2)


@pytest.mark.parametrize("answer", [DeadLetter("why"), RetryLater(3), RetryLater, Ack, Ack()], ids=repr)
def test_one_verdict_for_a_batch_is_an_error_that_says_so(answer: object) -> None:
    """The verdict may not be meant for all, and dead letters cannot be undone."""
    with pytest.raises(UsageError, match=r"one verdict, .* for 2 deliveries: return a list with a verdict for each"):
        read(answer, 2)


BAD = DeadLetter("bad")


@given(st.permutations(range(5)), st.integers(0, 2))
def test_verdicts_follow_the_order_of_the_handlers_list(order: list[int], put_in: int) -> None:
    """The handler may have sorted the list, or inserted other objects."""
    deliveries = batch(5)
    given: list[object] = [deliveries[index] for index in order]
    answer = [BAD if index == 2 else Ack for index in order]
    given[3:3] = [object()] * put_in
    found = verdicts(answer, deliveries, given)
    assert [one for one, verdict in found if verdict is BAD] == [deliveries[2]]
    assert {one.delivery_tag for one, _ in found} == {1, 2, 3, 4, 5}


def emptied(given: list[Delivery]) -> None:
    given.clear()


def popped(given: list[Delivery]) -> None:
    given.pop()


def doubled(given: list[Delivery]) -> None:
    given.append(given[0])


@pytest.mark.parametrize("touch", [emptied, popped, doubled])
@pytest.mark.parametrize("answer", [None, [Ack, None, Ack()]])
def test_acks_of_a_whole_batch_hold_whatever_became_of_its_list(
    touch: Callable[[list[Delivery]], None], answer: object
) -> None:
    deliveries = batch(3)
    given = list(deliveries)
    touch(given)
    assert verdicts(answer, deliveries, given) == [(one, None) for one in deliveries]


@pytest.mark.parametrize("touch", [emptied, popped, doubled])
def test_verdicts_without_their_deliveries_are_a_usage_error(touch: Callable[[list[Delivery]], None]) -> None:
    """Verdicts are not matched by position.

    A handler that pops each delivery from the end returns its verdicts in another order.
    """
    deliveries = batch(3)
    given = list(deliveries)
    touch(given)
    with pytest.raises(UsageError, match="took deliveries out of its list"):
        verdicts([Ack, BAD, Ack], deliveries, given)


class Grouping(RuleBasedStateMachine):
    """A batcher whose batches are taken from time to time.

    Invariants:

    - Every added delivery comes out once, in order.
    - No batch is empty or above its size.
    - After a check, no delivery has waited for longer than ``batch_wait``.
    - Fewer than ``batch_size`` deliveries wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batcher = ReadyBatcher(3, 5.0)
        self.now = 0.0
        self.tag = 0
        self.expected: list[tuple[int, float]] = []  # deliveries not taken yet, with their time of arrival

    @rule(count=st.integers(1, 8))
    def add(self, count: int) -> None:
        items = [delivery(self.tag + number) for number in range(1, count + 1)]
        self.tag += count
        self.expected += [(item.delivery_tag, self.now) for item in items]
        self.batcher.add(items, self.now)

    @rule(seconds=st.sampled_from([1.0, 3.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.batcher.due(self.now)

    @rule()
    def take(self) -> None:
        taken, self.batcher.ready = self.batcher.ready, []
        assert all(1 <= len(batch) <= 3 for batch in taken)
        self.check_order([item for batch in taken for item in batch])
        assert all(self.now - since < 5.0 for _, since in self.expected)
        assert len(self.expected) < 3

    @rule()
    def clear(self) -> None:
        self.check_order(self.batcher.clear())
        assert self.expected == []
        assert self.batcher.clear() == []

    @invariant()
    def the_deadline_is_that_of_the_oldest_that_waits(self) -> None:
        waiting = len(self.expected) - sum(map(len, self.batcher.ready))
        deadline = self.batcher.deadline
        assert deadline == (self.expected[-waiting][1] + 5.0 if waiting else inf)

    def check_order(self, items: list[Delivery]) -> None:
        assert [item.delivery_tag for item in items] == [tag for tag, _ in self.expected[: len(items)]]
        del self.expected[: len(items)]


TestGrouping = Grouping.TestCase
TestGrouping.settings = machine(50, steps=30)


def test_work_is_one_delivery_or_a_batch() -> None:
    one, other = delivery(1), delivery(2)
    assert deliveries_of(one) == [one]
    assert deliveries_of([one, other]) == [one, other]
