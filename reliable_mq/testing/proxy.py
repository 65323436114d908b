"""A proxy on loopback that fails on demand, as networks and brokers do.

It serves the tests of this package, and of services that use RabbitMQ through any library::

    with FaultProxy("amqp://guest:guest@localhost:5672/") as proxy:
        publisher = Publisher(proxy.url)
        proxy.hold_confirms()
        confirmation = publisher.submit(Message(b"..."), routing_key="orders")
        proxy.wait_for(lambda: proxy.held_confirms == 1)     # the broker has it, the publisher does not know
        proxy.cut()                                          # and now it never will, on this connection

Invariants:
- Any thread may call a control. The control takes effect on the proxy's thread before the call returns (`_call`), and
  adds to the faults that are already set. `heal` removes all faults.
- Frames are never torn or reordered unless a control does this. Bytes of a connection are lost only with it.
- Every wait has a deadline. The only randomness is the jitter, which is drawn from the seed.
- `close` leaves no thread and no file descriptor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from reliable_mq._util.threads import start_daemon
from reliable_mq._util.validation import whole_number
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.testing.faults import (
    ConfirmMode,
    CutAt,
    Direction,
    Rewrite,
    RewriteFunction,
    checked_direction,
    directions_of,
)
from reliable_mq.testing.frames import BODY, Frame, key_of
from reliable_mq.testing.server import Server, Upstream, count_of, server_context
from reliable_mq.tls import TLSOptions
from reliable_mq.url import split_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike
    from types import TracebackType
    from typing import Self

T = TypeVar("T")
_CONTROL_TIMEOUT: Final = 10.0
Directions = Literal["to_broker", "to_client", "both"]


class FaultProxy:
    """A proxy with faults in front of one broker. Thread-safe. A context manager.

    The proxy listens on 127.0.0.1, on a free port that stays the same until `close`. It opens one connection to the
    broker for each accepted connection. Directions are ``"to_broker"`` (sent by the client) and ``"to_client"``.

    If the broker cannot be reached, each connection is reset right after it was accepted.

    The proxy must read the frames, so it terminates TLS. With `cert_file`, clients connect to the proxy with ``amqps``.
    The proxy connects with TLS to the broker of an ``amqps`` URL. A TLS connection cannot be half-closed.

    Args:
        url: The URL of the broker, ``amqp[s]://user:password@host:port/vhost``. The attribute `url` differs only in
            scheme, host and port.
        seed: The seed for the jitter of `delay`.
        cert_file: A PEM file with the certificate for clients, valid for 127.0.0.1, or None for clients without TLS.
        key_file: A PEM file with the certificate's key, if `cert_file` does not have it.
        tls: The TLS options for an ``amqps`` broker. By default, the system's authorities are trusted.

    Raises:
        ConfigurationError: If `url` is not an AMQP URL with one host, or a file cannot be used.
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
        self._waiting: list[threading.Event] = []  # one for each `wait_for`, set by a change
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
        """Start to listen, unless the proxy already listens.

        Raises:
            UsageError: If the proxy was closed.
            OSError: If a socket cannot be opened. If listening fails, the proxy is closed.
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
        """Reset every connection, stop listening, end the thread. Repeated calls are safe.

        Raises:
            UsageError: If a function given to `rewrite` raised an error (which is the cause), blocks, or calls this.
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
            UsageError: If the proxy is not started or is closed.
        """
        location, user = split_user(self._upstream_url)
        scheme = "amqp" if self._server_context is None else "amqps"
        return urlsplit(location)._replace(scheme=scheme, netloc=f"{user}127.0.0.1:{self.port}").geturl()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1.

        Raises:
            UsageError: If the proxy is not started or is closed.
        """
        return self._open_server().port

    # observing

    def seen(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Return the number of frames that the proxy has read on all connections.

        Args:
            name: A method like ``"basic.publish"``, or ``"header"``, ``"body"`` or ``"heartbeat"``. None for all.
            direction: The direction, or None for both.

        Raises:
            ConfigurationError: If no frame has this name.
        """
        return count_of(self._observed().seen, name, direction)

    def forwarded(self, name: str | None = None, direction: Direction | None = None) -> int:
        """Return the number of frames that the proxy has written.

        The arguments are those of `seen`. Frames of `inject` are included.
        """
        return count_of(self._observed().forwarded, name, direction)

    def forwarded_bytes(self, direction: Direction) -> int:
        """Return the number of bytes that the proxy has written in a direction."""
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
        """The number of held confirms. A return counts as one."""
        return self._observed().gate.held

    def wait_for(self, condition: Callable[[], object], timeout: float = 10.0, *, what: str = "the condition") -> None:
        """Block until a condition on the proxy's observations is true.

        Args:
            condition: A function that is called at once and after each change, on the calling thread, for example
                ``lambda: proxy.seen("basic.ack", "to_client") >= 3``. It should depend only on the proxy, because only
                changes of the proxy wake this call.
            timeout: The maximum wait, in seconds.
            what: The condition's name for the error message.

        Raises:
            TimeoutError: If the condition is not true within `timeout`. The message lists the frames seen.
            UsageError: If a rewrite function calls this, or raised an error (which is the cause).
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a rewrite function cannot wait")
        deadline = time.monotonic() + timeout
        changed = threading.Event()
        self._waiting.append(changed)
        try:
            while True:
                changed.clear()
                late = time.monotonic() >= deadline
                self._raise_failure()
                if condition():
                    return
                if late or not changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{what} did not come true within {timeout} s: {self._observed().summary()}")
        finally:
            self._waiting.remove(changed)

    # cutting connections

    def cut(self, *, reset: bool = True, side: Literal["both", "client", "broker"] = "both") -> int:
        """End every connection now. Bytes that have not left the proxy are lost.

        Held confirms are among these bytes.

        Args:
            reset: True for a TCP reset, False for an orderly end (FIN).
            side: The side that is cut. With ``"client"``, the broker's side stays open and silent until the broker
                gives up or `heal` resets it, as when a client's host dies. ``"broker"`` is the reverse.

        Returns:
            The number of connections.
        """
        if side not in ("both", "client", "broker"):
            raise ConfigurationError(f"side is 'both', 'client' or 'broker', not {side!r}")
        return self._call(lambda server: server.cut(reset=reset, side=side))

    def cut_after(
        self, frames: int, direction: Direction, *, of: str | None = None, reset: bool = True, times: int | None = 1
    ) -> None:
        """Cut a connection right after a frame.

        Frames are counted separately for each connection, from now on, or from the first frame of a later connection.
        All bytes up to the cut are passed to the operating system first. As in real networks, the peer may or may not
        read the last bytes before a reset.

        Args:
            frames: The number of the frame after which the connection is cut, from 1.
            direction: The direction in which frames are counted.
            of: The name of the frames to count, for example ``"basic.publish"``, or None for all frames.
            reset: True for a TCP reset on both sides, False for an orderly end (FIN).
            times: The number of connections to cut, or None for every connection until `heal`.

        Raises:
            ConfigurationError: If a value is out of range, or no frame has this name.
        """
        whole_number("frames", frames, 1)
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
            share: The share of the frame's payload that leaves, at least 0 and less than 1. The frame's head always
                leaves.
            direction: The direction of the body frame.
            nth: The number of the body frame, from 1, counted as by `cut_after`.
            reset: As for `cut_after`.
            times: As for `cut_after`.

        Raises:
            ConfigurationError: If a value is out of range.
        """
        if not 0 <= share < 1:
            raise ConfigurationError(f"share is at least 0 and less than 1, not {share!r}")
        whole_number("nth", nth, 1)
        self._add_cut(direction, CutAt(lambda frame: frame.kind == BODY, nth, reset, times, share))

    # confirms

    def hold_confirms(self) -> None:
        """Hold ``basic.ack``, ``basic.nack`` and ``basic.return`` of the broker.

        All other frames pass. Held frames are dropped when their channel or connection closes, because no broker sends
        them after the close. Released frames pass the faults that were set after the hold.
        """
        self._call(lambda server: server.set_confirms(ConfirmMode.HOLD))

    def drop_confirms(self) -> None:
        """Drop ``basic.ack``, ``basic.nack`` and ``basic.return`` of the broker.

        Confirms that are already held stay held until `release_confirms` or `drop_held_confirms`.
        """
        self._call(lambda server: server.set_confirms(ConfirmMode.DROP))

    def release_confirms(self, count: int | None = None) -> int:
        """Send held confirms to the client, in the order in which they came.

        Args:
            count: The maximum number to send. The rest stays held, and later confirms are treated as before. None sends
                all and ends `hold_confirms` and `drop_confirms`.

        Returns:
            The number of confirms released. A return with its content counts as one.
        """

        def release(server: Server) -> int:
            if count is None:
                server.set_confirms(ConfirmMode.PASS)
            return server.release(count)

        return self._call(release)

    def drop_held_confirms(self, count: int | None = None) -> int:
        """Drop the first `count` held confirms (None: all). Return the number dropped.

        Later confirms are treated as before.
        """
        return self._call(lambda server: server.drop_held(count))

    # bytes

    def black_hole(self, direction: Directions = "both", *, new_connections: bool = True) -> None:
        """Read bytes without forwarding them, until `resume` or `heal`.

        The proxy reads up to 64 MiB for each connection and direction. The end of a connection does not pass either, so
        the other side does not notice it. Afterwards, everything arrives in order, as after a network partition.

        Args:
            direction: The direction, or ``"both"``.
            new_connections: False to affect only the current connections, and no later ones.
        """
        self._set_conditions(direction, new_connections, black_hole=True)

    def stop_reading(self, direction: Directions = "both", *, new_connections: bool = True) -> None:
        """Stop reading from the sender of a direction, until `resume` or `heal`.

        The sender's operating system accepts bytes until its send buffer and the proxy's receive buffer are full (some
        MiB on Linux). Then the sender's writes block.

        Args:
            direction: The direction, or ``"both"``.
            new_connections: False to affect only the current connections, and no later ones.
        """
        self._set_conditions(direction, new_connections, stop_reading=True)

    def resume(self, direction: Directions = "both") -> None:
        """End `black_hole` and `stop_reading`."""
        self._set_conditions(direction, black_hole=False, stop_reading=False)

    def delay(self, seconds: float, *, jitter: float = 0.0, direction: Directions = "both") -> None:
        """Delay every byte. The order is kept, and the rate is not limited.

        Args:
            seconds: The delay in one direction, in seconds. 0 for no delay.
            jitter: The maximum deviation from the delay in either direction, in seconds. At most `seconds`.
            direction: The direction, or ``"both"``, which delays a request and its reply.

        Raises:
            ConfigurationError: If a value is out of range.
        """
        if not 0 <= jitter <= seconds:
            raise ConfigurationError(f"0 <= jitter <= seconds must hold, not {jitter!r} and {seconds!r}")
        self._set_conditions(direction, delay=seconds, jitter=jitter)

    def throttle(self, bytes_per_second: float | None, *, direction: Directions = "both") -> None:
        """Limit the rate of each connection.

        The proxy and its sockets buffer little, so the sender notices the limit. Its own operating system accepts some
        MB at once.

        Args:
            bytes_per_second: The maximum rate, in bytes per second for each direction, or None for no limit.
            direction: The direction, or ``"both"``.

        Raises:
            ConfigurationError: If the rate is not a finite number above 0.
        """
        if bytes_per_second is not None and not 0 < bytes_per_second < math.inf:
            raise ConfigurationError(f"bytes_per_second is a finite number above 0, or None, not {bytes_per_second!r}")
        self._set_conditions(direction, rate=bytes_per_second)

    # new connections

    def refuse_connections(self) -> None:
        """Refuse new connections (ECONNREFUSED), until `accept_connections` or `heal`."""
        self._call(lambda server: server.refuse())

    def hang_connections(self) -> None:
        """Accept new connections but do not answer, except in a TLS handshake.

        `accept_connections` and `heal` connect them to the broker.
        """
        self._call(lambda server: server.hang())

    def accept_connections(self) -> None:
        """End `refuse_connections` and `hang_connections`."""
        self._call(lambda server: server.admit())

    def redirect(self, url: str) -> None:
        """Connect new connections to another broker. The attribute `url` does not change.

        Args:
            url: The URL of the broker, of which only scheme, host and port are used.

        Raises:
            ConfigurationError: If `url` is not an AMQP URL with one host.
        """
        upstream = Upstream.of(url)

        def redirect(server: Server) -> None:
            self._upstream = server.upstream = upstream

        self._call(redirect)

    # single frames

    def inject(self, direction: Direction, frame: Frame | bytes) -> None:
        """Insert your own frames into the most recent live connection.

        The frames leave at once, or after a content (method, header, bodies) that is incomplete in that direction. No
        frame fault applies to them, but delay, throttle and black hole do. The other end does not know of them. For
        example, the broker really closes the channel after a double ``basic.ack``. But the client's reply to an
        injected ``channel.close`` violates the protocol for the broker, which closes the connection with 503, unless
        `rewrite` turns that reply into a ``channel.close``.

        Args:
            direction: The direction.
            frame: One frame, or the bytes of whole frames.

        Raises:
            UsageError: If no connection is live.
        """
        data = frame.raw if isinstance(frame, Frame) else frame
        checked_direction(direction)
        self._call(lambda server: server.newest().streams[direction].inject(data))

    def rewrite(self, function: RewriteFunction, direction: Directions = "both") -> Callable[[], None]:
        """Replace frames with the result of a function.

        The function is called on the proxy's thread with each whole frame of every connection. It must be quick, and
        may call other controls, but must not wait. If it raises, the connection is reset, and `wait_for` and `close`
        raise.

        Args:
            function: A function that takes the direction and the frame, and returns the frames that leave: none to drop
                the frame, the same frame twice to duplicate it. A `Cut` ends the connection at that place.
            direction: The direction of the frames, or ``"both"``.

        Returns:
            A function that removes `function`.
        """
        faults = [Rewrite(function, one) for one in directions_of(direction)]

        def add(server: Server) -> None:
            for fault in faults:
                server.add(fault.direction, fault)

        self._call(add)
        return lambda: self._call(lambda server: server.remove(faults))

    def heal(self) -> None:
        """Remove every fault, including faults that have had no effect.

        Held confirms and the bytes in a black hole arrive. Hanging connections are connected to the broker. A side that
        `cut` left open is reset. A `redirect` stays, because it is not a fault.
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
        for changed in tuple(self._waiting):
            changed.set()

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
            result = action(self._open_server())  # the proxy may have been closed in between
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
        if fault.times is not None:
            whole_number("times", fault.times, 1)
        self._call(lambda server: server.add(direction, fault))

    def _set_conditions(self, direction: Directions, new_connections: bool = True, **changes: Any) -> None:
        directions = directions_of(direction)
        self._call(lambda server: server.set_conditions(directions, new_connections, changes))


class FaultProxyFactory(Protocol):
    """The type of the fixture ``fault_proxy``, which returns a started `FaultProxy`."""

    def __call__(self, url: str, **options: Any) -> FaultProxy:
        """Start a proxy for the broker at `url`, with the options of `FaultProxy`."""
        ...
