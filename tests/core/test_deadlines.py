"""`PublishDeadlines`, compared with a dictionary of deadlines, and its cost."""

from __future__ import annotations

from math import inf
from time import process_time
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.core.publisher import deadlines as module
from reliable_mq.core.publisher.deadlines import PublishDeadlines
from reliable_mq.core.publisher.publication import Outcome, Publication
from reliable_mq.message import Message
from tests.properties import machine

if TYPE_CHECKING:
    from collections.abc import Callable

DELIVERY_TIMEOUT = 10.0
MESSAGE = Message(b"")


def publication(accepted_at: float, timeout: float | None = None) -> Publication:
    return Publication(MESSAGE, "", "orders", True, 0, accepted_at, timeout)


def settle(roster: PublishDeadlines[Publication], one: Publication) -> None:
    one.outcome = Outcome.CONFIRMED
    roster.settled(1)


def expire(roster: PublishDeadlines[Publication], now: float) -> list[Publication]:
    """Expire publishes, and set their outcome as the session does."""
    expired = roster.expire(now)
    for one in expired:
        one.outcome = Outcome.UNKNOWN
    roster.settled(len(expired))
    return expired


class RosterMachine(RuleBasedStateMachine):
    """Publishes are accepted, settled and expired while time passes.

    The heap is compacted early, so that short runs reach it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(module, "_SETTLED_KEPT", 2)
        self.patch.start()
        self.roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
        self.held: dict[Publication, float] = {}
        self.now = 100.0

    def teardown(self) -> None:
        self.patch.stop()
        assert set(expire(self.roster, float("inf"))) == set(self.held)

    @rule(timeouts=st.lists(st.sampled_from([None, None, None, 0.0, 1.0, 5.0, 50.0]), max_size=8))
    def enter(self, timeouts: list[float | None]) -> None:
        entering = [publication(self.now, timeout) for timeout in timeouts]
        for one, timeout in zip(entering, timeouts, strict=True):
            self.held[one] = self.now + (DELIVERY_TIMEOUT if timeout is None else timeout)
        self.roster.enter(entering)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle_some(self, data: st.DataObject) -> None:
        """Settle all but every n-th publish, or all but a few, so that old and new remain."""
        every = data.draw(st.integers(2, 5))
        offset = data.draw(st.integers(0, every - 1))
        settled = [one for index, one in enumerate(self.held) if index % every != offset]
        for one in settled:
            one.outcome = Outcome.CONFIRMED
            del self.held[one]
        self.roster.settled(len(settled))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [one for one, deadline in self.held.items() if deadline <= self.now]
        for one in due:
            del self.held[one]
        expired = expire(self.roster, self.now)
        assert len(expired) == len(due)
        assert set(expired) == set(due)

    @rule()
    def ask(self) -> None:
        """Check the readings.

        This is a rule and not an invariant, because a reading drops settled publishes, and runs without it are also
        wanted.
        """
        assert self.roster.oldest_accepted_at == min((one.accepted_at for one in self.held), default=None)
        assert self.roster.next_deadline == min(self.held.values(), default=inf)

    @invariant()
    def holds_what_entered_and_is_not_settled(self) -> None:
        assert len(self.roster) == len(self.held)

    @invariant()
    def settled_publishes_do_not_pile_up(self) -> None:
        most = 2 * len(self.held) + module._SETTLED_KEPT
        assert max(len(self.roster._common), len(self.roster._timed), len(self.roster._heap)) <= most


TestRoster = RosterMachine.TestCase
TestRoster.settings = machine(50, steps=40)


def test_publishes_without_a_timeout_expire_after_the_common_one() -> None:
    """They expire exactly when the delivery timeout is over."""
    roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
    first, second = publication(0.0), publication(1.0)
    roster.enter([first])
    roster.enter([second])
    assert roster.next_deadline == 10.0
    assert expire(roster, 9.9) == []
    assert expire(roster, 10.0) == [first]
    assert (roster.next_deadline, roster.oldest_accepted_at) == (11.0, 1.0)


def test_a_timeout_of_its_own_may_be_shorter_or_longer() -> None:
    """Only its individual timeout counts."""
    roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
    short, common, long = publication(0.0, 1.0), publication(0.0), publication(0.0, 60.0)
    for one in (long, common, short):
        roster.enter([one])
    assert expire(roster, 1.0) == [short]
    assert expire(roster, 30.0) == [common]
    assert roster.next_deadline == 60.0
    assert expire(roster, 60.0) == [long]
    assert roster.next_deadline == inf


def test_a_settled_publish_does_not_expire() -> None:
    """It has left, so it is not given up at its deadline."""
    roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
    timed, common = publication(0.0, 1.0), publication(0.0)
    for one in (timed, common):
        roster.enter([one])
        settle(roster, one)
    assert roster.next_deadline == inf
    assert expire(roster, 100.0) == []
    assert roster.oldest_accepted_at is None


def test_settled_publishes_with_own_timeouts_do_not_pile_up() -> None:
    """Publishes with a long timeout that are settled at once are not kept."""
    roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
    stays = publication(0.0, 3600.0)
    roster.enter([stays])
    for _ in range(1_000):
        settled = publication(0.0, 60.0)
        roster.enter([settled])
        settle(roster, settled)
    assert len(roster._heap) <= module._SETTLED_KEPT + 3
    assert expire(roster, 3600.0) == [stays]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_deadline_costs_the_same_however_many_are_outstanding(
    timeout: float | None, assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None]
) -> None:
    """The cost does not depend on the number of outstanding publishes.

    The test measures entering, leaving, and reading the oldest publish and the next deadline.
    """

    def cost(outstanding: int, rounds: int) -> float:
        spent = 0.0
        for _ in range(rounds):
            roster: PublishDeadlines[Publication] = PublishDeadlines(DELIVERY_TIMEOUT)
            publications = [publication(0.0, timeout) for _ in range(outstanding)]
            roster.enter(publications)
            began = process_time()
            for one in publications[: outstanding // 2]:
                settle(roster, one)
                _ = roster.oldest_accepted_at, roster.next_deadline
            spent += process_time() - began
        return spent / (outstanding * rounds)

    assert_same_cost(lambda: cost(1_000, 5), lambda: cost(30_000, 1))
