"""The consumer's connection in the sync API, on an I/O thread.

Callers on other threads wait for it. Dead letters and retries are published on a separate thread, because opening their
connection and a full window block.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq._util.threads import CallbackThread, Condition, InterruptibleEvent
from reliable_mq.engine.pull import ANSWER, LONGEST_WAIT, BasePullSubscription, PulledDelivery
from reliable_mq.engine.republisher import BaseRepublisher
from reliable_mq.engine.steps import blocking
from reliable_mq.engine.subscription import CLOSE_GRACE, BaseSubscription
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.sync.publisher import Publisher

logger = get_logger(__name__)

_LOG_THREAD_EVERY = 60.0  # seconds
_CHECK_EVERY = 0.1  # seconds between checks whose turn it is, as the caller before may have been interrupted


class Republisher(BaseRepublisher):
    """A republisher that publishes on a separate thread. Thread-safe."""

    _publisher: Publisher

    def __init__(
        self, publisher: Publisher, report: Callable[[RepublishRequest, ReliableMQError | None], None], name: str
    ) -> None:
        super().__init__(publisher, report)
        self._thread = CallbackThread(name)

    def put(self, republish: RepublishRequest) -> None:
        try:
            self._thread.put(lambda: blocking(self._publish(republish)))
        except RuntimeError as error:  # no thread can be started now; the session tries again later
            self._not_submitted(republish, error)

    def close(self, timeout: float) -> None:
        blocking(self._close_publisher(timeout))
        self._thread.stop()
        self._thread.join(timeout)


class Subscription(BaseSubscription):
    """The connection of a consumer, on an I/O thread."""

    ended: InterruptibleEvent
    _connection_type = IOThread
    _event_type = InterruptibleEvent
    _first_attempts_over: InterruptibleEvent
    _io: IOThread

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self._outside = CallbackThread(f"{options.name}-traces")  # started with the first call
        self._thread_log = LogLimit(_LOG_THREAD_EVERY)

    @property
    def loop_over(self) -> bool:
        """Whether the I/O thread has ended, so that nothing is acked any more."""
        return self._io.over

    def _wait_first_attempts(self, timeout: float) -> None:
        self._first_attempts_over.wait(timeout)

    def join(self) -> bool:
        self._outside.stop()
        closed = self._io.close(CLOSE_GRACE)
        return self._outside.join(CLOSE_GRACE) and closed

    def _call_outside(self, call: Callable[[], object]) -> None:
        try:
            self._outside.put_later(call)
        except RuntimeError as error:  # no thread can be started now; the next call may start one
            if count := self._thread_log.count():
                logger.warning(
                    "consumer %r: the spans of %d writes of acks wait or are lost, their thread cannot be started: %s",
                    self._options.name,
                    count,
                    error,
                )


class PullSubscription(Subscription, BasePullSubscription):
    """A subscription that requests each delivery."""

    _changes_type = Condition
    _changed: Condition

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self._turns = Condition(self._changed.lock)
        self._taker: object = None  # the call whose turn it is; guarded by the same lock

    def take(self, most: int, timeout: float, taken: list[PulledDelivery]) -> None:
        """Wait for deliveries. Callers on several threads take turns."""
        now = time.monotonic()
        deadline, until = now + timeout, now + min(timeout + ANSWER, LONGEST_WAIT)
        call = object()
        lock = self._changed.lock
        try:
            with lock:
                while True:  # without a condition: see `Condition`
                    if self._taker is None:
                        break
                    remaining = until - time.monotonic()
                    if remaining <= 0:
                        return
                    self._turns.wait(min(remaining, _CHECK_EVERY))
                self._taker = call
            blocking(self._take(most, max(deadline, time.monotonic()), taken))
        finally:
            if self._taker is call:  # no other thread sets or clears this turn
                self._taker = None
                with lock:
                    self._turns.notify_all()
