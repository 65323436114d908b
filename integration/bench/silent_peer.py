"""A substitute for a broker that accepts publishes and confirms only the last one.

``python -m integration.bench.silent_peer N`` prints its port and serves one connection. A publisher can then be
measured with N - 1 outstanding messages, all of them written. The confirm of the N-th message shows that all have
arrived.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["serving"]

METHOD, HEARTBEAT, END = 1, 8, b"\xce"
START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK, CLOSE, CLOSE_OK = (
    (10, number) for number in (10, 11, 30, 31, 40, 41, 50, 51)
)
CHANNEL_OPEN, CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = ((20, number) for number in (10, 11, 40, 41))
PUBLISH, ACK = (60, 40), (60, 80)
SELECT, SELECT_OK = (85, 10), (85, 11)
PROTOCOL_HEADER_SIZE = 8
CHANNEL_MAX, FRAME_MAX = 2047, 131072
CHUNK = 1 << 20


def table(entries: dict[str, str | bool]) -> bytes:
    """Encode a field table of strings and booleans."""
    parts = []
    for name, value in entries.items():
        key = name.encode()
        kind = b"t" + bytes([value]) if isinstance(value, bool) else b"S" + long_string(value.encode())
        parts.append(bytes([len(key)]) + key + kind)
    return long_string(b"".join(parts))


def long_string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def method(channel: int, identity: tuple[int, int], arguments: bytes = b"") -> bytes:
    payload = struct.pack(">HH", *identity) + arguments
    return struct.pack(">BHI", METHOD, channel, len(payload)) + payload + END


def start() -> bytes:
    capabilities = table({"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True})
    properties = table({"product": "RabbitMQ", "version": "4.0.5"})[4:] + b"\x0ccapabilitiesF" + capabilities
    return method(0, START, b"\x00\x09" + long_string(properties) + long_string(b"PLAIN") + long_string(b"en_US"))


ANSWERS = {
    START_OK: (TUNE, struct.pack(">HIH", CHANNEL_MAX, FRAME_MAX, 0)),
    OPEN: (OPEN_OK, b"\x00"),
    CLOSE: (CLOSE_OK, b""),
    CHANNEL_OPEN: (CHANNEL_OPEN_OK, long_string(b"")),
    CHANNEL_CLOSE: (CHANNEL_CLOSE_OK, b""),
    SELECT: (SELECT_OK, b""),
}


def serve(connection: socket.socket, messages: int) -> None:
    """Serve one client until it closes; confirm publish number `messages`."""
    published = 0
    data = bytearray()
    while len(data) < PROTOCOL_HEADER_SIZE:
        data += receive(connection)
    del data[:PROTOCOL_HEADER_SIZE]
    connection.sendall(start())
    while True:
        at = 0
        while len(data) - at >= 7:
            kind, channel, size = struct.unpack_from(">BHI", data, at)
            if len(data) - at < size + 8:
                break
            if kind == METHOD:
                identity = struct.unpack_from(">HH", data, at + 7)
                if identity == PUBLISH:
                    published += 1
                elif identity in ANSWERS:
                    connection.sendall(method(channel, *ANSWERS[identity]))
                elif identity != TUNE_OK:
                    raise ValueError(f"no answer to method {identity}")
            at += size + 8
            if published == messages and at == len(data):
                connection.sendall(method(channel, ACK, struct.pack(">Q?", published, False)))
                published += 1
        del data[:at]
        data += receive(connection)


def receive(connection: socket.socket) -> bytes:
    data = connection.recv(CHUNK)
    if not data:
        raise ConnectionResetError("the client has gone")
    return data


@contextlib.contextmanager
def serving(messages: int) -> Iterator[str]:
    """Run this peer in a separate process during the block; yield its URL."""
    command = [sys.executable, "-m", "integration.bench.silent_peer", str(messages)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as peer:
        try:
            assert peer.stdout is not None
            yield f"amqp://guest:guest@127.0.0.1:{int(peer.stdout.readline())}/%2F"
        finally:
            peer.kill()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection, contextlib.suppress(ConnectionError):
        serve(connection, int(sys.argv[1]))


if __name__ == "__main__":
    main()
