"""Wake-ups on a loop: the earliest of several, and one to see whether it runs.

Invariant: a `LoopWatch` never waits; it is for any thread, and for the loop itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import TimerHandle

__all__ = ["LoopWatch", "Wakeup"]


class Wakeup:
    """Call a function at a time. On its loop only.

    Args:
        fn: may set the wake-up again.
    """

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._timer: TimerHandle | None = None
        self._at = 0.0

    def set(self, at: float | None, now: float, call_later: Callable[[float, Callable[[], None]], TimerHandle]) -> None:
        """Call at ``at``, unless a call is set for an earlier time.

        On the clock of ``now``; None does nothing.
        """
        if at is None or (self._timer is not None and self._at <= at):
            return
        self.cancel()
        self._at = at
        self._timer = call_later(max(at - now, 0.0), self._call)

    def cancel(self) -> None:
        """Cancel the call, if one is set."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self._fn()


class LoopWatch:
    """Sees whether a loop still does what it is asked to. Any thread.

    Each look asks the loop for a sign, unless the last one is still to come. So nothing runs between two looks, and a
    loop that stands still is seen by the second look.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def look(self, now: float, call_soon: Callable[[Callable[[], None]], object]) -> float | None:
        """Return since when the loop has not answered; None if it has. Ask again.

        Args:
            now: seconds, monotonic.
            call_soon: runs a function on the loop; thread-safe.
        """
        asked_at = self._asked_at
        if asked_at is None:
            self._asked_at = now
            call_soon(self._answered)
        return asked_at

    def _answered(self) -> None:
        self._asked_at = None
