"""SIGTERM, by which Spark ends the reader's process: twice, and without a word before.

Spark does not call ``stop()`` at the end of a query. So the signal hands back what was read and not committed, for
other consumers to have at once.

Invariants: the handler itself waits for no lock and for nothing else, since it runs in the middle of whatever Spark's
thread is doing, which may be itself, for the signal before (`threading.Event` has a lock, and `threading` one that all
threads start under); a second signal changes nothing; the process ends within the time given.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable

__all__ = ["on_termination"]

logger = logging.getLogger(__name__)


def on_termination(hand_back: Callable[[], None]) -> None:
    """Have SIGTERM call ``hand_back`` on a thread of its own, and end the process then.

    Outside of the main thread, where there are no signals to handle, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first = threading.Lock()  # taken by the first signal, and waited for by none

    def end() -> None:
        try:
            hand_back()
        except Exception:
            logger.exception("what was read could not be handed back; the broker sees to it when the connection ends")
        finally:
            sys.stderr.flush()
            os._exit(0)

    def on_signal(_number: int, _frame: object) -> None:
        if first.acquire(blocking=False):
            start_new_thread(end, ())

    signal.signal(signal.SIGTERM, on_signal)
