"""How the rows of an outbox get from the relay's thread onto the connection of an `AsyncPublisher`, and back.

Invariants: every row that is sent comes back once, whatever happens to it or to the event loop; the connection is
touched on the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.errors import ConfigurationError, PublishError, ReliableMQError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.core.outbox import OutboxRow

__all__ = ["AsyncRowCarrier"]


class AsyncRowCarrier:
    """Publishes rows and collects what became of them.

    Args:
        loop: of the publisher.
        connect: begins to connect; waits for the first verdict.
        send: submits a row to the publisher's lane; its confirmation is to call the function that is given.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connect: Callable[[], Awaitable[None]],
        send: Callable[[OutboxRow, Callable[[AsyncConfirmation], None]], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._connect = connect
        self._send = send
        self._to_send: deque[OutboxRow] = deque()
        self._task: asyncio.Task[None] | None = None
        self._settled: deque[tuple[OutboxRow, ReliableMQError | None]] = deque()
        self._wake: Callable[[], object] | None = None  # of a relay that waits

    # On the relay's thread

    def connect(self) -> None:
        """Begin to connect."""
        self._on_loop(self._work)

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows, in order."""
        if not self._on_loop(partial(self._put, rows)):
            error = UsageError("the event loop of this publisher has ended; what is in the outbox stays there")
            self._settled.extend((row, error) for row in rows)

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Give the rows whose publish has ended."""
        settled: list[tuple[OutboxRow, ReliableMQError | None]] = []
        while self._settled:
            settled.append(self._settled.popleft())
        return settled

    def watch(self, wake: Callable[[], object]) -> None:
        """Have the relay woken by the next outcome."""
        self._wake = wake
        if self._settled:  # it came before this, and may not have seen it
            wake()

    # On the event loop

    def cancel(self) -> None:
        """Send no more. What was not sent comes back."""
        if self._task is not None:
            self._task.cancel()

    def _put(self, rows: Sequence[OutboxRow]) -> None:
        self._to_send.extend(rows)
        self._work()

    def _work(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._feed(), name="reliable_mq outbox relay")

    async def _feed(self) -> None:
        """Send what is to be sent; where nothing can be published, none of the rest is tried."""
        failure: ReliableMQError | None = UsageError("the publisher of this row was closed")
        row: OutboxRow | None = None
        try:
            await self._connect()
            while self._to_send:
                row = self._to_send.popleft()
                try:
                    await self._send(row, partial(self._done, row))
                except (PublishError, ConfigurationError) as error:  # about this row
                    self._settle(row, error)
                row = None
        except ReliableMQError as error:
            failure = error
        finally:
            if row is not None:
                self._settle(row, failure)
            while self._to_send:
                self._settle(self._to_send.popleft(), failure)

    def _done(self, row: OutboxRow, confirmation: AsyncConfirmation) -> None:
        self._settle(row, confirmation.failure())

    def _settle(self, row: OutboxRow, error: ReliableMQError | None) -> None:
        self._settled.append((row, error))
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _on_loop(self, call: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed
            return False
        return True
