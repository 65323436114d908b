"""The thread that writes to an outbox: as much as it can per transaction.

Messages of many callers and the outcomes of rows that a relay has settled go into the same transaction.

Invariants: each message and each outcome is reported exactly once, in order; a message that could not be stored is
reported with the error and never tried again, so that it is not stored after its caller was told; an outcome is tried
again until it is written, or the writer ends; no exception of a callback ends the thread, or keeps the other callbacks
from their calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final, Generic, NamedTuple, TypeVar

from reliable_mq._util.logs import LogLimit
from reliable_mq.core.outbox import NewRow, RowSettlement
from reliable_mq.core.statistics import OutboxStatistics
from reliable_mq.errors import OutboxError, ReliableMQError
from reliable_mq.outbox.protocol import Outbox

__all__ = ["OutboxWriter"]

logger = logging.getLogger(__name__)

_ROWS_PER_WRITE: Final = 1000
_BYTES_PER_WRITE: Final = 2 * 1024 * 1024
_RETRY_AFTER: Final = 1.0  # seconds, for outcomes that could not be written
_LOG_ERRORS_EVERY: Final = 10.0  # seconds

T = TypeVar("T")


class _QueuedMessage(NamedTuple, Generic[T]):
    """A message to store, and its owner."""

    owner: T
    row: NewRow


class OutboxWriter(Generic[T]):
    """Writes to an outbox on a thread.

    ``store`` and ``settle`` are thread-safe, and may be called by a signal handler.

    Args:
        on_stored: called on the writer's thread with the owners of messages, and the error if they are not stored.
        on_settled: called on the writer's thread with the outcomes that were written.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        name: str,
        on_stored: Callable[[list[T], OutboxError | None], None],
        on_settled: Callable[[list[RowSettlement]], None],
        statistics: OutboxStatistics,
    ) -> None:
        self._outbox = outbox
        self._statistics = statistics
        self._on_stored = on_stored
        self._on_settled = on_settled
        self._queue: SimpleQueue[_QueuedMessage[T] | list[RowSettlement] | Callable[[], object] | None] = SimpleQueue()
        self._settlements: list[RowSettlement] = []
        self._settle_at = 0.0
        self._error_log = LogLimit(_LOG_ERRORS_EVERY)
        self._ending = False
        self._calls: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def store(self, owner: T, row: NewRow) -> None:
        """Store a message soon. Does not block."""
        self._queue.put(_QueuedMessage(owner, row))

    def settle(self, settlements: list[RowSettlement]) -> None:
        """Write the outcomes of rows soon. Does not block."""
        self._queue.put(settlements)

    def call(self, call: Callable[[], object]) -> None:
        """Call a function once all that came before is reported. Does not block."""
        self._queue.put(call)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """End when all earlier messages and outcomes are reported. Does not wait."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end; return whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # On its thread

    def _run(self) -> None:
        while True:
            messages = self._gather()
            self._write(messages)
            calls, self._calls = self._calls, []
            for call in calls:
                self._call(call)
            if self._ending and self._queue.empty():
                return

    def _gather(self) -> list[_QueuedMessage[T]]:
        """Wait for messages or outcomes; return the messages for one transaction."""
        messages: list[_QueuedMessage[T]] = []
        size = 0
        timeout = None if not self._settlements else max(self._settle_at - time.monotonic(), 0.0)
        try:
            item = self._queue.get_nowait() if self._ending else self._queue.get(timeout=timeout)
            while True:
                if item is None:
                    self._ending = True
                elif isinstance(item, _QueuedMessage):
                    messages.append(item)
                    size += len(item.row.message.body)
                    if len(messages) >= _ROWS_PER_WRITE or size >= _BYTES_PER_WRITE:
                        break
                elif isinstance(item, list):
                    self._settlements.extend(item)
                else:
                    self._calls.append(item)
                item = self._queue.get_nowait()
        except Empty:
            pass
        return messages

    def _write(self, messages: list[_QueuedMessage[T]]) -> None:
        settlements = self._settlements if time.monotonic() >= self._settle_at or self._ending else []
        if not messages and not settlements:
            return
        try:
            self._outbox.write([message.row for message in messages], settlements)
        except Exception as error:  # noqa: BLE001  # logged, where no outbox may raise it
            failure = self._failure(error)
            if messages and settlements and not failure.may_have_arrived:
                self._write_settlements()  # which may need no room
            elif settlements:
                self._settle_later(failure)
            self._report(messages, failure)
        else:
            self._settled(settlements)
            self._report(messages, None)

    def _failure(self, error: Exception) -> OutboxError:
        if isinstance(error, OutboxError):
            return error
        if isinstance(error, ReliableMQError):
            return OutboxError(str(error))
        logger.error("writing to %r", self._outbox, exc_info=error)
        failure = OutboxError(f"writing to {self._outbox!r} failed; the log says how")
        failure.may_have_arrived = True  # how far it got is not known
        failure.__cause__ = error
        return failure

    def _write_settlements(self) -> None:
        settlements = self._settlements
        try:
            self._outbox.write([], settlements)
        except Exception as error:  # noqa: BLE001  # logged, where no outbox may raise it
            self._settle_later(self._failure(error))
        else:
            self._settled(settlements)

    def _settled(self, settlements: list[RowSettlement]) -> None:
        if settlements:
            self._settlements = []
            self._settle_at = 0.0
            self._call(lambda: self._on_settled(settlements))

    def _settle_later(self, error: OutboxError) -> None:
        self._settle_at = time.monotonic() + _RETRY_AFTER
        if self._error_log.count():
            logger.error("%s; %d rows that were published stay there for now", error, len(self._settlements))

    def _report(self, messages: Sequence[_QueuedMessage[T]], error: OutboxError | None) -> None:
        if messages:
            if error is None:
                self._statistics.stored += len(messages)
            else:
                self._statistics.not_stored += len(messages)
            owners = [message.owner for message in messages]
            self._call(lambda: self._on_stored(owners, error))

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            logger.exception("the writer of %r goes on after an exception of what it called", self._outbox)
