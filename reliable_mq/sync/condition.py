"""A condition variable whose wait may be ended by an exception out of a signal handler.

Python runs signal handlers between any two steps of the main thread, and what they raise (``KeyboardInterrupt``) comes
out there. The standard library's ``wait`` loses its lock where that is between letting go of it and waiting; leaving
the block then raises an error of its own in place of the exception.
"""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Condition"]


class Condition(threading.Condition):
    """See the module."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does, for up to ``timeout`` seconds; the caller holds the lock afterwards."""
        try:
            return super().wait(timeout)
        except BaseException:
            with suppress(RuntimeError):  # it is not held
                self.release()
            self.acquire()
            raise
