"""The idempotent consumer of the asyncio API.

It starts and ends the parts: a subscription, tasks or threads for the handler, and a publisher for dead letters. As for
the sync API, the delivery guarantees are implemented in :mod:`reliable_mq.core.consumer.session`.

SIGTERM and SIGINT stop all consumers that run on an event loop.

Invariants: a signal that the program or a server handles is left to its handler. The signal handlers from before the
first ``run()`` are restored after the last, and in a forked child, unless the program has set others in the meantime.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import warnings
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from reliable_mq._util.logs import get_logger
from reliable_mq._util.signals import ReplacedHandlers
from reliable_mq._util.validation import Duration, is_coroutine_function
from reliable_mq.aio.handlers import TaskPool, ThreadPool
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.aio.subscription import AsyncPullSubscription, AsyncRepublisher, AsyncSubscription
from reliable_mq.engine.consumer import BaseConsumer
from reliable_mq.engine.pull import leave
from reliable_mq.engine.steps import awaiting
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType

    from reliable_mq.engine.pull import PulledDelivery

logger = get_logger(__name__)

_CANCEL_TIMEOUT: Final = 5.0  # seconds for cancelled handlers, and for threads, after `run` itself was cancelled


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` for each signal in the block, unless the signal has a handler."""
    loop = asyncio.get_running_loop()
    watch = _watches.setdefault(loop, _SignalWatch(loop))
    watch.add(stop)
    try:
        yield
    finally:
        watch.remove(stop)


class _SignalWatch:
    """The consumers of one loop, and the signal handlers to restore after them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stops: list[Callable[[], None]] = []
        self._replaced = ReplacedHandlers(on_loop=True)
        self._of_loop: Any = None  # Python's handler of every signal that is added to the loop

    def add(self, stop: Callable[[], None]) -> None:
        if not self._stops and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._take(number)
        self._stops.append(stop)

    def remove(self, stop: Callable[[], None]) -> None:
        self._stops.remove(stop)
        if not self._stops:
            _watches.pop(self._loop, None)  # which would keep the loop
            if self._loop.is_closed():
                self._replaced.restore()
            else:
                self._replaced.restore(self._remove)

    def _take(self, number: signal.Signals) -> None:
        if not _is_default(signal.getsignal(number)):
            return
        with suppress(NotImplementedError, RuntimeError):  # not supported on this platform or by this loop
            self._replaced.replace(number, partial(self._install, number))

    def _install(self, number: signal.Signals) -> None:
        self._loop.add_signal_handler(number, self._on_signal)
        self._of_loop = signal.getsignal(number)
        signal.signal(number, partial(self._of_loop))  # another object, to tell whether the program has added its own
        signal.siginterrupt(number, False)  # which the line above has undone

    def _remove(self, number: int) -> None:
        if signal.getsignal(number) != self._of_loop:
            self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        for stop in list(self._stops):
            stop()


def _is_default(handler: object) -> bool:
    """Whether a signal handler is Python's own, or that of `asyncio.run`."""
    if isinstance(handler, partial):
        return isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    return handler in (signal.SIG_DFL, signal.default_int_handler)


# Of the loops that run consumers now.
_watches: dict[asyncio.AbstractEventLoop, _SignalWatch] = {}


