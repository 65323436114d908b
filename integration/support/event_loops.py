"""Coroutines on a fresh event loop, of asyncio and of uvloop, at whose end nothing may be left or complained of."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_DEADLINE = 100.0  # seconds, beyond which a test hangs


@pytest.fixture(scope="session")
def _uvloop() -> None:
    """The first loop of a process opens descriptors that stay: not to be counted as left by a test."""
    uvloop.new_event_loop().close()


@pytest.fixture(
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop", marks=pytest.mark.soak),
    ]
)
def run_async(request: pytest.FixtureRequest, _uvloop: None) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a coroutine on a fresh loop, of each kind in `make soak`: no task may be left, nothing be complained of."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        complaints: list[object] = []
        left: list[str] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await asyncio.wait_for(main, _DEADLINE)
            left.extend(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())
            gc.collect()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(watched())
            gc.collect()
        assert left == []
        assert complaints == []

    return run
