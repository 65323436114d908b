"""A link to a broker, and a data channel on it."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import pika.exceptions

from reliable_mq.codec import methods
from reliable_mq.codec import methods as steps
from reliable_mq.connection.pika_driver.connection import Connection, connection_parameters
from reliable_mq.connection.pika_driver.errors import Aborted, broker_error
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pika import spec

    from reliable_mq.codec import ChannelSink
    from reliable_mq.codec.methods import MethodReply, Step
    from reliable_mq.connection.interfaces import ChannelEvents, ConnectCredentials, LinkEvents
    from reliable_mq.connection.pika_driver.loop import EventLoop
    from reliable_mq.settings import ConnectionSettings, Endpoint

__all__ = ["DataChannel", "Link"]


class Link:
    """One attempt at a connection to one endpoint, and the connection when it succeeds. Lives on its loop.

    Args:
        loop: to run on.
        endpoint: host and port.
        settings: the rest.
        secrets: credentials and TLS context, fresh.
        name: of the connection, shown by the management UI.
        events: whom to tell.
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
            on_read=partial(events.link_read, self),
            on_drained=partial(events.link_drained, self),
        )
        self._connection.add_on_connection_blocked_callback(self._on_blocked)
        self._connection.add_on_connection_unblocked_callback(self._on_unblocked)
        self._server: ServerInfo | None = None

    @property
    def server(self) -> ServerInfo:
        """What the broker said of itself; once open."""
        if self._server is None:
            self._server = ServerInfo.of(self._connection.server_properties or {})
        return self._server

    @property
    def frame_max(self) -> int:
        """The negotiated maximum size of a frame, bytes; once open."""
        return int(self._connection.params.frame_max)

    @property
    def write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._connection.buffered()

    def write(self, data: bytes) -> None:
        """Send whole frames in one piece. Does nothing on a link that is over."""
        if not self._over:
            self._connection.send(data)

    def open_channel(self, sink: ChannelSink, events: ChannelEvents) -> DataChannel:
        """Open a data channel, whose content goes to `sink` from its first frame on."""
        return DataChannel(self._connection, sink, events)

    def close(self) -> None:
        """Begin the closing handshake; where the link is not open yet, abort."""
        if self._over:
            return
        if self._connection.is_open:
            self._connection.close()
        elif not self._connection.is_closing:
            self.abort("closed while it was opening")

    def abort(self, reason: str) -> None:
        """Close the socket without a handshake, whatever the state; nothing is read from it any more."""
        if not self._over:
            self._connection.abort(Aborted(reason))

    def _on_open(self, _connection: Connection) -> None:
        self._events.link_opened(self)

    def _on_closed(self, connection: Connection, cause: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        error = broker_error(
            connection.broken_by or cause, self.endpoint, connection.closed_with, opened=connection.was_open
        )
        code, text = connection.closed_with or (None, str(error))
        self._events.link_closed(
            self, error, ConnectionLoss(code, text, "connection", connection.closed_with is not None)
        )

    def _on_blocked(self, _connection: Connection, method: Any) -> None:
        self._events.link_blocked(self, str(method.method.reason))

    def _on_unblocked(self, _connection: Connection, _method: Any) -> None:
        self._events.link_unblocked(self)


class DataChannel:
    """A channel whose content bypasses pika. Its synchronous methods are pika's. Made by `Link.open_channel`."""

    def __init__(self, connection: Connection, sink: ChannelSink, events: ChannelEvents) -> None:
        self._events = events
        self._connection = connection
        self._awaited: deque[tuple[int, int]] = deque()  # the methods that answer what was sent together
        self._reader = connection.reader
        self._pace = connection.pace
        self._channel = connection.channel(on_open_callback=self._on_open)
        self.number: int = self._channel.channel_number
        self._channel.add_on_close_callback(self._on_closed)
        self._channel.add_on_cancel_callback(self._on_cancelled)
        self.attach(sink)

    def attach(self, sink: ChannelSink) -> None:
        """Give the channel's content to another sink. Only where no content can be half read: on a reply, say."""
        self._reader.attach(self.number, sink)

    def silence(self) -> None:
        """Give the channel's content to nobody from now on."""
        self._reader.detach(self.number)

    def perform(self, step: Step, done: Callable[[MethodReply], None]) -> None:
        """Send the method of `step`; `done` gets the reply. Where the broker refuses, the channel is closed instead.

        Raises:
            ConfigurationError: pika cannot encode it.
            BrokerUnavailable: the channel is not open.
        """
        try:
            self._perform(step, done)
            self._pace.follow(step)
        except (pika.exceptions.AMQPChannelError, pika.exceptions.AMQPConnectionError) as error:
            raise BrokerUnavailable(f"channel {self.number} is not open") from error
        except (pika.exceptions.AMQPError, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"{type(step).__name__} cannot be sent: {error!r}") from error

    def perform_all(self, steps: Sequence[Step], done: Callable[[MethodReply], None]) -> None:
        """Send the methods of declarations and checks in one piece; `done` gets each reply, in order.

        Past pika, which sends a method when the one before is answered.

        Raises:
            ConfigurationError: one cannot be encoded; none was sent.
            BrokerUnavailable: the channel is not open.
        """
        if not self._channel.is_open:
            raise BrokerUnavailable(f"channel {self.number} is not open")
        frames, answers = methods.encode_steps(self.number, steps)
        self._awaited = deque(answers)
        self._connection.answers[self.number] = partial(self._take, done)
        self._connection.send(frames)

    def _take(self, done: Callable[[MethodReply], None], frame: bytes) -> bool:
        """Take in the answer to one of the steps sent together; return whether the frame was one."""
        if not self._awaited or methods.method_of(frame) != self._awaited[0]:
            return False
        self._awaited.popleft()
        if not self._awaited:
            del self._connection.answers[self.number]
        done(methods.decode_reply(frame))
        return True

    def close(self) -> None:
        """Begin the closing handshake."""
        if self._channel.is_open or self._channel.is_opening:
            self._channel.close()

    def _perform(self, step: Step, done: Callable[[MethodReply], None]) -> None:
        channel = self._channel
        plain = partial(_without_reply, done)
        match step:
            case steps.DeclareQueue():
                channel.queue_declare(
                    step.name,
                    durable=step.durable,
                    exclusive=step.exclusive,
                    auto_delete=step.auto_delete,
                    arguments=dict(step.arguments),
                    callback=partial(_with_queue_state, done),
                )
            case steps.CheckQueue():
                channel.queue_declare(step.name, passive=True, callback=partial(_with_queue_state, done))
            case steps.DeleteQueue():
                channel.queue_delete(step.name, callback=plain)
            case steps.DeclareExchange():
                channel.exchange_declare(
                    step.name,
                    step.type,
                    durable=step.durable,
                    auto_delete=step.auto_delete,
                    internal=step.internal,
                    arguments=dict(step.arguments),
                    callback=plain,
                )
            case steps.CheckExchange():
                channel.exchange_declare(step.name, passive=True, callback=plain)
            case steps.Bind():
                bind = channel.queue_bind if step.kind == "queue" else channel.exchange_bind
                bind(step.destination, step.source, step.routing_key, arguments=dict(step.arguments), callback=plain)
            case steps.ConfirmSelect():
                channel.confirm_delivery(_ignore, callback=plain)
            case steps.SetPrefetch():
                channel.basic_qos(prefetch_count=step.count, callback=plain)
            case steps.Consume() | steps.Cancel():
                # Past pika, which cancels what it knows of before it closes a channel: the role of a single active
                # consumer would be passed on before its unacked deliveries are back.
                self.perform_all((step,), done)

    def _on_open(self, _channel: Any) -> None:
        self._events.channel_opened(self)

    def _on_closed(self, _channel: Any, reason: BaseException) -> None:
        self._reader.detach(self.number)
        self._connection.answers.pop(self.number, None)
        if isinstance(reason, pika.exceptions.ChannelClosed):
            by_broker = isinstance(reason, pika.exceptions.ChannelClosedByBroker)
            self._events.channel_closed(self, reason.reply_code, reason.reply_text, by_broker)

    def _on_cancelled(self, method: Any) -> None:
        self._events.consumer_cancelled(self, method.method.consumer_tag)


def _ignore(*_args: object) -> None:
    """Content never reaches pika, but it wants to be told what to do with it."""


def _without_reply(done: Callable[[MethodReply], None], _method: Any) -> None:
    done(None)


def _with_queue_state(done: Callable[[MethodReply], None], method: Any) -> None:
    reply: spec.Queue.DeclareOk = method.method
    done(steps.QueueState(reply.queue, reply.message_count, reply.consumer_count))
