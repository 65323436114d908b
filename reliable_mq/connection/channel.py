"""A channel, which holds content back until it is ready.

Both drivers use this class. Each gives it a function that writes to the socket, and the frames that the broker sent.
The drivers' own channels are not used: they cannot declare every name and argument that brokers accept, they send one
method at a time, and they cancel consumers before they close.

Invariants:

- Each of our methods gets one reply, in order. An unexpected method breaks the connection (`CodecError`), unless the
  channel is closing.
- After a ``channel.close`` of either side no reply is reported. `LinkEvents.channel_closed` is called exactly once,
  unless the connection ends first.
- Content reaches the sink only after `release_content`, in order, and never after `silence`. A ``basic.cancel`` is held
  back like content.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from reliable_mq.codec import ChannelSink, CodecError, InboundReader, methods
from reliable_mq.codec.methods import STREAM_OFFSET, Cancel, Consume, SetPrefetch
from reliable_mq.core.channel_setup import Pipeline, StepRefused
from reliable_mq.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.codec import RawDelivery
    from reliable_mq.codec.methods import MethodReply, Step
    from reliable_mq.connection.interfaces import EventLoop, LinkEvents, TimerHandle
    from reliable_mq.core.channel_setup import StepGenerator

# The minimum time limit for the ``consume-ok`` of a stream, in seconds. RabbitMQ 4.3 takes 4 to 14 s while the node of
# a member is down: one process manages all members of all streams, and tries to reach that node again and again.
_TIME_TO_ATTACH: Final = 60.0

_LONGEST_GAP = 1e-3  # seconds
_GAP_PER_DELIVERY = 2.5e-6  # seconds for each delivery of the prefetch
_HEARTBEATS = 1024  # bytes, more than the heartbeats within a time limit
_MANY_BYTES = 64 * 1024  # a read of this size is worth a turn of the loop


class ChannelTable:
    """The channels of one connection, by number."""

    def __init__(self, reader: InboundReader) -> None:
        self.channel_max = 0  # the negotiated number of channels, set when the connection is open
        self.read_throttle = ReadThrottle()  # follows the consumers of the channels
        self._reader = reader
        self._channels: dict[int, Channel] = {}
        self._last_number = 0
        self._on_closed: Callable[[], None] | None = None

    def open(self, generation: int, write: Callable[[bytes], None], sink: ChannelSink, events: LinkEvents) -> Channel:
        """Send ``channel.open`` by ``write``, which takes whole frames.

        Raises:
            BrokerUnavailable: If every channel that the connection may have is still being closed.
        """
        if len(self._channels) >= self.channel_max:
            raise BrokerUnavailable(f"the close of channel {self._last_number} was not answered, and no other is free")
        while True:
            self._last_number = self._last_number % self.channel_max + 1
            if self._last_number not in self._channels:
                break
        channel = Channel(self._last_number, generation, write, self._reader, self.read_throttle, sink, events)
        self._channels[channel.number] = channel
        return channel

    def receive(self, frame: bytes) -> None:
        """Pass a frame that is not for a sink to its channel.

        Raises:
            CodecError: If the frame is broken, or is not a reply to an outstanding method.
        """
        channel = self._channels.get(int.from_bytes(frame[1:3], "big"))
        method = methods.method_of(frame)
        if channel is None or method is None:
            return  # a frame of a closed channel, or content of a silenced one
        if channel.receive(method, frame):
            del self._channels[channel.number]
            self._report_if_closed()

    def close(self, on_closed: Callable[[], None]) -> None:
        """Close every channel, then call `on_closed`, unless the connection ends first.

        A close-ok confirms that the broker has handled all earlier methods on the channel.
        """
        self._on_closed = on_closed
        for channel in self._channels.values():
            channel.silence()
            channel.close()
        self._report_if_closed()

    def _report_if_closed(self) -> None:
        if self._on_closed is not None and not self._channels:
            self._on_closed()


class Channel:
    """A channel of a connection, made by `ChannelTable.open`. On the loop only."""

    def __init__(
        self,
        number: int,
        generation: int,
        write: Callable[[bytes], None],
        reader: InboundReader,
        read_throttle: ReadThrottle,
        sink: ChannelSink,
        events: LinkEvents,
    ) -> None:
        self.number = number  # on the connection
        self.generation = generation  # unique among all channels of the same owner
        # Whether the broker closed the channel over the step that was to be answered next. It also closes it over a
        # publish or an ack, and without a method, for example if an ack is overdue.
        self.step_refused = False
        self._write = write
        self._reader = reader
        self._read_throttle = read_throttle
        self._sink = sink
        self._events = events
        self._gate = ReadyGate(sink)
        self._open = False
        self._closing = False
        self._awaited: deque[tuple[tuple[int, int], Callable[[MethodReply], None]]]
        self._awaited = deque([(methods.CHANNEL_OPEN_OK, self._opened)])
        reader.attach(number, self._gate)
        write(methods.encode_channel_open(number))

    def release_content(self) -> None:
        """Pass held and later content to the sink.

        Call it while a reply is processed, when no content is partly read.
        """
        self._reader.attach(self.number, self._sink)
        self._gate.open()

    def silence(self) -> None:
        """Drop all content from now on."""
        self._reader.detach(self.number)

    def perform(self, steps: Sequence[Step], done: Callable[[MethodReply], None]) -> None:
        """Send the methods of `steps` in one piece.

        `done` is called with each reply, in order. The broker refuses a step by closing the channel.

        Raises:
            ConfigurationError: If a step cannot be encoded. No step was sent.
            BrokerUnavailable: If the channel is not open.
        """
        if not self._open or self._closing:
            raise BrokerUnavailable(f"channel {self.number} is not open")
        frames, replies = methods.encode_steps(self.number, steps)
        self._awaited.extend((reply, done) for reply in replies)
        self._write(frames)
        for step in steps:
            self._read_throttle.follow(step)

    def close(self) -> None:
        """Begin the closing handshake."""
        if not self._closing:
            self._closing = True
            self._awaited.clear()
            self._write(methods.encode_channel_close(self.number))

    def receive(self, method: tuple[int, int], frame: bytes) -> bool:
        """Process a method that the broker sent; return whether it closes the channel.

        Raises:
            CodecError: If the method is broken, or is not a reply to an outstanding method.
        """
        if method == methods.CHANNEL_CLOSED:
            code, text, (class_id, method_id) = methods.decode_close(frame)
            self.step_refused = bool(self._awaited) and self._awaited[0][0] == (class_id, method_id + 1)
            self._write(methods.encode_channel_close_ok(self.number))
            self._report_closed(code, text, by_broker=True)
            return True
        if method == methods.CHANNEL_CLOSE_OK:
            if not self._closing:
                return False  # for the channel that had this number before, if both sides closed it at a time
            self._report_closed(200, "closed by us", by_broker=False)
            return True
        if method == methods.CANCELLED:
            self._gate.pass_on(partial(self._events.consumer_cancelled, self, methods.decode_text(frame)))
        elif self._awaited and method == self._awaited[0][0]:
            _, done = self._awaited.popleft()
            done(methods.decode_reply(frame))
        elif not self._closing:
            raise CodecError(f"the broker answered nothing that was asked, with method {method}")
        return False

    def _opened(self, _reply: MethodReply) -> None:
        self._open = True
        self._events.channel_opened(self)

    def _report_closed(self, code: int, text: str, *, by_broker: bool) -> None:
        self._open, self._closing = False, True
        self._awaited.clear()
        self._reader.detach(self.number)
        self._events.channel_closed(self, code, text, by_broker)


class SetupRunner:
    """A runner of a generator's steps, on one channel after another. On the loop only.

    The generator's result, or the exception that ended it, is passed to ``done`` exactly once, unless the runner is
    dropped.
    """

    def __init__(
        self,
        generator: StepGenerator,
        done: Callable[[Any], None],
        answered: Callable[[], None],
        in_line: Callable[[], bool] = lambda: False,
    ) -> None:
        self.in_line = in_line  # returns whether the steps wait behind work that has a time limit of its own
        self._generator = generator
        self._done: Callable[[Any], None] | None = done
        self._answered = answered  # called at every reply of the broker
        self._waiting: Step | Pipeline | None = None  # the step that waits for another channel
        self._replies: list[MethodReply] = []  # the replies to the pipeline that was sent
        self._step: Step | Pipeline | None = None  # the step that was sent last
        self._channel: Channel

    def start(self, channel: Channel) -> None:
        """Send the first step, or the step that waits for another channel."""
        self._channel = channel
        if self._waiting is None:
            self._advance(None)
        else:
            step, self._waiting = self._waiting, None
            self._send(step)

    @property
    def begun(self) -> bool:
        return self._step is not None

    @property
    def wants_channel(self) -> bool:
        """Whether a step waits for another channel, because the broker closed the last."""
        return self._waiting is not None

    def time_to_answer(self, usual: float) -> float:
        """Return the time limit for the next reply, in seconds; mostly ``usual``."""
        step = self._step
        attaches = isinstance(step, Consume) and STREAM_OFFSET in step.arguments
        return max(usual, _TIME_TO_ATTACH) if attaches else usual

    def refuse(self, code: int, text: str, *, connection: bool = False) -> None:
        """Throw the broker's refusal of the step into the generator.

        The broker refused the step by closing the channel, or the connection.
        """
        if self._done is None:
            return
        refused = StepRefused(code, text, answered=tuple(self._replies), connection=connection)
        self._replies.clear()
        self._waiting = self._resume(partial(self._generator.throw, refused))

    def fail(self, error: Exception) -> None:
        """End with `error`, in any state."""
        if self._done is not None:
            self._generator.close()
            self._finish(error)

    def drop(self) -> None:
        """End without calling `done`."""
        self._done = None
        self._generator.close()

    def _advance(self, reply: MethodReply | tuple[MethodReply, ...]) -> None:
        if self._done is None:
            return
        step = self._resume(partial(self._generator.send, reply))
        if step is not None:
            self._send(step)

    def _resume(self, generator: Callable[[], Step | Pipeline]) -> Step | Pipeline | None:
        """Return the next step; None if the generator has ended, and `done` was called."""
        try:
            return generator()
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # passed on
            self._finish(error)
        return None

    def _send(self, step: Step | Pipeline) -> None:
        self._step = step
        try:
            self._channel.perform(step.steps if isinstance(step, Pipeline) else (step,), self._on_reply)
        except Exception as error:  # noqa: BLE001  # of a step that cannot be encoded; passed on
            self._generator.close()
            self._finish(error)

    def _on_reply(self, reply: MethodReply) -> None:
        self._answered()
        if not isinstance(self._step, Pipeline):
            self._advance(reply)
            return
        self._replies.append(reply)
        if len(self._replies) == len(self._step.steps):
            replies, self._replies = tuple(self._replies), []
            self._advance(replies)

    def _finish(self, outcome: object) -> None:
        done, self._done = self._done, None
        self._waiting = None
        if done is not None:
            done(outcome)


def data_arrives(before: int, received: int) -> bool:
    """Return whether more than heartbeats was read between two counts of bytes.

    A reply comes after the deliveries that the broker has sent before. On a slow network, these may take longer than
    the time limit of the reply, which therefore starts again while data arrives.
    """
    return received - before > _HEARTBEATS


class StepQueue:
    """A queue of generators of steps for a ready channel. On the loop only."""

    def __init__(
        self,
        loop: EventLoop,
        usual: float,
        *,
        channel: Callable[[], Channel | None],
        is_blocked: Callable[[], bool],
        bytes_received: Callable[[], int],
        discard: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._usual = usual  # the time limit for most replies, in seconds
        self._channel = channel  # returns the ready channel, if there is one
        self._is_blocked = is_blocked  # returns whether the broker has blocked the connection, and so does not reply
        self._bytes_received = bytes_received
        self._discard = discard
        self._runners: deque[SetupRunner] = deque()  # the first one is running
        self._timer: TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step was sent that the broker has not answered."""
        return bool(self._runners) and self._runners[0].begun

    def add(self, generator: StepGenerator, done: Callable[[Any], None], in_line: Callable[[], bool]) -> None:
        """Perform steps after those of earlier calls, as `Connector.run` does."""
        self._runners.append(SetupRunner(generator, partial(self._ended, done), self.restart_timer, in_line))
        if len(self._runners) == 1:
            self._loop.call_soon(self._start)

    def refuse(self, code: int, text: str) -> None:
        self._runners[0].refuse(code, text)

    def fail_all(self, error: Exception) -> None:
        while self._runners:
            self._runners[0].fail(error)

    def restart_timer(self) -> None:
        """Start the time limit of the current step again, after a reply or a block."""
        if self._timer is not None:
            self._timer.cancel()
            self._set_timer(self._usual)

    def _start(self) -> None:
        ready = self._channel()
        if self._runners and ready is not None:
            self._set_timer(self._usual)
            self._runners[0].start(ready)

    def _ended(self, done: Callable[[Any], None], outcome: object) -> None:
        self._runners.popleft()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._runners:
            self._loop.call_soon(self._start)
        done(outcome)

    def _set_timer(self, seconds: float, waited: float = 0.0) -> None:
        on_timeout = partial(self._on_timeout, waited + seconds, self._bytes_received())
        self._timer = self._loop.call_later(seconds, on_timeout)

    def _on_timeout(self, waited: float, before: int) -> None:
        arrives = data_arrives(before, self._bytes_received())
        if arrives or self._is_blocked() or self._runners[0].in_line():
            self._set_timer(self._usual)
        elif (limit := self._runners[0].time_to_answer(self._usual)) > waited:
            self._set_timer(limit - waited, waited)
        else:
            self._discard(f"the broker did not answer within {waited:g} s")


