"""The outcome to come of one publish.

Light, since there is one per message: waiting and callbacks cost memory only where they are used, and a settled
confirmation that nobody watched was settled without a lock of its own.

Invariants:

- ``outcome`` is written by the I/O thread, once; every watcher added before is told, every one added later finds it;
- watchers are only added and taken under the lock that all confirmations of a publisher share;
- waiting lets go of that lock however often the caller holds it: a signal handler that has interrupted a call of the
  publisher may wait, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from reliable_mq._util.threads import Condition
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.publisher.publication import Outcome
from reliable_mq.engine.publisher_channel import ObservedPublication

if TYPE_CHECKING:
    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.errors import PublishError, ReliableMQError

__all__ = ["PATIENCE", "Confirmation", "time_to_wait"]

logger = logging.getLogger(__name__)

PATIENCE = 0.2
"""Seconds after which a caller that waits asks the I/O thread whether it has heard of everything."""

_WELL = (Outcome.CONFIRMED, Outcome.STORED)

_TOLD: list[Callable[[], object]] = []  # stands for the watchers of a confirmation whose watchers have been told


def time_to_wait(timeout: Duration | None) -> float | None:
    """Return ``timeout`` in seconds: 0 where it is over already, as the rest of a deadline may be; any length.

    Raises:
        ConfigurationError: it is no duration.
    """
    if timeout is None:
        return None
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(number, (int, float)) and (number < 0 or number > threading.TIMEOUT_MAX):
        return 0.0 if number < 0 else threading.TIMEOUT_MAX
    return seconds("timeout", number)


class ConfirmationOwner(Protocol):
    """What a confirmation needs of the publisher that it belongs to."""

    lock: threading.RLock
    fatal: ReliableMQError | None

    def expect_callbacks(self) -> None:
        """There will be calls to ``call_back``."""

    def call_back(self, call: Callable[[], object]) -> None:
        """Run ``call`` on the thread for the user's callbacks."""

    def check_waitable(self) -> None:
        """Raise UsageError where waiting can never end."""

    def nudge(self) -> None:
        """See to it that the I/O thread knows of every publish: the call that was to tell it may be interrupted."""

    def failure_seen(self) -> None:
        """A failure that was counted as unseen has been looked at; the caller holds the lock."""


class Confirmation(ObservedPublication):
    """What ``submit`` returns: the outcome of a publish, once it is known. Thread-safe.

    It has the methods of :class:`concurrent.futures.Future` that make sense here; it cannot be cancelled.
    """

    __slots__ = ()

    home: ConfirmationOwner

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self.message.message_id

    def done(self) -> bool:
        """Whether the outcome is known. Does not block."""
        return self.outcome is not None

    def result(self, timeout: Duration | None = None) -> Receipt:
        """Wait for the outcome.

        Args:
            timeout: seconds to wait, or a timedelta; None for as long as it takes, which the publish's own deadline
                bounds.

        Raises:
            PublishError: it was not confirmed.
            TimeoutError: the outcome is not known yet. Nothing is given up.
            ConfigurationError: ``timeout`` is no duration.
            UsageError: in a forked child, where it will never be known.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> PublishError | None:
        """Wait for the outcome as :meth:`result` does; returns the error, or None where the message was confirmed."""
        if self.outcome is None:
            self._wait(time_to_wait(timeout))
        error = self.failure()
        if error is not None:
            self._see()
            error.__cause__ = self.home.fatal
        return error

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(confirmation)`` when the outcome is known, on a thread of the publisher's for this purpose.

        Called at once, by the calling thread, where it is known already. A callback may publish; an exception in it is
        logged. Where callbacks are slower than publishing, ``submit`` waits for them as for room in the window.
        """
        call = partial(self._call, callback)
        self._see()
        if self.outcome is None:
            self.home.check_waitable()
            self.home.expect_callbacks()
        if not self._watch(partial(self.home.call_back, call)):
            call()

    def settled(self) -> None:
        """The I/O thread has written the outcome: tell the watchers. The caller holds the lock."""
        watchers, self.watchers = self.watchers, _TOLD
        for watcher in watchers or ():
            watcher()

    def _see(self) -> None:
        with self.home.lock:
            if not self.seen:
                self.seen = True
                if self.watchers is _TOLD and self.outcome not in _WELL:
                    self.home.failure_seen()

    def _watch(self, watcher: Callable[[], object]) -> bool:
        with self.home.lock:
            if self.outcome is not None:
                return False
            if self.watchers is None:
                self.watchers = []
            self.watchers.append(watcher)
            return True

    def _wait(self, timeout: float | None) -> None:
        home = self.home
        home.check_waitable()
        settled = Condition(home.lock)
        tell = settled.notify_all
        with settled:
            if not self._watch(tell):
                return
            try:
                limit = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
                if settled.wait_for(self.done, min(limit, PATIENCE)):
                    return
                home.nudge()
                if not settled.wait_for(self.done, limit - PATIENCE):
                    raise TimeoutError(f"{self} is not settled after {timeout} s; it is still being published")
            finally:
                self._unwatch(tell)

    def _unwatch(self, watcher: Callable[[], object]) -> None:
        """Under the lock. Forget it, where it was not told: a caller may wait again and again."""
        if self.watchers and self.outcome is None:
            self.watchers.remove(watcher)
            self.watchers = self.watchers or None

    def _call(self, callback: Callable[[Self], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %s raised; the publish itself is not affected", self)

    def __repr__(self) -> str:
        state = "outstanding" if self.outcome is None else self.outcome.value
        return f"<Confirmation of {self}: {state}>"
