"""A thread with an event loop and a connection on it.

The connection is a `Connector`, and reconnects for as long as the thread lives. This module has the calls that other
threads may make.

Invariants:

- Only ``start``, ``call_soon``, ``call_and_wake``, ``stop``, ``close`` and ``join`` may be called from other threads.
- A call that ``call_soon`` accepts runs exactly once, on the I/O thread, even if the connection dies or the thread
  ends.
- When the thread has ended, every descriptor that it opened is closed.
- ``call_soon`` and the thread itself take no lock. So a signal handler may call and wait, whatever it interrupts.
- The thread is a daemon thread, and the object does nothing when it is garbage-collected. So a forked child leaves the
  parent's connection alone.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import DaemonThread
from reliable_mq.connection.pika_driver import EventLoop, Link
from reliable_mq.engine.connection import BaseConnection
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from reliable_mq.engine.connection import ConnectionArguments

logger = get_logger(__name__)

_ABORT_GRACE = 3.0  # seconds that `close` waits beyond its timeout for the thread to abort and end


class IOThread(BaseConnection):
    """A daemon thread with an event loop and a connection that reconnects.

    Construction starts and opens nothing.

    Attributes:
        ident: The identifier of the running thread, or None.
    """

    _has_connector = False

    def __init__(self, **connection: Unpack[ConnectionArguments]) -> None:
        super().__init__(**connection)
        self._name = connection["name"]
        self._lock = threading.RLock()  # to start once; signal handlers may re-enter it
        self._ended = False
        self.ident: int | None = None
        self._thread: threading.Thread | None = None
        self._loop: EventLoop

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return self._ended

    @property
    def running(self) -> bool:
        """Whether the thread runs, in this process."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def bytes_received(self) -> int:
        """The number of bytes read from the current connection so far."""
        return self._connector.bytes_received() if self._has_connector else 0

    # -- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which connects at once. Does not wait.

        Raises:
            UsageError: If the thread was started or stopped before.
            RuntimeError: If no thread can be started at the moment. This object has then ended.
        """
        with self._lock:
            if self._thread is not None or self._ended:
                raise UsageError(f"{self._name}: an I/O thread runs once")
            self._loop = EventLoop(self._on_error)
            self._connector = self._new_connector(self._loop, partial(Link, self._loop))
            self._has_connector = True
            self._loop.call_soon(self._connector.begin)
            self._thread = DaemonThread(self._name, self._main)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started at the moment, or the interpreter exits
                self._thread, self._ended = None, True
                self._loop.close()
                raise

    def call_soon(self, fn: Callable[[], None], /) -> bool:
        """Run `fn` on the I/O thread. Each call costs a wake-up write, so coalesce calls.

        Returns:
            Whether `fn` will run, exactly once. False if the thread has ended or was never started.
        """
        if self._thread is None:
            return False
        call = self._loop.call_soon(fn)
        # The thread sets `_ended` and then runs all queued calls, so a call that it missed is still queued.
        return not self._ended or not self._loop.withdraw(call)

    def stop(self, grace: float = 0.0, /) -> None:
        with self._lock:
            if self._thread is None:
                self._ended = True
        self.call_soon(lambda: self._connector.close(grace))

    def close(self, timeout: float) -> bool:
        """Stop with the grace ``timeout``, and wait for the thread to end.

        Returns:
            Whether the thread has ended, with every descriptor closed. False if a callback hangs, or on the I/O thread.
        """
        self.stop(timeout)
        return self.join(timeout + _ABORT_GRACE)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the end, and return whether it has ended.

        Returns False on the I/O thread itself.
        """
        thread = self._thread
        if thread is None:
            return self._ended
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._loop.run()
        except BaseException as error:  # with SystemExit, a thread would end in silence
            logger.exception("%s: the event loop failed", self._name)
            self._connector.crashed(error)
        finally:
            self._ended = True
            self._loop.drain()
            self._loop.close()
            self.ident = None  # another thread may get it

    def _on_ended(self) -> None:
        self._loop.stop()
