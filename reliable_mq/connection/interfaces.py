"""What a driver offers, what it is given for one connect, and whom it tells what happens then.

Each face has a driver of its own; here is no word of theirs.

What a connection tells the one that it serves.
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
    "TimerHandle",
]


@dataclass(frozen=True, slots=True)
class ConnectCredentials:
    """What is asked for anew at every connect."""

    credentials: Credentials | None = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)


class EventLoop(Protocol):
    """Where everything of a connection runs."""

    def call_soon(self, fn: Callable[[], None], /) -> None:
        """Run `fn` on the loop, later than now. Thread-safe."""

    def call_later(self, delay: float, fn: Callable[[], None], /) -> TimerHandle:
        """Run `fn` on the loop in `delay` seconds."""


class Link(Protocol):
    """One attempt at a connection to one endpoint, and the connection when it succeeds. Lives on its loop."""

    endpoint: Endpoint

    @property
    def server(self) -> ServerInfo:
        """What the broker said of itself; once open."""

    @property
    def frame_max(self) -> int:
        """The negotiated maximum size of a frame, bytes; once open."""

    @property
    def write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Send whole frames in one piece. Does nothing on a link that is over."""

    def open_channel(self, generation: int, sink: ChannelSink, events: ChannelEvents, /) -> Channel:
        """Open a channel; its content goes to `sink` once it is released."""

    def close(self) -> None:
        """Begin the closing handshake; where the link is not open yet, abort."""

    def abort(self, reason: str, /) -> None:
        """Close the socket without a handshake, whatever the state; nothing is read from it any more."""


class OpenLink(Protocol):
    """How a driver makes a link."""

    def __call__(
        self,
        endpoint: Endpoint,
        settings: ConnectionSettings,
        secrets: ConnectCredentials,
        name: str,
        events: LinkEvents,
        /,
    ) -> Link:
        """Begin one attempt at `endpoint`; `name` is that of the connection, shown by the management UI."""


class LinkEvents(Protocol):
    """Whom a link tells. Called on the loop, with the link that it is about."""

    def link_opened(self, link: Link) -> None:
        """The AMQP handshake is done."""

    def link_closed(self, link: Link, error: BrokerUnavailable, loss: ConnectionLoss) -> None:
        """It is over: it could not be opened, or was open and is lost, or was closed or aborted by us."""

    def link_blocked(self, link: Link, reason: str) -> None:
        """``connection.blocked``."""

    def link_unblocked(self, link: Link) -> None:
        """``connection.unblocked``."""

    def link_read(self, link: Link) -> None:
        """All that one read brought has been handed on."""

    def link_drained(self, link: Link) -> None:
        """The socket has taken the last of what it did not take at once."""


class ChannelEvents(Protocol):
    """Whom a data channel tells."""

    def channel_opened(self, channel: Channel) -> None:
        """Steps can be performed."""

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        """Either side closed it, while the connection lives. The loss of a connection is reported by its link alone."""

    def consumer_cancelled(self, channel: Channel, consumer_tag: str) -> None:
        """``basic.cancel`` from the broker."""


class TimerHandle(Protocol):
    """What `call_later` returns. On its loop only."""

    def cancel(self) -> None:
        """Cancel the call; does nothing where it was made or cancelled already."""


class ConnectionListener(ChannelSink, Protocol):
    """Whom a `Connector` serves; to the events of the channel (`ChannelSink`) come those of its life.

    All are called on its loop, must not block, and are never called from inside a call of the client to the connection.
    One that raises is logged, counted, and costs the connection.

    For each generation the order is ``ready``, then any events of the channel, then ``lost``, exactly once (after a
    close, too). ``failed`` comes in between only.
    """

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """The channel is set up; ``write`` works from now on. `frame_max` is in bytes."""

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """The channel is gone, with all that was outstanding on it; ``write`` does nothing until the next ``ready``."""

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt to connect or to set up failed. Where it will not be retried, nothing but ``close`` is left."""

    def blocked(self, reason: str) -> None:
        """The broker reads no more from this connection (memory or disk alarm). Outlives channels."""

    def unblocked(self) -> None:
        """It reads again, or the connection is lost. Exactly once for each ``blocked``."""

    def cancelled(self, consumer_tag: str) -> None:
        """The broker cancelled a consumer: its queue was deleted or lost its leader. The channel stays open."""

    def read_finished(self) -> None:
        """All that one read from the socket brought has been reported: the time to act on it together."""

    def write_drained(self) -> None:
        """The socket has taken the last of what was buffered. Not after a ``write`` that it took at once."""


class NullListener(ConnectionListener):
    """Takes no notice of anything; a client that few kinds of events concern overrides these."""

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
