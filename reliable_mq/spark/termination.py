"""SIGTERM, by which Spark ends the reader's process: twice, and without a word before.

Spark does not call ``stop()`` at the end of a query. So the signal hands back what was read and not committed, for
other consumers to have at once.

Invariants: the handler itself takes no lock and waits for nothing, since it runs in the middle of whatever Spark's
thread is doing; a second signal changes nothing; the process ends within the time given.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

__all__ = ["on_termination"]

logger = logging.getLogger(__name__)


def on_termination(hand_back: Callable[[], None]) -> None:
    """Have SIGTERM call ``hand_back`` on a thread of its own, and end the process then.

    Outside of the main thread, where there are no signals to handle, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    received = threading.Event()

    def end() -> None:
        try:
            hand_back()
        except Exception:
            logger.exception("what was read could not be handed back; the broker sees to it when the connection ends")
        finally:
            sys.stderr.flush()
            os._exit(0)

    def on_signal(_number: int, _frame: object) -> None:
        if not received.is_set():
            received.set()
            threading.Thread(target=end, name="spark-termination", daemon=True).start()

    signal.signal(signal.SIGTERM, on_signal)
