"""A connection through the proxy: two sockets with a stream in each direction.

One socket is connected to the client, the other to the broker. A stream counts the frames of its source, applies the
frame faults, and writes to its target as its conditions allow. Bytes that cannot leave wait in one queue, in order, and
so does the end of the stream. Therefore, a FIN or a reset behind a black hole arrives only after the black hole has
ended. This is how TCP behaves, which never loses the middle of a stream.

Invariants:
- All code in this module runs on the proxy's thread.
- Without a fault, the call that reads a chunk also writes the whole chunk.
- The source is read only while the queue is short, so the sender notices a slow or silent target.
- The end of one socket reaches the other through the stream, after all earlier bytes.
- After `ProxiedConnection.cut`, no bytes pass, and both sockets are closed within `_FIN_PATIENCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from reliable_mq._util.logs import get_logger
from reliable_mq.testing.faults import Cut, Direction, FrameFault, LinkConditions
from reliable_mq.testing.frames import Chunk, Frame, Splitter, parse

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from reliable_mq.testing.server import Server

logger = get_logger(__name__)
_BACKLOG: Final = 256 * 1024
_THROTTLED_BACKLOG: Final = 64 * 1024
_DELAYED_BACKLOG: Final = 16 * 1024 * 1024
_BLACK_HOLE_BACKLOG: Final = 64 * 1024 * 1024
_SLICES_PER_SECOND: Final = 50
_SMALLEST_SLICE: Final = 64
_FIN_PATIENCE: Final = 5.0
"""Seconds for a peer to answer the orderly end of a connection; then it is reset."""
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class _QueuedEnd(enum.Enum):
    """The end of a stream. It waits in the queue like bytes."""

    FIN = enum.auto()  # of this direction alone
    CUT = enum.auto()
    RESET = enum.auto()


class Stream:
    """One direction of a connection."""

    def __init__(
        self,
        connection: ProxiedConnection,
        direction: Direction,
        source: ProxiedSocket,
        target: ProxiedSocket,
        conditions: LinkConditions,
    ) -> None:
        self.finished = False
        self.conditions = conditions
        self._connection = connection
        self._direction: Direction = direction
        self._source = source
        self._target = target
        self._state = connection.state
        self._faults = connection.state.faults[direction]
        self._splitter = Splitter()
        self._queue: deque[tuple[float, bytes | _QueuedEnd, list[int]]] = deque()
        self._backlog = 0
        self._late_until = 0.0
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._injections: list[bytes] = []
        self._discarding = False
        self._stopped = False

    def feed(self, data: bytes) -> None:
        if self._stopped:
            return
        chunk = self._splitter.feed(data)
        self._state.seen[self._direction].update(chunk.keys)
        if self._injections and chunk.boundary is not None:
            self._split(chunk, chunk.boundary)
        else:
            self._filter(chunk.data, chunk.keys)
        self.update()

    def end(self, *, reset: bool) -> None:
        if self._stopped:
            return
        if self._target.lost or self._target.mute:
            self._connection.cut(reset=True)
            return
        if not reset:
            self._emit(self._splitter.take_rest(), [])
        self._enqueue(_QueuedEnd.RESET if reset else _QueuedEnd.FIN)
        self.update()

    def target_lost(self) -> None:
        """Discard all bytes, as the target is closed. Keep reading until the source ends."""
        self._discarding = True
        self._queue.clear()
        self._backlog = 0
        self.update()

    def set_conditions(self, conditions: LinkConditions) -> None:
        """Change the conditions, including for bytes that already wait in the queue."""
        if not conditions.delay and self.conditions.delay:
            self._queue = deque((0.0, item, keys) for _, item, keys in self._queue)
            self._late_until = 0.0
        self._free_at = 0.0
        self.conditions = conditions
        self.update()

    def inject(self, data: bytes) -> None:
        """Insert whole frames as soon as no content is incomplete."""
        if self._splitter.between_contents or self._splitter.opaque:
            self._emit(data, _keys(data))
            self.update()
        else:
            self._injections.append(data)

    def release(self, frames: Iterable[Frame], passed: Container[FrameFault]) -> None:
        """Send frames that a fault held, through the faults that they have not passed."""
        if self._stopped:
            return
        self._apply_faults(frames, passed)
        self.update()

    def stop(self) -> None:
        self._stopped = True
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def update(self) -> None:
        """Send the bytes that may leave, then resume or pause reading."""
        self._flush()
        conditions = self.conditions
        if conditions.black_hole:
            limit = _BLACK_HOLE_BACKLOG
        elif conditions.rate is not None:
            limit = _THROTTLED_BACKLOG
            self._source.limit_buffer()
        else:
            limit = _DELAYED_BACKLOG if conditions.delay else _BACKLOG
        self._source.read(self._connection.connected and not conditions.stop_reading and self._backlog < limit)
        self._state.changed()

    def _split(self, chunk: Chunk, boundary: int) -> None:
        before, after = chunk.data[:boundary], chunk.data[boundary:]
        self._filter(before, _keys(before))
        injections, self._injections = self._injections, []
        for data in injections:
            self._emit(data, _keys(data))
        self._filter(after, _keys(after))

    def _filter(self, data: bytes, keys: list[int]) -> None:
        if self._faults:
            self._apply_faults(parse(data))
        else:
            self._emit(data, keys)

    def _apply_faults(self, parts: Iterable[Frame | bytes], passed: Container[FrameFault] = ()) -> None:
        out: list[bytes] = []
        out_keys: list[int] = []
        for part in parts:
            if isinstance(part, bytes):
                out.append(part)
                continue
            for step in self._steps(part, passed):
                if isinstance(step, Cut):
                    self._emit(b"".join(out) + step.data, out_keys)
                    self._enqueue(_QueuedEnd.RESET if step.reset else _QueuedEnd.CUT)
                    self._discarding = True
                    return
                out.append(step.raw)
                out_keys.append(step.key)
        self._emit(b"".join(out), out_keys)

    def _steps(self, frame: Frame, passed: Container[FrameFault]) -> list[Frame | Cut]:
        """Apply the faults that a frame has not passed."""
        steps: list[Frame | Cut] = [frame]
        try:
            for fault in [fault for fault in self._faults if fault not in passed]:
                answers: list[Frame | Cut] = []
                for step in steps:
                    if isinstance(step, Cut):
                        answers.append(step)
                    else:
                        answers.extend(fault.apply(self._connection.number, step))
                steps = answers
        except BaseException as error:  # pytest.fail raises no Exception
            logger.exception("a rewrite function raised; the connection is reset")
            self._state.failed(error)
            return [Cut()]
        self._faults[:] = [fault for fault in self._faults if not fault.spent]
        return steps

    def _emit(self, data: bytes, keys: list[int]) -> None:
        if not data or self._discarding or self._stopped:
            return
        if self.conditions.clear and not self._queue and self._target.writable:
            self._write(data, keys)
        else:
            self._enqueue(data, keys)

    def _enqueue(self, item: bytes | _QueuedEnd, keys: list[int] | None = None) -> None:
        if self._discarding or self._stopped:
            return
        due = 0.0
        delay, jitter = self.conditions.delay, self.conditions.jitter
        if delay:
            due = asyncio.get_running_loop().time() + delay
            due += self._state.random.uniform(-jitter, jitter) if jitter else 0.0
            # Bytes never overtake one another, whatever the jitter.
            due = self._late_until = max(due, self._late_until)
        if isinstance(item, bytes):
            self._backlog += len(item)
        self._queue.append((due, item, keys or []))

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._queue and self._target.writable and not self.conditions.black_hole:
            due, item, keys = self._queue[0]
            if self.conditions.rate is not None:
                due = max(due, self._free_at)
            if due > loop.time():
                self._timer = loop.call_at(due, self.update)
                return
            self._queue.popleft()
            if isinstance(item, _QueuedEnd):
                self._finish(item)
                return
            rate = self.conditions.rate
            if rate is not None:
                size = max(_SMALLEST_SLICE, int(rate / _SLICES_PER_SECOND))
                if len(item) > size:
                    self._queue.appendleft((0.0, item[size:], keys))
                    item, keys = item[:size], []
                self._free_at = max(self._free_at, loop.time()) + len(item) / rate
            self._backlog -= len(item)
            self._write(item, keys)

    def _write(self, data: bytes, keys: list[int]) -> None:
        # Count before writing: the receiver of a frame may read the counters at once.
        self._state.forwarded_bytes[self._direction] += len(data)
        self._state.forwarded[self._direction].update(keys)
        self._target.write(data)

    def _finish(self, end: _QueuedEnd) -> None:
        if end is _QueuedEnd.FIN:
            self.finished = True
            self._target.end_writing()
            self._connection.stream_finished()
        else:
            self._connection.cut(reset=end is _QueuedEnd.RESET)


def _keys(data: bytes) -> list[int]:
    return [part.key for part in parse(data) if isinstance(part, Frame)]


class ProxiedConnection:
    def __init__(self, number: int, state: Server, conditions: dict[Direction, LinkConditions]) -> None:
        self.number = number
        self.state = state
        self.client = ProxiedSocket(self)
        self.broker = ProxiedSocket(self)
        self.streams: dict[Direction, Stream] = {
            "to_broker": Stream(self, "to_broker", self.client, self.broker, conditions["to_broker"]),
            "to_client": Stream(self, "to_client", self.broker, self.client, conditions["to_client"]),
        }
        self.client.outbound, self.client.inbound = self.streams["to_broker"], self.streams["to_client"]
        self.broker.outbound, self.broker.inbound = self.streams["to_client"], self.streams["to_broker"]
        self.connected = False
        self.closing = False
        self.orphaned = False
        self._fin_timer: asyncio.TimerHandle | None = None

    @property
    def live(self) -> bool:
        """Whether both sockets are connected and neither end has begun to close."""
        return self.connected and not (self.closing or self.client.ended or self.broker.ended)

    def start(self) -> None:
        """Begin to forward bytes. Called when the broker's socket is connected."""
        self.connected = True
        for stream in self.streams.values():
            stream.update()
        self.state.changed()

    def cut(self, *, reset: bool) -> None:
        """End both sides now. Bytes that have not left are lost."""
        self.closing = True
        self.state.gate.forget(self.number)
        for stream in self.streams.values():
            stream.stop()
        for side in (self.client, self.broker):
            side.reset() if reset else side.finish()
        if not reset:
            loop = asyncio.get_running_loop()
            self._fin_timer = loop.call_later(_FIN_PATIENCE, lambda: self.cut(reset=True))
        self.state.changed()

    def cut_side(self, side: ProxiedSocket, *, reset: bool) -> None:
        """End one side and lose its bytes. The other stays open and silent."""
        self.orphaned = True
        self.state.gate.forget(self.number)
        side.outbound.stop()
        side.orphan()
        side.reset() if reset else side.finish()
        self.state.changed()

    def stream_finished(self) -> None:
        """Close the connection if both directions have ended and their bytes have left."""
        if all(stream.finished for stream in self.streams.values()):
            self.cut(reset=False)

    def side_lost(self) -> None:
        if self.client.lost and (self.broker.lost or not self.connected):
            if self._fin_timer is not None:
                self._fin_timer.cancel()
            for stream in self.streams.values():
                stream.stop()
            self.state.ended(self)
        self.state.changed()


