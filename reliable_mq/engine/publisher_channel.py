"""The channel of a publisher: between its callers, its session and its connection.

The same for both APIs: it runs on the loop of its connection, an I/O thread's or asyncio's. Callers admit a publish to
the window and put it into the inbox; the channel takes the whole inbox, lets the session decide, writes the frames that
the session encodes, and settles the publishes that the session settled. One wake-up serves all that came in meanwhile.
Each API adds its connection and its inbox, and the waiting of its callers.

Invariants:

- the session is touched on the loop alone; no user code runs, and nothing blocks, there;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or at the
  end of the channel;
- state that callers read (the window, failures, whether it is connected) changes under ``lock``.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from reliable_mq._util.logs import LogLimit
from reliable_mq.codec import CodecError, Properties
from reliable_mq.connection.new_queues import QueueRecord
from reliable_mq.core.channel_setup import round_trip
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.health import OutboxSigns, PublisherSigns
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication
from reliable_mq.engine.channel import BaseChannel
from reliable_mq.engine.connection import Wakeup
from reliable_mq.engine.health import LoopWatch
from reliable_mq.errors import BrokerUnavailable, PublishBlocked, PublishDisconnected, PublishUnconfirmed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from reliable_mq.codec import RawDelivery
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.publisher.session import PublisherSession
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.core.statistics import TokenStatistics
    from reliable_mq.engine.connection import BaseConnection
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.tracing.publishing import SendTrace

__all__ = ["CLOSE_GRACE", "BasePublisherChannel", "ObservedPublication", "unwatched_logger"]

logger = logging.getLogger(__name__)
unwatched_logger = logger.getChild("unwatched")
"""Logs the number of failed publishes without a callback and without a caller that waits."""

CLOSE_GRACE = 2.0
"""Seconds for the closing handshake, beyond the caller's own timeout."""

_BUFFERED_BYTES = 512 * 1024  # not yet taken by the socket, above which nothing more is encoded
_LOG_FAILURES_EVERY = 10.0  # seconds, at least, between two log lines about such failures
_SMALL_HEADERS = 1024  # bytes, for which a frame has room beside an id: it holds 4096 at least


class ObservedPublication(Publication):
    """A publish whose user may be notified of its outcome."""

    __slots__ = ()

    def settled(self) -> None:
        """Call the callbacks: the outcome is written. Called under the lock."""
        raise NotImplementedError


P = TypeVar("P", bound=ObservedPublication)


