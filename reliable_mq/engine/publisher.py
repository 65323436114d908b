"""The base of the publishers of both APIs.

It has the options, the states, the readings, and the steps of the waiting calls (`reliable_mq.engine.steps`). Each API
adds how its callers wait. A publisher has a channel to the broker and, with an outbox, a channel to the outbox. Each is
created when it is first needed. A channel is *started* from the moment when it may have threads, tasks or sockets that
must be ended. It is *open* once callers may use it.

In the sync API a signal handler may interrupt any step, and use or close the same publisher. So each channel is stored
before it runs, the lock is held only briefly, and a call that an exception ends leaves nothing open.

Invariants: nothing is published or stored after a publisher has left `PublisherState.OPEN`. A failure that no user has
seen is raised once.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from reliable_mq._util.hooks import OfOneProcess
from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import declared_by, seconds
from reliable_mq.codec import encode_properties
from reliable_mq.core.health import Health, OutboxSigns, PublisherSigns, health_of
from reliable_mq.core.outbox import KeptPlaces, NewRow
from reliable_mq.core.publisher.publication import PublishReport, StoredPublication
from reliable_mq.core.statistics import PublisherStatistics
from reliable_mq.engine.confirmation import BaseConfirmation
from reliable_mq.engine.outbox_channel import BaseOutboxChannel, not_configured
from reliable_mq.engine.publisher_channel import BasePublisherChannel
from reliable_mq.engine.publisher_options import PublisherOptions
from reliable_mq.errors import ConfigurationError, PublishError, UsageError
from reliable_mq.message import Message
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reliable_mq._util.validation import Duration
    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.engine.steps import Steps
    from reliable_mq.metrics.registry import Reading
    from reliable_mq.outbox.protocol import Outbox
    from reliable_mq.tracing.publishing import SendTrace

CLOSE_TIMEOUT: Final = 30.0  # seconds
FOR_EVER: Final = float("inf")

logger = get_logger(__name__)


class PublisherState(enum.Enum):
    """The life of a publisher, which runs once."""

    OPEN = "takes messages, and connects with the first one"
    STARTING = "a channel is being started by this thread, which a signal handler may have interrupted"
    CLOSING = "takes no more messages; settles outstanding messages, or was interrupted in doing so"
    CLOSED = "everything is settled, and failures were raised"


_S = PublisherState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[PublisherState, set[PublisherState]]]] = {
    "a channel is needed": {_S.OPEN: {_S.STARTING}},
    "the channel is started, or cannot be": {_S.STARTING: {_S.OPEN}},
    "close": {_S.OPEN: {_S.CLOSING}, _S.STARTING: {_S.CLOSING}},
    "everything is settled, or the time to close is over": {_S.CLOSING: {_S.CLOSED}},
}
del _S

ConfirmationT = TypeVar("ConfirmationT", bound=BaseConfirmation)
StoredT = TypeVar("StoredT", bound=StoredPublication)
ChannelT = TypeVar("ChannelT", bound=BasePublisherChannel[Any])
OutboxChannelT = TypeVar("OutboxChannelT", bound=BaseOutboxChannel[Any])


class BasePublisher(OfOneProcess, Generic[ConfirmationT, StoredT, ChannelT, OutboxChannelT]):
    """A publisher. See `PublisherOptions` for its arguments."""

    _confirmation: ClassVar[type[Any]]  # ConfirmationT
    _stored_confirmation: ClassVar[type[Any]]  # StoredT
    _channel_type: ClassVar[type[Any]]  # ChannelT
    _state = PublisherState.CLOSED  # until ``__init__`` has finished
    _channel: ChannelT | None = None  # to the broker; open, so every host has had its first attempt
    _started_channel: ChannelT | None = None  # becomes _channel once it is open
    _former: ChannelT | None = None  # the last channel that ended; the next one continues its counts
    _openers = 0  # callers that wait for the channel to open
    _outbox_channel: OutboxChannelT | None = None  # open
    _started_outbox_channel: OutboxChannelT | None = None  # becomes _outbox_channel once it is open

    @declared_by(PublisherOptions.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._changed_at = time.monotonic()  # when it was created or closed
        self._lock = threading.RLock()  # guards state and channels against callers on other threads; held only briefly
        self._options = PublisherOptions(*args, **kwargs)
        self._outbox = self._options.outbox
        self._tracer = self._options.new_tracer()
        registry = self._options.registry
        self._registration = None if registry is None else register(registry, self._readings)
        self._release()  # from its registry, which would keep it alive though nothing is open
        self._state = PublisherState.OPEN

    @property
    def outstanding(self) -> int:
        """The number of messages submitted and not settled (with an outbox: not stored)."""
        channel = self._outbox_channel or self._channel
        return 0 if channel is None else channel.outstanding

    @property
    def connected(self) -> bool:
        """Whether the broker takes messages now, as far as is known."""
        return self._channel is not None and self._channel.connected

    @property
    def blocked(self) -> str | None:
        """The broker's reason for blocking publishing now, or None.

        The broker blocks publishing under a memory or disk alarm.
        """
        return None if self._channel is None else self._channel.session.blocked_reason

    @property
    def statistics(self) -> PublisherStatistics:
        """The counts since the publisher was opened.

        With an outbox, a message is settled when it is confirmed. The relay counts its other attempts at rows.
        """
        channel = self._channel or self._former
        statistics = PublisherStatistics() if channel is None else channel.session.statistics
        return statistics if self._outbox is None else replace(statistics, nacked=0, returned=0, refused=0, unknown=0)

    def health(self, *, stuck_after: Duration | None = None) -> Health:
        """Return whether the publisher is live, ready and progressing, for probes.

        Does not block. Thread-safe, also with asyncio. If the event loop or I/O thread stalls for a heartbeat,
        the second of two calls detects it, because the first one schedules a call on it.

        Args:
            stuck_after: Seconds in which no outstanding message is settled, after which the publisher is not
                progressing. None for ``confirm_timeout``.

        Raises:
            ConfigurationError: If ``stuck_after`` is not a duration.
        """
        options = self._options
        limit = options.confirm_timeout if stuck_after is None else seconds("stuck_after", stuck_after, positive=True)
        closed = ""
        if self._is_forked:
            closed = "made before fork(): it belongs to the parent process"
        elif self._is_closed:
            closed = "closed" if self._state is PublisherState.CLOSED else "closing"
        now, channel = time.monotonic(), self._started_channel
        outbox = None if self._outbox is None else self._outbox_signs()
        if channel is not None and not closed:
            signs = channel.signs(now, limit, outbox)
        else:
            signs = PublisherSigns(
                changed_at=self._changed_at, stuck_after=limit, closed=closed, started=False, outbox=outbox
            )
        return health_of(signs, now, time.time())

    def _outbox_signs(self) -> OutboxSigns:
        channel = self._outbox_channel
        return OutboxSigns(open=False) if channel is None else channel.signs()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "connected" if self.connected else "not connected"
        hosts = ", ".join(map(str, self._options.settings.endpoints))
        return f"<{type(self).__name__} {self._options.name!r} to {hosts}: {state}>"

    # Checks

    @property
    def _is_closed(self) -> bool:
        return self._state in (PublisherState.CLOSING, PublisherState.CLOSED)

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left to close. In a forked child the parent owns everything."""
        return self._state is PublisherState.CLOSED or self._is_forked

    def _check_process(self) -> None:
        if self._is_forked:
            raise UsageError("this publisher was made before fork(), which may have left it half open; make one here")

    def _check_open(self, consequence: str = ": make another") -> None:
        if self._is_closed:
            raise UsageError(f"this publisher is closed{consequence}")

    def _leave_open(self) -> None:
        """Accept no more messages."""
        self._state = PublisherState.CLOSING
        self._changed_at = time.monotonic()

    def _check_usable(self) -> None:
        """Raise UsageError if the publisher cannot be used."""
        self._check_open()

    # For each API to implement

    def _outbox_channel_to_start(self, outbox: Outbox) -> OutboxChannelT:
        """Return the started outbox channel, or a new one. The lock is held."""
        raise NotImplementedError

    def _keep(self) -> None:
        """Keep the publisher alive, and in its registry, until `_release`."""
        if self._registration is not None:
            self._registration.open()

    def _release(self) -> None:
        """Note that nothing is left to close."""
        if self._registration is not None:
            self._registration.close()

    # Messages in flight

    def _new_confirmation(
        self,
        channel: Any,  # ChannelT, or OutboxChannelT with an outbox
        message: Message,
        exchange: str,
        key: str,
        timeout: Duration | None,
        reported: bool,
        begun: tuple[float, SendTrace | None] | None = None,
    ) -> ConfirmationT:
        """Check a message to submit on an open channel, and return its confirmation.

        ``reported`` means that the caller receives the failure, so that closing does not raise it. ``begun`` is when
        the message was accepted, and its trace, if that was before the channel was open.
        """
        accepted_at = time.monotonic() if begun is None else begun[0]
        limit = None if timeout is None else seconds("timeout", timeout)
        if self._outbox is not None:
            stored: ConfirmationT = self._new_stored(channel, message, exchange, key, accepted_at, limit)
            return stored
        options, tracer = self._options, self._tracer
        trace = None
        if begun is not None:
            trace = begun[1]
        elif tracer is not None:
            trace = tracer.begin(message, exchange, key)
        try:
            size = options.limits.check(message, exchange, key, channel.session.frame_max)
            confirmation: ConfirmationT = self._confirmation(
                message, exchange, key, options.mandatory, size, accepted_at, limit, channel
            )
            confirmation.result_observed = reported
            if trace is not None:
                channel.observe(confirmation, trace)
        except BaseException as error:
            if trace is not None:
                trace.failed(error)
            raise
        return confirmation

    def _first_confirmation(
        self, message: Message, exchange: str, key: str, timeout: Duration | None, reported: bool
    ) -> Steps[ConfirmationT]:
        """Open the channel for a message, and return the confirmation of the message.

        The confirmation gets an explicit timeout, because messages accepted later may be submitted first.
        """
        accepted_at = time.monotonic()
        limit = self._options.delivery_timeout if timeout is None else seconds("timeout", timeout)
        trace = None
        if self._outbox is None and self._tracer is not None:
            trace = self._tracer.begin(message, exchange, key)
        opening: Steps[Any] = self._open(limit) if self._outbox is None else self._open_outbox(self._outbox, limit)
        try:
            channel = yield from opening
        except BaseException as error:
            if trace is not None:
                trace.failed(error)
            raise
        return self._new_confirmation(channel, message, exchange, key, limit, reported, (accepted_at, trace))

    def _new_stored(
        self, channel: Any, message: Message, exchange: str, key: str, accepted_at: float, limit: float | None
    ) -> Any:
        """Return the confirmation of a message that is to be stored."""
        options, broker = self._options, self._channel
        frame_max = options.settings.frame_max if broker is None else broker.session.frame_max
        size = options.limits.check(message, exchange, key, frame_max)
        ordering_key = channel.outbox.ordering_key(message, exchange, key)
        confirmation = self._stored_confirmation(
            message, exchange, key, options.mandatory, size, accepted_at, limit, channel
        )
        trace = None if self._tracer is None else self._tracer.begin(message, exchange, key, operation="create")
        if trace is not None:
            with trace:
                channel.observe(confirmation, trace)
                if options.limits.fits_frame(message, trace.header_bytes, frame_max):
                    message = Message.from_wire(message.body, encode_properties(message, trace.headers))
        confirmation.row = NewRow(message, exchange, key, options.mandatory, ordering_key)
        return confirmation

    def _open_for_relay(self) -> Steps[ChannelT]:
        """Return an open channel for rows of the outbox. Replace a channel that has ended."""
        try:
            channel = self._channel or (yield from self._open(FOR_EVER))
            if channel.fatal is not None:  # the cause may have been fixed; rows wait for that
                with self._lock:
                    if self._channel is channel:
                        self._former, self._channel, self._started_channel = channel, None, None
                yield channel.close(0)
                channel = yield from self._open(FOR_EVER)
        except ConfigurationError as error:
            raise not_configured(error) from error
        return channel

    def _kept_places(self) -> KeptPlaces:
        return KeptPlaces(connected=False) if self._channel is None else self._channel.kept_places

    def _new_relayed(self, channel: ChannelT, row: OutboxRow) -> ConfirmationT:
        """Return the confirmation of a row of the outbox, for the relay."""
        size = self._options.limits.check(row.message, row.exchange, row.routing_key, channel.session.frame_max)
        confirmation: ConfirmationT = self._confirmation(
            row.message, row.exchange, row.routing_key, row.mandatory, size, time.monotonic(), None, channel
        )
        confirmation.in_doubt = row.possible_duplicate
        confirmation.once = True  # the outbox has its own retries
        confirmation.result_observed = True
        if self._tracer is not None:  # only in the trace context of the message
            trace = self._tracer.begin(row.message, row.exchange, row.routing_key, ambient=self._tracer.apart)
            if trace is not None:
                channel.observe(confirmation, trace)
        return confirmation

    @contextmanager
    def _relaying(self, confirmation: ConfirmationT) -> Iterator[None]:
        """Submit a row. A channel that has just ended is no flaw of the row."""
        try:
            yield
        except BaseException as error:
            self._not_accepted(confirmation, error)
            if isinstance(error, ConfigurationError):
                raise not_configured(error) from error
            raise

    @contextmanager
    def _reporting(self) -> Iterator[ReportBuilder[ConfirmationT]]:
        """Build the report of a ``publish_many``. If the block raises, hide no failure."""
        report = ReportBuilder[ConfirmationT](self._options.max_outstanding, stored=self._outbox is not None)
        try:
            yield report
        except BaseException as error:
            self._not_reported((*report.failed_confirmations, *report.outstanding))
            if report.rejected:
                message, failure = report.rejected[0]
                rest = f"of the messages before; the first is {message.message_id!r}: {failure}"
                error.add_note(f"publish_many() could not submit {len(report.rejected)} {rest}")
            if self._state is PublisherState.CLOSED and (failures := self._take_failures()) is not None:
                error.add_note(f"publish_many() was ended by a close, which did not raise this: {failures}")
            raise

    def _not_accepted(self, confirmation: ConfirmationT, error: BaseException) -> None:
        """End the span of a message whose submission raised."""
        if confirmation.trace is not None:
            confirmation.trace.failed(error)
        self._not_reported((confirmation,))

    def _not_reported(self, confirmations: Iterable[ConfirmationT]) -> None:
        """Note that no caller receives the outcomes. The messages may still be published."""
        if self._channel is not None and self._outbox is None:
            for confirmation in confirmations:
                self._channel.not_reported(confirmation)

    # Opening

    def _connect(self) -> Steps[None]:
        self._check_usable()
        if self._outbox is not None:
            yield from self._open_outbox(self._outbox, None)
        if self._channel is None:
            yield from self._open(FOR_EVER, required=True)
            return
        error = yield from self._channel.wait_connected(FOR_EVER)
        if error is not None:
            raise error

    def _enter(self) -> Steps[None]:
        self._check_usable()
        if self._outbox is not None:
            yield from self._open_outbox(self._outbox, None)
        elif self._channel is None:
            yield from self._open(FOR_EVER)

    def _open_outbox(self, outbox: Outbox, timeout: float | None) -> Steps[OutboxChannelT]:
        """Return the open channel to the outbox, with its relay.

        Waits for ``timeout`` seconds at most. None for the delivery timeout of a message.
        """
        self._check_process()
        with self._lock:
            if self._outbox_channel is not None:
                return self._outbox_channel
            self._check_open("; nothing was stored")
            channel = self._started_outbox_channel = self._outbox_channel_to_start(outbox)
        yield channel.start(self._options.delivery_timeout if timeout is None else timeout)  # may hang: no lock
        with self._lock:
            if self._outbox_channel is None and not self._is_closed:
                self._outbox_channel = channel
                self._keep()
        return channel

    def _open(self, timeout: float, *, required: bool = False) -> Steps[ChannelT]:
        """Connect, and wait until every host has had its first attempt.

        Waits for ``timeout`` seconds at most. Raises an error if no further attempt can help, or if a connection is
        ``required`` and there is none.
        """
        self._check_process()
        with self._lock:
            self._check_open("; nothing was sent")
            channel = self._started_channel or self._start()
            self._openers += 1
        try:
            error = yield from channel.wait_connected(timeout)
        except BaseException:
            with self._lock:
                self._openers -= 1
            raise
        with self._lock:
            self._openers -= 1
            if error is None or not (required or channel.fatal is not None):
                self._channel = channel
                return channel
            useless = self._started_channel is channel and self._channel is None and not self._openers
            if useless:
                if self._outbox is not None:  # its relay tries again, so the readings go on
                    self._former = channel
                self._not_started()
        if useless:
            yield channel.close(0)
        raise error

    def _start(self) -> ChannelT:
        """Start a channel. The lock is held."""
        if self._state is PublisherState.STARTING:
            raise UsageError("this publisher is just being opened, by what this signal handler has interrupted")
        self._state = PublisherState.STARTING
        try:
            channel: ChannelT = self._channel_type(self._options)
            if self._former is not None:
                channel.continue_counts(self._former)
            self._started_channel = channel  # stored before it runs
            self._keep()
            channel.start()
        except BaseException:
            self._not_started()
            raise
        finally:
            if self._state is PublisherState.STARTING:  # otherwise a signal handler has closed the publisher
                self._state = PublisherState.OPEN
        return channel

    def _not_started(self) -> None:
        """Forget a channel that could not be opened. The lock is held."""
        self._started_channel = None
        if self._started_outbox_channel is None:  # otherwise messages may still have to be stored, and relayed
            self._release()

    # Flushing and closing

    def _flush(self, timeout: Duration | None) -> Steps[None]:
        limit = FOR_EVER if timeout is None else seconds("timeout", timeout)
        if self._outbox is not None:
            outbox_channel = yield from self._open_outbox(self._outbox, None if timeout is None else limit)
            if left := (yield from outbox_channel.flush(limit)):
                broker = self._started_channel
                cause = outbox_channel.relay.error or (None if broker is None else broker.obstacle)
                raise TimeoutError(f"{left} messages are still in {self._outbox!r} after {limit:g} s") from cause
        elif (channel := self._channel) is not None:
            flushed = yield from channel.flush(limit)
            if not flushed:
                raise TimeoutError(f"{channel.outstanding} messages are still outstanding after {limit:g} s")

    def _close(self, timeout: Duration) -> Steps[None]:
        limit = seconds("timeout", timeout)
        if self._is_over:
            return
        with self._lock:
            started = self._started_outbox_channel
            if self._outbox_channel is None and started is not None and started.begun:
                self._outbox_channel = started  # opening it was interrupted, or is about to end
        if self._outbox_channel is not None:
            self._outbox_channel.check_closable()
            yield from self._outbox_channel.close(limit, self._broker_may_answer)
            limit = 0.0  # unpublished messages stay in the outbox
        elif started is not None:  # not open yet
            started.abort()
        if self._started_channel is not None:
            self._started_channel.check_closable()
        with self._lock:
            if not self._is_closed:
                self._leave_open()
            channel = self._started_channel
        blocked = None if channel is None else (yield channel.close(limit))
        self._release()
        self._raise_unobserved(blocked)

    def _broker_may_answer(self) -> bool:
        """Return whether the broker is connected, or has not been tried yet."""
        return self.connected or (self._started_channel is not None and not self._started_channel.tried)

    def _raise_unobserved(self, blocked: PublishError | None) -> None:
        """Finish a close, and raise the failures that no user has seen, or ``blocked``."""
        self._state = PublisherState.CLOSED
        unobserved = self._take_failures()
        if blocked is not None and self._outbox is None:  # otherwise the messages are rows
            raise blocked from unobserved
        if unobserved is not None:
            raise unobserved

    def _take_failures(self) -> PublishError | None:
        channel = self._outbox_channel or self._started_channel
        return None if channel is None else channel.take_failures()

    def _left_unconfirmed(self, error: PublishError, exc_type: type[BaseException] | None) -> None:
        """Raise the error of leaving a ``with`` block, or log it if the block raised."""
        if exc_type is None:
            raise error
        logger.error("leaving a publisher because of %s, with messages unconfirmed: %s", exc_type.__name__, error)

    def _readings(self) -> Iterator[Reading]:
        name, channel = self._options.name, self._channel or self._former
        yield from readings((name,), None if channel is None else channel.status, self.statistics)
        if self._outbox_channel is not None:
            relay = self._outbox_channel.relay
            yield from readings((name,), relay.own_status, relay.status, relay.statistics)


