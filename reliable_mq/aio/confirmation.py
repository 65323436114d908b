"""The future outcome of one publish, for tasks of an event loop.

An `asyncio.Future` is created only if the confirmation is awaited before it is settled.

Invariants, in addition to `reliable_mq.engine.confirmation`: the outcome is written on the event loop, and no user code
runs while the publisher is working.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

from reliable_mq.aio.loop import OnLoop, resolve
from reliable_mq.engine.confirmation import BaseConfirmation
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.errors import PublishError


class AsyncConfirmation(BaseConfirmation):
    """The future outcome of a publish.

    Any number of tasks may await it, any number of times. ``await confirmation`` returns the receipt or raises the
    error. Cancelling a task that awaits it does not give up the message, which stays outstanding until it is settled.
    It has the methods of :class:`asyncio.Future` that make sense here.
    """

    __slots__ = ()

    owner: OnLoop[Any]

    def __await__(self) -> Generator[object, None, Receipt]:
        """Wait for the outcome.

        Raises:
            PublishError: If the message was not confirmed.
            UsageError: If awaited on another event loop, or in a forked child, where the outcome will never be known.
        """
        if self.outcome is None:
            self.owner.check_usable()
            settled = self.owner.loop.create_future()
            callback = partial(resolve, settled, None)
            self._add_callback(callback)
            try:
                yield from settled
            finally:
                self._remove_callback(callback)
        return self.result()

    def result(self) -> Receipt:
        """Return the receipt of a settled publish.

        Does not wait. To wait, ``await`` the confirmation.

        Raises:
            PublishError: If the message was not confirmed.
            UsageError: If the outcome is not known yet.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self.receipt()

    def exception(self) -> PublishError | None:
        """Return the error of a settled publish, or None if confirmed. Does not wait.

        Raises:
            UsageError: If the outcome is not known yet.
        """
        if self.outcome is None:
            raise UsageError(f"{self} is not settled yet; await its confirmation")
        return self._observe()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(confirmation)`` on the event loop once the outcome is known.

        The callback is never called inside this call. If the outcome is already known, it is called soon after. A
        callback may submit. An exception in a callback is logged.

        Raises:
            ConfigurationError: If ``callback`` is not callable, or is a coroutine function.
        """
        self._check_callback(callback)
        call = partial(self.owner.loop.call_soon, self._call, callback)
        if self.outcome is None:
            self.owner.check_usable()
        self._mark_observed()
        if not self._add_callback(call):
            call()
