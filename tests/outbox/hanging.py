"""An outbox that hangs on demand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from reliable_mq.outbox import SQLiteOutbox

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reliable_mq.core.outbox import NewRow, RowSettlement
    from reliable_mq.core.statistics import OutboxStatus


class HangingOutbox(SQLiteOutbox):
    """An outbox whose calls of one kind hang from some time on.

    Attributes:
        hangs: The calls that hang: ``"status"``, ``"take"``, ``"outcomes"`` for a `write` with outcomes, ``"rows"`` for
            any other `write`, or none.
        answers: Set it to let them go on.
    """

    hangs = ""

    def __init__(self, path: Path) -> None:
        super().__init__(path, poll_interval=0.01)
        self.answers = threading.Event()

    def _answer(self, call: str) -> None:
        if call == self.hangs:
            self.answers.wait(30)

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        self._answer("outcomes" if settlements else "rows")
        super().write(rows, settlements)

    def status(self) -> OutboxStatus:
        self._answer("status")
        return super().status()

    def claims(self) -> Any:
        leases = super().claims()
        take = leases.take

        def take_late(limit: int, retries: int | None = None) -> Any:
            self._answer("take")
            return take(limit, retries)

        leases.take = take_late  # type: ignore[method-assign]
        return leases
