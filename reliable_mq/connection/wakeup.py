"""The earliest of several wake-ups on a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import TimerHandle

__all__ = ["Wakeup"]


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
