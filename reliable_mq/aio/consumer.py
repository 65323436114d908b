"""The idempotent consumer of the asyncio API.

It starts and ends the parts (a subscription, tasks or threads for the handler, a publisher for dead letters). Its
promises about deliveries are kept by :mod:`reliable_mq.core.consumer.session`, as those of the sync API are.

SIGTERM and SIGINT stop all consumers that run on an event loop.

Invariants: a signal that somebody else handles (a server, the program itself) is left to them; the signal handlers from
before the first ``run()`` are there again after the last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import warnings
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakKeyDictionary

from reliable_mq._util.validation import Duration
from reliable_mq.aio.handlers import TaskPool, ThreadPool
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.aio.subscription import AsyncPullSubscription, AsyncRepublisher, AsyncSubscription
from reliable_mq.core.consumer.handler import is_coroutine_function
from reliable_mq.engine.consumer import END_TIMEOUT, BaseConsumer, RunState
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType

    from reliable_mq.aio.subscription import PulledDelivery

__all__ = ["AsyncConsumer", "on_signals"]

logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT: Final = 5.0  # seconds for handlers that are cancelled, and for threads, once `run` itself is cancelled


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` for each signal in the block, unless somebody else handles it."""
    loop = asyncio.get_running_loop()
    watch = _watches.setdefault(loop, _SignalWatch(loop))
    watch.add(stop)
    try:
        yield
    finally:
        watch.remove(stop)


class _SignalWatch:
    """The consumers of one loop, and the signal handlers that were there before them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stops: list[Callable[[], None]] = []
        self._before: dict[signal.Signals, Any] = {}

    def add(self, stop: Callable[[], None]) -> None:
        if not self._stops and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._take(number)
        self._stops.append(stop)

    def remove(self, stop: Callable[[], None]) -> None:
        self._stops.remove(stop)
        if not self._stops:
            for number, before in self._before.items():
                if not self._loop.is_closed():
                    self._loop.remove_signal_handler(number)
                signal.signal(number, before)
            self._before.clear()

    def _take(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not _is_default(before):
            return
        try:
            self._loop.add_signal_handler(number, self._on_signal)
        except (NotImplementedError, RuntimeError):  # not on this platform, or not with this loop
            return
        self._before[number] = before

    def _on_signal(self) -> None:
        for stop in list(self._stops):
            stop()


def _is_default(handler: object) -> bool:
    """Whether a signal handler is Python's own, or that of `asyncio.run`."""
    if isinstance(handler, partial):
        return isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    return handler in (signal.SIG_DFL, signal.default_int_handler)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _SignalWatch] = WeakKeyDictionary()


