"""Wait for a condition with a deadline, in place of a sleep."""

from __future__ import annotations

import asyncio
import time
from threading import Event
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until", "wait_until"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *, timeout: float, what: str | Callable[[], str], interval: float = 0.05
) -> T:
    """Return the first true value of a condition. Blocks.

    An exception out of `condition` ends the wait: a condition that may fail for a while catches that itself.

    Args:
        condition: called at first and then every `interval` seconds, on this thread.
        timeout: seconds.
        what: the condition's name in the error, or a function that returns it.
        interval: seconds.

    Raises:
        TimeoutError: nothing true came within `timeout`.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what if isinstance(what, str) else what()}")
        Event().wait(interval)


async def until(condition: Callable[[], object], timeout: float = 20) -> None:
    """Wait on an event loop for a condition that others bring about.

    Args:
        condition: called every 5 ms; it must not block.
        timeout: seconds.

    Raises:
        TimeoutError: it was not true within `timeout`.
    """
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  # a change in another thread has no event
            await asyncio.sleep(0.005)
