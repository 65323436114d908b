"""The publisher channel of the sync API: its inbox, and callers that wait.

Callers admit a publish to the window and put it into the inbox, under one lock; the I/O thread takes whole inboxes.

Invariants:

- the session is touched by the I/O thread alone; the inbox, the window and the callbacks of confirmations only under
  the lock;
- no user code runs, and nothing blocks, on the I/O thread;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or at the
  end of the channel;
- every wait of a caller ends: with its condition, at its deadline, or at the end of the channel;
- callers that wait for the window are admitted in the order in which they came, by the I/O thread (`WindowWaiters`); a
  callback overtakes the callers that wait for callbacks;
- a caller may be interrupted anywhere: by a signal handler that calls the channel itself (hence locks that their owner
  may take again, and waits that release them altogether), or by an exception that a signal handler raises: it leaves
  behind at most a place too many in the window, or its message, which is published all the same.

Invariants of `WindowWaiters`:

- places are assigned in the order of the requests, by one thread, and are taken at that moment: a newcomer never comes
  between, and a large message is not kept out by small ones;
- a caller that is late, or leaves, has taken nothing and holds up no caller after it;
- a caller may be interrupted anywhere by an exception that a signal handler raises, and by a handler that requests a
  place itself: callers only ever enter and leave, each by one step that cannot be cut in two. The entry of an
  interrupted one gets its place when its turn comes, or is dropped at its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq._util.threads import CallbackThread, Condition
from reliable_mq.core.publisher.trace import PublicationEvent, record
from reliable_mq.engine.confirmation import end_trace
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel
from reliable_mq.errors import PublishUnconfirmed
from reliable_mq.sync.confirmation import PATIENCE, CallbackOwner, Confirmation
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.core.publisher.window import PublishWindow
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError

__all__ = ["PublisherChannel", "WindowWaiters"]

_LOOK_AGAIN = 0.1  # seconds after which a waiting caller asks by itself: few places wake no caller


class WindowWaiters:
    """Callers on other threads that wait for a window. All methods need the lock.

    Args:
        lock: guards the window.
        window: the window.
        ask: called, with the lock held, to make the I/O thread call `admit` soon.

    Attributes:
        waiting: the waiting callers; true while there are some.
    """

    def __init__(self, lock: threading.RLock, window: PublishWindow, ask: Callable[[], object]) -> None:
        self._lock = lock
        self._window = window
        self._ask = ask
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def is_free(self, size: int, *, crowded: bool, passes: bool) -> bool:
        """Whether a newcomer fits, and no caller is before it."""
        return (
            (passes or not crowded) and _first(list(self.waiting), crowded=crowded) is None and self._window.fits(size)
        )

    def wait(
        self, size: int, deadline: float, take: Callable[[], object], over: Callable[[], bool], *, passes: bool
    ) -> bool:
        """Wait for a place in the window; it is taken when this returns True.

        Args:
            size: bytes.
            deadline: on the monotonic clock, seconds.
            take: takes the place; called on the I/O thread once there is one.
            over: whether there will be none; `wake` makes the caller check it.
            passes: whether it is admitted while the window is crowded.
        """
        waiter = _Waiter(size, deadline, take, passes, Condition(self._lock))
        try:
            self.waiting[waiter] = None
            first = _first(list(self.waiting), crowded=False)  # a copy is made in one step, an iteration is not
            if first is not None and first is not waiter and self._window.fits(first.size):
                self._ask()
            while not (waiter.admitted or over()):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                waiter.changed.wait(min(remaining, _LOOK_AGAIN))
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
            crowded: whether to admit only those that pass.
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
        """Make every waiting caller check whether it is over."""
        for waiter in list(self.waiting):
            waiter.changed.notify()


def _first(waiting: Iterable[_Waiter], *, crowded: bool) -> _Waiter | None:
    return next((waiter for waiter in waiting if waiter.passes or not crowded), None)


class _Waiter:
    __slots__ = ("admitted", "changed", "deadline", "passes", "size", "take")

    def __init__(
        self, size: int, deadline: float, take: Callable[[], object], passes: bool, changed: Condition
    ) -> None:
        self.size = size
        self.deadline = deadline
        self.take = take
        self.passes = passes
        self.changed = changed
        self.admitted = False


_ABORT_GRACE = 1.0  # seconds for an abort after the closing handshake


class PublisherChannel(CallbackOwner, BasePublisherChannel[Confirmation]):
    """The channel of one publisher of the sync API. Thread-safe.

    Methods of the base that are on the loop are for the I/O thread.

    Attributes:
        lock: guards the inbox, the window and the callbacks of all confirmations.
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
        self._flushing: list[float] = []  # one for each caller in a flush: the moment before which all must be settled
        self._inbox: deque[Confirmation] = deque()
        self._accepting = 0  # publishes on their way from the inbox to the session
        self._callbacks = CallbackThread(f"{options.name}-callbacks")
        self._crowded = False  # more callbacks are due than the window has places

    # For callers, on any thread

    def start(self) -> None:
        """Start connecting. Does not wait."""
        try:
            super().start()
        except BaseException:  # interrupted; whether there is a thread now is not known
            self._io.stop()
            raise

    def wait_connected(
        self, timeout: float, attempts: int = 1, *, at_most: float = float("inf")
    ) -> ReliableMQError | None:
        """Wait for the attempts; by several threads."""
        self._check_not_forked()
        deadline = time.monotonic() + at_most
        with self.lock:
            enough = self._attempts_failed + attempts
            limit = timeout
            while limit > 0 and not self._wait_until(
                lambda: self.connected or self._attempts_failed >= enough or self.fatal is not None or self._closed,
                limit,
            ):
                limit = min(self._io.patience, deadline - time.monotonic())
            return self._why_not_connected(timeout)

    def submit(self, confirmation: Confirmation) -> None:
        """Accept a publish; wait for the window up to its deadline.

        Raises:
            PublishBlocked, PublishDisconnected: the broker blocks publishing, or is away, and that is to be raised.
            PublishUnconfirmed: the window was full for so long; it was not sent.
            UsageError: closed.
        """
        if self.forked:
            self._check_not_forked()
        try:
            with self.lock:
                if self._takes_none:
                    self._refuse(confirmation)
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
        except BaseException as error:
            self.nudge()  # its wake-up may have been interrupted, or that of others before
            end_trace(confirmation, error)
            raise

    def flush(self, timeout: float) -> bool:
        """Wait until all that was submitted before is settled; return whether it is."""
        self._check_not_forked()
        with self.lock:
            return self._wait_settled_before(time.monotonic(), timeout)

    def close(self, timeout: float) -> int:
        """Settle everything within ``timeout`` seconds, give up the rest, disconnect.

        May be called again, and by several threads: each waits for the end.

        Returns:
            The number of publishes given up.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            self._take_no_more()
            self._changed.notify_all()
            self._waiters.wake()
            settled = self._wait_settled_before(float("inf"), timeout)
        given_up = 0 if settled else self._give_up(max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE)
        self._io.stop(CLOSE_GRACE)
        self._callbacks.stop()
        self._wait_ended(self._io.join, CLOSE_GRACE + _ABORT_GRACE)
        self._wait_ended(self._callbacks.join, max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE)
        return given_up

    def nudge(self) -> None:
        """Make the I/O thread look into the inbox."""
        self._io.call_soon(self._advance)

    def check_waitable(self) -> None:
        """Raise UsageError in a forked child: nothing would ever be settled."""
        self._check_not_forked()

    def forget(self) -> None:
        """Disable this copy in a forked child.

        The connection, the thread and the holder of the lock are the parent's.
        """
        super().forget()
        self.lock = self._guard = threading.RLock()

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled. One may count twice for a moment."""
        return len(self._inbox) + self._accepting + self.session.outstanding

    # On the I/O thread

    def _accept_inbox(self) -> None:
        with self.lock:
            taken, self._inbox, self._woken = self._inbox, deque(), False
            self._accepting = len(taken)
        self.session.accept(taken)
        self._accepting = 0

    def _first_in_inbox(self) -> Confirmation | None:
        return self._inbox[0] if self._inbox else None

    def _notify_change(self) -> None:
        self._changed.notify_all()
        self._waiters.wake()

    def _refuse_waiting(self) -> None:
        if self._takes_none:
            self._waiters.wake()

    def _notify_settled(self) -> None:
        self._crowded = self._callbacks.backlog > self.window.max_count
        if self._waiting and self.window.worth_waking(self.session.on_wire):
            self._admit_waiters()
        if self._flushing and self._settled_before(min(self._flushing)):
            self._changed.notify_all()

    def _call_outside(self, call: Callable[[], object]) -> None:
        self._callbacks.put(call)

    def _call_outside_later(self, call: Callable[[], object]) -> None:
        self._callbacks.put_later(call)

    def _check_waiters(self) -> None:
        with self.lock:
            if self._waiting:
                self._crowded = self._callbacks.backlog > self.window.max_count
                self._admit_waiters()
        if self._inbox:  # the call that was to wake this thread may have been interrupted
            self._advance()

    def _admit_waiters(self) -> None:
        if not self._takes_no_more and self._waiters.admit(crowded=self._crowded) and not self._woken:
            self._woken = True
            self._io.call_soon(self._advance)

    # For closing

    def _give_up(self, timeout: float) -> int:
        """Settle everything as given up, from another thread; return the number."""
        done = threading.Event()
        before = self.session.statistics.unknown

        def give_up() -> None:
            self._end()
            with self.lock:
                done.set()
                self._changed.notify_all()

        self._io.call_soon(give_up)
        with self.lock:
            self._wait_until(done.is_set, timeout)
        return self.session.statistics.unknown - before

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
        """Wait until it fits; return whether the I/O thread has accepted it already."""
        self._crowded = self._callbacks.backlog > self.window.max_count
        size, passes = confirmation.size, self._callbacks.is_current  # a callback does not wait for those behind it
        if passes and confirmation.timeout is None:
            confirmation.timeout = self._delivery_timeout  # it overtakes others, whose deadlines are before its own
        if self._waiters.is_free(size, crowded=self._crowded, passes=passes):
            return False
        record((confirmation,), PublicationEvent.WINDOW_FULL)
        timeout = self._delivery_timeout if confirmation.timeout is None else confirmation.timeout
        deadline = confirmation.accepted_at + timeout
        if self._waiters.wait(
            size, deadline, partial(self._take, confirmation), lambda: self._takes_no_more, passes=passes
        ):
            return True
        early = not self.forked and time.monotonic() < deadline
        if self._takes_none or self.session.blocked_reason or early:
            self._refuse(confirmation)
        if not self._crowded:
            raise self._window_timeout(confirmation, timeout)
        why = f"the callbacks of {self._callbacks.backlog} earlier publishes were not called"
        raise PublishUnconfirmed(
            f"{confirmation} was never sent: {why} for {timeout} s", message_id=confirmation.message_id, sent=False
        )

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        began = time.monotonic()
        nudged = False
        while not condition():
            waited = time.monotonic() - began
            if waited >= timeout or self.forked:
                return False
            if waited >= PATIENCE and not nudged:
                nudged = True
                self.nudge()
            self._changed.wait(min(timeout - waited, _LOOK_AGAIN))
        return True

    def _wait_ended(self, join: Callable[[float], bool], timeout: float) -> None:
        """Wait for a thread that may need the lock.

        The caller may be a signal handler that has interrupted its holder.
        """
        if not join(PATIENCE):
            with self.lock:
                self._wait_until(lambda: join(0), timeout)

    def _wait_settled_before(self, moment: float, timeout: float) -> bool:
        self._flushing.append(moment)
        try:
            return self._wait_until(lambda: self._settled_before(moment), timeout)
        finally:
            self._flushing.remove(moment)