class AsyncConsumer(BaseConsumer[AsyncSubscription, TaskPool | ThreadPool]):
    """A consumer that calls a handler with a queue's messages, and acks them.

    For one event loop. If the handler returns, its delivery is handled and acked. If the handler raises, its delivery
    has failed. It is retried according to ``retry``, then dead-lettered with the reason in its headers, and acked once
    the dead letter is confirmed. A handler can choose between these by raising or returning ``RetryLater`` or
    ``DeadLetter``. Deliveries that are not acked when the connection or the process dies are delivered again, so a
    handler must tolerate duplicates unless ``idempotency`` is set.

    A coroutine function runs in a task, a plain function in a thread. A handler whose task is cancelled has not failed,
    and its delivery is requeued. A handler that blocks the event loop also blocks everything else on it, including
    heartbeats. After half a heartbeat this is logged. After two to three heartbeats the broker closes the connection.

    Construction does not connect. ``run``, ``async with``, ``get`` and ``connect`` do. From then on the consumer
    reconnects by itself, until it is stopped. It runs once.
    """

    _subscription_type = AsyncSubscription
    _pull_subscription_type = AsyncPullSubscription
    _republisher_type = AsyncRepublisher
    _publisher_type = AsyncPublisher
    _loop: asyncio.AbstractEventLoop | None = None  # the loop that the consumer runs on
    _signalled = False  # whether `run` has received a signal

    def _pool_type(self) -> type[TaskPool | ThreadPool]:
        return TaskPool if is_coroutine_function(self._options.handler) else ThreadPool

    # Running

    async def run(self) -> None:
        """Consume until `stop`, or a signal (SIGTERM, SIGINT) if this is the main thread.

        On stopping, no further handler is called and deliveries that no handler has started are requeued. Running
        handlers get ``stop_timeout`` to finish, and their deliveries are acked. A second signal ends this wait. A
        signal for which the program, or a server that it runs in, has its own handler is left to that handler.

        If the task is cancelled, running handlers are cancelled too, and their deliveries are requeued. Not if its loop
        ends: `asyncio.run` cancels all tasks at once when its ``main`` has ended, which cuts the connection first.

        Raises:
            TopologyMismatch: If the queue differs from its declaration, or does not exist.
            BrokerUnavailable: If connecting cannot succeed, or ``reconnect_stop`` has ended it.
            UsageError: If the consumer is already running, was stopped, has no handler, or is used on another event
                loop.
        """
        self._check_runnable()
        subscription = self._start(enter=True)
        try:
            with on_signals(partial(self._on_signal, subscription)):
                await subscription.ended.wait()
                self._ended(subscription)
                await awaiting(self._finish(subscription, self._pools))
        except asyncio.CancelledError:
            await self._finish_cancelled(subscription)
            raise
        self._raise_error()

    async def close(self) -> None:
        """Stop, and wait until running handlers have ended and the connection is closed.

        Waits for ``stop_timeout`` and a few seconds at most. Does nothing if it is already closed, or in a forked
        child. If it is cancelled, running handlers are cancelled too.

        Raises:
            UsageError: If called by a handler, which would wait for itself, or on another event loop. A handler can
                call `stop`.
        """
        try:
            await awaiting(self._close())
        except asyncio.CancelledError:
            if self._subscription is not None:
                await self._finish_cancelled(self._subscription)
            raise

    async def connect(self) -> None:
        """Start like ``async with``, but raise if the broker cannot be reached at once.

        Does nothing while it is connected. After an error nothing is left running, and the call can be repeated.

        Raises:
            BrokerUnavailable: If no host can be reached. It has ``permanent`` set if trying again cannot help.
            TopologyMismatch: If the queue differs from its declaration, or does not exist.
            UsageError: If the consumer was stopped, or is used on another event loop.
        """
        await awaiting(self._connect(required=True))

    async def __aenter__(self) -> Self:
        """Consume in the background. Raise the errors of `run`.

        If the broker cannot be reached now, the consumer keeps trying.
        """
        await awaiting(self._enter())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait for the end. Raise the error that ended the consumer.

        That error never replaces an exception of the body.
        """
        await self.close()
        if exc_type is None:
            self._raise_error()

    def __del__(self) -> None:
        subscription = self._subscription
        if subscription is not None and not subscription.ended.is_set() and not self._is_forked:
            text = f"{self!r} was not closed: its deliveries are requeued when its event loop ends"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    @asynccontextmanager
    async def get(self, max_messages: int = 1, timeout: Duration = 0.0) -> AsyncIterator[list[PulledDelivery]]:
        """Take deliveries on request instead of having a handler called.

        For example, ``async with consumer.get(10) as deliveries``. The block gets the messages in the queue, up to
        ``max_messages``. If the queue is empty, the block gets the first messages that arrive within ``timeout``, or an
        empty list. Each delivery may be settled separately (``ack()``, ``retry()``, ``dead_letter(reason)``, which do
        not wait). When the block ends, the others are acked. When it raises or is cancelled, they are requeued.

        The first call connects, unless ``async with`` has connected. Tasks take turns.

        Args:
            max_messages: The maximum number of deliveries. Together with those not settled yet it must not exceed the
                prefetch.
            timeout: The time to wait, in seconds. The answer of a connected broker is awaited in any case.

        Raises:
            UsageError: If the consumer has a handler, was stopped or is used on another event loop, or the prefetch is
                used up.
            TopologyMismatch, BrokerUnavailable: As for `run`.
            ConsumerCancelled: If no message arrived because a queue that is not declared here was deleted.
            StaleDelivery: At the end of the block, if a channel was lost. Deliveries that could not be acked will be
                delivered again.
        """
        deliveries: list[PulledDelivery] = []
        try:
            await awaiting(self._get(max_messages, timeout, deliveries))
            yield list(deliveries)  # the block may do as it likes with its list
            leave(deliveries, ack=True)
        except BaseException:
            leave(deliveries, ack=False)
            raise

    # Starting and ending

    def _new_subscription(self) -> AsyncSubscription:
        self._loop = asyncio.get_running_loop()
        return super()._new_subscription()

    def _not_started(self) -> None:
        super()._not_started()
        self._loop = None

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise UsageError("this consumer belongs to another event loop; make one for each")

    async def _wait_ended(self, subscription: AsyncSubscription) -> None:
        await subscription.ended.wait()

    async def _stop_pools(self, pools: tuple[TaskPool | ThreadPool, ...], patience: float) -> list[bool]:
        return await asyncio.gather(*(pool.stop(patience) for pool in pools))

    async def _finish_cancelled(self, subscription: AsyncSubscription) -> None:
        """Cancel the handlers, and wait for the end after the waiting task was cancelled."""
        self.stop()
        subscription.stop()
        for pool in self._pools:
            pool.cancel()
        late = asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT, subscription.stop_now)
        try:
            await awaiting(self._finish(subscription, self._pools))
        except asyncio.CancelledError:  # cancelled again
            subscription.stop_now()
            subscription.abort()
            for pool in self._pools:
                pool.abort()
            if subscription.republisher is not None:
                subscription.republisher.abort()
            self._finished()
            raise
        finally:
            late.cancel()

    def _on_signal(self, subscription: AsyncSubscription) -> None:
        if self._signalled:
            subscription.stop_now()
        else:
            self._signalled = True
            self.stop()
