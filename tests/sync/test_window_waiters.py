"""Callers that wait for the window of a sync publisher are served in order.

This holds whoever leaves in between.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from reliable_mq._util.threads import Condition
from reliable_mq.core.publisher.window import PublishWindow
from reliable_mq.sync import publisher_channel
from reliable_mq.sync.publisher_channel import WindowWaiters, _Waiter

if TYPE_CHECKING:
    from types import FrameType

SOON = 30.0


class Lane:
    """A window of ten messages or 100 bytes, and threads that wait for it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.lock = threading.RLock()
        self.window = PublishWindow(10, 100)
        self.asked = 0
        self.over = False
        self.room = WindowWaiters(self.lock, self.window, self.ask)
        self.taken: list[str] = []

    def ask(self) -> None:
        self.asked += 1

    def take(self, name: str, size: int) -> None:
        self.taken.append(name)
        self.window.take(size)

    def wait(self, name: str, size: int, timeout: float = SOON, *, passes: bool = False) -> Future[bool]:
        """Start a thread that waits, and return once it does."""

        def waiting() -> bool:
            deadline = time.monotonic() + timeout
            take = partial(self.take, name, size)
            with self.lock:
                return self.room.wait(size, deadline, take, lambda: self.over, passes=passes)

        before = self.waiters()
        future = self.pool.submit(waiting)
        until(lambda: self.waiters() - before or future.done())
        return future

    def waiters(self) -> set[_Waiter]:
        with self.lock:
            return set(self.room.waiting)

    def give(self, *, crowded: bool = False) -> bool:
        with self.lock:
            return self.room.admit(crowded=crowded)

    def free(self, size: int, *, crowded: bool = False, passes: bool = False) -> bool:
        with self.lock:
            return self.room.is_free(size, crowded=crowded, passes=passes)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(8) as pool:
        lane = Lane(pool)
        yield lane
        with lane.lock:
            lane.over = True
            lane.room.wake()


def test_room_is_given_in_the_order_in_which_it_was_asked_for(lane: Lane) -> None:
    """Smaller messages that come later do not overtake a large one."""
    lane.window.take(50)
    large, small = lane.wait("large", 90), lane.wait("small", 10)
    assert not lane.give()
    assert not lane.free(10)
    lane.window.release(1, 50)
    assert not lane.free(10), "overtaken by a newcomer"
    assert lane.give()
    assert large.result(SOON)
    assert small.result(SOON)
    assert lane.taken == ["large", "small"]
    lane.window.release(2, 100)
    assert lane.free(10)


@pytest.mark.slow
def test_who_is_late_holds_up_nobody(lane: Lane) -> None:
    """It leaves without a place, and requests admission for those behind it."""
    lane.window.take(50)
    late = lane.wait("late", 90, 1.5)
    small = lane.wait("small", 10)
    assert not late.result(SOON)
    assert lane.asked
    assert lane.give()
    assert small.result(SOON)
    assert lane.taken == ["small"]


def test_one_that_was_interrupted_is_dropped_at_its_deadline(lane: Lane) -> None:
    """A signal handler's exception may leave an entry without a waiting caller.

    It delays the others only until its deadline.
    """
    lane.window.take(50)
    lane.room.waiting[_Waiter(90, 0.0, partial(lane.take, "left", 90), False, threading.Condition(lane.lock))] = None
    small = lane.wait("small", 10)
    assert lane.give()
    assert small.result(SOON)
    assert lane.taken == ["small"]


