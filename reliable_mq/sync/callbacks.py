"""The thread on which users' callbacks run, so that none ever runs on, or holds up, an I/O thread.

Invariants: callbacks run one at a time, in the order in which they were handed over; whatever one raises is logged and
harms no other; the thread starts when the first callback is expected and ends with :meth:`CallbackThread.stop`. All
methods may be called by a signal handler that interrupts one of them.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallbackThread"]

logger = logging.getLogger(__name__)


class CallbackThread:
    """Runs callbacks, one after the other. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped: threading.Thread | None = None
        self._over = False

    def start(self) -> None:
        """Start the thread, where it does not run yet and was not stopped.

        The first callback would do it, too; but an interpreter that exits refuses new threads.
        """
        with self._lock:
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Run ``call`` soon. Does not block. After `stop`, on a thread that ends with it."""
        self.start()
        self._queue.put(call)
        if self._over:
            self._queue.put(None)
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def backlog(self) -> int:
        """How many wait to be called."""
        return self._queue.qsize()

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of the callbacks."""
        return threading.current_thread() in (self._thread, self._stopped)

    def stop(self) -> None:
        """End the thread when it has run what was handed over. Does not wait."""
        with self._lock:
            self._over = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stopped = thread
                self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread that was stopped, for up to ``timeout`` seconds, and say whether it came.

        On that thread itself it does not wait.
        """
        thread = self._stopped
        if thread is None:
            return True
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # sys.exit() included: it would end the callbacks, not the program
                logger.exception("a callback raised")
