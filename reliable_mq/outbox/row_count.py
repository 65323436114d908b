"""The periodic count of the rows of an outbox, for metrics.

The count runs on a thread of its own, so that the relay can renew its leases meanwhile. While the outbox fails or hangs
there is no count, because an old one would hide this.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq._util.threads import InterruptibleEvent, call_in_background
from reliable_mq.core.statistics import OutboxStatistics, OutboxStatus
from reliable_mq.errors import OutboxError, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliable_mq.outbox.protocol import Outbox

logger = get_logger(__name__)

_EVERY: Final = 1.0  # seconds; longer if counting would take more than a twentieth of the time
_SHARE: Final = 20
_HANGS_AFTER: Final = 10.0  # seconds without an answer after which the outbox hangs
_LOG_ERRORS_EVERY: Final = 30.0  # seconds


class RowCount:
    """The last count of the rows of an outbox.

    The relay's thread calls it. Any thread may read ``status``.

    Args:
        outbox: The outbox.
        statistics: The statistics in which failures count.
        counted: A function that is called when a count has ended, on any thread.
        name: The name of the threads that count.
        measured: Whether to count at all.

    Attributes:
        unanswered_since: Since when the relay waits for an answer of the outbox, in monotonic time; None if it does
            not.
    """

    def __init__(
        self,
        outbox: Outbox,
        statistics: OutboxStatistics,
        counted: Callable[[], object],
        *,
        name: str,
        measured: bool,
    ) -> None:
        self._outbox = outbox
        self._statistics = statistics
        self._counted = counted
        self._name = name
        self._due_at = 0.0 if measured else float("inf")
        self._new: tuple[OutboxStatus | Exception, float] | None = None  # a new count and its time
        self._none_runs = InterruptibleEvent()
        self._none_runs.set()
        self._last: tuple[OutboxStatus, float] | None = None  # the last count and its time
        self._runs_since: float | None = None  # since when a count runs
        self.unanswered_since: float | None = None
        self._log = LogLimit(_LOG_ERRORS_EVERY)

    @property
    def status(self) -> OutboxStatus | None:
        """The last count, None without one, or while the outbox fails or hangs."""
        last, now = self._last, time.monotonic()
        if last is None or any(
            since is not None and now - since >= _HANGS_AFTER for since in (self._runs_since, self.unanswered_since)
        ):
            return None
        return last[0].after(now - last[1])

    def update(self, now: float) -> None:
        """Begin a count that is due, and note one that has ended. Does not block."""
        if now >= self._due_at:
            self._begin(now)
        if self._new is not None:
            self._note(*self._new)

    @contextmanager
    def outbox_called(self) -> Iterator[None]:
        """Watch whether a call of the outbox on the relay's thread hangs.

        A call that ended without an answer in time counts as one with its repetition.
        """
        if self.unanswered_since is None:
            self.unanswered_since = time.monotonic()
        answered = True
        try:
            yield
        except OutboxError as error:
            answered = not isinstance(error.__cause__, TimeoutError)
            raise
        finally:
            if answered:
                self.unanswered_since = None

    def wait(self) -> None:
        """Wait until no count runs."""
        self._none_runs.wait()

    def _begin(self, began: float) -> None:
        def ended(outcome: OutboxStatus | Exception) -> None:
            self._new = outcome, began
            self._runs_since = None
            self._none_runs.set()
            self._counted()

        self._due_at = float("inf")
        self._runs_since = began
        self._none_runs.clear()
        call_in_background(f"{self._name}-count", self._outbox.status, ended)

    def _note(self, outcome: OutboxStatus | Exception, began: float) -> None:
        self._new = None
        if isinstance(outcome, OutboxStatus):
            self._last = outcome, began
        else:
            self._last = None
            self._statistics.interruptions += 1
            if self._log.count():
                unexpected = None if isinstance(outcome, ReliableMQError) else outcome
                logger.error("failed to count the rows of %r: %s", self._outbox, outcome, exc_info=unexpected)
        ended = time.monotonic()
        self._due_at = ended + max(_EVERY, _SHARE * (ended - began))
