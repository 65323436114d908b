"""A proxy on loopback that fails as networks and brokers do, on demand.

For the tests of this package, and for those of services that use RabbitMQ by any library::

    with FaultProxy("amqp://guest:guest@localhost:5672/") as proxy:
        publisher = Publisher(proxy.url)
        proxy.hold_confirms()
        confirmation = publisher.submit(Message(b"..."), routing_key="orders")
        proxy.wait_for(lambda: proxy.held_confirms == 1)     # the broker has it, the publisher does not know
        proxy.cut()                                          # and now it never will, on this connection

Invariants:
- every control may be called from any thread, takes effect on the proxy's thread before the call returns (`_call`), and
  adds to the faults that are set already; `heal` removes all of them;
- frames are never torn or mixed up, unless a control says so; bytes of a connection are lost only with it;
- every wait has a deadline; the only randomness is the jitter, drawn from the seed;
- `close` leaves no thread and no file descriptor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from reliable_mq._util.threads import start_daemon
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing.faults import (
    ConfirmMode,
    CutAt,
    Direction,
    Rewrite,
    RewriteFunction,
    check_at_least_one,
    checked_direction,
    directions_of,
)
from reliable_mq.testing.frames import BODY, Frame, key_of
from reliable_mq.testing.server import Server, Upstream, count_of, server_context
from reliable_mq.tls import TLSOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike
    from types import TracebackType
    from typing import Self

__all__ = ["FaultProxy", "FaultProxyFactory"]

T = TypeVar("T")
_CONTROL_TIMEOUT: Final = 10.0
Directions = Literal["to_broker", "to_client", "both"]


class FaultProxy:
    """A proxy with faults in front of one broker. Thread-safe; a context manager.

    It listens on 127.0.0.1, on a port of its own choice that stays the same until `close`, and opens one connection to
    the broker for each that it accepts. Directions are ``"to_broker"`` (sent by the client) and ``"to_client"``.

    A broker that cannot be reached shows as a connection that is reset right after it was accepted.

    The proxy has to read the frames, so it ends TLS: with `cert_file` its clients speak ``amqps`` to it, and it speaks
    TLS to the broker of an ``amqps`` URL. A TLS connection cannot be half-closed: it ends whole.

    Args:
        url: of the broker, ``amqp[s]://user:password@host:port/vhost``; all but scheme, host and port are those of the
            attribute `url`, too.
        seed: of the jitter of `delay`.
        cert_file: PEM file with the certificate for clients, valid for 127.0.0.1; None for clients without TLS.
        key_file: PEM file with its key, if `cert_file` has none.
        tls: of connections to an ``amqps`` broker; by default the system's authorities are trusted.

    Raises:
        ConfigurationError: `url` is not an AMQP URL of one host, or a file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int = 0,
        cert_file: str | PathLike[str] | None = None,
        key_file: str | PathLike[str] | None = None,
        tls: TLSOptions | None = None,
    ) -> None:
        self._upstream = Upstream.of(url)
        self._tls = tls or TLSOptions()
        self._server_context = server_context(cert_file, key_file)
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
        state = "closed" if self._closed else "new" if self._server is None else f"127.0.0.1:{self._server.port}"
        return f"<{type(self).__name__} {state} -> {self._upstream}>"

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
        """Start listening; do nothing if it listens already.

        Raises:
            UsageError: it was closed.
            OSError: no socket can be had; the proxy is closed then.
        """
        if self._closed:
            raise UsageError("the proxy was closed; make a new one")
        if self._thread is not None:
            return
        self._server = Server(self._upstream, self._random, self._notify, self._server_context, self._tls)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = start_daemon("reliable-mq-fault-proxy", self._run, self._server, started)
        try:
            started.result(_CONTROL_TIMEOUT)
        except OSError:
            self._thread.join(_CONTROL_TIMEOUT)
            raise

    def close(self) -> None:
        """Reset every connection, stop listening, end the thread. May be called again.

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
        scheme = "amqp" if self._server_context is None else "amqps"
        return parts._replace(scheme=scheme, netloc=f"{user_info}{at}127.0.0.1:{self.port}").geturl()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1.

        Raises:
            UsageError: it is not started, or closed.
        """
        return self._open_server().port

    # observing

    def seen(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Count the frames that the proxy has read on all connections.

        Args:
            name: ``"basic.publish"`` and the like, ``"header"``, ``"body"``, ``"heartbeat"``; None for all.
            direction: None for both.

        Raises:
            ConfigurationError: there is no frame of that name.
        """
        return count_of(self._observed().seen, name, direction)

    def forwarded(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Count the frames that the proxy has written; arguments as for `seen`.

        Those of `inject` are included.
        """
        return count_of(self._observed().forwarded, name, direction)

    def forwarded_bytes(self, direction: Direction) -> int:
        """Count the bytes that the proxy has written in a direction."""
        return self._observed().forwarded_bytes[checked_direction(direction)]

    @property
    def connections(self) -> int:
        """The number of connections accepted so far."""
        return self._observed().accepted

    @property
    def live_connections(self) -> int:
        """The number of connections that are open on both sides."""
        return self._observed().live

    @property
    def held_confirms(self) -> int:
        """The number of confirms that are held; a return counts as one."""
        return self._observed().gate.held

    def wait_for(self, condition: Callable[[], object], timeout: float = 10.0, *, what: str = "the condition") -> None:
        """Block until a condition on the proxy's observations is true.

        Args:
            condition: called at first and after each change, on the calling thread, e.g.
                ``lambda: proxy.seen("basic.ack", "to_client") >= 3``. It should depend on the proxy alone, whose
                changes wake this call.
            timeout: seconds.
            what: the condition's name in the error.

        Raises:
            TimeoutError: it did not come true in time; the text lists the frames seen.
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
                            raise TimeoutError(
                                f"{what} did not come true within {timeout} s: {self._observed().summary()}"
                            )
        finally:
            with self._changed:
                self._waiters -= 1

    # cutting connections

    def cut(self, *, reset: bool = True, side: Literal["both", "client", "broker"] = "both") -> int:
        """End every connection now. Bytes that have not left the proxy are lost.

        Args:
            reset: True for a TCP reset, False for an orderly end (FIN).
            side: which end sees it. With ``"client"`` the broker's side stays open and silent until the broker gives it
                up or `heal` resets it, as when a client's host dies; with ``"broker"`` the other way round.

        Returns:
            The number of connections.
        """
        if side not in ("both", "client", "broker"):
            raise ConfigurationError(f"side is 'both', 'client' or 'broker', not {side!r}")
        return self._call(lambda server: server.cut(reset=reset, side=side))

    def cut_after(
        self, frames: int, direction: Direction, *, of: str | None = None, reset: bool = True, times: int | None = 1
    ) -> None:
        """Cut a connection right behind a frame.

        Frames are counted for each connection by itself, from now on, or from its first one if it is made later. The
        bytes before the frame are handed to the operating system before the cut; a peer may or may not read the last
        bytes before a reset, as in life.

        Args:
            frames: behind which one, from 1.
            direction: in which direction they are counted.
            of: count frames of this name only, e.g. ``"basic.publish"``.
            reset: True for a TCP reset on both sides, False for an orderly end (FIN).
            times: how many connections are cut like this; None for every one until `heal`.

        Raises:
            ConfigurationError: a value is out of range, or there is no frame of that name.
        """
        check_at_least_one(frames=frames, times=times)
        key = None if of is None else key_of(of)
        self._add_cut(direction, CutAt(lambda frame: key in (None, frame.key), frames, reset, times))

    def cut_in_body(
        self,
        share: float,
        direction: Direction = "to_broker",
        *,
        nth: int = 1,
        reset: bool = True,
        times: int | None = 1,
    ) -> None:
        """Cut a connection in the middle of a body frame, after a share of its bytes.

        Args:
            share: how much of the frame's payload leaves, at least 0 and less than 1; the frame's head always does.
            direction: in which direction.
            nth: in which body frame, from 1, counted as by `cut_after`.
            reset: as for `cut_after`.
            times: as for `cut_after`.

        Raises:
            ConfigurationError: a value is out of range.
        """
        if not 0 <= share < 1:
            raise ConfigurationError(f"share is at least 0 and less than 1, not {share!r}")
        check_at_least_one(nth=nth, times=times)
        self._add_cut(direction, CutAt(lambda frame: frame.kind == BODY, nth, reset, times, share))

    # confirms

    def hold_confirms(self) -> None:
        """Hold ``basic.ack``, ``basic.nack`` and ``basic.return`` of the broker.

        All other frames pass. Those that are held when their channel or connection closes are dropped: no broker sends
        them behind the close.
        """
        self._call(lambda server: server.set_confirms(ConfirmMode.HOLD))

    def drop_confirms(self) -> None:
        """Drop ``basic.ack``, ``basic.nack`` and ``basic.return`` of the broker.

        Confirms that are held already stay held, until `drop_held_confirms`.
        """
        self._call(lambda server: server.set_confirms(ConfirmMode.DROP))

    def release_confirms(self, count: int | None = None) -> int:
        """Send held confirms to the client, in the order in which they came.

        Args:
            count: how many; the rest, and those to come, stay held. None sends all, and ends `hold_confirms` and
                `drop_confirms`.

        Returns:
            The number sent; a return counts as one, with its content.
        """

        def release(server: Server) -> int:
            if count is None:
                server.set_confirms(ConfirmMode.PASS)
            return server.release(count)

        return self._call(release)

    def drop_held_confirms(self, count: int | None = None) -> int:
        """Drop the first `count` held confirms (None: all); return how many were dropped.

        Those to come are held as before.
        """
        return self._call(lambda server: server.drop_held(count))

    # bytes

    def black_hole(self, direction: Directions = "both", *, new_connections: bool = True) -> None:
        """Read bytes, and do not forward them, until `resume` or `heal`.

        Up to 64 MiB are read for each connection and direction. The end of a connection does not pass either: the other
        side goes on in the belief that it lives. Afterwards all of it arrives, in order, as after a network partition.

        Args:
            direction: which way, or both.
            new_connections: False to do this to the connections that are live now, and spare those to come.
        """
        self._set_conditions(direction, new_connections, black_hole=True)

    def stop_reading(self, direction: Directions = "both", *, new_connections: bool = True) -> None:
        """Read no more from the sender of a direction, until `resume` or `heal`.

        Its operating system goes on taking bytes until its send buffer and the proxy's receive buffer are full (some
        MiB on Linux); from then on its writes block.

        Args:
            direction: which way, or both.
            new_connections: False to do this to the connections that are live now, and spare those to come.
        """
        self._set_conditions(direction, new_connections, stop_reading=True)

    def resume(self, direction: Directions = "both") -> None:
        """End `black_hole` and `stop_reading`."""
        self._set_conditions(direction, black_hole=False, stop_reading=False)

    def delay(self, seconds: float, *, jitter: float = 0.0, direction: Directions = "both") -> None:
        """Let every byte arrive later. Order is kept, and the rate is not limited.

        Args:
            seconds: how much later, one way; 0 for no delay.
            jitter: by how many seconds that varies, at most, either way; at most `seconds`.
            direction: which way, or both (an answer is delayed twice).

        Raises:
            ConfigurationError: a value is out of range.
        """
        if not 0 <= jitter <= seconds:
            raise ConfigurationError(f"0 <= jitter <= seconds must hold, not {jitter!r} and {seconds!r}")
        self._set_conditions(direction, delay=seconds, jitter=jitter)

    def throttle(self, bytes_per_second: float | None, *, direction: Directions = "both") -> None:
        """Limit the rate of each connection.

        The proxy buffers little, so that the sender notices.

        Args:
            bytes_per_second: at most so many, in each direction for itself; None for no limit.
            direction: which way, or both.

        Raises:
            ConfigurationError: the rate is not above 0.
        """
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ConfigurationError(f"bytes_per_second is above 0 or None, not {bytes_per_second!r}")
        self._set_conditions(direction, rate=bytes_per_second)

    # new connections

    def refuse_connections(self) -> None:
        """Refuse new connections (ECONNREFUSED), until `accept_connections` or `heal`."""
        self._call(lambda server: server.refuse())

    def hang_connections(self) -> None:
        """Accept new connections and do not answer.

        `accept_connections` and `heal` connect them to the broker.
        """
        self._call(lambda server: server.hang())

    def accept_connections(self) -> None:
        """End `refuse_connections` and `hang_connections`."""
        self._call(lambda server: server.admit())

    def redirect(self, url: str) -> None:
        """Connect new connections to another broker. The attribute `url` does not change.

        Args:
            url: only its scheme, host and port are used.

        Raises:
            ConfigurationError: it is not an AMQP URL of one host.
        """
        upstream = Upstream.of(url)

        def redirect(server: Server) -> None:
            self._upstream = server.upstream = upstream

        self._call(redirect)

    # single frames

    def inject(self, direction: Direction, frame: Frame | bytes) -> None:
        """Put frames of your own into the most recent live connection.

        They leave at once, or right behind a content (method, header, bodies) that is incomplete in that direction. No
        frame fault is applied to them; delay, throttle and black hole are. The other end does not know of them: a
        double ``basic.ack`` to the broker makes it close the channel for real; but the client's answer to an injected
        ``channel.close`` is a breach of the protocol to the broker, which closes the connection with 503, unless
        `rewrite` makes a ``channel.close`` of that answer.

        Args:
            direction: which way.
            frame: whole frames.

        Raises:
            UsageError: no connection is live.
        """
        data = frame.raw if isinstance(frame, Frame) else frame
        checked_direction(direction)
        self._call(lambda server: server.newest().streams[direction].inject(data))

    def rewrite(self, function: RewriteFunction, direction: Directions = "both") -> Callable[[], None]:
        """Replace frames by the result of a function.

        It is called with whole frames, of every connection, on the proxy's thread: it must be quick, and may call the
        other controls, but not wait. If it raises, the connection is reset, and `wait_for` and `close` raise.

        Args:
            function: called with the direction and the frame; returns the frames that leave, none to drop it, the same
                one twice to double it; a `Cut` among them ends the connection there.
            direction: of the frames that it is called with.

        Returns:
            A call that removes the function.
        """
        faults = [Rewrite(function, one) for one in directions_of(direction)]

        def add(server: Server) -> None:
            for fault in faults:
                server.add(fault.direction, fault)

        self._call(add)
        return lambda: self._call(lambda server: server.remove(faults))

    def heal(self) -> None:
        """Remove every fault, also those that have had no effect yet.

        Held confirms and the bytes in a black hole arrive; connections that hang are connected; a side that `cut` left
        open is reset.
        """
        self._call(lambda server: server.heal())

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

    def _add_cut(self, direction: Direction, fault: CutAt) -> None:
        checked_direction(direction)
        self._call(lambda server: server.add(direction, fault))

    def _set_conditions(self, direction: Directions, new_connections: bool = True, **changes: Any) -> None:
        directions = directions_of(direction)
        self._call(lambda server: server.set_conditions(directions, new_connections, changes))


class FaultProxyFactory(Protocol):
    """The type of the fixture ``fault_proxy``, which returns a started `FaultProxy`."""

    def __call__(self, url: str, **options: Any) -> FaultProxy:
        """Make a proxy in front of the broker at `url`, with the options of `FaultProxy`."""
        ...