class BasePublisherChannel(BaseChannel[P]):
    """The channel of one publisher, without the waiting of callers.

    Args:
        options: of the publisher.
        lock: guards the state that callers read; they may be on other threads.

    Attributes:
        window: the limits of outstanding publishes.
        session: the publishing session; read-only for others.
        reconnects: connections lost and made again.
        connected: whether the broker takes messages.
        largest_body: as in `ChannelSink`; the body of a return is not read.
    """

    write_bytes: int  # encoded and written in one piece
    _connection_type: ClassVar[type[BaseConnection]]
    _takes_none: bool  # there is a `_refusal` for a publish submitted now

    def __init__(self, options: PublisherOptions, lock: AbstractContextManager[object]) -> None:
        super().__init__(lock)
        self.window = options.window
        self.session: PublisherSession[P] = options.new_session(random.Random())
        self.reconnects = 0
        self.connected = False
        self.largest_body = 0
        self._setup = options.setup
        self._fits_frame = options.limits.fits_frame
        self._record = QueueRecord(options.settings.virtual_host, options.new_queue_grace)
        self._connection_lost = False
        self._delivery_timeout = options.delivery_timeout
        self._raise_when_blocked = options.raise_when_blocked
        self._raise_when_disconnected = options.raise_when_disconnected
        self._oldest: float | None = None  # when the oldest unsettled publish was submitted
        self._woken = False
        self._unwatched_log = LogLimit(_LOG_FAILURES_EVERY)
        self._attempts_failed = 0
        self._last_error: ReliableMQError | None = None
        self._generation = 0
        self._wakeup = Wakeup(self._advance)
        self._watch = LoopWatch()
        self._changed_at = time.monotonic()  # made, connected, or lost
        self._settled_at = self._changed_at
        self._heartbeat = options.settings.heartbeat
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0
        self._state_changed()
        self._io = self._connection_type(
            name=options.name,
            settings=options.settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=options.new_reconnect_policy(),
        )

    # Of each API

    def wait_connected(self, timeout: float, attempts: int = 1, *, at_most: float = float("inf")) -> Any:
        """Wait until it is connected or ``attempts`` more have failed. A step.

        A set-up that goes on (a large topology) is waited for beyond ``timeout``, for ``at_most`` seconds in all.

        Returns:
            The reason why it is not connected, or None. After a permanent error the channel has ended (``fatal``);
            otherwise it goes on trying.
        """
        raise NotImplementedError

    def flush(self, timeout: float) -> Any:
        """Wait until all submitted before is settled; return whether it is. A step."""
        raise NotImplementedError

    def close(self, timeout: float) -> Any:
        """Settle everything in ``timeout`` seconds, or give it up; disconnect. A step."""
        raise NotImplementedError

    def _accept_inbox(self) -> None:
        """Pass the submitted publishes to the session."""
        raise NotImplementedError

    def _first_in_inbox(self) -> P | None:
        """Return the first publish that the session does not have. Called under the lock."""
        raise NotImplementedError

    def _notify_change(self) -> None:
        """Wake callers that wait for the connection or the end. Called under the lock."""
        raise NotImplementedError

    def _notify_settled(self) -> None:
        """Wake callers that wait for the window, or in a flush. Called under the lock."""
        raise NotImplementedError

    def _refuse_waiting(self) -> None:
        """Refuse callers that wait for the window, if none is admitted. Under the lock."""
        raise NotImplementedError

    # For callers

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    def not_reported(self, confirmations: Iterable[P]) -> None:
        """Count failures of these as not looked at: their report will not be made."""
        with self._guard:
            for confirmation in confirmations:
                if confirmation.result_observed:
                    confirmation.result_observed = False
                    if confirmation.outcome not in (None, Outcome.CONFIRMED):
                        self._keep_failure(confirmation)

    def observe(self, confirmation: P, trace: SendTrace) -> None:
        """Record a publish that is not accepted yet."""
        message = confirmation.message
        plain = message.encoded_properties is None and len(trace.plain_head) < _SMALL_HEADERS  # most are: they fit
        if not plain and not self._fits_frame(message, trace.header_bytes, self.session.frame_max):
            trace = trace.without_headers()
        confirmation.trace = trace
        if trace.recording:
            confirmation.callbacks = [*(confirmation.callbacks or ()), partial(self._end_trace, trace, confirmation)]

    def _end_trace(self, trace: SendTrace, confirmation: P) -> None:
        if confirmation.outcome is Outcome.CONFIRMED:
            seconds = time.monotonic() - confirmation.accepted_at
            self.session.statistics.confirm_seconds.exemplify(seconds, trace.ids, time.time())
        self._call_outside_later(partial(trace.settled, confirmation, time.time_ns(), self._io.peer))

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled."""
        raise NotImplementedError

    @property
    def stalled_seconds(self) -> float | None:
        """For how long the event loop has stood still; None without one."""
        return None

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
        """Seconds for which the broker has blocked publishing, up to now."""
        since = self._blocked_since
        return self._blocked_seconds + (0.0 if since is None else time.monotonic() - since)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled publish was submitted, or 0. For any thread."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(time.monotonic() - oldest, 0.0)

    @property
    def tokens(self) -> TokenStatistics:
        """Counts of renewed tokens."""
        return self._io.tokens

    def signs(self, now: float, stuck_after: float, outbox: OutboxSigns | None) -> PublisherSigns:
        """Return the signs of health. Any thread; does not wait."""
        return PublisherSigns(
            changed_at=self._changed_at,
            stuck_after=stuck_after,
            connected=self.connected,
            disconnected_reason=self.session.disconnected_reason,
            given_up="" if self.fatal is None else str(self.fatal),
            loop_over=self._io.over,
            unanswered_since=self._watch.look(now, self._io.call_soon),
            patience=self._heartbeat,
            work=self.outstanding,
            worked_at=max(self._settled_at, self._oldest or 0.0),
            blocked_reason=self.session.blocked_reason,
            blocked_at=self._blocked_since,
            outbox=outbox,
        )

    def _check_not_forked(self) -> None:
        if self.forked:
            raise UsageError(
                "this publisher was made before fork(): its connection belongs to the parent; make one in the child"
            )

    def _why_not_connected(self, waited: float) -> ReliableMQError | None:
        if self.connected:
            return None
        if self._closed and self.fatal is None:
            return UsageError("this publisher was closed while it was connecting")
        error = self.fatal or self._last_error or BrokerUnavailable(f"no answer within {waited:g} s")
        return copy.copy(error)  # each is raised once: raising adds frames to its traceback

    def _take_no_more(self) -> None:
        """Refuse publishes from now on. Under the lock."""
        self._closed = self._takes_none = True

    def _state_changed(self) -> None:
        """Note whether there is a `_refusal` for publishes from now on. Under the lock."""
        session = self.session
        self._takes_none = (
            self._closed
            or self.fatal is not None
            or (self._raise_when_blocked and bool(session.blocked_reason))
            or (self._raise_when_disconnected and session.disconnected_reason is not None)
        )

    def _refusal(self, confirmation: P) -> ReliableMQError:
        if self.fatal is not None:
            return copy.copy(self.fatal)
        if self._closed:
            return UsageError("this publisher is closed; nothing was sent")
        message_id = confirmation.message.message_id
        blocked = self.session.blocked_reason
        if self._raise_when_disconnected and not blocked:
            reason = self.session.disconnected_reason or "it was lost a moment ago"
            text = f"{confirmation} was not sent: there is no connection to the broker ({printable(reason)})"
            return PublishDisconnected(text, message_id=message_id, reason=reason)
        return PublishBlocked(
            f"{confirmation} was not sent: the broker has blocked publishing ({blocked or ''})",
            message_id=message_id,
            reason=blocked or "",
        )

    def _refuse(self, confirmation: P) -> NoReturn:
        raise self._refusal(confirmation)

    def _window_timeout(self, confirmation: P, waited: float) -> PublishUnconfirmed:
        return PublishUnconfirmed(
            f"{confirmation} was never sent: the window ({self.window.max_count} messages, "
            f"{self.window.max_bytes} bytes) was full for {waited} s",
            message_id=confirmation.message.message_id,
            sent=False,
        )

    def _settled_before(self, moment: float) -> bool:
        return self._oldest is None or self._oldest > moment

    # On the loop: events of the connection

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Return the steps that make a channel ready."""
        return self._setup(server, self._record.maker(server))

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Publish: a channel is open, the topology declared, confirms are selected."""
        self._generation = generation
        self.reconnects += self._connection_lost
        self._connection_lost = False
        if self._record.ready(server):
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
        self._connection_lost = loss.scope == "connection"
        self._advance()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Note a failed attempt to connect; end if it was the last."""
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
        """Stop publishing: ``connection.blocked``."""
        logger.warning("the broker blocks publishing: %s", printable(reason))
        self._blocked_since = time.monotonic()
        self.session.blocked(reason)
        with self._guard:
            self._state_changed()
            self._refuse_waiting()

    def unblocked(self) -> None:
        """Publish again: ``connection.unblocked``."""
        logger.warning("the broker takes publishes again")  # where whoever read that it blocks finds it
        self._blocked_seconds, self._blocked_since = self.blocked_seconds, None
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
        """Settle together all confirms that were read from the socket at once."""
        self._advance()

    def write_drained(self) -> None:
        """Write on: the socket has taken the buffered frames."""
        self._advance()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a delivery on a publishing channel")

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-ok on a publishing channel")

    def got_empty(self) -> None:
        """Never: this channel gets nothing."""
        raise AssertionError("a get-empty on a publishing channel")

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a delivery on a publishing channel")

    def cancelled(self, consumer_tag: str) -> None:
        """Never: this channel consumes nothing."""
        raise AssertionError("a cancel on a publishing channel")

    # On the loop: the work

    def _advance(self) -> None:
        """Let the session work: accept, write, settle, set the next wake-up."""
        session, io = self.session, self._io
        self._accept_inbox()
        now = time.monotonic()
        session.tick(now)
        if session.channel_in_doubt(now):
            io.discard(session.doubt)
        else:
            while io.write_buffer_size() < _BUFFERED_BYTES and (data := session.data_to_send(now, self.write_bytes)):
                io.write(data)
            if session.round_trip_due(now):
                session.round_trip_begun(now)
                io.run(round_trip(), self._round_trip_ended)
        self._settle()
        self._wakeup.set(session.next_wakeup(), now, self._io.call_later)

    def _round_trip_ended(self, outcome: object) -> None:
        if not isinstance(outcome, Exception):  # otherwise the channel is lost, too
            self.session.round_trip_ended(time.monotonic())
            self._advance()

    def _settle(self) -> None:
        session = self.session
        if not session.settled and not session.freed_count:
            return
        settled, session.settled = session.settled, []
        self._settled_at = time.monotonic()
        unwatched: P | None = None  # the last that nobody waits for
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
            self._notify_settled()
        if unwatched is not None:
            self._log_unwatched(unwatched, unwatched_count)

    def _log_unwatched(self, latest: P, count: int) -> None:
        if due := self._unwatched_log.count(count):
            unwatched_logger.warning(
                "%d publishes failed that nobody waits for; the last: %s",
                due,
                latest.failure(),
                extra=None if latest.trace is None else latest.trace.ids,
            )

    def _end(self) -> None:
        """Settle everything: the channel ends."""
        self._accept_inbox()
        self.session.abandon_all()
        self._settle()


def _is_watched(publication: Publication) -> bool:
    """Whether anything but its trace is called when it is settled."""
    return publication.callbacks is not None and len(publication.callbacks) != (publication.trace is not None)
