"""A consumer's connection on an I/O thread, and how any other thread waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reliable_mq.connection.consuming.subscription import CLOSE_GRACE, BaseSubscription
from reliable_mq.sync.io_thread import IOThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.client import Client
    from reliable_mq.core.recovery import Recovery
    from reliable_mq.core.setup import ServerInfo, SetupGenerator
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings
    from reliable_mq.sync.republisher import Republisher

__all__ = ["Subscription"]


class Subscription(BaseSubscription):
    """See `BaseSubscription`."""

    ended: threading.Event
    republisher: Republisher | None
    _verdict: threading.Event
    _io: IOThread

    def wait_connected(self, timeout: float) -> ReliableMQError | None:
        """Wait for the outcome of the first attempt on every host. Returns why it is not subscribed, or None.

        A set-up that goes on (a large topology) is waited for beyond ``timeout``.
        """
        limit = timeout
        while limit > 0 and not self._verdict.wait(limit):
            limit = self._io.patience
        return self.verdict(timeout)

    def abort(self) -> None:
        """End at once, however far it was started. Does not wait."""
        self._io.stop()

    def join(self) -> bool:
        """After the end, wait until the connection is closed."""
        return self._io.close(CLOSE_GRACE)

    def _new_event(self) -> threading.Event:
        return threading.Event()

    def _new_connection(
        self,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: Client,
        recovery: Recovery,
    ) -> IOThread:
        return IOThread(name=name, settings=settings, setup=setup, client=client, recovery=recovery)
