"""The relay: a thread that takes rows out of an outbox, has them published, and sees to their fates.

What to publish and what becomes of each row is decided by `reliable_mq.core.outbox.RelaySession`; how a row gets onto a
connection is the business of the face (`RowPublisher`).

Invariants: a row is removed only after its confirm; at most ``limit`` rows are outstanding, and ``max_bytes`` of their
bodies, or one row: the carrier has room for them, and the relay never waits where it could not renew its claims; an
error that says nothing about a row makes the relay pause, with growing pauses, and never ends it; at the end rows
without an outcome are handed back.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from reliable_mq.core.outbox import RelaySession, RowOutcome, RowSettlement
from reliable_mq.core.statistics import OutboxStatistics
from reliable_mq.errors import ReliableMQError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.core.statistics import OutboxStatus
    from reliable_mq.outbox.protocol import Outbox, RowLeases

__all__ = ["OutboxRelay", "RowPublisher"]

logger = logging.getLogger(__name__)

_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds
_ROWS_AT_A_TIME: Final = 500
_COUNT_EVERY: Final = 1.0  # seconds; where counting takes long, so much longer that it takes a twentieth of the time
_COUNT_SHARE: Final = 20
_ERRORS_SAID_EVERY: Final = 30.0  # seconds


class RowPublisher(Protocol):
    """Publishes rows, on one of the faces. Called on the relay's thread."""

    def connect(self) -> None:
        """Begin to connect; may wait for the first verdict, and raise where trying again cannot help."""
        ...

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows, in order. Every row comes back once through ``take_settled``, whatever happens to it."""
        ...

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Give the rows whose publish has ended since the last call, and with which error. Does not block."""
        ...

    def watch(self, wake: Callable[[], object]) -> None:
        """Call ``wake`` when there may be something to take; at once, where there is."""
        ...


