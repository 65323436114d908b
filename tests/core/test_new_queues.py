"""New queues, and the time when their confirms are final."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.core.new_queues import KEPT, NewQueues

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE = 2.0
NEVER = float("-inf")


class _Unlooped(OrderedDict[str, float]):
    """Times of queues that only allow a lookup by name, and of the first one."""

    def __iter__(self) -> Iterator[str]:
        yield next(super().__iter__())
        raise AssertionError("all new queues are looked at")

    def _refuse(self) -> Iterator[str]:
        raise AssertionError("all new queues are looked at")

    values = items = _refuse  # type: ignore[assignment]


def made(**queues: float) -> NewQueues:
    new = NewQueues()
    new.longest = GRACE
    for name, at in queues.items():
        new.made([name], at)
    return new


def without_loops(new: NewQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    unlooped = _Unlooped()
    for name, at in new._made.items():
        unlooped[name] = at
    monkeypatch.setattr(new, "_made", unlooped)


def final_at(new: NewQueues, routing_key: str, now: float, exchange: str = "", *, copied: bool = False) -> float | None:
    return new.final_at(exchange, routing_key, now, now, GRACE, copied=copied)


def test_a_confirm_is_final_when_the_grace_of_its_queue_is_over() -> None:
    new = made(q=10.0)
    assert new.latest == 10.0
    assert final_at(new, "q", 11.9) == 12.0
    assert final_at(new, "q", 12.0) is None


def test_on_the_default_exchange_the_key_names_the_queue() -> None:
    new = made(q=10.0)
    assert final_at(new, "other", 10.1) is None


def test_with_another_exchange_or_a_copy_any_new_queue_counts() -> None:
    new = made(a=10.0, b=11.0)
    assert final_at(new, "x", 11.5, "events") == 13.0
    assert final_at(new, "x", 11.5, copied=True) == 13.0
    assert final_at(made(), "x", 11.5, "events") is None


@pytest.mark.slow
def test_a_confirm_costs_the_same_however_many_queues_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may make thousands of queues at its start.

    It may then publish to a topic exchange at once.
    """
    new = made(**{f"q{number}": 10.0 + number / 1000 for number in range(500)})
    without_loops(new, monkeypatch)
    assert final_at(new, "x", 11.0, "events") == 12.499
    assert final_at(new, "q100", 11.0) == 12.1


def test_a_new_queue_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten-thousandth of queues that are declared one by one took two milliseconds."""
    new = made(**{f"q{number}": 10.0 + number / 1000 for number in range(500)})
    without_loops(new, monkeypatch)
    new.begin(["new"])
    new.end(["new"], 12.0)
    new.made(["q0"], 11.9)  # again
    assert new.latest == 12.0
    assert final_at(new, "q0", 12.0) == 13.9
    new.made(["last"], 10.0 + GRACE + KEPT + 0.0015)
    assert len(new._made) == 501  # without q1; q0 is newer now


def test_a_time_out_of_order_hides_no_newer_queue() -> None:
    """Connections read the clock before they wait for the record's lock."""
    new = made(a=10.0, b=9.9)
    assert new.latest == 10.0
    new.made([], 9.95 + GRACE + KEPT)
    assert new.latest == 10.0
    new.made([], 10.0 + GRACE + KEPT)
    assert new.latest == NEVER
    assert new.new(NEVER, GRACE) == []


def test_a_queue_is_new_while_it_is_being_made() -> None:
    """It may exist before its reply arrives, and may already hold a message."""
    new = NewQueues()
    new.begin(["q"])
    assert new.latest == float("inf")
    assert final_at(new, "q", 50.0) == 52.0
    assert final_at(new, "x", 50.0, "events") == 52.0
    assert final_at(new, "other", 50.0) is None
    assert new.new(50.0, GRACE) == ["q"]


def test_a_queue_declared_twice_is_as_new_as_the_second_time() -> None:
    new = made()
    new.begin(["q"])
    new.begin(["q"])
    new.end(["q"], 10.0)
    assert new.latest == float("inf")
    new.end(["q"], 11.0)
    assert new.latest == 11.0
    assert final_at(new, "q", 12.5) == 13.0


def test_a_queue_never_becomes_older() -> None:
    new = made(q=10.0)
    new.made(["q"], 9.0)
    assert final_at(new, "q", 11.0) == 12.0


def test_what_is_older_than_every_grace_is_forgotten() -> None:
    new = made(old=10.0, other=10.1)
    new.made(["q"], 10.0 + GRACE + KEPT)
    assert new.new(0.0, GRACE) == ["other", "q"]


def test_a_queue_is_new_until_its_broker_outlives_the_grace() -> None:
    new = made(q=10.0)
    assert new.final_at("", "q", 100.0, 11.9, GRACE, copied=False) == 12.0
    assert new.final_at("", "q", 100.0, NEVER, GRACE, copied=False) == 12.0
    assert new.final_at("", "q", 100.0, 12.0, GRACE, copied=False) is None
    assert new.final_at("", "other", 100.0, NEVER, GRACE, copied=False) is None


def test_new_queues_are_those_younger_than_the_grace() -> None:
    new = made(a=10.0, b=11.5)
    assert new.new(11.9, GRACE) == ["a", "b"]
    assert new.new(12.0, GRACE) == ["b"]
    assert new.new(14.0, GRACE) == []


def test_what_nobody_declares_any_more_may_have_been_made() -> None:
    """This happens in a forked child, for example."""
    new = made()
    new.begin(["q"])
    new.given_up(10.0)
    assert new.latest == 10.0
    assert final_at(new, "q", 11.0) == 12.0
    new.end(["q"], 10.5)  # a generator that the child garbage-collects
    assert new.latest == 10.5


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["begin", "end", "made"]), st.floats(0, 3))))
def test_latest_says_whether_any_confirm_can_be_provisional(events: list[tuple[str, str, float]]) -> None:
    """The publisher reads ``latest`` for every confirm."""
    new, now, begun = made(), 100.0, {"a": 0, "b": 0}
    for name, event, seconds in events:
        now += seconds
        if event == "begin":
            new.begin([name])
            begun[name] += 1
        elif event == "made":
            new.made([name], now)
        elif begun[name]:
            new.end([name], now)
            begun[name] -= 1
        provisional = [final_at(new, "a", now), final_at(new, "b", now), final_at(new, "x", now, "events")]
        assert (now < new.latest + GRACE) is any(at is not None for at in provisional)
        assert (new.latest == float("inf")) is any(begun.values())
