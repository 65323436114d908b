"""The publisher channel of the sync API: its inbox, and callers that wait.

Callers admit a publish to the window and put it into the inbox, under one lock. The I/O thread takes whole inboxes.

Invariants, in addition to `reliable_mq.engine.publisher_channel`:

- The session is used by the I/O thread only. The inbox, the window and the callbacks of confirmations are used only
  under the lock.
- No user code runs on the I/O thread but log handlers, ``reconnect_wait`` and ``reconnect_stop``. Nothing else blocks
  on it, and it never waits for itself.
- Every wait of a caller ends: with its condition, at its deadline, or at the end of the channel.
- Callers that wait for the window are admitted in the order of their arrival, by the I/O thread (`WindowWaiters`). A
  callback overtakes the callers that wait for callbacks.
- A caller may be interrupted anywhere by a signal handler that calls the channel itself. So locks are re-entrant, and
  waits release them completely. A caller may also be interrupted by an exception of a signal handler. It then leaves
  behind at most one place too many taken in the window, or its message, which is still published.

Invariants of `WindowWaiters`:

- Places are assigned in the order of the requests, by one thread, and are taken at that moment. A newcomer never
  overtakes, and small messages do not keep out a large one.
- A caller that is late, or leaves, has taken nothing and delays no caller after it.
- A caller may be interrupted anywhere by an exception of a signal handler, or by a handler that requests a place
  itself. Callers only enter and leave, each in one uninterruptible step. The entry of an interrupted caller gets its
  place when its turn comes, or is dropped at its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq._util.threads import CallbackThread, Condition
from reliable_mq.core.publisher.trace import PublicationEvent, record
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel
from reliable_mq.engine.steps import blocking
from reliable_mq.errors import PublishUnconfirmed, UsageError
from reliable_mq.sync.confirmation import CHECK_EVERY, IS_BLOCKED, LATE, PATIENCE, CallbackOwner, Confirmation
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.core.publisher.window import PublishWindow
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.engine.steps import Steps


class WindowWaiters:
    """Callers on other threads that wait for a window. All methods need the lock.

    Args:
        ask: A callable that makes the I/O thread call `admit` soon. It is called with the lock held.

    Attributes:
        waiting: The waiting callers. Truthy while there are any.
    """

    def __init__(self, lock: threading.RLock, window: PublishWindow, ask: Callable[[], object]) -> None:
        self._lock = lock
        self._window = window
        self._ask = ask
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def is_free(self, size: int, *, crowded: bool, passes: bool) -> bool:
        """Whether a newcomer fits, and no caller is waiting before it."""
        return (
            (passes or not crowded) and _first(list(self.waiting), crowded=crowded) is None and self._window.fits(size)
        )

    def wait(
        self, size: int, deadline: float, take: Callable[[], object], over: Callable[[], bool], *, passes: bool
    ) -> bool:
        """Wait for a place in the window, and return whether it was taken.

        Args:
            size: The size of the message, in bytes.
            deadline: The deadline in seconds, on the monotonic clock.
            take: A callable that takes the place. The I/O thread calls it once there is a place.
            over: A callable that returns whether there will be no place any more. `wake` makes the caller check it.
            passes: Whether the caller is admitted while the window is crowded.
        """
        waiter = _Waiter(size, deadline, take, passes, Condition(self._lock))
        try:
            self.waiting[waiter] = None
            first = _first(list(self.waiting), crowded=False)  # copying is one step, iterating is not
            if first is not None and first is not waiter and self._window.fits(first.size):
                self._ask()
            while not (waiter.admitted or over()):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                waiter.changed.wait(min(remaining, CHECK_EVERY))  # a few free places wake no caller
                if not waiter.admitted:
                    self._ask()
        finally:
            if not waiter.admitted:
                self.waiting.pop(waiter, None)
                if self.waiting:
                    self._ask()
        return waiter.admitted

    def admit(self, *, crowded: bool) -> bool:
        """Admit waiting callers that fit, on the I/O thread; return whether any did.

        Args:
            crowded: Whether to admit only callers that pass.
        """
        now = time.monotonic()
        given = False
        while (waiter := _first(self.waiting, crowded=crowded)) is not None:
            if waiter.deadline > now:  # otherwise it is about to leave, or was interrupted
                if not self._window.fits(waiter.size):
                    break
                waiter.take()
                waiter.admitted = given = True
            self.waiting.pop(waiter, None)
            waiter.changed.notify()
        return given

    def wake(self) -> None:
        """Make every waiting caller check whether its wait is over."""
        for waiter in list(self.waiting):
            waiter.changed.notify()


def _first(waiting: Iterable[_Waiter], *, crowded: bool) -> _Waiter | None:
    return next((waiter for waiter in waiting if waiter.passes or not crowded), None)


@dataclass(eq=False, slots=True)
class _Waiter:
    size: int
    deadline: float
    take: Callable[[], object]
    passes: bool
    changed: Condition
    admitted: bool = False


_ABORT_GRACE = 1.0  # seconds for an abort after the closing handshake


class PublisherChannel(CallbackOwner[Confirmation], BasePublisherChannel[Confirmation]):
    """The channel of one publisher of the sync API. Thread-safe.

    The I/O thread calls the base's methods for the loop.

    Attributes:
        lock: The lock that guards the inbox, the window and the callbacks of all confirmations.
    """

    write_bytes = 64 * 1024
    _connection_type = IOThread
    _io: IOThread

    def __init__(self, options: PublisherOptions) -> None:
        self.lock = threading.RLock()
        super().__init__(options, self.lock)
        self._changed = Condition(self.lock)
        self._waiters = WindowWaiters(self.lock, self.window, lambda: self._io.call_soon(self._check_waiters))
        self._waiting = self._waiters.waiting
        self._last_deadline = 0.0  # of the publishes with a timeout of their own
        self._inbox: deque[Confirmation] = deque()
        self._accepting = 0  # publishes moving from the inbox to the session
        self._callbacks = CallbackThread(f"{options.name}-callbacks")
        self._crowded = False  # whether more callbacks are due than the window has places

    # For callers, on any thread

    def start(self) -> None:
        try:
            super().start()
        except BaseException:  # interrupted; the thread may have been started
            self._io.stop()
            raise

    def submit(self, confirmation: Confirmation) -> None:
        """Accept a publish. Wait for the window up to the publish's deadline.

        Raises:
            PublishBlocked, PublishDisconnected: If the broker blocks publishing or is unreachable, and the options say
                to raise.
            PublishUnconfirmed: If the window was full until the deadline. The message was not sent.
            UsageError: If the channel is closed, or in a forked child.
        """
        try:
            if self.forked:
                self.check_usable()
            with self.lock:
                if self._takes_none:
                    self._refuse(confirmation)
                if (own := confirmation.timeout) is not None:
                    self._last_deadline = max(self._last_deadline, confirmation.accepted_at + own)
                if (
                    self._crowded or self._waiting or not self.window.fits(confirmation.size)
                ) and self._wait_for_window(confirmation):
                    return
                self._inbox.append(confirmation)
                self.window.take(confirmation.size)
                if self._oldest is None:
                    self._oldest = confirmation.accepted_at
                wake, self._woken = not self._woken, True
            if wake:
                self._io.call_soon(self._advance)
        except BaseException:
            if not self.forked:
                self.nudge()  # its wake-up, or an earlier one, may have been interrupted
            raise

    def flush(self, timeout: float) -> Steps[bool]:
        """Wait until all earlier publishes are settled, and return whether they are.

        Raises:
            TimeoutError: If ``timeout`` is infinite, and they are not settled a moment after the last deadline.
        """
        if timeout < float("inf"):
            return (yield from super().flush(timeout))
        self.check_usable()
        with self.lock:
            moment = time.monotonic()
            to_deadline = max(self._delivery_timeout, self._last_deadline - moment)
            settled = yield from self._wait_settled_before(moment, to_deadline)
            # The moment begins after the wait, because the process may have been stopped until then.
            if settled or (yield from self._wait_settled_before(moment, LATE)):
                return True
        raise TimeoutError(f"{self.outstanding} messages are not settled after their deadlines: {IS_BLOCKED}")

    def close(self, timeout: float) -> PublishUnconfirmed | None:
        """Settle everything within ``timeout`` seconds, give up the rest, and disconnect.

        May be called again, and by several threads. Each call waits for the end.

        Returns:
            An error if the I/O thread is blocked, and publishes are not given up.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            self._take_no_more()
            settled = blocking(self._wait_settled_before(float("inf"), timeout))
            if not settled:
                self._io.call_soon(self._end)
                blocking(self._wait_settled_before(float("inf"), max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE))
        self._io.stop(CLOSE_GRACE)
        self._callbacks.stop()
        self._wait_ended(self._io.join, CLOSE_GRACE + _ABORT_GRACE)
        self._wait_ended(self._callbacks.join, max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE)
        if settled or self.forked or not (left := self.outstanding):
            return None
        return PublishUnconfirmed(f"{left} messages are not settled: {IS_BLOCKED}")

    def nudge(self) -> None:
        """Make the I/O thread check the inbox."""
        self._io.call_soon(self._advance)

    def check_may_wait(self) -> None:
        """Raise UsageError on the I/O thread, which would wait for itself."""
        if threading.get_ident() == self._io.ident:
            raise UsageError(
                "this publisher's I/O thread would wait for itself: a log handler that publishes must filter out the "
                "logger reliable_mq"
            )

    def check_closable(self) -> None:
        super().check_closable()
        self.check_may_wait()

    @property
    def outstanding(self) -> int:
        """The number of unsettled publishes. One may be counted twice for a moment."""
        return len(self._inbox) + self._accepting + self.session.outstanding

    # On the I/O thread

    def _accept_inbox(self) -> None:
        with self.lock:
            taken, self._inbox, self._woken = self._inbox, deque(), False
            self.stalled = False
            self._accepting = len(taken)
        self.session.accept(taken)
        self._accepting = 0

    def _first_in_inbox(self) -> Confirmation | None:
        return self._inbox[0] if self._inbox else None

    def _notify_change(self) -> None:
        self._changed.notify_all()

    def _refuse_waiting(self) -> None:
        if self._takes_none:
            self._waiters.wake()

    def _admit_waiting(self) -> None:
        self._crowded = self._callbacks.backlog > self.window.max_count
        if self._waiting and self.window.worth_waking(self.session.on_wire):
            self._admit_waiters()

    def _check_waiters(self) -> None:
        with self.lock:
            if self._waiting:
                self._crowded = self._callbacks.backlog > self.window.max_count
                self._admit_waiters()
        if self._inbox:  # the call to wake this thread may have been interrupted
            self._advance()

    def _admit_waiters(self) -> None:
        if not self._takes_no_more and self._waiters.admit(crowded=self._crowded) and not self._woken:
            self._woken = True
            self._io.call_soon(self._advance)

    # Under the lock

    @property
    def _takes_no_more(self) -> bool:
        return self._takes_none or self.forked

    def _take(self, confirmation: Confirmation) -> None:
        record((confirmation,), PublicationEvent.ADMITTED)
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at

    def _wait_for_window(self, confirmation: Confirmation) -> bool:
        """Wait for a place, and return whether the I/O thread has already accepted it."""
        self._crowded = self._callbacks.backlog > self.window.max_count
        size, passes = confirmation.size, self._callbacks.is_current  # a callback does not wait for callbacks behind it
        if passes and confirmation.timeout is None:
            confirmation.timeout = self._delivery_timeout  # it overtakes publishes with earlier deadlines
        if self._waiters.is_free(size, crowded=self._crowded, passes=passes):
            return False
        self.check_may_wait()
        record((confirmation,), PublicationEvent.WINDOW_FULL)
        timeout = self.timeout_of(confirmation)
        deadline = confirmation.accepted_at + timeout
        if self._waiters.wait(
            size, deadline, partial(self._take, confirmation), lambda: self._takes_no_more, passes=passes
        ):
            return True
        self.check_usable()
        if self._takes_none or self.session.blocked_reason or time.monotonic() < deadline:
            self._refuse(confirmation)
        if not self._crowded:
            raise self._window_timeout(confirmation, timeout)
        why = f"the callbacks of {self._callbacks.backlog} earlier publishes were not called"
        raise PublishUnconfirmed(
            f"{confirmation} was never sent: {why} for {timeout} s", message_id=confirmation.message_id, sent=False
        )

    def _wait_ended(self, join: Callable[[float], bool], timeout: float) -> None:
        """Wait for a thread that may need the lock.

        The caller may be a signal handler that has interrupted the lock's holder.
        """
        if not join(PATIENCE):
            with self.lock:
                self._wait_until(lambda: join(0), timeout)
