"""The base of the channels to an outbox, which store messages and run the relay.

Both APIs share it. Callers put a message into the queue of the writer, whose thread stores it. The thread of the relay
reads rows and publishes them through the publisher's own channel. Each API adds the waiting of its callers, and its
calls of the outbox, which may hang.

Invariants: every confirmation that ``submit`` returned is settled, by the writer or by a caller that waits for it
beyond its deadline. No user code runs on the threads of the writer and the relay. Every wait of a caller ends, even if
the outbox does not answer.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq._util.threads import DaemonExecutor, start_daemon
from reliable_mq.core.health import OutboxSigns, StoreFailure
from reliable_mq.core.publisher.publication import StoredPublication
from reliable_mq.core.publisher.window import PublishWindow
from reliable_mq.core.statistics import OutboxStatistics
from reliable_mq.engine.channel import BaseChannel
from reliable_mq.errors import BrokerUnavailable, OutboxError, UsageError
from reliable_mq.outbox.relay import OutboxRelay, OutboxWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from reliable_mq.core.outbox import RowSettlement
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.engine.steps import Steps
    from reliable_mq.errors import ConfigurationError
    from reliable_mq.outbox.protocol import Outbox, RowLeases
    from reliable_mq.outbox.relay import RowPublisher
    from reliable_mq.tracing.publishing import SendTrace

logger = get_logger(__name__)

CLOSE_GRACE: Final = 2.0
"""Seconds for threads to end, beyond the caller's own timeout."""

ANSWER_AT_LEAST: Final = 0.5
"""The minimum seconds to wait for the outbox, even if the caller's timeout has passed."""

MAX_HANGING: Final = 8
"""Calls of the outbox that may hang, each on a thread; further ones fail at once."""

_POLL_AFTER: Final = (0.01, 0.25)  # seconds between two polls of the outbox: the shortest and the longest
_POLL_SHARE: Final = 20  # the minimum pause as a multiple of the last poll's time, because polls slow the relay down
_LOG_FAILURES_EVERY: Final = 10.0  # seconds


class BacklogPoller:
    """The polling schedule of an outbox, for a caller that waits until it is empty."""

    def __init__(self) -> None:
        self._shortest, self._longest = _POLL_AFTER
        self._pause = self._shortest
        self._before: tuple[int, float] | None = None  # rows left at the last poll, and its time

    def pause_after(self, left: int, now: float, took: float) -> float:
        """Return the seconds until the next poll.

        The pause is half of the time until the outbox is empty, estimated from the latest rate.

        Args:
            left: The number of rows left.
            now: The current time in seconds, on a monotonic clock.
            took: Seconds that the last poll took.
        """
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        if self._before is not None and left < self._before[0]:
            rows, since = self._before
            pause = max(min(pause, left * (now - since) / (rows - left) / 2), self._shortest)
        self._before = left, now
        return max(pause, _POLL_SHARE * took)


C = TypeVar("C", bound=StoredPublication)


