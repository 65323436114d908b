"""A publishing lane: one connection, its publishing session, and the window that callers on other threads wait at.

Callers admit a publish to the window and leave it in the inbox, under one lock; the I/O thread takes whole inboxes,
lets the session decide, writes what the session encodes, and settles what the session settled. One wake-up serves all
that came in meanwhile.

Invariants:

- the session is touched by the I/O thread alone; the inbox, the window and the watchers of confirmations only under the
  lock;
- no user code runs, and nothing blocks, on the I/O thread;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or when the
  lane ends;
- every wait of a caller ends: with what it waits for, at its deadline, or when the lane ends;
- callers that wait for the window are admitted in the order in which they came, by the I/O thread (`WindowWaiters`); a
  callback passes those who wait for callbacks;
- a caller may be interrupted anywhere: by a signal handler that calls the lane itself (hence locks that their owner may
  take again, and waits that let go of them altogether), or by an exception that a signal handler raises: what it leaves
  behind is at most a place too many in the window, or its message, which is published all the same.

Who waits for room in a window on the sync API.

Invariants:

- room is given in the order in which it was asked for, by one thread, and is taken at that moment: a newcomer never
  comes between, and a large message is not kept out by small ones;
- who is late, or leaves, has taken nothing and holds up nobody who came after it;
- a caller may be interrupted anywhere by an exception that a signal handler raises, and by a handler that asks for room
  itself: callers only ever enter and leave, each by one step that cannot be cut in two. What an interrupted one leaves
  behind is given its room when its turn comes, or is dropped at its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from reliable_mq._util.threads import CallbackThread, Condition
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel
from reliable_mq.errors import PublishUnconfirmed, UsageError
from reliable_mq.sync.confirmation import PATIENCE, Confirmation
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.publisher.window import PublishWindow
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError

__all__ = ["PublisherChannel", "WindowWaiters"]

_LOOK_AGAIN = 0.1  # seconds after which one that waits asks by itself: few places in the window wake nobody


class WindowWaiters:
    """See the module. Every method is for who holds the lock.

    Args:
        lock: guards the window.
        window: where the room is.
        ask: called, with the lock held, to have the thread that gives call `give` soon.

    Attributes:
        waiting: true while somebody waits.
    """

    def __init__(self, lock: threading.RLock, window: PublishWindow, ask: Callable[[], object]) -> None:
        self._lock = lock
        self._window = window
        self._ask = ask
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def is_free(self, size: int, *, crowded: bool, passes: bool) -> bool:
        """Whether there is room for a newcomer: nobody is before it."""
        return (passes or not crowded) and self._first(crowded) is None and self._window.fits(size)

    def wait(
        self, size: int, deadline: float, take: Callable[[], object], over: Callable[[], bool], *, passes: bool
    ) -> bool:
        """Wait for room; it is taken when this returns True.

        Args:
            size: bytes.
            deadline: on the monotonic clock, seconds.
            take: called once there is room, by the thread that gives it; takes it.
            over: whether there will be none; `wake` has it looked at.
            passes: whether it is admitted while the window is crowded.
        """
        waiter = _Waiter(size, deadline, take, passes, Condition(self._lock))
        try:
            self.waiting[waiter] = None
            first = next(iter(self.waiting))
            if first is not waiter and self._window.fits(first.size):
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

    def give(self, *, crowded: bool) -> bool:
        """Room may be free: give it to those who wait, on the one thread that does so. Whether anybody got some.

        Args:
            crowded: whether those wait that do not pass.
        """
        now = time.monotonic()
        given = False
        while (waiter := self._first(crowded)) is not None:
            if waiter.deadline > now:  # else it is about to leave, or was interrupted
                if not self._window.fits(waiter.size):
                    break
                waiter.take()
                waiter.admitted = given = True
            self.waiting.pop(waiter, None)
            waiter.changed.notify()
        return given

    def wake(self) -> None:
        """Have everyone who waits look whether it is over."""
        for waiter in list(self.waiting):
            waiter.changed.notify()

    def _first(self, crowded: bool) -> _Waiter | None:
        return next((waiter for waiter in self.waiting if waiter.passes or not crowded), None)


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


_ABORT_GRACE = 1.0  # seconds for what is aborted after the closing handshake


class PublisherChannel(BasePublisherChannel[Confirmation]):
    """See the module. Public methods are thread-safe; those of the base that are on the loop are for the I/O thread.

    Attributes:
        lock: guards the inbox, the window and the watchers of all confirmations.
    """

    write_bytes = 64 * 1024
    _io: IOThread

    def __init__(self, options: PublisherOptions) -> None:
        self.lock = threading.RLock()
        super().__init__(options, self.lock)
        self._changed = Condition(self.lock)
        self._room = WindowWaiters(self.lock, self.window, lambda: self._io.call_soon(self._look_for_room))
        self._line = self._room.waiting
        self._flushing: list[float] = []  # since when, for each caller that waits for what was submitted before
        self._inbox: deque[Confirmation] = deque()
        self._taken = 0  # publishes on their way from the inbox to the session
        self._callbacks = CallbackThread(f"{options.name}-callbacks")
        self._crowded = False  # more callbacks wait to be called than the window has places
        self._io = IOThread(
            name=options.name,
            settings=options.settings,
            setup=self._set_up,
            client=self,
            recovery=options.new_recovery(),
        )

    # For callers, on any thread

    def start(self) -> None:
        """Start connecting. Does not wait."""
        try:
            self._io.start()
        except BaseException:  # interrupted; whether there is a thread now is not known
            self._io.stop()
            raise

    def wait_connected(self, timeout: float, attempts: int = 1, *, firm: bool = False) -> ReliableMQError | None:
        """Wait until the lane is connected or ``attempts`` more have failed. Returns why it is not connected, or None.

        A set-up that goes on (a large topology) is waited for beyond ``timeout``, unless that is ``firm``.

        Where the error is permanent the lane has ended (``fatal``); else it goes on trying.
        """
        self._check_not_forked()
        with self.lock:
            enough = self._attempts_failed + attempts
            limit = timeout
            while limit > 0 and not self._wait_until(
                lambda: self.connected or self._attempts_failed >= enough or self.fatal is not None or self._closed,
                limit,
            ):
                limit = 0.0 if firm else self._io.patience
            return self._why_not_connected(timeout)

    def submit(self, confirmation: Confirmation) -> None:
        """Take a publish in; waits for room in the window, up to the publish's own deadline.

        Raises:
            PublishBlocked: the broker blocks publishing, and that is to be raised.
            PublishUnconfirmed: no room in time; it was not sent.
            UsageError: closed.
        """
        if self.forked:
            self._check_not_forked()
        try:
            with self.lock:
                if self._takes_none:
                    self._refuse(confirmation)
                if (self._crowded or self._line or not self.window.fits(confirmation.size)) and self._wait_for_room(
                    confirmation
                ):
                    return
                self._inbox.append(confirmation)
                self.window.take(confirmation.size)
                if self._oldest is None:
                    self._oldest = confirmation.accepted_at
                wake, self._woken = not self._woken, True
            if wake:
                self._io.call_soon(self._pump)
        except BaseException:
            self.nudge()  # its wake-up may be what was interrupted, or that of others before
            raise

    def flush(self, timeout: float) -> bool:
        """Wait until everything submitted before is settled. False where ``timeout`` seconds were not enough."""
        self._check_not_forked()
        with self.lock:
            return self._wait_settled_before(time.monotonic(), timeout)

    def close(self, timeout: float) -> int:
        """Settle everything within ``timeout`` seconds, give up the rest, disconnect.

        Returns how many were given up. May be called again, and by several threads: each waits for the end.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            self._closed = True
            self._changed.notify_all()
            self._room.wake()
            settled = self._wait_settled_before(float("inf"), timeout)
        given_up = 0 if settled else self._give_up(max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE)
        self._io.stop(CLOSE_GRACE)
        self._callbacks.stop()
        self._wait_ended(self._io.join, CLOSE_GRACE + _ABORT_GRACE)
        self._wait_ended(self._callbacks.join, max(deadline - time.monotonic(), 0.0) + CLOSE_GRACE)
        return given_up

    def expect_callbacks(self) -> None:
        """See to it that ``call_back`` needs no new thread."""
        self._callbacks.start()

    def nudge(self) -> None:
        """See to it that the I/O thread knows of every publish."""
        self._io.call_soon(self._pump)

    def call_back(self, call: Callable[[], object]) -> None:
        """Run a user's callback, off the I/O thread."""
        self._callbacks.put(call)

    def check_waitable(self) -> None:
        """Raise UsageError in a forked child, where nothing would ever be settled."""
        self._check_not_forked()

    def check_closable(self) -> None:
        """Raise UsageError where closing would wait for the caller itself."""
        if self._callbacks.is_current:
            raise UsageError("close() from a callback of the same publisher would wait for itself: close it elsewhere")

    def forget(self) -> None:
        """This is a copy in a forked child: the connection, the thread and the holder of the lock are the parent's."""
        super().forget()
        self.lock = self._guard = threading.RLock()

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled. For a moment one may be counted twice; none is ever left out."""
        return len(self._inbox) + self._taken + self.session.outstanding

    # On the I/O thread

    def _accept_inbox(self) -> None:
        with self.lock:
            taken, self._inbox, self._woken = self._inbox, deque(), False
            self._taken = len(taken)
        self.session.accept(taken)
        self._taken = 0

    def _first_in_inbox(self) -> Confirmation | None:
        return self._inbox[0] if self._inbox else None

    def _tell_change(self) -> None:
        self._changed.notify_all()
        self._room.wake()

    def _tell_settled(self) -> None:
        self._crowded = self._callbacks.backlog > self.window.max_count
        if self._line and self.window.worth_waking(self.session.on_wire):
            self._give_room()
        if self._flushing and self._settled_before(min(self._flushing)):
            self._changed.notify_all()

    def _look_for_room(self) -> None:
        with self.lock:
            if self._line:
                self._crowded = self._callbacks.backlog > self.window.max_count
                self._give_room()
        if self._inbox:  # the call that was to tell of it may have been interrupted
            self._pump()

    def _give_room(self) -> None:
        if not self._takes_no_more and self._room.give(crowded=self._crowded) and not self._woken:
            self._woken = True
            self._io.call_soon(self._pump)

    # For closing

    def _give_up(self, timeout: float) -> int:
        """Give up what is unsettled, from another thread. Returns how many that were."""
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

    def _refuse(self, confirmation: Confirmation) -> NoReturn:
        raise self._refusal(confirmation)

    @property
    def _takes_no_more(self) -> bool:
        return self._closed or self.fatal is not None or self.forked

    def _take(self, confirmation: Confirmation) -> None:
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at

    def _wait_for_room(self, confirmation: Confirmation) -> bool:
        """Wait until there is room. Returns whether the I/O thread has taken the publish in already."""
        self._crowded = self._callbacks.backlog > self.window.max_count
        size, passes = confirmation.size, self._callbacks.is_current  # a callback does not wait for those behind it
        if self._room.is_free(size, crowded=self._crowded, passes=passes):
            return False
        timeout = self._delivery_timeout if confirmation.timeout is None else confirmation.timeout
        deadline = confirmation.accepted_at + timeout
        if self._room.wait(
            size, deadline, partial(self._take, confirmation), lambda: self._takes_no_more, passes=passes
        ):
            return True
        if self._closed or self.fatal is not None or self.session.blocked_reason:
            self._refuse(confirmation)
        why = f"the window ({self.window.max_count} messages, {self.window.max_bytes} bytes) was full"
        if self._crowded:
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
        """Wait for a thread that may need the lock, which a caller that is a signal handler may have interrupted."""
        if not join(PATIENCE):
            with self.lock:
                self._wait_until(lambda: join(0), timeout)

    def _wait_settled_before(self, moment: float, timeout: float) -> bool:
        self._flushing.append(moment)
        try:
            return self._wait_until(lambda: self._settled_before(moment), timeout)
        finally:
            self._flushing.remove(moment)
