"""What a driver logs on our behalf becomes DEBUG: a failure is said once, in our own words.

pika logs a lost connection as two errors with tracebacks and a failed attempt as six, on loggers of its own; all of it
reaches us as exceptions, too, and is logged there. In detail it helps only whoever debugs the driver.

Invariants:

- records of other threads and tasks are untouched: a program may use the driver itself, beside us;
- nothing is lost: with a logger of pika's set to DEBUG its records appear as before, at that level.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["demoted_driver_logs"]


@contextmanager
def demoted_driver_logs(package: str) -> Iterator[None]:
    """In the block, records of the driver by this thread, or by this task and those it starts, are at level DEBUG.

    Args:
        package: of the driver, whose modules have been imported: each has a logger of its own.
    """
    _filter_loggers(package)
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _filter_loggers(package: str) -> None:
    prefix = f"{package}."
    # A filter on a logger is not asked about records of the loggers below it. Adding it again does nothing.
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
