"""The way into an outbox: what a publisher with one does in place of publishing, and the relay beside it.

Callers leave a message with the writer and wait for its commit; the relay's thread takes rows out again and publishes
them through the publisher's own lane. Everything here may be interrupted as a `reliable_mq.sync.lane.PublishingLane`
may be: by a signal handler that calls it, or by an exception that one raises.

Invariants: every confirmation that ``submit`` returned is settled, by the writer or by who waits for it beyond its
deadline; no user code runs on the writer's or the relay's thread; every wait of a caller ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from reliable_mq.core.outbox import NewRow
from reliable_mq.core.outbox_statistics import OutboxStatistics
from reliable_mq.core.stored import StoredPublication
from reliable_mq.core.window import PublishWindow
from reliable_mq.errors import OutboxError, UsageError
from reliable_mq.outbox.relay import OutboxRelay
from reliable_mq.outbox.writer import OutboxWriter
from reliable_mq.sync.callbacks import CallbackThread
from reliable_mq.sync.condition import Condition
from reliable_mq.sync.confirmation import Confirmation

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.outbox import Settlement
    from reliable_mq.core.publisher_options import PublisherOptions
    from reliable_mq.errors import PublishError, ReliableMQError
    from reliable_mq.outbox.protocol import Outbox
    from reliable_mq.outbox.relay import Carrier

__all__ = ["StoredConfirmation", "StoringLane"]

logger = logging.getLogger(__name__)

_FAILURES_KEPT: Final = 100  # that nobody has looked at, to be raised when the publisher is left
_FAILURES_SAID_EVERY: Final = 10.0  # seconds
_LOOK_AGAIN: Final = 0.1  # seconds after which a caller that waits looks by itself
_LOOK_INTO_OUTBOX: Final = (0.01, 0.25)  # seconds between two looks into the outbox, the first and the longest
_GRACE: Final = 2.0  # seconds for threads to end, beyond the caller's own timeout


class StoredConfirmation(StoredPublication, Confirmation):
    """What ``submit`` returns where there is an outbox: known once the message is durable there."""

    __slots__ = ("error",)

    home: StoringLane

    def exception(self, timeout: float | None = None) -> PublishError | None:
        """Wait as on every confirmation; no longer than the message's own deadline, after which it may be stored."""
        if self.outcome is None:
            limit = self.accepted_at + self.home.timeout_of(self) - time.monotonic()
            try:
                self._wait(limit if timeout is None else min(timeout, limit))
            except TimeoutError:
                if timeout is not None and timeout < limit:
                    raise
                self.home.give_up(self)
        error = self.failure()
        if error is not None:
            self._see()
        return error


