"""The part of a link that does not depend on its driver.

A driver passes its input to `BaseLink.reader`, and gets back the frames of its own handshake, heartbeats and close.

Invariant: No event follows an abort, which resets the reader, except the end of the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.codec import InboundReader, methods
from reliable_mq.connection.channel import ChannelTable
from reliable_mq.connection.errors import Aborted
from reliable_mq.connection.interfaces import do_nothing
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.reconnect import ConnectionLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reliable_mq.codec import ChannelSink
    from reliable_mq.connection.channel import Channel
    from reliable_mq.connection.interfaces import ConnectAttempt, LinkEvents
    from reliable_mq.errors import BrokerUnavailable
    from reliable_mq.settings import Endpoint

_NO_CHANNEL = b"\0\0"


class BaseLink:
    """An attempt to connect, and the connection if it succeeds. On its loop only."""

    write: Callable[[bytes], None]  # sends whole frames in one piece; does nothing on a link that has ended
    write_buffer_size: Callable[[], int]  # returns the bytes that the kernel has not accepted; see `Output`
    frame_max: int  # the negotiated maximum size of a frame, in bytes, once the link is open
    server: ServerInfo  # once the link is open

    def __init__(self, attempt: ConnectAttempt, events: LinkEvents) -> None:
        self.endpoint = attempt.endpoint
        self.aborted: Aborted | None = None
        self.closed_with: tuple[int, str] | None = None  # the code and text of the broker's ``connection.close``
        self.reader = InboundReader(self._on_foreign_frame, Delivery)
        self.channels = ChannelTable(self.reader)
        self.on_read: Callable[[], None] = do_nothing  # to call when all frames of a read have been passed on
        self._events = events
        self._closed_over = (0, 0)

    # -- for the connector -----------------------------------------------------------------------------------------

    @property
    def bytes_received(self) -> int:
        """The number of bytes read from the socket so far."""
        raise NotImplementedError

    @property
    def peer(self) -> Endpoint | None:
        """The address of the peer; None if it is unknown."""
        raise NotImplementedError

    def open_channel(self, generation: int, sink: ChannelSink) -> Channel:
        """Open a channel, whose content goes to `sink` once it is released.

        Raises:
            BrokerUnavailable: If every channel that the connection may have is still being closed.
        """
        return self.channels.open(generation, self.write, sink, self._events)

    def close(self) -> None:
        """Close the channels, then the connection. Abort a link that is not open yet."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Close the socket without a handshake, in any state. No more data is read."""
        raise NotImplementedError

    # -- for the driver --------------------------------------------------------------------------------------------

    def agree(self, *, frame_max: int, channel_max: int) -> None:
        """Record the negotiated limits."""
        self.frame_max = frame_max
        self.reader.agree(frame_max)
        self.channels.channel_max = channel_max

    def report_opened(self, server_properties: Mapping[str, object] | None) -> None:
        self.server = ServerInfo.of(server_properties or {})
        self._events.link_opened(self)

    def report_closed(self, error: BrokerUnavailable) -> None:
        code, text = self.closed_with or (None, str(error))
        loss = ConnectionLoss(code, text, "connection", self.closed_with is not None, over=self._closed_over)
        self._events.link_closed(self, error, loss)

    def _pass_on(self, frame: bytes) -> None:
        """Pass a frame to the driver."""
        raise NotImplementedError

    def _on_foreign_frame(self, frame: bytes) -> None:
        # pika makes bytes of a text that is not UTF-8, and drops the code and the text of a close in the handshake.
        method = methods.method_of(frame)
        if frame[1:3] != _NO_CHANNEL:
            self.channels.receive(frame)
        elif method == methods.CONNECTION_BLOCKED:
            self._events.link_blocked(self, methods.decode_text(frame))
        elif method == methods.CONNECTION_UNBLOCKED:
            self._events.link_unblocked(self)
        elif method == methods.CONNECTION_SECRET_UPDATED:
            self._events.link_secret_updated(self)
        else:
            if method == methods.CONNECTION_CLOSED:
                code, text, self._closed_over = methods.decode_close(frame)
                self.closed_with = code, text
            self._pass_on(frame)
