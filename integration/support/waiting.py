"""Waiting for a condition, with a deadline. The one place in the harness that pauses between two looks."""

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
    """Return the first true value of `condition`, which is asked every `interval` seconds.

    An exception out of `condition` ends the wait: a condition that may fail for a while catches that itself.

    Args:
        timeout: seconds.
        what: what is waited for, or a function that says so at the end, for the error.

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


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait on an event loop for a condition that other tasks, threads or the broker bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what other threads bring about has no event
            await asyncio.sleep(0.005)
