"""The consumer's connection in the sync API: on an I/O thread, others wait for it.

Dead letters and retries are published on a connection of their own, since the broker blocks publishing connections
under an alarm, and a consumer's must go on acking; and on a thread of their own, since opening that connection and a
full window block.

Invariants: the outcome of each publish is reported exactly once; nothing blocks the caller of `Republisher.put`; the
connection is opened with the first publish.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reliable_mq._util.threads import CallbackThread
from reliable_mq.engine.pull import LONGEST_WAIT, BasePullSubscription, PulledDelivery
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

__all__ = ["PullSubscription", "PulledDelivery", "Republisher", "Subscription"]


class Republisher(BaseRepublisher):
    """Publishes on a thread of its own. Thread-safe."""

    _publisher: Publisher

    def __init__(
        self, publisher: Publisher, report: Callable[[RepublishRequest, ReliableMQError | None], None], name: str
    ) -> None:
        super().__init__(publisher, report)
        self._thread = CallbackThread(name)

    def put(self, republish: RepublishRequest) -> None:
        """Publish a message. Does not block."""
        self._thread.put(lambda: blocking(self._publish(republish)))

    def close(self, timeout: float) -> None:
        """Abandon publishes without a confirm in time; their originals stay unacked."""
        blocking(self._close_publisher(timeout))
        self._thread.stop()
        self._thread.join(timeout)


class Subscription(BaseSubscription):
    """The connection of a consumer, on an I/O thread."""

    ended: threading.Event
    _connection_type = IOThread
    _event_type = threading.Event
    _first_attempts_over: threading.Event
    _io: IOThread

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self._outside = CallbackThread(f"{options.name}-traces")  # started with the first call

    def wait_connected(self, timeout: float) -> ReliableMQError | None:
        """Block until the first attempts are over."""
        limit = timeout
        while limit > 0 and not self._first_attempts_over.wait(limit):
            limit = self._io.patience
        return self.why_not_connected(timeout)

    def join(self) -> bool:
        """Block until the connection is closed."""
        self._outside.stop()
        closed = self._io.close(CLOSE_GRACE)
        return self._outside.join(CLOSE_GRACE) and closed

    def _call_outside(self, call: Callable[[], object]) -> None:
        self._outside.put(call)

    def _call_outside_later(self, call: Callable[[], object]) -> None:
        self._outside.put_later(call)


class PullSubscription(Subscription, BasePullSubscription):
    """A subscription that asks for each delivery."""

    _changes_type = threading.Condition

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self._turn = threading.Lock()

    def take(self, most: int, timeout: float) -> list[PulledDelivery]:
        """Wait for deliveries; callers on several threads take turns."""
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=min(timeout, LONGEST_WAIT)):
            return []
        try:
            return blocking(self._take(most, max(deadline, time.monotonic())))
        finally:
            self._turn.release()
