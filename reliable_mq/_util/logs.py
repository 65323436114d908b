"""Log lines with a limit in time, and the drivers' records, lowered to DEBUG.

A line that every message may cause is logged at most once in an interval. Each has a limit of its own: a line about one
trouble does not hide that of another.

pika logs a lost connection as two errors with tracebacks and a failed attempt as six, on loggers of its own. We get the
same failures as exceptions and log each once; the driver's records help only those who debug the driver.

Invariants:

- records of other threads and tasks are unchanged: a program may use the driver itself, beside us;
- no record is lost: if a logger of the driver is set to DEBUG, its records appear, at that level.
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
    """A count of events, of which a line is logged once in an interval. Thread-safe.

    The first event is logged at once, later ones when ``interval`` seconds have passed since the last line.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0  # not logged yet
        self._logged_at = float("-inf")

    def count(self, events: int = 1) -> int:
        """Count events. If a line is due, return how many it is about; else return 0."""
        with self._lock:
            self._count += events
            now = self._clock()
            if now - self._logged_at < self._interval:
                return 0
            due, self._count, self._logged_at = self._count, 0, now
            return due


@contextmanager
def demoted_driver_logs(package: str) -> Iterator[None]:
    """In the block, lower the driver's log records to DEBUG.

    Those of this thread, or of this task and its children. The modules of the driver's package are imported: each has a
    logger of its own.
    """
    _filter_loggers(package)
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _filter_loggers(package: str) -> None:
    prefix = f"{package}."
    # The filter of a logger does not see records of the loggers below it. Adding it again does nothing.
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
