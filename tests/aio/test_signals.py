"""Signals stop what runs on a loop, and the handlers from before are restored."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from reliable_mq.aio.consumer import on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """As `asyncio.run`, on each kind of loop."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main)

    return run


def test_a_signal_reaches_all_blocks_and_its_handler_is_restored(run: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        received: list[str] = []
        both = asyncio.Event()

        def note(name: str) -> None:
            received.append(name)
            if len(received) == 2:
                both.set()

        with on_signals(lambda: note("one")):
            with on_signals(lambda: note("other")):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(both.wait(), 10)
            assert received == ["one", "other"]
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before

    run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_control_c_stops_the_work_and_cancels_no_main_task(run: Any) -> None:
    """SIGINT is `asyncio.run`'s own then, which counts as nobody's; before and after it cancels, as it always does."""
    ended: list[str] = []

    async def main() -> None:
        stopped = asyncio.Event()
        with on_signals(stopped.set):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stopped.wait(), 10)
        ended.append("stopped")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["stopped", "cancelled"]


def test_a_handler_that_is_there_is_left_alone(run: Any) -> None:
    async def main() -> None:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        with on_signals(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(received.wait(), 10)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    run(main())


def test_off_the_main_thread_signals_are_left_alone(run: Any) -> None:
    async def main() -> None:
        with on_signals(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is before

    async def elsewhere() -> None:
        await asyncio.to_thread(run, main())

    before = signal.getsignal(signal.SIGTERM)
    run(elsewhere())