class AsyncConsumer(BaseConsumer[AsyncSubscription, TaskPool | ThreadPool]):
    """Calls a handler with the messages of a queue, and acks them. For one event loop.

    A handler that returns has handled its delivery: it is acked. One that raises has failed: the delivery is retried
    as ``retry`` says, then dead-lettered with the reason in its headers, and acked once that is confirmed. A handler
    chooses by raising or returning ``RetryLater`` or ``DeadLetter``. Deliveries that are not acked when the connection
    or the process dies come again, so a handler must bear duplicates; with ``idempotency`` it need not.

    A coroutine function runs in a task, a plain function in a thread. A handler whose task is cancelled has not failed:
    its delivery is requeued. One that blocks the event loop blocks everything on it, heartbeats too: from
    half a heartbeat on, the log says so; after about two, the broker closes the connection.

    Construction does not connect. ``run``, ``async with``, ``get`` and ``connect`` do; from then on the consumer
    reconnects by itself, until it is stopped. It runs once.
    """

    _subscription_type = AsyncSubscription
    _pull_subscription_type = AsyncPullSubscription
    _republisher_type = AsyncRepublisher
    _publisher_type = AsyncPublisher
    _loop: asyncio.AbstractEventLoop | None = None  # that it runs on

    def _pool_type(self) -> type[TaskPool | ThreadPool]:
        return TaskPool if is_coroutine_function(self._options.handler) else ThreadPool

    # Running

    async def run(self) -> None:
        """Consume until `stop`, or a signal (SIGTERM, SIGINT) if this is the main thread.

        On stopping, no handler is called any more, deliveries that none has begun with are requeued, and the others
        are finished and acked, for which ``stop_timeout`` is given. A second signal does not wait for that. A
        signal for which the program, or a server that it runs in, has a handler of its own is left to that.

        If the task is cancelled, so are the handlers that run; their deliveries are requeued.

        Raises:
            TopologyMismatch: the queue differs from its declaration, or does not exist.
            BrokerUnavailable: connecting cannot succeed, or was given up as told.
            UsageError: it runs already, was stopped, has no handler, or is used on another event loop.
        """
        self._check_runnable()
        subscription = self._start(enter=True)
        try:
            with on_signals(partial(self._on_signal, subscription)):
                await subscription.ended.wait()
                self.stop()  # it may have ended by itself
                await self._finish(subscription)
        except asyncio.CancelledError:
            await self._finish_cancelled(subscription)
            raise
        if subscription.error is not None:
            raise subscription.error

    async def close(self) -> None:
        """Stop, and wait until running handlers have ended and the connection is closed.

        Waits for ``stop_timeout`` and a few seconds at most. Does nothing when it is closed, or in a forked child. If
        it is cancelled, handlers are, too.

        Raises:
            UsageError: called by a handler, which would wait for itself; it can call `stop`. Or on another event loop.
        """
        if os.getpid() != self._made_in:
            return
        if any(pool.is_current for pool in self._pools):
            raise UsageError("a handler cannot close its own consumer, which waits for it: call stop()")
        if self._state is RunState.FINISHED:
            return
        self._check_loop()
        self.stop()
        if self._subscription is None:
            self._finished()
            return
        try:
            await self._finish(self._subscription)
        except asyncio.CancelledError:
            await self._finish_cancelled(self._subscription)
            raise

    async def connect(self) -> None:
        """Begin as ``async with`` does, but raise if the broker cannot be reached at once.

        Does nothing while it is connected. After an error nothing is left running, and everything can be tried again.

        Raises:
            BrokerUnavailable: no host could be reached; with ``permanent`` if trying again cannot help.
            TopologyMismatch: the queue differs from its declaration, or does not exist.
            UsageError: it was stopped, or is used on another event loop.
        """
        await self._connect(required=True)

    async def __aenter__(self) -> Self:
        """Consume in the background; errors as for `run`.

        If the broker cannot be reached now, it goes on trying.
        """
        subscription = self._start(enter=True)
        try:
            await self._await_first_attempts(subscription)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait for the end; raise the error that ended the consumer.

        It never takes the place of an exception of the body.
        """
        await self.close()
        error = None if self._subscription is None else self._subscription.error
        if error is not None and exc_type is None:
            raise error

    def __del__(self) -> None:
        subscription = self._subscription
        if subscription is not None and not subscription.ended.is_set() and os.getpid() == self._made_in:
            text = f"{self!r} was not closed: its deliveries are requeued when its event loop ends"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    @asynccontextmanager
    async def get(self, max_messages: int = 1, timeout: Duration = 0.0) -> AsyncIterator[list[PulledDelivery]]:
        """Take deliveries on request instead of having a handler called.

        As in ``async with consumer.get(10) as deliveries``. The block gets the messages that are in the queue, up to
        ``max_messages``; if there are none, the first to come within ``timeout``, or nothing. Each delivery may be
        settled by itself (``ack()``, ``retry()``, ``dead_letter(reason)``, which do not wait). When the block ends, the
        others are acked; when it raises, or is cancelled, they are requeued.

        The first call connects, unless ``async with`` has. Tasks take turns.

        Args:
            max_messages: at most as many as the prefetch, those not settled yet included.
            timeout: seconds; the answer of a broker that is connected is waited for in any case.

        Raises:
            UsageError: the consumer has a handler, was stopped, is used on another event loop, or the prefetch is used
                up.
            TopologyMismatch, BrokerUnavailable: as for `run`.
            ConsumerCancelled: nothing came, since a queue that is not declared here was deleted.
            StaleDelivery: at the end of the block: a channel was lost, and deliveries that could not be acked will come
                again.
        """
        wait = self._check_get(max_messages, timeout)
        subscription = self._subscription
        if subscription is None or subscription.ended.is_set():
            subscription = await self._connect(required=False)
        assert isinstance(subscription, AsyncPullSubscription)  # noqa: S101  # it has no handler
        self._check_loop()
        began = time.time_ns()
        deliveries = await subscription.take(max_messages, wait)
        if subscription.tracer is not None:
            subscription.tracer.received(deliveries, began, subscription.peer)
        if not deliveries and subscription.error is not None:
            raise subscription.error
        try:
            yield deliveries
        except BaseException:
            subscription.leave(deliveries, ack=False)
            raise
        subscription.leave(deliveries, ack=True)

    # Starting and ending

    def _start(self, *, enter: bool = False) -> AsyncSubscription:
        """Return the subscription, started; ``enter``: by `run` or ``async with``, once."""
        self._check_process()
        self._check_startable(enter)
        self._check_loop()
        if self._subscription is None:
            self._loop = asyncio.get_running_loop()
            self._subscription = self._new_subscription()
            self._subscription.start()
        self._started(enter)
        return self._subscription

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise UsageError("this consumer belongs to another event loop; make one for each")

    async def _connect(self, *, required: bool) -> AsyncSubscription:
        """Start, and wait for the first attempts; undo the start if they fail."""
        first = self._subscription is None
        subscription = self._start()
        try:
            await self._await_first_attempts(subscription, required=required)
        except BaseException:
            if first:
                subscription.stop_now()
                await self._finish(subscription)
                if self._subscription is subscription:
                    self._loop = None
                    self._not_started()
            raise
        return subscription

    async def _await_first_attempts(self, subscription: AsyncSubscription, *, required: bool = False) -> None:
        """Wait until each host had its first attempt.

        Raise an error that time cannot heal, or any if ``required``.
        """
        error = await subscription.wait_connected(self._options.settings.first_attempts_timeout)
        if error is not None and (required or error is subscription.error):
            raise error

    async def _finish(self, subscription: AsyncSubscription) -> None:
        """Wait for the end, and leave nothing behind. Several tasks may do so."""
        subscription.stop()
        await subscription.ended.wait()
        if self._pools:
            patience = self._patience(subscription, 0.0)
            self._warn_of_running(await asyncio.gather(*(pool.stop(patience) for pool in self._pools)))
            unanswered = await self._pools[0].retry_settlements(
                self._time_to_settle(), lambda: not subscription.hurried
            )
            self._log_unsettled(unanswered)
        await subscription.join()
        if subscription.republisher is not None:
            await subscription.republisher.close(END_TIMEOUT)
        self._finished()

    async def _finish_cancelled(self, subscription: AsyncSubscription) -> None:
        """Cancel the handlers, and wait for the end: the waiting task was cancelled."""
        self.stop()
        subscription.stop()
        for pool in self._pools:
            pool.cancel()
        late = subscription.call_later(_CANCEL_TIMEOUT, subscription.stop_now)
        try:
            await self._finish(subscription)
        except asyncio.CancelledError:  # once more
            subscription.stop_now()
            subscription.abort()
            for pool in self._pools:
                pool.abort()
            if subscription.republisher is not None:
                subscription.republisher.abort()
            raise
        finally:
            late.cancel()

    def _on_signal(self, subscription: AsyncSubscription) -> None:
        if self._is_stopped:
            subscription.stop_now()
        else:
            self.stop()
