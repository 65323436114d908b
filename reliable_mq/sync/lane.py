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
- a caller may be interrupted anywhere: by a signal handler that calls the lane itself (hence locks that their owner may
  take again, and waits that let go of them altogether), or by an exception that a signal handler raises: what it leaves
  behind is at most a place too many in the window.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from reliable_mq.core.codec import CodecError, Properties
from reliable_mq.core.publication import Outcome, Reply
from reliable_mq.core.publishing import PublishingSession
from reliable_mq.errors import BrokerUnavailable, PublishBlocked, PublishUnconfirmed, UsageError
from reliable_mq.sync.callbacks import CallbackThread
from reliable_mq.sync.condition import Condition
from reliable_mq.sync.confirmation import PATIENCE
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.core.codec import RawDelivery
    from reliable_mq.core.publisher_options import PublisherOptions
    from reliable_mq.core.publishing import PublishingSession
    from reliable_mq.core.recovery import Loss
    from reliable_mq.core.setup import ServerInfo
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.sync.confirmation import Confirmation
    from reliable_mq.sync.io_thread import TimerHandle

__all__ = ["PublishingLane"]

logger = logging.getLogger(__name__)

_WRITE_BYTES = 64 * 1024  # encoded and written in one piece
_BUFFERED_BYTES = 512 * 1024  # not yet taken by the socket, above which nothing more is encoded
_FAILURES_KEPT = 100  # failed confirmations that nobody has looked at, kept to be raised when the publisher is left
_FAILURES_SAID_EVERY = 10.0  # seconds, at least, between two log lines about such failures
_CLOSE_GRACE = 2.0  # seconds for the closing handshake, beyond the caller's own timeout
_ABORT_GRACE = 1.0  # seconds for what is aborted after that
_LOOK_AGAIN = 0.1  # seconds after which a caller that waits looks by itself: few places in the window wake nobody


