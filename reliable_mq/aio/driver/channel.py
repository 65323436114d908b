"""A channel of ours on a link."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliable_mq.core import methods
from reliable_mq.core.codec import CodecError, InboundReader
from reliable_mq.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.connection.events import ChannelEvents
    from reliable_mq.connection.pace import ReadPace
    from reliable_mq.core.codec import ChannelSink
    from reliable_mq.core.setup import Reply, Step

__all__ = ["DataChannel"]


class DataChannel:
    """A channel with its synchronous methods; its content goes to a sink. Made by `Link.open_channel`."""

    def __init__(
        self,
        number: int,
        write: Callable[[bytes], None],
        reader: InboundReader,
        pace: ReadPace,
        events: ChannelEvents,
    ) -> None:
        self.number = number
        self._write = write
        self._reader = reader
        self._pace = pace
        self._events = events
        self._open = False
        self._closing = False
        self._awaited: deque[tuple[tuple[int, int], Callable[[Reply], None]]] = deque()

    def attach(self, sink: ChannelSink) -> None:
        """Give the channel's content to another sink. Only where no content can be half read: on a reply, say."""
        self._reader.attach(self.number, sink)

    def silence(self) -> None:
        """Give the channel's content to nobody from now on."""
        self._reader.detach(self.number)

    def perform(self, step: Step, done: Callable[[Reply], None]) -> None:
        """Send the method of `step`; `done` gets the reply. Where the broker refuses, the channel is closed instead.

        Raises:
            ConfigurationError: it cannot be encoded.
            BrokerUnavailable: the channel is not open.
        """
        self.perform_all((step,), done)

    def perform_all(self, steps: Sequence[Step], done: Callable[[Reply], None]) -> None:
        """Send the methods of `steps` in one piece; `done` gets each reply, in order.

        Raises:
            ConfigurationError: one cannot be encoded; none was sent.
            BrokerUnavailable: the channel is not open.
        """
        if not self._open or self._closing:
            raise BrokerUnavailable(f"channel {self.number} is not open")
        frames, answers = methods.encode_steps(self.number, steps)
        self._awaited.extend((answer, done) for answer in answers)
        self._write(frames)
        for step in steps:
            self._pace.follow(step)

    def close(self) -> None:
        """Begin the closing handshake."""
        if not self._closing:
            self._closing = True
            self._awaited.clear()
            self._write(methods.encode_channel_close(self.number))

    def take(self, method: tuple[int, int], frame: bytes) -> bool:
        """Take in a method that the broker sent; return whether the channel is closed by it.

        Raises:
            CodecError: it is broken.
        """
        if method == methods.CHANNEL_CLOSED:
            code, text = methods.decode_close(frame)
            self._write(methods.encode_channel_close_ok(self.number))
            self._closed(code, text, by_broker=True)
            return True
        if method == methods.CHANNEL_CLOSE_OK:
            self._closed(200, "closed by us", by_broker=False)
            return True
        if method == methods.CHANNEL_OPEN_OK:
            self._open = True
            self._events.channel_opened(self)
        elif method == methods.CANCELLED:
            self._events.consumer_cancelled(self, methods.decode_text(frame))
        elif self._awaited and method == self._awaited[0][0]:
            _, done = self._awaited.popleft()
            done(methods.decode_reply(frame))
        elif not self._closing:
            raise CodecError(f"the broker answered nothing that was asked, with method {method}")
        return False

    def _closed(self, code: int, text: str, *, by_broker: bool) -> None:
        self._open, self._closing = False, True
        self._awaited.clear()
        self._reader.detach(self.number)
        self._events.channel_closed(self, code, text, by_broker)
