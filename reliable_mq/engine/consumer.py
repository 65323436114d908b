"""The base of the consumers of both APIs.

It has the options, the state, the metrics and the parts of a consumer. The parts are a subscription, which has the
connection and the session, one or two pools that run the handler, and a publisher for retries and dead letters, which
has its own connection. The waiting calls are steps (`reliable_mq.engine.steps`). Each API adds how its callers wait.

Invariants: a consumer runs once. A start that fails leaves nothing behind and may be tried again.
"""

from __future__ import annotations

import enum
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

from reliable_mq._util.hooks import OfOneProcess
from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration, declared_by, is_coroutine_function, seconds, whole_number
from reliable_mq.core.health import ConsumerSigns, Health, health_of
from reliable_mq.core.statistics import ConsumerStatistics, ConsumerStatus, Histogram
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.subscription import BaseSubscription, WorkQueue
from reliable_mq.engine.workers import UNANSWERED
from reliable_mq.errors import UsageError
from reliable_mq.metrics.families import readings
from reliable_mq.metrics.registry import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reliable_mq.engine.pull import PulledDelivery
    from reliable_mq.engine.steps import Steps
    from reliable_mq.metrics.registry import Reading

logger = get_logger(__name__)

END_TIMEOUT: Final = 5.0  # seconds for idle threads and tasks to end
_STUCK_AFTER: Final = 300.0  # seconds
_SETTLE_AT_LEAST: Final = 1.0  # minimum seconds for retries of settlements, even after ``stop_timeout``


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


class HandlerPool(WorkQueue, Protocol):
    """A pool that runs the handler of a consumer. Methods that wait are steps."""

    def start(self) -> None:
        """Start running handlers."""

    def retry_settlements(self, timeout: float, worth_waiting: Callable[[], bool]) -> Any:
        """Retry settlements that the store did not answer, while ``worth_waiting``.

        To be called when the pool has ended.

        Returns:
            The number of settlements without an answer after ``timeout`` seconds.
        """

    def abort(self) -> None:
        """End the pool as far as possible without waiting."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is a handler of this pool."""


SubscriptionT = TypeVar("SubscriptionT", bound=BaseSubscription)
PoolT = TypeVar("PoolT", bound=HandlerPool)


