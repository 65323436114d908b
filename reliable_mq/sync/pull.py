"""Deliveries on request, for callers on any thread, who take turns."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reliable_mq.connection.consuming.pull import BasePullSubscription, PulledDelivery
from reliable_mq.sync.subscription import Subscription

if TYPE_CHECKING:
    from reliable_mq.core.consumer_options import ConsumerOptions
    from reliable_mq.core.recovery import Recovery
    from reliable_mq.settings import ConnectionSettings

__all__ = ["PullSubscription", "PulledDelivery"]


class PullSubscription(Subscription, BasePullSubscription):
    """See `BasePullSubscription`."""

    _changed: threading.Condition

    def __init__(self, options: ConsumerOptions, settings: ConnectionSettings, recovery: Recovery) -> None:
        super().__init__(options, settings, recovery)
        self._turn = threading.Lock()

    def take(self, most: int, timeout: float) -> list[PulledDelivery]:
        """Take up to ``most`` deliveries: all that are there, or what comes first within ``timeout`` seconds.

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
                self._give_back(taken)
                raise
            finally:
                self._end_round()
        return taken

    def _new_changes(self) -> threading.Condition:
        return threading.Condition()
