"""A channel of ours on a link.

Carries out a generator of steps on a data channel, one after the other.

Holds a channel's content back until the channel is ready.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq.codec import CodecError, InboundReader, methods
from reliable_mq.core.channel_setup import Pipeline, StepRefused
from reliable_mq.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.codec import ChannelSink, RawDelivery
    from reliable_mq.codec.methods import MethodReply, Step
    from reliable_mq.connection.interfaces import ChannelEvents, ChannelProtocol
    from reliable_mq.connection.read_throttle import ReadThrottle
    from reliable_mq.core.channel_setup import StepGenerator

__all__ = ["DataChannel", "ReadyGate", "SetupRunner"]


class DataChannel:
    """A channel with its synchronous methods; its content goes to a sink. Made by `Link.open_channel`."""

    def __init__(
        self,
        number: int,
        write: Callable[[bytes], None],
        reader: InboundReader,
        pace: ReadThrottle,
        events: ChannelEvents,
    ) -> None:
        self.number = number
        self._write = write
        self._reader = reader
        self._pace = pace
        self._events = events
        self._open = False
        self._closing = False
        self._awaited: deque[tuple[tuple[int, int], Callable[[MethodReply], None]]] = deque()

    def attach(self, sink: ChannelSink) -> None:
        """Give the channel's content to another sink. Only where no content can be half read: on a reply, say."""
        self._reader.attach(self.number, sink)

    def silence(self) -> None:
        """Give the channel's content to nobody from now on."""
        self._reader.detach(self.number)

    def perform(self, step: Step, done: Callable[[MethodReply], None]) -> None:
        """Send the method of `step`; `done` gets the reply. Where the broker refuses, the channel is closed instead.

        Raises:
            ConfigurationError: it cannot be encoded.
            BrokerUnavailable: the channel is not open.
        """
        self.perform_all((step,), done)

    def perform_all(self, steps: Sequence[Step], done: Callable[[MethodReply], None]) -> None:
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


class SetupRunner:
    """One generator, carried out. Lives on the I/O thread.

    Args:
        generator: the steps.
        done: called exactly once, with what the generator returned or the exception that ended it, unless it is
            dropped.
        answered: called with every answer of the broker.
    """

    def __init__(
        self, generator: StepGenerator, done: Callable[[Any], None], answered: Callable[[], None] | None = None
    ) -> None:
        self._generator = generator
        self._done: Callable[[Any], None] | None = done
        self._answered = answered
        self._next: Step | Pipeline | None = None  # to be taken on another channel
        self._replies: list[MethodReply] = []  # to the pipeline that is outstanding
        self._channel: ChannelProtocol

    def start(self, channel: ChannelProtocol) -> None:
        """Perform the first step, or go on on another channel."""
        self._channel = channel
        if self._next is None:
            self._advance(None)
        else:
            step, self._next = self._next, None
            self._perform(step)

    @property
    def wants_channel(self) -> bool:
        """Whether it goes on, on another channel, though the broker has closed its own."""
        return self._next is not None

    def refuse(self, code: int, text: str, *, connection: bool = False) -> None:
        """The broker closed the channel, or the connection: the generator says which error that is, or goes on."""
        if self._done is None:
            return
        refused = StepRefused(code, text, answered=tuple(self._replies), connection=connection)
        self._replies.clear()
        try:
            self._next = self._generator.throw(refused)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # handed on
            self._finish(error)

    def fail(self, error: Exception) -> None:
        """End with `error`, whatever the generator was waiting for."""
        if self._done is not None:
            self._generator.close()
            self._finish(error)

    def drop(self) -> None:
        """End without a word."""
        self._done = None
        self._generator.close()

    def _advance(self, reply: MethodReply | tuple[MethodReply, ...]) -> None:
        if self._done is None:
            return
        try:
            step = self._generator.send(reply)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # handed on
            self._finish(error)
        else:
            self._perform(step)

    def _perform(self, step: Step | Pipeline) -> None:
        try:
            if isinstance(step, Pipeline):
                self._channel.perform_all(step.steps, partial(self._collect, len(step.steps)))
            else:
                self._channel.perform(step, self._reply)
        except Exception as error:  # noqa: BLE001  # of a step that cannot be encoded; handed on
            self._generator.close()
            self._finish(error)

    def _reply(self, reply: MethodReply) -> None:
        if self._answered is not None:
            self._answered()
        self._advance(reply)

    def _collect(self, count: int, reply: MethodReply) -> None:
        if self._answered is not None:
            self._answered()
        self._replies.append(reply)
        if len(self._replies) == count:
            replies, self._replies = tuple(self._replies), []
            self._advance(replies)

    def _finish(self, outcome: object) -> None:
        done, self._done = self._done, None
        self._next = None
        if done is not None:
            done(outcome)


class ReadyGate:
    """Holds content back until it is opened, then lets it through in its order.

    Deliveries may follow ``basic.consume-ok`` in the same read, while later steps of the set-up are still outstanding;
    a client must not see them before it was told that the channel is ready.
    """

    def __init__(self, sink: ChannelSink) -> None:
        self._sink = sink
        self.largest_body = sink.largest_body
        self._held: list[Callable[[], None]] | None = []

    def open(self) -> None:
        """Hand over what was held back; from now on, everything at once."""
        held, self._held = self._held, None
        for event in held or ():
            event()

    def acked(self, tag: int, multiple: bool) -> None:
        self._pass(lambda: self._sink.acked(tag, multiple))

    def nacked(self, tag: int, multiple: bool) -> None:
        self._pass(lambda: self._sink.nacked(tag, multiple))

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        self._pass(lambda: self._sink.returned(code, text, exchange, routing_key, properties, body))

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self._pass(lambda: self._sink.delivered(deliveries))

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        self._pass(lambda: self._sink.got(delivery, message_count))

    def got_empty(self) -> None:
        self._pass(self._sink.got_empty)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        self._pass(lambda: self._sink.oversized(delivery, size, message_count))

    def _pass(self, event: Callable[[], None]) -> None:
        if self._held is None:
            event()
        else:
            self._held.append(event)
