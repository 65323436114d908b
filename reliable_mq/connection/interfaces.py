"""The interfaces between a driver, the connector, and a connection's owner.

The owner is a `ConnectionListener`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from reliable_mq.codec import ChannelSink

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from reliable_mq.codec import RawDelivery
    from reliable_mq.connection.channel import Channel
    from reliable_mq.core.channel_setup import ServerInfo
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.errors import BrokerUnavailable, ReliableMQError
    from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint

__all__ = [
    "ChannelEvents",
    "ConnectCredentials",
    "ConnectionListener",
    "EventLoop",
    "Link",
    "LinkEvents",
    "NullListener",
    "OpenLink",
    "Output",
    "TimerHandle",
]


@dataclass(frozen=True, slots=True)
class ConnectCredentials:
    """Credentials and TLS context, read anew for every connect."""

    credentials: Credentials | None = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)


class EventLoop(Protocol):
    """The loop on which everything of a connection runs."""

    def call_soon(self, fn: Callable[[], None], /) -> None:
        """Run `fn` on the loop, later than now. Thread-safe."""

    def call_later(self, delay: float, fn: Callable[[], None], /) -> TimerHandle:
        """Run `fn` on the loop in `delay` seconds."""


class Link(Protocol):
    """One attempt to connect, and the connection if it succeeds. Lives on its loop."""

    endpoint: Endpoint

    @property
    def server(self) -> ServerInfo:
        """The broker's server properties; once open."""

    @property
    def frame_max(self) -> int:
        """The negotiated maximum size of a frame, bytes; once open."""

    @property
    def peer(self) -> Endpoint | None:
        """The address at the other end; None if it is not known."""

    @property
    def write_buffer_size(self) -> Callable[[], int]:
        """Return the bytes that the kernel has not taken yet."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Send whole frames in one piece. Does nothing on a link that is over."""

    def report_reads(self, fn: Callable[[], None], /) -> None:
        """Call `fn` after every read, once all its frames have been passed on."""

    def open_channel(self, generation: int, sink: ChannelSink, events: ChannelEvents, /) -> Channel:
        """Open a channel; its content goes to `sink` once it is released.

        Raises:
            BrokerUnavailable: every channel that the connection may have is still being closed.
        """

    def close(self) -> None:
        """Begin the closing handshake; abort a link that is not open yet."""

    def abort(self, reason: str, /) -> None:
        """Close the socket without a handshake, in any state. Nothing more is read."""


class Output(Protocol):
    """How the client of a connection writes.

    A `Connector` sets both to functions of its link while a channel is ready, and else to functions that do nothing: a
    write passes no layer between.
    """

    write: Callable[[bytes], None]
    write_buffer_size: Callable[[], int]


class OpenLink(Protocol):
    """Constructor of a driver's links."""

    def __call__(
        self,
        endpoint: Endpoint,
        settings: ConnectionSettings,
        secrets: ConnectCredentials,
        name: str,
        events: LinkEvents,
        /,
    ) -> Link:
        """Begin one attempt at `endpoint`; the management UI shows `name`."""


class LinkEvents(Protocol):
    """Events of a link. Called on the loop."""

    def link_opened(self, link: Link) -> None:
        """Process the end of the AMQP handshake."""

    def link_closed(self, link: Link, error: BrokerUnavailable, loss: ConnectionLoss) -> None:
        """Process the end of a link: not opened, lost, or closed or aborted by us."""

    def link_blocked(self, link: Link, reason: str) -> None:
        """Process ``connection.blocked``."""

    def link_unblocked(self, link: Link) -> None:
        """Process ``connection.unblocked``."""

    def link_secret_updated(self, link: Link) -> None:
        """Process ``connection.update-secret-ok``."""

    def link_drained(self, link: Link) -> None:
        """Process an empty write buffer, after a write that was not taken at once."""


class ChannelEvents(Protocol):
    """Events of a channel."""

    def channel_opened(self, channel: Channel) -> None:
        """Process ``channel.open-ok``: steps can be performed."""

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        """Process a close by either side, unless the connection is lost."""

    def consumer_cancelled(self, channel: Channel, consumer_tag: str) -> None:
        """Process ``basic.cancel`` of the broker."""


class TimerHandle(Protocol):
    """A timer of `EventLoop.call_later`. On its loop only."""

    def cancel(self) -> None:
        """Cancel the call; do nothing if it was made or cancelled."""


class ConnectionListener(ChannelSink, Protocol):
    """The owner of a connection, which receives its content and its events.

    All methods are called on the loop, must not block, and are never called from inside a call of the owner to the
    connection. An exception of one is logged, counted, and costs the connection.

    For each generation the order is ``ready``, then any events of the channel, then ``lost``, exactly once (after a
    close, too). ``failed`` comes in between only.
    """

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Process a channel that is set up; ``write`` sends now. `frame_max`: in bytes."""

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Process the loss of the channel and of all that is outstanding on it.

        ``write`` does nothing now.
        """

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Process a failed attempt to connect or to set up.

        Without `will_retry` only ``close`` is left to do.
        """

    def blocked(self, reason: str) -> None:
        """Process a block: the broker reads no more (memory or disk alarm).

        It outlives channels.
        """

    def unblocked(self) -> None:
        """Process the end of a block or of the connection, once for each ``blocked``."""

    def cancelled(self, consumer_tag: str) -> None:
        """Process a cancel by the broker: the queue is gone, or its leader."""

    def read_finished(self) -> None:
        """Act on all events of one read together."""

    def write_drained(self) -> None:
        """Process an empty write buffer.

        Not called after a ``write`` that the socket took at once.
        """


class NullListener(ConnectionListener):
    """Ignores every event: the base of owners that need a few."""

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None: ...

    def lost(self, generation: int, loss: ConnectionLoss) -> None: ...

    def failed(self, error: ReliableMQError, will_retry: bool) -> None: ...

    def blocked(self, reason: str) -> None: ...

    def unblocked(self) -> None: ...

    def cancelled(self, consumer_tag: str) -> None: ...

    def read_finished(self) -> None: ...

    def write_drained(self) -> None: ...

    def acked(self, tag: int, multiple: bool) -> None: ...

    def nacked(self, tag: int, multiple: bool) -> None: ...

    def returned(
        self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes
    ) -> None: ...

    def delivered(self, deliveries: list[RawDelivery]) -> None: ...

    def got(self, delivery: RawDelivery, message_count: int) -> None: ...

    def got_empty(self) -> None: ...

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None: ...
