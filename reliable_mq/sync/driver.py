"""pika, and the only module that imports it: an event loop, a link to a broker, a data channel on it.

pika keeps what it is good at: sockets, TLS, the AMQP handshake, heartbeats, channels and their synchronous methods.
Content (publishes, deliveries, confirms) goes past it in both directions: inbound bytes go to our `InboundReader`,
which hands back the frames that are pika's; outbound frames come encoded and leave in one piece. This uses private
layers of pika, so its version is pinned, and ``tests/sync/test_driver_layers.py`` says what is missing when they move.

Invariants:

- No exception leaves a callback into pika's loop, where it would end the loop or skip other callbacks: all go to
  ``on_error``.
- A link reports ``on_closed`` exactly once, last, and its descriptors are closed when the loop has run once more.
- pika's exceptions stop here: `broker_error` turns every one of them into ours. No text contains a credential.
- The clock is monotonic (pika's timers are).
- What pika logs on a loop's thread is at level DEBUG (`reliable_mq.connection.driver_logs`).
"""

from __future__ import annotations

import socket
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pika
import pika.exceptions
from pika import frame, spec
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.adapters.utils import connection_workflow
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter
from pika.credentials import ExternalCredentials, PlainCredentials

from reliable_mq.connection.background import Cancellable, in_background
from reliable_mq.connection.driver_logs import demoted_driver_logs
from reliable_mq.connection.failures import broker_unavailable, is_certificate_problem, system_problem
from reliable_mq.connection.pace import ReadPace
from reliable_mq.core import setup as steps
from reliable_mq.core.codec import CodecError, InboundReader
from reliable_mq.core.delivery import Delivery
from reliable_mq.core.recovery import Loss
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.identity import client_properties
from reliable_mq.sync.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.events import ChannelEvents, LinkEvents, Secrets
    from reliable_mq.core.codec import ChannelSink
    from reliable_mq.core.setup import Reply, ServerInfo, Step
    from reliable_mq.settings import ConnectionSettings, Endpoint

__all__ = ["DataChannel", "EventLoop", "Link", "Timer", "broker_error"]

_RECEIVE_BYTES = 256 * 1024  # pika's default of 4 KiB costs a system call and a pass through four layers per delivery
_ADDRESSES_TRIED = 2  # a black hole may take this part of the time to connect, then the host's next address is tried
_CONTENT = frozenset(
    struct.pack(">I", method.INDEX)
    for method in (spec.Basic.Ack, spec.Basic.Nack, spec.Basic.Deliver, spec.Basic.Return, spec.Basic.GetOk)
)


class EventLoop:
    """pika's I/O loop. It outlives the links that run on it, so what is queued here never vanishes with a connection.

    Args:
        on_error: called on the loop with every exception that a callback raises.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._loop = _GuardedLoop(on_error)
        self.services = _IOServices(self._loop)
        self.on_error = on_error

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the loop. Thread-safe, without a lock; one wake-up write."""
        self._loop.queue(fn)

    def queue(self, fn: Callable[[], None]) -> object:
        """`call_soon`; returns what `withdraw` takes."""
        return self._loop.queue(fn)

    def withdraw(self, call: object) -> bool:
        """Take back what `queue` queued; return whether that was in time."""
        return self._loop.withdraw(call)

    def call_later(self, delay: float, fn: Callable[[], None]) -> Timer:
        """Run `fn` on the loop in `delay` seconds."""
        return Timer(self._loop, self._loop.call_later(max(0.0, delay), fn))

    def run(self) -> None:
        """Run until `stop`. An exception is one of the poller itself."""
        with demoted_driver_logs(pika.__name__):
            self._loop.start()

    def stop(self) -> None:
        """End `run`. On the loop only."""
        self._loop.stop()

    def drain(self) -> None:
        """Run what is queued, and what that queues."""
        with demoted_driver_logs(pika.__name__):
            self._loop.drain()

    def close(self) -> None:
        """Close the descriptors of the loop itself. After `run` only."""
        self._loop.close()


