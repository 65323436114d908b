"""A link to a broker, on pika's connection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.connection.pika_driver.connection import Connection, connection_parameters
from reliable_mq.connection.pika_driver.errors import Aborted, broker_error
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.reconnect import ConnectionLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.codec import ChannelSink
    from reliable_mq.connection.channel import Channel
    from reliable_mq.connection.interfaces import ChannelEvents, ConnectCredentials, LinkEvents
    from reliable_mq.connection.pika_driver.loop import EventLoop
    from reliable_mq.settings import ConnectionSettings, Endpoint

__all__ = ["Link"]


class Link:
    """An attempt to connect, and the connection if it succeeds. On its loop only.

    The arguments after ``loop`` are those of `OpenLink`.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: Endpoint,
        settings: ConnectionSettings,
        secrets: ConnectCredentials,
        name: str,
        events: LinkEvents,
    ) -> None:
        self.endpoint = endpoint
        self._events = events
        self._over = False
        parameters = connection_parameters(endpoint, settings, secrets, name)
        self._connection = Connection(
            parameters,
            loop,
            on_open=self._on_open,
            on_closed=self._on_closed,
            on_drained=partial(events.link_drained, self),
            on_secret_updated=partial(events.link_secret_updated, self),
            on_blocked=partial(events.link_blocked, self),
            on_unblocked=partial(events.link_unblocked, self),
        )
        self.write: Callable[[bytes], None] = self._connection.send
        self.write_buffer_size: Callable[[], int] = self._connection.buffered
        self._server: ServerInfo | None = None

    @property
    def server(self) -> ServerInfo:
        """The broker's server properties. Available once the link is open."""
        if self._server is None:
            self._server = ServerInfo.of(self._connection.server_properties or {})
        return self._server

    @property
    def frame_max(self) -> int:
        """The negotiated maximum size of a frame, in bytes, once the link is open."""
        return int(self._connection.params.frame_max)

    @property
    def peer(self) -> Endpoint | None:
        """The address of the peer; None if it is unknown."""
        return self._connection.peer()

    @property
    def bytes_received(self) -> int:
        """The number of bytes read from the socket so far."""
        return int(self._connection.bytes_received)

    def report_reads(self, fn: Callable[[], None]) -> None:
        """Call `fn` after every read, once all its frames have been passed on."""
        self._connection.on_read = fn

    def open_channel(self, generation: int, sink: ChannelSink, events: ChannelEvents) -> Channel:
        """Open a channel, whose content goes to `sink` once it is released."""
        return self._connection.channels.open(generation, sink, events)

    def close(self) -> None:
        """Close the channels, then the connection. Abort a link that is not open yet."""
        if self._over:
            return
        if self._connection.is_open:
            self._connection.channels.close(self._close_connection)
        elif not self._connection.is_closing:
            self.abort("closed while it was opening")

    def abort(self, reason: str) -> None:
        """Close the socket without a handshake, in any state. No more data is read."""
        if not self._over:
            self._connection.abort(Aborted(reason))

    def _close_connection(self) -> None:
        if self._connection.is_open:
            self._connection.close()

    def _on_open(self, _connection: Connection) -> None:
        self._events.link_opened(self)

    def _on_closed(self, connection: Connection, cause: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        error = broker_error(
            connection.broken_by or cause,
            self.endpoint,
            connection.closed_with,
            opened=connection.was_open,
            addresses=connection.addresses,
        )
        code, text = connection.closed_with or (None, str(error))
        by_broker = connection.closed_with is not None
        loss = ConnectionLoss(code, text, "connection", by_broker, over=connection.closed_over)
        self._events.link_closed(self, error, loss)
