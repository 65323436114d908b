"""Calls that wait, written once for both APIs.

What such a call does, in which order, and what it undoes if it is interrupted, is the same on both APIs; only the way
to wait differs. So it is written as a generator, its *steps*. It yields whatever a call of the API has returned that
may wait, and is sent the result::

    error = yield channel.wait_connected(timeout)

On the sync API that call has waited by itself, and returns the result, which comes back as it is (`blocking`). On
asyncio it returns an awaitable, which is awaited (`awaiting`).

Invariants:

- an exception comes out of the ``yield``, whether the call, the cancellation of the task or a signal handler has raised
  it: a ``try`` around it undoes what was begun, by further steps if need be;
- no lock is held at a ``yield``, but the one that the call waits with.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

__all__ = ["Steps", "awaiting", "blocking"]

T = TypeVar("T")

Steps: TypeAlias = Generator[Any, Any, T]
"""The steps of a call that returns T."""


def blocking(steps: Steps[T], interruption: BaseException | None = None) -> T:
    """Carry out the steps of a call of the sync API, which block by themselves.

    Args:
        steps: of the call.
        interruption: the exception of a signal handler that has ended waiting for them.
    """
    try:
        outcome = next(steps) if interruption is None else steps.throw(interruption)
        while True:
            outcome = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException as error:
        if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # it came from there
            raise
        return blocking(steps, error)  # it came here, between two steps


async def awaiting(steps: Steps[T]) -> T:
    """Carry out the steps of a call of the asyncio API, each of which is awaited."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = await step
            except BaseException as error:  # noqa: BLE001  # the steps decide
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