class BaseOutboxChannel(BaseChannel[C]):
    """The channel to one outbox, without the waiting of callers.

    Args:
        outbox: The outbox.
        relay_publisher: The publisher of the relay's rows.
        options: The options of the publisher. Its limits of outstanding messages apply to messages not stored yet.
        measured: Whether to count the rows of the outbox periodically, for metrics.
        guard: A lock for the window, the failures, and the callbacks of all confirmations. Callers may be on other
            threads.

    Attributes:
        begun: Whether the outbox was opened, and storing and relaying have started.
        relay: The relay.
    """

    _made_before_fork = "this publisher was made before fork(): its threads are the parent's; make one in the child"

    def __init__(
        self,
        outbox: Outbox,
        relay_publisher: RowPublisher,
        options: PublisherOptions,
        *,
        measured: bool,
        guard: AbstractContextManager[object],
    ) -> None:
        super().__init__(guard, options.delivery_timeout)
        self.begun = False
        self.outbox = outbox
        self._window = PublishWindow(options.max_outstanding, options.window.max_bytes)
        self._unstored: dict[C, None] = {}  # messages without the writer's answer, in order
        self._answered_at = 0.0  # when the writer last answered, or when the first message without its answer arrived
        self._outbox_closed = False  # or about to be closed
        self._failing: StoreFailure | None = None  # until a message is stored
        self._failure_log = LogLimit(_LOG_FAILURES_EVERY)
        self._left_logged = False  # whether a caller of ``close`` has logged the messages left
        self._calls = DaemonExecutor(f"{options.name}-outbox-call", MAX_HANGING)
        self._closing = f"{options.name}-outbox-close"  # the name of a thread
        self._statistics = statistics = OutboxStatistics()
        self._writer: OutboxWriter[C] = OutboxWriter(
            outbox,
            name=f"{options.name}-outbox",
            on_stored=self._stored,
            on_settled=self._settled,
            statistics=statistics,
        )
        self.relay = OutboxRelay(
            outbox,
            relay_publisher,
            settle=self._writer.settle,
            at_end=self._end_writer,  # nothing else stops it if the event loop ends
            released=self._close_outbox_again,
            limit=options.max_outstanding,
            max_bytes=options.window.max_bytes,
            name=f"{options.name}-relay",
            statistics=statistics,
            measured=measured,
        )

    # For each API to implement

    def start(self, timeout: float) -> Any:
        """Open the outbox, and start storing and relaying. A step.

        Several callers may call it, also again after a failure.

        Raises:
            OutboxError: If the outbox cannot be opened, or does not answer within ``timeout`` seconds.
            UsageError: If the channel is closed, or in a forked child.
        """
        raise NotImplementedError

    def _call_outbox(self, call: Callable[[], Any], deadline: float) -> Any:
        """Call the outbox, and wait for its answer until the deadline. A step.

        After the deadline, waits for a moment.

        Raises:
            TimeoutError: If the outbox does not answer.
        """
        raise NotImplementedError

    def _wait_stored(self, timeout: float) -> Any:
        """Wait for the writer's answer to all earlier messages; return whether it came."""
        raise NotImplementedError

    def _sleep(self, seconds: float) -> Any:
        raise NotImplementedError

    def _refuse_waiting(self) -> None:
        """Accept no more messages, and wake callers that wait."""
        raise NotImplementedError

    def _end_threads(self, deadline: float) -> Any:
        """End the writer and the API's threads or tasks, after the relay. A step.

        Call `_give_up_unstored` when the writer has had its time.
        """
        raise NotImplementedError

    def _stored(self, confirmations: list[C], error: OutboxError | None) -> None:
        """Call `_settle`, now or later. Called on the writer's thread."""
        raise NotImplementedError

    def _settled(self, settlements: list[RowSettlement]) -> None:
        """Wake the relay and the callers that wait for it. Called on the writer's thread."""
        raise NotImplementedError

    def _notify_window(self) -> None:
        """Wake callers that wait for the window or in a flush. The guard is held."""
        raise NotImplementedError

    # For callers

    def give_up(self, confirmation: C) -> None:
        """Settle a message for which the writer has not answered in time."""
        error = OutboxError(
            f"{confirmation} was not stored in time, and may be stored yet: writing to {self.outbox!r} hangs",
            message_id=confirmation.message.message_id,
        )
        error.may_have_arrived = True
        with self._guard:
            if confirmation.outcome is None:
                self._note(error)
                self._fail(confirmation, error)
                confirmation.settled()

    def _store(self, confirmation: C) -> None:
        """Hand a message to the writer. The window has room for it."""
        self._window.take(confirmation.size)
        if not self._unstored:
            self._answered_at = time.monotonic()
        self._unstored[confirmation] = None
        self._writer.store(confirmation, confirmation.row)

    def _give_up_unstored(self) -> None:
        with self._guard:
            for confirmation in self._unstored:
                self.give_up(confirmation)

    @property
    def outstanding(self) -> int:
        """The number of messages submitted and not stored."""
        return max(self._window.count, 0)

    # For both APIs

    def signs(self) -> OutboxSigns:
        """Return the signs of health. Does not block. Thread-safe."""
        error, since = self.relay.trouble
        return OutboxSigns(
            open=True,
            store_failing=self._failing,
            unstored=len(self._unstored),
            answered_at=self._answered_at,
            unanswered_since=self.relay.unanswered_since,
            relay_over=self.relay.ended,
            trouble="" if error is None else str(error),
            trouble_since=since,
        )

    def flush(self, timeout: float) -> Steps[int]:
        """Wait until every message in the outbox is published or set aside.

        Returns the number of messages left after ``timeout`` seconds.

        Raises:
            OutboxError: If the outbox cannot be read.
            TimeoutError: If the outbox does not answer.
            UsageError: If the channel is closed, or is closed in the meantime and messages are left.
        """
        self.check_usable()
        self._check_relayed()
        deadline = time.monotonic() + timeout
        if self._window.count:
            stored = yield self._wait_stored(timeout)
            if not stored and (left := self._window.count):
                return left
        try:
            left = yield from self._wait_relayed(deadline, lambda: True)
        except OutboxError:
            self._check_relayed()  # closing the outbox ends a query that takes long
            raise
        if left:
            self._check_relayed()
        return left

    def close(self, timeout: float, worth_waiting: Callable[[], bool]) -> Steps[None]:
        """Store every submitted message, relay for up to ``timeout`` seconds, and end.

        Relaying continues only while it is ``worth_waiting``. May be interrupted and called again, and by several
        callers.
        """
        self.check_usable()
        deadline = time.monotonic() + timeout
        self._refuse_waiting()
        left = 0
        try:
            stored = yield self._wait_stored(timeout)
            if stored:
                enough = deadline - min(CLOSE_GRACE, timeout / 2)  # the rest is for rows outstanding by then
                left = yield from self._wait_relayed(enough, lambda: not self.relay.ended and worth_waiting())
        except (OutboxError, TimeoutError) as error:
            if not self._outbox_closed:  # otherwise another caller has closed it, which ends a query that takes long
                logger.error("failed to close the publisher of %r in order: %s", self.outbox, error)  # noqa: TRY400  # it says it all
        # Rows in flight to an unreachable broker stay in the outbox.
        self.relay.stop(max(deadline - time.monotonic(), 0.0) if worth_waiting() else 0.0)
        yield self._end_threads(deadline)
        self._log_left(left)
        try:
            yield self._call_outbox(self._close_outbox, deadline)
        except (OutboxError, TimeoutError) as error:
            logger.error("failed to close %r: %s", self.outbox, error)  # noqa: TRY400
        finally:
            self._calls.close()

    def abort(self) -> None:
        """End without waiting, however far the opening is. Stored messages stay.

        The outbox is closed when its threads have ended.
        """
        self._refuse_waiting()
        self.relay.stop(0.0)
        self._writer.stop()
        self._calls.close()
        start_daemon(self._closing, self._close_outbox_later)

    def _wait_relayed(self, deadline: float, worth_waiting: Callable[[], bool]) -> Steps[int]:
        """Wait until no row is left that was stored before; return how many are left.

        Other processes may store rows all the time.
        """
        poller = BacklogPoller()
        up_to: int | None = None
        while True:
            began = time.monotonic()
            left: int
            left, last = yield self._call_outbox(partial(self._backlog, up_to), deadline)
            up_to = last if up_to is None else up_to
            now = time.monotonic()
            if not left or now >= deadline or not worth_waiting():
                return left
            yield self._sleep(min(deadline - now, poller.pause_after(left, now, now - began)))
            self.check_usable()
            if self.relay.ended:  # another caller has closed it
                return left

    def _begin(self, claims: RowLeases) -> None:
        """Start storing and relaying on an open outbox.

        May be called again if it raises, for example because no thread can be started.
        """
        self._writer.start()
        self.relay.start(claims)
        self.begun = True

    def _backlog(self, up_to: int | None) -> tuple[int, int]:
        """Return the backlog of the outbox. Close the outbox if this call reopened it."""
        try:
            return self.outbox.backlog(up_to)
        finally:
            if self._outbox_closed:
                self.outbox.close()

    def _close_outbox(self) -> None:
        self._outbox_closed = True
        self._writer.abandon()
        self.outbox.close()

    def _end_writer(self) -> None:
        """End the writer after its last outcome, and wait for it. For the relay's thread."""
        self._writer.stop()
        self._writer.join(threading.TIMEOUT_MAX)

    def _close_outbox_again(self) -> None:
        """Close the outbox if it was closed before the relay made its last call."""
        if self._outbox_closed:
            self._try_to_close_outbox()

    def _close_outbox_later(self) -> None:
        """Close the outbox when the threads have ended. Runs on a thread without a caller."""
        self.relay.join(CLOSE_GRACE)
        self._writer.join(CLOSE_GRACE)
        self._try_to_close_outbox()

    def _try_to_close_outbox(self) -> None:
        try:
            self._close_outbox()
        except OutboxError as error:
            logger.error("failed to close %r: %s", self.outbox, error)  # noqa: TRY400  # the error says it all
        except Exception:
            logger.exception("failed to close %r", self.outbox)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed; nothing was stored")

    def _check_relayed(self) -> None:
        if self.relay.ended:
            raise UsageError(f"this publisher is closed; what is left stays in {self.outbox!r}, for the next start")

    def _refuse_late(self, confirmation: C) -> NoReturn:
        error = OutboxError(
            f"{confirmation} was not stored: {self._window.count} messages before it were not, either, in time",
            message_id=confirmation.message.message_id,
        )
        with self._guard:
            self._note(error)
            self._statistics.not_stored += 1
        raise error

    def _settle(self, confirmations: Sequence[C], error: OutboxError | None) -> None:
        """Settle messages that the writer has stored or failed to store."""
        with self._guard:
            self._note(error)
            self._answered_at = time.monotonic()
            size = 0
            for confirmation in confirmations:
                self._unstored.pop(confirmation, None)
                size += confirmation.size
                if confirmation.outcome is not None:  # its caller has given it up
                    continue
                if error is None:
                    confirmation.stored(None)
                else:
                    self._fail(confirmation, error.of(str(confirmation), confirmation.message.message_id))
                if error is not None or confirmation.callbacks is not None:
                    confirmation.settled()
            self._window.release(len(confirmations), size)
            self._notify_window()
        if error is not None:
            self._log_failures(len(confirmations), error)

    def observe(self, confirmation: C, trace: SendTrace) -> None:
        """Attach a trace to a message that is not accepted yet."""
        confirmation.trace = trace
        if trace.recording:
            confirmation.callbacks = [partial(self._end_trace, trace, confirmation)]

    def _end_trace(self, trace: SendTrace, confirmation: C) -> None:
        self._call_outside(partial(trace.settled, confirmation, time.time_ns()))

    def _note(self, error: OutboxError | None) -> None:
        """Note whether messages were stored, for `signs`."""
        if error is None:
            self._failing = None
        else:
            now, failing = time.monotonic(), self._failing
            self._failing = StoreFailure(now if failing is None else failing.since, now, str(error))

    def _fail(self, confirmation: C, error: OutboxError) -> None:
        confirmation.stored(error)
        self._statistics.not_stored += 1
        if not confirmation.result_observed:
            self._keep_failure(confirmation)

    def _log_failures(self, count: int, error: OutboxError) -> None:
        if due := self._failure_log.count(count):
            not_stored = "may not be stored" if error.may_have_arrived else "were not stored"
            logger.error("%d messages %s: %s", due, not_stored, error)

    def _log_left(self, left: int) -> None:
        if left and not self._left_logged:
            self._left_logged = True
            logger.warning("%d messages stay in %r and will be published at the next start", left, self.outbox)


def not_open(outbox: Outbox, limit: float) -> OutboxError:
    """Return the error for an outbox that does not answer when it is opened."""
    return OutboxError(f"{outbox!r} was not opened within {limit:g} s: it does not answer; nothing was stored")


def not_configured(error: ConfigurationError) -> BrokerUnavailable:
    """Return the error for rows that wait until the connection can be configured.

    The relay would take the original error for one of the row, and set the row aside.
    """
    return BrokerUnavailable(str(error), permanent=True)