class BaseConsumer(OfOneProcess, Generic[SubscriptionT, PoolT]):
    """A consumer. See `ConsumerOptions` for its arguments."""

    _subscription_type: ClassVar[Any]  # SubscriptionT, like the next one
    _pull_subscription_type: ClassVar[Any]
    _republisher_type: ClassVar[Any]
    _publisher_type: ClassVar[Any]
    _state = RunState.IDLE
    _subscription: SubscriptionT | None = None
    _pools: tuple[PoolT, ...] = ()
    _starters = 0  # callers that wait for the first attempts of the subscription
    _is_kept = False  # whether the subscription stays after errors: started by `run` or ``with``, or connected once
    _stop_by: float | None = None  # the deadline for the stop, on the monotonic clock
    _given_up = ""  # the error that ended `run`, until the program closes the consumer

    @declared_by(ConsumerOptions.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._changed_at = time.monotonic()  # when it was created or stopped
        self._lock = threading.RLock()  # guards the attributes above; held only briefly; signal handlers re-enter it
        self._options = ConsumerOptions(*args, **kwargs)
        self._check_options(self._options)
        registry = self._options.registry
        self._registration = None if registry is None else register(registry, self._readings)
        self._release()  # from its registry, which would keep it alive though nothing runs

    def _check_options(self, options: ConsumerOptions) -> None:
        """Raise ConfigurationError for options that this API cannot serve."""

    def _pool_type(self) -> Any:
        """Return the class of the pools that run the handler."""
        raise NotImplementedError

    def _stop_pools(self, pools: tuple[PoolT, ...], patience: float) -> Any:
        """End pools that run the handler; return whether each has ended. A step."""
        raise NotImplementedError

    def _wait_ended(self, subscription: SubscriptionT) -> Any:
        """Wait until the subscription has ended. A step."""
        raise NotImplementedError

    def _check_loop(self) -> None:
        """Raise UsageError on another event loop."""

    def _keep(self) -> None:
        """Keep the consumer alive, and in its registry, until `_release`."""
        if self._registration is not None:
            self._registration.open()

    def _release(self) -> None:
        """Note that nothing is running any more."""
        if self._registration is not None:
            self._registration.close()

    def stop(self) -> None:
        """Begin to stop, and return at once.

        Thread-safe. Handlers and signal handlers may also call it. When running handlers have ended, `run` returns, or
        the end of ``with`` is reached. Does nothing in a forked child.
        """
        if self._is_forked:
            return
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
        """The maximum number of unacked deliveries.

        Setting it takes effect at once. The limits add up until the earlier deliveries are settled. On a `Queue` with
        ``single_active_consumer=True`` it takes effect once nothing is unacked here for a moment, or with the next
        channel, because a new subscription gives up the role of the active consumer. A queue given by its name is not
        known to have a single active consumer. If such a queue is auto-delete, or an auto-delete queue is consumed with
        ``exclusive=True``, it takes effect with the next channel, because a new subscription would delete the queue.
        """
        return self._options.prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int) -> None:
        self._check_process()
        with self._lock:
            self._options.change_prefetch(prefetch)
            subscription = self._subscription
        if subscription is not None:
            subscription.prefetch_changed()

    @property
    def connected(self) -> bool:
        """Whether the consumer is subscribed, as far as is known."""
        return self._subscription is not None and self._subscription.connected

    @property
    def statistics(self) -> ConsumerStatistics:
        """The counts since the consumer was started."""
        return ConsumerStatistics() if self._subscription is None else self._subscription.session.statistics

    @property
    def reconnects(self) -> int:
        """The number of connections that were lost and replaced."""
        return 0 if self._subscription is None else self._subscription.reconnects

    def health(self, *, stuck_after: Duration = _STUCK_AFTER) -> Health:
        """Return whether the consumer is live, ready and progressing, for probes.

        Does not block. Thread-safe, also with asyncio. If the event loop or I/O thread stalls for a heartbeat,
        the second of two calls detects it, because the first one schedules a call on it.

        Args:
            stuck_after: Seconds for which handlers run and none ends, after which the consumer is not progressing.
                Choose a value above the run time of your slowest handler.

        Raises:
            ConfigurationError: If ``stuck_after`` is not a duration.
        """
        limit = seconds("stuck_after", stuck_after, positive=True)
        closed = ""
        if self._is_forked:
            closed = "made before fork(): it belongs to the parent process"
        elif self._is_stopped and not self._given_up:
            closed = "stopped" if self._state is RunState.FINISHED else "stopping"
        now, subscription = time.monotonic(), self._subscription
        if subscription is not None and not closed and not self._given_up:
            signs = subscription.signs(now, limit)
        else:
            signs = ConsumerSigns(
                changed_at=self._changed_at,
                stuck_after=limit,
                closed=closed,
                started=False,
                given_up=self._given_up,
            )
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
        if self._is_forked:
            raise UsageError("this consumer was made before fork(), in another process; make one here")

    def _check_startable(self, enter: bool) -> None:
        if self._is_stopped:
            raise UsageError("this consumer was stopped, and runs once: make another")
        if enter and self._state is RunState.ENTERED:
            raise UsageError("this consumer runs already, and runs once: make another")

    def _check_runnable(self) -> None:
        if self._options.handler is None:
            raise UsageError("run() needs a handler; without one, get() gives deliveries")

    # Starting

    def _start(self, *, enter: bool = False) -> SubscriptionT:
        """Return the started subscription. ``enter`` is True for `run` and ``with``."""
        self._check_process()
        starts = False
        try:
            with self._lock:
                self._check_startable(enter)
                self._check_loop()
                if self._subscription is None:
                    starts = True
                    self._subscription = self._new_subscription()
                    self._keep()
                    for pool in self._pools:
                        pool.start()
                    self._subscription.start()
                    if self._is_stopped:  # by a signal handler, before anything could take its call
                        self._subscription.stop()
                self._started(enter)
                return self._subscription
        except BaseException:  # for example from a signal handler; nothing else would stop the running parts
            if starts:
                self._undo_start()
            raise

    def _undo_start(self) -> None:
        with self._lock:
            subscription, pools = self._subscription, self._pools
            self._not_started()
            self._release()
        _abort(subscription, pools)

    def _connect(self, *, required: bool) -> Steps[SubscriptionT]:
        """Start, and wait for the first attempts.

        If they fail or are interrupted for every waiting caller, the start is undone.
        """
        with self._lock:
            subscription = self._start()
            self._starters += 1
        try:
            yield from self._await_first_attempts(subscription, required=required)
        except BaseException:
            with self._lock:
                self._starters -= 1
                pools = self._pools
                useless = self._subscription is subscription and not self._starters and not self._is_kept
                if useless:
                    self._not_started()  # at once, so that another call starts afresh, whatever interrupts this one
            if useless:
                yield from self._discard(subscription, pools)
            raise
        with self._lock:
            self._starters -= 1
            self._is_kept = True
        return subscription

    def _discard(self, subscription: SubscriptionT, pools: tuple[PoolT, ...]) -> Steps[None]:
        """End an unused subscription, and wait for its end unless that is interrupted."""
        subscription.stop_now()
        try:
            yield from self._finish(subscription, pools)
        except BaseException:
            _abort(subscription, pools)
            raise

    def _enter(self) -> Steps[None]:
        subscription = self._start(enter=True)
        try:
            yield from self._await_first_attempts(subscription)
        except BaseException:
            yield self.close()
            raise

    def _await_first_attempts(self, subscription: SubscriptionT, *, required: bool = False) -> Steps[None]:
        """Wait until each host has had its first attempt.

        Raises an error that further attempts cannot fix, or any error if ``required``.
        """
        error = yield from subscription.wait_connected()
        if error is not None and error is subscription.error:
            raise error
        if error is not None and required:
            self._check_startable(enter=False)  # it may have been stopped meanwhile
            raise error

    def _get(self, max_messages: int, timeout: Duration, taken: list[PulledDelivery]) -> Steps[None]:
        """Take deliveries into ``taken``. The caller settles them, however this ends."""
        if self._options.handler is not None:
            raise UsageError("get() is for consumers without a handler")
        wait = seconds("timeout", timeout)
        whole_number("max_messages", max_messages, 1)
        self._check_process()
        subscription: Any = self._subscription
        if subscription is None or subscription.ended.is_set() or not self._is_kept:
            subscription = yield from self._connect(required=False)
        self._check_loop()
        began = time.time_ns()
        yield subscription.take(max_messages, wait, taken)
        if subscription.tracer is not None:
            subscription.tracer.received(taken, began, subscription.peer)
        if not taken and subscription.error is not None:
            raise subscription.error

    def _started(self, enter: bool) -> None:
        """Note that it runs, unless a signal handler has stopped it in the meantime."""
        if enter and not self._is_stopped:
            self._state = RunState.ENTERED
            self._is_kept = True
        elif self._state is RunState.IDLE:
            self._state = RunState.STARTED

    def _not_started(self) -> None:
        """Forget a start that failed, so that it may be tried again."""
        self._subscription, self._pools, self._is_kept = None, (), False
        if not self._is_stopped:
            self._state = RunState.IDLE

    def _new_subscription(self) -> SubscriptionT:
        """Create the subscription, the pools and the publisher without starting them."""
        options = self._options
        for warning in options.warnings:
            logger.warning("%s", warning)
        kind = self._pull_subscription_type if options.handler is None else self._subscription_type
        subscription: SubscriptionT = kind(options)
        subscription.tracer = tracer = options.new_tracer()
        if options.handler is not None:
            handler = options.handler
            if tracer is not None:
                trace = tracer.traced_coroutine if is_coroutine_function(handler) else tracer.traced
                handler = trace(handler, batch=options.batch)
            subscription.claiming = options.new_claiming(time.monotonic)
            new_pool = partial(
                self._pool_type(),
                handler=handler,
                batch=options.batch,
                store=options.store,
                claiming=subscription.claiming,
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

    def close(self) -> Any:
        """Stop, and wait until the handlers have ended and the connection is closed."""
        raise NotImplementedError

    def _close(self) -> Steps[None]:
        if self._is_forked:
            return
        if any(pool.is_current for pool in self._pools):
            raise UsageError("a handler cannot close its own consumer, which waits for it: call stop()")
        self._given_up = ""
        if self._state is RunState.FINISHED:
            return
        self._check_loop()
        self.stop()
        if self._subscription is not None:
            yield from self._finish(self._subscription, self._pools)
        else:
            self._finished()

    def _ended(self, subscription: SubscriptionT) -> None:
        """Stop after the end of the subscription, which may have ended by itself."""
        if subscription.error is not None:
            self._given_up = str(subscription.error)
        self.stop()

    def _finish(self, subscription: SubscriptionT, pools: tuple[PoolT, ...]) -> Steps[None]:
        """Wait for the end, and leave nothing behind. Several callers may do so."""
        subscription.stop()
        yield self._wait_ended(subscription)
        if pools:
            ended = yield self._stop_pools(pools, self._patience(subscription))
            if not all(ended):
                logger.warning("handlers of consumer %r are still running", self._options.name)
            unanswered = yield pools[0].retry_settlements(self._time_to_settle(), lambda: not subscription.hurried)
            if unanswered:
                logger.error(UNANSWERED, self._options.name, unanswered)
        yield subscription.join()
        if subscription.republisher is not None:
            yield subscription.republisher.close(END_TIMEOUT)
        with self._lock:
            if self._subscription in (None, subscription):  # otherwise a new one was started in the meantime
                self._finished()

    def _raise_error(self) -> None:
        """Raise the error that ended the consumer, if one did."""
        if self._subscription is not None and self._subscription.error is not None:
            raise self._subscription.error

    def _patience(self, subscription: SubscriptionT) -> float:
        """Return the seconds to wait for the handlers of a subscription that has ended."""
        if subscription.error is not None:
            return self._options.stop_timeout  # it ended by itself, so handlers may be running
        return 0.0 if subscription.session.running else END_TIMEOUT

    def _time_to_settle(self) -> float:
        """Return the seconds for retries of settlements that the store did not answer."""
        left = self._options.stop_timeout if self._stop_by is None else self._stop_by - time.monotonic()
        return max(left, _SETTLE_AT_LEAST)

    def _finished(self) -> None:
        """Note that nothing is left to wait for."""
        self._release()
        if self._is_stopped:
            self._state = RunState.FINISHED

    def _readings(self) -> Iterator[Reading]:
        labels, subscription = (self._options.name, self._options.queue_name), self._subscription
        if subscription is None:
            yield from readings(labels, self.statistics)
            return
        handler_seconds = Histogram()
        pools: tuple[Any, ...] = self._pools
        for pool in pools:
            handler_seconds.add(pool.handler_seconds)
        if subscription.tracer is not None:
            handler_seconds.add(subscription.tracer.exemplars)
        yield from readings(
            labels,
            ConsumerStatus(
                unacked=subscription.session.outstanding,
                connected=None if self._is_stopped else subscription.connected,  # handlers may run on for long
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


def _abort(subscription: BaseSubscription | None, pools: Iterable[HandlerPool]) -> None:
    """End the parts of a consumer as far as possible without waiting."""
    if subscription is not None:
        subscription.abort()
    for pool in pools:
        pool.abort()
