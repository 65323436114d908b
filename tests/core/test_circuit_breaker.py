"""The kill switch: it trips on a share of enough failures, probes one at a time, and resumes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import ConfigurationError, KillSwitch
from reliable_mq.core.consumer.circuit_breaker import TRANSITIONS, CircuitBreaker, Transition
from tests.core.sessions import CheckedBreaker
from tests.transitions import changes

SWITCH = KillSwitch(share=0.5, window=10, minimum=4, pause=2, longest_pause=5)


def allowed(breaker: CircuitBreaker, now: float) -> int | None:
    breaker.due(now)
    return breaker.allows


def tripped() -> CircuitBreaker:
    breaker = CheckedBreaker(SWITCH)
    assert breaker.settled(0, 4, 0.0) is Transition.PAUSED
    return breaker


def test_every_transition_of_the_table_happens() -> None:
    CheckedBreaker.seen.clear()
    breaker = tripped()
    for handled, now in ((0, 2.0), (1, 6.0)):
        assert allowed(breaker, now) == 1
        breaker.handed_out()
        breaker.settled(handled, 1 - handled, now)
    assert CheckedBreaker.seen == changes(TRANSITIONS)


def test_it_trips_on_a_share_of_enough_handlings() -> None:
    breaker = CircuitBreaker(SWITCH)
    assert breaker.settled(0, 3, 0.0) is None
    assert allowed(breaker, 0.0) is None
    assert not breaker.paused
    assert breaker.settled(3, 0, 1.0) is Transition.PAUSED
    assert breaker.paused
    assert allowed(breaker, 2.9) == 0
    assert (breaker.deadline, breaker.pause) == (3.0, 2.0)


def test_less_than_the_share_is_borne() -> None:
    breaker = CircuitBreaker(SWITCH)
    assert [breaker.settled(3, 2, now) for now in (0.0, 0.5, 5.0, 9.0)] == [None] * 4


def test_what_has_left_the_window_does_not_count() -> None:
    breaker = CircuitBreaker(SWITCH)
    assert breaker.settled(0, 3, 0.0) is None
    assert breaker.settled(0, 1, 10.0) is None


def test_what_was_handed_out_before_the_pause_changes_nothing() -> None:
    breaker = tripped()
    assert breaker.settled(50, 50, 1.0) is None
    assert allowed(breaker, 1.9) == 0
    assert allowed(breaker, 2.0) == 1
    assert breaker.settled(1, 0, 2.0) is None, "it was no probe"
    assert breaker.paused


def test_one_that_succeeds_ends_it() -> None:
    breaker = tripped()
    assert allowed(breaker, 2.0) == 1
    breaker.handed_out()
    assert allowed(breaker, 2.1) == 0
    assert breaker.deadline is None
    assert breaker.settled(1, 0, 2.5) is Transition.RESUMED
    assert allowed(breaker, 2.5) is None


def test_each_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker = tripped()
    now, pauses = 2.0, []
    for _ in range(3):
        assert allowed(breaker, now) == 1
        breaker.handed_out()
        assert breaker.settled(0, 1, now) is Transition.PAUSED
        pauses.append(breaker.pause)
        now += breaker.pause
    assert pauses == [4.0, 5.0, 5.0]
    assert allowed(breaker, now) == 1
    breaker.handed_out()
    breaker.settled(1, 0, now)
    assert breaker.settled(0, 4, now) is Transition.PAUSED
    assert breaker.pause == 2.0, "it begins anew"


def test_a_probe_that_is_recalled_makes_room_for_another() -> None:
    breaker = tripped()
    assert allowed(breaker, 2.0) == 1
    breaker.handed_out()
    breaker.recalled()
    assert allowed(breaker, 2.0) == 1


def test_a_pause_ends_though_there_is_nothing_to_probe_with() -> None:
    """Nobody is to look at the clock again and again until there is."""
    breaker = tripped()
    breaker.due(2.0)
    assert breaker.deadline is None
    assert breaker.paused
    assert breaker.allows == 1


@pytest.mark.parametrize(("failed", "change"), [(0, Transition.RESUMED), (1, Transition.PAUSED)])
def test_one_that_may_hang_is_a_probe_that_no_other_waits_for(failed: int, change: Transition) -> None:
    breaker = tripped()
    breaker.due(2.0)
    breaker.handed_out(beside=True)
    assert breaker.allows == 1
    assert breaker.settled(1 - failed, failed, 2.5) is change
    if failed:
        assert allowed(breaker, 2.5 + breaker.pause) == 1
        assert breaker.settled(1, 0, 7.0) is None, "that one was before"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 4)), max_size=60))
def test_whatever_happens_it_runs_or_has_a_time_to_look_again(results: list[tuple[int, int, float]]) -> None:
    breaker, now = CheckedBreaker(SWITCH), 0.0
    for handled, failed, wait in results:
        now += wait
        if allowed(breaker, now) == 1:
            breaker.handed_out()
        breaker.settled(handled, failed, now)
        assert len(breaker._parts) <= 11
        breaker.due(now)
        deadline = breaker.deadline
        assert deadline is None or now < deadline <= now + SWITCH.longest_pause
        assert deadline is not None or breaker.allows != 0 or breaker._probe


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"share": 0}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": "half"}, "share"),
        ({"window": 0}, "window"),
        ({"minimum": 0}, "minimum"),
        ({"minimum": 1.5}, "minimum"),
        ({"pause": 0}, "pause"),
        ({"pause": 10, "longest_pause": 5}, "longest_pause"),
    ],
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        KillSwitch(**wrong)
