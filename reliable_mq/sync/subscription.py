"""The consumer's connection in the sync API: on an I/O thread, others wait for it.

Dead letters and retries are published on a connection of their own, since the broker blocks publishing connections
under an alarm, and a consumer's must go on acking; and on a thread of their own, since opening that connection and a
full window block.

Invariants: the outcome of each publish is reported exactly once; nothing blocks the caller of `Republisher.put`; the
connection is opened with the first publish.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq._util.threads import CallbackThread
from reliable_mq.engine.pull import BasePullSubscription, PulledDelivery
from reliable_mq.engine.republisher import BaseRepublisher
from reliable_mq.engine.subscription import CLOSE_GRACE, BaseSubscription
from reliable_mq.errors import PublishError
from reliable_mq.message import Message
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import ConnectionListener
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.reconnect import ReconnectPolicy
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings
    from reliable_mq.sync.publisher import Publisher

__all__ = ["PullSubscription", "PulledDelivery", "Republisher", "Subscription"]

logger = logging.getLogger(__name__)


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
        self._thread.put(partial(self._publish, republish))

    def close(self, timeout: float) -> None:
        """Abandon publishes without a confirm in time; their originals stay unacked."""
        try:
            self._publisher.close(timeout)
        except PublishError:
            logger.exception("dead letters were given up; their originals stay in the queue")
        self._thread.stop()
        self._thread.join(timeout)

    def _publish(self, republish: RepublishRequest) -> None:
        try:
            message = Message.from_wire(republish.body, republish.properties)
            with self._attempt(republish):
                confirmation = self._publisher.submit(
                    message, exchange=republish.exchange, routing_key=republish.routing_key
                )
        except Exception as error:  # noqa: BLE001  # reported
            self._not_submitted(republish, error)
        else:
            confirmation.add_done_callback(partial(self._settled, republish))


class Subscription(BaseSubscription):
    """The connection of a consumer, on an I/O thread."""

    ended: threading.Event
    republisher: Republisher | None
    _first_attempts_over: threading.Event
    _io: IOThread

    def __init__(
        self, options: ConsumerOptions, settings: ConnectionSettings, reconnect_policy: ReconnectPolicy
    ) -> None:
        super().__init__(options, settings, reconnect_policy)
        self._outside = CallbackThread(f"{options.name}-traces")  # started with the first call

    def wait_connected(self, timeout: float) -> ReliableMQError | None:
        """Wait for the first attempt on every host. Returns its error, or None.

        A set-up that goes on (a large topology) is waited for beyond ``timeout``.
        """
        limit = timeout
        while limit > 0 and not self._first_attempts_over.wait(limit):
            limit = self._io.patience
        return self.why_not_connected(timeout)

    def abort(self) -> None:
        """End at once, however far it was started. Does not wait."""
        self._io.stop()

    def join(self) -> bool:
        """After the end, wait until the connection is closed."""
        self._outside.stop()
        closed = self._io.close(CLOSE_GRACE)
        return self._outside.join(CLOSE_GRACE) and closed

    def _call_outside(self, call: Callable[[], object]) -> None:
        self._outside.put(call)

    def _call_outside_later(self, call: Callable[[], object]) -> None:
        self._outside.put_later(call)

    def _new_event(self) -> threading.Event:
        return threading.Event()

    def _new_connection(
        self,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: ConnectionListener,
        reconnect_policy: ReconnectPolicy,
    ) -> IOThread:
        return IOThread(name=name, settings=settings, setup=setup, client=client, reconnect_policy=reconnect_policy)


class PullSubscription(Subscription, BasePullSubscription):
    """A subscription that asks for each delivery."""

    _changed: threading.Condition

    def __init__(
        self, options: ConsumerOptions, settings: ConnectionSettings, reconnect_policy: ReconnectPolicy
    ) -> None:
        super().__init__(options, settings, reconnect_policy)
        self._turn = threading.Lock()

    def take(self, most: int, timeout: float) -> list[PulledDelivery]:
        """Take up to ``most`` deliveries: those here, or the first that come in time.

        The answers of a broker that is connected are waited for, a few seconds beyond ``timeout`` at most.

        Raises:
            UsageError: that would exceed the prefetch.
        """
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            return []
        try:
            return self._take(most, max(deadline, time.monotonic()))
        finally:
            self._turn.release()

    def _take(self, most: int, deadline: float) -> list[PulledDelivery]:
        taken: list[PulledDelivery] = []
        with self._changed:
            self._begin_round(most)
            try:
                while (wait := self._take_arrived(taken, deadline)) is not None:
                    self._changed.wait(min(wait, threading.TIMEOUT_MAX))
            except BaseException:
                self._put_back(taken)
                raise
            finally:
                self._end_round()
        return taken

    def _new_changes(self) -> threading.Condition:
        return threading.Condition()
