"""The outcome to come of one publish, for tasks of an event loop.

An `asyncio.Future` is made only for one that is awaited before it is settled.

Invariants: those of `reliable_mq.engine.confirmation`; the outcome is written on the event loop, and no user code runs
while the publisher is at work.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from reliable_mq.engine.confirmation import BaseConfirmation, BaseConfirmationOwner
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.errors import PublishError

__all__ = ["AsyncConfirmation"]


class AsyncConfirmationOwner(BaseConfirmationOwner, Protocol):
    """The channel that settles a confirmation, on its event loop."""

    loop: asyncio.AbstractEventLoop

    def take(self, confirmation: Any) -> bool:
        """Accept its message if the window has room; return whether it has."""

    async def wait_for_window(self, confirmation: Any) -> None:
        """Accept its message once the window has room."""

    def check_usable(self) -> None:
        """Raise UsageError on another loop or in a forked child: no outcome comes there."""


class AsyncConfirmation(BaseConfirmation):
    """The outcome of a publish, once it is known.

    Awaitable, any number of times, by any number of tasks.

    ``await confirmation`` returns the receipt or raises the error. Cancelling a task that awaits it gives nothing up:
    the message stays outstanding until it is settled. It has the methods of :class:`asyncio.Future` that make sense
    here.
    """

    __slots__ = ()

    owner: AsyncConfirmationOwner

    def __await__(self) -> Generator[object, None, Receipt]:
        """Wait for the outcome.

        Raises:
            PublishError: it was not confirmed.
            UsageError: on another event loop, or in a forked child, where it will never be known.
        """
        if self.outcome is None:
            self.owner.check_usable()
            settled = self.owner.loop.create_future()
            callback = partial(_resolve, settled)
            self._add_callback(callback)
            try:
                yield from settled
            finally:
                self._remove_callback(callback)
        return self.result()

    def result(self) -> Receipt:
        """Return the receipt of a settled publish.

        Does not wait: ``await`` the confirmation for that.

        Raises:
            PublishError: it was not confirmed.
            UsageError: the outcome is not known yet.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self.receipt()

    def exception(self) -> PublishError | None:
        """Return the error of a settled publish; None if confirmed. Does not wait.

        Raises:
            UsageError: the outcome is not known yet.
        """
        if self.outcome is None:
            raise UsageError(f"{self} is not settled yet; await its confirmation")
        return self._observe()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(confirmation)`` on the event loop once the outcome is known.

        Never from inside this call: soon, if it is known already.

        A callback may submit. An exception in it is logged.

        Raises:
            ConfigurationError: ``callback`` cannot be called, or is a coroutine function.
        """
        self._check_callback(callback)
        call = partial(self.owner.loop.call_soon, self._call, callback)
        if self.outcome is None:
            self.owner.check_usable()
        self._mark_observed()
        if not self._add_callback(call):
            call()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
