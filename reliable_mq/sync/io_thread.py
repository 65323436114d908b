"""A thread with an event loop and a connection on it.

The connection reconnects for as long as the thread lives. The calls that other threads may make are here; the
connection itself is a `Connector`.

Invariants:

- Only ``start``, ``call_soon``, ``stop``, ``close`` and ``join`` may be called from other threads.
- A call that ``call_soon`` accepts runs exactly once, on the I/O thread, also when the connection dies and when the
  thread ends.
- When the thread has ended, every descriptor that it opened is closed.
- ``call_soon`` and the thread itself take no lock: a signal handler may call and wait, whatever it interrupts.
- It is a daemon thread, and the object does nothing when it is collected: a forked child leaves the parent's
  connection alone.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq.connection.connection import Connector
from reliable_mq.connection.interfaces import ConnectionListener, TimerHandle
from reliable_mq.connection.pika_driver import EventLoop, Link
from reliable_mq.core.statistics import TokenStatistics
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.reconnect import ReconnectPolicy
    from reliable_mq.settings import ConnectionSettings, Endpoint

__all__ = ["ConnectionListener", "IOThread", "TimerHandle"]

logger = logging.getLogger(__name__)

_ABORT_GRACE = 3.0  # seconds that `close` waits beyond its timeout for the thread to abort and end


class IOThread:
    """A daemon thread with an event loop and a connection, which reconnects.

    Construction starts and opens nothing.

    Args:
        name: of the thread, and of the connection unless `settings` has one.
        settings: hosts, credentials, TLS, tuning.
        setup: called once per attempt: the steps to perform before the channel is ready.
        client: the owner; receives every event.
        reconnect_policy: decides when to try which host again; this connection's alone.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: ConnectionListener,
        reconnect_policy: ReconnectPolicy,
    ) -> None:
        self._name = name
        self._make_connector = partial(
            Connector,
            name=name,
            settings=settings,
            setup=setup,
            client=client,
            reconnect_policy=reconnect_policy,
            on_ended=self._stop_loop,
        )
        self._lock = threading.RLock()  # to start once; again by a signal handler
        self._ended = False
        self._thread: threading.Thread | None = None
        self._loop: EventLoop
        self._connector: Connector

    @property
    def patience(self) -> float:
        """Seconds left for the broker's next answer in a set-up under way."""
        return self._connector.patience if self._thread is not None else 0.0

    @property
    def callback_errors(self) -> int:
        """Exceptions that callbacks raised; each cost a connection."""
        return self._connector.callback_errors if self._thread is not None else 0

    @property
    def tokens(self) -> TokenStatistics:
        """Counts of renewed tokens."""
        return self._connector.tokens if self._thread is not None else TokenStatistics()

    @property
    def peer(self) -> Endpoint | None:
        """The address of the host that it was connected to last."""
        return self._connector.peer if self._thread is not None else None

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return self._ended

    # -- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which connects at once. Does not wait.

        Raises:
            UsageError: it was started or stopped before.
        """
        with self._lock:
            if self._thread is not None or self._ended:
                raise UsageError(f"{self._name}: an I/O thread runs once")
            self._loop = EventLoop(self._on_error)
            self._connector = self._make_connector(self._loop, partial(Link, self._loop))
            self._loop.call_soon(self._connector.begin)
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()

    def call_soon(self, fn: Callable[[], None]) -> bool:
        """Run `fn` on the I/O thread. One wake-up write for each call: coalesce.

        Returns:
            Whether `fn` will run, exactly once; False if the thread has ended or was never started.
        """
        if self._thread is None:
            return False
        call = self._loop.queue(fn)
        # The thread sets `_ended`, and then runs all queued calls: a call that it has missed is still queued.
        return not self._ended or not self._loop.withdraw(call)

    def stop(self, grace: float = 0.0) -> None:
        """Begin to close: a handshake for up to `grace` seconds, then an abort."""
        with self._lock:
            if self._thread is None:
                self._ended = True
        self.call_soon(lambda: self._connector.close(grace))

    def close(self, timeout: float) -> bool:
        """Stop with that grace, and wait for the thread, which may not be this one.

        Returns:
            Whether the thread has ended, with every descriptor closed; False if a callback hangs, or on the I/O thread.
        """
        self.stop(timeout)
        return self.join(timeout + _ABORT_GRACE)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the end; return whether it has ended.

        False on the thread itself.
        """
        thread = self._thread
        if thread is None:
            return self._ended
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    # -- I/O thread only -------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send whole frames in one piece; do nothing while no channel is ready."""
        self._connector.write(data)

    def write_buffer_size(self) -> int:
        """Return the bytes that the kernel has not taken yet."""
        return self._connector.write_buffer_size()

    def call_later(self, delay: float, fn: Callable[[], None]) -> TimerHandle:
        """Run `fn` in `delay` seconds, unless the thread ends before."""
        return self._loop.call_later(delay, fn)

    def run(self, generator: StepGenerator, done: Callable[[Any], None]) -> None:
        """Perform steps on the ready channel; see `Connector.run`."""
        self._connector.run(generator, done)

    def discard(self, reason: str) -> None:
        """Abort the connection: its channel is in doubt. ``lost`` and a reconnect follow."""
        self._connector.discard(reason)

    def reopen_channel(self) -> None:
        """Close the channel; ``lost`` follows, then another one on this connection."""
        self._connector.reopen_channel()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._loop.run()
        except Exception as error:
            logger.exception("%s: the event loop failed", self._name)
            self._connector.crashed(error)
        finally:
            self._ended = True
            self._loop.drain()
            self._loop.close()

    def _on_error(self, error: Exception) -> None:
        self._connector.on_error(error)

    def _stop_loop(self) -> None:
        self._loop.stop()
