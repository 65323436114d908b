"""The idempotent consumer of the sync API.

It starts and ends the parts: a subscription, worker threads, and a publisher for dead letters. The delivery guarantees
are implemented in :mod:`reliable_mq.core.consumer.session`. The waits of `run` let signal handlers run
(`reliable_mq._util.signals`).
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.signals import stop_signals_handled, wait_heeding_signals
from reliable_mq._util.validation import Duration, is_coroutine_function
from reliable_mq.engine.consumer import END_TIMEOUT, BaseConsumer
from reliable_mq.engine.pull import leave
from reliable_mq.engine.steps import blocking
from reliable_mq.engine.workers import WorkerPool
from reliable_mq.errors import ConfigurationError, ReliableMQError
from reliable_mq.sync.publisher import Publisher
from reliable_mq.sync.subscription import PullSubscription, Republisher, Subscription

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.engine.pull import PulledDelivery

logger = get_logger(__name__)


class Consumer(BaseConsumer[Subscription, WorkerPool]):
    """A consumer that calls a handler with a queue's messages, and acks them.

    Thread-safe. If the handler returns, its delivery is handled and acked. If the handler raises, its delivery has
    failed. It is retried according to ``retry``, then dead-lettered with the reason in its headers, and acked once the
    dead letter is confirmed. A handler can choose between these by raising or returning ``RetryLater`` or
    ``DeadLetter``. Deliveries that are not acked when the connection or the process dies are delivered again, so a
    handler must tolerate duplicates unless ``idempotency`` is set.

    Construction does not connect. ``run``, ``with``, ``get`` and ``connect`` do. From then on the consumer reconnects
    by itself, until it is stopped. It runs once.
    """

    _subscription_type = Subscription
    _pull_subscription_type = PullSubscription
    _republisher_type = Republisher
    _publisher_type = Publisher

    def _check_options(self, options: ConsumerOptions) -> None:
        if is_coroutine_function(getattr(options.store, "claim_many", None)):
            raise ConfigurationError(
                f"idempotency is a store for AsyncConsumer, which would never be awaited: {options.store!r}"
            )
        if is_coroutine_function(options.handler):
            raise ConfigurationError("handler is a coroutine function, which would never be awaited: use AsyncConsumer")

    def _pool_type(self) -> type[WorkerPool]:
        return WorkerPool

    # Running

    def run(self) -> None:
        """Consume until `stop`, or on the main thread SIGTERM or SIGINT. Blocks.

        On stopping, no further handler is called and deliveries that no handler has started are requeued. Running
        handlers get ``stop_timeout`` to finish, and their deliveries are acked. A second signal ends this wait.

        Raises:
            TopologyMismatch: If the queue differs from its declaration, or does not exist.
            BrokerUnavailable: If connecting cannot succeed, or ``reconnect_stop`` has ended it.
            UsageError: If the consumer is already running, was stopped, or has no handler.
        """
        self._run()

    def _run(self) -> int | None:
        """Run the consumer, and return the first received signal."""
        self._check_runnable()
        try:
            with self._signals() as received:
                subscription = self._start(enter=True)
                if received:
                    self.stop()
                try:
                    wait_heeding_signals(subscription.ended, lambda: subscription.loop_over)
                finally:
                    self._ended(subscription)
                    blocking(self._finish(subscription, self._pools))
        except ReliableMQError:
            raise
        except BaseException:  # for example from a signal handler; nothing else would end it
            self._close_at_once()
            raise
        self._raise_error()
        return received[0] if received else None

    def close(self) -> None:
        """Stop, and wait until running handlers have ended and the connection is closed.

        Waits for ``stop_timeout`` and a few seconds at most. Does nothing if it is already closed, or in a forked
        child.

        Raises:
            UsageError: If called by a handler, which would wait for itself. A handler can call `stop`.
        """
        blocking(self._close())

    def connect(self) -> None:
        """Start like ``with``, but raise if the broker cannot be reached at once.

        Does nothing while it is connected. After an error nothing is left running, and the call can be repeated.

        Raises:
            BrokerUnavailable: If no host can be reached. It has ``permanent`` set if trying again cannot help.
            TopologyMismatch: If the queue differs from its declaration, or does not exist.
            UsageError: If the consumer was stopped.
        """
        blocking(self._connect(required=True))

    def __enter__(self) -> Self:
        """Consume in the background. Raise the errors of `run`.

        If the broker cannot be reached now, the consumer keeps trying.
        """
        try:
            blocking(self._enter())
        except ReliableMQError:
            raise
        except BaseException:  # for example from a signal handler; ``__exit__`` will not be called
            self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait for the end. Raise the error that ended the consumer.

        That error never replaces an exception of the body.
        """
        try:
            self.close()
        except ReliableMQError:
            raise
        except BaseException:  # for example from a signal handler; nothing else would close it
            self._close_at_once()
            raise
        if exc_type is None:
            self._raise_error()

    def _close_at_once(self) -> None:
        """Close without waiting for handlers."""
        if self._subscription is not None:
            self._subscription.stop_now()
        self.close()

    @contextmanager
    def get(self, max_messages: int = 1, timeout: Duration = 0.0) -> Iterator[list[PulledDelivery]]:
        """Take deliveries on request instead of having a handler called.

        The block gets the messages in the queue, up to ``max_messages``. If the queue is empty, the block gets the
        first messages that arrive within ``timeout``, or an empty list. Each delivery may be settled separately
        (``ack()``, ``retry()``, ``dead_letter(reason)``). When the block ends, the others are acked. When it raises,
        they are requeued.

        The first call connects, unless ``with`` has connected. Callers on several threads take turns.

        Args:
            max_messages: The maximum number of deliveries. Together with those not settled yet it must not exceed the
                prefetch.
            timeout: The time to wait, in seconds. The answer of a connected broker is awaited in any case.

        Raises:
            UsageError: If the consumer has a handler or was stopped, or the prefetch is used up.
            TopologyMismatch, BrokerUnavailable: As for `run`.
            ConsumerCancelled: If no message arrived because a queue that is not declared here was deleted.
            StaleDelivery: At the end of the block, if a channel was lost. Deliveries that could not be acked will be
                delivered again.
        """
        deliveries: list[PulledDelivery] = []
        try:
            blocking(self._get(max_messages, timeout, deliveries))
            yield list(deliveries)  # the block may do as it likes with its list
            leave(deliveries, ack=True)
        except BaseException:
            leave(deliveries, ack=False)
            raise

    # Starting and ending

    def _wait_ended(self, subscription: Subscription) -> None:
        until = time.monotonic() + self._options.stop_timeout + END_TIMEOUT
        wait_heeding_signals(subscription.ended, lambda: time.monotonic() >= until)
        if not subscription.ended.is_set():
            logger.error("consumer %r did not end in time; its threads are left running", self._options.name)

    def _stop_pools(self, pools: tuple[WorkerPool, ...], patience: float) -> list[bool]:
        return [pool.stop(max(patience, 0.1)) for pool in pools]

    def _keep(self) -> None:
        super()._keep()
        _open_consumers.add(self)

    def _release(self) -> None:
        super()._release()
        _open_consumers.discard(self)

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """Stop on SIGTERM and SIGINT while `run` blocks. Return the received signals."""
        received: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield received
            return

        def on_signal(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            if self._subscription is None:
                return  # `run` is creating it, and checks `received`
            if len(received) == 1:
                self.stop()
            else:
                self._subscription.stop_now()

        with stop_signals_handled(on_signal):
            yield received


def run_to_signal(consumer: Consumer) -> int | None:
    """Run a consumer like `Consumer.run`, and return the first received signal."""
    return consumer._run()  # noqa: SLF001  # of this module


# Consumers that run in the background are closed at the latest when the interpreter exits. So handled deliveries
# are acked and the others are requeued. In a forked child the consumers belong to the parent.
_open_consumers: set[Consumer] = set()
at_fork(ForkStage.FORGET, _open_consumers.clear)


def _close_at_exit() -> None:
    for consumer in list(_open_consumers):
        logger.warning("%r was not closed; closing it at exit", consumer)
        try:
            consumer.close()
        except Exception:
            logger.exception("failed to close %r at exit", consumer)  # the others must be closed, too


at_exit(ExitStage.CONSUMERS, _close_at_exit)