class PublishingLane:
    """See the module. Public methods are thread-safe; those under "on the I/O thread" are called there.

    Attributes:
        lock: guards the inbox, the window and the watchers of all confirmations.
        session: read-only for other threads.
        fatal: why the lane has ended by itself, if it has.
        forked: whether this is a copy in a forked child, where the lane's thread does not exist.
    """

    def __init__(self, options: PublisherOptions) -> None:
        self.lock = threading.RLock()
        self.window = options.window
        self.session: PublishingSession[Confirmation] = options.new_session(random.Random())
        self.fatal: ReliableMQError | None = None
        self.forked = False
        self.reconnects = 0
        self.connected = False
        self._connection_lost = False
        self._delivery_timeout = options.delivery_timeout
        self._raise_when_blocked = options.raise_when_blocked
        self._changed = Condition(self.lock)
        self._waiting = 0  # callers that wait for _changed
        self._flushing: list[float] = []  # since when, for each caller that waits for what was submitted before
        self._inbox: deque[Confirmation] = deque()
        self._taken = 0  # publishes on their way from the inbox to the session
        self._oldest: float | None = None  # when the oldest unsettled publish was submitted
        self._woken = False
        self._closed = False
        self._failures: deque[Confirmation] = deque(maxlen=_FAILURES_KEPT)
        self._unseen = 0  # failures that nobody has looked at, those that _failures has dropped included
        self._unwatched = 0  # of those, not said in the log yet
        self._unwatched_said_at = float("-inf")
        self._attempts_failed = 0
        self._last_error: ReliableMQError | None = None
        self._generation = 0
        self._timer: TimerHandle | None = None
        self._timer_at = 0.0
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0
        self._callbacks = CallbackThread(f"{options.name}-callbacks")
        self._crowded = False  # more callbacks wait to be called than the window has places
        self._io = IOThread(
            name=options.name,
            settings=options.settings,
            setup=options.setup,
            client=self,
            recovery=options.new_recovery(),
        )
        _lanes.add(self)

    # For callers, on any thread

    def start(self) -> None:
        """Start connecting. Does not wait."""
        try:
            self._io.start()
        except BaseException:  # interrupted; whether there is a thread now is not known
            self._io.stop()
            raise

    def wait_connected(self, timeout: float, attempts: int = 1) -> ReliableMQError | None:
        """Wait until the lane is connected or ``attempts`` more have failed. Returns why it is not connected, or None.

        Where the error is permanent the lane has ended (``fatal``); else it goes on trying.
        """
        self._check_not_forked()
        with self.lock:
            enough = self._attempts_failed + attempts
            self._wait_until(
                lambda: self.connected or self._attempts_failed >= enough or self.fatal is not None or self._closed,
                timeout,
            )
            if self.connected:
                return None
            if self._closed and self.fatal is None:
                return UsageError("this publisher was closed while it was connecting")
            error = self.fatal or self._last_error or BrokerUnavailable(f"no answer within {timeout:g} s")
            return copy.copy(error)  # each is raised once: raising adds frames to its traceback

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
                if self._closed or self.fatal is not None or (self._raise_when_blocked and self.session.blocked_reason):
                    self._refuse(confirmation)
                if self._crowded or not self.window.fits(confirmation.size):
                    self._wait_for_room(confirmation)
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
            settled = self._wait_settled_before(float("inf"), timeout)
        given_up = 0 if settled else self._give_up(max(deadline - time.monotonic(), 0.0) + _CLOSE_GRACE)
        self._io.stop(_CLOSE_GRACE)
        self._callbacks.stop()
        self._wait_ended(self._io.join, _CLOSE_GRACE + _ABORT_GRACE)
        self._wait_ended(self._callbacks.join, max(deadline - time.monotonic(), 0.0) + _CLOSE_GRACE)
        return given_up

    def take_failures(self) -> tuple[list[Confirmation], int]:
        """The failed confirmations that nobody has looked at (the last hundred), and how many there are in all."""
        with self.lock:
            unseen = [failed for failed in self._failures if not failed.seen]
            count, self._unseen = self._unseen, 0
            self._failures.clear()
        return unseen, count

    def not_reported(self, confirmations: Iterable[Confirmation]) -> None:
        """The report that was to tell of these will not be made: their failures are told at the end."""
        with self.lock:
            for confirmation in confirmations:
                if confirmation.seen:
                    confirmation.seen = False
                    if confirmation.outcome not in (None, Outcome.CONFIRMED):
                        self._failures.append(confirmation)
                        self._unseen += 1

    def failure_seen(self) -> None:
        """Somebody looked at a failure; the caller holds the lock."""
        self._unseen -= 1

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
        """This is a copy in a forked child: the connection and the thread are the parent's."""
        self.forked = True
        self.lock = threading.RLock()

    @property
    def tried(self) -> bool:
        """Whether an attempt to connect has ended, well or not."""
        return self.connected or self._attempts_failed > 0

    @property
    def frame_max(self) -> int:
        """Bytes that a frame may have, as negotiated."""
        return self.session.frame_max

    @property
    def blocked_seconds(self) -> float:
        """How long the broker has blocked publishing, in all, the present time included."""
        since = self._blocked_since
        return self._blocked_seconds + (0.0 if since is None else time.monotonic() - since)

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled. For a moment one may be counted twice; none is ever left out."""
        return len(self._inbox) + self._taken + self.session.outstanding

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled publish was submitted; 0 where there is none."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(time.monotonic() - oldest, 0.0)

    # On the I/O thread: what the connection reports

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """A channel is open, the topology is declared and confirms are selected."""
        self._generation = generation
        self.reconnects += self._connection_lost
        self._connection_lost = False
        self.session.channel_opened(generation, channel, frame_max, time.monotonic())
        with self.lock:
            self.connected = True
            self._changed.notify_all()
        self._pump()

    def lost(self, generation: int, loss: Loss) -> None:
        """The channel is gone."""
        reply = Reply(loss.code, loss.text) if loss.by_broker and loss.code is not None else None
        self.session.channel_lost(generation, reply, connection=loss.scope == "connection")
        with self.lock:
            self.connected = False
        self._connection_lost = loss.scope == "connection"
        self._pump()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt to connect failed."""
        with self.lock:
            self._attempts_failed += 1
            self._last_error = error
            if not will_retry:
                self.fatal = error
            self._changed.notify_all()
        if not will_retry:
            self._end()

    def blocked(self, reason: str) -> None:
        """``connection.blocked``."""
        logger.warning("the broker blocks publishing: %s", reason)
        self._blocked_since = time.monotonic()
        self.session.blocked(reason)

    def unblocked(self) -> None:
        """``connection.unblocked``."""
        logger.info("the broker takes publishes again")
        self._blocked_seconds, self._blocked_since = self.blocked_seconds, None
        self.session.unblocked(time.monotonic())
        self._pump()

    def acked(self, tag: int, multiple: bool) -> None:
        """``basic.ack``."""
        self.session.acked(self._generation, tag, multiple, time.monotonic())

    def nacked(self, tag: int, multiple: bool) -> None:
        """``basic.nack``."""
        self.session.nacked(self._generation, tag, multiple, time.monotonic())

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """``basic.return``."""
        try:
            message_id = Properties(properties).message_id
        except CodecError:
            message_id = None
        self.session.returned(self._generation, code, text, message_id)

    def read_finished(self) -> None:
        """All that was read from the socket at once is handled: settle it together."""
        self._pump()

    def write_drained(self) -> None:
        """The socket has taken what was buffered."""
        self._pump()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a delivery on a publishing channel")

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-ok on a publishing channel")

    def got_empty(self) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-empty on a publishing channel")

    def cancelled(self, consumer_tag: str) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a cancel on a publishing channel")

    # On the I/O thread: the work

    def _pump(self) -> None:
        """Take in what was submitted, write what may be written, settle what is settled, see to the next wake-up."""
        session, io = self.session, self._io
        self._accept_inbox()
        now = time.monotonic()
        session.tick(now)
        if session.channel_in_doubt(now):
            io.discard(f"no confirm for any of {session.on_wire} outstanding publishes in time")
        else:
            while io.write_buffer_size() < _BUFFERED_BYTES and (data := session.data_to_send(now, _WRITE_BYTES)):
                io.write(data)
        self._settle()
        self._schedule(now)

    def _accept_inbox(self) -> None:
        with self.lock:
            taken, self._inbox, self._woken = self._inbox, deque(), False
            self._taken = len(taken)
        self.session.accept(taken)
        self._taken = 0

    def _settle(self) -> None:
        session = self.session
        if not session.settled and not session.freed_count:
            return
        settled, session.settled = session.settled, []
        unwatched: Confirmation | None = None
        confirmed = Outcome.CONFIRMED
        with self.lock:
            for confirmation in settled:
                if confirmation.outcome is not confirmed:
                    if confirmation.watchers is None and not confirmation.seen:
                        unwatched = confirmation
                        self._unwatched += 1
                    if not confirmation.seen:
                        self._failures.append(confirmation)
                        self._unseen += 1
                    confirmation.settled()
                elif confirmation.watchers is not None:
                    confirmation.settled()
            self.window.release(session.freed_count, session.freed_bytes)
            session.freed_count = session.freed_bytes = 0
            self._oldest = session.oldest_accepted_at
            if self._oldest is None and self._inbox:
                self._oldest = self._inbox[0].accepted_at
            self._crowded = self._callbacks.backlog > self.window.max_count
            if self._waiting and (
                self.window.worth_waking(session.on_wire)
                or (self._flushing and self._settled_before(min(self._flushing)))
            ):
                self._changed.notify_all()
        if unwatched is not None:
            self._say_unwatched(unwatched)

    def _say_unwatched(self, latest: Confirmation) -> None:
        now = time.monotonic()
        if now - self._unwatched_said_at >= _FAILURES_SAID_EVERY:
            logger.warning("%d publishes failed that nobody waits for; the last: %s", self._unwatched, latest.failure())
            self._unwatched, self._unwatched_said_at = 0, now

    def _check_not_forked(self) -> None:
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its connection belongs to the parent; make one in the child"
            )

    def _end(self) -> None:
        self._accept_inbox()
        self.session.abandon_all()
        self._settle()

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

    def _schedule(self, now: float) -> None:
        at = self.session.next_wakeup()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._io.call_later(max(at - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    # Under the lock

    def _refuse(self, confirmation: Confirmation) -> None:
        if self.fatal is not None:
            raise copy.copy(self.fatal)
        if self._closed:
            raise UsageError("this publisher is closed; nothing was sent")
        reason = self.session.blocked_reason or ""
        raise PublishBlocked(
            f"{confirmation} was not sent: the broker has blocked publishing ({reason})",
            message_id=confirmation.message_id,
            reason=reason,
        )

    def _wait_for_room(self, confirmation: Confirmation) -> None:
        timeout = self._delivery_timeout if confirmation.timeout is None else confirmation.timeout
        remaining = confirmation.accepted_at + timeout - time.monotonic()
        if not self._wait_until(
            lambda: self._closed or self.fatal is not None or self._has_room(confirmation), remaining
        ):
            if self.session.blocked_reason:
                self._refuse(confirmation)
            why = f"the window ({self.window.max_count} messages, {self.window.max_bytes} bytes) was full"
            if self.window.fits(confirmation.size):
                why = f"the callbacks of {self._callbacks.backlog} earlier publishes were not called"
            raise PublishUnconfirmed(
                f"{confirmation} was never sent: {why} for {timeout} s",
                message_id=confirmation.message_id,
                sent=False,
            )
        if self._closed or self.fatal is not None:
            self._refuse(confirmation)

    def _has_room(self, confirmation: Confirmation) -> bool:
        # A callback that publishes does not wait for those behind it.
        self._crowded = self._callbacks.backlog > self.window.max_count
        return self.window.fits(confirmation.size) and not (self._crowded and not self._callbacks.is_current)

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        began = time.monotonic()
        nudged = False
        self._waiting += 1
        try:
            while not condition():
                waited = time.monotonic() - began
                if waited >= timeout or self.forked:
                    return False
                if waited >= PATIENCE and not nudged:
                    nudged = True
                    self.nudge()
                self._changed.wait(min(timeout - waited, _LOOK_AGAIN))
            return True
        finally:
            self._waiting -= 1

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

    def _settled_before(self, moment: float) -> bool:
        return self._oldest is None or self._oldest > moment


# A forked child has copies of the lanes and none of their threads.
_lanes: WeakSet[PublishingLane] = WeakSet()


def _forget_in_child() -> None:
    for lane in _lanes:
        lane.forget()


os.register_at_fork(after_in_child=_forget_in_child)
