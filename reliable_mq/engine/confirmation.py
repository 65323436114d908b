"""The base of the confirmations of both APIs: the future outcome of one publish.

Each message has one confirmation, so a confirmation is small. Callbacks use memory only if there are any.

Invariants:

- The publisher writes ``outcome`` once. Every callback added before that is called, and every callback added later
  finds the outcome.
- Callbacks are added and removed under a lock that all confirmations of a publisher share. In the asyncio API
  everything runs on one event loop, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import is_coroutine_function
from reliable_mq.core.publisher.publication import Outcome, Publication
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.engine.channel import BaseChannel
    from reliable_mq.errors import PublishError

logger = get_logger(__name__)

CALLED: list[Callable[[], object]] = []
"""Replaces the callbacks of a publish after they were called."""

_SUCCESSES = (Outcome.CONFIRMED, Outcome.STORED)


class BaseConfirmation(Publication):
    """A publication whose outcome its user can see. Each API adds the waiting."""

    __slots__ = ()

    owner: BaseChannel[Any]

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self.message.message_id

    def done(self) -> bool:
        """Return whether the outcome is known. Does not block."""
        return self.outcome is not None

    def exception(self) -> PublishError | None:
        """Return the error of a settled publish, or None if it was confirmed."""
        raise NotImplementedError

    def failure(self) -> PublishError | None:
        """Return the error of a settled publication, or None if it was confirmed.

        If the end of the channel has given the message up, that is the cause of the error.
        """
        error = super().failure()
        if error is not None and self.outcome is Outcome.UNKNOWN and self.owner.fatal is not None:
            error.__cause__ = self.owner.fatal
        return error

    def settled(self) -> None:
        """Call the callbacks after the outcome is written. The caller holds the lock.

        An exception in one callback, for example if no thread can be started, does not affect the other callbacks.
        """
        callbacks, self.callbacks = self.callbacks, CALLED
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                logger.exception("failed to notify a waiter of %s", self)

    def _observe(self) -> PublishError | None:
        """Return the error of a settled publish, or None, and mark it as seen."""
        error = self.failure()
        if error is not None:
            self._mark_observed()
        return error

    @staticmethod
    def _check_callback(callback: object) -> None:
        """Raise ConfigurationError for a callback that would not run.

        Once a callback is added, a failure counts as seen.
        """
        if not callable(callback):
            raise ConfigurationError(f"callback must be callable, not {callback!r}")
        if is_coroutine_function(callback):
            raise ConfigurationError("callback is a coroutine function, which would never be awaited")

    def _mark_observed(self) -> None:
        """Mark the outcome as seen, whether or not it is known. The lock is held."""
        if not self.result_observed:
            self.result_observed = True
            if self.callbacks is CALLED and self.outcome not in _SUCCESSES:
                self.owner.failure_observed()

    def _add_callback(self, callback: Callable[[], object]) -> bool:
        """Add a callback; return False, without adding it, if the outcome is known.

        The caller holds the lock.
        """
        if self.outcome is not None:
            return False
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)
        return True

    def _remove_callback(self, callback: Callable[[], object]) -> None:
        """Remove a callback that was not called. The caller holds the lock.

        Without this, callbacks would add up when a caller waits repeatedly.
        """
        if self.callbacks and self.outcome is None:
            self.callbacks.remove(callback)
            self.callbacks = self.callbacks or None

    def _call(self, callback: Callable[[Self], object]) -> None:
        """Call a user's callback, and log its exception."""
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %s raised; the publish itself is not affected", self)

    def __repr__(self) -> str:
        kind = type(self).__name__.replace("Stored", "")
        return f"<{kind} of {self}: {'outstanding' if self.outcome is None else self.outcome.value}>"