class StoringLane:
    """See the module. Thread-safe.

    Args:
        outbox: where to store.
        carrier: publishes the rows of the relay.
        options: of the publisher. As much may be submitted and not stored as may be outstanding without an outbox.
        measured: whether to count what is in the outbox now and then, for metrics.

    Attributes:
        lock: guards the window and the watchers of all confirmations.
        fatal: None; nothing ends an outbox for good.
        forked: whether this is a copy in a forked child.
        relay: the relay.
    """

    def __init__(self, outbox: Outbox, carrier: Carrier, options: PublisherOptions, *, measured: bool) -> None:
        name = options.name
        self.lock = threading.RLock()
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self.outbox = outbox
        self._window = PublishWindow(options.max_outstanding, options.window.max_bytes)
        self._store_timeout = options.delivery_timeout
        self._changed = Condition(self.lock)
        self._closed = False
        self._failures: deque[StoredConfirmation] = deque(maxlen=_FAILURES_KEPT)
        self._unseen = 0
        self._said_at = float("-inf")
        self._callbacks = CallbackThread(f"{name}-callbacks")
        statistics = OutboxStatistics()
        self._writer: OutboxWriter[StoredConfirmation] = OutboxWriter(
            outbox, name=f"{name}-outbox", on_stored=self._stored, on_settled=self._settled, statistics=statistics
        )
        self.relay = OutboxRelay(
            outbox,
            carrier,
            settle=self._writer.settle,
            limit=options.max_outstanding,
            name=f"{name}-relay",
            statistics=statistics,
            measured=measured,
        )
        _lanes.add(self)

    # For callers

    def start(self) -> None:
        """Open the outbox, and start storing and relaying.

        Raises:
            OutboxError: the outbox cannot be opened.
        """
        self.outbox.open()
        self.relay.start()
        self._writer.start()

    def submit(self, confirmation: StoredConfirmation, row: NewRow) -> None:
        """Store a message; waits for room, up to the publish's own deadline.

        Raises:
            OutboxError: no room in time; it was not stored.
            UsageError: closed, or in a forked child.
        """
        self.check_waitable()
        with self.lock:
            self._check_open()
            if not self._window.fits(confirmation.size):
                self._wait_for_room(confirmation)
            self._writer.store(confirmation, row)
            self._window.take(confirmation.size)

    def flush(self, timeout: float) -> int:
        """Wait until every message in the outbox is published, or will not be by itself.

        Returns how many are left after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        if not self._wait_stored(timeout):
            return max(self._window.count, 1)
        _, last = self.outbox.backlog()
        return self._wait_relayed(last, deadline, lambda: True)

    def close(self, timeout: float, worth_waiting: Callable[[], bool]) -> None:
        """Store all that was submitted; relay for up to ``timeout`` seconds while it is ``worth_waiting``; end.

        May be called again, and by several threads.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            self._closed = True
            self._changed.notify_all()
        left = 0
        try:
            if self._wait_stored(timeout):
                left = self._wait_relayed(None, deadline, worth_waiting)
        except OutboxError:
            logger.exception("closing the publisher of %r", self.outbox)
        # What is on its way to a broker that is not there stays where it is.
        self.relay.stop(max(deadline - time.monotonic(), 0.0) if worth_waiting() else 0.0)
        self.relay.join(max(deadline - time.monotonic(), 0.0) + _GRACE)
        self._writer.stop()
        self._writer.join(max(deadline - time.monotonic(), 0.0) + _GRACE)
        self._callbacks.stop()
        self._callbacks.join(max(deadline - time.monotonic(), 0.0) + _GRACE)
        if left:
            logger.warning("%d messages stay in %r, to be published at the next start", left, self.outbox)
        self.outbox.close()

    def take_failures(self) -> tuple[list[StoredConfirmation], int]:
        """The failed confirmations that nobody has looked at (the last hundred), and how many there are in all."""
        with self.lock:
            unseen = [failed for failed in self._failures if not failed.seen]
            count, self._unseen = self._unseen, 0
            self._failures.clear()
        return unseen, count

    def give_up(self, confirmation: StoredConfirmation) -> None:
        """Its deadline has passed, and the writer has not answered."""
        error = OutboxError(
            f"{confirmation} was not stored in time, and may be stored yet: writing to {self.outbox!r} hangs",
            message_id=confirmation.message_id,
        )
        error.may_have_arrived = True
        with self.lock:
            if confirmation.outcome is None:
                confirmation.stored(error)
                confirmation.settled()

    def timeout_of(self, confirmation: StoredConfirmation) -> float:
        """Seconds that a message may take to be stored."""
        return self._store_timeout if confirmation.timeout is None else confirmation.timeout

    @property
    def outstanding(self) -> int:
        """Messages submitted and not stored."""
        return max(self._window.count, 0)

    # For confirmations

    def expect_callbacks(self) -> None:
        """See to it that ``call_back`` needs no new thread."""
        self._callbacks.start()

    def call_back(self, call: Callable[[], object]) -> None:
        """Run a user's callback."""
        self._callbacks.put(call)

    def check_waitable(self) -> None:
        """Raise UsageError in a forked child, where nothing would ever be settled."""
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its threads are the parent's; make one in the child"
            )

    def check_closable(self) -> None:
        """Raise UsageError where closing would wait for the caller itself."""
        if self._callbacks.is_current:
            raise UsageError("close() from a callback of the same publisher would wait for itself: close it elsewhere")

    def nudge(self) -> None:
        """Nothing to do: what was left with the writer is never forgotten."""

    def failure_seen(self) -> None:
        """Somebody looked at a failure; the caller holds the lock."""
        self._unseen -= 1

    def forget(self) -> None:
        """This is a copy in a forked child."""
        self.forked = True
        self.lock = threading.RLock()

    # On the writer's thread

    def _stored(self, confirmations: list[StoredConfirmation], error: OutboxError | None) -> None:
        with self.lock:
            size = 0
            for confirmation in confirmations:
                size += confirmation.size
                if confirmation.outcome is not None:  # given up by who waited for it
                    continue
                if error is None:
                    confirmation.stored(None)
                else:
                    confirmation.stored(error.of(str(confirmation), confirmation.message_id))
                    if not confirmation.seen:
                        self._failures.append(confirmation)
                        self._unseen += 1
                if error is not None or confirmation.watchers is not None:
                    confirmation.settled()
            self._window.release(len(confirmations), size)
            self._changed.notify_all()
        if error is None:
            self.relay.wake()
        else:
            self._say(len(confirmations), error)

    def _settled(self, settlements: list[Settlement]) -> None:
        self.relay.settled(settlements)
        with self.lock:
            self._changed.notify_all()

    def _say(self, count: int, error: OutboxError) -> None:
        now = time.monotonic()
        if now - self._said_at >= _FAILURES_SAID_EVERY:
            self._said_at = now
            logger.error("%d messages were not stored: %s", count, error)

    # Under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed; nothing was stored")

    def _wait_for_room(self, confirmation: StoredConfirmation) -> None:
        deadline = confirmation.accepted_at + self.timeout_of(confirmation)
        while not self._window.fits(confirmation.size):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise OutboxError(
                    f"{confirmation} was not stored: {self._window.count} messages before it were not, either, in time",
                    message_id=confirmation.message_id,
                )
            self._changed.wait(min(remaining, _LOOK_AGAIN))
            self.check_waitable()
            self._check_open()

    # Without it

    def _wait_stored(self, timeout: float) -> bool:
        """Wait until everything submitted before has its answer."""
        self.check_waitable()
        deadline = time.monotonic() + timeout
        answered = threading.Event()
        self._writer.call(answered.set)
        with self.lock:
            while not answered.is_set():
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._writer.ended:
                    return self._writer.ended
                self._changed.wait(min(remaining, _LOOK_AGAIN))
        return True

    def _wait_relayed(self, last: int | None, deadline: float, worth_waiting: Callable[[], bool]) -> int:
        """Wait until nothing is left up to the row ``last``; return what is left at the end."""
        pause, longest = _LOOK_INTO_OUTBOX
        while True:
            left, _ = self.outbox.backlog(last)
            remaining = deadline - time.monotonic()
            if not left or remaining <= 0 or not worth_waiting():
                return left
            with self.lock:
                self._changed.wait(min(remaining, pause))
            self.check_waitable()
            pause = min(2 * pause, longest)


# A forked child has copies of the lanes and none of their threads.
_lanes: WeakSet[StoringLane] = WeakSet()


def _forget_in_child() -> None:
    for lane in _lanes:
        lane.forget()


os.register_at_fork(after_in_child=_forget_in_child)
