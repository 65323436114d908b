"""The proxy's listening socket, its connections, and the current faults.

Invariants:
- All code in this module runs on the proxy's thread. Other threads may only read the counters, `live` and `held`.
- The listening address never changes. While connections are refused, a bound socket that does not listen keeps it.
- After `close`, no socket and no task is left.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing.connection import ProxiedConnection
from reliable_mq.testing.faults import (
    DIRECTIONS,
    ConfirmGate,
    ConfirmMode,
    Direction,
    FrameFault,
    LinkConditions,
    checked_direction,
)
from reliable_mq.testing.frames import key_of, name_of
from reliable_mq.tls import server_hostname
from reliable_mq.url import split_user

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from reliable_mq.tls import TLSOptions

_CONNECT_TIMEOUT: Final = 10.0
_BACKLOG: Final = 128
_DEFAULT_PORTS: Final = {"amqp": 5672, "amqps": 5671}
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The address of the broker, and whether it uses TLS."""

    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> Upstream:
        """Return the address in a URL.

        Raises:
            ConfigurationError: If `url` is not an AMQP URL with one host.
        """
        location, _ = split_user(url)
        try:
            parts = urlsplit(location)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(
                "the URL's host is malformed, its port is not a number from 1 to 65535, or there are several hosts"
            ) from error
        if parts.scheme not in _DEFAULT_PORTS or not host or "," in host:
            raise ConfigurationError("the fault proxy takes amqp[s]://user:password@host:port/vhost, with one host")
        return cls(host, port or _DEFAULT_PORTS[parts.scheme], parts.scheme == "amqps")


