"""The idempotent consumer: what a user calls.

It puts the parts together (options, a subscription, worker threads, a publisher for dead letters) and runs them.
Everything it promises about deliveries is decided in :mod:`reliable_mq.core.consumer.session`.

Waiting until a signal handler, or a thread, says that it is over.

Python notes a signal when it comes, and runs the handler when its main thread comes round to it. A wait without end may
keep it from that for ever: where the signal came between the last look and the wait, or went to another thread.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Final, Self

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.validation import Duration, seconds, whole_number
from reliable_mq.core.consumer.handler import is_coroutine_function
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.core.statistics import ConsumerStatistics, ConsumerStatus, Histogram
from reliable_mq.engine.consumer_options import CONSUMER_TIMEOUT, AckMode, ConsumerOptions, Offset
from reliable_mq.engine.workers import OWED, WorkerPool
from reliable_mq.errors import ConfigurationError, ReliableMQError, UsageError
from reliable_mq.metrics.families import consumer_readings
from reliable_mq.metrics.registry import register
from reliable_mq.retry import KillSwitch, RetryPolicy
from reliable_mq.stores import IdempotencyStore
from reliable_mq.sync.publisher import Publisher
from reliable_mq.sync.subscription import PullSubscription, Republisher, Subscription
from reliable_mq.topology import DEFAULT, DefaultDeadLetter, Queue
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from queue import SimpleQueue
    from types import FrameType, TracebackType

    from prometheus_client import CollectorRegistry
    from tenacity.stop import stop_base
    from tenacity.wait import wait_base

    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.metrics.registry import Reading
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.sync.subscription import PulledDelivery
    from reliable_mq.tls import TLSOptions
    from reliable_mq.topology import Declaration

__all__ = ["Consumer", "next_signal", "wait_heeding_signals"]

_LOOK_EVERY: Final = 0.5  # seconds


def wait_heeding_signals(over: threading.Event) -> None:
    """Block until ``over`` is set, and let handlers of signals run within half a second wherever the signal went."""
    while not over.wait(_LOOK_EVERY):
        pass


def next_signal(received: SimpleQueue[int]) -> int:
    """Block until a handler of signals has put one in, and give it.

    A handler must not set an event that the main thread waits for: it may run while that thread has the event's lock.
    To put into a simple queue needs none.
    """
    while True:
        try:
            return received.get(timeout=_LOOK_EVERY)
        except Empty:
            continue


logger = logging.getLogger(__name__)

_REPUBLISH_TIMEOUT = 60.0  # seconds for a dead letter to be confirmed; it is tried again after
_END_TIMEOUT = 5.0  # seconds for threads that have nothing more to do
_TELL_AT_LEAST = 1.0  # seconds to tell the store what it is owed, where handlers have used up the stop's time


class Consumer:
    """Hands the messages of a queue to a handler, and acks each when it is done with. Thread-safe.

    A handler that returns has handled its delivery: it is acked. One that raises has failed: the delivery is tried
    again as ``retry`` says, then dead-lettered with the reason in its headers, and acked once that is confirmed. A
    handler chooses by raising or returning ``RetryLater`` or ``DeadLetter``. What is not acked when the connection or
    the process dies comes again, so a handler must bear duplicates; with ``idempotency`` it need not.

    Construction does not connect. ``run``, ``with``, ``get`` and ``connect`` do; from then on the consumer reconnects
    by itself, until it is stopped. It runs once.

    Args:
        url: as for ``Publisher``.
        queue: a ``Queue``, which is declared at every connect, with its dead-letter queue; a plain name means a queue
            that exists and is not declared.
        handler: called with one `Delivery`, or with a list of them where ``batch_size`` is given, on a worker thread.
            A batch handler may return a verdict per item (``Ack``, ``RetryLater(...)``, ``DeadLetter(...)``), in the
            order in which it leaves its list; where it raises, each item is tried again by itself. None to use ``get``
            alone.
        topology: what else to declare.
        prefetch: deliveries that may be unacked at a time; 100 to 300 is usually best, 0 is no limit.
        concurrency: worker threads, that is, handlers that run at a time. Above 1, handlers run out of order.
        retry: when a failed delivery is tried again, and where it waits meanwhile.
        kill_switch: when to pause because too many handlings fail; None for never.
        idempotency: a store of what is done, so that duplicates do not take effect again.
        idempotency_key: gives the key of a delivery; by default its ``message_id``.
        idempotency_lease: seconds for which a delivery being handled is claimed; longer than a handler may take.
        idempotency_namespace: tells equal queue names apart in a store that several brokers or virtual hosts share. By
            default the broker's cluster name and the virtual host, as ``"rabbit@a/orders"``; give a name of your own
            where the cluster's may change, or where several clusters deliver the same messages.
        ack_every: finished deliveries that are acked with one frame; by default half of the prefetch, 100 at most.
        ack_interval: seconds after which what is finished is acked, however few. Where no handler runs it is sooner.
        ack_mode: ``"automatic"``: the broker forgets what it sends: at most once, and nothing is retried.
        batch_size: deliveries per call of the handler.
        batch_wait: seconds that an incomplete batch waits for more.
        dead_letter: a ``Queue`` or the name of one for what is given up; by default that of ``queue``; None for none:
            what is given up is rejected, and where the broker has no dead-letter exchange for it, lost.
        offset: where to begin in a stream: ``"first"``, ``"last"``, ``"next"`` (the default), an offset, or an aware
            ``datetime``.
        exclusive: refuse other consumers of a classic queue. RabbitMQ ignores it on others, which have
            ``Queue(..., single_active_consumer=True)``.
        consumer_arguments: further arguments of ``basic.consume``, e.g. ``{"x-priority": 5}``.
        max_body_bytes: a larger delivery is dead-lettered, no handler sees it; None for no limit. One more than 1 MiB
            larger is not read into memory where the queue has dead letters of its own: the broker dead-letters it.
        max_header_bytes: likewise for the encoded properties and headers.
        consumer_timeout: seconds after which the broker takes a delivery back that is unacked: its own setting, which
            no client can read; None where it has none. What the arguments of the queue say counts more. After three
            quarters of it a warning is logged.
        stop_timeout: seconds that ``stop`` waits for handlers that run; after that their deliveries come again.
        new_queue_grace: as for ``Publisher``, for what is published again: the original of a retry or a dead letter is
            acked once its copy is confirmed for good.
        reconnect_wait: as for ``Publisher``.
        reconnect_stop: as for ``Publisher``.
        credentials: as for ``Publisher``.
        tls: as for ``Publisher``.
        heartbeat: seconds.
        connect_timeout: seconds for one attempt on one host.
        name: of threads, in metrics, in dead letters, and of the consumer at the broker.
        registry: where to register Prometheus metrics; None for none.

    Raises:
        ConfigurationError: an argument is wrong, or does not go with another; the message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queue: Queue | str,
        handler: Callable[[Any], object] | None = None,
        *,
        topology: Iterable[Declaration] = (),
        prefetch: int = 200,
        concurrency: int = 1,
        retry: RetryPolicy | None = None,
        kill_switch: KillSwitch | None = None,
        idempotency: IdempotencyStore | None = None,
        idempotency_key: Callable[[Delivery], str | None] | None = None,
        idempotency_lease: Duration = 300.0,
        idempotency_namespace: str | None = None,
        ack_every: int | None = None,
        ack_interval: Duration = 0.2,
        ack_mode: AckMode = "manual",
        batch_size: int | None = None,
        batch_wait: Duration = 1.0,
        dead_letter: Queue | str | DefaultDeadLetter | None = DEFAULT,
        offset: Offset | None = None,
        exclusive: bool = False,
        consumer_arguments: Mapping[str, object] | None = None,
        max_body_bytes: int | None = None,
        max_header_bytes: int | None = None,
        consumer_timeout: Duration | None = CONSUMER_TIMEOUT,
        stop_timeout: Duration = 30.0,
        new_queue_grace: Duration = NEW_QUEUE_GRACE,
        reconnect_wait: wait_base | None = None,
        reconnect_stop: stop_base | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
        name: str = "consumer",
        registry: CollectorRegistry | None = None,
    ) -> None:
        if idempotency is not None and not isinstance(idempotency, IdempotencyStore):
            raise ConfigurationError(f"idempotency must be an IdempotencyStore, not {idempotency!r}")
        if inspect.iscoroutinefunction(getattr(idempotency, "claim_many", None)):
            raise ConfigurationError(
                f"idempotency is a store for AsyncConsumer, which nothing here would await: {idempotency!r}"
            )
        if is_coroutine_function(handler):
            raise ConfigurationError("handler is a coroutine function, which nothing here would await")
        self._options = ConsumerOptions(
            queue,
            handler,
            name=name,
            topology=topology,
            prefetch=prefetch,
            concurrency=concurrency,
            retry=retry,
            kill_switch=kill_switch,
            idempotency=idempotency is not None,
            idempotency_key=idempotency_key,
            idempotency_lease=idempotency_lease,
            idempotency_namespace=idempotency_namespace,
            ack_every=ack_every,
            ack_interval=ack_interval,
            ack_mode=ack_mode,
            batch_size=batch_size,
            batch_wait=batch_wait,
            dead_letter=dead_letter,
            offset=offset,
            exclusive=exclusive,
            consumer_arguments=consumer_arguments,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            consumer_timeout=consumer_timeout,
            stop_timeout=stop_timeout,
            new_queue_grace=new_queue_grace,
        )
        self._settings = parse_url(
            url, tls=tls, credentials=credentials, heartbeat=heartbeat, connect_timeout=connect_timeout
        )
        self._new_publisher = partial(
            Publisher,
            url,
            delivery_timeout=_REPUBLISH_TIMEOUT,
            retry=RetryPolicy(1),  # the session tries again
            on_blocked="raise",  # the session decides what to do instead
            new_queue_grace=new_queue_grace,
            tls=tls,
            credentials=credentials,
            heartbeat=heartbeat,
            connect_timeout=connect_timeout,
            name=f"{name}-dead-letters",
        )
        self._handler = handler
        self._store = idempotency
        self._reconnect = reconnect_wait, reconnect_stop
        self._new_recovery()  # so that a wrong reconnect_wait or reconnect_stop is refused here
        self._made_in = os.getpid()
        self._lock = threading.RLock()  # for the three below, held for moments only; again by a signal handler
        self._subscription: Subscription | None = None
        self._entered = False  # run or with has begun
        self._stopped = False
        self._stop_by: float | None = None  # on the monotonic clock
        self._workers: tuple[WorkerPool, ...] = ()
        self._registration = None if registry is None else register(registry, self._readings)

    # Running

    def run(self) -> None:
        """Consume until `stop`, or a signal (SIGTERM, SIGINT) where this is the main thread. Blocks.

        On stopping, nothing new is handed out, what has not begun goes back to the broker, what is being handled is
        finished and acked, for which ``stop_timeout`` is given. A second signal does not wait for that.

        Raises:
            TopologyMismatch: the queue differs from what is declared, or does not exist.
            BrokerUnavailable: connecting cannot succeed, or was given up as told.
            UsageError: it runs already, was stopped, or has no handler.
        """
        if self._handler is None:
            raise UsageError("run() needs a handler; without one, get() gives deliveries")
        with self._signals() as received:
            subscription = self._start(enter=True)
            if received:
                self.stop()
            try:
                wait_heeding_signals(subscription.ended)
            finally:
                self._finish(subscription)
        if subscription.error is not None:
            raise subscription.error

    def stop(self) -> None:
        """Begin to stop and return at once. Any thread, handlers and signal handlers too.

        `run` returns, or the end of ``with`` is reached, when what is being handled has ended.
        """
        with self._lock:
            self._stopped = True
            self._stop_by = self._stop_by or time.monotonic() + self._options.stop_timeout
            subscription = self._subscription
        if subscription is not None:
            subscription.stop()

    def close(self) -> None:
        """Stop, and wait until what is being handled has ended and the connection is closed.

        Waits for ``stop_timeout`` and a few seconds at most. Does nothing where it is closed, or in a forked child.

        Raises:
            UsageError: called by a handler, which would wait for itself; it can call `stop`.
        """
        if os.getpid() != self._made_in:
            return
        if any(workers.is_current for workers in self._workers):
            raise UsageError("a handler cannot close its own consumer, which waits for it: call stop()")
        self.stop()
        if self._subscription is not None:
            self._finish(self._subscription)
        elif self._registration is not None:
            self._registration.close()

    def connect(self) -> None:
        """Begin as ``with`` does, but raise where the broker cannot be reached at once. Does nothing where it is.

        After an error nothing is left running, and all can be tried again.

        Raises:
            BrokerUnavailable: no host could be reached; with ``permanent`` where trying again cannot help.
            TopologyMismatch: the queue differs from what is declared, or does not exist.
            UsageError: it was stopped.
        """
        self._connect(required=True)

    def __enter__(self) -> Self:
        """Consume in the background. Where the broker cannot be reached now, it goes on trying; errors as for `run`."""
        subscription = None
        try:
            subscription = self._start(enter=True)
            self._await_verdict(subscription)
        except BaseException as error:
            if subscription is not None or not isinstance(error, ReliableMQError):
                self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait for it. Raises the error that ended it, but never in place of an exception of the body."""
        try:
            self.close()
        except ReliableMQError:
            raise
        except BaseException:  # of a signal handler, say: nobody closes it again
            if self._subscription is not None:
                self._subscription.stop_now()
            self.close()
            raise
        error = None if self._subscription is None else self._subscription.error
        if error is not None and exc_type is None:
            raise error

    @contextmanager
    def get(self, max_messages: int = 1, timeout: Duration = 0.0) -> Iterator[list[PulledDelivery]]:
        """Take deliveries on request instead of having a handler called.

        The block gets what is in the queue, up to ``max_messages``; where nothing is, the first to come within
        ``timeout``, or nothing. Each delivery may be settled by itself (``ack()``, ``retry()``,
        ``dead_letter(reason)``). When the block ends, the others are acked; when it raises, they go back to the queue.

        The first call connects, unless ``with`` has. Callers on several threads take turns.

        Args:
            max_messages: at most as many as the prefetch, those not settled yet included.
            timeout: seconds; the answer of a broker that is connected is waited for in any case.

        Raises:
            UsageError: the consumer has a handler, was stopped, or the prefetch is used up.
            TopologyMismatch, BrokerUnavailable: as for `run`.
            ConsumerCancelled: nothing came, since a queue that is not declared here was deleted.
            StaleDelivery: at the end of the block: a channel was lost, and what could not be acked will come again.
        """
        if self._handler is not None:
            raise UsageError("get() is for consumers without a handler")
        wait = seconds("timeout", timeout)
        whole_number("max_messages", max_messages, 1)
        self._check_not_forked()
        subscription = self._subscription
        if subscription is None or subscription.ended.is_set():
            subscription = self._connect(required=False)
        if not isinstance(subscription, PullSubscription):
            raise TypeError("a consumer without a handler has another subscription")
        deliveries = subscription.take(max_messages, wait)
        if not deliveries and subscription.error is not None:
            raise subscription.error
        try:
            yield deliveries
        except BaseException:
            subscription.leave(deliveries, ack=False)
            raise
        subscription.leave(deliveries, ack=True)

    # What can be seen, and changed

    @property
    def prefetch(self) -> int:
        """Deliveries that may be unacked. Setting it takes effect at once; for a while both limits may add up.

        On a ``Queue(..., single_active_consumer=True)`` it takes effect once nothing is unacked here for a moment, or
        with the next channel: a new subscription gives the role away. A queue given by its name is not known to be one.
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
        """Whether it is subscribed, as far as is known."""
        return self._subscription is not None and self._subscription.connected

    @property
    def statistics(self) -> ConsumerStatistics:
        """Counts since it was started."""
        return ConsumerStatistics() if self._subscription is None else self._subscription.session.statistics

    @property
    def reconnects(self) -> int:
        """Connections lost and made again."""
        return 0 if self._subscription is None else self._subscription.reconnects

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "consuming" if self.connected else "not connected"
        hosts = ", ".join(map(str, self._settings.endpoints))
        return f"<Consumer {self._options.name!r} of queue {self._options.queue_name!r} at {hosts}: {state}>"

    # Private

    def _start(self, *, enter: bool = False) -> Subscription:
        """Give the subscription, started. ``enter``: for the one `run` or ``with`` that there may be."""
        self._check_not_forked()
        starts = False
        try:
            with self._lock:
                self._check_startable(enter)
                if self._subscription is not None:
                    self._entered |= enter
                    return self._subscription
                starts = True
                subscription = self._subscription = self._new_subscription()
                _open_consumers.add(self)
                for workers in self._workers:
                    workers.start()
                subscription.start()
                self._entered |= enter
                return subscription
        except BaseException:  # of a signal handler, say: nobody else knows what runs by now
            if starts:
                self._undo_start()
            raise

    def _check_startable(self, enter: bool) -> None:
        if self._stopped:
            raise UsageError("this consumer was stopped, and runs once: make another")
        if enter and self._entered:
            raise UsageError("this consumer runs already, and runs once: make another")

    def _undo_start(self) -> None:
        subscription, self._subscription = self._subscription, None
        workers, self._workers = self._workers, ()
        if subscription is not None:
            subscription.abort()
        for one in workers:
            one.stop(0)
        _open_consumers.discard(self)

    def _check_not_forked(self) -> None:
        if os.getpid() != self._made_in:
            raise UsageError("this consumer was made before fork(), in another process; make one here")

    def _connect(self, *, required: bool) -> Subscription:
        """Start, and wait for the verdict. Where it is an error, nothing is left of what this call has started."""
        first = self._subscription is None
        subscription = self._start()
        try:
            self._await_verdict(subscription, required=required)
        except BaseException:
            if first:
                subscription.stop_now()
                self._finish(subscription)
                self._subscription, self._workers = None, ()
            raise
        return subscription

    def _new_subscription(self) -> Subscription:
        for warning in self._options.warnings:
            logger.warning("%s", warning)
        subscription: Subscription
        if self._handler is None:
            subscription = PullSubscription(self._options, self._settings, self._new_recovery())
        else:
            subscription = Subscription(self._options, self._settings, self._new_recovery())
            new_workers = partial(
                WorkerPool,
                handler=self._handler,
                batch=self._options.batch,
                store=self._store,
                claiming=self._options.new_claiming(getattr(self._store, "transaction", None)),
                sink=subscription,
            )
            subscription.outlet = new_workers(name=self._options.name, count=self._options.concurrency)
            self._workers = (subscription.outlet,)
            if self._options.isolates:
                subscription.isolation = new_workers(name=f"{self._options.name}-quarantine", count=1)
                self._workers += (subscription.isolation,)
        if self._options.republishes:
            name = f"{self._options.name}-dead-letters-out"
            subscription.republisher = Republisher(self._new_publisher(), subscription.published, name)
        return subscription

    def _await_verdict(self, subscription: Subscription, *, required: bool = False) -> None:
        """Wait until each host had its first attempt. Raises what time cannot heal, or every error if ``required``."""
        error = subscription.wait_connected(self._first_verdict)
        if error is not None and (required or error is subscription.error):
            raise error

    @property
    def _first_verdict(self) -> float:
        """Seconds after which every host has had its first attempt."""
        return self._settings.connect_timeout * len(self._settings.endpoints) + 1.0

    def _finish(self, subscription: Subscription) -> None:
        """Wait for the end, and leave nothing behind. Several threads may do so."""
        subscription.stop()
        subscription.ended.wait()
        subscription.join()
        if self._workers:
            if subscription.error is not None:
                patience = self._options.stop_timeout  # it ended by itself: handlers may be at it
            else:
                patience = 0.1 if subscription.session.running else _END_TIMEOUT
            ended = [workers.stop(patience) for workers in self._workers]
            if not all(ended):
                logger.warning("handlers of consumer %r are still running", self._options.name)
            left = self._options.stop_timeout if self._stop_by is None else self._stop_by - time.monotonic()
            left = max(left, _TELL_AT_LEAST)
            owed = self._workers[0].tell_owed(left, lambda: not subscription.hurried)
            if owed:
                logger.error(OWED, self._options.name, owed)
        if subscription.republisher is not None:
            subscription.republisher.close(_END_TIMEOUT)
        if self._registration is not None and self._stopped:
            self._registration.close()
        _open_consumers.discard(self)

    def _new_recovery(self) -> ReconnectPolicy:
        wait, stop = self._reconnect
        return ReconnectPolicy(hosts=len(self._settings.endpoints), wait=wait, stop=stop)

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """Have SIGTERM and SIGINT stop the consumer while `run` blocks the main thread; gives those that came."""
        received: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield received
            return

        def on_signal(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            if self._subscription is None:
                return  # it is being made, by `run`, which looks at what was received
            if len(received) == 1:
                self.stop()
            else:
                self._subscription.stop_now()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield received
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _readings(self) -> Iterator[Reading]:
        subscription = self._subscription
        if subscription is not None:
            handler_seconds = Histogram()
            for workers in self._workers:
                handler_seconds.add(workers.handler_seconds)
            yield from consumer_readings(
                self._options.name,
                self._options.queue_name,
                ConsumerStatus(
                    unacked=subscription.session.outstanding,
                    connected=subscription.connected,
                    paused=subscription.session.paused,
                    reconnects=subscription.reconnects,
                    handler_seconds=handler_seconds,
                ),
                subscription.session.statistics,
            )


# Consumers that run in the background are closed at the latest when the interpreter exits, so that what is done is
# acked and the rest goes back. In a forked child they are the parent's.
_open_consumers: set[Consumer] = set()
at_fork(ForkStage.FORGET, _open_consumers.clear)


def _close_at_exit() -> None:
    for consumer in list(_open_consumers):
        logger.warning("%r was not closed; closing it at exit", consumer)
        try:
            consumer.close()
        except Exception:
            logger.exception("closing %r at exit", consumer)  # the others are to be closed, too


at_exit(ExitStage.CONSUMERS, _close_at_exit)
