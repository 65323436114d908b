"""Calls that may hang, for callers who wait only so long.

A database driver waits for its server as long as that takes: a server that is frozen answers never, and its connection
stays open. So the call is made on a thread of its own. Whoever has waited long enough shuts the socket that the call
was given, where one can be found, which ends most; the rest end when the server answers, or its machine. What has to
stay on its caller's thread is ended in the same way, by a thread that looks at the time.

Invariants: a call returns or raises within its deadline; where ``most`` threads exist and all of them hang, further
calls fail at once, but for those that something else bounds; a connection is shut only while the call that hangs has
it; no thread outlives its process or keeps it from ending.

Calls that may block, off the event loop.

On daemon threads, so that a call that hangs does not keep a program from ending, as it would on asyncio's own executor.

The thread on which users' callbacks run, so that none ever runs on, or holds up, an I/O thread.

Invariants: callbacks run one at a time, in the order in which they were handed over; whatever one raises is logged and
harms no other; the thread starts when the first callback is expected and ends with :meth:`CallbackThread.stop`. All
methods may be called by a signal handler that interrupts one of them.

Calls that may block (a user's callback, a name lookup), each on a daemon thread: no I/O thread waits for them.

A condition variable whose wait may be ended by an exception out of a signal handler.

Python runs signal handlers between any two steps of the main thread, and what they raise (``KeyboardInterrupt``) comes
out there. The standard library's ``wait`` loses its lock where that is between letting go of it and waiting; leaving
the block then raises an error of its own in place of the exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "CallbackThread",
    "CancelHandle",
    "Cancellable",
    "Condition",
    "DaemonExecutor",
    "DeadlineExecutor",
    "call_on_thread",
    "in_background",
]

T = TypeVar("T")


class CancelHandle:
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


class DeadlineExecutor:
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

    def call(self, function: Callable[[CancelHandle], T], timeout: float, *, beyond: bool = False) -> T:
        """Call on another thread, and wait for it.

        Args:
            function: given what ends it from outside.
            timeout: seconds.
            beyond: whether it may have a thread beyond the most: there are as many such calls as workers, say.

        Raises:
            TimeoutError: it did not return within ``timeout`` seconds.
        """
        thread = self._take(beyond=beyond)
        call = _ThreadCall(function)
        thread.give(call)
        if not call.ended.acquire(timeout=timeout):
            call.lifeline.cut()
            raise TimeoutError(f"no answer within {timeout:g} s")
        return call.result()

    @contextlib.contextmanager
    def cutting(self, timeout: float) -> Iterator[CancelHandle]:
        """In the block, which stays on its thread, what the lifeline holds is cut after ``timeout`` seconds."""
        lifeline, over = CancelHandle(), threading.Event()
        self._take(beyond=True).give(_ThreadCall(lambda _: None if over.wait(timeout) else lifeline.cut()))
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


class _ThreadCall(Generic[T]):
    """One call and its end."""

    __slots__ = ("_answer", "_error", "_function", "ended", "lifeline")

    def __init__(self, function: Callable[[CancelHandle], T]) -> None:
        self.lifeline = CancelHandle()
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
        self._call: _ThreadCall[Any] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, call: _ThreadCall[Any] | None) -> None:
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


async def call_on_thread(name: str, fn: Callable[[], T]) -> T:
    """Call ``fn`` on a daemon thread of its own and wait for its result.

    Use this in place of ``asyncio.to_thread``, whose threads the program shares and the interpreter waits for at exit.

    Args:
        name: of the thread.
        fn: the call.
    """
    threads = DaemonExecutor(name, 1)
    result = threads.call(fn)
    threads.stop()  # once the call has returned
    return await result


class DaemonExecutor:
    """As many daemon threads as are needed at a time, up to ``most``. Lives on the loop that it was made on."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = 0
        self._stopped = False
        self._busy = 0

    def call(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``fn`` on a thread; the future is that of its result. Cancelling it ends the waiting alone."""
        future: asyncio.Future[T] = self._loop.create_future()
        call = partial(self._call, fn, future)
        self._busy += 1
        if self._stopped:  # nobody would end a thread that waits for more
            self._start(call, "late")
            return future
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            self._start(self._run, self._started)
        self._calls.put(call)
        return future

    @property
    def busy(self) -> int:
        """Calls that have not returned, those that nobody waits for any more included."""
        return self._busy

    def stop(self) -> None:
        """End the threads, each when it has nothing more to do. Does not wait.

        A call that comes later, of a task that is being cancelled, say, has a thread of its own, which ends with it.
        """
        self._stopped = True
        for _ in range(self._started):
            self._calls.put(None)
        self._started = 0

    def _start(self, run: Callable[[], None], which: int | str) -> None:
        threading.Thread(target=run, name=f"{self._name}-{which}", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, fn: Callable[[], T], future: asyncio.Future[T]) -> None:
        tell: Callable[[], None]
        try:
            tell = partial(self._done, future, fn())
        except BaseException as error:  # noqa: BLE001  # handed on
            tell = partial(self._failed, future, error)
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _done(self, future: asyncio.Future[T], result: T) -> None:
        self._busy -= 1
        if not future.done():
            future.set_result(result)

    def _failed(self, future: asyncio.Future[T], error: BaseException) -> None:
        self._busy -= 1
        if isinstance(error, StopIteration):  # which no future takes
            error = RuntimeError(f"{error!r} came out of a call")
        if not future.done():
            future.set_exception(error)


logger = logging.getLogger(__name__)


class CallbackThread:
    """Runs callbacks, one after the other. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped: threading.Thread | None = None
        self._over = False

    def start(self) -> None:
        """Start the thread, where it does not run yet and was not stopped.

        The first callback would do it, too; but an interpreter that exits refuses new threads.
        """
        with self._lock:
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Run ``call`` soon. Does not block. After `stop`, on a thread that ends with it."""
        self.start()
        self._queue.put(call)
        if self._over:
            self._queue.put(None)
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def backlog(self) -> int:
        """How many wait to be called."""
        return self._queue.qsize()

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of the callbacks."""
        return threading.current_thread() in (self._thread, self._stopped)

    def stop(self) -> None:
        """End the thread when it has run what was handed over. Does not wait."""
        with self._lock:
            self._over = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stopped = thread
                self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread that was stopped, for up to ``timeout`` seconds, and say whether it came.

        On that thread itself it does not wait.
        """
        thread = self._stopped
        if thread is None:
            return True
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # sys.exit() included: it would end the callbacks, not the program
                logger.exception("a callback raised")


def in_background(name: str, fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    """Call `fn` on a new daemon thread; hand what it returned, or the exception it raised, to `done`, there.

    `done` is called exactly once, whatever `fn` does, unless it never returns. Where there can be no more threads, both
    are called here and now: an interpreter that exits refuses them, and may still have messages to publish.
    """
    try:
        threading.Thread(target=_call, args=(fn, done), name=name, daemon=True).start()
    except RuntimeError:
        _call(fn, done)


class Cancellable(Generic[T]):
    """A callback that can be called off. Not thread-safe: both on one thread."""

    def __init__(self, on_done: Callable[[T], None]) -> None:
        self._on_done: Callable[[T], None] | None = on_done

    def cancel(self) -> bool:
        """Call it off; return whether it was still to come."""
        to_come, self._on_done = self._on_done is not None, None
        return to_come

    def done(self, outcome: T) -> None:
        """Call back, unless that was done or called off before."""
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(outcome)


def _call(fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    outcome: T | Exception = RuntimeError("the call ended its thread")
    try:
        with suppress(SystemExit):  # as threading itself does
            outcome = fn()
    except Exception as error:  # noqa: BLE001  # handed on
        outcome = error
    finally:
        done(outcome)


class Condition(threading.Condition):
    """See the module."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does, for up to ``timeout`` seconds; the caller holds the lock afterwards."""
        try:
            return super().wait(timeout)
        except BaseException:
            with suppress(RuntimeError):  # it is not held
                self.release()
            self.acquire()
            raise
