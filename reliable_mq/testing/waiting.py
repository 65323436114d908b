"""Functions that wait for a condition with a deadline, instead of a sleep."""

from __future__ import annotations

import asyncio
import time
from threading import Event
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *, timeout: float, what: str | Callable[[], str], interval: float = 0.05
) -> T:
    """Block until a condition is true, and return its first true value.

    An exception from `condition` ends the wait. A condition that may fail for a while must catch the exception itself.

    Args:
        condition: A function that is called at once and then every `interval` seconds, on this thread.
        timeout: The maximum wait, in seconds. A last call begins after it, however long the calls take.
        what: The condition's name for the error message, or a function that returns it.
        interval: The time between two calls, in seconds.

    Raises:
        TimeoutError: If the condition is not true within `timeout`.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if late:
            raise TimeoutError(f"not within {timeout:g} s: {what if isinstance(what, str) else what()}")
        Event().wait(interval)


async def until(condition: Callable[[], object], timeout: float = 20, *, what: str = "the condition") -> None:
    """Wait on an event loop until a condition is true.

    Args:
        condition: A function that is called every 5 ms and must not block.
        timeout: The maximum wait, in seconds. A last call begins after it.
        what: The condition's name for the error message.

    Raises:
        TimeoutError: If the condition is not true within `timeout`.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        if condition():
            return
        if late:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        await asyncio.sleep(0.005)
