"""Daemon threads for calls and callbacks; a condition and an event for signals.

No thread of this package keeps the interpreter from ending, so the executors of the standard library are not used:
the interpreter waits for their threads at exit.

Invariants:

- A call with a deadline returns or raises within it. A database driver waits for its server as long as that takes, and
  a frozen server never answers; so such a call runs on a thread of its own, and at its deadline the socket that it
  waits for is shut (`CancelHandle`). That ends most; the others end when the server answers, or its machine.
- If `most` threads exist and all of them hang, further calls with a deadline fail at once, unless the caller bounds
  their number itself.
- A connection is shut only while the call that hangs uses it.
- Callbacks (`CallbackThread`) run one at a time, in the order in which they were added, never on an I/O thread. An
  exception of one is logged and affects no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

__all__ = [
    "CallbackThread",
    "CancelHandle",
    "Condition",
    "DaemonExecutor",
    "InterruptibleEvent",
    "call_in_background",
    "call_on_thread",
    "start_daemon",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Report: TypeAlias = Callable[[Any, BaseException | None], object]


def start_daemon(name: str, fn: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread; RuntimeError if the interpreter exits."""
    thread = threading.Thread(target=fn, args=args, name=name, daemon=True)
    thread.start()
    return thread


def call_in_background(name: str, fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    """Call ``fn``, then ``done`` with its result or exception, on a new daemon thread.

    ``done`` is called exactly once, unless ``fn`` never returns. If the interpreter, which exits, refuses the thread,
    both are called here and now: there may still be messages to publish.
    """
    try:
        start_daemon(name, _call, fn, done)
    except RuntimeError:
        _call(fn, done)


def _call(fn: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    outcome: T | Exception = RuntimeError("the call ended its thread")
    try:
        with suppress(SystemExit):  # as threading itself does
            outcome = fn()
    except Exception as error:  # noqa: BLE001  # passed on
        outcome = error
    finally:
        done(outcome)


class CancelHandle:
    """Ends a call that hangs, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._cut = False

    @contextlib.contextmanager
    def using(self, connection: Any, give_up: Callable[[], object]) -> Iterator[None]:
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
        """Shut the socket of the connection, if the call uses one."""
        with self._lock:
            self._cut = True
            if self._connection is not None:
                _shut(self._connection)


def _shut(connection: Any) -> None:
    """Shut the socket of a driver's connection, as if the server had closed it."""
    holder = connection if hasattr(connection, "fileno") else getattr(connection, "_sock", None)  # psycopg; PyMySQL
    if holder is not None:
        # It may have ended by itself in this moment, or be closed.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(holder.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)


class DaemonExecutor:
    """Call functions on daemon threads, ``most`` at once. Thread-safe, and fork-safe.

    A signal handler that interrupts a method may call any other.
    """

    _threads: int  # that take calls from the queue

    def __init__(self, name: str, most: int = 64) -> None:
        self._name = name
        self._most = most
        self._reset()

    def call(self, fn: Callable[[CancelHandle], T], timeout: float, *, beyond: bool = False) -> T:
        """Call with a handle that ends it, on another thread, and wait for the result.

        Args:
            fn: is given the handle.
            timeout: seconds.
            beyond: whether it may have a thread beyond the most: there are as many such calls as workers, say.

        Raises:
            TimeoutError: it did not return in time.
        """
        handle = CancelHandle()
        outcome: list[Any] = []
        ended = threading.Lock()  # the lightest thing that one thread can wait for and another one end
        ended.acquire()

        def report(result: T | None, error: BaseException | None) -> None:
            outcome.extend((result, error))
            ended.release()

        self._submit(partial(fn, handle), report, beyond=beyond)
        if not ended.acquire(timeout=timeout):
            handle.cut()
            raise TimeoutError(f"no answer within {timeout:g} s")
        result: T
        result, error = outcome
        if error is None:
            return result
        outcome.clear()
        try:
            raise error
        finally:
            del error  # or the traceback keeps this frame, and this frame the error

    @contextlib.contextmanager
    def cutting(self, timeout: float) -> Iterator[CancelHandle]:
        """Cut the handle if the block, which stays on its thread, takes too long."""
        handle, over = CancelHandle(), InterruptibleEvent()
        self._submit(lambda: None if over.wait(timeout) else handle.cut(), lambda _result, _error: None, beyond=True)
        try:
            yield handle
        finally:
            over.set()

    def future(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Call on another thread; return the future of the running loop for the result.

        The call waits while `most` others run. Cancelling the future ends the waiting alone.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def report(result: T, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._submit(fn, report, queue=True)
        return future

    @property
    def busy(self) -> int:
        """Calls that have not returned, those that nobody waits for any more included."""
        return self._busy

    def close(self) -> None:
        """End the threads, each when it has nothing more to do. Does not wait.

        A later call, of a task that is being cancelled, say, has a thread of its own, which ends with it.
        """
        self._reset_in_child()
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = 0

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # again by a signal handler
        self._calls: SimpleQueue[tuple[Callable[[], object], _Report] | None] = SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._closed = False

    def _reset_in_child(self) -> None:
        if os.getpid() != self._pid:  # a forked child has none of the threads; one of them may have held the lock
            self._reset()

    def _submit(self, fn: Callable[[], T], report: _Report, *, beyond: bool = False, queue: bool = False) -> None:
        """Call `fn` on a thread, count the thread as idle, then report the outcome."""
        self._reset_in_child()
        with self._lock:
            if self._busy >= self._most and not beyond and not queue:
                raise TimeoutError(f"{self._busy} earlier questions are without an answer")
            closed = self._closed
            if closed:
                start_daemon(f"{self._name}-late", self._run_one, fn, report)
                self._busy += 1
                return
            if self._busy >= self._threads and (beyond or self._threads < self._most):
                start_daemon(f"{self._name}-{self._threads + 1}", self._run, self._calls)
                self._threads += 1
            self._busy += 1
            self._calls.put((fn, report))  # one step with the line before
            if self._closed:  # meanwhile, by a signal handler: there may be no thread any more, or one too many
                start_daemon(f"{self._name}-late", self._run, self._calls)
                for _ in range(self._threads + 1):
                    self._calls.put(None)
                self._threads = 0

    def _run(self, calls: SimpleQueue[tuple[Callable[[], object], _Report] | None]) -> None:
        while (call := calls.get()) is not None:
            self._run_one(*call)
            del call  # or an idle thread keeps its result

    def _run_one(self, fn: Callable[[], object], report: _Report) -> None:
        result, failure = None, None
        try:
            result = fn()
        except BaseException as error:  # noqa: BLE001  # the caller's
            failure = error
        with self._lock:
            self._busy -= 1  # before the caller goes on: its next call finds this thread
        report(result, failure)
        del failure  # or the traceback keeps this frame, and this frame the error


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # which no future takes
        future.set_exception(RuntimeError(f"{error!r} came out of a call"))
    else:
        future.set_exception(error)


async def call_on_thread(name: str, fn: Callable[[], T]) -> T:
    """Call ``fn`` on a daemon thread of its own and wait for the result.

    ``asyncio.to_thread`` uses threads that the program shares and the interpreter waits for at exit.
    """
    executor = DaemonExecutor(name, 1)
    executor.close()
    return await executor.future(fn)


_LATER: Final = 0.05  # seconds
_LATER_KEPT: Final = 100  # callbacks


class CallbackThread:
    """Run callbacks one after the other. Thread-safe.

    To wake a thread takes longer than most callbacks. Those that may wait run together, a twentieth of a second later.

    A signal handler that interrupts a method may call any other.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._later: deque[Callable[[], object]] = deque()
        self._collecting = False  # the thread looks at them by itself
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped: threading.Thread | None = None
        self._over = False

    def start(self) -> None:
        """Start the thread, unless it runs or was stopped.

        The first callback would start it, too; but an interpreter that exits refuses new threads.
        """
        with self._lock:
            if self._thread is None and not self._over:
                # Assigned first: a signal handler that comes in between would start another one.
                self._thread = thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                try:
                    thread.start()
                except BaseException:  # of a signal handler, say; the thread may begin all the same
                    if thread.ident is None and self._thread is thread:
                        self._thread = None
                    raise

    def put(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` soon; after `stop`, on a thread of its own. Does not block."""
        self.start()
        self._queue.put(callback)
        if self._over:
            self._queue.put(None)
            start_daemon(self._name, self._run)

    def put_later(self, callback: Callable[[], object]) -> None:
        """As `put`, in no order with others, and up to 50 ms later. Does not block."""
        if len(self._later) >= _LATER_KEPT:
            self.put(callback)
            return
        self._later.append(callback)
        if not self._collecting or self._over:
            self._collecting = True
            try:
                self.put(_collect)
            except BaseException:  # it can start no thread, say; the next one may
                self._collecting = False
                raise

    @property
    def backlog(self) -> int:
        """The number of callbacks that wait, without those of `put_later`."""
        return self._queue.qsize()

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of the callbacks."""
        return threading.current_thread() in (self._thread, self._stopped)

    def stop(self) -> None:
        """End the thread after the callbacks that wait. Does not wait."""
        with self._lock:
            self._over = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stopped = thread
                self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the stopped thread, not on itself; return whether it ended."""
        thread = self._stopped
        if thread is None or thread.ident is None:
            return True
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def _main(self) -> None:
        with self._lock:
            given_up = not self.is_current
        if not given_up:
            self._run()

    def _run(self) -> None:
        due: float | None = None  # when to run those of `put_later`
        while True:
            rest = None if due is None else due - time.monotonic()
            if rest is not None and rest <= 0:
                self._collecting = self._run_later()
                due = time.monotonic() + _LATER if self._collecting or self._later else None
                continue
            try:
                callback = self._queue.get(timeout=rest)
            except Empty:
                continue
            if callback is None:
                self._run_later()
                return
            if callback is _collect:
                due = due or time.monotonic() + _LATER
            else:
                _run_one(callback)

    def _run_later(self) -> bool:
        """Run those of `put_later`; return whether there were any."""
        count = len(self._later)
        with suppress(IndexError):  # a thread that was started after `stop` takes them, too
            for _ in range(count):
                _run_one(self._later.popleft())
        return count > 0


def _collect() -> None:
    """Wake the thread for those of `put_later`."""


def _run_one(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:  # sys.exit() included: it would end the callbacks, not the program
        logger.exception("a callback raised")


class Condition(threading.Condition):
    """A condition variable whose wait a signal handler may end by an exception.

    Python runs signal handlers between any two steps of the main thread, and their exception (``KeyboardInterrupt``)
    comes out there. The standard library's ``wait`` loses its lock if that is between releasing it and waiting; leaving
    the block then raises an error of its own in place of the exception. Its ``__enter__`` is a function of Python, and
    may have taken the lock, but not return: nobody would release it. So a block is entered by the lock::

        with changed.lock:
            changed.wait()
    """

    @property
    def lock(self) -> threading.RLock:
        """Guards the awaited state. Entering and leaving it are each one step."""
        lock: threading.RLock = self._lock  # type: ignore[attr-defined]  # an __init__ would cost every publish more
        return lock

    def __enter__(self) -> NoReturn:
        """Raise TypeError: a block enters its lock."""
        raise TypeError("enter the lock of the condition")

    def __exit__(self, *_: object) -> NoReturn:
        """Raise TypeError, as entering does."""
        raise TypeError("leave the lock of the condition")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does, up to ``timeout`` seconds."""
        try:
            return super().wait(timeout)
        except BaseException:
            with suppress(RuntimeError):  # it is not held
                self.release()
            self.acquire()
            raise


class InterruptibleEvent:
    """An event that a signal handler may set, or end the wait for by an exception.

    The standard library's may stay locked then: see `Condition`.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._lock = self._changed.lock
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def set(self) -> None:
        """Set it, and wake all that wait."""
        self._set = True
        with self._lock:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, up to ``timeout`` seconds; return whether it is."""
        if self._set:
            return True
        with self._lock:
            return self._changed.wait_for(self.is_set, timeout)
