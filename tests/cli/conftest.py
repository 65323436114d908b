"""Restore the logging configuration, which a command changes process-wide."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    names = ("reliable_mq", "pika", "aio_pika", "aiormq")
    parts = [name for name in logging.root.manager.loggerDict if name.startswith("reliable_mq.")]
    loggers = [logging.getLogger(name) for name in (*names, *parts)]
    before = [(each, each.level, each.propagate, each.handlers[:]) for each in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
