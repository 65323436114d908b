"""A publisher's channel to its outbox, for callers that wait on their own threads.

As in a `reliable_mq.sync.publisher_channel.PublisherChannel`, any call may be interrupted by a signal handler that
calls the channel, or by an exception that a signal handler raises. The invariants are the same as in
`reliable_mq.engine.outbox_channel`.

`RelayPublisher` publishes the rows of the outbox on the connection of the `Publisher`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import CallbackThread, Condition, start_daemon
from reliable_mq.core.outbox import KeptPlaces
from reliable_mq.core.publisher.publication import StoredPublication
from reliable_mq.engine.outbox_channel import (
    ANSWER_AT_LEAST,
    CLOSE_GRACE,
    BaseOutboxChannel,
    not_open,
)
from reliable_mq.errors import ConfigurationError, OutboxError, PublishError, ReliableMQError, UsageError
from reliable_mq.sync.confirmation import CallbackOwner, Confirmation, time_to_wait
from reliable_mq.sync.publisher_channel import WindowWaiters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq._util.validation import Duration
    from reliable_mq.core.outbox import OutboxRow, RowSettlement
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.outbox.protocol import Outbox, RowLeases
    from reliable_mq.outbox.relay import RowPublisher

logger = get_logger(__name__)

T = TypeVar("T")


class StoredConfirmation(StoredPublication, Confirmation):
    """The outcome of storing a message. ``submit`` returns it with an outbox."""

    __slots__ = ("error", "row")

    owner: OutboxChannel

    def exception(self, timeout: Duration | None = None) -> PublishError | None:
        """Wait like any confirmation, up to the message's own deadline.

        After the deadline the message may still be stored.
        """
        if self.outcome is None:
            wait = time_to_wait(timeout)
            limit = self.accepted_at + self.owner.timeout_of(self) - time.monotonic()
            try:
                self._wait(limit if wait is None else min(wait, limit))
            except TimeoutError:
                if wait is not None and wait < limit:
                    raise
                self.owner.give_up(self)
        return self._observe()


@dataclass(slots=True)
class _Opening:
    """An attempt to open the outbox. The lock of the channel guards it."""

    waiting: int = 0  # threads that wait for it
    over: bool = False
    error: BaseException | None = None


class OutboxChannel(CallbackOwner[StoredConfirmation], BaseOutboxChannel[StoredConfirmation]):
    """The channel of a `Publisher` to its outbox. Thread-safe.

    The base class documents the arguments.

    Attributes:
        lock: The lock that guards the window and the callbacks of all confirmations.
    """

    def __init__(
        self, outbox: Outbox, relay_publisher: RowPublisher, options: PublisherOptions, *, measured: bool
    ) -> None:
        self.lock = threading.RLock()
        super().__init__(outbox, relay_publisher, options, measured=measured, guard=self.lock)
        self._changed = Condition(self.lock)
        self._waiters = WindowWaiters(self.lock, self._window, self._ask_for_check)
        self._asked = False  # whether the writer's thread will check for room
        self._callbacks = CallbackThread(f"{options.name}-callbacks")
        self._opening: _Opening | None = None
        self._open_name = f"{options.name}-outbox-open"

    # For callers

    def start(self, timeout: float) -> None:
        """Wait for the opening. Several threads may wait."""
        with self.lock:
            self.check_usable()
            self._check_open()
            if self.begun:
                return
            if self._opening is None:
                self._opening = _Opening()
                try:
                    start_daemon(self._open_name, self._open, self._opening)
                except BaseException:
                    self._opening = None  # later callers must not wait for a thread that was not started
                    raise
            opening = self._opening
            opening.waiting += 1
            try:
                self._wait_until(lambda: opening.over or self._closed, timeout)
            finally:
                opening.waiting -= 1
            self.check_usable()
            self._check_open()
            if not opening.over:
                raise not_open(self.outbox, timeout)
        if opening.error is not None:
            raise opening.error

    def submit(self, confirmation: StoredConfirmation) -> None:
        """Store a message. Wait for the window up to the message's own deadline.

        Raises:
            OutboxError: If the window had no room in time. The message was not stored.
            UsageError: If the channel is closed, or in a forked child.
        """
        self.check_usable()
        with self.lock:
            self._check_open()
            if self._waiters.waiting or not self._window.fits(confirmation.size):
                self._wait_for_window(confirmation)
            else:
                self._store(confirmation)

    # On a separate thread

    def _begin(self, claims: RowLeases) -> None:
        self._calls.start()  # an interpreter that exits calls the outbox, and refuses new threads
        super()._begin(claims)

    def _open(self, opening: _Opening) -> None:
        """Open the outbox, and close it again if no caller waits for it any more."""
        claims: RowLeases | None = None
        try:
            self.outbox.open()
            claims = self.outbox.claims()
        except BaseException as error:  # noqa: BLE001  # raised by the callers that wait
            opening.error = error
        with self.lock:
            if claims is not None and opening.waiting and not self._closed:
                try:
                    self._begin(claims)
                    claims = None
                except BaseException as error:  # noqa: BLE001
                    opening.error = error
            self._opening = None
            opening.over = True
            self._changed.notify_all()
        if claims is not None:
            try:
                claims.close()
                self.outbox.close()
            except OutboxError as error:
                logger.error("failed to close %r: %s", self.outbox, error)  # noqa: TRY400

    # On the writer's thread

    def _stored(self, confirmations: list[StoredConfirmation], error: OutboxError | None) -> None:
        self._settle(confirmations, error)
        if error is None:
            self.relay.wake()

    def _settled(self, settlements: list[RowSettlement]) -> None:
        self.relay.settled(settlements)
        with self.lock:
            self._changed.notify_all()

    # Under the lock, or taking it

    def _refuse_waiting(self) -> None:
        with self.lock:
            self._closed = True
            self._changed.notify_all()
            self._waiters.wake()

    def _notify_window(self) -> None:
        self._admit_waiters()
        self._changed.notify_all()

    def _ask_for_check(self) -> None:
        if not self._asked:
            self._writer.call(self._check_waiters)
            self._asked = True

    def _check_waiters(self) -> None:
        with self.lock:
            self._asked = False
            self._admit_waiters()

    def _admit_waiters(self) -> None:
        if not (self._closed or self.forked):
            self._waiters.admit(crowded=False)

    def _wait_for_window(self, confirmation: StoredConfirmation) -> None:
        """Store a message once the window has room."""
        if not self._waiters.wait(
            confirmation.size,
            confirmation.accepted_at + self.timeout_of(confirmation),
            partial(self._store, confirmation),
            lambda: self._closed or self.forked,
            passes=False,
        ):
            self.check_usable()
            self._check_open()
            self._refuse_late(confirmation)

    # Without the lock

    def _call_outbox(self, call: Callable[[], T], deadline: float) -> T:
        limit = min(max(deadline - time.monotonic(), ANSWER_AT_LEAST), threading.TIMEOUT_MAX)
        try:
            return self._calls.call(lambda _: call(), limit)
        except TimeoutError as error:
            raise TimeoutError(f"{self.outbox!r} does not answer: {error}") from error

    def _wait_stored(self, timeout: float) -> bool:
        self.check_usable()
        answered = threading.Event()

        def answer() -> None:
            with self.lock:
                answered.set()
                self._changed.notify_all()

        self._writer.call(answer)
        with self.lock:
            return self._wait_until(lambda: answered.is_set() or self._writer.ended, timeout)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _end_threads(self, deadline: float) -> None:
        self.relay.join(_until(deadline))
        self._writer.stop()
        self._writer.join(_until(deadline))
        self._give_up_unstored()
        self._callbacks.stop()
        self._callbacks.join(_until(deadline))


def _until(deadline: float) -> float:
    """Return the seconds for a thread to end, a moment beyond the deadline."""
    return max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE


_PART_WAITED_FOR: Final = 4  # wait for a quarter of the outstanding rows
_SWEEP_EVERY: Final = 0.05  # seconds; a row in front may take longer than the rows behind it


class RelayPublisher:
    """A publisher of rows that collects their outcomes. For the relay's thread.

    Args:
        connect: A callable that begins to connect. It may wait until every host has had its first attempt.
        send: A callable that submits a row to the channel to the broker.
        kept: A callable that returns the places that settled rows have at the channel.
    """

    ended = False

    def __init__(
        self,
        connect: Callable[[], object],
        send: Callable[[OutboxRow], Confirmation],
        kept: Callable[[], KeptPlaces] = KeptPlaces,
    ) -> None:
        self._connect = connect
        self._send = send
        self.kept = kept
        self._outstanding: deque[tuple[OutboxRow, Confirmation]] = deque()
        self._failed: list[tuple[OutboxRow, ReliableMQError | None]] = []
        self._swept_at = 0.0
        self._watched: Confirmation | None = None

    def connect(self) -> None:
        """Begin to connect."""
        self._connect()

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows. If nothing can be published, the remaining rows are not tried."""
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
                except Exception as error:
                    logger.exception("unexpected error while the relay submitted a row")
                    failure = UsageError(f"the row could not be sent: {type(error).__name__}: {error}")
            self._failed.append((row, failure))

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        """Return the rows whose publish has ended, each with its error, if any."""
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
        """Wake the relay at the outcome of a row near the front."""
        if self._failed:
            wake()
        elif self._outstanding:
            confirmation = self._outstanding[len(self._outstanding) // _PART_WAITED_FOR][1]
            if confirmation is not self._watched:
                self._watched = confirmation
                with confirmation.owner.lock:
                    if confirmation.outcome is None:
                        confirmation.callbacks = [*(confirmation.callbacks or ()), wake]
                        return
            if confirmation.outcome is not None:
                wake()
