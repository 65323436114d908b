"""The bisector, with a broker that closes the channel over certain publishes."""

from __future__ import annotations

from collections import Counter
from math import isqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.core.publisher.bisect import ChannelErrorBisector
from tests.properties import examples, machine

NAMED = st.sampled_from(["none", "one", "some", "all"])


class IsolationMachine(RuleBasedStateMachine):
    """One group at a time is on the wire.

    Any part of it is settled before the channel is lost, for any reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.isolation: ChannelErrorBisector[int] = ChannelErrorBisector()
        self.everyone: set[int] = set()
        self.settled: set[int] = set()
        self.culprits: set[int] = set()
        self.group: list[int] = []
        self.cleared: list[int] = []
        self.probing = False

    @precondition(lambda self: not self.probing)
    @rule(total=st.integers(0, 40), named=NAMED, data=st.data())
    def channel_closes(self, total: int, named: str, data: st.DataObject) -> None:
        self.group = list(range(len(self.everyone), len(self.everyone) + total))
        self.everyone.update(self.group)
        self.blame(total, named, data)

    def blame(self, written: int, named: str, data: st.DataObject) -> None:
        """The broker closes the channel over one of the first `written` publishes."""
        group, self.group = self.group, []
        on_channel, unwritten = group[:written], group[written:]
        those: list[int] = []
        if group and named != "none":
            chosen = data.draw(st.sets(st.sampled_from(group), min_size=1, max_size=1 if named == "one" else None))
            those = [one for one in group if named == "all" or one in chosen]
        crashed = not those and data.draw(st.booleans())
        culprits = self.isolation.closed(on_channel, unwritten, those, crashed=crashed)
        self.culprits.update(culprits)
        if crashed:
            assert culprits in ([], on_channel)
        elif len(on_channel) == 1:
            assert set(on_channel) <= set(culprits)
        elif culprits:
            assert culprits in (those, [one for one in those if one in on_channel])
        self.probing = self.probing or len(culprits) < len(group)

    @precondition(lambda self: self.group)
    @rule(data=st.data())
    def some_are_settled(self, data: st.DataObject) -> None:
        settled = data.draw(st.sets(st.sampled_from(self.group), min_size=1))
        self.settled |= settled
        self.group = [one for one in self.group if one not in settled]

    @precondition(lambda self: self.probing)
    @rule(named=NAMED, data=st.data())
    def channel_closes_over_the_group(self, named: str, data: st.DataObject) -> None:
        self.blame(data.draw(st.integers(0, len(self.group))), named, data)

    @precondition(lambda self: self.probing)
    @rule()
    def connection_is_lost(self) -> None:
        self.isolation.interrupted(self.group)
        self.group = []

    @precondition(lambda self: self.probing)
    @rule(data=st.data())
    def group_is_overdue(self, data: st.DataObject) -> None:
        """Those written are cleared. They are never probed."""
        written = data.draw(st.integers(0, len(self.group)))
        self.isolation.overdue = True
        self.isolation.interrupted(self.group[:written], self.group[written:])
        self.cleared += self.group[:written]
        self.group = []

    @precondition(lambda self: self.probing and not self.group)
    @rule()
    def next_group(self) -> None:
        below = self.everyone - self.settled - self.culprits - set(self.cleared)
        group = self.isolation.next_group()
        assert self.isolation.active is bool(below)
        if below:
            assert group
            assert set(group) <= below
            assert group == sorted(group)
            self.group = group
        else:
            assert group == self.cleared
            self.settled.update(group)
            self.cleared = []
        self.probing = bool(below)

    @invariant()
    def active_while_suspects_are_probed(self) -> None:
        assert self.isolation.active is self.probing

    def teardown(self) -> None:
        """Every publish that is not settled or convicted comes out, exactly once."""
        left = list(self.group)
        while group := self.isolation.next_group():
            left += group
        assert sorted(left) == sorted(self.everyone - self.settled - self.culprits)
        assert not self.isolation.active


TestIsolation = IsolationMachine.TestCase
TestIsolation.settings = machine(50, steps=30)


class Broker:
    """Processes in order, closes at a flaw, and may not have confirmed all before."""

    def __init__(self, flaws: dict[int, str], unconfirmed: set[int]) -> None:
        self.isolation: ChannelErrorBisector[int] = ChannelErrorBisector()
        self.flaws = flaws
        self.unconfirmed = unconfirmed  # publishes whose confirm is lost if the channel closes
        self.copies: Counter[int] = Counter()
        self.acked: list[int] = []
        self.convicted: list[int] = []
        self.closes = 0

    def publish(self, group: list[int]) -> None:
        culprit = next((one for one in group if one in self.flaws), None)
        if culprit is None:
            self.copies.update(group)
            self.acked += group
            return
        self.closes += 1
        processed = group[: group.index(culprit)]
        self.copies.update(processed)
        confirmed = [one for one in processed if one not in self.unconfirmed]
        self.acked += confirmed
        unsettled = [one for one in group if one not in confirmed]
        flaw = self.flaws[culprit]
        named = [one for one in unsettled if flaw and self.flaws.get(one) == flaw]
        self.convicted += self.isolation.closed(unsettled, (), named)

    def isolate(self, total: int) -> None:
        self.publish(list(range(total)))
        while group := self.isolation.next_group():
            self.publish(group)


@given(
    total=st.integers(1, 120),
    flaws=st.dictionaries(st.integers(0, 119), st.sampled_from(["", "no a", "no b"]), min_size=1, max_size=12),
    unconfirmed=st.sets(st.integers(0, 119)) | st.just(set(range(120))),
)
@examples(200)
def test_an_innocent_publish_goes_out_at_most_three_times(
    total: int, flaws: dict[int, str], unconfirmed: set[int]
) -> None:
    """Only culprits are convicted, and all others arrive.

    They go out at most twice if every error names its culprit, and at most three times otherwise.
    """
    flaws = {one: flaw for one, flaw in flaws.items() if one < total}
    broker = Broker(flaws, unconfirmed)
    broker.isolate(total)
    assert sorted(broker.convicted) == sorted(flaws)
    assert sorted(broker.acked) == [one for one in range(total) if one not in flaws]
    assert not broker.isolation.active
    assert max(broker.copies.values(), default=0) <= (3 if "" in flaws.values() else 2)


@pytest.mark.parametrize(("culprits", "closes"), [([0], 1), ([50], 1), ([99], 1), ([10, 11, 60], 2), (range(100), 2)])
def test_culprits_that_are_named_cost_one_further_close(culprits: list[int], closes: int) -> None:
    """This holds for any number of named culprits.

    Publishes behind the first culprit are processed once.
    """
    broker = Broker(dict.fromkeys(culprits, "no such exchange"), set(range(100)))
    broker.isolate(100)
    assert broker.convicted == list(culprits)
    assert broker.closes == closes
    first = min(culprits)
    assert broker.copies == {one: 2 if one < first else 1 for one in range(100) if one not in culprits}


@pytest.mark.parametrize("total", [2, 3, 4, 5, 100, 1_000, 1_025])
def test_a_culprit_that_is_not_named_costs_two_further_closes(total: int) -> None:
    """The number of round trips is about twice the square root of the suspects."""
    for culprit in {0, total // 3, total // 2, total - 1}:
        broker = Broker({culprit: ""}, set(range(total)))
        broker.publish(list(range(total)))
        groups = 0
        while group := broker.isolation.next_group():
            broker.publish(group)
            groups += 1
        assert broker.convicted == [culprit]
        assert broker.closes <= 3
        assert groups <= 2 * isqrt(total) + 3


def test_a_publish_that_was_alone_is_the_culprit_at_once() -> None:
    """A lone publish is convicted at once, even if others are still unwritten."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    assert isolation.closed(["alone"]) == ["alone"]
    assert not isolation.active
    assert isolation.closed(["alone"], ["unwritten", "unwritten too"]) == ["alone"]
    assert isolation.next_group() == ["unwritten", "unwritten too"]


