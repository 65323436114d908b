"""Undo what Spark's readers do to the process that they run in."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restored_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM. A reader's own would end this process in a later test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
