"""The threads of an outbox: a writer stores messages, a relay publishes rows.

The writer puts as much as it can into one transaction: messages of many callers, and the outcomes of rows that the
relay has settled.

`reliable_mq.core.outbox.RelaySession` decides which row is published next and the outcome of each row. The sync and
the asyncio API publish the rows on a connection (`RowPublisher`).

Invariants of the writer:

- each message and each outcome is reported exactly once, in order;
- a message that could not be stored is reported with the error and never tried again, so it is never stored after its
  caller got the error;
- the writer retries an outcome until it is written or the writer ends;
- a closed outbox is not left open by a thread whose call hung until then;
- an exception in a callback neither ends the thread nor keeps other callbacks from being called.

Invariants of the relay:

- a row is removed only after its confirm;
- at most ``limit`` rows with ``max_bytes`` of bodies are outstanding or keep a place of the publisher, or a single
  larger row, so the publisher always has space for them and the relay never blocks in a place where it cannot renew its
  leases. It counts rows on another thread, and ends after it;
- no rows are taken while those that wait for their key, or for their outcome to be written, have ``max_bytes``;
- an error that does not concern a row makes the relay pause, longer each time, and never ends it;
- rows without an outcome are released at the end, also if the publisher of the rows has ended without a stop. The
  outcomes of the others are written before, so that no other relay takes rows that are settled.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq._util.threads import DaemonThread, InterruptibleEvent
from reliable_mq.core.outbox import KeptPlaces, NewRow, OutboxRow, RelaySession, RowOutcome, RowSettlement, is_answer
from reliable_mq.core.statistics import OutboxStatistics, OutboxStatus, RelayStatus
from reliable_mq.errors import OutboxError, ReliableMQError
from reliable_mq.outbox.protocol import Outbox, RowLeases
from reliable_mq.outbox.row_count import RowCount

logger = get_logger(__name__)

_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds
_ROWS_PER_TAKE: Final = 500
_TURN_EVERY: Final = 1.0  # seconds, however long the poll interval and the pauses are
_LOG_ERRORS_EVERY: Final = 30.0  # seconds

_ROWS_PER_WRITE: Final = 1000
_BYTES_PER_WRITE: Final = 2 * 1024 * 1024
_RETRY_AFTER: Final = 1.0  # seconds until outcomes that could not be written are tried again
_LOG_WRITE_ERRORS_EVERY: Final = 10.0  # seconds

T = TypeVar("T")


class _OutboxThread:
    """A daemon thread that ends on its own."""

    def __init__(self, name: str) -> None:
        self._thread = DaemonThread(name, self._run)

    def _run(self) -> None:
        raise NotImplementedError

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; return whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()


class _QueuedMessage(NamedTuple, Generic[T]):
    """A message to store and its owner."""

    owner: T
    row: NewRow


class OutboxWriter(_OutboxThread, Generic[T]):
    """A thread that writes to an outbox.

    ``store`` and ``settle`` are thread-safe and may be called in a signal handler.

    Args:
        on_stored: A callback for the owners of messages, and the error if the messages could not be stored. The
            writer's thread calls it.
        on_settled: A callback for the outcomes that were written. The writer's thread calls it.
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
        super().__init__(name)
        self._outbox = outbox
        self._statistics = statistics
        self._on_stored = on_stored
        self._on_settled = on_settled
        self._queue: SimpleQueue[_QueuedMessage[T] | list[RowSettlement] | Callable[[], object] | None] = SimpleQueue()
        self._settlements: list[RowSettlement] = []
        self._settle_at = 0.0
        self._error_log = LogLimit(_LOG_WRITE_ERRORS_EVERY)
        self._ending = False
        self._abandoned = threading.Event()
        self._calls: list[Callable[[], object]] = []

    def start(self) -> None:
        """Start the thread, unless it was already started."""
        if self._thread.ident is None:
            self._thread.start()

    def store(self, owner: T, row: NewRow) -> None:
        """Queue a message to be stored. Does not block."""
        self._queue.put(_QueuedMessage(owner, row))

    def settle(self, settlements: list[RowSettlement]) -> None:
        """Queue the outcomes of rows to be written. Does not block."""
        self._queue.put(settlements)

    def call(self, call: Callable[[], object]) -> None:
        """Call a function after everything queued before is reported. Does not block."""
        self._queue.put(call)

    def stop(self) -> None:
        """End after all earlier messages and outcomes are reported. Does not block."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Write nothing more, because the outbox is about to be closed. Does not block."""
        self._abandoned.set()

    # On the writer's thread

    def _run(self) -> None:
        while True:
            messages = self._gather()
            if len(messages) > 1 and len(messages[-1].row.message.body) >= _BYTES_PER_WRITE:
                self._write(messages[:-1])
                messages = messages[-1:]  # if the database refuses this large one, the others are stored all the same
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
            self._write_now([message.row for message in messages], settlements)
        except Exception as error:  # noqa: BLE001  # logged, where no outbox may raise it
            failure = self._failure(error)
            self._report(messages, failure)  # first, because another write may take as long again
            if messages and settlements and not failure.may_have_arrived:
                self._write([])  # on a full disk, the outcomes may succeed without the messages
            elif settlements:
                self._settle_later(failure)
        else:
            self._settled(settlements)
            self._report(messages, None)

    def _failure(self, error: Exception) -> OutboxError:
        if isinstance(error, OutboxError):
            return error
        if isinstance(error, ReliableMQError):
            return OutboxError(str(error))
        logger.error("unexpected error while writing to %r", self._outbox, exc_info=error)
        failure = OutboxError(f"writing to {self._outbox!r} failed; the log says how")
        failure.may_have_arrived = True  # it is unknown how far the write got
        failure.__cause__ = error
        return failure

    def _write_now(self, rows: list[NewRow], settlements: list[RowSettlement]) -> None:
        if self._abandoned.is_set():  # the path or the database may be another one when it is opened again
            raise OutboxError(f"{self._outbox!r} was closed before this was written")
        try:
            self._outbox.write(rows, settlements)
        finally:
            if self._abandoned.is_set():  # in the meantime: the write may have opened it again
                self._outbox.close()

    def _settled(self, settlements: list[RowSettlement]) -> None:
        if settlements:
            self._settlements = []
            self._settle_at = 0.0
            self._call(lambda: self._on_settled(settlements))

    def _settle_later(self, error: OutboxError) -> None:
        self._settle_at = time.monotonic() + _RETRY_AFTER
        if self._error_log.count():
            logger.error("%s; %d published rows stay in the outbox for now", error, len(self._settlements))

    def _report(self, messages: Sequence[_QueuedMessage[T]], error: OutboxError | None) -> None:
        if messages:
            if error is None:
                self._statistics.stored += len(messages)
            owners = [message.owner for message in messages]
            self._call(lambda: self._on_stored(owners, error))

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            logger.exception("a callback of the writer of %r raised; the writer continues", self._outbox)