class ReadyGate(ChannelSink):
    """A sink that holds content back until `open`, and then passes it on in order.

    Deliveries and a ``basic.cancel`` may follow ``basic.consume-ok`` in the same read, while later steps of the set-up
    are still outstanding. The client must not see them before ``ready``.
    """

    def __init__(self, sink: ChannelSink) -> None:
        self._sink = sink
        self.largest_body = sink.largest_body
        self._held: list[Callable[[], None]] | None = []

    def open(self) -> None:
        """Pass on the held content, and pass on all later content at once."""
        held, self._held = self._held, None
        for event in held or ():
            event()

    def acked(self, tag: int, multiple: bool) -> None:
        self.pass_on(lambda: self._sink.acked(tag, multiple))

    def nacked(self, tag: int, multiple: bool) -> None:
        self.pass_on(lambda: self._sink.nacked(tag, multiple))

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        self.pass_on(lambda: self._sink.returned(code, text, exchange, routing_key, properties, body))

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self.pass_on(lambda: self._sink.delivered(deliveries))

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        self.pass_on(lambda: self._sink.got(delivery, message_count))

    def got_empty(self) -> None:
        self.pass_on(self._sink.got_empty)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        self.pass_on(lambda: self._sink.oversized(delivery, size, message_count))

    def pass_on(self, event: Callable[[], None]) -> None:
        if self._held is None:
            event()
        else:
            self._held.append(event)


