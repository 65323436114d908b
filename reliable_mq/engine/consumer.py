"""The base of the consumers of both APIs.

It has the options, the state, the metrics and the parts of a consumer. The parts are a subscription, which has the
connection and the session; one or two pools that run the handler; and a publisher for retries and dead letters, which
has a connection of its own. An API adds how its callers wait.

Invariants: a consumer runs once; a start that fails leaves nothing behind, and may be tried again.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from reliable_mq._util.validation import Duration, declared_by, seconds, whole_number
from reliable_mq.core.consumer.handler import is_coroutine_function
from reliable_mq.core.health import ConsumerSigns, Health, health_of
from reliable_mq.core.statistics import ConsumerStatistics, ConsumerStatus, Histogram
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.subscription import BaseSubscription, HandlerPool
from reliable_mq.engine.workers import UNANSWERED
from reliable_mq.errors import UsageError
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reliable_mq.metrics.registry import Reading

__all__ = ["END_TIMEOUT", "BaseConsumer", "RunState"]

logger = logging.getLogger(__name__)

END_TIMEOUT: Final = 5.0  # seconds for threads and tasks that have nothing more to do
_STUCK_AFTER: Final = 300.0  # seconds
_SETTLE_AT_LEAST: Final = 1.0  # seconds for retries of settlements, though handlers have used up the time to stop


class RunState(enum.Enum):
    """The life of a consumer, which runs once."""

    IDLE = "nothing runs: it was not started yet, or could not be"
    STARTED = "consumes, by connect or get"
    ENTERED = "consumes, in run or with, of which there may be one"
    STOPPED = "was stopped; running handlers end"
    FINISHED = "nothing is left"


_S = RunState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[RunState, set[RunState]]]] = {
    "connect, or get": {_S.IDLE: {_S.STARTED}},
    "run, or with": {_S.IDLE: {_S.ENTERED}, _S.STARTED: {_S.ENTERED}},
    "the start fails": {_S.STARTED: {_S.IDLE}},
    "stop, or an error for good": {_S.IDLE: {_S.STOPPED}, _S.STARTED: {_S.STOPPED}, _S.ENTERED: {_S.STOPPED}},
    "the handlers have ended": {_S.STOPPED: {_S.FINISHED}},
}
del _S

SubscriptionT = TypeVar("SubscriptionT", bound=BaseSubscription)
PoolT = TypeVar("PoolT", bound=HandlerPool)


class BaseConsumer(Generic[SubscriptionT, PoolT]):
    """A consumer; see `ConsumerOptions` for its arguments."""

    _subscription_type: ClassVar[Any]  # SubscriptionT, as the next one
    _pull_subscription_type: ClassVar[Any]
    _republisher_type: ClassVar[Any]
    _publisher_type: ClassVar[Any]
    _state = RunState.IDLE
    _subscription: SubscriptionT | None = None
    _pools: tuple[PoolT, ...] = ()
    _stop_by: float | None = None  # on the monotonic clock

    @declared_by(ConsumerOptions.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made_in = os.getpid()
        self._changed_at = time.monotonic()  # made, or stopped
        self._lock = threading.RLock()  # for the four above; held for moments only, and again by a signal handler
        self._options = ConsumerOptions(*args, **kwargs)
        self._check_options(self._options)
        registry = self._options.registry
        self._registration = None if registry is None else register(registry, self._readings)

    def _check_options(self, options: ConsumerOptions) -> None:
        """Refuse options that this API cannot serve."""

    def _pool_type(self) -> Any:
        """Return the class of the pools that run the handler."""
        raise NotImplementedError

    def stop(self) -> None:
        """Begin to stop and return at once. Any thread, handlers and signal handlers too.

        `run` returns, or the end of ``with`` is reached, when running handlers have ended.
        """
        with self._lock:
            if not self._is_stopped:
                self._changed_at = time.monotonic()
            if self._state is not RunState.FINISHED:
                self._state = RunState.STOPPED
            self._stop_by = self._stop_by or time.monotonic() + self._options.stop_timeout
            subscription = self._subscription
        if subscription is not None:
            subscription.stop()

    @property
    def prefetch(self) -> int:
        """Deliveries that may be unacked.

        Setting it takes effect at once; for a while both limits may add up. On a `Queue` with
        ``single_active_consumer=True`` it takes effect once nothing is unacked here for a moment, or with the next
        channel: a new subscription gives the role away. A queue given by its name is not known to be one.
        """
        return self._options.prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int) -> None:
        with self._lock:
            self._options.change_prefetch(prefetch)
            subscription = self._subscription
        if subscription is not None:
            subscription.prefetch_changed()

    @property
    def connected(self) -> bool:
        """Whether it is subscribed, as far as it is known."""
        return self._subscription is not None and self._subscription.connected

    @property
    def statistics(self) -> ConsumerStatistics:
        """Counts since it was started."""
        return ConsumerStatistics() if self._subscription is None else self._subscription.session.statistics

    @property
    def reconnects(self) -> int:
        """Connections lost and made again."""
        return 0 if self._subscription is None else self._subscription.reconnects

    def health(self, *, stuck_after: Duration = _STUCK_AFTER) -> Health:
        """Return whether it lives, is ready, and progresses, for probes.

        Does not block. Any thread, also with asyncio. An event loop, or an I/O thread, that stands still for a
        heartbeat is noticed by the second of two calls: the first one asks it for a sign.

        Args:
            stuck_after: seconds for which handlers run and none ends, after which it does not progress. Choose it above
                the time of your slowest handler.

        Raises:
            ConfigurationError: ``stuck_after`` is no duration.
        """
        limit = seconds("stuck_after", stuck_after, positive=True)
        closed = ""
        if os.getpid() != self._made_in:
            closed = "made before fork(): it belongs to the parent process"
        elif self._is_stopped:
            closed = "stopped" if self._state is RunState.FINISHED else "stopping"
        now, subscription = time.monotonic(), self._subscription
        if subscription is not None and not closed:
            signs = subscription.signs(now, limit)
        else:
            signs = ConsumerSigns(changed_at=self._changed_at, stuck_after=limit, closed=closed, started=False)
        return health_of(signs, now, time.time())

    def __repr__(self) -> str:
        options = self._options
        state = "stopped" if self._is_stopped else "consuming" if self.connected else "not connected"
        hosts = ", ".join(map(str, options.settings.endpoints))
        return f"<{type(self).__name__} {options.name!r} of queue {options.queue_name!r} at {hosts}: {state}>"

    # Checks

    @property
    def _is_stopped(self) -> bool:
        return self._state in (RunState.STOPPED, RunState.FINISHED)

    def _check_process(self) -> None:
        if os.getpid() != self._made_in:
            raise UsageError("this consumer was made before fork(), in another process; make one here")

    def _check_startable(self, enter: bool) -> None:
        if self._is_stopped:
            raise UsageError("this consumer was stopped, and runs once: make another")
        if enter and self._state is RunState.ENTERED:
            raise UsageError("this consumer runs already, and runs once: make another")

    def _check_runnable(self) -> None:
        if self._options.handler is None:
            raise UsageError("run() needs a handler; without one, get() gives deliveries")

    def _check_get(self, max_messages: int, timeout: Duration) -> float:
        """Refuse a ``get`` that cannot work; return its timeout in seconds."""
        if self._options.handler is not None:
            raise UsageError("get() is for consumers without a handler")
        wait = seconds("timeout", timeout)
        whole_number("max_messages", max_messages, 1)
        self._check_process()
        return wait

    # Starting

    def _started(self, enter: bool) -> None:
        """Note that it runs, unless a signal handler has stopped it meanwhile."""
        if enter and not self._is_stopped:
            self._state = RunState.ENTERED
        elif self._state is RunState.IDLE:
            self._state = RunState.STARTED

    def _not_started(self) -> None:
        """Forget a start that failed, so that it may be tried again."""
        self._subscription, self._pools = None, ()
        if not self._is_stopped:
            self._state = RunState.IDLE

    def _new_subscription(self) -> SubscriptionT:
        """Make the subscription, the pools and the publisher. Nothing is started yet."""
        options = self._options
        for warning in options.warnings:
            logger.warning("%s", warning)
        kind = self._pull_subscription_type if options.handler is None else self._subscription_type
        subscription: SubscriptionT = kind(options, options.settings, options.new_reconnect_policy())
        subscription.tracer = tracer = options.new_tracer()
        if options.handler is not None:
            handler = options.handler
            if tracer is not None:
                trace = tracer.traced_coroutine if is_coroutine_function(handler) else tracer.traced
                handler = trace(handler, batch=options.batch)
            new_pool = partial(
                self._pool_type(),
                handler=handler,
                batch=options.batch,
                store=options.store,
                claiming=options.new_claiming(),
                sink=subscription,
            )
            self._pools = (new_pool(name=options.name, count=options.concurrency),)
            subscription.handlers = self._pools[0]
            if options.has_quarantine:
                self._pools += (new_pool(name=f"{options.name}-quarantine", count=1),)
                subscription.quarantine_handlers = self._pools[1]
        if options.republishes:
            subscription.republisher = self._republisher_type(
                options.new_publisher(self._publisher_type),
                subscription.published,
                f"{options.name}-dead-letters-out",
            )
            subscription.republisher.tracer = tracer
        return subscription

    # Ending

    def _patience(self, subscription: SubscriptionT, least: float) -> float:
        """Return the seconds to wait for the handlers of a subscription that has ended."""
        if subscription.error is not None:
            return self._options.stop_timeout  # it ended by itself: handlers may run
        return least if subscription.session.running else END_TIMEOUT

    def _time_to_settle(self) -> float:
        """Return the seconds for retries of settlements without an answer."""
        left = self._options.stop_timeout if self._stop_by is None else self._stop_by - time.monotonic()
        return max(left, _SETTLE_AT_LEAST)

    def _warn_of_running(self, ended: Iterable[bool]) -> None:
        if not all(ended):
            logger.warning("handlers of consumer %r are still running", self._options.name)

    def _log_unsettled(self, claims: int) -> None:
        if claims:
            logger.error(UNANSWERED, self._options.name, claims)

    def _finished(self) -> None:
        """Note that nothing is left to wait for."""
        if self._is_stopped:
            if self._registration is not None:
                self._registration.close()
            self._state = RunState.FINISHED

    def _readings(self) -> Iterator[Reading]:
        subscription = self._subscription
        if subscription is None:
            return
        handler_seconds = Histogram()
        pools: tuple[Any, ...] = self._pools
        for pool in pools:
            handler_seconds.add(pool.handler_seconds)
        if subscription.tracer is not None:
            handler_seconds.add(subscription.tracer.exemplars)
        yield from readings(
            (self._options.name, self._options.queue_name),
            ConsumerStatus(
                unacked=subscription.session.outstanding,
                connected=subscription.connected,
                paused=subscription.session.paused,
                reconnects=subscription.reconnects,
                handler_seconds=handler_seconds,
                tokens_accepted=subscription.tokens.accepted,
                tokens_refused=subscription.tokens.refused,
                tokens_failed=subscription.tokens.failed,
                event_loop_stalled_seconds=subscription.stalled_seconds,
            ),
            subscription.session.statistics,
        )