def test_an_exception_in_a_wait_leaves_nothing_in_the_line(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception propagates, and admission is requested for those behind."""
    lane.window.take(100)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("reliable_mq.sync.publisher_channel.Condition.wait", interrupted)
        with lane.lock, pytest.raises(KeyboardInterrupt):
            lane.room.wait(10, time.monotonic() + SOON, lambda: None, lambda: False, passes=False)
    assert not lane.room.waiting


def test_while_it_is_crowded_only_those_that_pass_are_admitted(lane: Lane) -> None:
    """They are admitted in order, before the callers that do not pass."""
    assert not lane.free(10, crowded=True)
    assert lane.free(10, crowded=True, passes=True)
    one, two = lane.wait("one", 10), lane.wait("two", 10, passes=True)
    assert not lane.free(10, crowded=True, passes=True)
    assert lane.give(crowded=True)
    assert two.result(SOON)
    assert not one.done()
    assert lane.give()
    assert one.result(SOON)
    assert lane.taken == ["two", "one"]


def test_one_that_waits_asks_by_itself(lane: Lane) -> None:
    """A few free places wake no caller.

    So a waiting caller requests admission itself. A newcomer behind it does so at once.
    """
    lane.window.take(100)
    first = lane.wait("first", 10)
    lane.window.release(1, 100)
    lane.asked = 0
    until(lambda: lane.asked)
    lane.asked = 0
    second = lane.wait("second", 10)
    until(lambda: lane.asked)
    lane.give()
    assert first.result(SOON)
    assert second.result(SOON)


def test_nobody_waits_on_where_it_is_over(lane: Lane) -> None:
    """All of them return without a place."""
    lane.window.take(100)
    waiting = [lane.wait(str(number), 10) for number in range(3)]
    lane.over = True
    with lane.lock:
        lane.room.wake()
    assert [one.result(SOON) for one in waiting] == [False] * 3
    assert not lane.room.waiting
    assert not lane.taken


class SignalHandler:
    """Runs `handle` at the n-th step of the waiting callers' code on this thread."""

    def __init__(self, step: int, handle: Callable[[], object]) -> None:
        self.left = step
        self.handle = handle

    def __call__(self, frame: FrameType, _event: str, _argument: object) -> Callable[..., object] | None:
        if frame.f_code.co_filename != publisher_channel.__file__:
            return None
        frame.f_trace = self.step  # from Python 3.13 on, opcodes are only traced in a frame that is already traced
        frame.f_trace_opcodes = True
        return self.step

    def step(self, _frame: FrameType, event: str, _argument: object) -> Callable[..., object]:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.handle()
        return self.step


def waits_and_leaves(room: WindowWaiters) -> None:
    """A signal handler that waits.

    The lock is free meanwhile, so the others are admitted.
    """
    waiter = _Waiter(90, time.monotonic() + SOON, lambda: None, False, Condition(room._lock))
    room.waiting[waiter] = None
    room.admit(crowded=False)
    room.waiting.pop(waiter, None)


def asks_whether_there_is_a_place(room: WindowWaiters) -> None:
    room.is_free(10, crowded=False, passes=False)


def waits_in_vain(room: WindowWaiters) -> None:
    room.wait(10, 0.0, lambda: None, lambda: True, passes=False)


@pytest.mark.parametrize("call", [asks_whether_there_is_a_place, waits_in_vain])
@pytest.mark.parametrize("others", [0, 2])
def test_a_signal_handler_may_wait_at_any_step_of_a_caller(call: Callable[[WindowWaiters], None], others: int) -> None:
    """A signal handler runs between any two steps, and may change the waiters."""
    trace = sys.gettrace()

    def interrupted_at(step: int) -> bool:
        room = WindowWaiters(lock := threading.RLock(), PublishWindow(10, 100), lambda: None)
        for _ in range(others):
            room.waiting[_Waiter(10, time.monotonic() + SOON, lambda: None, False, Condition(lock))] = None
        handler = SignalHandler(step, partial(waits_and_leaves, room))
        with lock:
            sys.settrace(handler)
            try:
                call(room)
            finally:
                sys.settrace(trace)
        return handler.left <= 0

    interrupted_at(1)  # Python 3.12 traces the opcodes of a process from the second call on
    step = 1
    while interrupted_at(step):
        step += 1
    assert step > 20
