"""The ack batcher: it acks finished deliveries in batches, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from time import process_time
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.core.consumer import acks as module
from reliable_mq.core.consumer.acks import AckBatcher, Frames, check_prefetch
from reliable_mq.errors import ConfigurationError
from tests.properties import machine

GENERATION = 7
RARELY = st.sampled_from([False] * 5 + [True])


def batcher(*, ack_every: int = 10, ack_interval: float = 1.0, prefetch: int = 100, delivered: int = 0) -> AckBatcher:
    acks = AckBatcher(ack_every=ack_every, ack_interval=ack_interval, prefetch=prefetch)
    acks.opened(GENERATION)
    if delivered:
        acks.delivered(1, delivered)
    return acks


def test_contiguous_completions_are_acked_by_count_in_one_frame() -> None:
    acks = batcher(delivered=50)
    assert acks.finished(range(1, 10), 0.0) == 9
    assert acks.due(0.0) == []
    acks.finished([10, 11], 0.0)
    assert acks.due(0.0) == [(11, True)]
    assert (acks.statistics.acked, acks.statistics.acks_sent, acks.statistics.acks_saved) == (11, 1, 10)
    assert acks.outstanding == 39


def test_a_single_completion_is_acked_alone_after_its_interval() -> None:
    acks = batcher(delivered=3)
    assert acks.deadline == inf
    acks.finished([1], 5.0)
    assert acks.deadline == 6.0
    assert acks.due(5.9) == []
    assert acks.due(6.0) == [(1, False)]
    assert acks.deadline == inf
    assert acks.due(100.0) == []


def test_multiple_stops_at_a_gap_and_the_rest_waits_its_interval() -> None:
    acks = batcher(ack_every=3, delivered=10)
    acks.finished([1, 2, 3, 5, 7], 0.0)
    assert acks.due(0.0) == [(3, True)]
    assert acks.deadline == 1.0
    assert acks.due(1.0) == [(5, False), (7, False)]


def test_a_gap_that_closes_makes_one_frame_of_all() -> None:
    acks = batcher(ack_every=4, delivered=10)
    acks.finished([4, 2, 3], 0.0)
    assert acks.due(0.0) == []
    acks.finished([1], 0.5)
    assert acks.due(0.5) == [(4, True)]
    assert acks.statistics.acks_saved == 3


def test_multiple_names_the_highest_outstanding_tag() -> None:
    acks = batcher(delivered=10)
    acks.finished([3], 0.0)
    assert acks.due(1.0) == [(3, False)]
    acks.finished([1, 2], 2.0)
    assert acks.flush() == [(2, True)]  # not 3: naming a settled tag is a channel error


def test_one_slow_handler_does_not_starve_the_prefetch() -> None:
    acks = batcher(ack_every=5, ack_interval=60.0, prefetch=10, delivered=10)
    acks.finished([2, 3, 4, 5], 0.0)
    assert acks.due(0.0) == []
    acks.finished([6], 0.0)
    assert acks.due(0.0) == [(2, False), (3, False), (4, False), (5, False), (6, False)]


def test_at_half_the_prefetch_only_the_prefix_is_acked() -> None:
    acks = batcher(ack_every=8, ack_interval=60.0, prefetch=10, delivered=10)
    acks.finished([1, 2, 3, 5, 6], 0.0)
    assert acks.due(0.0) == [(3, True)]
    assert acks.outstanding == 7
    assert acks.deadline == 60.0


def test_how_many_more_must_finish_before_a_frame_is_due() -> None:
    """A frame is due by ``ack_every`` contiguous deliveries or half the prefetch.

    Whichever comes first decides. The count is at least one.
    """
    acks = batcher(ack_every=4, ack_interval=60.0, prefetch=20, delivered=20)
    assert acks.due_after == 4
    acks.finished([1, 3], 0.0)
    assert acks.due_after == 3
    acks.finished(range(6, 13), 0.0)
    assert acks.due_after == 1
    assert acks.due(0.0) == []
    acks.finished([2, 4], 0.0)
    assert acks.due_after == 1
    assert acks.due(0.0) == [(4, True)]
    unlimited = batcher(ack_every=3, ack_interval=60.0, prefetch=0, delivered=20)
    unlimited.finished([1, *range(3, 20)], 0.0)
    assert unlimited.due_after == 2


def test_without_running_handlers_acks_wait_only_for_the_rest() -> None:
    acks = AckBatcher(ack_every=3, ack_interval=1.0, prefetch=100, rest=0.25)
    acks.opened(GENERATION)
    acks.delivered(1, 10)
    acks.finished([1], 5.0)
    assert (acks.deadline_if(idle=False), acks.deadline_if(idle=True)) == (6.0, 0.25)
    assert acks.due(5.0) == []
    assert acks.due(5.0, idle=True) == [(1, False)]
    assert acks.deadline_if(idle=True) == inf
    assert acks.rested_at == 5.25
    acks.finished([2, 4], 5.125)
    assert acks.due(5.125, idle=True) == []
    assert acks.deadline_if(idle=True) == 5.25
    assert acks.due(5.25, idle=True) == [(2, False), (4, False)]
    acks.finished([3, 5, 6], 5.5)
    assert acks.due(5.5) == [(6, True)]
    assert acks.rested_at == 5.75, "whatever the frames were for"


def test_without_a_rest_acks_ignore_whether_a_handler_runs() -> None:
    acks = batcher(delivered=3)
    acks.finished([1], 5.0)
    assert acks.due(5.0, idle=True) == []
    assert acks.deadline_if(idle=True) == 6.0
    assert acks.rested_at == float("inf")


def test_a_prefetch_of_one_acks_each() -> None:
    acks = batcher(ack_every=1, ack_interval=60.0, prefetch=1, delivered=1)
    acks.finished([1], 0.0)
    assert acks.due(0.0) == [(1, False)]


def test_without_a_prefetch_only_count_and_time_decide() -> None:
    acks = batcher(ack_every=3, prefetch=0, delivered=1000)
    acks.finished(range(2, 1000), 0.0)
    assert acks.due(0.0) == []


def test_changing_the_prefetch_changes_when_it_is_half_used() -> None:
    acks = batcher(ack_every=5, ack_interval=60.0, delivered=10)
    acks.finished([1, 2, 3, 4], 0.0)
    assert acks.due(0.0) == []
    acks.set_prefetch(8)
    assert acks.due(0.0) == [(4, True)]


@pytest.mark.parametrize(("prefetch", "ack_every"), [(0, 100), (1, 1), (2, 1), (11, 5), (200, 100), (5000, 100)])
def test_the_default_ack_count_is_half_of_the_prefetch(prefetch: int, ack_every: int) -> None:
    acks = AckBatcher(ack_interval=1.0, prefetch=300)
    acks.set_prefetch(prefetch)
    assert acks.due_after == ack_every


def test_the_lowest_unfinished_tag_follows_the_finished_prefix() -> None:
    acks = batcher(delivered=5)
    assert acks.first_unfinished == 1
    acks.finished([1, 2, 4], 0.0)
    assert acks.first_unfinished == 3
    acks.take_out(GENERATION, 3)
    assert acks.first_unfinished == 5


@pytest.mark.parametrize(
    ("tags", "refused"),
    [([4], 1), ([0], 1), ([1], 1), ([2, 2], 1), ([2, 9], 1)],
    ids=["unknown", "zero", "finished before", "twice at once", "one unknown among known"],
)
def test_an_unknown_or_repeated_tag_is_counted_and_ignored(tags: list[int], refused: int) -> None:
    acks = batcher(delivered=3)
    acks.finished([1], 0.0)
    assert acks.finished(tags, 0.0) == len(tags) - refused
    assert acks.statistics.stale == refused
    good = 1 + len(tags) - refused
    assert acks.flush() == [(good, good > 1)]


def test_a_refused_completion_does_not_start_the_interval() -> None:
    acks = batcher(delivered=1)
    acks.finished([9], 0.0)
    assert acks.deadline == inf


def test_a_rejected_tag_leaves_the_ledger_and_closes_no_gap() -> None:
    acks = batcher(delivered=4)
    acks.finished([1, 4], 0.0)
    assert acks.take_out(GENERATION, 2)
    assert not acks.take_out(GENERATION, 2)
    assert not acks.take_out(GENERATION, 9)
    assert not acks.take_out(GENERATION + 1, 3)
    assert acks.statistics.stale == 3
    assert acks.flush() == [(1, False), (4, False)]
    acks.finished([3], 0.0)
    assert acks.flush() == [(3, False)]
    assert acks.outstanding == 0


def test_rejecting_the_gap_makes_what_was_beyond_contiguous() -> None:
    acks = batcher(ack_every=3, delivered=5)
    acks.finished([2, 3, 4], 0.0)
    assert acks.due(0.0) == []
    acks.take_out(GENERATION, 1)
    assert acks.due(0.0) == [(4, True)]


def test_a_new_channel_starts_empty_though_no_loss_was_reported() -> None:
    acks = batcher(delivered=5)
    acks.finished([1, 2], 0.0)
    acks.opened(GENERATION + 1)
    assert (acks.outstanding, acks.flush()) == (0, [])
    acks.delivered(1, 1)


def test_a_channel_that_is_lost_leaves_nothing_behind() -> None:
    acks = batcher(delivered=5)
    acks.finished([1, 3], 0.0)
    assert acks.lost() == 5
    assert acks.flush() == []
    assert acks.deadline == inf
    assert acks.finished([2], 0.0) == 0
    acks.opened(GENERATION + 1)
    acks.delivered(1, 2)
    assert acks.finished([1], 0.0) == 1
    assert acks.flush() == [(1, False)]


def test_a_requeue_uses_multiple_only_with_nothing_below() -> None:
    acks = batcher(delivered=10)
    acks.finished([1, 2, 6], 0.0)
    assert acks.requeue([3, 4, 7, 8, 42]) == (
        [(2, True), (6, False)],
        [(4, True), (7, False), (8, False)],
    )
    assert acks.statistics.stale == 1
    assert acks.outstanding == 3
    assert acks.requeue([5]) == ([], [(5, False)])
    assert acks.requeue([10, 9]) == ([], [(10, True)])


def test_a_delivery_that_was_missed_is_an_error() -> None:
    acks = batcher(delivered=3)
    with pytest.raises(ValueError, match="delivery tag 5 follows 3"):
        acks.delivered(5, 6)


@pytest.mark.parametrize("option", ["ack_every", "batch_size"])
def test_a_prefetch_must_fit_complete_acks_and_batches(option: str) -> None:
    """A prefetch of 0 is no limit."""
    for prefetch in (0, 10, 11):
        check_prefetch(prefetch, **{option: 10})
    with pytest.raises(ConfigurationError, match=f"{option}=10 does not fit prefetch=9"):
        check_prefetch(9, **{option: 10})


def test_a_delivery_costs_the_same_among_a_thousand_or_a_million(
    assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None],
) -> None:
    """The cost is measured with deliveries that finish slightly out of order.

    Twenty finish at a time, with a constant number of outstanding deliveries.
    """
    source = random.Random(1)
    tags: list[int] = []
    for start in range(1, 10_001, 50):
        part = list(range(start, start + 50))
        source.shuffle(part)
        tags += part

    def cost(outstanding: int) -> float:
        acks = batcher(ack_every=100, prefetch=0, delivered=outstanding)
        began = process_time()
        for start in range(0, len(tags), 20):
            acks.delivered(outstanding + start + 1, outstanding + start + 20)
            acks.finished(tags[start : start + 20], 0.0)
            acks.due(0.0)
        return process_time() - began

    assert_same_cost(lambda: cost(1_000), lambda: cost(1_000_000))


def test_a_straggler_costs_the_same_after_few_and_many_others(
    assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None],
) -> None:
    """Closing a long gap must not stall the thread that sends acks."""

    def cost(behind: int) -> float:
        acks = batcher(delivered=behind)
        acks.finished(range(2, behind), 0.0)
        acks.flush()
        acks.finished([behind], 0.0)
        began = process_time()
        for _ in range(20):
            acks.finished([1], 0.0)
        spent = process_time() - began
        assert acks.flush() == [(behind, True)]
        return spent

    assert_same_cost(lambda: cost(1_000), lambda: cost(200_000))


@pytest.mark.parametrize("others", [10, 1_000])
def test_when_a_straggler_ends_its_gap_closes_up_to_the_next_one(others: int) -> None:
    acks = batcher(prefetch=0, delivered=others)
    acks.finished(range(2, others - 5), 0.0)
    acks.flush()
    acks.finished([others, others - 3, others - 5], 0.0)
    acks.finished([1], 0.0)
    assert acks.flush() == [(others - 5, True), (others - 3, False), (others, False)]


def test_after_the_last_straggler_acks_use_multiple_again() -> None:
    acks = batcher(prefetch=0, delivered=1_000)
    acks.finished(range(2, 1_001), 0.0)
    acks.flush()
    acks.take_out(GENERATION, 1)
    acks.delivered(1_001, 1_002)
    acks.finished([1_001, 1_002], 0.0)
    assert acks.flush() == [(1_002, True)]


class Acknowledging(RuleBasedStateMachine):
    """A channel of the broker, which settles deliveries as it is told.

    It closes with an error if a tag is unknown.

    Invariants:

    - No unfinished delivery is acked, no delivery is settled twice, and every frame names an outstanding tag.
    - Broker and batcher agree on the outstanding deliveries.
    - After `due`, no finished delivery has waited longer than the interval. Fewer than ``ack_every`` contiguous
      deliveries are finished and unacked, and all finished ones together fill less than half of the prefetch.
    - After a flush, no finished delivery is unacked.
    - ``acked == acks_sent + acks_saved``, and everything refused is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(module, "_STEPS", 1)  # short gaps are enough to reach the search limit
        self.patch.start()
        self.ack_every, self.interval, self.prefetch = 3, 10.0, 12
        self.acks = AckBatcher(ack_every=self.ack_every, ack_interval=self.interval, prefetch=self.prefetch)
        self.now = 0.0
        self.generation = 0  # of the open channel; 0 without one
        self.generations = 0
        self.newest = 0
        self.outstanding: set[int] = set()  # at the broker
        self.finished: dict[int, float] = {}  # finished and unacked deliveries, with their time
        self.acked = self.stale = 0
        self.open()

    def teardown(self) -> None:
        self.patch.stop()

    @property
    def unfinished(self) -> list[int]:
        return sorted(self.outstanding - self.finished.keys())

    @precondition(lambda self: not self.generation)
    @rule()
    def open(self) -> None:
        self.generations += 1
        self.generation = self.generations
        self.acks.opened(self.generation)
        self.newest = 0

    @precondition(lambda self: self.generation)
    @rule(really=RARELY)
    def lose(self, really: bool) -> None:
        if really:
            assert self.acks.lost() == len(self.outstanding)
            self.generation = 0
            self.outstanding.clear()
            self.finished.clear()

    @precondition(lambda self: self.generation)
    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        first = self.newest + 1
        self.newest += count
        self.acks.delivered(first, self.newest)
        self.outstanding.update(range(first, self.newest + 1))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        tags = data.draw(st.lists(st.sampled_from(self.unfinished), min_size=1, max_size=6, unique=True))
        assert self.acks.finished(tags, self.now) == len(tags)
        self.finished.update(dict.fromkeys(tags, self.now))

    @rule(tags=st.lists(st.integers(0, 20), min_size=1, max_size=4))
    def finish_anything(self, tags: list[int]) -> None:
        good = set(tags) & set(self.unfinished)
        assert self.acks.finished(tags, self.now) == len(good)
        self.stale += len(tags) - len(good)
        self.finished.update(dict.fromkeys(good, self.now))

    @rule(tag=st.integers(0, 20), older=st.booleans())
    def reject(self, tag: int, older: bool) -> None:
        good = not older and tag in self.unfinished
        assert self.acks.take_out(self.generation - older, tag) == good
        self.stale += not good
        if good:
            self.outstanding.remove(tag)

    @rule(tags=st.sets(st.integers(1, 20), min_size=1))
    def requeue(self, tags: set[int]) -> None:
        good = tags & set(self.unfinished)
        self.stale += len(tags) - len(good)
        acks, nacks = self.acks.requeue(tags)
        self.carry_out(acks)
        assert not self.finished
        returned: set[int] = set()
        for tag, many in nacks:
            returned |= self.settle(tag, many)
        assert returned == good

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.acks.due(self.now))
        assert all(self.now - since < self.interval for since in self.finished.values())
        assert len(self.finished) < self.prefetch // 2
        lowest = min(self.unfinished, default=self.newest + 1)
        assert sum(tag < lowest for tag in self.finished) < self.ack_every
        if self.finished:
            assert self.acks.deadline < inf
            assert self.acks.deadline <= min(self.finished.values()) + self.interval
        else:
            assert self.acks.deadline == inf

    @rule()
    def flush(self) -> None:
        self.carry_out(self.acks.flush())
        assert not self.finished
        assert self.acks.deadline == inf

    @invariant()
    def both_agree(self) -> None:
        statistics = self.acks.statistics
        assert self.acks.outstanding == len(self.outstanding)
        assert statistics.acked == statistics.acks_sent + statistics.acks_saved == self.acked
        assert statistics.stale == self.stale

    def carry_out(self, frames: Frames) -> None:
        sent = self.acks.statistics.acks_sent
        assert sent >= len(frames)
        for tag, many in frames:
            settled = self.settle(tag, many)
            assert settled <= self.finished.keys()
            for done in settled:
                del self.finished[done]
            self.acked += len(settled)

    def settle(self, tag: int, many: bool) -> set[int]:
        assert tag in self.outstanding
        settled = {one for one in self.outstanding if one <= tag} if many else {tag}
        self.outstanding -= settled
        return settled


TestAcknowledging = Acknowledging.TestCase
TestAcknowledging.settings = machine(60, steps=50)
