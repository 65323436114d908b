"""A log record that cannot be formatted fails its test, and loggers are restored after each test.

The package's loggers raise nothing, so an exception of pytest's handler would not fail a test. A command that runs in
the tests' process changes the loggers of the process, and the next test in it might see no record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from _pytest.logging import LogCaptureHandler

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def records_can_be_formatted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[tuple[object, object]] = []

    def handle_error(_handler: LogCaptureHandler, record: logging.LogRecord) -> None:
        failed.append((record.msg, record.args))

    monkeypatch.setattr(LogCaptureHandler, "handleError", handle_error)
    yield
    assert not failed


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    before = [(each, each.level, each.propagate, each.handlers[:]) for each in _loggers()]
    yield
    for made in _loggers():  # during the test, by an import
        made.setLevel(logging.NOTSET)
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


def _loggers() -> list[logging.Logger]:
    ours = [name for name in logging.root.manager.loggerDict if name.startswith("reliable_mq.")]
    return [logging.getLogger(name) for name in ("reliable_mq", "pika", "aio_pika", "aiormq", *ours)]
