"""Waiting until a signal handler, or a thread, says that it is over.

Python notes a signal when it comes, and runs the handler when its main thread comes round to it. A wait without end may
keep it from that for ever: where the signal came between the last look and the wait, or went to another thread.
"""

from __future__ import annotations

from queue import Empty
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import threading
    from queue import SimpleQueue

__all__ = ["next_signal", "wait_heeding_signals"]

_LOOK_EVERY: Final = 0.5  # seconds


def wait_heeding_signals(over: threading.Event) -> None:
    """Block until ``over`` is set, and let handlers of signals run within half a second wherever the signal went."""
    while not over.wait(_LOOK_EVERY):
        pass


def next_signal(received: SimpleQueue[int]) -> int:
    """Block until a handler of signals has put one in, and give it.

    A handler must not set an event that the main thread waits for: it may run while that thread has the event's lock.
    To put into a simple queue needs none.
    """
    while True:
        try:
            return received.get(timeout=_LOOK_EVERY)
        except Empty:
            continue