class Timer:
    """A call to come."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: _GuardedLoop, handle: object) -> None:
        self._loop = loop
        self._handle = handle

    def cancel(self) -> None:
        """Cancel the call; does nothing where it was made or cancelled already."""
        self._loop.remove_timeout(self._handle)


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
        secrets: Secrets,
        name: str,
        events: LinkEvents,
    ) -> None:
        self.endpoint = endpoint
        self._events = events
        self._over = False
        parameters = _parameters(endpoint, settings, secrets, name)
        self._connection = _Connection(
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
            self._server = steps.ServerInfo.of(self._connection.server_properties or {})
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
            self._connection.abort(_Aborted(reason))

    def _on_open(self, _connection: _Connection) -> None:
        self._events.link_opened(self)

    def _on_closed(self, connection: _Connection, cause: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        error = broker_error(
            connection.broken_by or cause, self.endpoint, connection.closed_with, opened=connection.was_open
        )
        code, text = connection.closed_with or (None, str(error))
        self._events.link_closed(self, error, Loss(code, text, "connection", connection.closed_with is not None))

    def _on_blocked(self, _connection: _Connection, method: Any) -> None:
        self._events.link_blocked(self, str(method.method.reason))

    def _on_unblocked(self, _connection: _Connection, _method: Any) -> None:
        self._events.link_unblocked(self)


class DataChannel:
    """A channel whose content bypasses pika. Its synchronous methods are pika's. Made by `Link.open_channel`."""

    def __init__(self, connection: _Connection, sink: ChannelSink, events: ChannelEvents) -> None:
        self._events = events
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

    def perform(self, step: Step, done: Callable[[Reply], None]) -> None:
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

    def close(self) -> None:
        """Begin the closing handshake."""
        if self._channel.is_open or self._channel.is_opening:
            self._channel.close()

    def _perform(self, step: Step, done: Callable[[Reply], None]) -> None:
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
            case steps.Bind():
                bind = channel.queue_bind if step.kind == "queue" else channel.exchange_bind
                bind(step.destination, step.source, step.routing_key, arguments=dict(step.arguments), callback=plain)
            case steps.ConfirmSelect():
                channel.confirm_delivery(_ignore, callback=plain)
            case steps.SetPrefetch():
                channel.basic_qos(prefetch_count=step.count, callback=plain)
            case steps.Consume():
                channel.basic_consume(
                    step.queue,
                    _ignore,
                    auto_ack=step.automatic_ack,
                    exclusive=step.exclusive,
                    consumer_tag=step.consumer_tag,
                    arguments=dict(step.arguments),
                    callback=partial(_with_consumer_tag, done),
                )
            case steps.Cancel():
                # pika calls back before it has forgotten the tag: the next step may be to consume under it again.
                later = channel.connection.ioloop.add_callback_threadsafe
                channel.basic_cancel(step.consumer_tag, callback=lambda _: later(partial(done, None)))

    def _on_open(self, _channel: Any) -> None:
        self._events.channel_opened(self)

    def _on_closed(self, _channel: Any, reason: BaseException) -> None:
        self._reader.detach(self.number)
        if isinstance(reason, pika.exceptions.ChannelClosed):
            by_broker = isinstance(reason, pika.exceptions.ChannelClosedByBroker)
            self._events.channel_closed(self, reason.reply_code, reason.reply_text, by_broker)

    def _on_cancelled(self, method: Any) -> None:
        self._events.consumer_cancelled(self, method.method.consumer_tag)


def broker_error(
    cause: BaseException | None, endpoint: Endpoint, closed_with: tuple[int, str] | None, *, opened: bool
) -> BrokerUnavailable:
    """Return our error for the end of a connection: the one place where pika's exceptions are mapped.

    Args:
        cause: what pika reported.
        endpoint: named in the message.
        closed_with: code and text of the broker's ``connection.close``, if it sent one.
        opened: whether the handshake had been completed.
    """
    root = _root(cause)
    return broker_unavailable(
        endpoint,
        root,
        closed_with,
        opened=opened,
        otherwise=system_problem(root) or _what_happened(root),
        permanent=is_certificate_problem(root) or isinstance(root, pika.exceptions.AuthenticationError),
    )


def _what_happened(root: BaseException | None) -> str:
    match root:
        case pika.exceptions.AuthenticationError():
            return f"the broker does not offer SASL mechanism {root.args[0]}"
        case pika.exceptions.AMQPHeartbeatTimeout():
            return "no heartbeat: the connection is dead"
        case pika.exceptions.IncompatibleProtocolError():
            return "closed before the handshake (does the broker start or stop, or expect TLS on this port?)"
        case pika.exceptions.ConnectionClosedByClient():
            return "closed by us"
        case _Aborted() | pika.exceptions.StreamLostError(args=(_,)):
            return str(root.args[0])
        case _:
            return f"connection lost: {root!r}"


class _Aborted(Exception):
    """We closed the socket."""