class ReadThrottle:
    """A limit on how often a consumer's connection reads. Not thread-safe.

    A broker sends few deliveries at a time, and most of the cost of a read is passing work to other threads and waking
    them. So the read after a small one waits until about a tenth of the prefetch can have arrived, at 40 000 messages a
    second. This halves the CPU time per message; on a machine shared with the broker, both become faster. The gap alone
    would allow ten times that rate, for any prefetch. A delivery that does not closely follow another one does not
    wait, and a write never waits.
    """

    def __init__(self) -> None:
        self._gap = 0.0
        self._next_gap = 0.0  # of the next consumer
        self._newest = "", 0.0  # the tag and the gap of the newest consumer

    def follow(self, step: Step) -> None:
        """Adapt to a step: the largest prefetch counts, until a consumer is cancelled.

        After that the newest consumer counts, unless it is the one that was cancelled.
        """
        if isinstance(step, SetPrefetch):
            self._next_gap = min(step.count * _GAP_PER_DELIVERY, _LONGEST_GAP) if step.count else _LONGEST_GAP
            self._gap = max(self._gap, self._next_gap)
        elif isinstance(step, Consume):
            self._newest = step.consumer_tag, self._next_gap
        elif isinstance(step, Cancel):
            tag, gap = self._newest
            self._gap = 0.0 if step.consumer_tag == tag else gap

    def gap_after(self, size: int) -> float:
        """Return the seconds until the next read, after a read of ``size`` bytes."""
        return 0.0 if size >= _MANY_BYTES else self._gap
