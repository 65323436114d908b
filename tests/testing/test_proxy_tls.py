"""The fault proxy terminates TLS: frames are counted and faulted on either side."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from integration.support.certificates import Authority
from reliable_mq.testing import FaultProxy, basic_ack, method
from reliable_mq.tls import TLSOptions
from tests.leftovers import nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE = 30.0
HEADER = b"AMQP\0\0\x09\x01"
PUBLISH = method(1, "basic.publish", b"\0\0\0\1q\0")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture
def broker() -> Iterator[socket.socket]:
    """A scripted broker without TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        yield listener


@pytest.fixture
def proxy(broker: socket.socket, authority: Authority) -> Iterator[FaultProxy]:
    own = authority.issue("proxy", "127.0.0.1")
    url = f"amqp://u:p@127.0.0.1:{broker.getsockname()[1]}/v"
    with FaultProxy(url, cert_file=own.cert_file, key_file=own.key_file) as proxy:
        yield proxy


def connect(proxy: FaultProxy, authority: Authority) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", proxy.port), DEADLINE)
    return ssl.create_default_context(cafile=authority.file).wrap_socket(raw, server_hostname="127.0.0.1")


def accept(broker: socket.socket) -> socket.socket:
    peer, _ = broker.accept()
    peer.settimeout(DEADLINE)
    return peer


def receive(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        data = peer.recv(count - len(received))
        assert data, f"the stream ended after {received!r}"
        received += data
    return received


def test_frames_of_a_tls_client_are_counted_and_faulted(
    proxy: FaultProxy, broker: socket.socket, authority: Authority
) -> None:
    assert proxy.url == f"amqps://u:p@127.0.0.1:{proxy.port}/v"
    with connect(proxy, authority) as client, accept(broker) as peer:
        client.sendall(HEADER + PUBLISH.raw)
        assert receive(peer, len(HEADER + PUBLISH.raw)) == HEADER + PUBLISH.raw
        proxy.hold_confirms()
        peer.sendall(basic_ack(1, 1).raw)
        proxy.wait_for(lambda: proxy.held_confirms == 1)
        assert proxy.seen("basic.publish", "to_broker") == 1
        proxy.heal()
        assert receive(client, len(basic_ack(1, 1).raw)) == basic_ack(1, 1).raw


def test_a_large_transfer_through_tls_arrives_whole(
    proxy: FaultProxy, broker: socket.socket, authority: Authority
) -> None:
    with connect(proxy, authority) as client, accept(broker) as peer:
        client.sendall(HEADER + PUBLISH.raw)
        receive(peer, len(HEADER + PUBLISH.raw))
        frames = b"".join(basic_ack(1, tag).raw for tag in range(20_000))
        peer.sendall(frames)
        assert receive(client, len(frames)) == frames


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_ends_both_sides(proxy: FaultProxy, broker: socket.socket, authority: Authority, reset: bool) -> None:
    with connect(proxy, authority) as client, accept(broker) as peer:
        proxy.wait_for(lambda: proxy.live_connections == 1)
        proxy.cut(reset=reset)
        if reset:
            with socket.socket(fileno=os.dup(client.fileno())) as below:  # Python's TLS reports a reset as EOF
                below.settimeout(DEADLINE)
                with pytest.raises(ConnectionResetError):  # noqa: PT012  # after the earlier bytes
                    while below.recv(1000):
                        pass
        else:
            client.unwrap().close()  # both sides send a close alert
        client.close()
        with suppress(ConnectionResetError):
            assert peer.recv(1) == b""
        peer.close()
        proxy.wait_for(lambda: proxy.live_connections == 0)


def test_the_orderly_end_of_a_client_reaches_the_broker(
    proxy: FaultProxy, broker: socket.socket, authority: Authority
) -> None:
    client, peer = connect(proxy, authority), accept(broker)
    client.sendall(HEADER)
    assert receive(peer, len(HEADER)) == HEADER
    with suppress(OSError):  # the proxy may close without sending a close alert
        client.unwrap()
    client.close()
    with peer:
        assert peer.recv(1) == b""
    proxy.wait_for(lambda: proxy.live_connections == 0)


def test_a_client_distrusting_the_certificate_disturbs_no_other(
    broker: socket.socket, authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue("strict", "127.0.0.1")
    url = f"amqp://127.0.0.1:{broker.getsockname()[1]}"
    with nothing_left(), FaultProxy(url, cert_file=own.cert_file, key_file=own.key_file) as proxy:
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(proxy, Authority(tmp_path, "other"))
        with connect(proxy, authority) as client, accept(broker) as peer:
            client.sendall(HEADER)
            assert receive(peer, len(HEADER)) == HEADER


def test_a_broker_with_tls_is_verified(broker: socket.socket, authority: Authority) -> None:
    """The proxy verifies the broker, even if its own clients use no TLS."""
    own = authority.issue("broker", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert_file, own.key_file)
    url = f"amqps://127.0.0.1:{broker.getsockname()[1]}"
    with (
        FaultProxy(url, tls=TLSOptions(ca_file=authority.file)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), DEADLINE) as client,
    ):
        client.sendall(HEADER)
        with context.wrap_socket(accept(broker), server_side=True) as peer:
            assert receive(peer, len(HEADER)) == HEADER
            assert proxy.url.startswith("amqp://")
    with FaultProxy(url) as wary, socket.create_connection(("127.0.0.1", wary.port), DEADLINE) as client:
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(accept(broker), server_side=True)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
