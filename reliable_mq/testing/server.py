"""The proxy's own thread: what listens, the connections, and the faults that are set.

Invariants:
- everything here runs on the proxy's thread; only the counters, `live` and `held` may be read from others;
- the listening address never changes, also while connections are refused: a bound socket that does not listen keeps it;
- after `close` no socket and no task is left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING, Final

from reliable_mq.errors import UsageError
from reliable_mq.testing.connection import ProxiedConnection
from reliable_mq.testing.faults import ConfirmGate, ConfirmMode, Direction, FrameFault, LinkConditions

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

__all__ = ["DIRECTIONS", "Server"]

DIRECTIONS: Final[tuple[Direction, ...]] = ("to_broker", "to_client")
_CONNECT_TIMEOUT: Final = 10.0
_BACKLOG: Final = 128
logger = logging.getLogger(__name__)


class Server:
    """Listens, and holds what all connections share (a `reliable_mq.testing.connection.ProxyState`).

    Args:
        upstream: the broker's host and port.
        random: draws the jitter.
        changed: called on this thread whenever something that can be observed has changed; must be quick.
    """

    def __init__(self, upstream: tuple[str, int], random: random.Random, changed: Callable[[], None]) -> None:
        self.upstream = upstream
        self.random = random
        self.changed = changed
        self.seen: dict[Direction, Counter[int]] = {direction: Counter() for direction in DIRECTIONS}
        self.forwarded: dict[Direction, Counter[int]] = {direction: Counter() for direction in DIRECTIONS}
        self.forwarded_bytes: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self.faults: dict[Direction, list[FrameFault]] = {direction: [] for direction in DIRECTIONS}
        self.gate = ConfirmGate()
        self.accepted = 0
        self.error: Exception | None = None
        self._lines: dict[Direction, LinkConditions] = {direction: LinkConditions() for direction in DIRECTIONS}
        self._links: dict[int, ProxiedConnection] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._admitting = asyncio.Event()
        self._one_ended = asyncio.Event()
        self._listener: socket.socket | None = None
        self._keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind(("127.0.0.1", 0))
        self.port: int = self._keeper.getsockname()[1]

    async def close(self) -> None:
        """End every connection and stop to listen."""
        self.refuse()
        self._keeper.close()
        opening = tuple(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for link in tuple(self._links.values()):
            link.cut(reset=True)
        while self._links:
            self._one_ended.clear()
            await self._one_ended.wait()

    # connections

    @property
    def live(self) -> int:
        """How many connections are open on both sides."""
        return sum(link.live for link in list(self._links.values()))

    def admit(self) -> None:
        """Accept connections and connect them; those that hang, too."""
        self._listen()
        self._admitting.set()

    def hang(self) -> None:
        """Accept connections, and leave it at that."""
        self._listen()
        self._admitting.clear()

    def refuse(self) -> None:
        """Do not accept connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def newest(self) -> ProxiedConnection:
        """Give the most recent connection that is live.

        Raises:
            UsageError: there is none.
        """
        for link in reversed(self._links.values()):
            if link.live:
                return link
        raise UsageError("no connection through the proxy is live")

    def cut(self, *, reset: bool, side: str) -> int:
        """End every connection, or one side of it. Returns how many there were."""
        links = [link for link in self._links.values() if not link.closing]
        for link in links:
            if side == "both" or not link.connected:
                link.cut(reset=reset)
            else:
                link.cut_side(link.client if side == "client" else link.broker, reset=reset)
        return len(links)

    def failed(self, error: Exception) -> None:
        """Keep the first error of a user's function, to be raised where the user waits or closes."""
        if self.error is None:
            self.error = error
        self.changed()

    def ended(self, link: ProxiedConnection) -> None:
        """Both sockets of a connection are closed."""
        self._links.pop(link.number, None)
        self._one_ended.set()
        task = self._opening.get(link.number)
        if task is not None:
            task.cancel()
        self.gate.forget(link.number)

    # faults

    def set_lines(
        self,
        directions: Iterable[Direction],
        change: Callable[[LinkConditions], LinkConditions],
        *,
        new_connections: bool,
    ) -> None:
        """Change what the line does, on every connection, and on those to come unless `new_connections` is False."""
        for direction in directions:
            if new_connections:
                self._lines[direction] = change(self._lines[direction])
            for link in tuple(self._links.values()):
                pipe = link.pipes[direction]
                pipe.set_line(change(pipe.line))

    def add(self, direction: Direction, fault: FrameFault) -> None:
        """Set a fault on frames, behind those that are set already."""
        self.faults[direction].append(fault)

    def remove(self, unwanted: Iterable[FrameFault]) -> None:
        """Take faults out again; nothing happens where one is gone already."""
        for direction in DIRECTIONS:
            self.faults[direction][:] = [fault for fault in self.faults[direction] if fault not in unwanted]

    def set_confirms(self, mode: ConfirmMode) -> None:
        """Decide about the broker's confirms that come from now on."""
        self.gate.mode = mode
        if self.gate not in self.faults["to_client"]:
            self.add("to_client", self.gate)

    def release(self, count: int | None) -> int:
        """Send the first `count` confirms that are held. Returns how many were."""
        released = self.gate.release(count)
        for number, frames in released:
            self._links[number].pipes["to_client"].emit_frames(frames)
        self.changed()
        return len(released)

    def drop_held(self, count: int | None) -> int:
        """Drop the first `count` confirms that are held. Returns how many were."""
        dropped = self.gate.drop(count)
        self.changed()
        return dropped

    def heal(self) -> None:
        """Take back every fault; what was kept back leaves."""
        for direction in DIRECTIONS:
            self.faults[direction][:] = []
            self._lines[direction] = LinkConditions()
        self.set_confirms(ConfirmMode.PASS)
        self.release(None)
        for link in tuple(self._links.values()):
            if link.orphaned:
                link.cut(reset=True)
                continue
            for pipe in link.pipes.values():
                pipe.set_line(LinkConditions())
        self.admit()

    # listening

    def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        self.accepted += 1
        link = ProxiedConnection(self.accepted, self, self._lines)
        self._links[link.number] = link
        task = asyncio.get_running_loop().create_task(self._open(link, client))
        self._opening[link.number] = task
        # A task that is cancelled before its first step runs none of its own clean-up.
        task.add_done_callback(lambda _: self._opened(link, client))
        self.changed()

    async def _open(self, link: ProxiedConnection, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.upstream
        await loop.connect_accepted_socket(lambda: link.client, client)
        await self._admitting.wait()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await loop.create_connection(lambda: link.broker, host, port)
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError; a host name may not be one
            logger.info("the broker at %s:%d cannot be reached: %s", host, port, error)
            link.cut(reset=True)
        else:
            link.start()

    def _opened(self, link: ProxiedConnection, client: socket.socket) -> None:
        del self._opening[link.number]
        if not link.client.opened:
            client.close()
            del self._links[link.number]
