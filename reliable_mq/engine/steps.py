"""Waiting calls, written once for both APIs.

Both APIs carry out the same work in the same order, and undo the same work after an interruption. Only the way of
waiting differs. So each waiting call is written as a generator, its *steps*. The generator yields the result of each
API call that may wait, and is resumed with the outcome of that call::

    error = yield channel.close(timeout)

In the sync API the call has already blocked and returned its outcome, which is sent into the generator unchanged
(`blocking`). In the asyncio API the call returns an awaitable, which is awaited first (`awaiting`).

Invariants:

- An exception is raised at the ``yield``, whether it comes from the call, from the cancellation of the task or from a
  signal handler. A ``try`` around the ``yield`` can undo the work, with further steps if necessary.
- No lock is held at a ``yield``, except the lock that the call waits with.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

from reliable_mq._util.generators import drive_async

T = TypeVar("T")

Steps: TypeAlias = Generator[Any, Any, T]
"""The steps of a call that returns T."""


def blocking(steps: Steps[T], interruption: BaseException | None = None) -> T:
    """Carry out the steps of a sync call. The steps block by themselves.

    Args:
        steps: The steps of the call.
        interruption: The exception of a signal handler that interrupted the wait between two steps.
    """
    try:
        outcome = next(steps) if interruption is None else steps.throw(interruption)
        while True:
            outcome = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException as error:
        if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # the steps raised it
            raise
        return blocking(steps, error)  # it was raised here, between two steps


def awaiting(steps: Steps[T]) -> Coroutine[Any, Any, T]:
    """Carry out the steps of an asyncio call, and await each of them."""
    return drive_async(steps, _itself)


def _itself(step: Awaitable[Any]) -> Awaitable[Any]:
    return step


def calling(calls: Generator[Any, Any, T], perform: Callable[[Any], Any]) -> Steps[T]:
    """Return the steps of a generator that yields calls of a store.

    Args:
        calls: The generator. It is resumed with each result, or with the exception that came in its place.
        perform: The API's function that performs one call.
    """
    try:
        call = next(calls)
        while True:
            try:
                outcome = yield perform(call)
            except Exception as error:  # noqa: BLE001  # the generator decides
                call = calls.throw(error)
            else:
                call = calls.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