class _GuardedLoop(IOLoop):  # type: ignore[misc]  # pika has no types
    """A loop that an exception in a callback does not end."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self._on_error = on_error
        waker = Waker()
        self._waker: Waker | None = waker
        super().add_handler(waker.fileno(), lambda _fd, _events: waker.clear(), self.READ)

    def queue(self, callback: Callable[[], None]) -> object:
        """Pika's own way takes a lock for the wake-up: see `reliable_mq.sync.waker`."""
        call = partial(self._guard, callback)
        self._callbacks.append(call)
        waker = self._waker
        if waker is not None:
            waker.wake()
        return call

    def withdraw(self, call: object) -> bool:
        try:
            self._callbacks.remove(call)
        except ValueError:
            return False
        return True

    def add_callback_threadsafe(self, callback: Callable[[], None]) -> None:
        self.queue(callback)

    add_callback = add_callback_threadsafe

    def close(self) -> None:
        waker, self._waker = self._waker, None
        if waker is not None:
            self.remove_handler(waker.fileno())
        super().close()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        return super().call_later(delay, partial(self._guard, callback))

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        super().add_handler(fd, partial(self._guard, handler), events)

    def drain(self) -> None:
        while self._callbacks:
            self._callbacks.popleft()()

    def _guard(self, callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop goes on
            self._on_error(error)


class _IOServices(SelectorIOServicesAdapter):  # type: ignore[misc]
    """Resolves host names on daemon threads: pika's would hold up the interpreter's exit while a lookup hangs."""

    def __init__(self, loop: _GuardedLoop) -> None:
        super().__init__(loop)
        self._call_soon = loop.add_callback_threadsafe

    def getaddrinfo(
        self,
        host: str,
        port: int,
        on_done: Callable[[Any], None],
        family: int = 0,
        socktype: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Cancellable[Any]:
        lookup = Cancellable[Any](on_done)
        resolve = partial(socket.getaddrinfo, host, port, family, socktype, proto)

        def found(result: Any) -> None:
            self._call_soon(partial(lookup.done, result))

        try:
            found(resolve(flags | socket.AI_NUMERICHOST))
        except (OSError, UnicodeError):  # not an address, but a name, or no name at all
            in_background("reliable_mq host name", partial(resolve, flags), found)
        return lookup


class _Connection(SelectConnection):  # type: ignore[misc]
    """pika's connection, with content cut out of its input and a way past its encoder."""

    def __init__(
        self,
        parameters: pika.ConnectionParameters,
        loop: EventLoop,
        *,
        on_open: Callable[[_Connection], None],
        on_closed: Callable[[_Connection, BaseException | None], None],
        on_read: Callable[[], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.reader = InboundReader(self._on_foreign_frame, Delivery)
        self.pace = ReadPace()
        self.closed_with: tuple[int, str] | None = None
        self.was_open = False
        self.broken_by: BaseException | None = None
        self._report_error = loop.on_error
        self._read_from = 0.0  # when to read again
        self._aborted = False
        self._plaintext = parameters.ssl_options is None
        self._on_open = on_open
        self._on_read = on_read
        self._on_drained = on_drained
        super().__init__(
            parameters,
            on_open_callback=self._opened_now,
            on_open_error_callback=on_closed,
            on_close_callback=on_closed,
            custom_ioloop=loop.services,
        )

    def send(self, data: bytes) -> None:
        """Send one piece: at once what the socket takes, the rest when it takes more."""
        transport = self._transport
        if transport is None or transport._state != transport._STATE_ACTIVE:  # noqa: SLF001
            return
        rest: bytes | memoryview = data
        if self._plaintext and not transport.get_write_buffer_size():
            # Three system calls and a turn of the loop less than waiting for the socket to be writable.
            try:
                taken = transport._sock.send(data)  # noqa: SLF001
            except OSError:  # it would block, or is broken: the transport will meet that again
                taken = 0
            self.bytes_sent += taken
            rest = memoryview(data)[taken:]
        if rest:
            self._output_marshaled_frames([rest])

    def buffered(self) -> int:
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    def abort(self, cause: Exception) -> None:
        if not self._aborted:
            self._aborted = True
            self.reader.reset()
            self._terminate_stream(cause)

    def _opened_now(self, connection: _Connection) -> None:
        self.was_open = True
        self._on_open(connection)

    def _proto_connection_made(self, transport: Any) -> None:
        transport._MAX_RECV_BYTES = _RECEIVE_BYTES  # noqa: SLF001
        if self._plaintext:  # TLS hands out a record at a time, so there it takes several
            transport._MAX_CONSUME_BYTES = 1  # noqa: SLF001  # one read per turn, not a second one that would block
        transport._consume = partial(self._consume, transport._consume)  # noqa: SLF001
        transport._produce = partial(self._produce, transport, transport._produce)  # noqa: SLF001
        super()._proto_connection_made(transport)

    def _proto_connection_lost(self, error: BaseException | None) -> None:
        self.broken_by = error  # pika makes a text of it
        super()._proto_connection_lost(error)

    def _consume(self, consume: Callable[[], None]) -> None:
        """The transport's: receive what is there, and what comes until it is time."""
        if self._read_from:
            early = self._read_from - time.monotonic()
            if early > 0:
                time.sleep(early)
        before = self.bytes_received
        consume()
        size = self.bytes_received - before
        if size:  # TLS looks twice
            gap = self.pace.gap_after(size)
            self._read_from = time.monotonic() + gap if gap else 0.0

    def _produce(self, transport: Any, produce: Callable[[], None]) -> None:
        """The transport's: send what is buffered; it raises where the socket does not take all."""
        produce()
        if not transport.get_write_buffer_size():
            self._on_drained()

    def _on_data_available(self, data_in: bytes) -> None:
        if self._aborted:
            return
        self.bytes_received += len(data_in)  # heartbeats look at it
        try:
            self.reader.feed(data_in)
            self._on_read()
        except CodecError as error:
            self.abort(_Aborted(str(error)))
        except Exception as error:  # noqa: BLE001  # pika would log it and go on with half a frame lost
            self._report_error(error)

    def _on_foreign_frame(self, data: bytes) -> None:
        if self._aborted:
            return
        number = int.from_bytes(data[1:3], "big")
        if number and (number not in self._channels or data[0] != spec.FRAME_METHOD or data[7:11] in _CONTENT):
            return  # of a channel that is closed already, or content of one that is silenced
        try:
            _, value = frame.decode_frame(data)
        except Exception as error:  # noqa: BLE001  # pika's decoder raises whatever struct, dict and codecs raise
            self.abort(_Aborted(f"what the broker sent cannot be decoded: {error!r}"))
        else:
            self._process_frame(value)

    def _on_connection_close_from_broker(self, method_frame: Any) -> None:
        # pika forgets code and text where the handshake was not completed.
        method: spec.Connection.Close = method_frame.method
        self.closed_with = (method.reply_code, method.reply_text)
        super()._on_connection_close_from_broker(method_frame)


def _parameters(
    endpoint: Endpoint, settings: ConnectionSettings, secrets: Secrets, name: str
) -> pika.ConnectionParameters:
    if secrets.credentials is None:
        credentials = ExternalCredentials()
    else:
        given = secrets.credentials
        credentials = PlainCredentials(given.username, given.password, erase_on_connect=True)
    tls = None
    if settings.tls is not None:
        tls = pika.SSLOptions(secrets.context, settings.tls.server_name or endpoint.host)
    return pika.ConnectionParameters(
        host=endpoint.host,
        port=endpoint.port,
        virtual_host=settings.virtual_host,
        credentials=credentials,
        channel_max=settings.channel_max,
        frame_max=settings.frame_max,
        heartbeat=settings.heartbeat,
        ssl_options=tls,
        connection_attempts=1,
        socket_timeout=settings.connect_timeout / _ADDRESSES_TRIED,
        stack_timeout=None,  # pika counts it anew for each address; the caller bounds the whole attempt
        blocked_connection_timeout=None,  # being blocked is a state that is shown, not an error
        client_properties=client_properties(settings.connection_name or name, f"pika {pika.__version__}"),
    )


def _root(error: BaseException | None) -> BaseException | None:
    """Unwrap what pika wraps around the cause of a failed attempt."""
    while True:
        match error:
            case connection_workflow.AMQPConnectionWorkflowFailed(exceptions=(*_, last)):
                error = last
            case connection_workflow.AMQPConnectorPhaseErrorBase(exception=inner):
                error = inner
            case pika.exceptions.AMQPConnectionError(args=(BaseException() as inner,)):
                error = inner
            case _:
                return error


def _ignore(*_args: object) -> None:
    """Content never reaches pika, but it wants to be told what to do with it."""


def _without_reply(done: Callable[[Reply], None], _method: Any) -> None:
    done(None)


def _with_queue_state(done: Callable[[Reply], None], method: Any) -> None:
    reply: spec.Queue.DeclareOk = method.method
    done(steps.QueueState(reply.queue, reply.message_count, reply.consumer_count))


def _with_consumer_tag(done: Callable[[Reply], None], method: Any) -> None:
    done(str(method.method.consumer_tag))
