"""A log record that cannot be formatted fails its test.

The package's loggers raise nothing, so an exception of pytest's handler would not fail it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from _pytest.logging import LogCaptureHandler

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def records_can_be_formatted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[tuple[object, object]] = []

    def handle_error(_handler: LogCaptureHandler, record: logging.LogRecord) -> None:
        failed.append((record.msg, record.args))

    monkeypatch.setattr(LogCaptureHandler, "handleError", handle_error)
    yield
    assert not failed
