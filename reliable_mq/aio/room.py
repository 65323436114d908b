"""Who waits for room in a window on the asyncio face.

Invariants:

- room is given in the order in which it was asked for, by whoever frees it, and is taken at that moment: neither a
  cancellation nor a newcomer comes between;
- who is late or cancelled has taken nothing, leaves nothing behind, and holds up nobody who came after it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.window import PublishWindow

__all__ = ["Room"]


class Room:
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
