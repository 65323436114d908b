"""Loggers, rate-limited log lines, and drivers' log records lowered to DEBUG.

A line that every message may cause is logged at most once per interval. Each such line has its own limit, so that a
line about one problem does not hide a line about another.

pika logs a lost connection as two errors with tracebacks and a failed attempt as six, on its own loggers. We get the
same failures as exceptions and log each of them once. The driver's records help only to debug the driver.

Invariants:

- A call of a logger of this package raises no exception of a handler, filter or record factory of the program. Such an
  exception would end a thread, or leave a reconnect half done.
- Records of other threads and tasks are unchanged: a program may use the driver itself, beside this package.
- No record is lost. If a logger of the driver is set to DEBUG, its records appear at that level.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

_reporter = logging.NullHandler()


def get_logger(name: str) -> logging.Logger:
    """Return a logger that raises no exception of a handler, filter or factory.

    The exception is written to stderr, as `logging` does for its own handlers, unless ``logging.raiseExceptions`` is
    false. If a record factory raises or returns no record, the record is a plain one. The fields of ``extra`` replace
    those that a factory has set, which `logging` would refuse.
    """
    logger = logging.getLogger(name)
    handle = logger.handle

    def made(
        name: str,
        level: int,
        fn: str,
        lno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        extra: Mapping[str, object] | None = None,
        sinfo: str | None = None,
    ) -> logging.LogRecord:
        try:
            record = type(logger).makeRecord(logger, name, level, fn, lno, msg, args, exc_info, func, None, sinfo)
            vars(record).update(extra or {})
        except Exception:  # noqa: BLE001  # a factory may raise any, or return no record
            record = logging.LogRecord(name, level, fn, lno, msg, args, exc_info, func, sinfo)
            vars(record).update(extra or {})
            with suppress(Exception):
                _reporter.handleError(record)
        return record

    def guarded(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception:  # noqa: BLE001  # a handler may raise any
            with suppress(Exception):  # stderr may be closed
                _reporter.handleError(record)
        except SystemExit:  # rich's handler raises it if the reader of a pipe has left
            if threading.current_thread() is threading.main_thread():  # a signal handler may have raised it
                raise

    logger.makeRecord = made  # type: ignore[method-assign]
    logger.handle = guarded  # type: ignore[method-assign]
    return logger


given_up_logger = get_logger("reliable_mq.connection.given_up")
"""Logs the error that ends a connection, which its client also raises."""


class LogLimit:
    """A count of events that are logged at most once per interval. Thread-safe.

    The first event is logged at once, later ones when ``interval`` seconds have passed since the last line.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may acquire it again
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
