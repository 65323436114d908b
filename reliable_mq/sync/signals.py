"""Waiting until a signal handler, or a thread, says that it is over.

Python notes a signal when it comes, and runs the handler when its main thread comes round to it. A wait without end may
keep it from that for ever: where the signal came between the last look and the wait, or went to another thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import threading

__all__ = ["wait_heeding_signals"]

_LOOK_EVERY: Final = 0.5  # seconds


def wait_heeding_signals(over: threading.Event) -> None:
    """Block until ``over`` is set, and let handlers of signals run within half a second wherever the signal went."""
    while not over.wait(_LOOK_EVERY):
        pass
