"""The part of the fault proxy that every control stands on: its thread, its counters, and waiting for them.

Invariants:
- what touches a connection runs on the proxy's thread: `_call` brings it there, and returns when it has taken effect;
- a wait has a deadline, and is woken by what it waits for;
- `close` leaves no thread and no file descriptor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing.frames import key_of, name_of
from reliable_mq.testing.server import DIRECTIONS, Server

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from reliable_mq.testing.faults import Direction

__all__ = ["ProxyBase", "host_and_port", "one_direction"]

T = TypeVar("T")
_CONTROL_TIMEOUT: Final = 10.0
_DEFAULT_PORT: Final = 5672


class ProxyBase:
    """A proxy that sets no fault: its life and its observations. See `reliable_mq.testing.FaultProxy`."""

    def __init__(self, url: str, *, seed: int = 0) -> None:
        self._upstream = host_and_port(url)
        self._upstream_url = url
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._version = 0
        self._waiters = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._stop: asyncio.Event | None = None
        self._closed = False

    def __repr__(self) -> str:
        host, port = self._upstream
        state = "closed" if self._closed else "new" if self._server is None else f"127.0.0.1:{self._server.port}"
        return f"<{type(self).__name__} {state} -> {host}:{port}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UsageError:
            if error is None:
                raise

    # life

    def start(self) -> None:
        """Begin to listen. Does nothing where it does already.

        Raises:
            UsageError: it was closed.
            OSError: no socket can be had; the proxy is closed then.
        """
        if self._closed:
            raise UsageError("the proxy was closed; make a new one")
        if self._thread is not None:
            return
        self._server = Server(self._upstream, self._random, self._notify)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(self._server, started), name="reliable-mq-fault-proxy", daemon=True
        )
        self._thread.start()
        try:
            started.result(_CONTROL_TIMEOUT)
        except OSError:
            self._thread.join(_CONTROL_TIMEOUT)
            raise

    def close(self) -> None:
        """Reset every connection, stop to listen, end the thread. Does nothing where it is closed already.

        Raises:
            UsageError: a function given to `rewrite` had raised (its error is the cause), blocks, or calls this.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a rewrite function cannot close its proxy")
        first, self._closed = not self._closed, True
        if self._thread is None or self._loop is None or self._stop is None:
            return
        if first:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CONTROL_TIMEOUT)
        if self._thread.is_alive():
            raise UsageError("the proxy's thread does not end: a rewrite function blocks it")
        self._raise_failure()

    @property
    def url(self) -> str:
        """The URL to connect through the proxy.

        Raises:
            UsageError: it is not started, or closed.
        """
        parts = urlsplit(self._upstream_url)
        user_info, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user_info}{at}127.0.0.1:{self.port}").geturl()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1.

        Raises:
            UsageError: it is not started, or closed.
        """
        return self._open_server().port

    # observing

    def seen(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Count the frames that the proxy has read, on all connections, since it was started.

        Args:
            name: ``"basic.publish"`` and the like, ``"header"``, ``"body"``, ``"heartbeat"``; None for all.
            direction: None for both.

        Raises:
            ConfigurationError: there is no frame of that name.
        """
        return _count(self._observed().seen, name, direction)

    def forwarded(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Count the frames that the proxy has written, those that were put in included. Arguments as for `seen`."""
        return _count(self._observed().forwarded, name, direction)

    def forwarded_bytes(self, direction: Direction) -> int:
        """Count the bytes that the proxy has written in a direction."""
        (one,) = one_direction(direction)
        return self._observed().forwarded_bytes[one]

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        return self._observed().accepted

    @property
    def live_connections(self) -> int:
        """How many connections are open to both sides."""
        return self._observed().live

    @property
    def held_confirms(self) -> int:
        """How many confirms are held back; a return counts as one."""
        return self._observed().gate.held

    def wait_for(self, condition: Callable[[], object], timeout: float = 10.0, *, what: str = "the condition") -> None:
        """Block until something that the proxy observes is as wanted.

        Args:
            condition: asked at first and after each change, on the calling thread, e.g.
                ``lambda: proxy.seen("basic.ack", "to_client") >= 3``. It should look at nothing but the proxy, whose
                changes alone wake this call.
            timeout: seconds.
            what: what is waited for, to be named in the error.

        Raises:
            TimeoutError: it did not come true in time; says what was seen.
            UsageError: called by a rewrite function; or one has raised (its error is the cause).
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a rewrite function cannot wait")
        deadline = time.monotonic() + timeout
        with self._changed:
            self._waiters += 1
        try:
            while True:
                with self._changed:
                    version = self._version
                self._raise_failure()
                if condition():
                    return
                with self._changed:
                    while self._version == version:
                        if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                            raise TimeoutError(f"{what} did not come true within {timeout} s: {self._summary()}")
        finally:
            with self._changed:
                self._waiters -= 1

    # helpers

    def _run(self, server: Server, started: concurrent.futures.Future[None]) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            try:
                server.admit()
            except OSError as error:
                started.set_exception(error)
            else:
                started.set_result(None)
                await self._stop.wait()
            self._closed = True
            await server.close()

        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(main())

    def _notify(self) -> None:
        if self._waiters:
            with self._changed:
                self._version += 1
                self._changed.notify_all()

    def _open_server(self) -> Server:
        if self._server is None or self._closed:
            raise UsageError(
                "the proxy is closed" if self._closed else "the proxy is not started: use `with`, or start()"
            )
        return self._server

    def _observed(self) -> Server:
        if self._server is None:
            raise UsageError("the proxy was never started: use `with`, or start()")
        return self._server

    def _call(self, action: Callable[[Server], T]) -> T:
        server, loop = self._open_server(), self._loop
        if threading.current_thread() is self._thread or loop is None:
            return action(server)

        async def run() -> T:
            result = action(self._open_server())  # it may have been closed in between
            await asyncio.sleep(0)  # the sockets that the action closes are closed one turn later
            return result

        coroutine = run()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise UsageError("the proxy is closed") from error
        try:
            return future.result(_CONTROL_TIMEOUT)
        except concurrent.futures.TimeoutError as error:
            raise UsageError("the proxy's thread does not answer: a rewrite function blocks it") from error
        except concurrent.futures.CancelledError as error:
            raise UsageError("the proxy is closed") from error

    def _raise_failure(self) -> None:
        if self._server is not None and self._server.error is not None:
            error, self._server.error = self._server.error, None
            raise UsageError(f"a rewrite function raised {type(error).__name__}: {error}") from error

    def _summary(self) -> str:
        server = self._observed()
        frames = {
            direction: {name_of(key): count for key, count in dict(server.seen[direction]).items()}
            for direction in DIRECTIONS
        }
        return (
            f"{self.connections} connections, {self.live_connections} live, {self.held_confirms} confirms held, "
            f"frames seen: {frames}"
        )


def _count(counters: dict[Direction, Counter[int]], name: str | None, direction: Direction | None) -> int:
    wanted = DIRECTIONS if direction is None else one_direction(direction)
    if name is None:
        return sum(sum(counters[each].values()) for each in wanted)
    key = key_of(name)
    return sum(counters[each][key] for each in wanted)


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "amqps":
        raise ConfigurationError("the fault proxy has to read frames, so it cannot stand in front of TLS (amqps://)")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(
            "the URL's port is not a number from 1 to 65535, or there are several hosts"
        ) from error
    if parts.scheme != "amqp" or not host or "," in host:
        raise ConfigurationError("the fault proxy takes amqp://user:password@host:port/vhost, with one host")
    return host, port or _DEFAULT_PORT


def one_direction(direction: Direction) -> tuple[Direction]:
    if direction not in DIRECTIONS:
        raise ConfigurationError(f"a direction is 'to_broker' or 'to_client', not {direction!r}")
    return (direction,)
