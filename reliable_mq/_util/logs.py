"""Rate-limited log lines, and the drivers' log records lowered to DEBUG.

A line that every message may cause is logged at most once per interval. Each such line has its own limit, so that a
line about one problem does not hide a line about another.

pika logs a lost connection as two errors with tracebacks and a failed attempt as six, on its own loggers. We get the
same failures as exceptions and log each of them once. The driver's records help only to debug the driver.

Invariants:

- Records of other threads and tasks are unchanged: a program may use the driver itself, beside this package.
- No record is lost. If a logger of the driver is set to DEBUG, its records appear at that level.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["LogLimit", "demoted_driver_logs"]


class LogLimit:
    """A count of events that are logged at most once per interval. Thread-safe.

    The first event is logged at once, later ones when ``interval`` seconds have passed since the last line.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0  # not logged yet
        self._logged_at = float("-inf")

    def count(self, events: int = 1) -> int:
        """Count events. Return the number to log if a line is due, else 0."""
        with self._lock:
            self._count += events
            now = self._clock()
            if now - self._logged_at < self._interval:
                return 0
            due, self._count, self._logged_at = self._count, 0, now
            return due


@contextmanager
def demoted_driver_logs(package: str) -> Iterator[None]:
    """Lower the driver's log records to DEBUG within the block.

    This affects the records of this thread, or of this task and its children. The modules of the driver's package must
    be imported before, because each has its own logger.
    """
    _filter_loggers(package)
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _filter_loggers(package: str) -> None:
    prefix = f"{package}."
    # A logger's filter does not see records of the loggers below it. Adding the filter again does nothing.
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith(prefix) and isinstance(logger, logging.Logger):
            logger.addFilter(_demote)


_ours = ContextVar("reliable_mq_driver_logs", default=False)


def _demote(record: logging.LogRecord) -> bool:
    if not _ours.get() or record.levelno <= logging.DEBUG:
        return True
    record.levelno = logging.DEBUG
    record.levelname = logging.getLevelName(logging.DEBUG)
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
