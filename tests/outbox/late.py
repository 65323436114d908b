"""An outbox that is asked for its backlog after it was closed."""

from __future__ import annotations

import threading
from pathlib import Path

from reliable_mq.outbox import SQLiteOutbox


class LateQuestion(SQLiteOutbox):
    """Its first question for the backlog comes after it was closed."""

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
