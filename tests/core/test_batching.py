"""Batches: full, or after their wait, and what a batch handler's answer means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reliable_mq import Ack, ConfigurationError, DeadLetter, RetryLater, UsageError
from reliable_mq.core.batching import Batcher, verdicts
from reliable_mq.core.delivery import Delivery
from tests.core.deliveries import delivery
from tests.properties import machine


def test_full_batches_are_ready_at_once_and_the_rest_waits() -> None:
    batcher = Batcher(2, 5.0)
    items = [delivery(tag) for tag in range(1, 6)]
    batcher.add(items, 10.0)
    assert batcher.ready == [items[0:2], items[2:4]]
    assert batcher.deadline == 15.0
    batcher.due(14.9)
    assert len(batcher.ready) == 2
    batcher.due(15.0)
    assert batcher.ready[2] == items[4:]
    assert batcher.deadline is None


def test_the_wait_begins_with_the_first_of_a_batch() -> None:
    batcher = Batcher(3, 5.0)
    batcher.add([delivery(1)], 10.0)
    batcher.add([delivery(2)], 13.0)
    assert batcher.deadline == 15.0
    batcher.add([delivery(3), delivery(4)], 14.0)
    assert batcher.deadline == 19.0


def test_nothing_is_due_where_nothing_waits() -> None:
    batcher = Batcher(3, 0.0)
    batcher.due(100.0)
    assert batcher.ready == []


@pytest.mark.parametrize(("wrong", "named"), [((0, 1.0), "batch_size"), ((1, -1.0), "batch_wait")])
def test_nonsense_is_refused(wrong: tuple[int, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Batcher(*wrong)


def test_no_answer_and_acks_are_acks() -> None:
    assert verdicts(None, 2) == [None, None]
    assert verdicts([Ack, Ack(), None], 3) == [None, None, None]


def test_other_verdicts_are_what_they_say() -> None:
    later, dead, error = RetryLater(3), DeadLetter("why"), KeyError("k")
    assert verdicts((later, dead, error), 3) == [later, dead, error]
    [bare] = verdicts([RetryLater], 1)
    assert isinstance(bare, RetryLater)
    assert bare.delay is None


@pytest.mark.parametrize("item", [True, False, "ack", 1, DeadLetter, KeyboardInterrupt()], ids=repr)
def test_what_is_no_verdict_is_never_an_ack(item: object) -> None:
    [verdict] = verdicts([item], 1)
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
        verdicts(answer, 2)


class Grouping(RuleBasedStateMachine):
    """A batcher whose batches are taken now and then.

    Invariants: everything that was added comes out once, in its order; no batch is empty or above its size; nothing
    waits for longer than ``batch_wait`` once that was looked at; fewer than ``batch_size`` wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(3, 5.0)
        self.now = 0.0
        self.tag = 0
        self.expected: list[tuple[int, float]] = []  # not taken yet, with when it came

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
        assert deadline == (self.expected[-waiting][1] + 5.0 if waiting else None)

    def check_order(self, items: list[Delivery]) -> None:
        assert [item.delivery_tag for item in items] == [tag for tag, _ in self.expected[: len(items)]]
        del self.expected[: len(items)]


TestGrouping = Grouping.TestCase
TestGrouping.settings = machine(50, steps=30)
