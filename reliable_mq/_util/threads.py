"""Daemon threads for calls and callbacks, and signal-safe conditions and events.

No thread of this package keeps the interpreter from ending. The executors of the standard library are not used, because
the interpreter waits for their threads at exit.

Invariants:

- A call with a deadline returns or raises within it. A database driver waits for its server without a limit, and a
  frozen server never replies. So such a call runs on a separate thread, and at its deadline the socket that it waits
  for is shut down (`CancelHandle`). That ends most calls; the others end when the server, or its machine, replies.
- If `most` calls hang whose callers have given up, further calls with a deadline fail at once, unless the caller itself
  limits their number. They also fail at once if they need a thread and none can be started. Calls with a waiting caller
  are not limited.
- A connection is shut down only while the hanging call uses it.
- Callbacks (`CallbackThread`) run one at a time, in the order in which they were added, until their thread is stopped,
  and never on an I/O thread. An exception of a callback is logged and affects no other callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from reliable_mq._util.hooks import ForkStage, each_at_fork
from reliable_mq._util.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
_NOBODY_WAITS: Final = "nobody waits for the answer any more"
_Report: TypeAlias = Callable[[Any, BaseException | None], object]


class DaemonThread(threading.Thread):
    """A thread that does not keep the process from exiting."""

    def __init__(self, name: str, fn: Callable[..., object], *args: object) -> None:
        super().__init__(target=fn, args=args, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; raise RuntimeError if none can be started."""
        if sys.is_finalizing():  # Python 3.11 would wait for the thread for ever
            raise RuntimeError("can't create new thread at interpreter shutdown")  # the text of later versions
        super().start()


