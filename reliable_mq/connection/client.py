"""What a connection tells the one that it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reliable_mq.core.codec import ChannelSink

if TYPE_CHECKING:
    from reliable_mq.core.codec import RawDelivery
    from reliable_mq.core.recovery import Loss
    from reliable_mq.core.setup import ServerInfo
    from reliable_mq.errors import ReliableMQError

__all__ = ["Client", "QuietClient", "TimerHandle"]


class TimerHandle(Protocol):
    """What `call_later` returns. On its loop only."""

    def cancel(self) -> None:
        """Cancel the call; does nothing where it was made or cancelled already."""


class Client(ChannelSink, Protocol):
    """Whom a `Connector` serves; to the events of the channel (`ChannelSink`) come those of its life.

    All are called on its loop, must not block, and are never called from inside a call of the client to the connection.
    One that raises is logged, counted, and costs the connection.

    For each generation the order is ``ready``, then any events of the channel, then ``lost``, exactly once (after a
    close, too). ``failed`` comes in between only.
    """

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """The channel is set up; ``write`` works from now on. `frame_max` is in bytes."""

    def lost(self, generation: int, loss: Loss) -> None:
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


class QuietClient(Client):
    """Takes no notice of anything; a client that few kinds of events concern overrides these."""

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None: ...

    def lost(self, generation: int, loss: Loss) -> None: ...

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
