"""How the rows of an outbox get onto the connection of a `Publisher`."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import ConfigurationError, PublishError, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.sync.confirmation import Confirmation

__all__ = ["RowCarrier"]

_PART_WAITED_FOR: Final = 4  # of what is outstanding: a quarter
_SWEEP_EVERY: Final = 0.05  # seconds: a row in front may take long, those behind it need not


class RowCarrier:
    """Publishes rows and collects what became of them. For the relay's thread.

    Args:
        connect: begins to connect; may wait for the first verdict.
        send: submits a row to the publisher's lane.
    """

    def __init__(self, connect: Callable[[], None], send: Callable[[OutboxRow], Confirmation]) -> None:
        self._connect = connect
        self._send = send
        self._outstanding: deque[tuple[OutboxRow, Confirmation]] = deque()
        self._failed: list[tuple[OutboxRow, ReliableMQError | None]] = []
        self._swept_at = 0.0
        self._watched: Confirmation | None = None

    def connect(self) -> None:
        """Begin to connect."""
        self._connect()

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows; where nothing can be published, none of the others is tried."""
        failure: ReliableMQError | None = None
        for row in rows:
            if failure is None:
                try:
                    self._outstanding.append((row, self._send(row)))
                    continue
                except (PublishError, ConfigurationError) as error:  # about this row
                    self._failed.append((row, error))
                    continue
                except ReliableMQError as error:
                    failure = error
            self._failed.append((row, failure))

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Give the rows whose publish has ended."""
        settled, self._failed = self._failed, []
        outstanding = self._outstanding
        while outstanding and outstanding[0][1].outcome is not None:
            row, confirmation = outstanding.popleft()
            settled.append((row, confirmation.failure()))
        now = time.monotonic()
        if outstanding and now - self._swept_at >= _SWEEP_EVERY:
            self._swept_at = now
            left: deque[tuple[OutboxRow, Confirmation]] = deque()
            for row, confirmation in outstanding:
                if confirmation.outcome is None:
                    left.append((row, confirmation))
                else:
                    settled.append((row, confirmation.failure()))
            self._outstanding = left
        return settled

    def watch(self, wake: Callable[[], object]) -> None:
        """Have the relay woken by the outcome of a row near the front: every wake-up costs as much as some rows."""
        if self._failed:
            wake()
        elif self._outstanding:
            confirmation = self._outstanding[len(self._outstanding) // _PART_WAITED_FOR][1]
            if confirmation is not self._watched:
                self._watched = confirmation
                with confirmation.home.lock:
                    if confirmation.outcome is None:
                        confirmation.watchers = [wake]
                        return
            if confirmation.outcome is not None:
                wake()
