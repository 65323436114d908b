"""pika's I/O loop, which callbacks do not end and signal handlers do not block.

An exception of a callback does not end the loop, and other threads wake the loop without a lock. A signal handler may
interrupt a wake-up anywhere, call the loop itself and wait for its thread. A lock held by the interrupted code would
block that thread forever.

Invariant: The descriptors of a `SelfPipe` are closed with the last reference to it. So no wake-up writes to a
descriptor that was closed and opened again for another purpose.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pika
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter, _TimerHandle

from reliable_mq._util.logs import demoted_driver_logs
from reliable_mq.connection.lookups import find_addresses
from reliable_mq.core.reconnect import AddressOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import TimerHandle
    from reliable_mq.connection.lookups import Lookup


class SelfPipe:
    """A pair of sockets, one of which the loop watches."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable. Thread-safe, and safe in signal handlers."""
        with suppress(BlockingIOError):  # the buffer is full, so the descriptor is readable anyway
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again. On the loop only."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the constructor was interrupted
            self._reader.close()
            self._writer.close()


class EventLoop(IOLoop):  # type: ignore[misc]  # pika has no types
    """pika's I/O loop, which an exception of a callback does not end.

    The loop outlives its links, so that no queued call is lost with a connection.
    """

    _callbacks: Any  # pika's queue of calls

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self.addresses = AddressOrder()  # in which links try the addresses of their hosts
        self.on_error = on_error  # called on the loop with every exception that a callback raises
        waker = SelfPipe()
        self._waker: SelfPipe | None = waker
        super().add_handler(waker.fileno(), lambda _fd, _events: waker.clear(), self.READ)

    def services(self, on_found: Callable[[list[Any]], None]) -> SelectorIOServicesAdapter:
        """Return pika's I/O services for one attempt to connect.

        `on_found` is called with the addresses of the host, in the order in which they will be tried.
        """
        return _IOServices(self, on_found)

    def call_soon(self, fn: Callable[[], None]) -> object:
        """Run `fn` on the loop; return a handle for `withdraw`.

        Thread-safe without the lock that pika's method acquires; costs one wake-up write.
        """
        call = partial(self._guard, fn)
        self._callbacks.append(call)
        waker = self._waker
        if waker is not None:
            waker.wake()
        return call

    def withdraw(self, call: object) -> bool:
        """Remove a queued call; return whether it had not begun."""
        try:
            self._callbacks.remove(call)
        except ValueError:
            return False
        return True

    def call_later(self, delay: float, fn: Callable[[], None]) -> TimerHandle:
        handle: TimerHandle = _TimerHandle(super().call_later(max(0.0, delay), partial(self._guard, fn)), self)
        return handle

    def run(self) -> None:
        """Run until `stop`. Only the poller itself can raise an exception."""
        with demoted_driver_logs(pika.__name__):
            self.start()

    def drain(self) -> None:
        """Run the queued calls, and the calls that these queue."""
        with demoted_driver_logs(pika.__name__):
            while self._callbacks:
                self._callbacks.popleft()()

    def close(self) -> None:
        """Close the descriptors of the loop itself. After `run` only."""
        waker, self._waker = self._waker, None
        if waker is not None:
            self.remove_handler(waker.fileno())
        queued = self._callbacks
        super().close()
        self._callbacks = queued  # pika sets an empty list, where `withdraw` would not find a call queued meanwhile

    # -- for pika --------------------------------------------------------------------------------------------------

    add_callback = add_callback_threadsafe = call_soon

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        super().add_handler(fd, partial(self._guard, handler), events)

    def _guard(self, callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop goes on
            self.on_error(error)


class _IOServices(SelectorIOServicesAdapter):  # type: ignore[misc]
    """pika's I/O services, with our lookups of host names.

    pika starts a thread for each, which would delay the program's end. The addresses of a host are tried in turn, also
    across links.
    """

    def __init__(self, loop: EventLoop, on_found: Callable[[list[Any]], None]) -> None:
        super().__init__(loop)
        self._loop: EventLoop
        self._on_found = on_found

    def call_later(self, delay: float, callback: Callable[[], None]) -> TimerHandle:
        return self._loop.call_later(delay, callback)

    def connect_socket(self, sock: socket.socket, resolved_addr: Any, on_done: Callable[[Any], None]) -> Any:
        self._loop.addresses.tried(resolved_addr)
        return super().connect_socket(sock, resolved_addr, on_done)

    def getaddrinfo(self, host: str, port: int, on_done: Callable[[Any], None], **_: int) -> Lookup:
        def found(result: Any) -> None:
            if isinstance(result, list):
                result = self._loop.addresses.sort(result)
                self._on_found(result)
            on_done(result)

        return find_addresses(host, port, found, self._loop.call_soon)