class ProxiedSocket(asyncio.Protocol):
    outbound: Stream
    """Takes the bytes that this socket reads."""
    inbound: Stream
    """Writes to this socket."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self.mute = False
        self.writable = False
        self.ended = False
        self.lost = False
        self._limited = False

    @property
    def opened(self) -> bool:
        """Whether the socket is or was connected."""
        return self._transport is not None

    @property
    def descriptor(self) -> int:
        """The number of the socket. -1 before it is connected, and after it is closed."""
        own = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if own is None else int(own.fileno())

    @property
    def _half_closes(self) -> bool:
        """Whether one direction can end before the other, which TLS does not allow."""
        return self._transport is not None and self._transport.can_write_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # The transport buffers no more than one write, so the stream's bounded queue is the only queue.
        # The limit is 1 byte: with 0, a TLS transport of asyncio pauses when its buffer is empty, and never resumes.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._transport.pause_reading()
        self.writable = True
        if self._connection.closing:
            self.reset()

    def data_received(self, data: bytes) -> None:
        if not self.mute:
            self.outbound.feed(data)

    def eof_received(self) -> bool:
        already_closing = self.mute or self._connection.closing
        self._end(reset=False)
        return not already_closing and self._half_closes

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.writable = False
        self._end(reset=error is not None)
        self.inbound.target_lost()
        self._connection.side_lost()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        # Update later: asyncio of Python 3.11 closes a transport twice if a write in this callback finds the peer gone.
        asyncio.get_running_loop().call_soon(self.inbound.update)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end_writing(self) -> None:
        """Send a FIN, but keep reading to notice a reset by the peer. With TLS, close."""
        if self._transport is not None and not self._transport.is_closing():
            if not self._half_closes:
                self._transport.close()
                return
            with contextlib.suppress(OSError):
                self._transport.write_eof()

    def read(self, wanted: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if wanted or self._connection.closing or self.mute:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def orphan(self) -> None:
        """Disconnect this socket from its streams."""
        self.mute = True
        self.inbound.target_lost()

    def finish(self) -> None:
        """Send a FIN and close after the peer.

        Closing while bytes are unread would send a reset.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if self.ended or not self._half_closes:
            self._transport.close()
        else:
            self.end_writing()
            self._transport.resume_reading()

    def limit_buffer(self) -> None:
        """Let the operating system hold little received data, instead of tens of MB."""
        if self._transport is not None and not self._limited:
            self._limited = True
            own = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _THROTTLED_BACKLOG)

    def reset(self) -> None:
        """Close at once with a TCP reset."""
        if self._transport is not None and not self.lost:
            own = self._transport.get_extra_info("socket")
            if own is not None:  # a TLS transport has no socket after a failed handshake
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._transport.abort()

    def _end(self, *, reset: bool) -> None:
        if self.ended:
            return
        self.ended = True
        if not self.mute:
            self.outbound.end(reset=reset)
