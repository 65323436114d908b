"""The base of a publisher's or consumer's connection in both APIs.

A `Connector` makes the decisions. Each API adds the event loop (an I/O thread's or asyncio's) and a way to wait for the
end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from reliable_mq.connection.connection import Connector
from reliable_mq.core.statistics import TokenStatistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from reliable_mq.connection.interfaces import ConnectionListener, EventLoop, TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.reconnect import ReconnectPolicy
    from reliable_mq.settings import ConnectionSettings, Endpoint


class ConnectionArguments(TypedDict):
    """The arguments of `Connector` that both APIs pass.

    An I/O thread has the same ``name``.
    """

    name: str
    settings: ConnectionSettings
    setup: Callable[[ServerInfo], SetupGenerator]
    client: ConnectionListener
    reconnect_policy: ReconnectPolicy


class BaseConnection:
    """A connection on an event loop that reconnects until it is closed.

    Construction opens nothing. Methods must be called on the loop unless they are listed under "any thread".

    Attributes:
        write: A callable that sends whole frames in one piece. It does nothing while no channel is ready.
        write_buffer_size: A callable that returns the number of bytes that the kernel has not taken yet, or
            `TAKES_NOTHING` if ``write`` does nothing.
    """

    write: Callable[[bytes], None]
    write_buffer_size: Callable[[], int]

    _connector: Connector
    _loop: EventLoop
    _has_connector = True

    def __init__(self, **connection: Unpack[ConnectionArguments]) -> None:
        self._new_connector = partial(Connector, output=self, on_ended=self._on_ended, **connection)

    # -- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect. Does not wait."""
        raise NotImplementedError

    def call_soon(self, fn: Callable[[], None], /) -> object:
        """Run `fn` on the loop, after the current call."""
        raise NotImplementedError

    def call_and_wake(self, fn: Callable[[], None], /) -> object:
        """Run `fn` like `call_soon`, and wake the loop for it even from a signal handler."""
        return self.call_soon(fn)

    def stop(self, grace: float = 0.0, /) -> None:
        """Begin to close: a handshake for up to `grace` seconds, then an abort."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Whether the loop has ended."""
        raise NotImplementedError

    @property
    def stalled_seconds(self) -> float | None:
        """The seconds for which the event loop was blocked. None for an I/O thread."""
        return None

    @property
    def patience(self) -> float:
        """The seconds left for the broker's next answer in the current set-up."""
        return self._connector.patience if self._has_connector else 0.0

    @property
    def callback_errors(self) -> int:
        """The number of exceptions raised by callbacks. Each one cost a connection."""
        return self._connector.callback_errors if self._has_connector else 0

    @property
    def tokens(self) -> TokenStatistics:
        """The counts of renewed tokens."""
        return self._connector.tokens if self._has_connector else TokenStatistics()

    @property
    def peer(self) -> Endpoint | None:
        """The address of the last connected host."""
        return self._connector.peer if self._has_connector else None

    # -- on the loop -----------------------------------------------------------------------------------------------

    @property
    def tries_several_addresses(self) -> bool:
        """Whether the last host has several addresses, which may be different nodes."""
        return self._loop.addresses.several

    def call_later(self, delay: float, fn: Callable[[], None]) -> TimerHandle:
        """Run `fn` in `delay` seconds, unless the loop ends first.

        An exception in `fn` costs the connection.
        """
        return self._loop.call_later(delay, fn)

    def run(
        self, generator: StepGenerator, done: Callable[[Any], None], in_line: Callable[[], bool] = lambda: False
    ) -> None:
        """Perform steps on the ready channel, as `Connector.run` does."""
        self._connector.run(generator, done, in_line)

    def discard(self, reason: str) -> None:
        """Abort the connection with its doubtful channel. ``lost`` and a reconnect follow."""
        self._connector.discard(reason)

    def reopen_channel(self) -> None:
        """Close the channel. ``lost`` and a new channel on this connection follow."""
        self._connector.reopen_channel()

    def _on_ended(self) -> None:
        """Note that the connection is closed permanently."""
        raise NotImplementedError

    def _on_error(self, error: Exception) -> None:
        self._connector.on_error(error)


class Wakeup:
    """A timer that calls a function at a given time. For one event loop only.

    Args:
        fn: The function to call. It may set the wake-up again.
    """

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._timer: TimerHandle | None = None
        self._at = 0.0

    def set(self, at: float | None, now: float, call_later: Callable[[float, Callable[[], None]], TimerHandle]) -> None:
        """Schedule the call for ``at``, unless a call is scheduled earlier.

        ``at`` is on the same clock as ``now``. None does nothing.
        """
        if at is None or (self._timer is not None and self._at <= at):
            return
        self.cancel()
        self._at = at
        self._timer = call_later(max(at - now, 0.0), self._call)

    def cancel(self) -> None:
        """Cancel the call, if one is scheduled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self._fn()