class OutboxRelay:
    """See the module. ``start``, ``stop`` and ``join`` may be called by any thread.

    Args:
        outbox: to take rows from.
        carrier: to publish them with.
        settle: carries out fates, without blocking; ``settled`` is called when they are.
        limit: rows that may be outstanding at a time.
        max_bytes: of their bodies, likewise.
        name: of the thread.
        statistics: where to count what became of rows.
        measured: whether to count what is in the outbox now and then, for ``status``.

    Attributes:
        error: why nothing can be published at present; None where that is not known to be so.
    """

    def __init__(
        self,
        outbox: Outbox,
        carrier: RowPublisher,
        *,
        settle: Callable[[list[RowSettlement]], None],
        limit: int,
        max_bytes: int,
        name: str,
        statistics: OutboxStatistics | None = None,
        measured: bool = False,
    ) -> None:
        self.statistics = statistics or OutboxStatistics()
        self.error: Exception | None = None
        self._outbox = outbox
        self._carrier = carrier
        self._settle = settle
        self._limit = limit
        self._max_bytes = max_bytes
        self._session = RelaySession()
        self._claims: RowLeases | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()  # for _written
        self._written: list[RowSettlement] = []
        self._outstanding = 0  # rows at the carrier
        self._outstanding_bytes = 0
        self._full = False  # more is ready than there are bytes for
        self._unwritten = 0  # fates on their way
        self._stop_by: float | None = None
        self._pauses = 0
        self._paused_until = 0.0
        self._look_at = 0.0  # when to look for rows again: where there were none, others may store some
        self._keep_at = 0.0
        self._count_at = 0.0 if measured else float("inf")
        self._counted: tuple[OutboxStatus, float] | None = None  # and when
        self._error_said_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, claims: RowLeases) -> None:
        """Start the thread, with what it takes rows from. Does not block."""
        self._claims = claims
        self._thread.start()

    def wake(self) -> None:
        """There may be new rows. Does not block."""
        self._look_at = 0.0
        self._wake.set()

    def settled(self, settlements: Sequence[RowSettlement]) -> None:
        """Fates are carried out. Does not block."""
        with self._lock:
            self._written.extend(settlements)
        self._wake.set()

    def stop(self, timeout: float) -> None:
        """Take no more rows, and end when those that are outstanding have an outcome; within ``timeout`` seconds.

        Does not wait.
        """
        self._stop_by = time.monotonic() + timeout
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end for up to ``timeout`` seconds; return whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def outstanding(self) -> int:
        """Rows that are being published, or whose fate is being carried out."""
        return self._outstanding + self._unwritten

    @property
    def status(self) -> OutboxStatus | None:
        """What was in the outbox a moment ago, where that is ``measured``; None where it could not say."""
        counted = self._counted
        return None if counted is None else counted[0].after(time.monotonic() - counted[1])

    # On its thread

    def _run(self) -> None:
        claims = self._claims
        assert claims is not None  # noqa: S101  # start() has made it
        try:
            self._connect()
            while not self._ended():
                self._wake.clear()
                try:
                    moved = self._turn(claims)
                except ReliableMQError as error:
                    moved = False
                    self._pause(error)
                except Exception as error:
                    moved = False
                    logger.exception("the relay of %r goes on after an error", self._outbox)
                    self._pause(error)
                if not moved:
                    self._wait()
        finally:
            try:
                claims.close()
            except ReliableMQError:
                logger.exception("letting go of %r", self._outbox)

    def _connect(self) -> None:
        try:
            self._carrier.connect()
        except ReliableMQError as error:
            self._pause(error)

    def _turn(self, claims: RowLeases) -> bool:
        """Do what there is to do; return whether that was anything."""
        session = self._session
        with self._lock:
            written, self._written = self._written, []
        if written:
            self._unwritten -= len(written)
            claims.written(written)
            if any(one.row.ordering_key is not None and not session.has(one.row.ordering_key) for one in written):
                self._look_at = 0.0  # what was passed over, as others of its key were taken, can be taken now
        settled = self._carrier.take_settled()
        self._outstanding -= len(settled)
        for row, error in settled:
            self._outstanding_bytes -= len(row.message.body)
            session.settled(row, error)
        if settled:
            self._see_trouble()
        taken = 0
        stopping = self._stop_by is not None
        now = time.monotonic()
        if now >= self._keep_at:
            self._keep_at = now + claims.keep_every
            claims.keep()
        if now >= self._count_at:
            self._count()
        if stopping:
            session.stopped()
        self._decide(claims)  # before rows are taken: what a fate holds back is not given any more
        if not stopping and now >= self._paused_until:
            taken = self._take(claims, now)
            self._decide(claims)
        if session.ready and not stopping and now >= self._paused_until:
            self._send(session.ready)
        return bool(written or settled or taken)

    def _take(self, claims: RowLeases, now: float) -> int:
        session = self._session
        room = self._limit - self._outstanding - self._unwritten - session.waiting - len(session.ready)
        # A few rows at a time would cost a look at the outbox each.
        least = max(min(_ROWS_AT_A_TIME, self._limit // 2), 1)
        if room < least or now < self._look_at or self._full:
            return 0
        self._look_at = now + self._outbox.poll_interval  # unless somebody wakes us meanwhile
        taken = claims.take(min(room, _ROWS_AT_A_TIME))
        if taken.rows or taken.damaged:
            self._look_at = 0.0
        elif not self._outstanding:
            self._pauses = 0  # nothing is to be done, so nothing is wrong
        session.add(taken.rows)
        session.settlements.extend(taken.damaged)
        return len(taken.rows)

    def _send(self, ready: deque[OutboxRow]) -> None:
        rows: list[OutboxRow] = []
        size = self._outstanding_bytes
        while ready:
            size += len(ready[0].message.body)
            if size > self._max_bytes and (rows or self._outstanding):
                break
            rows.append(ready.popleft())
            self._outstanding_bytes = size
        self._full = bool(ready)
        if rows:
            self._outstanding += len(rows)
            self._carrier.send(rows)

    def _decide(self, claims: RowLeases) -> None:
        settlements = self._session.settlements
        if not settlements:
            return
        self._session.settlements = []
        for settlement in settlements:
            if settlement.fate is RowOutcome.SET_ASIDE:
                self.statistics.set_aside += 1
                logger.error("message %s is set aside: %s", settlement.row.message.message_id, settlement.reason)
            elif settlement.fate is RowOutcome.LATER:
                self.statistics.delayed += 1
            elif settlement.fate is RowOutcome.CONFIRMED:
                self.statistics.confirmed += 1
                self._pauses = 0
                self.error = None
        claims.decided(settlements)
        self._unwritten += len(settlements)
        self._settle(settlements)

    def _count(self) -> None:
        began = time.monotonic()
        try:
            self._counted = self._outbox.status(), began
        except ReliableMQError as error:
            self._counted = None
            self.statistics.interruptions += 1
            self._say("%r cannot say what is in it: %s", error)
        ended = time.monotonic()
        self._count_at = ended + max(_COUNT_EVERY, _COUNT_SHARE * (ended - began))

    def _see_trouble(self) -> None:
        trouble, self._session.trouble = self._session.trouble, None
        if trouble is not None:
            self._pause(trouble)

    def _pause(self, error: Exception) -> None:
        now = time.monotonic()
        self.statistics.interruptions += 1
        self.error = error
        self._paused_until = now + _PAUSES[min(self._pauses, len(_PAUSES) - 1)]
        self._pauses += 1
        self._say("nothing of %r can be published for now, and it is tried again: %s", error)

    def _say(self, text: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._error_said_at >= _ERRORS_SAID_EVERY:
            self._error_said_at = now
            logger.error(text, self._outbox, error)

    def _wait(self) -> None:
        now = time.monotonic()
        until = max(now + self._outbox.poll_interval, min(self._paused_until, now + 1.0))
        self._carrier.watch(self._wake.set)
        self._wake.wait(until - now)

    def _ended(self) -> bool:
        if self._stop_by is None:
            return False
        done = not self._outstanding and not self._unwritten and not self._session.settlements
        return done or time.monotonic() >= self._stop_by
