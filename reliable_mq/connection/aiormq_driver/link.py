"""A link to a broker: a transport, and one task for aiormq's connection.

The transport does not pass the frames of channels to aiormq.

asyncio encrypts all that is written at once, and does not tell how much of that waits for the socket. So with TLS, the
link keeps a large message until the transport takes more frames.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import aiormq

from reliable_mq._util.logs import demoted_driver_logs, get_logger
from reliable_mq.codec import CodecError, methods
from reliable_mq.codec.frames import FRAME_OVERHEAD
from reliable_mq.connection.aiormq_driver.connection import Connection, Transports
from reliable_mq.connection.aiormq_driver.errors import link_error
from reliable_mq.connection.errors import Aborted, unreachable
from reliable_mq.connection.interfaces import TAKES_NOTHING
from reliable_mq.connection.link import BaseLink
from reliable_mq.connection.lookups import find_addresses
from reliable_mq.core.reconnect import time_for_address
from reliable_mq.settings import Endpoint
from reliable_mq.tls import server_hostname

if TYPE_CHECKING:
    from reliable_mq.connection.aiormq_driver.loop import EventLoop
    from reliable_mq.connection.interfaces import ConnectAttempt, LinkEvents, TimerHandle

logger = get_logger(__name__)

_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_PAUSE_BYTES, _RESUME_BYTES = 256 * 1024, 64 * 1024  # limits of the write buffer; ``link_drained`` below the second
_HEARTBEAT_FRAME = b"\x08\0\0\0\0\0\0\xce"
_SHORTEST_GAP = 2e-4  # the shortest gap between two reads that is worth a timer, which waits for a millisecond
_HEARTBEAT_EVERY = 1.0  # seconds between two heartbeats in place of content
_CHECKS = 20  # checks of the clock per heartbeat
_PROTOCOL_HEADER = b"AMQP"


class LinkState(enum.Enum):
    NEW = "its task does not run yet"
    OPENING = "resolving, connecting, and the AMQP handshake"
    OPEN = "channels can be opened"
    OVER = "its end was reported"


class Link(BaseLink):
    """An attempt to connect, and the connection if it succeeds. On its loop only."""

    bytes_received = 0

    def __init__(self, loop: EventLoop, attempt: ConnectAttempt, events: LinkEvents) -> None:
        super().__init__(attempt, events)
        self._loop = loop
        self._settings = attempt.settings
        self._context = attempt.secrets.context
        self._stream: asyncio.StreamReader | None = None
        self._transport: asyncio.Transport | None = None
        self._kept: deque[memoryview] = deque()  # whole frames that the transport is yet to take
        self._kept_bytes = 0
        self._state = LinkState.NEW
        self._heartbeat_at = 0.0  # when aiormq last got a heartbeat in place of content
        self._end: asyncio.Future[None] = loop.asyncio.create_future()
        self._watch: TimerHandle | None = None
        with demoted_driver_logs(aiormq.__name__):  # also for every task that the connection starts
            self._connection = Connection(attempt, Transports(self._connect))
            self._task = loop.asyncio.create_task(self._run(), name=f"{attempt.name} {attempt.endpoint}")
        loop.tasks.add(self._task)
        self._task.add_done_callback(loop.tasks.discard)

    @property
    def peer(self) -> Endpoint | None:
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return None if name is None else Endpoint(name[0], name[1])

    def write_buffer_size(self) -> int:
        transport = self._open_transport
        return TAKES_NOTHING if transport is None else transport.get_write_buffer_size() + self._kept_bytes

    def write(self, data: bytes) -> None:
        transport = self._open_transport
        if transport is None:
            return
        if self._context is None or not (self._kept or len(data) > _PAUSE_BYTES):
            transport.write(data)
            return
        self._kept.append(memoryview(data))
        self._kept_bytes += len(data)
        self._write_kept()

    def _write_kept(self) -> None:
        """Write kept frames until the transport reports later that it takes more."""
        while self._kept and (transport := self._open_transport) is not None:
            if transport.get_write_buffer_size() > _PAUSE_BYTES:
                return
            data = self._kept.popleft()
            size = 0
            while size < min(len(data), _RESUME_BYTES):  # whole frames: aiormq writes heartbeats in between
                size += FRAME_OVERHEAD + int.from_bytes(data[size + 3 : size + 7], "big")
            if size < len(data):
                self._kept.appendleft(data[size:])
            self._kept_bytes -= size
            transport.write(data[:size])

    @property
    def _open_transport(self) -> asyncio.Transport | None:
        transport = self._transport
        is_open = self._state is LinkState.OPEN and transport is not None and not transport.is_closing()
        return transport if is_open else None

    def close(self) -> None:
        if self._state is LinkState.OPEN:
            self.channels.close(self._end_now)
        else:
            self.abort("closed while it was opening")

    def abort(self, reason: str) -> None:
        if self._state is LinkState.OVER or self.aborted is not None:
            return
        self.aborted = Aborted(reason)
        self.reader.reset()
        if self._transport is not None:
            self._transport.abort()
        elif self._state is not LinkState.NEW:  # a task that is cancelled before its first step runs no clean-up
            self._task.cancel()
        self._end_now()

    # -- the link's task -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect, wait for the end, and clean up after aiormq."""
        cause: BaseException | None = None
        self._state = LinkState.OPENING
        try:
            if self.aborted is None:
                await self._connection.connect()
            if self.aborted is None:
                self._state = LinkState.OPEN
                self._connection.closing.add_done_callback(self._end_now)
                self._check_for_stall(time.monotonic())
                self._loop.guard(self.report_opened, self._connection.server_properties)
            await self._end
        except Exception as error:  # noqa: BLE001  # of any kind; passed on
            cause = error
        except asyncio.CancelledError as error:
            cause = error
            self.abort("its task was cancelled")
        finally:
            try:
                await self._connection.end()
            finally:
                if self._transport is not None:
                    self._transport.abort()  # does nothing if the transport is closed already
                self._report_closed(cause)

    def _end_now(self, _closing: object = None) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _report_closed(self, cause: BaseException | None) -> None:
        if self._state is LinkState.OVER:
            return
        self._state = LinkState.OVER
        self._end_now()
        if self._watch is not None:
            self._watch.cancel()
        opened = self._connection.was_open
        if opened and self._connection.is_connection_was_stuck:
            cause = Aborted("no heartbeat: the connection is dead")
        error = link_error(self.aborted or cause, self.endpoint, self.closed_with, opened=opened)
        self._loop.guard(self.report_closed, error)

    def _check_for_stall(self, due: float) -> None:
        """Log a long stall of the event loop, after which the broker may disconnect.

        A stall may be longer than measured, by up to the time between two checks of the clock. Every stall of half a
        heartbeat or more is logged.
        """
        heartbeat = self._settings.heartbeat
        pause = heartbeat / _CHECKS
        late = time.monotonic() - due
        if late >= heartbeat / 2 - pause:
            self._loop.stalled += late
            logger.warning(
                "the event loop stalled for %.1f s, and no heartbeat was sent to %s, which closes a "
                "connection after two to three heartbeats without one (%d to %d s); look for a blocking call in a "
                "coroutine or callback",
                late,
                self.endpoint,
                2 * heartbeat,
                3 * heartbeat,
            )
        self._watch = self._loop.call_later(pause, partial(self._check_for_stall, time.monotonic() + pause))

    # -- the transport ---------------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to one of the host's addresses, with TLS if the settings enable it."""
        loop, began = self._loop.asyncio, time.monotonic()
        server_name = None
        if self._settings.tls is not None:
            server_name = server_hostname(self._settings.tls, self.endpoint.host)
        addresses = self._loop.addresses.sort(await self._addresses())
        limit = time_for_address(self._settings.connect_timeout, time.monotonic() - began, len(addresses))
        failures: list[tuple[str, BaseException]] = []
        for family, _, _, _, address in addresses:
            self._loop.addresses.tried(address)
            stream = asyncio.StreamReader(loop=loop)
            try:
                async with asyncio.timeout(limit):
                    transport, protocol = await loop.create_connection(
                        lambda stream=stream: _Protocol(self, stream, loop),
                        host=socket.getnameinfo(address, _NUMERIC)[0],  # with the zone of a link-local address
                        port=self.endpoint.port,
                        family=family,
                        ssl=self._context,
                        server_hostname=server_name,
                    )
            except (OSError, TimeoutError) as failure:
                failures.append((address[0], failure.with_traceback(None)))
                self._forget_transport()
            else:
                return stream, asyncio.StreamWriter(transport, protocol, stream, loop)
        raise unreachable(self.endpoint.host, failures)

    async def _addresses(self) -> list[Any]:
        answer: asyncio.Future[Any] = self._loop.asyncio.create_future()

        def found(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        lookup = find_addresses(self.endpoint.host, self.endpoint.port, found, self._loop.call_soon)
        try:
            result = await answer
        finally:
            lookup.cancel()
        if isinstance(result, Exception):
            raise result
        addresses: list[Any] = result
        return addresses

    def _forget_transport(self) -> None:
        """Abort a transport that was made just when the time of its address was over."""
        transport, self._transport, self._stream = self._transport, None, None
        if transport is not None:
            transport.abort()

    def _transport_made(self, transport: asyncio.Transport, stream: asyncio.StreamReader) -> None:
        transport.set_write_buffer_limits(_PAUSE_BYTES, _RESUME_BYTES)
        self._transport, self._stream = transport, stream
        if self.aborted is not None:
            transport.abort()

    def _stream_ended(self, stream: asyncio.StreamReader) -> None:
        """Abort an open link, whose unsent bytes would keep the transport."""
        if stream is self._stream and self._state is LinkState.OPEN and self._transport is not None:
            self._transport.abort()

    def _transport_lost(self, stream: asyncio.StreamReader, cause: BaseException | None) -> None:
        """Report the loss, unless the handshake will fail with a more precise error."""
        if stream is not self._stream:  # of a transport that was forgotten
            return
        if self._state is LinkState.OPEN:
            self._report_closed(cause)
        self._end_now()

    def _drained(self) -> None:
        self._write_kept()
        if self._state is not LinkState.OVER and not self._kept:
            self._loop.guard(self._events.link_drained, self)

    def _received(self, data: bytes) -> None:
        if self.aborted is not None:
            return
        self.bytes_received += len(data)
        try:
            self.reader.feed(data)
            if self._state is LinkState.OPEN:
                self._pass_heartbeat()
                self.on_read()
                gap = self.channels.read_throttle.gap_after(len(data))
                if gap > _SHORTEST_GAP:
                    self._pause_reading(gap)
        except CodecError as error:
            self.abort(str(error))
        except Exception as error:  # noqa: BLE001  # of the client
            self._loop.on_error(error)

    def _pause_reading(self, seconds: float) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.asyncio.call_later(seconds, self._resume_reading)

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pass_heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at >= _HEARTBEAT_EVERY:
            self._heartbeat_at = now
            self._pass_on(_HEARTBEAT_FRAME)

    def _return_heartbeat(self) -> None:
        """Send a heartbeat for one that comes before the virtual host is open.

        The broker may take its time for that. aiormq would take the heartbeat for the broker's answer, and sends none
        itself before that answer.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEARTBEAT_FRAME)

    # -- frames that are not content -------------------------------------------------------------------------------

    def _on_foreign_frame(self, frame: bytes) -> None:
        if frame[:4] == _PROTOCOL_HEADER:
            self._pass_on(frame)
        elif frame == _HEARTBEAT_FRAME and self._state is LinkState.OPENING:
            self._return_heartbeat()
        else:
            super()._on_foreign_frame(frame)

    def _pass_on(self, frame: bytes) -> None:
        if methods.method_of(frame) == methods.CONNECTION_TUNE:
            frame, tune = methods.negotiated(
                frame, channel_max=self._settings.channel_max, frame_max=self._settings.frame_max
            )
            self.agree(frame_max=tune.frame_max, channel_max=tune.channel_max)
        if self._stream is not None and not self._stream.at_eof():
            self._stream.feed_data(frame)


class _Protocol(asyncio.StreamReaderProtocol):
    """A protocol that passes input to the link, and its events to link and aiormq."""

    def __init__(self, link: Link, stream: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(stream, loop=loop)
        self._link = link
        self._stream = stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._link._transport_made(transport, self._stream)  # type: ignore[arg-type]  # noqa: SLF001

    def data_received(self, data: bytes) -> None:
        self._link._received(data)  # noqa: SLF001

    def eof_received(self) -> bool | None:
        # Later: asyncio's TLS may still read from its buffer, and fails if the transport was aborted meanwhile.
        asyncio.get_running_loop().call_soon(self._link._stream_ended, self._stream)  # noqa: SLF001
        return super().eof_received()

    def resume_writing(self) -> None:
        super().resume_writing()
        # Not at once: asyncio of Python 3.11 closes a transport twice if a write from here finds that the peer is gone.
        asyncio.get_running_loop().call_soon(self._link._drained)  # noqa: SLF001

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._link._transport_lost(self._stream, exc)  # noqa: SLF001
