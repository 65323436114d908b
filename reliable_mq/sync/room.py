"""Who waits for room in a window on the sync API.

Invariants:

- room is given in the order in which it was asked for, by one thread, and is taken at that moment: a newcomer never
  comes between, and a large message is not kept out by small ones;
- who is late, or leaves, has taken nothing and holds up nobody who came after it;
- a caller may be interrupted anywhere by an exception that a signal handler raises, and by a handler that asks for room
  itself: callers only ever enter and leave, each by one step that cannot be cut in two. What an interrupted one leaves
  behind is given its room when its turn comes, or is dropped at its deadline.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from reliable_mq.sync.condition import Condition

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from reliable_mq.core.window import PublishWindow

__all__ = ["Room"]

_LOOK_AGAIN = 0.1  # seconds after which one that waits asks by itself: few places in the window wake nobody


class Room:
    """See the module. Every method is for who holds the lock.

    Args:
        lock: guards the window.
        window: where the room is.
        ask: called, with the lock held, to have the thread that gives call `give` soon.

    Attributes:
        waiting: true while somebody waits.
    """

    def __init__(self, lock: threading.RLock, window: PublishWindow, ask: Callable[[], object]) -> None:
        self._lock = lock
        self._window = window
        self._ask = ask
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def is_free(self, size: int, *, crowded: bool, passes: bool) -> bool:
        """Whether there is room for a newcomer: nobody is before it."""
        return (passes or not crowded) and self._first(crowded) is None and self._window.fits(size)

    def wait(
        self, size: int, deadline: float, take: Callable[[], object], over: Callable[[], bool], *, passes: bool
    ) -> bool:
        """Wait for room; it is taken when this returns True.

        Args:
            size: bytes.
            deadline: on the monotonic clock, seconds.
            take: called once there is room, by the thread that gives it; takes it.
            over: whether there will be none; `wake` has it looked at.
            passes: whether it is admitted while the window is crowded.
        """
        waiter = _Waiter(size, deadline, take, passes, Condition(self._lock))
        try:
            self.waiting[waiter] = None
            first = next(iter(self.waiting))
            if first is not waiter and self._window.fits(first.size):
                self._ask()
            while not (waiter.admitted or over()):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                waiter.changed.wait(min(remaining, _LOOK_AGAIN))
                if not waiter.admitted:
                    self._ask()
        finally:
            if not waiter.admitted:
                self.waiting.pop(waiter, None)
                if self.waiting:
                    self._ask()
        return waiter.admitted

    def give(self, *, crowded: bool) -> bool:
        """Room may be free: give it to those who wait, on the one thread that does so. Whether anybody got some.

        Args:
            crowded: whether those wait that do not pass.
        """
        now = time.monotonic()
        given = False
        while (waiter := self._first(crowded)) is not None:
            if waiter.deadline > now:  # else it is about to leave, or was interrupted
                if not self._window.fits(waiter.size):
                    break
                waiter.take()
                waiter.admitted = given = True
            self.waiting.pop(waiter, None)
            waiter.changed.notify()
        return given

    def wake(self) -> None:
        """Have everyone who waits look whether it is over."""
        for waiter in list(self.waiting):
            waiter.changed.notify()

    def _first(self, crowded: bool) -> _Waiter | None:
        return next((waiter for waiter in self.waiting if waiter.passes or not crowded), None)


class _Waiter:
    __slots__ = ("admitted", "changed", "deadline", "passes", "size", "take")

    def __init__(
        self, size: int, deadline: float, take: Callable[[], object], passes: bool, changed: Condition
    ) -> None:
        self.size = size
        self.deadline = deadline
        self.take = take
        self.passes = passes
        self.changed = changed
        self.admitted = False
