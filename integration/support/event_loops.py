"""Fixtures that run coroutines on a fresh event loop, of asyncio or uvloop.

A test fails if a task is left at the end, or if asyncio has reported an error.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_DEADLINE = 100.0  # seconds until a test counts as hanging


@pytest.fixture(scope="session")
def _uvloop() -> None:
    """Create and close a loop before the tests.

    The first loop of a process opens descriptors that stay open. They must not count as left behind by a test.
    """
    uvloop.new_event_loop().close()


@pytest.fixture(
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop", marks=pytest.mark.soak),
    ]
)
def run_async(request: pytest.FixtureRequest, _uvloop: None) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine on a fresh loop.

    It fails if a task is left or asyncio has reported an error. The tests use uvloop, too, in `make soak`.
    """

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
