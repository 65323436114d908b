"""Calls that may hang, for callers who wait only so long.

A database driver waits for its server as long as that takes: a server that is frozen answers never, and its connection
stays open. So the call is made on a thread of its own. Whoever has waited long enough shuts the socket that the call
was given, where one can be found, which ends most; the rest end when the server answers, or its machine. What has to
stay on its caller's thread is ended in the same way, by a thread that looks at the time.

Invariants: a call returns or raises within its deadline; where ``most`` threads exist and all of them hang, further
calls fail at once, but for those that something else bounds; a connection is shut only while the call that hangs has
it; no thread outlives its process or keeps it from ending.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Calls", "Lifeline"]

T = TypeVar("T")


class Lifeline:
    """By which a call that hangs is ended from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._cut = False

    @contextlib.contextmanager
    def holding(self, connection: Any, give_up: Callable[[], object]) -> Iterator[None]:
        """In the block, the call waits for this connection of a driver.

        Raises:
            TimeoutError: nobody waits for the call any more; ``give_up`` was called, to close the connection.
        """
        with self._lock:
            if not self._cut:
                self._connection = connection
        if self._cut:
            give_up()
            raise TimeoutError("nobody waits for the answer any more")
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    @property
    def is_cut(self) -> bool:
        """Whether nobody waits any more."""
        return self._cut

    def cut(self) -> None:
        """Shut the socket of the connection, if the call has one."""
        with self._lock:
            self._cut = True
            if self._connection is not None:
                _shut(self._connection)


class Calls:
    """See the module. Thread-safe.

    Args:
        name: of the threads.
        most: threads.
    """

    def __init__(self, name: str, most: int = 64) -> None:
        self._name = name
        self._most = most
        self._made_in = os.getpid()
        self._lock = threading.Lock()
        self._idle: deque[_Thread] = deque()
        self._count = 0
        self._closed = 0  # times

    def call(self, function: Callable[[Lifeline], T], timeout: float, *, beyond: bool = False) -> T:
        """Call on another thread, and wait for it.

        Args:
            function: given what ends it from outside.
            timeout: seconds.
            beyond: whether it may have a thread beyond the most: there are as many such calls as workers, say.

        Raises:
            TimeoutError: it did not return within ``timeout`` seconds.
        """
        thread = self._take(beyond=beyond)
        call = _Call(function)
        thread.give(call)
        if not call.ended.acquire(timeout=timeout):
            call.lifeline.cut()
            raise TimeoutError(f"no answer within {timeout:g} s")
        return call.result()

    @contextlib.contextmanager
    def cutting(self, timeout: float) -> Iterator[Lifeline]:
        """In the block, which stays on its thread, what the lifeline holds is cut after ``timeout`` seconds."""
        lifeline, over = Lifeline(), threading.Event()
        self._take(beyond=True).give(_Call(lambda _: None if over.wait(timeout) else lifeline.cut()))
        try:
            yield lifeline
        finally:
            over.set()

    def close(self) -> None:
        """End the threads that have nothing to do, and the others when they have done it."""
        with self._lock:
            self._closed += 1
            idle, self._idle = self._idle, deque()
            self._count -= len(idle)
        for thread in idle:
            thread.give(None)

    def _take(self, *, beyond: bool) -> _Thread:
        if os.getpid() != self._made_in:  # a forked child, which has none of the threads
            self._made_in, self._lock, self._idle, self._count = os.getpid(), threading.Lock(), deque(), 0
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._count >= self._most and not beyond:
                raise TimeoutError(f"{self._count} earlier questions are without an answer")
            self._count += 1
            return _Thread(self._name, self._idle_again, self._closed)

    def _idle_again(self, thread: _Thread) -> bool:
        with self._lock:
            if thread.era == self._closed and self._made_in == os.getpid():
                self._idle.append(thread)
                return True
            self._count -= 1
            return False


class _Call(Generic[T]):
    """One call and its end."""

    __slots__ = ("_answer", "_error", "_function", "ended", "lifeline")

    def __init__(self, function: Callable[[Lifeline], T]) -> None:
        self.lifeline = Lifeline()
        self.ended = threading.Lock()  # the lightest thing that one thread can wait for and another one end
        self.ended.acquire()
        self._function = function
        self._answer: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answer = self._function(self.lifeline)
        except BaseException as error:  # noqa: BLE001 -- it is the caller's
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # or the traceback keeps this frame, and this frame the error
        return self._answer


class _Thread:
    """A thread that carries out one call after the other."""

    def __init__(self, name: str, idle: Callable[[_Thread], bool], era: int) -> None:
        self.era = era
        self._idle = idle
        self._given = threading.Lock()
        self._given.acquire()
        self._call: _Call[Any] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, call: _Call[Any] | None) -> None:
        """Carry out a call; None to end."""
        self._call = call
        self._given.release()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            call.run()
            stays = self._idle(self)  # before the caller goes on: the next call finds this thread
            call.ended.release()
            del call
            if not stays:
                return


def _shut(connection: Any) -> None:
    """Shut the socket of a driver's connection; its thread sees the end of it, as if the server had gone away."""
    holder = connection if hasattr(connection, "fileno") else getattr(connection, "_sock", None)  # psycopg; PyMySQL
    if holder is not None:
        # It may have ended by itself in this moment, or be closed.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(holder.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)
