"""A broker on loopback that does what a test tells it.

It is an AMQP server with threads and sockets, and uses another codec (pamqp). It opens connections and channels,
declares and subscribes by itself. The test decides how and when publishes and acks are answered: by calls on a
`Channel` or a `Connection`, or by a `script` that is called with every publish. Every wait is bounded, and a wait that
exceeds its bound fails the test.

Invariants:

- `published` and `settlements` are in the order in which they were read.
- A script runs on the thread of its connection.
- After `stop`, no thread or socket is left.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pamqp import commands, frame, header
from pamqp.body import ContentBody
from pamqp.exceptions import UnmarshalingException
from pamqp.heartbeat import Heartbeat

from reliable_mq.core.headers import POSSIBLE_DUPLICATE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Channel", "Connection", "Published", "ScriptedBroker", "Settlement"]

_PATIENCE = 30.0  # the maximum time that a test waits, in seconds
_HEAD = struct.Struct(">BHI")
_PAYLOAD = 131064  # bytes of a body in one frame
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close resets the connection
_PROPERTIES = {
    "product": "RabbitMQ",
    "version": "4.3.6",
    "platform": "a script",
    "capabilities": {
        "publisher_confirms": True,
        "basic.nack": True,
        "consumer_cancel_notify": True,
        "connection.blocked": True,
        "authentication_failure_close": True,
        "per_consumer_qos": True,
    },
}


class Published(NamedTuple):
    """A message as it was read, and its channel."""

    channel: Channel
    number: int  # on its channel, from 1
    exchange: str
    routing_key: str
    mandatory: bool
    properties: commands.Basic.Properties
    body: bytes
    largest_frame: int  # bytes

    @property
    def message_id(self) -> str:
        return self.properties.message_id or ""

    @property
    def possible_duplicate(self) -> bool:
        return bool((self.properties.headers or {}).get(POSSIBLE_DUPLICATE))


class Settlement(NamedTuple):
    """How a consumer settled deliveries."""

    channel: Channel
    verdict: str  # ack, nack or reject
    tag: int
    multiple: bool
    requeue: bool


class Channel:
    """A channel that the client has opened. Its calls send frames of a broker."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.open = True
        self.confirming = False
        self.published = 0
        self.delivered = 0
        self.prefetch = 0
        self.consumers: dict[str, str] = {}  # queue by consumer tag
        self.unacked: set[int] = set()
        self.content: list[Any] = []  # an incomplete publish

    def send(self, *methods: Any) -> None:
        self.connection.send(*methods, channel=self.number)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.send(commands.Basic.Ack(tag, multiple))

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self.send(commands.Basic.Nack(tag, multiple))

    def return_(self, published: Published, code: int = 312, text: str = "NO_ROUTE") -> None:
        method = commands.Basic.Return(code, text, published.exchange, published.routing_key)
        self.send(method, *content(published.properties, published.body))

    def close(self, code: int, text: str, over: Any = commands.Basic.Publish) -> None:
        self.open = False
        self.send(commands.Channel.Close(code, text, *divmod(over.index, 1 << 16)))

    def deliver(self, body: bytes, *, redelivered: bool = False, **properties: Any) -> int:
        """Deliver to the first consumer, and return the delivery tag."""
        method = self._delivery(redelivered)
        self.send(method, *content(commands.Basic.Properties(**properties), body))
        return self.delivered

    def deliver_large(self, count: int, **properties: Any) -> int:
        """Deliver a body of `count` full frames, with one frame in memory at a time.

        Return its size.
        """
        head = header.ContentHeader(body_size=count * _PAYLOAD, properties=commands.Basic.Properties(**properties))
        self.send(self._delivery(False), head)
        self.connection.send_large(self.number, count)
        return count * _PAYLOAD

    def return_large(self, published: Published, count: int) -> None:
        """Return a publish, but with a body of `count` full frames."""
        head = header.ContentHeader(body_size=count * _PAYLOAD, properties=published.properties)
        self.send(commands.Basic.Return(312, "NO_ROUTE", published.exchange, published.routing_key), head)
        self.connection.send_large(self.number, count)

    def deliver_raw(self, body: bytes, properties: bytes) -> int:
        """Deliver with raw properties of any kind."""
        head = struct.pack(">HHQ", 60, 0, len(body)) + properties
        frames = [_HEAD.pack(kind, self.number, len(part)) + part + b"\xce" for kind, part in ((2, head), (3, body))]
        self.connection.send_bytes(frame.marshal(self._delivery(False), self.number) + b"".join(frames))
        return self.delivered

    def _delivery(self, redelivered: bool) -> commands.Basic.Deliver:
        tag, queue = next(iter(self.consumers.items()))  # the other consumer may be for quarantine
        self.delivered += 1
        self.unacked.add(self.delivered)
        return commands.Basic.Deliver(tag, self.delivered, redelivered, "", queue)

    def settle(self, tag: int, multiple: bool) -> None:
        """Settle deliveries like a broker: an unknown tag closes the channel."""
        unacked = self.unacked.copy()  # copied first, because a test may deliver at the same time
        settled = {one for one in unacked if one == tag or (multiple and one < tag)}
        if tag not in settled:
            self.close(406, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
            self.connection.broker.failures.append(AssertionError(f"unknown delivery tag {tag}"))
        self.unacked -= settled

    def get(self) -> None:
        """Answer ``basic.get`` from `ready`."""
        ready = self.connection.broker.ready
        if not ready:
            self.send(commands.Basic.GetEmpty())
            return
        self.delivered += 1
        self.unacked.add(self.delivered)
        method = commands.Basic.GetOk(self.delivered, False, "", "orders", len(ready) - 1)
        found = ready.popleft()
        if isinstance(found, bytes):
            self.send(method, *content(commands.Basic.Properties(), found))
        else:
            self.send(method, *content(found.properties, found.body))

    def cancel(self) -> None:
        """Cancel every consumer, as if its queue was deleted."""
        for tag in list(self.consumers):
            del self.consumers[tag]
            self.send(commands.Basic.Cancel(tag, nowait=True))


class Connection(threading.Thread):
    """The connection of one client, from the protocol header to the end."""

    def __init__(self, broker: ScriptedBroker, client: socket.socket) -> None:
        super().__init__(name="scripted broker", daemon=True)
        self.broker = broker
        self.channels: dict[int, Channel] = {}
        self.live = True
        self.closed_in_good_order = False
        self.fragment: int | None = None  # the number of bytes to write at a time
        self._client = client
        self._writing = threading.Lock()

    # Calls for scripts

    def send(self, *methods: Any, channel: int = 0) -> None:
        """Send methods and content in one write."""
        self.send_bytes(b"".join(frame.marshal(method, channel) for method in methods))

    def send_bytes(self, data: bytes) -> None:
        with self._writing, suppress(OSError):
            if not self.live:
                return
            for start in range(0, len(data), self.fragment or len(data) or 1):
                self._client.sendall(data[start : start + (self.fragment or len(data))])

    def send_large(self, number: int, count: int) -> None:
        """Send `count` full body frames on a channel."""
        full = _HEAD.pack(3, number, _PAYLOAD) + bytes(_PAYLOAD) + b"\xce"
        for _ in range(count):
            self.send_bytes(full)

    def cut(self) -> None:
        """Reset the connection. Nothing more is sent on it."""
        self.live = False
        with suppress(OSError):
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._client.shutdown(socket.SHUT_RD)  # wakes the thread, which closes it

    def end_stream(self) -> None:
        """Send no more, and stay connected."""
        self._client.shutdown(socket.SHUT_WR)

    def close(self, code: int, text: str, over: tuple[int, int] = (0, 0)) -> None:
        self.send(commands.Connection.Close(code, text, *over))

    def block(self, reason: str) -> None:
        self.send(commands.Connection.Blocked(reason))

    def unblock(self) -> None:
        self.send(commands.Connection.Unblocked())

    # The protocol

    def run(self) -> None:
        try:
            if self.broker.greeting is not None:
                self.send_bytes(self.broker.greeting)
            elif self._read(8).startswith(b"AMQP"):
                properties = _PROPERTIES | {"cluster_name": self.broker.cluster_name}
                self.send(commands.Connection.Start(0, 9, properties, "PLAIN", "en_US"))
            while True:
                head = self._read(_HEAD.size)
                kind, number, size = _HEAD.unpack(head)
                raw = head + self._read(size + 1)
                if not self.live:
                    break
                if not self.broker.silent:
                    self._take(number, content_header(raw) if kind == 2 else frame.unmarshal(raw)[2], len(raw))
        except OSError:
            pass
        except Exception as error:  # also from a script; raised in the test
            self.broker.failures.append(error)
        finally:
            self.live = False
            self._client.close()
            self.broker.tell()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._client.recv(count - len(data))
            if not more:
                raise ConnectionResetError
            data += more
        return data

    def _take(self, number: int, value: Any, size: int) -> None:
        broker = self.broker
        if isinstance(value, Heartbeat):
            return
        name: str = value.name
        broker.seen.append(name)
        refusal = broker.refusals.get(name)
        if refusal is not None:
            if number:
                self.channels[number].close(*refusal, over=value)
            else:
                self.close(*refusal, over=divmod(value.index, 1 << 16))
            return
        if number == 0:
            self._take_of_connection(value)
        elif isinstance(value, commands.Channel.Open):
            self.channels[number] = Channel(self, number)
            self.send(commands.Channel.OpenOk(), channel=number)
        elif isinstance(value, commands.Channel.CloseOk):
            self.channels.pop(number, None)
        elif number in self.channels and self.channels[number].open:
            self._take_of_channel(self.channels[number], value, size)
        broker.tell()

    def _take_of_connection(self, value: Any) -> None:
        match value:
            case commands.Connection.StartOk():
                self.send(commands.Connection.Tune(2047, self.broker.frame_max, self.broker.heartbeat))
            case commands.Connection.Open():
                for _ in range(self.broker.heartbeats_before_open):
                    self.send(Heartbeat(), channel=0)
                self.send(commands.Connection.OpenOk())
            case commands.Connection.UpdateSecret():
                if not self.broker.secrets_unanswered:
                    self.send(commands.Connection.UpdateSecretOk())
            case commands.Connection.Close():
                self.closed_in_good_order = True
                self.send(commands.Connection.CloseOk())

    def _take_of_channel(self, channel: Channel, value: Any, size: int) -> None:
        match value:
            case commands.Basic.Publish():
                channel.content = [value, size]
            case header.ContentHeader():
                channel.content += [value, b""]
                channel.content[1] = max(channel.content[1], size)
                self._complete(channel)
            case ContentBody():
                channel.content[3] += value.value
                channel.content[1] = max(channel.content[1], size)
                self._complete(channel)
            case commands.Basic.Ack():
                self.broker.settle(Settlement(channel, "ack", value.delivery_tag, value.multiple, False))
            case commands.Basic.Nack():
                self.broker.settle(Settlement(channel, "nack", value.delivery_tag, value.multiple, value.requeue))
            case commands.Basic.Reject():
                self.broker.settle(Settlement(channel, "reject", value.delivery_tag, False, value.requeue))
            case commands.Basic.Get():
                channel.get()
            case commands.Confirm.Select():
                channel.confirming = True
                channel.send(commands.Confirm.SelectOk())
            case commands.Basic.Qos():
                channel.prefetch = value.prefetch_count
                channel.send(commands.Basic.QosOk())
            case commands.Basic.Consume() if value.queue in self.broker.streams and "x-priority" in value.arguments:
                text = f"PRECONDITION_FAILED - invalid arg 'x-priority' for queue '{value.queue}'"
                channel.close(406, text, over=value)
            case commands.Basic.Consume():
                if value.consumer_tag in self.broker.gates:
                    assert self.broker.gates[value.consumer_tag].wait(_PATIENCE)
                channel.send(commands.Basic.ConsumeOk(value.consumer_tag))
                channel.consumers[value.consumer_tag] = value.queue
            case commands.Basic.Cancel():
                channel.consumers.pop(value.consumer_tag, None)
                channel.send(commands.Basic.CancelOk(value.consumer_tag))
            case commands.Queue.Declare() if value.passive and value.queue in self.broker.missing:
                channel.close(404, f"NOT_FOUND - no queue '{value.queue}' in vhost '/'", over=value)
            case commands.Queue.Declare() if value.passive and self.broker.counts:
                channel.send(commands.Queue.DeclareOk(value.queue, *self.broker.counts.popleft()))
            case commands.Queue.Declare():
                time.sleep(self.broker.declare_seconds)
                self.broker.missing.discard(value.queue)
                channel.send(commands.Queue.DeclareOk(value.queue, *self.broker.count))
            case commands.Queue.Bind():
                channel.send(commands.Queue.BindOk())
            case commands.Exchange.Declare():
                channel.send(commands.Exchange.DeclareOk())
            case commands.Channel.Close():
                channel.open = False
                channel.send(commands.Channel.CloseOk())
                del self.channels[channel.number]
            case _:
                raise AssertionError(f"the scripted broker has no answer to {value}")

    def _complete(self, channel: Channel) -> None:
        method, largest, head, body = channel.content
        if len(body) < head.body_size:
            return
        channel.published += 1
        published = Published(
            channel,
            channel.published,
            method.exchange,
            method.routing_key,
            method.mandatory,
            head.properties,
            body,
            largest,
        )
        self.broker.published.append(published)
        if self.broker.script is not None:
            self.broker.script(published)


class ScriptedBroker:
    """An AMQP server on a free port, which runs within its ``with`` block.

    Attributes:
        script: called with every publish, on the thread of its connection; None for silence.
        refusals: code and text of the exception with which a method ends its channel or connection, by method name.
        greeting: sent to a new client instead of the start of the protocol.
        cluster_name: reported to later clients; empty for none.
        silent: whether everything is read and nothing answered.
        gates: by consumer tag, the event that must be set before a subscription and anything behind it is answered.
        missing: queues that do not exist before they are declared; all others exist.
        streams: queues that are streams.
        counts: messages and consumers for the next passive declares, in order; then `count` applies.
        declare_seconds: the time to declare or find a queue.
        count: the ready messages and the consumers of every queue.
        frame_max, heartbeat: offered to later clients; bytes and seconds.
        heartbeats_before_open: the heartbeats that later clients get before ``connection.open-ok``.
        secrets_unanswered: whether ``connection.update-secret`` gets no answer, as on a blocked connection.
        seen: the names of all methods read, in order.
        published, settlements: the publishes and settlements read.
        ready: bodies or publishes for ``basic.get``.
        connections: all connections so far.
        failures: exceptions of scripts; `stop` raises the first.
    """

    def __init__(self) -> None:
        self.script: Callable[[Published], None] | None = None
        self.refusals: dict[str, tuple[int, str]] = {}
        self.greeting: bytes | None = None
        self.cluster_name = ""
        self.silent = False
        self.gates: dict[str, threading.Event] = {}
        self.missing: set[str] = set()
        self.streams: set[str] = set()
        self.counts: deque[tuple[int, int]] = deque()
        self.declare_seconds = 0.0
        self.count = 0, 0
        self.secrets_unanswered = False
        self.frame_max = 131072
        self.heartbeat = 60
        self.heartbeats_before_open = 0
        self.seen: list[str] = []
        self.published: list[Published] = []
        self.settlements: list[Settlement] = []
        self.ready: deque[bytes | Published] = deque()
        self.connections: list[Connection] = []
        self.failures: list[Exception] = []
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._accept, name="scripted broker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every connection, and stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_PATIENCE)
        for connection in self.connections:
            connection.cut()
            connection.join(_PATIENCE)
            assert not connection.is_alive()
        for failure in self.failures:
            raise failure

    # Waits of a test

    def wait(self, condition: Callable[[], Any], what: str, patience: float = _PATIENCE) -> Any:
        """Return the first true value of `condition`.

        The condition is checked whenever something was read.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                value = condition()
                if value:
                    return value
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"not within {patience:g} s: {what}; read: {', '.join(self.seen[-20:])}")
                self._changed.wait(0.02)

    def wait_published(self, count: int) -> list[Published]:
        """Wait for `count` publishes in all, and return all of them."""
        self.wait(lambda: len(self.published) >= count, f"{count} publishes")
        return list(self.published)

    def wait_settled(self, count: int) -> list[Settlement]:
        """Wait for `count` settlements in all, and return all of them."""
        self.wait(lambda: len(self.settlements) >= count, f"{count} settlements")
        return list(self.settlements)

    @property
    def connection(self) -> Connection:
        """Wait for a confirming channel, and return its connection.

        It is the newest one that is open.
        """
        channel: Channel = self.wait(lambda: self._newest(lambda one: one.confirming), "a channel that confirms")
        return channel.connection

    @property
    def consuming(self) -> Channel:
        """Wait for a channel with a consumer, and return the newest one."""
        channel: Channel = self.wait(lambda: self.consumed, "a channel that consumes")
        return channel

    @property
    def consumed(self) -> Channel | None:
        """Return the newest channel with a consumer, or None."""
        return self._newest(lambda one: bool(one.consumers))

    def _newest(self, wanted: Callable[[Channel], bool]) -> Channel | None:
        for connection in reversed(self.connections):
            for channel in reversed(list(connection.channels.values())):
                if connection.live and channel.open and wanted(channel):
                    return channel
        return None

    # For the threads of connections

    def settle(self, settlement: Settlement) -> None:
        self.settlements.append(settlement)
        settlement.channel.settle(settlement.tag, settlement.multiple)

    def tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, client)
            self.connections.append(connection)
            connection.start()
            self.tell()


def content_header(raw: bytes) -> header.ContentHeader:
    """Decode a content header.

    If the properties cannot be decoded, the header has none.
    """
    try:
        _, _, decoded = frame.unmarshal(raw)
    except UnmarshalingException:
        return header.ContentHeader(body_size=int.from_bytes(raw[11:19], "big"), properties=commands.Basic.Properties())
    assert isinstance(decoded, header.ContentHeader)
    return decoded


def content(properties: commands.Basic.Properties, body: bytes) -> list[Any]:
    """Return the frames of a content that follow the method frame."""
    head = header.ContentHeader(body_size=len(body), properties=properties)
    return [head, *(ContentBody(body[start : start + _PAYLOAD]) for start in range(0, len(body), _PAYLOAD))]
