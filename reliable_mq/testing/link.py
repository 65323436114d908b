"""One connection through the proxy: the client's socket, the broker's socket, and a pipe each way between them.

Invariants:
- everything here runs on the proxy's thread;
- the end of one socket reaches the other through the pipe, behind the bytes that came before it;
- once `Link.cut` was called, nothing passes any more, and both sockets are closed within `_FIN_PATIENCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final, Protocol, cast

from reliable_mq.testing.pipe import Pipe

if TYPE_CHECKING:
    import random
    from collections import Counter

    from reliable_mq.testing.faults import Direction, FrameFault, Line

__all__ = ["Board", "Link", "Side"]

_FIN_PATIENCE: Final = 5.0
"""Seconds that a peer has to answer the orderly end of a connection before it is reset."""
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class Board(Protocol):
    """What a connection shares with all others of its proxy."""

    random: random.Random
    seen: dict[Direction, Counter[int]]
    forwarded: dict[Direction, Counter[int]]
    forwarded_bytes: dict[Direction, int]
    faults: dict[Direction, list[FrameFault]]

    def changed(self) -> None:
        """Something that can be observed has changed."""

    def failed(self, error: Exception) -> None:
        """A fault raised."""

    def ended(self, link: Link) -> None:
        """Both sockets of a connection are closed."""


class Link:
    """One connection: the client's socket, the broker's socket, and the pipes."""

    def __init__(self, number: int, board: Board, lines: dict[Direction, Line]) -> None:
        self.number = number
        self.board = board
        self.client = Side(self)
        self.broker = Side(self)
        self.pipes: dict[Direction, Pipe] = {
            "to_broker": Pipe(self, "to_broker", self.client, self.broker, lines["to_broker"]),
            "to_client": Pipe(self, "to_client", self.broker, self.client, lines["to_client"]),
        }
        self.client.outbound, self.client.inbound = self.pipes["to_broker"], self.pipes["to_client"]
        self.broker.outbound, self.broker.inbound = self.pipes["to_client"], self.pipes["to_broker"]
        self.connected = False
        self.closing = False
        self.orphaned = False
        self._guard: asyncio.TimerHandle | None = None

    @property
    def live(self) -> bool:
        """Both sockets are connected, and neither end has begun to close."""
        return self.connected and not (self.closing or self.client.ended or self.broker.ended)

    def start(self) -> None:
        """Let bytes flow: the broker's socket is connected."""
        self.connected = True
        for pipe in self.pipes.values():
            pipe.update()
        self.board.changed()

    def cut(self, *, reset: bool) -> None:
        """End both sides now; what has not left is lost."""
        self.closing = True
        for pipe in self.pipes.values():
            pipe.stop()
        for side in (self.client, self.broker):
            side.reset() if reset else side.finish()
        if not reset:
            loop = asyncio.get_running_loop()
            self._guard = loop.call_later(_FIN_PATIENCE, lambda: self.cut(reset=True))
        self.board.changed()

    def cut_side(self, side: Side, *, reset: bool) -> None:
        """End one side; the other stays open, and hears nothing of it."""
        self.orphaned = True
        side.orphan()
        side.reset() if reset else side.finish()
        self.board.changed()

    def pipe_finished(self) -> None:
        """One direction has come to its end, with all that was in it."""
        if all(pipe.finished for pipe in self.pipes.values()):
            self.cut(reset=False)

    def side_lost(self) -> None:
        """A socket was closed."""
        if self.client.lost and (self.broker.lost or not self.connected):
            if self._guard is not None:
                self._guard.cancel()
            for pipe in self.pipes.values():
                pipe.stop()
            self.board.ended(self)
        self.board.changed()


class Side(asyncio.Protocol):
    """One socket of a connection."""

    outbound: Pipe
    """What it reads goes in here."""
    inbound: Pipe
    """What it writes comes from here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._transport: asyncio.Transport | None = None
        self.mute = False
        self.writable = False
        self.ended = False
        self.lost = False

    @property
    def opened(self) -> bool:
        """It is, or was, connected."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # The transport buffers nothing beyond one write, so that the pipe's queue is the only one, and is bounded.
        self._transport.set_write_buffer_limits(high=0)
        self._transport.pause_reading()
        self.writable = True
        if self._link.closing:
            self.reset()

    def data_received(self, data: bytes) -> None:
        if not self.mute:
            self.outbound.feed(data)

    def eof_received(self) -> bool:
        already_closing = self.mute or self._link.closing
        self._end(reset=False)
        return not already_closing

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.writable = False
        self._end(reset=error is not None)
        self.inbound.target_lost()
        self._link.side_lost()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        # Not at once: asyncio (of 3.11) closes a transport twice where a write from in here finds the peer gone.
        asyncio.get_running_loop().call_soon(self.inbound.update)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end_writing(self) -> None:
        """Send a FIN; go on reading, which tells where the peer has reset the connection already."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._transport.write_eof()

    def read(self, wanted: bool) -> None:
        """Read on, or stop."""
        if self._transport is not None and not self._transport.is_closing():
            if wanted or self._link.closing or self.mute:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def orphan(self) -> None:
        """From now on nothing passes between here and the other side."""
        self.mute = True
        self.inbound.target_lost()

    def finish(self) -> None:
        """Send a FIN and close once the peer has: a close with unread bytes would be a reset."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.ended:
            self._transport.close()
        else:
            self.end_writing()
            self._transport.resume_reading()

    def reset(self) -> None:
        """Close at once with a TCP reset."""
        if self._transport is not None and not self.lost:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._transport.abort()

    def _end(self, *, reset: bool) -> None:
        if self.ended:
            return
        self.ended = True
        if not self.mute:
            self.outbound.end(reset=reset)