def _size(settlements: Sequence[RowSettlement]) -> int:
    return sum(len(settlement.row.message.body) for settlement in settlements)


class RowPublisher(Protocol):
    """A publisher of rows by the sync or the asyncio API, for the relay's thread.

    Attributes:
        ended: Whether no row can be published any more, and no row is left for `take_settled`.
    """

    @property
    def ended(self) -> bool: ...

    def connect(self) -> None:
        """Begin to connect, unless connected. May block.

        Raise an error if the broker refused the last attempt for good. A later call tries again.
        """
        ...

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows in order. ``take_settled`` returns each of them once."""
        ...

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Return the rows settled since the last call, with their errors. Does not block."""
        ...

    def kept(self) -> KeptPlaces:
        """Return the places that settled rows still have at the publisher."""
        ...

    def watch(self, wake: Callable[[], object]) -> None:
        """Call ``wake`` when rows may be settled, or at once if some already are."""
        ...


class OutboxRelay(_OutboxThread):
    """A thread that takes rows from an outbox and publishes them.

    ``start``, ``stop`` and ``join`` may be called on any thread.

    Args:
        settle: A function that writes outcomes without blocking. ``settled`` is called after they are written.
        at_end: A function that is called after the last outcome. It returns once each outcome is written, or never will
            be.
        released: A function that is called after the last call of the outbox.
        limit: The maximum number of outstanding rows.
        max_bytes: The maximum total size of their bodies, in bytes.
        measured: Whether to count the rows of the outbox periodically, for ``status``.

    Attributes:
        error: The reason why nothing can be published at the moment, if known, else None.
    """

    def __init__(
        self,
        outbox: Outbox,
        publisher: RowPublisher,
        *,
        settle: Callable[[list[RowSettlement]], None],
        at_end: Callable[[], object] = lambda: None,
        released: Callable[[], object] = lambda: None,
        limit: int,
        max_bytes: int,
        name: str,
        statistics: OutboxStatistics | None = None,
        measured: bool = False,
    ) -> None:
        super().__init__(name)
        self.statistics = statistics or OutboxStatistics()
        self.error: Exception | None = None
        self._outbox = outbox
        self._publisher = publisher
        self._settle = settle
        self._at_end = at_end
        self._released = released
        self._limit = limit
        self._max_bytes = max_bytes
        self._session = RelaySession(limit, max_bytes)
        self._leases: RowLeases  # set by ``start``
        self._wake = InterruptibleEvent()
        self._lock = threading.Lock()  # for _written
        self._written: list[RowSettlement] = []
        self._outstanding = 0  # rows at the publisher
        self._outstanding_bytes = 0
        self._full = False  # more rows are ready than ``max_bytes`` allows
        self._unwritten = 0  # outcomes on their way into the outbox
        self._unwritten_bytes = 0
        self._written_at = 0.0  # when outcomes were last written, or when the first of the unwritten ones arrived
        self._stop_by: float | None = None
        self._pauses = 0
        self._trouble_since = 0.0
        self._paused_until = 0.0
        self._take_at = 0.0  # when to look for rows again: other processes may have stored some
        self._due: list[float] = []  # a heap of the times when rows that this relay delayed are due
        self._keep_at = 0.0
        self._count = RowCount(outbox, self.statistics, self._wake.set, name=name, measured=measured)
        self._pause_log = LogLimit(_LOG_ERRORS_EVERY)

    def start(self, leases: RowLeases) -> None:
        """Start the thread, which takes rows with these leases. Does not block."""
        self._leases = leases
        self._thread.start()

    def wake(self) -> None:
        """Look for new rows now. Does not block."""
        self._take_at = 0.0
        self._wake.set()

    def settled(self, settlements: Sequence[RowSettlement]) -> None:
        """Note outcomes that were written. Does not block."""
        with self._lock:
            self._written.extend(settlements)
        self._wake.set()

    def stop(self, timeout: float) -> None:
        """Take no more rows. End when all rows are settled, or after the timeout."""
        self._stop_by = time.monotonic() + timeout
        self._wake.set()

    @property
    def trouble(self) -> tuple[Exception | None, float]:
        """The error that prevents publishing (or None), and its monotonic start time."""
        return self.error, self._trouble_since

    @property
    def unanswered_since(self) -> float | None:
        """The monotonic time since when the outbox has not answered, or None."""
        waits = self._count.unanswered_since, self._written_at if self._unwritten else None
        return min((since for since in waits if since is not None), default=None)

    @property
    def own_status(self) -> RelayStatus:
        """The state of the relay itself."""
        since = self.unanswered_since
        return RelayStatus(0.0 if since is None else time.monotonic() - since)

    @property
    def status(self) -> OutboxStatus | None:
        """The last count of rows if ``measured``; None while the outbox fails or hangs."""
        return self._count.status

    # On the relay's thread

    def _run(self) -> None:
        try:
            self._attempt(self._publisher.connect)
            while not self._ended():
                self._wake.clear()
                if not self._attempt(self._turn):
                    self._wait()
        finally:
            self._session.stopped()  # the timeout of `stop` may have left no time for another turn
            self._decide()
            self._at_end()
            try:
                self._leases.close()
            except Exception:
                logger.exception("failed to release the rows of %r", self._outbox)
            self._count.wait()  # it would open the outbox again if that is closed
            self._released()

    def _attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of a step, or pause after an error and return None."""
        try:
            return step()
        except Exception as error:
            if not isinstance(error, ReliableMQError):
                logger.exception("unexpected error in the relay of %r; the relay continues", self._outbox)
            self._pause(error)
            return None

    def _turn(self) -> bool:
        """Do all work that is due; return whether any row moved."""
        session, leases = self._session, self._leases
        with self._lock:
            written, self._written = self._written, []
        if written:
            self._written_at = time.monotonic()
            self._unwritten -= len(written)
            self._unwritten_bytes -= _size(written)
            leases.written(written)
            if any(
                one.outcome is RowOutcome.BACK
                or (one.row.ordering_key is not None and not session.has(one.row.ordering_key))
                for one in written
            ):
                self._take_at = 0.0  # rows that went back, or waited for other rows of their key, can be taken now
            for delay in {one.delay for one in written if one.outcome is RowOutcome.LATER}:
                heapq.heappush(self._due, time.monotonic() + delay)
        settled = self._publisher.take_settled()
        self._outstanding -= len(settled)
        suspects = session.suspects
        for row, error in settled:
            self._outstanding_bytes -= len(row.message.body)
            session.settled(row, error)
            if is_answer(error):
                self._pauses = 0
                self.error = None
        if session.suspects < suspects:
            self._take_at = 0.0  # rows that failed before may be taken now
        trouble, session.trouble = session.trouble, None
        if trouble is not None:
            self._pause(trouble)
        taken = 0
        stopping = self._stop_by is not None
        now = time.monotonic()
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            self._take_at = 0.0
        if now >= self._keep_at:
            self._keep_at = now + leases.keep_every
            with self._count.outbox_called():
                leases.keep()
        self._count.update(now)
        if stopping:
            session.stopped()
        self._decide()  # before rows are taken, so that rows held by these outcomes are not taken
        if not stopping and now >= self._paused_until:
            taken = self._take(now)
            self._decide()
        if session.ready and not stopping and now >= self._paused_until:
            self._send(session.ready)
        return bool(written or settled or taken)

    def _take(self, now: float) -> int:
        session = self._session
        kept = self._publisher.kept()
        space = self._limit - self._outstanding - self._unwritten - session.waiting - len(session.ready) - kept.rows
        # Taking only a few rows at a time would cost a query for each take.
        least = max(min(_ROWS_PER_TAKE, self._limit // 2), 1)
        full = self._full or session.waiting_bytes + self._unwritten_bytes >= self._max_bytes
        if space < least or now < self._take_at or full:
            return 0
        self._take_at = now + self._outbox.poll_interval  # unless `wake` is called earlier
        with self._count.outbox_called():
            batch = self._leases.take(min(space, _ROWS_PER_TAKE), session.suspects_to_take(kept))
        if batch.rows or batch.damaged:
            self._take_at = 0.0
        elif not self._outstanding:
            self._publisher.connect()  # no row does so; while the broker refuses it for good, the pauses grow
            self._pauses = 0  # nothing is left to publish
            self.error = None
        session.add(batch.rows, kept)
        session.settlements.extend(batch.damaged)
        return len(batch.rows)

    def _send(self, ready: deque[OutboxRow]) -> None:
        rows: list[OutboxRow] = []
        kept = self._publisher.kept()
        size = self._outstanding_bytes
        while ready:
            size += len(ready[0].message.body)
            if size + kept.bytes > self._max_bytes and (rows or self._outstanding or kept.rows):
                break
            rows.append(ready.popleft())
            self._outstanding_bytes = size
        self._full = bool(ready)
        if rows:
            self._outstanding += len(rows)
            self._publisher.send(rows)

    def _decide(self) -> None:
        settlements = self._session.settlements
        if not settlements:
            return
        self._session.settlements = []
        for settlement in settlements:
            if settlement.outcome is RowOutcome.SET_ASIDE:
                self.statistics.set_aside += 1
                logger.error("%s is set aside in %r: %s", settlement.row, self._outbox, settlement.reason)
            elif settlement.outcome is RowOutcome.LATER:
                self.statistics.delayed += 1
            elif settlement.outcome is RowOutcome.CONFIRMED:
                self.statistics.confirmed += 1
        self._leases.decided(settlements)
        if not self._unwritten:
            self._written_at = time.monotonic()
        self._unwritten += len(settlements)
        self._unwritten_bytes += _size(settlements)
        self._settle(settlements)

    def _pause(self, error: Exception) -> None:
        now = time.monotonic()
        self.statistics.interruptions += 1
        if self.error is None:
            self._trouble_since = now
        self.error = error
        self._paused_until = now + _PAUSES[min(self._pauses, len(_PAUSES) - 1)]
        self._pauses += 1
        self._take_at = 0.0  # after the pause
        if self._pause_log.count():
            logger.error("cannot publish from %r for now, trying again: %s", self._outbox, error)

    def _wait(self) -> None:
        now = time.monotonic()
        longest = min(max(self._outbox.poll_interval, self._paused_until - now), _TURN_EVERY, self._leases.keep_every)
        if self._due:
            longest = min(longest, max(self._due[0] - now, 0.0))
        self._publisher.watch(self._wake.set)
        self._wake.wait(longest)

    def _ended(self) -> bool:
        if self._stop_by is None:
            return self._publisher.ended
        done = not self._outstanding and not self._unwritten and not self._session.settlements
        return done or time.monotonic() >= self._stop_by
