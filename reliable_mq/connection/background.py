"""Calls that may block (a user's callback, a name lookup), each on a daemon thread: no I/O thread waits for them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cancellable", "in_background"]

T = TypeVar("T")


def in_background(name: str, fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    """Call `fn` on a new daemon thread; hand what it returned, or the exception it raised, to `done`, there.

    `done` is called exactly once, whatever `fn` does, unless it never returns. Where there can be no more threads, both
    are called here and now: an interpreter that exits refuses them, and may still have messages to publish.
    """
    try:
        threading.Thread(target=_call, args=(fn, done), name=name, daemon=True).start()
    except RuntimeError:
        _call(fn, done)


class Cancellable(Generic[T]):
    """A callback that can be called off. Not thread-safe: both on one thread."""

    def __init__(self, on_done: Callable[[T], None]) -> None:
        self._on_done: Callable[[T], None] | None = on_done

    def cancel(self) -> bool:
        """Call it off; return whether it was still to come."""
        to_come, self._on_done = self._on_done is not None, None
        return to_come

    def done(self, outcome: T) -> None:
        """Call back, unless that was done or called off before."""
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(outcome)


def _call(fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    outcome: T | Exception = RuntimeError("the call ended its thread")
    try:
        with suppress(SystemExit):  # as threading itself does
            outcome = fn()
    except Exception as error:  # noqa: BLE001  # handed on
        outcome = error
    finally:
        done(outcome)
