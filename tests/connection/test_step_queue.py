"""Steps on a ready channel, each with a separate timeout for its reply."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

from reliable_mq.codec.methods import CheckQueue, MethodReply, QueueState, Step
from reliable_mq.connection.channel import Channel, StepQueue
from reliable_mq.connection.interfaces import EventLoop

LIMIT = 10.0  # seconds


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Broker:
    """A loop with a controlled clock, and a channel that replies when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.discarded: list[str] = []
        self.bytes_received = 0
        self.reply: Callable[[MethodReply], None]
        self.steps = StepQueue(
            cast("EventLoop", self),
            LIMIT,
            channel=lambda: cast("Channel", self),
            is_blocked=lambda: False,
            bytes_received=lambda: self.bytes_received,
            discard=self.discarded.append,
        )

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, callback))
        return self.timers[-1]

    def perform(self, steps: tuple[Step, ...], on_reply: Callable[[MethodReply], None]) -> None:
        self.reply = on_reply

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now and not timer.cancelled]:
            timer.cancel()
            timer.callback()


def counts(number: int) -> Generator[Step, Any, int]:
    for _ in range(number):
        yield CheckQueue("orders")
    return number


def test_every_step_has_the_whole_time_for_its_reply() -> None:
    broker, outcomes = Broker(), list[object]()
    broker.steps.add(counts(3), outcomes.append, lambda: False)
    for _ in range(3):
        broker.wait(0.9 * LIMIT)
        broker.reply(QueueState("orders", 0, 0))
    assert outcomes == [3]
    broker.wait(LIMIT)
    assert broker.discarded == []


def test_a_step_without_a_reply_discards_the_connection() -> None:
    broker, outcomes = Broker(), list[object]()
    broker.steps.add(counts(2), outcomes.append, lambda: False)
    broker.wait(0.9 * LIMIT)
    broker.reply(QueueState("orders", 0, 0))
    broker.wait(0.9 * LIMIT)
    assert broker.discarded == []
    broker.wait(0.2 * LIMIT)
    assert broker.discarded == ["the broker did not answer within 10 s"]


def test_steps_in_line_behind_other_work_may_take_longer() -> None:
    broker, waiting = Broker(), [True]
    broker.steps.add(counts(1), lambda _: None, lambda: bool(waiting))
    for _ in range(3):
        broker.wait(LIMIT)
    assert broker.discarded == []
    waiting.clear()
    broker.wait(LIMIT)
    assert broker.discarded == ["the broker did not answer within 10 s"]


def test_a_reply_behind_a_large_delivery_may_take_longer() -> None:
    broker = Broker()
    broker.steps.add(counts(1), lambda _: None, lambda: False)
    for _ in range(3):
        broker.bytes_received += 100_000
        broker.wait(LIMIT)
    assert broker.discarded == []
    broker.bytes_received += 8  # a heartbeat
    broker.wait(LIMIT)
    assert broker.discarded == ["the broker did not answer within 10 s"]
