"""The future outcome of one publish, for callers that wait on their own threads.

Invariants, in addition to `reliable_mq.engine.confirmation`:

- The I/O thread writes the outcome.
- Waiting releases the lock completely, however often the caller holds it. So a signal handler that has interrupted a
  call of the publisher may also wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from reliable_mq._util.threads import CallbackThread, Condition
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.publisher.publication import Publication
from reliable_mq.engine.channel import BaseChannel
from reliable_mq.engine.confirmation import BaseConfirmation
from reliable_mq.errors import PublishUnconfirmed, UsageError

if TYPE_CHECKING:
    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.errors import PublishError

CHECK_EVERY = 0.1
"""Seconds after which a waiting caller checks its condition itself."""

PATIENCE = 0.2
"""Seconds after which a caller that waits has the I/O thread look for publishes that it was not told of."""

LATE = 5.0
"""Seconds after a deadline in which an I/O thread that is not blocked settles the publish."""

IS_BLOCKED = "the publisher's I/O thread is blocked, for example by a log handler"
"""The reason why a publish is not settled after its deadline."""

P = TypeVar("P", bound=Publication)


def time_to_wait(timeout: Duration | None) -> float | None:
    """Return ``timeout`` of any length in seconds, or 0 if it is negative.

    The rest of a deadline may be negative.

    Raises:
        ConfigurationError: If ``timeout`` is not a duration.
    """
    if timeout is None:
        return None
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(number, (int, float)) and (number < 0 or number > threading.TIMEOUT_MAX):
        return 0.0 if number < 0 else threading.TIMEOUT_MAX
    return seconds("timeout", number)


class CallbackOwner(BaseChannel[P]):
    """The part of a publisher's channel for callers and callbacks on other threads.

    Attributes:
        lock: The lock that guards the state that callers read, and the callbacks of all confirmations.
        stalled: Whether the I/O thread has missed a deadline, and has not run since. Waits are no longer patient.
    """

    lock: threading.RLock
    stalled = False
    _callbacks: CallbackThread
    _changed: Condition  # of the lock; notified of each change that `_wait_until` waits for

    def submit(self, confirmation: P) -> None:
        """Accept the message. Wait for the window up to the message's deadline."""
        raise NotImplementedError

    def check_may_wait(self) -> None:
        """Raise UsageError on a thread whose wait would not end."""

    def nudge(self) -> None:
        """Make the I/O thread look for publishes whose wake-up may have been interrupted."""

    def expect_callbacks(self) -> None:
        """Start the thread. ``call_back`` may run where no thread can be started."""
        self._callbacks.start()

    def call_back(self, call: Callable[[], object]) -> None:
        """Run a user callback on the thread."""
        self._callbacks.put(call)

    def check_closable(self) -> None:
        """Raise UsageError if closing would make the caller wait for itself."""
        if self._callbacks.is_current:
            raise UsageError("close() from a callback of the same publisher would wait for itself: close it elsewhere")

    def forget(self) -> None:
        """Disable this copy in a forked child.

        The connection, the threads and the holder of the lock belong to the parent.
        """
        super().forget()
        self.lock = self._guard = threading.RLock()

    def _call_outside(self, call: Callable[[], object]) -> None:
        self._callbacks.put_later(call)

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait for a condition; return whether it is met. The lock is held."""
        began = time.monotonic()
        nudged = False
        while not condition():
            waited = time.monotonic() - began
            if waited >= timeout or self.forked:
                return False
            self.check_may_wait()
            if waited >= PATIENCE and not nudged:
                nudged = True
                self.nudge()
            self._changed.wait(min(timeout - waited, CHECK_EVERY))
        return True


class Confirmation(BaseConfirmation):
    """The outcome of a publish, returned by ``submit``. Thread-safe.

    It has the methods of :class:`concurrent.futures.Future` that make sense here. It cannot be cancelled.
    """

    __slots__ = ()

    owner: CallbackOwner[Any]

    def result(self, timeout: Duration | None = None) -> Receipt:
        """Wait for the outcome, and return the receipt.

        Args:
            timeout: The time to wait, in seconds or as a timedelta. None waits until the publish is settled, at the
                latest at its own deadline.

        Raises:
            PublishError: If the message was not confirmed.
            TimeoutError: If the outcome is not known in time. The message is not given up.
            ConfigurationError: If ``timeout`` is not a duration.
            UsageError: If called in a forked child, where the outcome will never be known, or by a log handler on the
                publisher's I/O thread, which would wait for itself.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> PublishError | None:
        """Wait for the outcome like :meth:`result`, and return the error.

        Returns None if the message was confirmed.
        """
        if self.outcome is None and (missed := self._wait(time_to_wait(timeout))) is not None:
            self._mark_observed()
            return missed
        return self._observe()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(confirmation)`` when the outcome is known.

        The publisher's callback thread calls it. If the outcome is already known, the calling thread calls it at once.
        A callback may publish. An exception in a callback is logged. While callbacks are slower than publishing,
        ``submit`` waits for them as it does for the window.

        Raises:
            ConfigurationError: If ``callback`` is not callable, or is a coroutine function.
        """
        self._check_callback(callback)
        call = partial(self._call, callback)
        if self.outcome is None:
            self.owner.check_usable()
            self.owner.expect_callbacks()
        self._mark_observed()
        if not self._add_callback(partial(self.owner.call_back, call)):
            call()

    def _mark_observed(self) -> None:
        with self.owner.lock:
            super()._mark_observed()

    def _add_callback(self, callback: Callable[[], object]) -> bool:
        with self.owner.lock:
            return super()._add_callback(callback)

    def _wait(self, timeout: float | None) -> PublishUnconfirmed | None:
        """Wait until the publish is settled.

        Return an error if the I/O thread has not settled it after its deadline.
        """
        owner = self.owner
        owner.check_usable()
        owner.check_may_wait()
        lock = owner.lock
        settled = Condition(lock)
        tell = settled.notify_all
        with lock:
            if not self._add_callback(tell):
                return None
            try:
                patience = 0.0 if owner.stalled else PATIENCE
                if settled.wait_for(self.done, patience if timeout is None else min(timeout, patience)):
                    return None
                owner.nudge()
                if timeout is None:
                    return self._wait_to_deadline(settled)
                if not settled.wait_for(self.done, min(timeout, threading.TIMEOUT_MAX) - patience):
                    raise TimeoutError(f"{self} is not settled after {timeout} s; it is still being published")
            finally:
                self._remove_callback(tell)
        return None

    def _wait_to_deadline(self, settled: Condition) -> PublishUnconfirmed | None:
        """Wait until the publish is settled, at its deadline or a moment later.

        The moment begins after the wait for the deadline, because the process may have been stopped until then.
        Return an error if it is still not settled.
        """
        owner = self.owner
        left = self.accepted_at + owner.timeout_of(self) - time.monotonic()
        if settled.wait_for(self.done, min(left, threading.TIMEOUT_MAX)) or settled.wait_for(
            self.done, 0.0 if owner.stalled else LATE
        ):
            return None
        owner.stalled = True
        owner.nudge()
        return PublishUnconfirmed(f"{self} is not settled after its deadline: {IS_BLOCKED}", message_id=self.message_id)
