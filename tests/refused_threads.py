"""Threads that cannot be started, as if the process had reached its limit."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def refusing_threads(ending: str) -> Iterator[list[str]]:
    """Refuse to start threads whose names have this ending. Yield the names of the refused ones."""
    start = threading.Thread.start
    refused: list[str] = []

    def refusing(thread: threading.Thread) -> None:
        if thread.name.endswith(ending):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        yield refused