class ReportBuilder(Generic[ConfirmationT]):
    """A builder of the report of one ``publish_many`` of any length.

    It keeps only outstanding messages and failures.

    Args:
        max_outstanding: The publisher's maximum number of outstanding messages.
        stored: Whether the outcome of a message is that of storing it.

    Attributes:
        outstanding: The confirmations that are not collected yet, in order.
        failed_confirmations: The collected confirmations that have failed.
        rejected: The messages that could not be submitted, each with its error.
    """

    def __init__(self, max_outstanding: int, *, stored: bool) -> None:
        self.outstanding: deque[ConfirmationT] = deque()
        self.failed_confirmations: list[ConfirmationT] = []
        self.rejected: list[tuple[Message, PublishError]] = []
        self._sweep_at = 2 * max_outstanding
        self._stored = stored
        self._successes = 0
        self._failures: list[tuple[Message, PublishError]] = []

    def submitted(self, confirmation: ConfirmationT) -> None:
        """Add a submitted message."""
        outstanding = self.outstanding
        outstanding.append(confirmation)
        while outstanding and outstanding[0].outcome is not None:
            self._collect(outstanding.popleft())
        if len(outstanding) > self._sweep_at:  # a slow message is in front: keep only unsettled ones
            self.outstanding = deque()
            for one in outstanding:
                if one.outcome is None:
                    self.outstanding.append(one)
                else:
                    self._collect(one)

    def failed(self, message: Message, error: PublishError) -> None:
        """Add a message that could not be submitted."""
        self.rejected.append((message, error))
        self._failures.append((message, error))

    def report(self) -> PublishReport:
        """Return the report of all messages, which waits for unsettled confirmations."""
        for confirmation in self.outstanding:
            self._collect(confirmation)
        failures = tuple(self._failures)
        if self._stored:
            return PublishReport(0, failures, stored=self._successes)
        return PublishReport(self._successes, failures)

    def _collect(self, confirmation: ConfirmationT) -> None:
        error = confirmation.exception()
        if error is None:
            self._successes += 1
        else:
            self.failed_confirmations.append(confirmation)
            self._failures.append((confirmation.message, error))
