"""Helpers for calls with a deadline, and for late and interrupted questions to an outbox."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliable_mq import OutboxError
from reliable_mq.outbox import SQLiteOutbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LATE = 2.0  # seconds that a busy machine may add


class LateQuestion(SQLiteOutbox):
    """An outbox whose first `backlog` call is made after it was closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.closed = threading.Event(), threading.Event()

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        if not self.asked.is_set():
            self.asked.set()
            assert self.closed.wait(20)
        return super().backlog(up_to)

    def close(self) -> None:
        super().close()
        self.closed.set()


class InterruptedQuestion(LateQuestion):
    """An outbox whose first `backlog` call takes long, so that closing the outbox ends it with an error."""

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        first = not self.asked.is_set()
        found = super().backlog(up_to)
        if first:
            raise OutboxError("reading failed: interrupted")
        return found


@contextmanager
def on_time(timeout: float) -> Iterator[None]:
    """Fail if the block takes clearly longer than the timeout, in seconds."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < timeout + _LATE, f"it took {took:.1f} s, with a timeout of {timeout:g} s"
