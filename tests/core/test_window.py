"""The publish window and the queue per message id, compared with simple models."""

from __future__ import annotations

from collections import deque
from time import process_time
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reliable_mq.core.publisher.publication import Publication
from reliable_mq.core.publisher.window import MessageIdQueue, PublishWindow
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message
from tests.properties import machine

if TYPE_CHECKING:
    from collections.abc import Callable


def admit(window: PublishWindow, size: int) -> bool:
    """Take a place in the window if the message fits."""
    fits = window.fits(size)
    if fits:
        window.take(size)
    return fits


class WindowMachine(RuleBasedStateMachine):
    """Messages enter and leave in any order, several at a time."""

    @initialize(max_count=st.integers(1, 5), max_bytes=st.integers(1, 100))
    def begin(self, max_count: int, max_bytes: int) -> None:
        self.window = PublishWindow(max_count, max_bytes)
        self.inside: list[int] = []

    @rule(size=st.integers(0, 120))
    def admit(self, size: int) -> None:
        window = self.window
        fits = len(self.inside) < window.max_count and sum(self.inside) + size <= window.max_bytes
        alone = not self.inside
        assert admit(window, size) is (fits or alone)
        if fits or alone:
            self.inside.append(size)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sets(st.integers(0, len(self.inside) - 1), min_size=1))
        self.window.release(len(leaving), sum(self.inside[index] for index in leaving))
        self.inside = [size for index, size in enumerate(self.inside) if index not in leaving]

    @invariant()
    def holds_what_was_admitted_and_not_released(self) -> None:
        assert (self.window.count, self.window.bytes) == (len(self.inside), sum(self.inside))

    @invariant()
    def stays_within_its_bounds(self) -> None:
        assert self.window.count <= self.window.max_count
        assert self.window.bytes <= self.window.max_bytes or self.window.count == 1


TestWindow = WindowMachine.TestCase
TestWindow.settings = machine(50, steps=30)


def publication(message_id: str) -> Publication:
    return Publication(Message(b"", message_id=message_id), "", "orders", True, 0, 0.0, None)


