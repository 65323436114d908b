"""The channel of a publisher, between its callers, its session and its connection.

Both APIs share it. It runs on the loop of its connection, which is an I/O thread's or asyncio's. Callers admit a
publish to the window and put it into the inbox. The channel takes the whole inbox, lets the session decide, writes the
frames that the session encodes, and settles the publishes that the session settled. One wake-up serves all publishes
that arrived in the meantime. Each API adds its connection, its inbox, and the waiting of its callers.

Invariants:

- The session is used on the loop only. No user code runs there, and nothing blocks there.
- Every confirmation that ``submit`` returned is settled by the broker, by its deadline, or at the end of the channel.
- State that callers read (the window, failures, whether it is connected) changes under ``lock``.
"""

from __future__ import annotations

import copy
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq.codec import CodecError, Properties
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.connection.new_queues import QueueRecord
from reliable_mq.core.channel_setup import round_trip
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.health import OutboxSigns, PublisherSigns
from reliable_mq.core.outbox import KeptPlaces
from reliable_mq.core.publisher.publication import BrokerReply, Outcome
from reliable_mq.core.statistics import PublisherStatus, TokenStatistics
from reliable_mq.engine.channel import BaseChannel
from reliable_mq.engine.confirmation import CALLED, BaseConfirmation
from reliable_mq.engine.connection import Wakeup
from reliable_mq.engine.health import LoopWatch
from reliable_mq.errors import BrokerUnavailable, PublishBlocked, PublishDisconnected, PublishUnconfirmed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.publisher.session import PublisherSession
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.engine.connection import BaseConnection
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.engine.steps import Steps
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.tracing.publishing import SendTrace

logger = get_logger(__name__)
unwatched_logger = get_logger(f"{__name__}.unwatched")
"""Logs the number of failed publishes without a callback and without a caller that waits."""

CLOSE_GRACE = 2.0
"""Seconds for the closing handshake, beyond the caller's own timeout."""

_BUFFERED_BYTES = 512 * 1024  # bytes that the socket has not taken, above which no more frames are encoded
_LOG_FAILURES_EVERY = 10.0  # minimum seconds between two log lines about failures
_STALLED = 0.1  # seconds by which a wake-up is late if the loop has stalled
_READ_FIRST = 0.01  # seconds in which the loop then reads
_NO_CHANNEL = "its channel was lost, and the next one is not ready"  # on a connection that is not lost
_SMALL_HEADERS = 1024  # bytes that fit in a frame beside an id, as a frame holds at least 4096


P = TypeVar("P", bound=BaseConfirmation)


