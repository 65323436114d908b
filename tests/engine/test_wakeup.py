"""A wake-up rings once, at the earliest of the times that were set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.engine.connection import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable


class Timer:
    """A scheduled call of a loop."""

    def __init__(self, delay: float, fn: Callable[[], None]) -> None:
        self.delay, self.fn, self.cancelled = delay, fn, False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_wakeup_fires_at_its_earliest_time_and_can_be_reset() -> None:
    rung: list[str] = []
    timers: list[Timer] = []

    def call_later(delay: float, fn: Callable[[], None]) -> Timer:
        timers.append(Timer(delay, fn))
        return timers[-1]

    alarm = Wakeup(lambda: rung.append("rung"))
    for at in (12.0, None, 15.0, 12.0, 11.0, 9.0):
        alarm.set(at, 10.0, call_later)
    assert [(timer.delay, timer.cancelled) for timer in timers] == [(2.0, True), (1.0, True), (0.0, False)]
    timers[-1].fn()
    assert rung == ["rung"]
    alarm.set(20.0, 10.0, call_later)
    alarm.cancel()
    alarm.cancel()
    assert [(timer.delay, timer.cancelled) for timer in timers[3:]] == [(10.0, True)]
