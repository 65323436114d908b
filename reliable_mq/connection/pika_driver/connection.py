"""pika's connection, with our own reader and encoder for the frames of channels."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pika
from pika import frame
from pika.adapters.select_connection import SelectConnection
from pika.credentials import ExternalCredentials, PlainCredentials

from reliable_mq._util.version import client_properties
from reliable_mq.codec import CodecError
from reliable_mq.connection.interfaces import TAKES_NOTHING
from reliable_mq.core.reconnect import time_for_address
from reliable_mq.settings import Endpoint
from reliable_mq.tls import server_hostname

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import ConnectAttempt
    from reliable_mq.connection.pika_driver.link import Link
    from reliable_mq.connection.pika_driver.loop import EventLoop

_RECEIVE_BYTES = 256 * 1024  # pika's default of 4 KiB costs a system call and a pass through four layers per delivery
_TLS_BYTES = 64 * 1024  # to send at once over TLS


class Connection(SelectConnection):  # type: ignore[misc]
    """pika's connection, in which pika handles only channel 0."""

    def __init__(self, parameters: pika.ConnectionParameters, loop: EventLoop, link: Link) -> None:
        self._link = link
        self._report_error = loop.on_error
        self.was_open = False
        self.broken_by: BaseException | None = None
        self._read_from = 0.0  # when to read again
        self._never = threading.Event()  # used to wait: a sleep has an absolute end, which a faked clock may move
        self._began = time.monotonic()
        self._connect_timeout = float(parameters.socket_timeout)  # until the addresses of the host are known
        self.addresses: list[str] = []  # of the host, in the order in which they are tried
        self._plaintext = parameters.ssl_options is None
        super().__init__(
            parameters,
            on_open_callback=self._opened_now,
            on_open_error_callback=link.closed,
            on_close_callback=link.closed,
            custom_ioloop=loop.services(self._addresses_found),
        )

    def _addresses_found(self, addresses: list[Any]) -> None:
        """Divide the rest of the time to connect."""
        self.addresses = [address[0] for *_, address in addresses]
        used = time.monotonic() - self._began
        self.params.socket_timeout = time_for_address(self._connect_timeout, used, len(addresses))

    def send(self, data: bytes) -> None:
        """Send one piece, at once if the socket accepts it, else when it accepts more."""
        transport = self._transport
        if not self._is_active():
            return
        rest: bytes | memoryview = data
        if self._plaintext and not transport.get_write_buffer_size():
            # This saves three system calls and a turn of the loop, compared to waiting until the socket is writable.
            try:
                taken = transport._sock.send(data)  # noqa: SLF001
            except OSError:  # the socket would block, or is broken, which the transport will notice
                taken = 0
            self.bytes_sent += taken
            rest = memoryview(data)[taken:]
        if rest:
            pieces = [rest] if self._plaintext else _pieces(rest)
            self._output_marshaled_frames(pieces)

    def buffered(self) -> int:
        return int(self._transport.get_write_buffer_size()) if self._is_active() else TAKES_NOTHING

    def _is_active(self) -> bool:
        transport = self._transport
        return transport is not None and transport._state == transport._STATE_ACTIVE  # noqa: SLF001

    def peer(self) -> Endpoint | None:
        if self._transport is None:
            return None
        try:
            host, port = self._transport._sock.getpeername()[:2]  # noqa: SLF001
        except OSError:  # the peer has gone
            return None
        return Endpoint(host, port)

    def abort(self, cause: Exception) -> None:
        self._terminate_stream(cause)

    def _opened_now(self, _connection: Connection) -> None:
        self.was_open = True
        self._link.agree(frame_max=int(self.params.frame_max), channel_max=int(self.params.channel_max))
        self._link.report_opened(self.server_properties)

    def _proto_connection_made(self, transport: Any) -> None:
        transport._MAX_RECV_BYTES = _RECEIVE_BYTES  # noqa: SLF001
        if self._plaintext:  # TLS returns one record at a time, and needs several reads
            transport._MAX_CONSUME_BYTES = 1  # noqa: SLF001  # one read per turn, not a second one that would block
        transport._consume = partial(self._consume, transport._consume)  # noqa: SLF001
        transport._produce = partial(self._produce, transport, transport._produce)  # noqa: SLF001
        super()._proto_connection_made(transport)

    def _proto_connection_lost(self, error: BaseException | None) -> None:
        self.broken_by = error  # pika itself only keeps the error's text
        super()._proto_connection_lost(error)

    def _consume(self, consume: Callable[[], None]) -> None:
        """Wait until the read throttle allows it, then let the transport read."""
        if self._read_from:
            early = self._read_from - time.monotonic()
            if early > 0:
                self._never.wait(early)
        before = self.bytes_received
        consume()
        size = self.bytes_received - before
        if size:  # TLS may read twice, the second time without data
            gap = self._link.channels.read_throttle.gap_after(size)
            self._read_from = time.monotonic() + gap if gap else 0.0

    def _produce(self, transport: Any, produce: Callable[[], None]) -> None:
        """Let the transport send its buffer; it raises if some data is not accepted."""
        produce()
        if not transport.get_write_buffer_size():
            self._link.drained()

    def _on_data_available(self, data_in: bytes) -> None:
        if self._link.aborted is not None:
            return
        self.bytes_received += len(data_in)  # pika's heartbeat checker reads this
        try:
            self._link.reader.feed(data_in)
            self._link.on_read()
        except CodecError as error:
            self._link.abort(str(error))
        except Exception as error:  # noqa: BLE001  # pika would log it and lose half a frame
            self._report_error(error)

    def process(self, data: bytes) -> None:
        """Process a frame of channel 0."""
        try:
            _, value = frame.decode_frame(data)
        except Exception as error:  # noqa: BLE001  # pika's decoder raises whatever struct, dict and codecs raise
            self._link.abort(f"what the broker sent cannot be decoded: {error!r}")
        else:
            self._process_frame(value)


def _pieces(data: bytes | memoryview) -> list[memoryview]:
    """Cut data into pieces, because TLS does not tell that it has sent part of one."""
    view = memoryview(data)
    return [view[start : start + _TLS_BYTES] for start in range(0, len(view), _TLS_BYTES)]


def connection_parameters(attempt: ConnectAttempt) -> pika.ConnectionParameters:
    settings, given = attempt.settings, attempt.secrets.credentials
    if given is None:
        credentials = ExternalCredentials()
    else:
        credentials = PlainCredentials(given.username, given.password, erase_on_connect=True)
    tls = None
    if settings.tls is not None:
        tls = pika.SSLOptions(attempt.secrets.context, server_hostname(settings.tls, attempt.endpoint.host))
    return pika.ConnectionParameters(
        host=attempt.endpoint.host,
        port=attempt.endpoint.port,
        virtual_host=settings.virtual_host,
        credentials=credentials,
        channel_max=settings.channel_max,
        frame_max=settings.frame_max,
        heartbeat=settings.heartbeat,
        ssl_options=tls,
        connection_attempts=1,
        socket_timeout=settings.connect_timeout,
        stack_timeout=None,  # pika restarts it for each address; the caller limits the time of the whole attempt
        blocked_connection_timeout=None,  # a block is a state that is reported, not an error
        client_properties=client_properties(settings.connection_name or attempt.name, f"pika {pika.__version__}"),
    )
