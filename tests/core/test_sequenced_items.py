"""`SequencedItems`, compared with a dictionary, and its cost."""

from __future__ import annotations

import random
from time import process_time
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reliable_mq.core.publisher import confirms as module
from reliable_mq.core.publisher.confirms import SequencedItems
from tests.properties import machine

if TYPE_CHECKING:
    from collections.abc import Callable

    Cost = Callable[[], float]


class LedgerMachine(RuleBasedStateMachine):
    """Does the same with a dictionary.

    The items are tidied every four slots, so that short runs reach it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(module, "_TIDY_EVERY", 4)
        self.patch.start()
        self.ledger: SequencedItems[str] = SequencedItems()
        self.model: dict[int, str] = {}
        self.next = 1
        self.most = 0

    def teardown(self) -> None:
        self.patch.stop()

    def new_item(self) -> str:
        item = f"item {self.next}"
        self.model[self.next] = item
        self.next += 1
        self.most = max(self.most, len(self.model))
        return item

    @rule(count=st.integers(0, 12))
    def extend(self, count: int) -> None:
        self.ledger.extend([self.new_item() for _ in range(count)])

    def any_number(self, data: st.DataObject) -> int:
        """Draw a number, mostly of a held item."""
        anything = st.integers(-1, self.next + 1)
        return data.draw(st.sampled_from(sorted(self.model)) | anything if self.model else anything)

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        number = self.any_number(data)
        assert self.ledger.pop(number) == self.model.pop(number, None)

    @rule(left=st.integers(1, 3), count=st.integers(4, 12))
    def settle_all_but_a_few(self, left: int, count: int) -> None:
        """Settle all items but a few stragglers."""
        self.extend(count)
        for number in sorted(self.model)[left:]:
            assert self.ledger.pop(number) == self.model.pop(number)

    @rule(data=st.data())
    def pop_through(self, data: st.DataObject) -> None:
        number = self.any_number(data)
        expected = [self.model.pop(held) for held in sorted(self.model) if held <= number]
        assert self.ledger.pop_through(number) == expected

    @rule()
    def clear(self) -> None:
        expected = [self.model[held] for held in sorted(self.model)]
        self.model.clear()
        assert self.ledger.clear() == expected

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert len(self.ledger) == len(self.model)
        assert self.ledger.next_number == self.next

    @invariant()
    def memory_is_in_proportion_to_what_was_held(self) -> None:
        assert len(self.ledger._slots) <= 4 * self.most + 4 + 12
        assert len(self.ledger._stragglers) <= self.most


TestLedger = LedgerMachine.TestCase
TestLedger.settings = machine(50, steps=40)


def test_numbers_start_at_one_and_are_never_given_out_twice() -> None:
    """This also holds after everything was settled."""
    ledger: SequencedItems[str] = SequencedItems()
    ledger.extend("abc")
    assert ledger.pop(1) == "a"
    assert ledger.clear() == ["b", "c"]
    assert ledger.next_number == 4
    ledger.extend("d")
    assert ledger.pop(4) == "d"
    assert ledger.next_number == 5


def test_through_includes_its_number_and_skips_what_was_settled() -> None:
    """``pop_through(N)`` removes N and the held items below, and nothing above."""
    ledger: SequencedItems[str] = SequencedItems()
    ledger.extend("abcde")
    ledger.pop(2)
    assert ledger.pop_through(3) == ["a", "c"]
    assert ledger.pop_through(3) == []
    assert ledger.clear() == ["d", "e"]


def test_a_straggler_keeps_its_place_and_costs_no_memory() -> None:
    """One item stays while a hundred thousand come and go.

    It is found, it is first, and the list stays short.
    """
    ledger: SequencedItems[int] = SequencedItems()
    ledger.extend([1])
    for number in range(2, 100_000):
        ledger.extend([number])
        assert ledger.pop(number) == number
    assert len(ledger._slots) <= 2 * module._TIDY_EVERY
    ledger.extend([100_000])
    assert ledger.pop_through(100_000) == [1, 100_000]


def test_a_list_that_is_mostly_held_is_left_as_it_is() -> None:
    """Searching it repeatedly would cost more than a few empty slots."""
    ledger: SequencedItems[int] = SequencedItems()
    ledger.extend(range(1, module._TIDY_EVERY))
    for number in range(1, 10):
        ledger.pop(number)
    ledger.extend(range(module._TIDY_EVERY, 2 * module._TIDY_EVERY + 1))
    assert len(ledger._slots) == 2 * module._TIDY_EVERY
    assert ledger.clear() == list(range(10, 2 * module._TIDY_EVERY + 1))


def test_the_settled_front_is_cut_off() -> None:
    """The settled front is removed once it is half of the list."""
    ledger: SequencedItems[int] = SequencedItems()
    ledger.extend(range(1, module._TIDY_EVERY))
    for number in range(1, module._TIDY_EVERY * 3 // 4):
        ledger.pop(number)
    ledger.extend(range(module._TIDY_EVERY, module._TIDY_EVERY * 5 // 4))
    assert len(ledger._slots) == len(ledger) == module._TIDY_EVERY // 2
    assert not ledger._stragglers
    assert ledger.clear() == list(range(module._TIDY_EVERY * 3 // 4, module._TIDY_EVERY * 5 // 4))


def lowest_first(numbers: range, count: int) -> list[int]:
    return list(numbers[:count])


def highest_first(numbers: range, count: int) -> list[int]:
    return list(numbers[: -count - 1 : -1])


def at_random(numbers: range, count: int) -> list[int]:
    return random.Random(1).sample(numbers, count)


def settle_singly(ledger: SequencedItems[str], numbers: list[int]) -> None:
    for number in numbers:
        ledger.pop(number)


def settle_multiple(ledger: SequencedItems[str], numbers: list[int]) -> None:
    for number in numbers:
        ledger.pop_through(number)


def settle_and_add(ledger: SequencedItems[str], numbers: list[int]) -> None:
    """Settle and add items one by one, like a publisher with a full window."""
    for number in numbers:
        ledger.pop(number)
        ledger.extend(("item",))


@pytest.mark.parametrize(
    ("order", "settle"),
    [
        (lowest_first, settle_singly),
        (highest_first, settle_singly),
        (at_random, settle_singly),
        (lowest_first, settle_and_add),
        (at_random, settle_and_add),
        (lowest_first, settle_multiple),
    ],
)
def test_cost_is_the_same_at_a_thousand_and_at_a_million_held(
    order: Callable[[range, int], list[int]],
    settle: Callable[[SequencedItems[str], list[int]], None],
    assert_same_cost: Callable[[Cost, Cost], None],
) -> None:
    """Holding and settling cost the same in any order."""

    def cost(held: int, rounds: int) -> float:
        numbers = order(range(1, held + 1), min(held, 10_000))
        spent = 0.0
        for _ in range(rounds):
            ledger: SequencedItems[str] = SequencedItems()
            ledger.extend(["item"] * held)
            began = process_time()
            settle(ledger, numbers)
            spent += process_time() - began
        return spent / (len(numbers) * rounds)

    assert_same_cost(lambda: cost(1_000, 10), lambda: cost(1_000_000, 1))


def test_cost_is_the_same_for_many_stragglers(assert_same_cost: Callable[[Cost, Cost], None]) -> None:
    """Settling many stragglers one by one costs the same per item."""

    def cost(stragglers: int, rounds: int) -> float:
        spent = 0.0
        for _ in range(rounds):
            ledger: SequencedItems[str] = SequencedItems()
            ledger.extend(["item"] * stragglers * 10)
            for number in range(1, stragglers * 10 + 1):
                if number % 10:
                    ledger.pop(number)
            ledger.extend(["item"] * module._TIDY_EVERY)
            assert len(ledger._stragglers) >= stragglers
            began = process_time()
            for number in range(10, stragglers * 10 + 1, 10):
                ledger.pop_through(number)
            spent += process_time() - began
            assert len(ledger) == module._TIDY_EVERY
        return spent / (stragglers * rounds)

    assert_same_cost(lambda: cost(1_000, 3), lambda: cost(20_000, 1))


@pytest.mark.parametrize("far", [5, 3000])
def test_what_is_held_is_known_by_its_number(far: int) -> None:
    """This also holds for a few stragglers in a dictionary."""
    ledger: SequencedItems[int] = SequencedItems()
    for number in range(1, far + 1):
        ledger.extend([number])
        if number not in (2, 3, far):
            ledger.pop(number)
    assert ledger.all() == [2, 3, far]
    assert ledger.pop_through(1) == []
    assert ledger.pop_through(2) == [2]
    assert ledger.pop_through(far - 1) == [3]
    assert ledger.all() == [far]
