"""The interfaces between a driver, the connector, and a connection's owner.

The owner is a `ConnectionListener`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from reliable_mq.codec import ChannelSink

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from reliable_mq.connection.channel import Channel
    from reliable_mq.connection.link import BaseLink
    from reliable_mq.core.channel_setup import ServerInfo
    from reliable_mq.core.reconnect import AddressOrder, ConnectionLoss
    from reliable_mq.errors import BrokerUnavailable, ReliableMQError
    from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint

TAKES_NOTHING: Final = sys.maxsize
"""The size of a write buffer into which nothing can be written."""


@dataclass(frozen=True, slots=True)
class ConnectCredentials:
    """The credentials and the TLS context, read again for every connect."""

    credentials: Credentials | None = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """The arguments of one attempt to connect."""

    endpoint: Endpoint
    settings: ConnectionSettings
    secrets: ConnectCredentials
    name: str  # of the connection in the management UI, unless the settings have one


class EventLoop(Protocol):
    """The event loop that a connection runs on."""

    addresses: AddressOrder

    def call_soon(self, fn: Callable[[], None], /) -> object:
        """Run `fn` on the loop, never from inside this call. Thread-safe."""

    def call_later(self, delay: float, fn: Callable[[], None], /) -> TimerHandle:
        """Run `fn` on the loop in `delay` seconds."""


class Output(Protocol):
    """The functions through which the client of a connection writes.

    While a channel is ready, a `Connector` sets both to functions of its link, so that a write passes through no other
    layer. At other times ``write`` does nothing, and ``write_buffer_size`` returns `TAKES_NOTHING`. So an owner that
    checks the size before it writes knows that the data is written.
    """

    write: Callable[[bytes], None]
    write_buffer_size: Callable[[], int]


#: The constructor of a driver's links, which begins an attempt to connect.
OpenLink: TypeAlias = "Callable[[ConnectAttempt, LinkEvents], BaseLink]"


class LinkEvents(Protocol):
    """The events of a link and its channels, called on the loop."""

    def link_opened(self, link: BaseLink) -> None:
        """Process the end of the AMQP handshake."""

    def link_closed(self, link: BaseLink, error: BrokerUnavailable, loss: ConnectionLoss) -> None:
        """Process the end of a link that failed to open, was lost, closed or aborted."""

    def link_blocked(self, link: BaseLink, reason: str) -> None:
        """Process ``connection.blocked``."""

    def link_unblocked(self, link: BaseLink) -> None:
        """Process ``connection.unblocked``."""

    def link_secret_updated(self, link: BaseLink) -> None:
        """Process ``connection.update-secret-ok``."""

    def link_drained(self, link: BaseLink) -> None:
        """Process an empty write buffer, after a write that was not accepted at once."""

    def channel_opened(self, channel: Channel) -> None:
        """Process ``channel.open-ok``. From now on steps can be performed."""

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        """Process a close by either side. Not called if the connection is lost."""

    def consumer_cancelled(self, channel: Channel, consumer_tag: str) -> None:
        """Process a ``basic.cancel`` from the broker."""


class TimerHandle(Protocol):
    """A timer of `EventLoop.call_later`. On its loop only."""

    def cancel(self) -> None:
        """Cancel the call. Do nothing if it was made or cancelled before."""


class ConnectionListener(ChannelSink):
    """The owner of a connection, which receives its content and its events.

    An owner overrides the methods that it needs. All methods are called on the loop, must not block, and are never
    called from inside a call of the owner to the connection. An exception of a method is logged and counted, and the
    connection is discarded.

    For each generation the order is ``ready``, any events of the channel, and then exactly one ``lost``, also after a
    close. ``failed`` and ``disconnected`` are only called between two generations.
    """

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Process a channel that is set up. From now on ``write`` sends.

        `frame_max` is in bytes.
        """

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Process the loss of the channel and of everything outstanding on it.

        From now on ``write`` does nothing.
        """

    def disconnected(self, reason: str) -> None:
        """Process the end of a connection whose channel was lost before."""

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Process a failed attempt to connect or to set up.

        Without `will_retry`, the owner can only ``close`` the connection.
        """

    def blocked(self, reason: str) -> None:
        """Process a block: the broker no longer reads (memory or disk alarm).

        A block outlives channels.
        """

    def unblocked(self) -> None:
        """Process the end of a block or of its connection, once for each ``blocked``."""

    def cancelled(self, consumer_tag: str) -> None:
        """Process a cancel by the broker: the queue or its leader is gone."""

    def read_finished(self) -> None:
        """Process all events of one read together."""

    def write_drained(self) -> None:
        """Process an empty write buffer.

        Not called after a ``write`` that the socket accepted at once.
        """


def do_nothing(*_: bytes) -> None:
    """Drop frames, or ignore a read, while no channel is ready."""


def takes_nothing() -> int:
    """Return the size of the write buffer while no channel is ready."""
    return TAKES_NOTHING
