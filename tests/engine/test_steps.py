"""Steps run by blocking or awaiting, and undo what they began. No broker."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.engine import steps
from reliable_mq.engine.steps import Steps, awaiting, blocking

if TYPE_CHECKING:
    from types import FrameType


class Interrupted(Exception):
    """The exception of a signal handler."""


class Calls:
    """Two calls that wait, and a list of what was done."""

    def __init__(self, *, asynchronous: bool, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self._asynchronous = asynchronous
        self._error = error

    def wait(self, name: str) -> Any:
        return self._wait_on_loop(name) if self._asynchronous else self._wait(name)

    def steps(self) -> Steps[str]:
        try:
            first = yield self.wait("first")
            second = yield self.wait("second")
        except Exception:
            undone = yield self.wait("undo")
            self.done.append(f"{undone} has returned")
            raise
        return f"{first}, {second}"

    def _wait(self, name: str) -> str:
        self.done.append(name)
        if name == "second" and self._error is not None:
            raise self._error
        return name

    async def _wait_on_loop(self, name: str) -> str:
        await asyncio.sleep(0)
        return self._wait(name)


def carry_out(calls: Calls, *, asynchronous: bool) -> str:
    return asyncio.run(awaiting(calls.steps())) if asynchronous else blocking(calls.steps())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "asyncio"])
def test_steps_get_results_and_return_one(asynchronous: bool) -> None:
    calls = Calls(asynchronous=asynchronous)
    assert carry_out(calls, asynchronous=asynchronous) == "first, second"
    assert calls.done == ["first", "second"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "asyncio"])
def test_an_error_of_a_step_is_undone_by_further_steps(asynchronous: bool) -> None:
    error = OSError("gone")
    calls = Calls(asynchronous=asynchronous, error=error)
    with pytest.raises(OSError, match="gone") as caught:
        carry_out(calls, asynchronous=asynchronous)
    assert caught.value is error
    assert calls.done == ["first", "second", "undo", "undo has returned"]


def test_an_exception_between_two_steps_comes_out_of_the_yield() -> None:
    """A signal handler may raise while neither the steps nor a call runs."""
    calls = Calls(asynchronous=False)

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        return between if frame.f_code.co_filename == steps.__file__ else None

    def between(_frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and calls.done == ["first"]:
            raise Interrupted
        return between

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(Interrupted):
            blocking(calls.steps())
    finally:
        sys.settrace(tracer)
    assert calls.done == ["first", "undo", "undo has returned"]


def test_a_cancellation_comes_out_of_the_yield() -> None:
    undone = asyncio.Event()

    def endless() -> Steps[None]:
        try:
            yield asyncio.sleep(3600)
        except asyncio.CancelledError:
            yield asyncio.sleep(0)
            undone.set()
            raise

    async def main() -> None:
        task = asyncio.create_task(awaiting(endless()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undone.is_set()

    asyncio.run(main())
