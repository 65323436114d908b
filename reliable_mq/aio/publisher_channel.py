"""A publishing lane on asyncio: one connection, its publishing session, and the window that callers await.

A caller admits its publish to the window and leaves it in the inbox; the lane takes whole inboxes, lets the session
decide, writes what the session encodes, and settles what the session settled. One turn of the loop serves all that came
in meanwhile, so that a publish costs no task, no lock and no write of its own.

Invariants:

- everything runs on one event loop, and nothing here awaits but for callers;
- every confirmation that ``submit`` returned is settled, whatever happens: by the broker, by its deadline, or when the
  lane ends; whoever is cancelled while awaiting, what was admitted stays as it is;
- callers that wait for the window are admitted in the order in which they came, by the lane itself
  (`AsyncWindowWaiters`): one that is cancelled first has not been admitted;
- every wait of a caller ends: with what it waits for, at its deadline, or when the lane ends.

Who waits for room in a window on the asyncio face.

Invariants:

- room is given in the order in which it was asked for, by whoever frees it, and is taken at that moment: neither a
  cancellation nor a newcomer comes between;
- who is late or cancelled has taken nothing, leaves nothing behind, and holds up nobody who came after it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.aio.connection import AsyncConnection
from reliable_mq.engine.publisher_channel import CLOSE_GRACE, BasePublisherChannel
from reliable_mq.errors import PublishUnconfirmed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.publisher.window import PublishWindow
    from reliable_mq.engine.publisher_options import PublisherOptions
    from reliable_mq.errors import ReliableMQError

__all__ = ["AsyncPublisherChannel", "AsyncWindowWaiters"]


class AsyncWindowWaiters:
    """See the module. For one event loop; true while somebody waits.

    Args:
        loop: the event loop.
        window: where the room is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, window: PublishWindow) -> None:
        self._loop = loop
        self._window = window
        # Ordered, and cheap to leave from anywhere; a dict that is emptied from its front is slow to look at.
        self._waiting: OrderedDict[asyncio.Future[bool], tuple[int, Callable[[], object]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait(self, size: int, timeout: float, take: Callable[[], object]) -> bool:
        """Wait for room. False where there is none within ``timeout`` seconds, or will be none.

        Args:
            size: bytes.
            timeout: seconds; where none are left, what is free in the same turn of the loop is given all the same.
            take: called once there is room, before anybody else is; takes it.
        """
        given: asyncio.Future[bool] = self._loop.create_future()
        late = self._loop.call_later(max(timeout, 0.0), _resolve, given)
        self._waiting[given] = size, take
        try:
            return await given
        finally:
            late.cancel()
            if self._waiting.pop(given, None) is not None:
                self.give()

    def give(self) -> None:
        """Room may be free: give it to those who wait."""
        waiting = self._waiting
        while waiting:
            given, (size, take) = next(iter(waiting.items()))
            if not given.done():  # else it is late or cancelled, and about to leave
                if not self._window.fits(size):
                    return
                take()
                given.set_result(True)
            del waiting[given]

    def refuse(self) -> None:
        """There will be no room for those who wait."""
        while self._waiting:
            _resolve(self._waiting.popitem(last=False)[0])


def _resolve(given: asyncio.Future[bool]) -> None:
    if not given.done():
        given.set_result(False)


_PUMPED_AT = 64  # publishes in the inbox that are not left to wait for the next turn of the loop


class AsyncPublisherChannel(BasePublisherChannel[AsyncConfirmation]):
    """See the module. Made on the loop that it is to run on.

    Attributes:
        loop: the event loop.
    """

    write_bytes = 128 * 1024
    _io: AsyncConnection

    def __init__(self, options: PublisherOptions) -> None:
        super().__init__(options, nullcontext())  # all is on one loop
        self.loop = asyncio.get_running_loop()
        self._changed: list[asyncio.Future[None]] = []  # of those who wait for the state to change
        self._flushing: list[tuple[float, asyncio.Future[None]]] = []  # until which moment all is to be settled
        self._inbox: list[AsyncConfirmation] = []
        self._room = AsyncWindowWaiters(self.loop, self.window)
        self._io = AsyncConnection(
            name=options.name,
            settings=options.settings,
            setup=self._set_up,
            client=self,
            recovery=options.new_recovery(),
        )

    # For callers

    def start(self) -> None:
        """Start connecting. Does not wait."""
        self._io.start()

    def check_usable(self) -> None:
        """Raise UsageError on another event loop than the publisher's, or in a forked child."""
        self._check_not_forked()
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("this publisher belongs to another event loop; make one for each")

    async def wait_connected(self, limit: float, attempts: int = 1, *, firm: bool = False) -> ReliableMQError | None:
        """Wait until the lane is connected or ``attempts`` more have failed. Returns why it is not connected, or None.

        A set-up that goes on (a large topology) is waited for beyond ``limit``, unless that is ``firm``.

        Where the error is permanent the lane has ended (``fatal``); else it goes on trying.
        """
        self.check_usable()
        enough = self._attempts_failed + attempts
        left = limit
        while left > 0:
            try:
                async with asyncio.timeout(left if left < float("inf") else None):
                    while not (self.connected or self._attempts_failed >= enough or self.fatal or self._closed):
                        change = self.loop.create_future()
                        self._changed.append(change)
                        await change
            except TimeoutError:
                left = 0.0 if firm else self._io.patience
            else:
                break
        return self._why_not_connected(limit)

    def take(self, confirmation: AsyncConfirmation) -> bool:
        """Take a publish in, where the window has room for it. False where it has none.

        Raises:
            PublishBlocked: the broker blocks publishing, and that is to be raised.
            UsageError: closed, on another loop, or in a forked child.
        """
        if self.forked:
            self.check_usable()
        if self._takes_none:
            if not self._closed:
                self.check_usable()  # the end of its event loop ends a connection, too
            raise self._refusal(confirmation)
        if asyncio.get_running_loop() is not self.loop:
            self.check_usable()
        if self._room or not self.window.fits(confirmation.size):
            return False
        self._admit(confirmation)
        if len(self._inbox) >= _PUMPED_AT and self.connected:
            self._io.guard(self._pump)
        return True

    async def wait_for_room(self, confirmation: AsyncConfirmation) -> None:
        """Take a publish in once the window has room for it.

        Raises:
            PublishUnconfirmed: no room within the publish's own deadline; it was not sent.
            PublishBlocked: likewise, while the broker blocks publishing.
            UsageError: closed meanwhile.
        """
        seconds = self._delivery_timeout if confirmation.timeout is None else confirmation.timeout
        remaining = confirmation.accepted_at + seconds - time.monotonic()
        if await self._room.wait(confirmation.size, remaining, partial(self._admit, confirmation)):
            return
        if self._closed or self.fatal is not None or self.session.blocked_reason:
            raise self._refusal(confirmation)
        raise PublishUnconfirmed(
            f"{confirmation} was never sent: the window ({self.window.max_count} messages, "
            f"{self.window.max_bytes} bytes) was full for {seconds} s",
            message_id=confirmation.message_id,
            sent=False,
        )

    async def flush(self, limit: float) -> bool:
        """Wait until everything submitted before is settled. False where ``limit`` seconds were not enough."""
        self.check_usable()
        return await self._wait_settled_before(time.monotonic(), limit)

    async def close(self, limit: float) -> None:
        """Settle everything within ``limit`` seconds, give up the rest, disconnect.

        May be cancelled and called again, and by several tasks: each waits for the end.
        """
        self.check_usable()
        self._closed = True
        self._tell_change()
        self._room.refuse()
        if not await self._wait_settled_before(float("inf"), limit):
            self._end()
        await self._io.close(CLOSE_GRACE)
        self._alarm.cancel()

    def abort(self) -> None:
        """Give up what is unsettled, and disconnect without waiting for it."""
        self._closed = True
        self._end()
        self._io.stop()
        self._alarm.cancel()

    @property
    def outstanding(self) -> int:
        """Publishes submitted and not settled."""
        return len(self._inbox) + self.session.outstanding

    @property
    def stalled_seconds(self) -> float:
        """For how long the event loop has stood still, see `AsyncConnection`."""
        return self._io.stalled_seconds

    # The work

    def _admit(self, confirmation: AsyncConfirmation) -> None:
        self._inbox.append(confirmation)
        self.window.take(confirmation.size)
        if self._oldest is None:
            self._oldest = confirmation.accepted_at
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self._io.guard, self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False
        self._pump()

    def _accept_inbox(self) -> None:
        if self._inbox:
            taken, self._inbox = self._inbox, []
            self.session.accept(taken)

    def _first_in_inbox(self) -> AsyncConfirmation | None:
        return self._inbox[0] if self._inbox else None

    def _tell_settled(self) -> None:
        if self._room:
            self._room.give()
        if self._flushing:
            self._tell_flushing()

    def _end(self) -> None:
        self._room.refuse()
        super()._end()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    # Flushing

    async def _wait_settled_before(self, moment: float, limit: float) -> bool:
        if self._settled_before(moment):
            return True
        settled = self.loop.create_future()
        entry = moment, settled
        self._flushing.append(entry)
        try:
            async with asyncio.timeout(limit if limit < float("inf") else None):
                await settled
        except TimeoutError:
            return False
        finally:
            self._flushing.remove(entry)
        return True

    def _tell_flushing(self) -> None:
        for moment, settled in self._flushing:
            if not settled.done() and self._settled_before(moment):
                settled.set_result(None)
