"""Confirms, compared with a simple model of a channel and with RabbitMQ."""

from __future__ import annotations

import random
from itertools import count
from time import process_time
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reliable_mq.core.publisher.confirms import ConfirmTracker
from reliable_mq.errors import UsageError
from tests.properties import machine

if TYPE_CHECKING:
    from collections.abc import Callable


class ConfirmMachine(RuleBasedStateMachine):
    """One channel after the other, with correct and wrong confirms."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker: ConfirmTracker[int] = ConfirmTracker()
        self.items = count()
        self.generation = 0
        self.open = False
        self.tag = 0  # of the last publish on this channel
        self.outstanding: dict[int, int] = {}
        self.published: list[int] = []
        self.came_back: list[int] = []
        self.stale = 0

    @initialize()
    def begin(self) -> None:
        self.channel_opened()

    @precondition(lambda self: not self.open)
    @rule()
    def channel_opened(self) -> None:
        self.generation += 1
        self.tracker.channel_opened(self.generation)
        self.open = True
        self.tag = 0

    @precondition(lambda self: self.open)
    @rule()
    def a_second_channel_is_refused(self) -> None:
        with pytest.raises(UsageError):
            self.tracker.channel_opened(self.generation + 1)

    @precondition(lambda self: self.open)
    @rule(how_many=st.integers(1, 5))
    def publish(self, how_many: int) -> None:
        items = [next(self.items) for _ in range(how_many)]
        for item in items:
            self.tag += 1
            self.outstanding[self.tag] = item
        self.published += items
        assert self.tracker.published(items) == self.tag + 1

    @precondition(lambda self: not self.open)
    @rule()
    def a_publish_without_channel_is_refused(self) -> None:
        with pytest.raises(UsageError):
            self.tracker.published([-1])

    @rule(data=st.data(), multiple=st.booleans(), age=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def confirm(self, data: st.DataObject, multiple: bool, age: int) -> None:
        tag = data.draw(st.integers(0, self.tag + 2))
        expected: list[int] = []
        if age == 0 and tag <= self.tag:
            if multiple:
                tags = [held for held in sorted(self.outstanding) if held <= tag or tag == 0]
            else:
                tags = [tag] if tag in self.outstanding else []
            expected = [self.outstanding.pop(held) for held in tags]
        assert self.tracker.settle(self.generation - age, tag, multiple) == expected
        self.came_back += expected
        self.stale += not expected

    @precondition(lambda self: self.open)
    @rule()
    def channel_lost(self) -> None:
        expected = [self.outstanding[tag] for tag in sorted(self.outstanding)]
        assert self.tracker.channel_lost() == expected
        assert self.tracker.channel_lost() == []
        self.came_back += expected
        self.outstanding.clear()
        self.open = False

    @invariant()
    def what_was_published_is_outstanding_or_has_come_back_once(self) -> None:
        assert sorted([*self.came_back, *self.outstanding.values()]) == self.published
        assert len(self.tracker) == len(self.outstanding)

    @invariant()
    def what_settled_nothing_is_counted(self) -> None:
        assert self.tracker.stale == self.stale

    @invariant()
    def the_channel_is_known(self) -> None:
        assert self.tracker.open is self.open
        assert self.tracker.generation == (self.generation if self.open else None)


TestConfirms = ConfirmMachine.TestCase
TestConfirms.settings = machine(50, steps=40)


def tracker_with(items: str, generation: int = 1) -> ConfirmTracker[str]:
    tracker: ConfirmTracker[str] = ConfirmTracker()
    tracker.channel_opened(generation)
    tracker.published(items)
    return tracker


def test_single_confirms_settle_in_any_order() -> None:
    """A confirm settles the publish with its number, in any order."""
    tracker = tracker_with("abc")
    assert [tracker.settle(1, tag, multiple=False) for tag in (3, 1, 2)] == [["c"], ["a"], ["b"]]


def test_multiple_settles_up_to_and_including_its_tag() -> None:
    """``multiple`` settles its tag and everything outstanding below, nothing above."""
    tracker = tracker_with("abcde")
    tracker.settle(1, 2, multiple=False)
    assert tracker.settle(1, 3, multiple=True) == ["a", "c"]
    assert tracker.settle(1, 5, multiple=True) == ["d", "e"]


def test_multiple_reaches_what_is_below_a_tag_settled_before() -> None:
    """``multiple`` also works with a tag that was confirmed before."""
    tracker = tracker_with("abc")
    tracker.settle(1, 3, multiple=False)
    assert tracker.settle(1, 3, multiple=True) == ["a", "b"]
    assert tracker.stale == 0


def test_multiple_with_tag_zero_settles_everything() -> None:
    """Tag 0 settles everything with ``multiple``, and nothing without it."""
    tracker = tracker_with("abc")
    assert tracker.settle(1, 0, multiple=False) == []
    assert tracker.settle(1, 0, multiple=True) == ["a", "b", "c"]


@pytest.mark.parametrize("multiple", [False, True])
def test_a_tag_that_was_never_published_confirms_nothing(multiple: bool) -> None:
    """A tag beyond the last publish is counted and settles nothing, not even below."""
    tracker = tracker_with("abc")
    assert tracker.settle(1, 4, multiple) == []
    assert (tracker.stale, len(tracker)) == (1, 3)


@pytest.mark.parametrize("multiple", [False, True])
def test_a_repeated_confirm_changes_nothing(multiple: bool) -> None:
    """The second confirm of a tag is counted and settles nothing."""
    tracker = tracker_with("abc")
    assert tracker.settle(1, 1, multiple) == ["a"]
    assert tracker.settle(1, 1, multiple) == []
    assert (tracker.stale, len(tracker)) == (1, 2)


def test_numbers_start_again_on_a_new_channel() -> None:
    """A late confirm from the old channel does not settle a new publish."""
    tracker = tracker_with("abc", generation=7)
    assert tracker.channel_lost() == ["a", "b", "c"]
    tracker.channel_opened(8)
    tracker.published("d")
    assert tracker.settle(7, 1, multiple=True) == []
    assert tracker.settle(8, 1, multiple=False) == ["d"]
    assert tracker.stale == 1


def test_confirms_without_channel_are_counted() -> None:
    """A confirm after the loss of its channel changes nothing."""
    tracker = tracker_with("a")
    tracker.channel_lost()
    assert tracker.settle(1, 1, multiple=False) == []
    assert tracker.stale == 1


def test_misuse_names_the_channels() -> None:
    """The error for opening a channel over another one names both."""
    tracker = tracker_with("", generation=3)
    with pytest.raises(UsageError, match="channel 3 is still open: report it lost before opening 4"):
        tracker.channel_opened(4)


def test_without_a_channel_nothing_can_be_published() -> None:
    tracker = tracker_with("", generation=3)
    tracker.channel_lost()
    with pytest.raises(UsageError, match="no channel is open"):
        tracker.published(["a"])


@pytest.mark.parametrize("order", ["lowest first", "highest first", "random", "multiple"])
def test_a_confirm_costs_the_same_among_a_thousand_and_a_million(
    order: str, assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None]
) -> None:
    """Confirming costs the same with 1 000 and 1 000 000 outstanding publishes.

    This holds for single confirms in any order, and for confirms of ten at a time.
    """

    def cost(outstanding: int, rounds: int) -> float:
        numbers = range(1, outstanding + 1)
        settled = min(outstanding, 10_000)
        tags = {
            "lowest first": list(numbers[:settled]),
            "highest first": list(numbers[: -settled - 1 : -1]),
            "random": random.Random(2).sample(numbers, settled),
            "multiple": list(numbers[9:settled:10]),
        }[order]
        spent = 0.0
        for _ in range(rounds):
            tracker = tracker_with("m" * outstanding)
            began = process_time()
            for tag in tags:
                tracker.settle(1, tag, order == "multiple")
            spent += process_time() - began
            assert len(tracker) == outstanding - settled
        return spent / (settled * rounds)

    assert_same_cost(lambda: cost(1_000, 10), lambda: cost(1_000_000, 1))
