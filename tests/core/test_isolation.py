"""Isolation against a broker that closes the channel over certain publishes."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.core.isolation import Isolation
from tests.properties import examples, machine


class IsolationMachine(RuleBasedStateMachine):
    """A group at a time is on the wire; any part of it settles before the channel is lost, for any reason."""

    def __init__(self) -> None:
        super().__init__()
        self.isolation: Isolation[int] = Isolation()
        self.everyone: set[int] = set()
        self.settled: set[int] = set()
        self.culprits: set[int] = set()
        self.group: list[int] = []
        self.probing = False

    @precondition(lambda self: not self.probing)
    @rule(total=st.integers(0, 40))
    def channel_closes(self, total: int) -> None:
        self.group = list(range(len(self.everyone), len(self.everyone) + total))
        self.everyone.update(self.group)
        self.blame()

    def blame(self) -> None:
        """The channel closes over what is left of the group."""
        culprit = self.isolation.closed(self.group)
        assert (culprit is not None) is (len(self.group) == 1)
        if culprit is not None:
            assert [culprit] == self.group
            self.culprits.add(culprit)
        self.probing = self.probing or len(self.group) > 1
        self.group = []

    @precondition(lambda self: self.group)
    @rule(data=st.data())
    def some_are_settled(self, data: st.DataObject) -> None:
        settled = data.draw(st.sets(st.sampled_from(self.group), min_size=1))
        self.settled |= settled
        self.group = [one for one in self.group if one not in settled]

    @precondition(lambda self: self.probing)
    @rule()
    def channel_closes_over_the_group(self) -> None:
        self.blame()

    @precondition(lambda self: self.probing)
    @rule()
    def connection_is_lost(self) -> None:
        self.isolation.interrupted(self.group)
        self.group = []

    @precondition(lambda self: self.probing and not self.group)
    @rule()
    def next_group(self) -> None:
        below = self.everyone - self.settled - self.culprits
        self.group = self.isolation.next_group()
        assert self.group == sorted(below)[: len(self.group)], "not the oldest ones"
        assert self.isolation.active is bool(self.group) is bool(below)
        self.probing = bool(self.group)

    @invariant()
    def active_while_suspects_are_probed(self) -> None:
        assert self.isolation.active is self.probing

    def teardown(self) -> None:
        """None is forgotten, none is in two groups: who is not settled or convicted comes out, once, in order."""
        left = list(self.group)
        while group := self.isolation.next_group():
            left += group
        assert left == sorted(self.everyone - self.settled - self.culprits)
        assert not self.isolation.active


TestIsolation = IsolationMachine.TestCase
TestIsolation.settings = machine(50, steps=30)


def isolate(suspects: list[int], culprits: set[int]) -> tuple[list[int], list[int], int]:
    """A broker that acks a group unless a culprit is in it: who was convicted, who was acked, how often it closed."""
    isolation: Isolation[int] = Isolation()
    convicted, acked = [], []
    culprit = isolation.closed(suspects)
    closes = 0
    if culprit is not None:
        return [culprit], [], 0
    while group := isolation.next_group():
        if culprits.isdisjoint(group):
            acked += group
            continue
        closes += 1
        culprit = isolation.closed(group)
        if culprit is not None:
            convicted.append(culprit)
    return convicted, acked, closes


@given(data=st.data(), total=st.integers(1, 200))
@examples(50)
def test_culprits_alone_are_convicted_and_everyone_else_is_acked_in_order(data: st.DataObject, total: int) -> None:
    """Whoever closes the channel is convicted; all others are acked, in the order of publishing, each once."""
    culprits = data.draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=5))
    convicted, acked, closes = isolate(list(range(total)), culprits)
    assert convicted == sorted(culprits)
    assert acked == [one for one in range(total) if one not in culprits]
    assert closes <= len(culprits) * ceil(log2(total))


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 100, 1_000, 1_025])
def test_one_culprit_is_found_within_the_logarithm_of_closes(total: int) -> None:
    """One culprit among n costs at most log2(n) further channel closes, wherever it stands."""
    for culprit in {0, total // 3, total // 2, total - 1}:
        convicted, _, closes = isolate(list(range(total)), {culprit})
        assert convicted == [culprit]
        assert closes <= ceil(log2(total))


def test_a_publish_that_was_alone_is_the_culprit_at_once() -> None:
    """A channel that closes over a single publish convicts it, and nothing is to be probed."""
    isolation: Isolation[str] = Isolation()
    assert isolation.closed(["alone"]) == "alone"
    assert not isolation.active


def test_a_close_over_nothing_accuses_nobody() -> None:
    """A channel that closes with nothing outstanding leaves nothing to probe."""
    isolation: Isolation[str] = Isolation()
    assert isolation.closed([]) is None
    assert not isolation.active


def test_a_group_is_halved_and_the_older_half_comes_first() -> None:
    """The halves of a group over which the channel closed are probed before the groups behind it."""
    isolation: Isolation[str] = Isolation()
    assert isolation.closed(list("abcdef")) is None
    assert isolation.next_group() == list("abc")
    assert isolation.closed(list("abc")) is None
    assert isolation.next_group() == ["a"]
    assert isolation.next_group() == ["b", "c"]
    assert isolation.next_group() == ["d", "e", "f"]
    assert isolation.active
    assert isolation.next_group() == []
    assert not isolation.active


def test_a_lost_connection_convicts_nobody() -> None:
    """A group, even of one, that a lost connection interrupted is probed again as it is."""
    isolation: Isolation[str] = Isolation()
    isolation.closed(["a", "b"])
    group = isolation.next_group()
    isolation.interrupted(group)
    assert isolation.next_group() == group == ["a"]
