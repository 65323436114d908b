"""A proxy for a server of any protocol, which loses selected requests and responses.

Instead of a response, the client gets a closed connection, so it does not know whether the server has done the work.
Connections can also be silenced, as if the host had vanished: they stay open, and no data passes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LossyProxy"]


class LossyProxy:
    """Listens on 127.0.0.1 and forwards to another port there.

    Args:
        port: The port of the server.
        loses: Called with the bytes of a request; returns whether to lose the response. By default none is lost.
        drops: Called before `loses` with the same bytes; returns whether to lose the request itself.

    Attributes:
        port: The port on which the proxy listens.
        upstream: The port of the server for new connections.
        lost: The number of lost requests and responses.
        round_trips: How often, on any connection, a request followed the response to the previous request.
    """

    def __init__(
        self,
        port: int,
        loses: Callable[[bytes], bool] = lambda _: False,
        drops: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self.upstream = port
        self._loses = loses
        self._drops = drops
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._silent: frozenset[socket.socket] = frozenset()
        self.port: int = self._listener.getsockname()[1]
        self.lost = 0
        self.round_trips = 0

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            _close(one)
        for thread in self._threads:
            thread.join(10)

    def silence(self) -> None:
        """Silence the current connections, but not later ones."""
        self._silent = frozenset(self._sockets)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name="lossy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.upstream), timeout=10)
                except OSError:  # the server is dead
                    client.close()
                    continue
                server.settimeout(None)
                self._sockets += [client, server]
                losing, answered = threading.Event(), threading.Event()
                answered.set()
                self._start(self._questions, client, server, losing, answered)
                self._start(self._answers, client, server, losing, answered)

    def _questions(
        self, client: socket.socket, server: socket.socket, losing: threading.Event, answered: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if client in self._silent:
                    continue
                if answered.is_set():
                    answered.clear()
                    self.round_trips += 1
                if not losing.is_set() and self._drops(data):
                    self.lost += 1
                    break
                if not losing.is_set() and self._loses(data):
                    losing.set()
                server.sendall(data)
        _close(server)

    def _answers(
        self, client: socket.socket, server: socket.socket, losing: threading.Event, answered: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if server in self._silent:
                    continue
                answered.set()
                if losing.is_set():
                    self.lost += 1
                    break
                client.sendall(data)
        _close(client)
        _close(server)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
