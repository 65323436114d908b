"""The outcome to come of one publish, on the asyncio face.

Light, since there is one per message: an `asyncio.Future` is made only for one that is awaited before it is settled.

Invariants: ``outcome`` is written once, on the event loop; every watcher added before is told, every one added later
finds it; no user code runs while the publisher is at work.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from reliable_mq.core.publisher.publication import Outcome
from reliable_mq.engine.publisher_channel import ObservedPublication
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.errors import PublishError, ReliableMQError

__all__ = ["AsyncConfirmation"]

logger = logging.getLogger(__name__)

_WELL = (Outcome.CONFIRMED, Outcome.STORED)

_TOLD: list[Callable[[], object]] = []  # stands for the watchers of a confirmation whose watchers have been told


class AsyncConfirmationOwner(Protocol):
    """What a confirmation needs of the publisher that it belongs to."""

    loop: asyncio.AbstractEventLoop
    fatal: ReliableMQError | None

    def check_usable(self) -> None:
        """Raise UsageError on another event loop or in a forked child, where the outcome will never be known."""

    def failure_seen(self) -> None:
        """A failure that was counted as unseen has been looked at."""


class AsyncConfirmation(ObservedPublication):
    """What ``submit`` returns on the asyncio face: awaitable, any number of times, by any number of tasks.

    ``await confirmation`` gives the receipt or raises the error. Cancelling a task that awaits it gives nothing up: the
    message stays outstanding until it is settled. It has the methods of :class:`asyncio.Future` that make sense here.
    """

    __slots__ = ()

    home: AsyncConfirmationOwner

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self.message.message_id

    def __await__(self) -> Generator[object, None, Receipt]:
        """Wait for the outcome.

        Raises:
            PublishError: it was not confirmed.
            UsageError: on another event loop, or in a forked child, where it will never be known.
        """
        if self.outcome is None:
            self.home.check_usable()
            settled = self.home.loop.create_future()
            watcher = partial(_resolve, settled)
            self._watch(watcher)
            try:
                yield from settled
            finally:
                self._unwatch(watcher)
        return self.result()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.outcome is not None

    def result(self) -> Receipt:
        """Return the receipt of a settled publish. Does not wait: ``await`` the confirmation for that.

        Raises:
            PublishError: it was not confirmed.
            UsageError: the outcome is not known yet.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self.receipt()

    def exception(self) -> PublishError | None:
        """Return the error of a settled publish, or None where it was confirmed. Does not wait.

        Raises:
            UsageError: the outcome is not known yet.
        """
        if self.outcome is None:
            raise UsageError(f"{self} is not settled yet; await its confirmation")
        error = self.failure()
        if error is not None:
            self._see()
            error.__cause__ = self.home.fatal
        return error

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(confirmation)`` on the event loop, soon after the outcome is known; soon, where it is.

        A callback may submit. An exception in it is logged.
        """
        self._see()
        call = partial(self.home.loop.call_soon, self._call, callback)
        if self.outcome is None:
            self.home.check_usable()
            self._watch(call)
        else:
            call()

    def settled(self) -> None:
        """The outcome has been written: tell the watchers."""
        watchers, self.watchers = self.watchers, _TOLD
        for watcher in watchers or ():
            watcher()

    def _see(self) -> None:
        if not self.seen:
            self.seen = True
            if self.watchers is _TOLD and self.outcome not in _WELL:
                self.home.failure_seen()

    def _watch(self, watcher: Callable[[], object]) -> None:
        if self.watchers is None:
            self.watchers = []
        self.watchers.append(watcher)

    def _unwatch(self, watcher: Callable[[], object]) -> None:
        """Forget it, where it was not told: a task may wait again and again."""
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
        return f"<AsyncConfirmation of {self}: {state}>"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
