"""Every control of the fault proxy, against a scripted peer on loopback."""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing import (
    Cut,
    Direction,
    FaultProxy,
    FaultProxyFactory,
    Frame,
    basic_ack,
    basic_nack,
    channel_close,
    connection_close,
    method,
)
from reliable_mq.testing import connection as link_module
from reliable_mq.testing import proxy as base_module
from tests.leftovers import nothing_left

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

pytest_plugins = ["reliable_mq.testing.fixtures", "pytester"]

DEADLINE = 30.0
PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"
HEARTBEAT = Frame(8, 0, b"")
PUBLISH = method(1, "basic.publish", b"\0\0\0\1q\0")
DELIVER = method(1, "basic.deliver", b"\1c" + bytes(9) + b"\0\0")
RETURN = method(1, "basic.return", struct.pack(">H", 312) + b"\0\0\0")


def header(size: int) -> Frame:
    return Frame(2, 1, struct.pack(">HHQH", 60, 0, size, 0))


def body(data: bytes) -> Frame:
    return Frame(3, 1, data)


def message(data: bytes) -> list[Frame]:
    return [PUBLISH, header(len(data)), body(data)]


class Peer:
    """One end: a raw socket with a deadline on every wait."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(DEADLINE)

    def send(self, *what: Frame | bytes) -> None:
        self.socket.sendall(b"".join(part.raw if isinstance(part, Frame) else part for part in what))

    def expect(self, *what: Frame | bytes) -> None:
        """Check that the next bytes to arrive are these."""
        expected = b"".join(part.raw if isinstance(part, Frame) else part for part in what)
        received = b""
        while len(received) < len(expected):
            data = self.socket.recv(len(expected) - len(received))
            assert data, f"the stream ended after {received!r}"
            received += data
        assert received == expected

    def expect_reset(self) -> None:
        with pytest.raises(ConnectionResetError):
            self.socket.recv(1)

    def expect_end(self) -> None:
        assert self.socket.recv(1) == b""

    def expect_nothing(self) -> None:
        """Check that nothing has arrived and that the stream has not ended."""
        self.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.socket.recv(1)
        self.socket.settimeout(DEADLINE)

    def end_writing(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@dataclass
class Wire:
    """The two ends of a connection through the proxy."""

    client: Peer
    broker: Peer

    def towards(self, direction: Direction) -> tuple[Peer, Peer]:
        """Return the sender and the receiver for a direction."""
        return (self.client, self.broker) if direction == "to_broker" else (self.broker, self.client)


class Loopback:
    """The scripted broker, a proxy in front of it, and clients."""

    def __init__(self, fault_proxy: FaultProxyFactory) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE)
        self.peers: list[Peer] = []
        self.proxy = fault_proxy(f"amqp://u:p@127.0.0.1:{self.listener.getsockname()[1]}/v")

    def client(self) -> Peer:
        return self._peer(socket.create_connection(("127.0.0.1", self.proxy.port), DEADLINE))

    def broker(self) -> Peer:
        return self._peer(self.listener.accept()[0])

    def wire(self) -> Wire:
        before = self.proxy.live_connections
        wire = Wire(self.client(), self.broker())
        self.proxy.wait_for(lambda: self.proxy.live_connections == before + 1)
        return wire

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.listener.close()

    def _peer(self, sock: socket.socket) -> Peer:
        self.peers.append(Peer(sock))
        return self.peers[-1]


@pytest.fixture
def loopback(fault_proxy: FaultProxyFactory) -> Iterator[Loopback]:
    loopback = Loopback(fault_proxy)
    yield loopback
    loopback.close()


@pytest.fixture
def proxy(loopback: Loopback) -> FaultProxy:
    return loopback.proxy


@pytest.fixture
def wire(loopback: Loopback) -> Wire:
    return loopback.wire()


both_directions = pytest.mark.parametrize("direction", ["to_broker", "to_client"])


# without a fault


def test_bytes_pass_both_ways_unchanged_and_are_counted(proxy: FaultProxy, wire: Wire) -> None:
    wire.client.send(PROTOCOL_HEADER, *message(b"abc"), HEARTBEAT)
    wire.broker.expect(PROTOCOL_HEADER, *message(b"abc"), HEARTBEAT)
    wire.broker.send(basic_ack(1, 1), basic_ack(1, 2))
    wire.client.expect(basic_ack(1, 1), basic_ack(1, 2))
    assert proxy.seen("basic.publish") == proxy.forwarded("basic.publish") == 1
    assert proxy.seen("basic.ack", "to_client") == 2
    assert proxy.seen("basic.ack", "to_broker") == 0
    assert proxy.seen(direction="to_broker") == 4
    assert proxy.seen() == proxy.forwarded() == 6
    assert proxy.forwarded_bytes("to_client") == 2 * len(basic_ack(1, 1).raw)
    assert (proxy.connections, proxy.live_connections) == (1, 1)


def test_large_transfer_arrives_whole(proxy: FaultProxy, wire: Wire) -> None:
    frames = [part for _ in range(60) for part in message(os.urandom(100_000))]
    sender = threading.Thread(target=wire.client.send, args=frames)
    sender.start()
    wire.broker.expect(*frames)
    sender.join(DEADLINE)
    assert proxy.forwarded("body") == 60


@both_directions
def test_half_close_passes_and_the_other_half_goes_on(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    sender.send(HEARTBEAT, b"\x08\0")
    sender.end_writing()
    receiver.expect(HEARTBEAT, b"\x08\0")
    receiver.expect_end()
    receiver.send(HEARTBEAT)
    sender.expect(HEARTBEAT)
    receiver.close()
    sender.expect_end()
    proxy.wait_for(lambda: proxy.live_connections == 0)


@both_directions
def test_reset_passes(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    sender.reset()
    receiver.expect_reset()
    assert proxy.live_connections == 0


def test_stream_that_is_not_amqp_passes(wire: Wire) -> None:
    wire.client.send(b"\x16\x03\x01 hello")
    wire.broker.expect(b"\x16\x03\x01 hello")


def test_broker_that_cannot_be_reached_shows_as_a_reset(loopback: Loopback) -> None:
    loopback.listener.close()
    with pytest.raises(ConnectionResetError):  # raised by connect, or by the first read
        loopback.client().socket.recv(1)


def test_redirect_sends_new_connections_elsewhere(loopback: Loopback, proxy: FaultProxy, wire: Wire) -> None:
    elsewhere = socket.create_server(("127.0.0.1", 0))
    elsewhere.settimeout(DEADLINE)
    url = proxy.url
    proxy.redirect(f"amqp://127.0.0.1:{elsewhere.getsockname()[1]}")
    client, broker = loopback.client(), Peer(elsewhere.accept()[0])
    client.send(HEARTBEAT)
    broker.expect(HEARTBEAT)
    wire.client.send(HEARTBEAT)
    wire.broker.expect(HEARTBEAT)
    assert proxy.url == url
    broker.close()
    elsewhere.close()


# URLs, start and close


def test_url_keeps_user_virtual_host_and_query(fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy("amqp://me:p%40ss@localhost/a%2Fb?heartbeat=5")
    assert proxy.url == f"amqp://me:p%40ss@127.0.0.1:{proxy.port}/a%2Fb?heartbeat=5"
    assert "ss" not in repr(proxy)
    assert repr(proxy) == f"<FaultProxy 127.0.0.1:{proxy.port} -> localhost:5672>"


@pytest.mark.parametrize("password", ["a[b", "a]b"])
def test_a_password_may_have_a_bracket(loopback: Loopback, fault_proxy: FaultProxyFactory, password: str) -> None:
    url = f"amqp://u:{password}@127.0.0.1:{loopback.listener.getsockname()[1]}/v"
    proxy = fault_proxy(url)
    assert proxy.url == f"amqp://u:{password}@127.0.0.1:{proxy.port}/v"
    proxy.redirect(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://u:secret@host/", "amqp"),
        ("amqp:///v", "one host"),
        ("amqp://u:secret@a:1,b:2/", "hosts"),
        ("amqp://u:secret@a,b/", "one host"),
        ("amqp://u:secret@a:99999/", "port"),
        ("amqp://u:secret@[::1/", "host"),
    ],
)
def test_urls_that_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        FaultProxy(url)
    assert "secret" not in str(caught.value)


def test_close_leaves_no_thread_and_no_descriptor(loopback: Loopback) -> None:
    url = f"amqp://127.0.0.1:{loopback.listener.getsockname()[1]}"
    with nothing_left():
        with FaultProxy(url) as proxy:
            clients = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(3)]
            brokers = [loopback.listener.accept()[0] for _ in range(3)]
            proxy.wait_for(lambda: proxy.live_connections == 3)
            clients[0].send(HEARTBEAT.raw)
            proxy.cut(reset=False)
            proxy.hang_connections()
            clients.append(socket.create_connection(("127.0.0.1", proxy.port)))
            proxy.wait_for(lambda: proxy.connections == 4)
            proxy.delay(60)
            proxy.black_hole()
        for sock in clients + brokers:
            sock.close()
    assert proxy.connections == 4, "what was observed can still be asked"
    proxy.close()
    assert "closed" in repr(proxy)


def test_calls_before_start_and_after_close_are_refused() -> None:
    proxy = FaultProxy("amqp://127.0.0.1:1")
    assert "new" in repr(proxy)
    for call in (lambda: proxy.url, proxy.heal, lambda: proxy.seen("basic.ack")):
        with pytest.raises(UsageError, match="started"):
            call()
    proxy.close()
    for call in (lambda: proxy.url, proxy.heal, proxy.start):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more sockets")

    monkeypatch.setattr(socket.socket, "listen", fail)
    with nothing_left():
        proxy = FaultProxy("amqp://127.0.0.1:1")
        with pytest.raises(OSError, match="no more sockets"):
            proxy.start()
        proxy.close()


def test_close_while_connections_are_being_made_leaves_nothing(loopback: Loopback) -> None:
    with nothing_left():
        for _ in range(50):
            with FaultProxy(f"amqp://127.0.0.1:{loopback.listener.getsockname()[1]}") as proxy:
                clients = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(2)]
            for client in clients:
                client.close()


def test_control_that_meets_a_close_is_refused(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, stop, server = proxy._loop, proxy._stop, proxy._server
    assert loop is not None
    assert stop is not None
    loop.call_soon_threadsafe(stop.set)
    with pytest.raises(UsageError, match="closed"):
        proxy.heal()
    proxy.close()
    monkeypatch.setattr(proxy, "_open_server", lambda: server)
    with pytest.raises(UsageError, match="closed"):
        proxy.heal()


def test_control_that_is_cancelled_by_a_close_is_refused(proxy: FaultProxy) -> None:
    def cancel(_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    with pytest.raises(UsageError, match="closed"):
        proxy._call(cancel)


def test_start_is_idempotent(proxy: FaultProxy) -> None:
    port = proxy.port
    proxy.start()
    assert proxy.port == port


# cuts


@both_directions
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_cut_after_resets_both_sides_right_behind_the_frame(
    proxy: FaultProxy, wire: Wire, direction: Direction, frames: int
) -> None:
    sender, receiver = wire.towards(direction)
    proxy.cut_after(frames, direction)
    sent = [basic_ack(1, number) for number in range(1, 8)]
    sender.send(*sent)
    receiver.expect(*sent[:frames])
    receiver.expect_reset()
    sender.expect_reset()
    assert proxy.forwarded() == frames
    assert proxy.live_connections == 0


@both_directions
def test_cut_after_with_fin_ends_both_sides_in_order(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    proxy.cut_after(2, direction, reset=False)
    sender.send(HEARTBEAT, HEARTBEAT, HEARTBEAT)
    receiver.expect(HEARTBEAT, HEARTBEAT)
    receiver.expect_end()
    sender.expect_end()


def test_cut_after_counts_each_connection_from_when_it_is_set(loopback: Loopback, proxy: FaultProxy) -> None:
    first = loopback.wire()
    first.client.send(HEARTBEAT, HEARTBEAT)
    first.broker.expect(HEARTBEAT, HEARTBEAT)
    proxy.cut_after(2, "to_broker", times=2)
    second = loopback.wire()
    first.client.send(HEARTBEAT)
    second.client.send(HEARTBEAT)
    first.broker.expect(HEARTBEAT)
    second.broker.expect(HEARTBEAT)
    for wire in (second, first):
        wire.client.send(HEARTBEAT)
        wire.broker.expect(HEARTBEAT)
        wire.broker.expect_reset()
    third = loopback.wire()
    third.client.send(HEARTBEAT, HEARTBEAT, HEARTBEAT)
    third.broker.expect(HEARTBEAT, HEARTBEAT, HEARTBEAT)


def test_cut_after_strikes_every_connection_until_heal(loopback: Loopback, proxy: FaultProxy) -> None:
    proxy.cut_after(1, "to_broker", times=None)
    for _ in range(3):
        wire = loopback.wire()
        wire.client.send(HEARTBEAT)
        wire.client.expect_reset()
    proxy.heal()
    wire = loopback.wire()
    wire.client.send(HEARTBEAT)
    wire.broker.expect(HEARTBEAT)
    wire.broker.expect_nothing()


def test_cut_after_counts_frames_of_one_name(proxy: FaultProxy, wire: Wire) -> None:
    proxy.cut_after(2, "to_broker", of="basic.publish")
    wire.client.send(*message(b"a"), *message(b"b"))
    wire.broker.expect(*message(b"a"), PUBLISH)
    wire.broker.expect_reset()


@both_directions
@pytest.mark.parametrize(("share", "left"), [(0.0, 0), (0.5, 5), (0.99, 9)])
def test_cut_in_body_lets_a_share_of_the_frame_leave(
    proxy: FaultProxy, wire: Wire, direction: Direction, share: float, left: int
) -> None:
    sender, receiver = wire.towards(direction)
    proxy.cut_in_body(share, direction, nth=2)
    sender.send(*message(b"0123456789"), *message(b"abcdefghij"))
    receiver.expect(*message(b"0123456789"), PUBLISH, header(10), body(b"abcdefghij").raw[: 7 + left])
    receiver.expect_reset()
    sender.expect_reset()
    assert proxy.forwarded("body") == 1


def test_cut_in_body_with_fin(proxy: FaultProxy, wire: Wire) -> None:
    proxy.cut_in_body(0.5, reset=False)
    wire.client.send(*message(b"0123"))
    wire.broker.expect(PUBLISH, header(4), body(b"0123").raw[:9])
    wire.broker.expect_end()


@pytest.mark.parametrize("reset", [True, False])
def test_cut_ends_every_connection_now(loopback: Loopback, proxy: FaultProxy, reset: bool) -> None:
    wires = [loopback.wire(), loopback.wire()]
    assert proxy.cut(reset=reset) == 2
    assert proxy.live_connections == 0
    assert proxy.cut(reset=reset) == 0
    for wire in wires:
        for peer in (wire.client, wire.broker):
            peer.expect_reset() if reset else peer.expect_end()
    loopback.wire()


def test_cut_with_fin_is_an_orderly_end_while_the_peer_sends(proxy: FaultProxy, wire: Wire) -> None:
    proxy.stop_reading()
    wire.client.send(HEARTBEAT)
    proxy.cut(reset=False)
    wire.client.expect_end()
    wire.client.send(HEARTBEAT)
    wire.client.close()
    wire.broker.expect_end()


def test_peer_that_does_not_answer_an_orderly_end_is_reset(
    proxy: FaultProxy, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_FIN_PATIENCE", 0.05)
    proxy.cut(reset=False)
    wire.client.expect_end()
    poll = select.poll()
    poll.register(wire.client.socket, 0)
    assert poll.poll(DEADLINE * 1000), "both halves are closed"


def test_nothing_leaves_behind_a_cut_that_waits(proxy: FaultProxy, wire: Wire) -> None:
    proxy.throttle(100)
    proxy.cut_after(3, "to_broker")
    wire.client.send(*message(bytes(1000)), *[HEARTBEAT] * 3)
    wire.client.end_writing()
    proxy.wait_for(lambda: proxy.live_connections == 0)
    proxy.throttle(None)
    wire.broker.expect(*message(bytes(1000)))
    wire.broker.expect_reset()


def test_cut_in_body_strikes_every_connection_until_heal(loopback: Loopback, proxy: FaultProxy) -> None:
    proxy.cut_in_body(0.5, "to_client", times=None)
    for _ in range(2):
        wire = loopback.wire()
        wire.broker.send(*message(b"abcd"))
        wire.client.expect(PUBLISH, header(4), body(b"abcd").raw[:9])
        wire.client.expect_reset()


@pytest.mark.parametrize("side", ["client", "broker"])
def test_cut_of_one_side_leaves_the_other_in_the_dark(proxy: FaultProxy, wire: Wire, side: str) -> None:
    cut, kept = (wire.client, wire.broker) if side == "client" else (wire.broker, wire.client)
    proxy.cut(side="client" if side == "client" else "broker")
    cut.expect_reset()
    kept.send(HEARTBEAT)
    proxy.wait_for(lambda: proxy.seen("heartbeat") == 1)
    kept.expect_nothing()
    assert proxy.live_connections == 0
    proxy.heal()
    kept.expect_reset()


@pytest.mark.parametrize("side", ["client", "broker"])
def test_bytes_of_a_cut_side_that_have_not_left_are_lost(proxy: FaultProxy, wire: Wire, side: str) -> None:
    cut, kept = (wire.client, wire.broker) if side == "client" else (wire.broker, wire.client)
    proxy.black_hole()
    cut.send(HEARTBEAT)
    proxy.wait_for(lambda: proxy.seen("heartbeat") == 1)
    proxy.cut(side="client" if side == "client" else "broker")

    proxy.resume()

    kept.expect_nothing()


def test_side_left_over_can_end_by_itself(proxy: FaultProxy, wire: Wire) -> None:
    proxy.cut(side="client", reset=False)
    wire.client.expect_end()
    wire.broker.end_writing()
    wire.broker.expect_reset()


# confirms


def test_held_confirms_stay_in_order_while_the_rest_flows(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    confirms = [basic_ack(1, 1), basic_nack(1, 2), *[RETURN, header(2), body(b"no")], basic_ack(2, 1, multiple=True)]
    deliver = method(1, "basic.deliver", b"\1c" + bytes(9) + b"\0\0")
    others = [HEARTBEAT, deliver, header(1), body(b"x")]
    wire.broker.send(confirms[0], HEARTBEAT, *confirms[1:], *others[1:])
    wire.client.expect(*others)
    wire.client.expect_nothing()
    assert proxy.held_confirms == 4
    assert proxy.seen("basic.ack") == 2
    assert proxy.forwarded("basic.ack") == 0
    assert proxy.release_confirms(1) == 1
    wire.client.expect(confirms[0])
    wire.broker.send(basic_ack(1, 9))
    proxy.wait_for(lambda: proxy.held_confirms == 4)
    assert proxy.release_confirms() == 4
    wire.client.expect(*confirms[1:], basic_ack(1, 9))
    wire.broker.send(basic_ack(1, 10))
    wire.client.expect(basic_ack(1, 10))


def test_acks_of_a_consumer_are_not_held(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    wire.client.send(basic_ack(1, 1))
    wire.broker.expect(basic_ack(1, 1))


def test_return_whose_content_is_under_way_follows_its_head(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    wire.broker.send(RETURN, header(4), body(b"ab"))
    proxy.wait_for(lambda: proxy.seen("body") == 1)
    proxy.release_confirms(1)
    wire.client.expect(RETURN, header(4), body(b"ab"))
    wire.broker.send(body(b"cd"), basic_ack(1, 1), HEARTBEAT)
    wire.client.expect(body(b"cd"), HEARTBEAT)
    assert proxy.held_confirms == 1
    wire.broker.send(RETURN, header(4))
    proxy.wait_for(lambda: proxy.seen("header") == 2)
    assert proxy.drop_held_confirms() == 2
    wire.broker.send(body(b"cdef"), RETURN, header(0), HEARTBEAT)
    wire.client.expect(HEARTBEAT)
    assert proxy.held_confirms == 1


@pytest.mark.parametrize("release", [FaultProxy.release_confirms, FaultProxy.heal])
def test_released_confirms_follow_a_content_of_their_channel(
    proxy: FaultProxy, wire: Wire, release: Callable[[FaultProxy], object]
) -> None:
    delivery = [DELIVER, header(6), body(b"abc")]
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), basic_ack(2, 1), *delivery)
    wire.client.expect(*delivery)

    assert release(proxy) in (2, None)

    wire.client.expect(basic_ack(2, 1))
    wire.broker.send(body(b"def"), basic_ack(1, 2))
    wire.client.expect(body(b"def"), basic_ack(1, 1), basic_ack(1, 2))


def test_confirms_are_released_before_a_return_that_is_held(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), RETURN, header(6), body(b"abc"))
    proxy.wait_for(lambda: proxy.seen("body") == 1)

    assert proxy.release_confirms(1) == 1
    wire.client.expect(basic_ack(1, 1))
    assert proxy.release_confirms() == 1
    wire.broker.send(body(b"def"), basic_ack(1, 2))
    wire.client.expect(RETURN, header(6), body(b"abc"), body(b"def"), basic_ack(1, 2))


def test_released_confirms_pass_a_cut_set_after_the_hold(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    proxy.cut_after(1, "to_client", of="basic.ack")
    wire.broker.send(basic_ack(1, 1), basic_ack(1, 2), HEARTBEAT)
    wire.client.expect(HEARTBEAT)

    assert proxy.release_confirms() == 2

    assert proxy.live_connections == 0
    assert proxy.forwarded("basic.ack", "to_client") == 1


def test_released_confirms_pass_no_fault_for_a_second_time(proxy: FaultProxy, wire: Wire) -> None:
    def doubled(_: Direction, frame: Frame) -> list[Frame]:
        return [frame] * (2 if frame.name == "basic.ack" else 1)

    proxy.rewrite(doubled)
    proxy.hold_confirms()
    proxy.rewrite(doubled)
    wire.broker.send(basic_ack(1, 1))
    proxy.wait_for(lambda: proxy.held_confirms == 2)

    assert proxy.release_confirms() == 2

    wire.broker.send(HEARTBEAT)
    wire.client.expect(*[basic_ack(1, 1)] * 4, HEARTBEAT)


def test_return_that_had_begun_to_pass_is_not_held(proxy: FaultProxy, wire: Wire) -> None:
    wire.broker.send(RETURN, header(2))
    wire.client.expect(RETURN, header(2))
    proxy.hold_confirms()
    wire.broker.send(body(b"ab"))
    wire.client.expect(body(b"ab"))


def test_dropped_confirms_are_gone(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), HEARTBEAT)
    wire.client.expect(HEARTBEAT)
    proxy.drop_confirms()
    wire.broker.send(basic_ack(1, 2), RETURN, header(1), body(b"x"), HEARTBEAT)
    wire.client.expect(HEARTBEAT)
    assert proxy.held_confirms == 1
    proxy.release_confirms()
    wire.broker.send(basic_ack(1, 3))
    wire.client.expect(basic_ack(1, 1), basic_ack(1, 3))


def test_drop_some_of_the_held_confirms(proxy: FaultProxy, wire: Wire) -> None:
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), basic_ack(1, 2), HEARTBEAT)
    wire.client.expect(HEARTBEAT)
    assert proxy.drop_held_confirms(1) == 1
    proxy.release_confirms()
    wire.client.expect(basic_ack(1, 2))


@pytest.mark.parametrize(
    ("close", "left"),
    [
        (channel_close(1, 404, "no"), 1),
        (method(1, "channel.close-ok"), 1),
        (connection_close(320, "bye"), 0),
        (method(0, "connection.close-ok"), 0),
    ],
)
def test_confirms_never_leave_behind_the_close_of_their_channel(
    proxy: FaultProxy, wire: Wire, close: Frame, left: int
) -> None:
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), basic_ack(2, 1), close)
    wire.client.expect(close)
    assert proxy.held_confirms == left
    proxy.release_confirms()
    wire.broker.send(HEARTBEAT)
    wire.client.expect(*[basic_ack(2, 1)] * left, HEARTBEAT)


@pytest.mark.parametrize("side", ["both", "client", "broker"])
def test_held_confirms_are_lost_at_an_orderly_cut(proxy: FaultProxy, wire: Wire, side: str) -> None:
    """The sockets close later, when the peers have closed theirs."""
    proxy.hold_confirms()
    wire.broker.send(basic_ack(1, 1), HEARTBEAT)
    wire.client.expect(HEARTBEAT)

    proxy.cut(reset=False, side=side)  # type: ignore[arg-type]

    assert (proxy.held_confirms, proxy.release_confirms()) == (0, 0)


def test_held_confirms_are_lost_with_their_connection(loopback: Loopback, proxy: FaultProxy, wire: Wire) -> None:
    other = loopback.wire()
    proxy.hold_confirms()
    for each in (wire, other):
        each.broker.send(basic_ack(1, 1))
    proxy.wait_for(lambda: proxy.held_confirms == 2)
    wire.client.reset()
    proxy.wait_for(lambda: proxy.held_confirms == 1)
    assert proxy.release_confirms() == 1
    other.client.expect(basic_ack(1, 1))


# black holes, delays and throttling


@both_directions
def test_black_hole_swallows_one_way_until_it_is_healed(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    proxy.black_hole(direction)
    sender.send(HEARTBEAT, *message(b"abc"))
    proxy.wait_for(lambda: proxy.seen("body") == 1)
    receiver.expect_nothing()
    assert proxy.forwarded() == 0
    receiver.send(HEARTBEAT)
    sender.expect(HEARTBEAT)
    proxy.heal()
    receiver.expect(HEARTBEAT, *message(b"abc"))


def test_black_hole_both_ways_takes_bytes_without_end(proxy: FaultProxy, wire: Wire) -> None:
    proxy.black_hole()
    wire.broker.send(HEARTBEAT)
    for _ in range(160):
        wire.client.send(*message(bytes(100_000)))
    proxy.wait_for(lambda: proxy.seen("body") == 160 and proxy.seen("heartbeat") == 1)
    wire.client.expect_nothing()
    wire.broker.expect_nothing()


@pytest.mark.parametrize("reset", [True, False])
def test_end_of_a_connection_does_not_pass_a_black_hole(proxy: FaultProxy, wire: Wire, reset: bool) -> None:
    proxy.black_hole("to_broker")
    wire.client.send(HEARTBEAT)
    proxy.wait_for(lambda: proxy.seen("heartbeat") == 1)
    wire.client.reset() if reset else wire.client.end_writing()
    proxy.wait_for(lambda: proxy.live_connections == 0)
    wire.broker.expect_nothing()
    proxy.resume("to_broker")
    wire.broker.expect(HEARTBEAT)
    wire.broker.expect_reset() if reset else wire.broker.expect_end()


def test_black_hole_can_spare_new_connections(loopback: Loopback, proxy: FaultProxy, wire: Wire) -> None:
    proxy.black_hole(new_connections=False)
    other = loopback.wire()
    other.client.send(HEARTBEAT)
    other.broker.expect(HEARTBEAT)
    wire.client.send(HEARTBEAT)
    proxy.wait_for(lambda: proxy.seen("heartbeat") == 2)
    wire.broker.expect_nothing()


def fill(peer: Peer) -> int:
    """Write until the operating system accepts no more; return the number of bytes."""
    block = body(bytes(65_000)).raw
    written = 0
    peer.socket.setblocking(False)
    with suppress(BlockingIOError):
        while written < 200_000_000:
            written += peer.socket.send(block[written % len(block) :])
    peer.socket.settimeout(DEADLINE)
    return written


@both_directions
def test_stop_reading_fills_the_senders_window(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    proxy.stop_reading(direction)
    written = fill(sender)
    assert written < 50_000_000
    assert proxy.seen() == 0
    receiver.send(HEARTBEAT)
    sender.expect(HEARTBEAT)
    proxy.resume(direction)
    received = 0
    while received < written - 65_008:
        received += len(receiver.socket.recv(1 << 20))


def test_peer_that_does_not_read_is_felt_by_the_sender(proxy: FaultProxy, wire: Wire) -> None:
    assert fill(wire.client) < 50_000_000
    wire.broker.reset()
    wire.client.expect_reset()


def test_stop_reading_can_spare_new_connections(loopback: Loopback, proxy: FaultProxy, wire: Wire) -> None:
    proxy.stop_reading(new_connections=False)
    other = loopback.wire()
    wire.client.send(HEARTBEAT)
    other.client.send(HEARTBEAT)
    other.broker.expect(HEARTBEAT)
    wire.broker.expect_nothing()
    proxy.resume()
    wire.broker.expect(HEARTBEAT)


@both_directions
def test_delay_lets_bytes_arrive_later_and_in_order(proxy: FaultProxy, wire: Wire, direction: Direction) -> None:
    sender, receiver = wire.towards(direction)
    proxy.delay(0.2, jitter=0.1, direction=direction)
    began = time.monotonic()
    sent = [basic_ack(1, number) for number in range(1, 21)]
    for number, frame in enumerate(sent, start=1):
        sender.send(frame)
        proxy.wait_for(lambda number=number: proxy.seen() == number)
    receiver.expect(sent[0])
    assert time.monotonic() - began >= 0.1
    receiver.expect(*sent[1:])
    receiver.send(HEARTBEAT)
    sender.expect(HEARTBEAT)


def test_jitter_is_drawn_from_the_seed(fault_proxy: FaultProxyFactory) -> None:
    draws = [fault_proxy("amqp://127.0.0.1:1", seed=seed)._random.random() for seed in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


def test_heal_lets_delayed_bytes_arrive_at_once(proxy: FaultProxy, wire: Wire) -> None:
    proxy.delay(3600)
    wire.client.send(HEARTBEAT)
    proxy.wait_for(lambda: proxy.seen() == 1)
    wire.client.end_writing()
    proxy.wait_for(lambda: proxy.live_connections == 0)
    wire.broker.expect_nothing()
    proxy.heal()
    wire.broker.expect(HEARTBEAT)
    wire.broker.expect_end()


@both_directions
def test_throttle_limits_the_rate_and_is_felt_by_the_sender(
    proxy: FaultProxy, wire: Wire, direction: Direction
) -> None:
    sender, receiver = wire.towards(direction)
    proxy.throttle(100_000, direction=direction)
    began = time.monotonic()
    sender.send(*message(bytes(30_000)))
    receiver.expect(*message(bytes(30_000)))
    assert 0.25 <= time.monotonic() - began < DEADLINE
    assert fill(sender) < 50_000_000
    proxy.throttle(None, direction=direction)
    received = receiver.socket.recv(1 << 20)
    while len(received) < 1_000_000:
        received += receiver.socket.recv(1 << 20)


def test_cut_waits_for_what_is_throttled_ahead_of_it(proxy: FaultProxy, wire: Wire) -> None:
    proxy.throttle(100_000)
    proxy.cut_after(3, "to_broker")
    wire.client.send(*message(bytes(10_000)), HEARTBEAT)
    wire.broker.expect(*message(bytes(10_000)))
    wire.broker.expect_reset()


# new connections


def test_refused_connections(loopback: Loopback, proxy: FaultProxy, wire: Wire) -> None:
    port = proxy.port
    proxy.refuse_connections()
    proxy.refuse_connections()
    with pytest.raises(ConnectionRefusedError):
        loopback.client()
    wire.client.send(HEARTBEAT)
    wire.broker.expect(HEARTBEAT)
    proxy.accept_connections()
    assert proxy.port == port
    loopback.wire()
    proxy.refuse_connections()
    proxy.heal()
    loopback.wire()


def test_hung_connections_are_connected_later(loopback: Loopback, proxy: FaultProxy) -> None:
    proxy.hang_connections()
    client = loopback.client()
    client.send(PROTOCOL_HEADER)
    proxy.wait_for(lambda: proxy.connections == 1)
    client.expect_nothing()
    assert proxy.live_connections == 0
    proxy.heal()
    broker = loopback.broker()
    broker.expect(PROTOCOL_HEADER)
    broker.send(HEARTBEAT)
    client.expect(HEARTBEAT)


def test_hung_connections_can_be_cut(loopback: Loopback, proxy: FaultProxy) -> None:
    proxy.hang_connections()
    client = loopback.client()
    proxy.wait_for(lambda: proxy.connections == 1)
    proxy.cut()
    client.expect_reset()


# single frames


def test_injected_frames_leave_at_once(proxy: FaultProxy, wire: Wire) -> None:
    proxy.inject("to_client", basic_ack(1, 7))
    wire.client.expect(basic_ack(1, 7))
    proxy.inject("to_broker", basic_ack(1, 1).raw + basic_ack(1, 1).raw)
    wire.broker.expect(basic_ack(1, 1), basic_ack(1, 1))
    assert proxy.seen() == 0
    assert proxy.forwarded("basic.ack") == 3


def test_injected_frames_never_tear_a_content(proxy: FaultProxy, wire: Wire) -> None:
    wire.client.send(PUBLISH, header(4), body(b"ab"))
    wire.broker.expect(PUBLISH, header(4), body(b"ab"))
    proxy.inject("to_broker", basic_ack(1, 7))
    wire.client.send(body(b"cd"), HEARTBEAT, PUBLISH)
    wire.broker.expect(body(b"cd"), HEARTBEAT, basic_ack(1, 7), PUBLISH)


def test_injection_goes_to_the_most_recent_live_connection(loopback: Loopback, proxy: FaultProxy) -> None:
    with pytest.raises(UsageError, match="live"):
        proxy.inject("to_client", HEARTBEAT)
    first, second = loopback.wire(), loopback.wire()
    proxy.inject("to_client", HEARTBEAT)
    second.client.expect(HEARTBEAT)
    second.client.end_writing()
    proxy.wait_for(lambda: proxy.live_connections == 1)
    proxy.inject("to_client", HEARTBEAT)
    first.client.expect(HEARTBEAT)


def test_rewrite_drops_doubles_and_alters_frames(proxy: FaultProxy, wire: Wire) -> None:
    asked: list[tuple[Direction, str]] = []

    def rewrite(direction: Direction, frame: Frame) -> list[Frame]:
        asked.append((direction, frame.name))
        match frame.name:
            case "heartbeat":
                return []
            case "basic.ack":
                return [frame, frame]
            case "body":
                return [body(frame.payload.upper())]
        return [frame]

    remove = proxy.rewrite(rewrite)
    wire.client.send(PROTOCOL_HEADER, HEARTBEAT, basic_ack(1, 1), *message(b"abc"))
    wire.broker.expect(PROTOCOL_HEADER, basic_ack(1, 1), basic_ack(1, 1), *message(b"ABC"))
    wire.broker.send(HEARTBEAT, basic_ack(1, 1))
    wire.client.expect(basic_ack(1, 1), basic_ack(1, 1))
    assert asked[0] == ("to_broker", "heartbeat")
    assert asked[-1] == ("to_client", "basic.ack")
    remove()
    remove()
    wire.client.send(HEARTBEAT)
    wire.broker.expect(HEARTBEAT)


def test_rewrite_of_one_direction_may_cut(proxy: FaultProxy, wire: Wire) -> None:
    def rewrite(_: Direction, frame: Frame) -> list[Frame | Cut]:
        return [frame, Cut(reset=False, data=b"\x01")] if frame.name == "basic.ack" else [frame]

    proxy.rewrite(rewrite, "to_client")
    wire.client.send(basic_ack(1, 1))
    wire.broker.expect(basic_ack(1, 1))
    wire.broker.send(HEARTBEAT, basic_ack(1, 1), HEARTBEAT)
    wire.client.expect(HEARTBEAT, basic_ack(1, 1), b"\x01")
    wire.client.expect_end()


def test_faults_apply_in_the_order_in_which_they_were_set(proxy: FaultProxy, wire: Wire) -> None:
    proxy.rewrite(lambda _, frame: [] if frame.name == "heartbeat" else [frame])
    proxy.cut_after(2, "to_client")
    proxy.rewrite(lambda _, frame: [frame, frame])
    wire.broker.send(HEARTBEAT, basic_ack(1, 1), HEARTBEAT, basic_ack(1, 2), basic_ack(1, 3))
    wire.client.expect(basic_ack(1, 1), basic_ack(1, 1), basic_ack(1, 2), basic_ack(1, 2))
    wire.client.expect_reset()


def test_rewrite_may_call_controls_but_not_wait(proxy: FaultProxy, wire: Wire) -> None:
    refused: list[str] = []

    def rewrite(_: Direction, frame: Frame) -> Iterable[Frame]:
        for forbidden in (proxy.close, lambda: proxy.wait_for(lambda: True)):
            with pytest.raises(UsageError) as caught:
                forbidden()
            refused.append(str(caught.value))
        proxy.cut()
        return [frame]

    proxy.rewrite(rewrite, "to_broker")
    wire.client.send(HEARTBEAT)
    wire.client.expect_reset()
    wire.broker.expect_reset()
    assert len(refused) == 2


def test_a_raising_rewrite_resets_the_connection_and_is_reported(proxy: FaultProxy, wire: Wire) -> None:
    def rewrite(_: Direction, frame: Frame) -> list[Frame]:
        raise LookupError(frame.name)

    proxy.rewrite(rewrite)
    wire.client.send(HEARTBEAT)
    wire.client.expect_reset()
    with pytest.raises(UsageError, match="LookupError") as caught:
        proxy.wait_for(lambda: False)
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("result", [HEARTBEAT.raw, [HEARTBEAT.raw], None], ids=["bytes", "list", "none"])
def test_a_rewrite_that_returns_no_frames_is_reported(proxy: FaultProxy, wire: Wire, result: Iterable[Frame]) -> None:
    proxy.rewrite(lambda *_: result)
    wire.client.send(HEARTBEAT)
    wire.client.expect_reset()
    with pytest.raises(UsageError, match="a rewrite function raised TypeError: "):
        proxy.wait_for(lambda: False)


def test_a_rewrite_that_fails_the_test_is_reported(proxy: FaultProxy, wire: Wire) -> None:
    proxy.rewrite(lambda _, frame: pytest.fail(f"not expected: {frame.name}"))
    wire.client.send(HEARTBEAT)
    wire.client.expect_reset()
    with pytest.raises(UsageError, match="not expected: heartbeat"):
        proxy.wait_for(lambda: False)


@pytest.mark.parametrize("error_in_body", [True, False])
def test_leaving_reports_a_rewrite_that_raised_but_masks_nothing(loopback: Loopback, error_in_body: bool) -> None:
    def rewrite(_: Direction, frame: Frame) -> list[Frame]:
        raise LookupError(frame.name)

    def run() -> None:
        with FaultProxy(f"amqp://127.0.0.1:{loopback.listener.getsockname()[1]}") as proxy:
            proxy.rewrite(rewrite)
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.send(HEARTBEAT.raw)
                client.settimeout(DEADLINE)
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            if error_in_body:
                raise KeyError("mine")

    with pytest.raises(KeyError if error_in_body else UsageError):
        run()


def test_rewrite_that_blocks_is_named_as_the_reason(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, unblock = threading.Event(), threading.Event()

    def rewrite(_: Direction, frame: Frame) -> list[Frame]:
        blocked.set()
        unblock.wait(DEADLINE)
        return [frame]

    proxy = FaultProxy(f"amqp://127.0.0.1:{loopback.listener.getsockname()[1]}")
    proxy.start()
    proxy.rewrite(rewrite)
    monkeypatch.setattr(base_module, "_CONTROL_TIMEOUT", 0.05)
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.send(HEARTBEAT.raw)
        assert blocked.wait(DEADLINE)
        with pytest.raises(UsageError, match="a rewrite function blocks it"):
            proxy.heal()
        with pytest.raises(UsageError, match="a rewrite function blocks it"):
            proxy.close()
        unblock.set()
        monkeypatch.undo()
        proxy.close()


# waits and arguments


def test_wait_for_says_what_was_seen_when_it_times_out(proxy: FaultProxy, wire: Wire) -> None:
    wire.client.send(HEARTBEAT)
    wire.broker.expect(HEARTBEAT)
    with pytest.raises(TimeoutError, match=r"two acks.*0\.05 s.*1 live.*'heartbeat': 1"):
        proxy.wait_for(lambda: proxy.seen("basic.ack") == 2, 0.05, what="two acks")


def test_wait_for_ends_although_the_proxy_keeps_changing(proxy: FaultProxy) -> None:
    begun = time.monotonic()

    def never() -> bool:
        proxy.drop_held_confirms()
        assert time.monotonic() < begun + DEADLINE
        return False

    with pytest.raises(TimeoutError, match="did not come true"):
        proxy.wait_for(never, timeout=0.2)


def test_wait_for_is_woken_by_what_it_waits_for(proxy: FaultProxy, wire: Wire) -> None:
    asked = threading.Event()

    def condition() -> bool:
        asked.set()
        return proxy.seen("heartbeat") == 1

    waiter = threading.Thread(target=proxy.wait_for, args=(condition,))
    waiter.start()
    assert asked.wait(DEADLINE)
    wire.client.send(HEARTBEAT)
    waiter.join(DEADLINE)
    assert not waiter.is_alive()


@pytest.mark.parametrize(
    "call",
    [
        lambda proxy: proxy.cut(side="left"),
        lambda proxy: proxy.cut_after(0, "to_broker"),
        lambda proxy: proxy.cut_after(1.5, "to_broker"),  # no frame would have this number
        lambda proxy: proxy.cut_after(None, "to_broker"),
        lambda proxy: proxy.cut_after(1, "both"),
        lambda proxy: proxy.cut_after(1, "to_broker", times=0),
        lambda proxy: proxy.cut_after(1, "to_broker", of="basic.pubilsh"),
        lambda proxy: proxy.cut_in_body(1.0),
        lambda proxy: proxy.cut_in_body(0.5, nth=0),
        lambda proxy: proxy.cut_in_body(0.5, times=0),
        lambda proxy: proxy.cut_in_body(0.5, times=1.5),  # it would cut without end
        lambda proxy: proxy.delay(-1),
        lambda proxy: proxy.delay(1, jitter=2),
        lambda proxy: proxy.throttle(0),
        lambda proxy: proxy.throttle(math.inf),
        lambda proxy: proxy.black_hole("sideways"),
        lambda proxy: proxy.inject("both", HEARTBEAT),
        lambda proxy: proxy.seen("basic.akc"),
        lambda proxy: proxy.seen("basic.ack", "both"),
        lambda proxy: proxy.redirect("http://host"),
        lambda _: FaultProxy("amqp://host", key_file="key.pem"),
        lambda _: FaultProxy("amqp://host", cert_file="missing.pem"),
    ],
)
def test_wrong_arguments_are_refused(proxy: FaultProxy, call: Callable[[FaultProxy], object]) -> None:
    with pytest.raises(ConfigurationError):
        call(proxy)


def test_faults_can_be_changed_from_many_threads(loopback: Loopback, proxy: FaultProxy) -> None:
    errors: list[Exception] = []

    def change() -> None:
        try:
            for _ in range(30):
                proxy.hold_confirms()
                proxy.delay(0.001, jitter=0.001)
                proxy.rewrite(lambda _, frame: [frame])()
                proxy.heal()
        except Exception as error:
            errors.append(error)

    wire = loopback.wire()
    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    sent = [basic_ack(1, number) for number in range(1, 501)]
    for frame in sent:
        wire.broker.send(frame)
    for thread in threads:
        thread.join(DEADLINE)
    proxy.heal()
    wire.client.expect(*sent)
    assert errors == []


def test_fixture_closes_its_proxies_when_the_test_ends(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib\n")
    pytester.makeconftest("pytest_plugins = ['reliable_mq.testing.fixtures']")
    pytester.makepyfile(
        """
        import socket
        import pytest

        ports = []

        def test_one(fault_proxy):
            ports.extend(fault_proxy("amqp://127.0.0.1:1", seed=n).port for n in range(2))
            socket.create_connection(("127.0.0.1", ports[0])).close()

        def test_two():
            for port in ports:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
        """
    )
    pytester.runpytest_inprocess("-p", "no:asyncio").assert_outcomes(passed=2)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the proxy's thread runs, which is tested here
def test_a_forked_child_keeps_no_connection_and_no_port_open(proxy: FaultProxy, wire: Wire) -> None:
    """Refused connections are refused, and the peers see a cut, while the child still runs."""
    mine, its = socket.socketpair()
    child = os.fork()
    if not child:
        mine.close()
        its.send(b"runs")
        its.recv(1)
        os._exit(0)
    its.close()
    try:
        mine.recv(4)
        wire.client.send(PROTOCOL_HEADER)
        wire.broker.expect(PROTOCOL_HEADER)
        proxy.refuse_connections()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), DEADLINE)
        proxy.heal()
        socket.create_connection(("127.0.0.1", proxy.port), DEADLINE).close()
        proxy.cut()
        wire.client.expect_reset()
        wire.broker.expect_reset()
    finally:
        mine.close()
        assert os.waitpid(child, 0)[1] == 0