def test_a_publish_alone_at_two_crashes_is_the_culprit() -> None:
    """The broker may have crashed for another reason.

    The unwritten publishes follow.
    """
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    assert isolation.closed(["alone"], ["unwritten"], crashed=True) == []
    assert isolation.next_group() == ["alone"]
    assert isolation.closed(["alone"], crashed=True) == ["alone"]
    assert isolation.next_group() == ["unwritten"]


def test_a_close_over_nothing_accuses_nobody() -> None:
    """If nothing was outstanding, only the unwritten publishes are probed."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    assert isolation.closed([]) == []
    assert not isolation.active
    assert isolation.closed([], ["a"], ["a"]) == []
    assert isolation.next_group() == ["a"]
    assert isolation.closed([], ["a"], ["a"]) == []
    assert isolation.next_group() == ["a"]


def test_those_that_the_error_names_are_probed_last() -> None:
    """Publishes before the first named one are probed first, then the unnamed rest."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    assert isolation.closed(list("abXcYd"), list("eZ"), list("XYZ")) == []
    assert isolation.next_group() == ["a", "b"]
    assert isolation.next_group() == ["c", "d", "e"]
    assert isolation.next_group() == ["X", "Y", "Z"]
    assert isolation.closed(list("X"), list("YZ"), list("XYZ")) == list("XYZ")
    assert isolation.next_group() == []


def test_a_named_group_is_probed_again_after_another_error() -> None:
    """A group is convicted only by an error that names all of it."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    isolation.closed(list("WXYZ"), (), list("WXYZ"))
    assert isolation.next_group() == list("WXYZ")
    assert isolation.closed(list("WXYZ"), (), list("YZ")) == []
    assert isolation.next_group() == list("WX")
    assert isolation.next_group() == list("YZ")
    isolation.interrupted(list("YZ"))
    assert isolation.next_group() == list("YZ")
    assert isolation.closed(list("YZ"), (), list("YZ")) == list("YZ")


def test_unnamed_suspects_are_probed_in_groups_and_then_alone() -> None:
    """The oldest are probed first."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    assert isolation.closed(list("abcd")) == []
    assert isolation.next_group() == list("ab")
    assert isolation.closed(list("ab")) == []
    assert isolation.next_group() == ["a"]
    assert isolation.next_group() == ["b"]
    assert isolation.next_group() == list("cd")
    assert isolation.active
    assert isolation.next_group() == []
    assert not isolation.active


def test_a_lost_connection_convicts_nobody() -> None:
    """An interrupted group, even of one publish, is probed again unchanged."""
    isolation: ChannelErrorBisector[str] = ChannelErrorBisector()
    isolation.closed(["a", "b"])
    group = isolation.next_group()
    isolation.interrupted(group)
    assert isolation.next_group() == group == ["a"]
