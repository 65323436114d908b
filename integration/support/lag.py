"""Measures how late the threads of this process run on a busy machine."""

from __future__ import annotations

import threading
import time
from typing import Self

_STEP = 0.02  # seconds between two readings of the clock


class Lag:
    """A thread that wakes up every few milliseconds and records how late it was.

    A context manager.

    Attributes:
        worst: The longest delay so far, in seconds.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            due = time.monotonic() + _STEP
            over = self._over.wait(_STEP)
            self.worst = max(self.worst, time.monotonic() - due)
