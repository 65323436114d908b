"""Wakes up an event loop from any thread, without a lock.

A signal handler may interrupt a wake-up anywhere, call the loop itself and wait for its thread: a lock held by what it
interrupted would keep that thread from ever answering.

Invariant: the descriptors stay open as long as anybody refers to the waker, so that none that was closed, and opened
again for something else, is ever written to; they are closed with the last reference.
"""

from __future__ import annotations

import socket
from contextlib import suppress

__all__ = ["Waker"]


class Waker:
    """A pair of sockets of which the loop watches one."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make it readable. Thread-safe, and safe in signal handlers."""
        with suppress(BlockingIOError):  # it is readable many times over
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make it unreadable again. On the loop only."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def __del__(self) -> None:
        with suppress(AttributeError):  # its making was interrupted
            self._reader.close()
            self._writer.close()
