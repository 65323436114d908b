"""Restore the logging configuration, which a command changes process-wide, and make the commands only once."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import pytest
import typer.main
import typer.testing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Making all commands takes typer longer than running one."""
    with pytest.MonkeyPatch.context() as patch:
        made_once = cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", made_once)
        patch.setattr(typer.testing, "_get_command", made_once)
        yield


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