def start_daemon(name: str, fn: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread; raise RuntimeError if the interpreter exits."""
    thread = DaemonThread(name, fn, *args)
    thread.start()
    return thread


def call_in_background(name: str, fn: Callable[[], T], done: Callable[[T | Exception], object]) -> None:
    """Call ``fn``, then ``done`` with its result or exception, on a new daemon thread.

    ``done`` is called exactly once, unless ``fn`` never returns. An exiting interpreter refuses the thread. Then both
    are called on the current thread, because there may still be messages to publish.
    """
    try:
        start_daemon(name, _call, fn, done)
    except RuntimeError:
        _call(fn, done)


def _call(fn: Callable[[], T], done: Callable[[T | Exception], object]) -> None:
    outcome: T | Exception = RuntimeError("the call ended its thread")
    try:
        with suppress(SystemExit):  # as threading itself does
            outcome = fn()
    except Exception as error:  # noqa: BLE001  # passed on
        outcome = error
    finally:
        done(outcome)
        del outcome  # otherwise the traceback of an error keeps this frame alive, and this frame the error


class CancelHandle:
    """A handle that ends a hanging call from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._cut = False

    @contextlib.contextmanager
    def using(self, connection: Any, give_up: Callable[[], object]) -> Iterator[None]:
        """Register the driver's connection that the call uses within the block.

        Raises:
            TimeoutError: If the caller no longer waits, before or after the block. If it was not before the block,
                ``give_up`` was called, to close the connection: the driver need not have noticed that its socket is
                shut down.
        """
        with self._lock:
            if self.is_cut:
                raise TimeoutError(_NOBODY_WAITS)
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None
                cut = self._cut
            if cut:
                give_up()
        if cut:
            raise TimeoutError(_NOBODY_WAITS)

    @property
    def is_cut(self) -> bool:
        """Whether the caller no longer waits."""
        return self._cut

    def cut(self) -> None:
        """Shut down the socket of the connection, if the call uses one."""
        with self._lock:
            self._cut = True
            if self._connection is not None:
                _shut(self._connection)


def _shut(connection: Any) -> None:
    """Shut down the socket of a connection, as if the server had closed it."""
    holder = connection if hasattr(connection, "fileno") else getattr(connection, "_sock", None)  # psycopg; PyMySQL
    if holder is not None:
        # The connection may have just ended by itself, or be closed.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(holder.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _Wait:
    returned: bool = False
    given_up: bool = False


class DaemonExecutor:
    """An executor on daemon threads. Thread-safe, and fork-safe.

    Up to ``most`` futures run at a time, and up to ``most`` calls hang. A signal handler that interrupts a method may
    call any other method.
    """

    _threads: int  # number of threads that take calls from the queue

    def __init__(self, name: str, most: int = 64) -> None:
        self._name = name
        self._most = most
        self._closed = False
        self._reset()
        _executors.add(self)

    def start(self) -> None:
        """Start a thread unless one is idle.

        A call starts it as well, but an interpreter that exits refuses new threads.
        """
        self._submit(lambda: None, lambda _result, _error: None, queue=True)

    def call(self, fn: Callable[[CancelHandle], T], timeout: float, *, beyond: bool = False) -> T:
        """Call ``fn`` on another thread and wait for its result.

        Args:
            fn: The function, which is called with a handle that ends the call.
            timeout: The maximum time to wait, in seconds.
            beyond: Whether to call even if ``most`` earlier calls hang, because the caller limits the number of calls.

        Raises:
            TimeoutError: If the call did not return in time, ``most`` earlier calls that did not return in time still
                run, or no thread can be started.
        """
        if self._hanging >= self._most and not beyond:
            raise TimeoutError(f"{self._hanging} earlier questions are without an answer")
        handle = CancelHandle()
        outcome: list[Any] = []
        ended = threading.Lock()  # the cheapest object that one thread can wait for and another one can signal
        ended.acquire()
        wait = _Wait()

        def report(result: T | None, error: BaseException | None) -> None:
            outcome.extend((result, error))
            self._returned(wait)
            ended.release()

        self._submit_or_time_out(partial(fn, handle), report)
        in_time = False
        try:
            in_time = ended.acquire(timeout=timeout)
        finally:
            if not in_time:  # or a signal handler raised
                self._give_up(wait)
                handle.cut()
        if not in_time:
            raise TimeoutError(f"no answer within {timeout:g} s")
        result: T
        result, error = outcome
        if error is None:
            return result
        outcome.clear()
        try:
            raise error
        finally:
            del error  # otherwise the traceback keeps this frame alive, and this frame the error

    @contextlib.contextmanager
    def cutting(self, timeout: float) -> Iterator[CancelHandle]:
        """Cut the handle if the block takes too long. It runs on the current thread.

        Raises:
            TimeoutError: If no thread can be started. The block did not run.
        """
        handle, over = CancelHandle(), InterruptibleEvent()
        self._submit_or_time_out(lambda: None if over.wait(timeout) else handle.cut(), lambda _result, _error: None)
        try:
            yield handle
        finally:
            over.set()

    def future(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``fn`` on another thread; return a future of the running loop.

        The call is queued while ``most`` others run. Cancelling the future ends only the wait for the call.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        wait = _Wait()

        def report(result: T, error: BaseException | None) -> None:
            self._returned(wait)
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._submit(fn, report, queue=True)
        future.add_done_callback(lambda future: self._give_up(wait) if future.cancelled() else None)
        return future

    @property
    def hanging(self) -> int:
        """The number of calls that have not returned although their callers have given up."""
        return self._hanging

    def close(self) -> None:
        """End each thread after its queued calls. Does not wait.

        A later call, for example of a task that is being cancelled, runs on a new thread, which ends with the call.
        """
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = 0

    def _reset(self) -> None:
        """Begin without threads, also in a forked child. A thread may have held the lock."""
        self._lock = threading.RLock()  # a signal handler may acquire it again
        self._calls: SimpleQueue[tuple[Callable[[], object], _Report] | None] = SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._hanging = 0

    def _returned(self, wait: _Wait) -> None:
        with self._lock:
            wait.returned = True
            self._hanging -= wait.given_up

    def _give_up(self, wait: _Wait) -> None:
        """Count the call as hanging until it returns."""
        with self._lock:
            wait.given_up = not wait.returned
            self._hanging += wait.given_up

    def _submit_or_time_out(self, fn: Callable[[], T], report: _Report) -> None:
        try:
            self._submit(fn, report)
        except RuntimeError as refused:
            raise TimeoutError(f"no thread can be started: {refused}") from refused

    def _submit(self, fn: Callable[[], T], report: _Report, *, queue: bool = False) -> None:
        """Call `fn` on a thread, count the thread as idle, and report the outcome."""
        with self._lock:
            closed = self._closed
            if closed:
                start_daemon(f"{self._name}-late", self._run_one, fn, report)
                self._busy += 1
                return
            if self._busy >= self._threads and (not queue or self._threads < self._most):
                start_daemon(f"{self._name}-{self._threads + 1}", self._run, self._calls)
                self._threads += 1
            self._busy += 1
            self._calls.put((fn, report))  # one step with the line above
            if self._closed:  # closed meanwhile by a signal handler: there may be no thread left, or one too many
                start_daemon(f"{self._name}-late", self._run, self._calls)
                self._threads += 1
                self.close()

    def _run(self, calls: SimpleQueue[tuple[Callable[[], object], _Report] | None]) -> None:
        while (call := calls.get()) is not None:
            self._run_one(*call)
            del call  # otherwise an idle thread keeps its result alive

    def _run_one(self, fn: Callable[[], object], report: _Report) -> None:
        result, failure = None, None
        try:
            result = fn()
        except BaseException as error:  # noqa: BLE001  # the caller's
            failure = error
        with self._lock:
            self._busy -= 1  # before the caller continues, so that its next call finds this thread idle
        report(result, failure)
        del failure  # otherwise the traceback keeps this frame alive, and this frame the error


_executors = each_at_fork(ForkStage.RENEW, DaemonExecutor._reset)  # noqa: SLF001  # of this module


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # futures do not accept it
        future.set_exception(RuntimeError(f"{error!r} came out of a call"))
    else:
        future.set_exception(error)


async def call_on_thread(name: str, fn: Callable[[], T]) -> T:
    """Call ``fn`` on a new daemon thread and wait for the result.

    ``asyncio.to_thread`` uses threads that the whole program shares and that the interpreter waits for at exit. If no
    thread can be started, ``fn`` is called on the current one.
    """
    executor = DaemonExecutor(name, 1)
    executor.close()
    try:
        future = executor.future(fn)
    except RuntimeError:
        return fn()
    return await future


_LATER: Final = 0.05  # seconds
_LATER_KEPT: Final = 100  # callbacks


class CallbackThread:
    """A thread that runs callbacks one after the other. Thread-safe.

    Waking a thread takes longer than most callbacks. Callbacks that may wait run together, a twentieth of a second
    later. A signal handler that interrupts a method may call any other method.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._later: deque[Callable[[], object]] = deque()
        self._collecting = False  # the thread will run the later callbacks without another wake-up
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped: threading.Thread | None = None
        self._over = False

    def start(self) -> None:
        """Start the thread, unless it runs or was stopped.

        The first callback starts the thread as well, but an interpreter that exits refuses new threads.
        """
        with self._lock:
            if self._thread is None and not self._over:
                # Assigned before the start: a signal handler that runs in between would start another thread.
                self._thread = thread = DaemonThread(self._name, self._main)
                try:
                    thread.start()
                except BaseException:  # for example of a signal handler; the thread may start nevertheless
                    if thread.ident is None and self._thread is thread:
                        self._thread = None
                    raise

    def put(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` soon; after `stop`, on a new thread, unordered. Does not block."""
        self.start()
        self._queue.put(callback)
        if self._over:
            self._queue.put(None)
            start_daemon(self._name, self._run)

    def put_later(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` as `put` does, up to 50 ms later, unordered. Does not block."""
        if len(self._later) >= _LATER_KEPT:
            self.put(callback)
            return
        self._later.append(callback)
        if not self._collecting or self._over:
            self._collecting = True
            try:
                self.put(_collect)
            except BaseException:  # for example, no thread could be started; the next call may start one
                self._collecting = False
                raise

    @property
    def backlog(self) -> int:
        """The number of waiting callbacks, without those of `put_later`."""
        return self._queue.qsize()

    @property
    def is_current(self) -> bool:
        """Whether the current thread runs the callbacks."""
        return threading.current_thread() in (self._thread, self._stopped)

    def stop(self) -> None:
        """End the thread after the waiting callbacks. Does not block."""
        with self._lock:
            self._over = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stopped = thread
                self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the stopped thread; return whether it ended.

        The thread does not wait for itself.
        """
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
        due: float | None = None  # when to run the callbacks of `put_later`
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
            del callback  # otherwise an idle thread keeps it alive

    def _run_later(self) -> bool:
        """Run the callbacks of `put_later`; return whether there were any."""
        count = len(self._later)
        with suppress(IndexError):  # a thread that was started after `stop` takes callbacks as well
            for _ in range(count):
                _run_one(self._later.popleft())
        return count > 0


def _collect() -> None:
    """Wake the thread for the callbacks of `put_later`."""


def _run_one(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:  # including sys.exit(), which would end the callbacks and not the program
        logger.exception("a callback raised")


class Condition(threading.Condition):
    """A condition variable whose wait a signal handler may end with an exception.

    Python runs signal handlers between any two bytecode steps of the main thread, and raises their exception
    (``KeyboardInterrupt``) there. If that happens in the standard library's ``wait``, between releasing the lock and
    waiting, the lock is lost, and leaving the block raises another error in place of the exception. The standard
    ``__enter__`` is a Python function: interrupted, it may have acquired the lock without returning, so that nothing
    releases the lock. So a block enters the lock instead::

        with changed.lock:
            changed.wait()

    On Python 3.12 and 3.13, an exception at the condition of a loop or comprehension skips the end of the block around
    it, in the same function. So a block that holds a lock loops with ``while True``, or calls a function that loops.
    """

    @property
    def lock(self) -> threading.RLock:
        """The lock that guards the awaited state; entering or leaving it is one step."""
        lock: threading.RLock = self._lock  # type: ignore[attr-defined]  # an __init__ would cost every publish more
        return lock

    def __enter__(self) -> NoReturn:
        raise TypeError("enter the lock of the condition")

    def __exit__(self, *_: object) -> NoReturn:
        raise TypeError("leave the lock of the condition")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does, up to ``timeout`` seconds."""
        try:
            return super().wait(timeout)
        except BaseException:
            with suppress(RuntimeError):  # the lock is not held
                self.release()
            self.acquire()
            raise


class InterruptibleEvent:
    """An event that a signal handler may set, or whose wait it may interrupt.

    The standard library's event may stay locked in these cases; see `Condition`.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._lock = self._changed.lock
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        with self._lock:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until the event is set; return whether it is."""
        if self._set:
            return True
        with self._lock:
            return self._changed.wait_for(self.is_set, timeout)
