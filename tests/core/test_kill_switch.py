"""The kill switch: it trips on enough failures, probes, and resumes."""

from __future__ import annotations

from datetime import timedelta
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import ConfigurationError, KillSwitch
from reliable_mq.core.consumer.kill_switch import TRANSITIONS, KillSwitchMonitor, KillSwitchState
from tests.core.deliveries import delivery
from tests.core.sessions import CheckedKillSwitch
from tests.transitions import changes

SWITCH = KillSwitch(share=0.5, window=10, minimum=4, pause=2, longest_pause=5)


def allowed(monitor: KillSwitchMonitor, now: float) -> int | None:
    monitor.due(now)
    return monitor.allows


def tripped() -> KillSwitchMonitor:
    monitor = CheckedKillSwitch(SWITCH)
    assert monitor.settled(0, 4, 0.0) is KillSwitchState.PAUSED
    return monitor


def test_every_transition_of_the_table_happens() -> None:
    CheckedKillSwitch.seen.clear()
    monitor = tripped()
    for handled, now in ((0, 2.0), (1, 6.0)):
        assert allowed(monitor, now) == 1
        monitor.dispatched([delivery(1)])
        monitor.settled(handled, 1 - handled, now)
    assert CheckedKillSwitch.seen == changes(TRANSITIONS)


def test_it_trips_on_a_share_of_enough_handlings() -> None:
    monitor = KillSwitchMonitor(SWITCH)
    assert monitor.settled(0, 3, 0.0) is None
    assert allowed(monitor, 0.0) is None
    assert not monitor.paused
    assert monitor.settled(3, 0, 1.0) is KillSwitchState.PAUSED
    assert monitor.paused
    assert allowed(monitor, 2.9) == 0
    assert (monitor.deadline, monitor.pause) == (3.0, 2.0)


def test_less_than_the_share_is_borne() -> None:
    monitor = KillSwitchMonitor(SWITCH)
    assert [monitor.settled(3, 2, now) for now in (0.0, 0.5, 5.0, 9.0)] == [None] * 4


def test_what_has_left_the_window_does_not_count() -> None:
    monitor = KillSwitchMonitor(SWITCH)
    assert monitor.settled(0, 3, 0.0) is None
    assert monitor.settled(0, 1, 10.0) is None


def test_what_was_handed_out_before_the_pause_changes_nothing() -> None:
    monitor = tripped()
    assert monitor.settled(50, 50, 1.0) is None
    assert allowed(monitor, 1.9) == 0
    assert allowed(monitor, 2.0) == 1
    earlier, probe, suspect = delivery(1), delivery(2), delivery(3)
    monitor.dispatched([probe])
    monitor.dispatched([suspect], beside=True)
    assert [monitor.is_probe(one) for one in (earlier, probe, suspect)] == [False, True, True]


def test_one_that_succeeds_ends_it() -> None:
    monitor = tripped()
    assert allowed(monitor, 2.0) == 1
    monitor.dispatched([delivery(1)])
    assert allowed(monitor, 2.1) == 0
    assert monitor.deadline == inf
    assert monitor.settled(1, 0, 2.5) is KillSwitchState.RUNNING
    assert allowed(monitor, 2.5) is None


def test_each_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    monitor = tripped()
    now, pauses = 2.0, []
    for _ in range(3):
        assert allowed(monitor, now) == 1
        monitor.dispatched([delivery(1)])
        assert monitor.settled(0, 1, now) is KillSwitchState.PAUSED
        pauses.append(monitor.pause)
        now += monitor.pause
    assert pauses == [4.0, 5.0, 5.0]
    assert allowed(monitor, now) == 1
    monitor.dispatched([delivery(1)])
    monitor.settled(1, 0, now)
    assert monitor.settled(0, 4, now) is KillSwitchState.PAUSED
    assert monitor.pause == 2.0, "it begins anew"


def test_a_probe_that_is_recalled_makes_room_for_another() -> None:
    monitor = tripped()
    assert allowed(monitor, 2.0) == 1
    monitor.dispatched([delivery(1)])
    monitor.recalled()
    assert allowed(monitor, 2.0) == 1


def test_a_pause_ends_though_there_is_nothing_to_probe_with() -> None:
    """Otherwise the consumer would poll without end until a delivery comes."""
    monitor = tripped()
    monitor.due(2.0)
    assert monitor.deadline == inf
    assert monitor.paused
    assert monitor.allows == 1


@pytest.mark.parametrize(("failed", "change"), [(0, KillSwitchState.RUNNING), (1, KillSwitchState.PAUSED)])
def test_one_that_may_hang_is_a_probe_that_no_other_waits_for(failed: int, change: KillSwitchState) -> None:
    monitor = tripped()
    monitor.due(2.0)
    suspect = delivery(1)
    monitor.dispatched([suspect], beside=True)
    assert monitor.allows == 1
    assert monitor.settled(1 - failed, failed, 2.5) is change
    if failed:
        assert allowed(monitor, 2.5 + monitor.pause) == 1
        assert not monitor.is_probe(suspect), "that one was before"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 4)), max_size=60))
def test_whatever_happens_it_runs_or_has_a_time_to_look_again(results: list[tuple[int, int, float]]) -> None:
    monitor, now = CheckedKillSwitch(SWITCH), 0.0
    for handled, failed, wait in results:
        now += wait
        if allowed(monitor, now) == 1:
            monitor.dispatched([delivery(1)])
        if handled or failed:
            monitor.settled(handled, failed, now)
        assert len(monitor._parts) <= 11
        monitor.due(now)
        deadline = monitor.deadline
        assert deadline == inf or now < deadline <= now + SWITCH.longest_pause
        assert deadline < inf or monitor.allows != 0 or monitor._probe


def test_durations_may_be_timedeltas() -> None:
    second = timedelta(seconds=1)
    monitor = CheckedKillSwitch(KillSwitch(window=10 * second, minimum=1, pause=2 * second, longest_pause=3 * second))
    monitor.settled(0, 1, 0.0)
    assert monitor.deadline == 2.0
    monitor.due(2.0)
    monitor.settled(0, 1, 2.0)
    assert monitor.deadline == 5.0


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