class BasePublisherChannel(BaseChannel[P], ConnectionListener):
    """The channel of one publisher, without the waiting of callers.

    Args:
        options: The options of the publisher.
        lock: A lock for the state that callers read. Callers may be on other threads.

    Attributes:
        window: The limits of outstanding publishes.
        session: The publishing session. Read-only for others.
        reconnects: The number of connections that were lost and replaced.
        connected: Whether the broker takes messages.
        largest_body: As in `ChannelSink`. The body of a return is not read.
    """

    write_bytes: int  # bytes encoded and written in one piece
    _connection_type: ClassVar[type[BaseConnection]]
    _takes_none: bool  # whether a publish submitted now gets a `_refusal`
    _made_before_fork = (
        "this publisher was made before fork(): its connection belongs to the parent; make one in the child"
    )

    def __init__(self, options: PublisherOptions, lock: AbstractContextManager[object]) -> None:
        super().__init__(lock, options.delivery_timeout)
        self.window = options.window
        self.session: PublisherSession[P] = options.new_session(random.Random())
        self.reconnects = 0
        self.connected = False
        self.largest_body = 0
        self._options = options
        self._name = options.name
        self._record = QueueRecord(options.settings.virtual_host, options.new_queue_grace)
        self._oldest: float | None = None  # when the oldest unsettled publish was submitted
        self._woken = False
        self._flushing: dict[object, float] = {}  # by caller: the moment before which all must be settled
        self._unwatched_log = LogLimit(_LOG_FAILURES_EVERY)
        self._repeated_log = LogLimit(_LOG_FAILURES_EVERY)
        self._attempts_failed = 0
        self._last_error: ReliableMQError | None = None
        self._generation = 0
        self._wakeup = Wakeup(self._advance)
        self._after_stall = Wakeup(self._work)
        self._watch = LoopWatch()
        self._changed_at = time.monotonic()  # when it was created, connected or lost
        self._settled_at = self._changed_at
        # The seconds of earlier blocks, and the start of this one. Replaced at once, because any thread may read them.
        self._blocked: tuple[float, float | None] = 0.0, None
        self._tokens_before = TokenStatistics()
        self._stalled_before = 0.0
        self._state_changed()
        self._io = self._connection_type(
            name=options.name,
            settings=options.settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=options.new_reconnect_policy(),
        )

    # For each API to implement

    def close(self, timeout: float) -> Any:
        """Settle everything within ``timeout`` seconds or give it up. Disconnect. A step.

        Returns:
            An error if publishes are not settled, because the loop is blocked.
        """
        raise NotImplementedError

    def _accept_inbox(self) -> None:
        """Pass the submitted publishes to the session."""
        raise NotImplementedError

    def _first_in_inbox(self) -> P | None:
        """Return the first publish that the session does not have. The lock is held."""
        raise NotImplementedError

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> Any:
        """Wait for a condition; return whether it is met. The lock is held. A step."""
        raise NotImplementedError

    def _notify_change(self) -> None:
        """Wake the callers of `_wait_until`. The lock is held."""
        raise NotImplementedError

    def _admit_waiting(self) -> None:
        """Admit callers that wait for the window, as far as it has room. The lock is held."""
        raise NotImplementedError

    def _refuse_waiting(self) -> None:
        """Refuse callers that wait for the window, if none is admitted. The lock is held."""
        raise NotImplementedError

    # For callers

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    def wait_connected(self, timeout: float) -> Steps[ReliableMQError | None]:
        """Wait until it is connected, or each host has had one more attempt.

        A set-up in progress (for example of a large topology) extends the wait beyond the time for these attempts, up
        to ``timeout`` seconds in total. Several callers may wait.

        Returns:
            The reason why it is not connected, or None. After a permanent error the channel has ended (``fatal``).
            Otherwise it keeps trying.
        """
        self.check_usable()
        settings = self._options.settings
        deadline = time.monotonic() + timeout
        with self._guard:
            enough = self._attempts_failed + len(settings.endpoints)
            limit = waited = min(settings.first_attempts_timeout, timeout)
            over = False
            while True:  # without a condition: see `Condition`
                if over or limit <= 0:
                    break
                over = yield self._wait_until(
                    lambda: self.connected or self._attempts_failed >= enough or self.fatal is not None or self._closed,
                    limit,
                )
                limit = min(self._io.patience, deadline - time.monotonic())
            return self._why_not_connected(waited)

    def flush(self, timeout: float) -> Steps[bool]:
        """Wait until all earlier publishes are settled, and return whether they are."""
        self.check_usable()
        with self._guard:
            return (yield from self._wait_settled_before(time.monotonic(), timeout))

    def not_reported(self, confirmation: P) -> None:
        """Count a failure of this confirmation as unseen, as no report will be made."""
        with self._guard:
            if confirmation.result_observed:
                confirmation.result_observed = False
                if confirmation.callbacks is CALLED and confirmation.outcome is not Outcome.CONFIRMED:
                    self._keep_failure(confirmation)

    def observe(self, confirmation: P, trace: SendTrace) -> None:
        """Attach a trace to a publish that is not accepted yet."""
        message = confirmation.message
        plain = message.encoded_properties is None and len(trace.plain_head) < _SMALL_HEADERS  # the usual case; it fits
        if not plain and not self._options.limits.fits_frame(message, trace.header_bytes, self.session.frame_max):
            trace = trace.without_headers()
        confirmation.trace = trace
        if trace.recording:
            confirmation.callbacks = [*(confirmation.callbacks or ()), partial(self._end_trace, trace, confirmation)]

    def _end_trace(self, trace: SendTrace, confirmation: P) -> None:
        if confirmation.outcome is Outcome.CONFIRMED:
            seconds = time.monotonic() - confirmation.accepted_at
            self.session.statistics.confirm_seconds.exemplify(seconds, trace.ids, time.time())
        self._call_outside(partial(trace.settled, confirmation, time.time_ns(), self._io.peer))

    @property
    def outstanding(self) -> int:
        """The number of publishes submitted and not settled."""
        raise NotImplementedError

    @property
    def stalled_seconds(self) -> float | None:
        """The seconds for which the event loop has stalled (`BaseConnection`)."""
        stalled = self._io.stalled_seconds
        return None if stalled is None else self._stalled_before + stalled

    @property
    def tried(self) -> bool:
        """Whether an attempt to connect has ended, successfully or not."""
        return self.connected or self._attempts_failed > 0

    @property
    def blocked_seconds(self) -> float:
        """The total seconds for which the broker has blocked publishing."""
        before, since = self._blocked
        return before if since is None else before + (time.monotonic() - since)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled publish was submitted, or 0. Thread-safe."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(time.monotonic() - oldest, 0.0)

    @property
    def tokens(self) -> TokenStatistics:
        """The counts of renewed tokens."""
        return self._tokens_before + self._io.tokens

    @property
    def status(self) -> PublisherStatus:
        """The state for metrics. Thread-safe."""
        return PublisherStatus(
            outstanding=self.outstanding,
            oldest_age=self.oldest_age,
            connected=self.connected,
            blocked=self.session.blocked_reason is not None,
            blocked_seconds=self.blocked_seconds,
            reconnects=self.reconnects,
            stale_confirms=self.session.stale_confirms,
            tokens_accepted=self.tokens.accepted,
            tokens_refused=self.tokens.refused,
            tokens_failed=self.tokens.failed,
            event_loop_stalled_seconds=self.stalled_seconds,
        )

    def continue_counts(self, former: BasePublisherChannel[P]) -> None:
        """Continue the counts of a channel that has ended. To be called before the start."""
        self.session.continue_counts(former.session)
        self.reconnects, self._record = former.reconnects, former._record
        self._blocked = former.blocked_seconds, None
        self._tokens_before, self._stalled_before = former.tokens, former.stalled_seconds or 0.0

    @property
    def obstacle(self) -> ReliableMQError | None:
        """The reason why nothing can be published now, None without one. Thread-safe."""
        away, blocked = self.session.disconnected_reason, self.session.blocked_reason
        if away is not None:
            return BrokerUnavailable(_no_connection(away))
        if blocked is not None:
            return PublishBlocked(_blocked(blocked), reason=blocked)
        return None

    @property
    def kept_places(self) -> KeptPlaces:
        """The places of settled publishes whose confirms are outstanding. Thread-safe."""
        session = self.session
        return KeptPlaces(session.abandoned_count, session.abandoned_bytes, session.disconnected_reason is None)

    def signs(self, now: float, stuck_after: float, outbox: OutboxSigns | None) -> PublisherSigns:
        """Return the signs of health. Thread-safe. Does not wait."""
        return PublisherSigns(
            changed_at=self._changed_at,
            stuck_after=stuck_after,
            connected=self.connected,
            disconnected_reason=self.session.disconnected_reason or _NO_CHANNEL,
            given_up="" if self.fatal is None else str(self.fatal),
            loop_over=self._io.over,
            unanswered_since=self._watch.check(now, self._io.call_soon),
            patience=self._options.settings.heartbeat,
            work=self.outstanding,
            # A message that is just being taken has no time yet.
            worked_at=max(self._settled_at, self._oldest or now, self.session.trust.taken_at),
            blocked_reason=self.session.blocked_reason,
            blocked_at=self._blocked[1],
            outbox=outbox,
        )

    def _why_not_connected(self, waited: float) -> ReliableMQError | None:
        if self.connected:
            return None
        if self._closed and self.fatal is None:
            return UsageError("this publisher was closed while it was connecting")
        error = self.fatal or self._last_error or BrokerUnavailable(f"no answer within {waited:g} s")
        return copy.copy(error)  # each copy is raised once, as raising adds frames to the traceback

    def _take_no_more(self) -> None:
        """Refuse publishes from now on, and wake all callers that wait. The lock is held."""
        self._closed = self._takes_none = True
        self._notify_change()
        self._refuse_waiting()

    def _state_changed(self) -> None:
        """Update whether a new publish gets a `_refusal`. The lock is held."""
        session = self.session
        self._takes_none = (
            self._closed
            or self.fatal is not None
            or (self._options.raise_when_blocked and bool(session.blocked_reason))
            or (self._options.raise_when_disconnected and session.disconnected_reason is not None)
        )

    def _refusal(self, confirmation: P) -> ReliableMQError:
        if self.fatal is not None:
            return copy.copy(self.fatal)
        if self._closed:
            return UsageError("this publisher is closed; nothing was sent")
        message_id = confirmation.message.message_id
        blocked = self.session.blocked_reason
        if self._options.raise_when_disconnected and not blocked:
            reason = self.session.disconnected_reason or "it was lost a moment ago"
            text = f"{confirmation} was not sent: {_no_connection(reason)}"
            return PublishDisconnected(text, message_id=message_id, reason=reason)
        reason = blocked or ""
        text = f"{confirmation} was not sent: {_blocked(reason)}"
        return PublishBlocked(text, message_id=message_id, reason=reason)

    def _refuse(self, confirmation: P) -> NoReturn:
        raise self._refusal(confirmation)

    def _window_timeout(self, confirmation: P, waited: float) -> PublishUnconfirmed:
        return PublishUnconfirmed(
            f"{confirmation} was never sent: the window ({self.window.max_count} messages, "
            f"{self.window.max_bytes} bytes) was full for {waited} s",
            message_id=confirmation.message.message_id,
            sent=False,
        )

    def _wait_settled_before(self, moment: float, timeout: float) -> Steps[bool]:
        """Wait until every publish before ``moment`` is settled. The lock is held."""
        caller = object()
        try:
            self._flushing[caller] = moment
            settled: bool = yield self._wait_until(lambda: self._settled_before(moment), timeout)
        finally:
            self._flushing.pop(caller, None)
        return settled

    def _settled_before(self, moment: float) -> bool:
        return self._oldest is None or self._oldest > moment

    # On the loop: events of the connection

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Return the steps that make a channel ready."""
        return self._options.setup(server, self._record.listener_for(server))

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Start publishing on an open channel with its topology and confirms set up."""
        self._generation = generation
        if self._record.ready(server):
            self.reconnects += 1
            self.session.connection_replaced()
        now, queues, broker = time.monotonic(), self._record.queues, server.reported_name
        self.session.channel_opened(generation, channel, frame_max, now, queues, broker)
        with self._guard:
            self.connected, self._changed_at = True, time.monotonic()
            self._state_changed()
            self._notify_change()
        self._advance()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Take back the publishes of the lost channel."""
        reply = BrokerReply(loss.code, loss.text) if loss.by_broker and loss.code is not None else None
        self._record.lost(self.session.proven)
        self.session.channel_lost(generation, reply, connection=loss.scope == "connection", text=loss.text)
        with self._guard:
            self.connected, self._changed_at = False, time.monotonic()
            self._state_changed()
            self._refuse_waiting()
        self._advance()

    def disconnected(self, reason: str) -> None:
        """Note the end of a connection whose channel was lost before."""
        self.session.channel_lost(self._generation, None, connection=True, text=reason)
        with self._guard:
            self._state_changed()
            self._refuse_waiting()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Note a failed attempt to connect, and end the channel if it was the last one."""
        with self._guard:
            self._attempts_failed += 1
            self._last_error = error
            self.session.disconnected(str(error))
            if not will_retry:
                self.fatal = error
            self._state_changed()
            self._notify_change()
            self._refuse_waiting()
        if not will_retry:
            self._end()

    def blocked(self, reason: str) -> None:
        """Stop publishing after ``connection.blocked``."""
        logger.warning("publisher %r: the broker blocks publishing: %s", self._name, printable(reason))
        self._blocked = self.blocked_seconds, time.monotonic()
        self.session.blocked(reason)
        with self._guard:
            self._state_changed()
            self._refuse_waiting()

    def unblocked(self) -> None:
        """Resume publishing after ``connection.unblocked``, or the end of the connection."""
        if self.connected:  # else the connection has ended, and its block may continue
            logger.warning("publisher %r: the broker accepts publishes again", self._name)  # at the level of `blocked`
        self._blocked = self.blocked_seconds, None
        self.session.unblocked(time.monotonic())
        with self._guard:
            self._state_changed()
        self._advance()

    def acked(self, tag: int, multiple: bool) -> None:
        """Pass a ``basic.ack`` to the session."""
        self.session.acked(self._generation, tag, multiple, time.monotonic())

    def nacked(self, tag: int, multiple: bool) -> None:
        """Pass a ``basic.nack`` to the session."""
        self.session.nacked(self._generation, tag, multiple, time.monotonic())

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """Pass a ``basic.return`` to the session."""
        try:
            message_id = Properties(properties).message_id
        except CodecError:
            message_id = None
        self.session.returned(self._generation, code, text, message_id)

    def read_finished(self) -> None:
        """Settle all confirms of one socket read together."""
        self._advance()

    def write_drained(self) -> None:
        """Continue writing after the socket has taken the buffered frames."""
        self._advance()

    def _impossible(self, *_: Any, **__: Any) -> None:
        raise AssertionError("an event of a consumer on a publishing channel")

    delivered = got = got_empty = oversized = cancelled = _impossible

    # On the loop: the work

    def _advance(self) -> None:
        """Let the session accept, write and settle publishes, and set the next wake-up.

        After a stall of the loop, the confirms that wait in the socket are read first.
        """
        self._accept_inbox()
        now, due = time.monotonic(), self.session.next_wakeup()
        if due is not None and now - due > _STALLED:
            self._after_stall.set(now + _READ_FIRST, now, self._io.call_later)
        else:
            self._work()

    def _work(self) -> None:
        session, io = self.session, self._io
        now, unsent = time.monotonic(), io.write_buffer_size()
        session.trust.unsent(unsent, now)
        session.tick(now)
        if session.ids.repeated:
            self._log_repeated()
        if session.channel_in_doubt(now):
            doubt = session.doubt
            session.abandon_overdue()
            io.discard(doubt)
        elif session.reopening_due(now):
            text = "publisher %r: every publish has been nacked for a long time; opening another channel"
            logger.warning(text, self._name)
            session.reopening_begun()
            io.reopen_channel()
        else:
            while unsent < _BUFFERED_BYTES and (data := session.data_to_send(now, self.write_bytes)):
                io.write(data)
                unsent = io.write_buffer_size()
                session.trust.unsent(unsent, now)
            if session.round_trip_due(now):
                session.round_trip_begun(now)
                # It waits behind the publishes on the wire, which the confirm timeout limits.
                io.run(round_trip(), self._round_trip_ended, lambda: session.on_wire > 0)
        self._settle()
        self._wakeup.set(session.next_wakeup(), now, self._io.call_later)

    def _round_trip_ended(self, outcome: object) -> None:
        if not isinstance(outcome, Exception):  # after an exception the channel is lost, too
            self.session.round_trip_ended(time.monotonic())
            self._advance()

    def _settle(self) -> None:
        session = self.session
        if not session.settled and not session.freed_count:
            return
        settled, session.settled = session.settled, []
        self._settled_at = time.monotonic()
        unwatched: P | None = None  # the last failure that no caller waits for
        unwatched_count = 0
        confirmed = Outcome.CONFIRMED
        with self._guard:
            for confirmation in settled:
                if confirmation.outcome is not confirmed:
                    if not confirmation.result_observed and not _is_watched(confirmation):
                        unwatched = confirmation
                        unwatched_count += 1
                    if not confirmation.result_observed:
                        self._keep_failure(confirmation)
                    confirmation.settled()
                elif confirmation.callbacks is not None:
                    confirmation.settled()
            self.window.release(session.freed_count, session.freed_bytes)
            session.freed_count = session.freed_bytes = 0
            self._oldest = session.oldest_accepted_at
            if self._oldest is None and (first := self._first_in_inbox()) is not None:
                self._oldest = first.accepted_at
            if self._oldest is None and session.is_empty:
                self.window.clear()
            self._admit_waiting()
            if self._flushing and self._settled_before(min(self._flushing.values())):
                self._notify_change()
        if unwatched is not None:
            self._log_unwatched(unwatched, unwatched_count)

    def _log_unwatched(self, latest: P, count: int) -> None:
        if due := self._unwatched_log.count(count):
            unwatched_logger.warning(
                "publisher %r: failed publishes that no caller waits for: %d; the last: %s",
                self._name,
                due,
                latest.failure(),
                extra=None if latest.trace is None else latest.trace.ids,
            )

    def _log_repeated(self) -> None:
        repeated, self.session.ids.repeated = self.session.ids.repeated, 0
        if due := self._repeated_log.count(repeated):
            logger.warning(
                "publisher %r: %d times, a Message was published that was still outstanding, so each waits until the "
                "one before is settled; make a new Message for each message",
                self._name,
                due,
            )

    def _end(self) -> None:
        """Settle every publish at the end of the channel."""
        self._accept_inbox()
        self.session.abandon_all()
        self._settle()


def _is_watched(confirmation: BaseConfirmation) -> bool:
    """Whether a publish has callbacks other than its trace's."""
    callbacks, trace = confirmation.callbacks, confirmation.trace
    return callbacks is not None and len(callbacks) != (trace is not None and trace.recording)


def _no_connection(reason: str) -> str:
    return f"there is no connection to the broker ({printable(reason)})"


def _blocked(reason: str) -> str:
    return f"the broker has blocked publishing ({printable(reason)})"