class Server:
    """The listening socket and the state of all connections."""

    def __init__(
        self,
        upstream: Upstream,
        random: random.Random,
        changed: Callable[[], None],
        context: ssl.SSLContext | None,
        tls: TLSOptions,
    ) -> None:
        self._context = context
        self._tls = tls
        self.upstream = upstream
        self.random = random
        self.changed = changed
        self.seen: dict[Direction, Counter[int]] = {direction: Counter() for direction in DIRECTIONS}
        self.forwarded: dict[Direction, Counter[int]] = {direction: Counter() for direction in DIRECTIONS}
        self.forwarded_bytes: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self.faults: dict[Direction, list[FrameFault]] = {direction: [] for direction in DIRECTIONS}
        self.gate = ConfirmGate()
        self.accepted = 0
        self.error: BaseException | None = None
        self._conditions: dict[Direction, LinkConditions] = {direction: LinkConditions() for direction in DIRECTIONS}
        self._connections: dict[int, ProxiedConnection] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._admitting = asyncio.Event()
        self._one_ended = asyncio.Event()
        self._listener: socket.socket | None = None
        self._keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind(("127.0.0.1", 0))
        self.port: int = self._keeper.getsockname()[1]
        _servers.add(self)

    async def close(self) -> None:
        self.refuse()
        self._keeper.close()
        opening = tuple(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in tuple(self._connections.values()):
            connection.cut(reset=True)
        while self._connections:
            self._one_ended.clear()
            await self._one_ended.wait()

    def _forget(self) -> None:
        """Close the sockets' copies in a forked child.

        Their numbers stay in use, because objects of the parent, which also exist in the child, close them again.
        """
        numbers = [own.fileno() for own in (self._keeper, self._listener) if own is not None]
        for connection in self._connections.values():
            numbers += [connection.client.descriptor, connection.broker.descriptor]
        with Path(os.devnull).open("rb") as null:
            for number in numbers:
                if number >= 0:
                    os.dup2(null.fileno(), number)

    # connections

    @property
    def live(self) -> int:
        """The number of connections that are open on both sides."""
        return sum(connection.live for connection in list(self._connections.values()))

    def summary(self) -> str:
        """Return the counts of connections, held confirms and frames, for error messages."""
        frames = {
            direction: {name_of(key): count for key, count in dict(self.seen[direction]).items()}
            for direction in DIRECTIONS
        }
        return f"{self.accepted} connections, {self.live} live, {self.gate.held} confirms held, frames seen: {frames}"

    def admit(self) -> None:
        """Accept connections and connect them to the broker, also those that hang."""
        self._listen()
        self._admitting.set()

    def hang(self) -> None:
        """Accept connections without connecting them to the broker."""
        self._listen()
        self._admitting.clear()

    def refuse(self) -> None:
        """Stop listening, so that the operating system refuses connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def newest(self) -> ProxiedConnection:
        """Return the most recent live connection.

        Raises:
            UsageError: If no connection is live.
        """
        for connection in reversed(self._connections.values()):
            if connection.live:
                return connection
        raise UsageError("no connection through the proxy is live")

    def cut(self, *, reset: bool, side: str) -> int:
        """End every connection, or one side of each. Return the number of connections."""
        connections = [connection for connection in self._connections.values() if not connection.closing]
        for connection in connections:
            if side == "both" or not connection.connected:
                connection.cut(reset=reset)
            else:
                connection.cut_side(connection.client if side == "client" else connection.broker, reset=reset)
        return len(connections)

    def failed(self, error: BaseException) -> None:
        """Store the first error of a user's function for the next wait or close."""
        if self.error is None:
            self.error = error
        self.changed()

    def ended(self, connection: ProxiedConnection) -> None:
        """Forget a connection whose sockets are both closed."""
        self._connections.pop(connection.number, None)
        self._one_ended.set()
        task = self._opening.get(connection.number)
        if task is not None:
            task.cancel()
        self.gate.forget(connection.number)

    # faults

    def set_conditions(
        self, directions: Iterable[Direction], new_connections: bool, changes: Mapping[str, Any]
    ) -> None:
        """Change all connections, and with `new_connections` also later ones."""
        for direction in directions:
            if new_connections:
                self._conditions[direction] = replace(self._conditions[direction], **changes)
            for connection in tuple(self._connections.values()):
                stream = connection.streams[direction]
                stream.set_conditions(replace(stream.conditions, **changes))

    def add(self, direction: Direction, fault: FrameFault) -> None:
        self.faults[direction].append(fault)

    def remove(self, unwanted: Iterable[FrameFault]) -> None:
        for direction in DIRECTIONS:
            self.faults[direction][:] = [fault for fault in self.faults[direction] if fault not in unwanted]

    def set_confirms(self, mode: ConfirmMode) -> None:
        """Set the treatment of the broker's confirms from now on."""
        self.gate.mode = mode
        if self.gate not in self.faults["to_client"]:
            self.add("to_client", self.gate)

    def release(self, count: int | None) -> int:
        passed = (*takewhile(lambda fault: fault is not self.gate, self.faults["to_client"]), self.gate)
        released = self.gate.release(count)
        for number, frames in released:
            self._connections[number].streams["to_client"].release(frames, passed)
        self.changed()
        return len(released)

    def drop_held(self, count: int | None) -> int:
        dropped = self.gate.drop(count)
        self.changed()
        return dropped

    def heal(self) -> None:
        """Remove every fault, and send all held frames and bytes."""
        for direction in DIRECTIONS:
            self.faults[direction][:] = []
            self._conditions[direction] = LinkConditions()
        self.set_confirms(ConfirmMode.PASS)
        self.release(None)
        for connection in tuple(self._connections.values()):
            if connection.orphaned:
                connection.cut(reset=True)
                continue
            for stream in connection.streams.values():
                stream.set_conditions(LinkConditions())
        self.admit()

    # listening

    def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = self._listener = socket.create_server(("127.0.0.1", self.port), backlog=_BACKLOG)
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        self.accepted += 1
        connection = ProxiedConnection(self.accepted, self, self._conditions)
        self._connections[connection.number] = connection
        task = asyncio.get_running_loop().create_task(self._open(connection, client))
        self._opening[connection.number] = task
        # The clean-up is a callback, because a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda _: self._opened(connection, client))
        self.changed()

    async def _open(self, connection: ProxiedConnection, client: socket.socket) -> None:
        loop, upstream = asyncio.get_running_loop(), self.upstream
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await loop.connect_accepted_socket(lambda: connection.client, client, ssl=self._context)
        except OSError as error:  # the TLS handshake failed or took too long
            logger.info("refused the client of connection %d: %s", connection.number, error)
            return
        await self._admitting.wait()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await loop.create_connection(lambda: connection.broker, upstream.host, upstream.port, **self._secured())
        # OSError: also a timeout. UnicodeError: an invalid host name. ConfigurationError: a missing file for TLS.
        except (OSError, UnicodeError, ConfigurationError) as error:
            logger.info("cannot reach the broker at %s: %s", upstream, error)
            connection.cut(reset=True)
        else:
            connection.start()

    def _secured(self) -> dict[str, Any]:
        """Return asyncio's TLS options for a connection to the broker."""
        if not self.upstream.secure:
            return {}
        return {"ssl": self._tls.build_context(), "server_hostname": server_hostname(self._tls, self.upstream.host)}

    def _opened(self, connection: ProxiedConnection, client: socket.socket) -> None:
        del self._opening[connection.number]
        if not connection.client.opened:
            client.close()
            del self._connections[connection.number]


# The thread does not exist in a forked child, whose copies of the sockets would keep the connections and the port open.
_servers = each_at_fork(ForkStage.RELEASE, Server._forget)  # noqa: SLF001  # of this module


def count_of(counters: dict[Direction, Counter[int]], name: str | None, direction: Direction | None) -> int:
    """Return the number of frames with a name (None: all) in a direction (None: both)."""
    wanted = DIRECTIONS if direction is None else (checked_direction(direction),)
    if name is None:
        return sum(sum(counters[each].values()) for each in wanted)
    key = key_of(name)
    return sum(counters[each][key] for each in wanted)


def server_context(
    cert_file: str | PathLike[str] | None, key_file: str | PathLike[str] | None
) -> ssl.SSLContext | None:
    """Return the TLS context for clients, or None without a certificate."""
    if cert_file is None:
        if key_file is not None:
            raise ConfigurationError("key_file is given without cert_file: a key is of no use alone")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigurationError(f"cert_file and key_file are not a certificate with its key: {error}") from error
    return context
