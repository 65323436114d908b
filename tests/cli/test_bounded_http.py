"""The server of ``reliable-mq web``: clients that send or read nothing do not block other clients."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h11
import pytest
import uvicorn

from reliable_mq.cli import bounded_http
from reliable_mq.cli.bounded_http import BoundedHTTP
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"


async def app(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


PARTS = 500  # of 64 KiB, more than the buffers of a connection hold


class Large:
    """An app with a large response."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(PARTS):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await send({"type": "http.response.body", "body": b"ok"})
        self.ended.set()


SIZE = 60_000  # less than what pauses an asyncio transport by default, more than small buffers hold


async def page(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": b"x" * SIZE})


@contextmanager
def served(app: Any = app, send_buffer: int | None = None) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if send_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = uvicorn.Config(
            app, http=BoundedHTTP, limit_concurrency=bounded_http.CONNECTIONS + 1, log_config=None, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        wait_until(lambda: server.started, timeout=20, what="the server")
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(20)
    assert not BoundedHTTP._waiting


def small_client(address: tuple[str, int]) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(10)
    client.connect(address)
    return client


def status(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(GET + b"\r\n")
        return client.recv(12)


def answer(client: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"ok") and (more := client.recv(1000)):
        found += more
    return found


def ended(client: socket.socket) -> bool:
    """Return whether the server closes the connection within 10 s without a byte."""
    client.settimeout(10)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", GET, POST, GET + b"\r\n"])
def test_a_request_that_does_not_end_is_dropped(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, part of a head, a head without its body, and a second request."""
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr(bounded_http, "BODY_TIMEOUT", 0.3)
    with served() as address, socket.create_connection(address) as client:
        client.sendall(sent)
        client.settimeout(10)
        if sent.endswith(b"\r\n\r\n") and sent.startswith(b"GET"):
            assert answer(client).endswith(b"ok")
            client.sendall(b"GET")
        began = time.monotonic()
        assert ended(client)
        assert time.monotonic() - began < 5


@pytest.mark.slow
def test_whole_requests_are_answered_for_as_long_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT", 1.0)
    with served() as address, socket.create_connection(address) as client:
        for request in (GET + b"\r\n", POST + b"12345", GET + b"\r\n"):
            client.sendall(request)
            assert answer(client).endswith(b"ok")
            threading.Event().wait(0.5)


def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "WRITE_TIMEOUT", 0.3)
    large = Large()
    with served(large) as address, socket.create_connection(address) as client:
        client.sendall(GET + b"\r\n")
        assert large.ended.wait(20)


def test_a_client_that_leaves_the_end_unread_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "WRITE_TIMEOUT", 0.3)
    monkeypatch.setattr(bounded_http, "CONNECTIONS", 1)
    with served(page, send_buffer=4096) as address, small_client(address) as client:
        client.sendall(GET + b"Connection: close\r\n\r\n")
        assert client.recv(1)
        wait_until(lambda: status(address) == b"HTTP/1.1 200", timeout=20, what="the place of the client")
        with client.makefile("rb") as file:
            assert len(file.read()) < SIZE


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "WRITE_TIMEOUT", 2.0)
    with served(Large()) as address, socket.create_connection(address) as client:
        client.sendall(GET + b"\r\n")
        client.settimeout(10)
        received = 0
        with client.makefile("rb") as file:
            while data := file.read(2_000_000):
                received += len(data)
                threading.Event().wait(0.2)
        assert received > PARTS * 65536


@pytest.mark.slow
def test_the_next_request_is_due_after_the_response_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT", 0.5)
    with served(page, send_buffer=4096) as address, small_client(address) as client:
        client.sendall(GET + b"\r\n")
        received = 0
        while data := client.recv(1000):
            received += len(data)
            threading.Event().wait(0.03)
        assert received > SIZE


def test_clients_that_send_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "CONNECTIONS", 3)
    with served() as address, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(10)]
        with socket.create_connection(address) as client:
            client.sendall(GET + b"\r\n")
            client.settimeout(10)
            assert answer(client).endswith(b"ok")
            assert all(map(ended, silent[:7]))


@pytest.mark.parametrize("sent", [POST, GET + b"Connection: close\r\n\r\n"])
def test_clients_that_stop_midway_keep_nobody_out(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send no body, or read no response. The one that has waited longest is dropped."""
    monkeypatch.setattr(bounded_http, "CONNECTIONS", 2)
    with served(page if sent.startswith(b"GET") else app, send_buffer=4096) as address, ExitStack() as stack:
        for count in (1, 2):
            stopped = stack.enter_context(small_client(address))
            stopped.sendall(sent)
            wait_until(lambda count=count: _stopped() == count, timeout=20, what="the client to be awaited")
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(GET + b"\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            assert _stopped() == 1


def _stopped() -> int:
    """Return the number of connections that wait for a body or for a client to read."""
    waiting = [*BoundedHTTP._waiting]
    return sum(one._awaited in (bounded_http._READING, h11.SEND_BODY) for one in waiting)


def test_when_all_are_busy_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "CONNECTIONS", 2)
    busy, end = threading.Semaphore(0), threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        busy.release()
        await asyncio.to_thread(end.wait, 30)
        await app(scope, receive, send)

    with served(slow) as address, ExitStack() as stack:
        stack.callback(end.set)
        for _ in range(2):
            stack.enter_context(socket.create_connection(address)).sendall(GET + b"\r\n")
            assert busy.acquire(timeout=20)
        with socket.create_connection(address) as client:
            client.sendall(GET + b"Connection: close\r\n\r\n")
            client.settimeout(10)
            assert client.recv(1000).startswith(b"HTTP/1.1 503")


DEAF = """
import os, signal, socket, sys, threading

from reliable_mq.cli.bounded_http import serve
from tests.cli.test_bounded_http import app

threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
sys.exit(serve(app, socket.create_server(("127.0.0.1", 0)), 10) - signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_signal_that_another_thread_receives_ends_the_server() -> None:
    """The signal wakes the main thread, whenever and in whichever thread it arrives."""
    done = subprocess.run([sys.executable, "-c", DEAF], check=False, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