class IdGateMachine(RuleBasedStateMachine):
    """One queue for each id, with the first publication admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: MessageIdQueue[Publication] = MessageIdQueue()
        self.queues: dict[str, deque[Publication]] = {}

    ids = st.sampled_from("abc")

    @rule(key=ids)
    def enter(self, key: str) -> None:
        item = publication(key)
        queue = self.queues.setdefault(key, deque())
        queue.append(item)
        assert self.gate.enter([item]) == ([item] if len(queue) == 1 else [])

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.queues)))
        queue = self.queues[key]
        leaving = queue.popleft()
        assert self.gate.leave([leaving]) == ([queue[0]] if queue else [])
        if not queue:
            del self.queues[key]

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.queues)))
        queue = self.queues[key]
        index = data.draw(st.integers(0, len(queue) - 1))
        item = queue[index]
        assert self.gate.withdraw(item) is (index > 0)
        if index:
            queue.remove(item)

    @rule(key=ids)
    def withdraw_one_that_never_came(self, key: str) -> None:
        assert self.gate.withdraw(publication(key)) is False

    @invariant()
    def one_per_id_is_inside_the_one_that_came_first(self) -> None:
        assert len(self.gate) == len(self.queues)
        for key in "abc":
            assert self.gate.holder(key) is (self.queues[key][0] if key in self.queues else None)

    @invariant()
    def nothing_is_kept_for_ids_that_nobody_waits_for(self) -> None:
        assert self.gate._waiting.keys() == {key for key, queue in self.queues.items() if len(queue) > 1}


TestIdGate = IdGateMachine.TestCase
TestIdGate.settings = machine(50, steps=30)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "10", None])
@pytest.mark.parametrize("name", ["max_outstanding", "max_outstanding_bytes"])
def test_bounds_must_be_whole_numbers_of_at_least_one(name: str, value: object) -> None:
    """An invalid bound is refused, and the error names the option."""
    untyped: Callable[..., PublishWindow] = PublishWindow
    bounds: dict[str, object] = {"max_outstanding": 1, "max_outstanding_bytes": 1} | {name: value}
    with pytest.raises(ConfigurationError, match=f"^{name} must be a whole number of at least 1, not {value!r}$"):
        untyped(*bounds.values())


def test_a_full_window_admits_nothing_until_a_release() -> None:
    """The next publish waits for a released place."""
    window = PublishWindow(2, 1_000)
    assert [admit(window, 10) for _ in range(3)] == [True, True, False]
    window.release(1, 10)
    assert admit(window, 10)


def test_bytes_are_a_bound_of_their_own() -> None:
    """A window can be full in bytes while places are free.

    A smaller message may still fit.
    """
    window = PublishWindow(10, 100)
    assert admit(window, 60)
    assert not admit(window, 41)
    assert admit(window, 40)


def test_a_message_larger_than_the_whole_window_goes_alone() -> None:
    """A message above ``max_bytes`` is admitted once the window is empty."""
    window = PublishWindow(10, 100)
    admit(window, 1)
    assert not admit(window, 500)
    window.release(1, 1)
    assert admit(window, 500)
    assert not admit(window, 0)


def test_a_cleared_window_has_every_place_free() -> None:
    window = PublishWindow(2, 80)
    window.take(80)
    window.release(2, 90)  # as after an interrupted caller
    window.clear()
    window.take(40)
    window.take(40)
    assert not window.fits(0)


@pytest.mark.parametrize(("on_wire", "worth_it"), [(8, False), (5, False), (4, True), (0, True)])
def test_waiting_callers_wake_at_half_a_window_on_the_wire(on_wire: int, worth_it: bool) -> None:
    """Callers are not woken for every place.

    An idle channel always wakes them, otherwise the publisher would stop.
    """
    assert PublishWindow(8, 80).worth_waking(on_wire) is worth_it


def test_a_window_of_one_wakes_when_its_place_is_free() -> None:
    """The smallest window is not a special case."""
    assert not PublishWindow(1, 80).worth_waking(1)
    assert PublishWindow(1, 80).worth_waking(0)


def test_the_second_publish_with_an_id_waits_for_the_first() -> None:
    """Publishes with the same id are admitted one after the other, in order."""
    gate: MessageIdQueue[Publication] = MessageIdQueue()
    first, second, third = (publication("id") for _ in range(3))
    assert gate.enter([first, second, third]) == [first]
    assert gate.leave([first]) == [second]
    assert gate.leave([second]) == [third]
    assert gate.leave([third]) == []


def test_where_the_only_one_that_waits_gives_up_nobody_is_next() -> None:
    gate: MessageIdQueue[Publication] = MessageIdQueue()
    first, second = publication("id"), publication("id")
    gate.enter([first, second])
    assert gate.withdraw(second)
    assert not gate.withdraw(second)
    assert gate.leave([first]) == []


def test_one_that_gives_up_waiting_is_not_let_in() -> None:
    """A publication that is withdrawn while it waits is skipped.

    An admitted publication cannot be withdrawn.
    """
    gate: MessageIdQueue[Publication] = MessageIdQueue()
    first, second, third = (publication("id") for _ in range(3))
    gate.enter([first, second, third])
    assert gate.withdraw(second)
    assert not gate.withdraw(first)
    assert len(gate) == 1
    assert gate.leave([first]) == [third]


def test_the_gate_costs_the_same_with_few_and_many_inside(
    assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None],
) -> None:
    """Entering and leaving cost the same.

    The cost does not depend on how many are admitted, or how many wait for one id.
    """

    def cost(others: int, rounds: int) -> float:
        gate: MessageIdQueue[Publication] = MessageIdQueue()
        pairs = [(publication(key), publication(key)) for key in map(str, range(1_000))]
        gate.enter(publication(f"other {number // 2}") for number in range(others))
        began = process_time()
        for _ in range(rounds):
            for first, second in pairs:
                gate.enter([first])
                gate.enter([second])
            for first, second in pairs:
                gate.leave([first])
                gate.leave([second])
        return process_time() - began

    assert_same_cost(lambda: cost(1_000, 3), lambda: cost(50_000, 3))
