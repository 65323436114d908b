"""Signal handlers that replace others for a time, and waits that let them run.

Python runs a signal handler on the main thread, between two of its steps. A wait without a timeout may prevent that
forever, if the signal arrived just before the wait or went to another thread. So the waits end every half second.

A forked child inherits the signal handlers of its parent. Those that stop a consumer of the parent would keep signals
from ending the child. And the descriptor that wakes an event loop for a signal is shared, so signals to the child
would be handled by the loop of the parent.

Invariants:

- In a forked child the handlers from before are restored, and signals wake no event loop of the parent. A signal that
  comes earlier is handled after that.
- A handler that the program has set in the meantime stays, also in a forked child.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from reliable_mq._util.hooks import ForkStage, around_fork, at_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import SimpleQueue
    from types import FrameType

    from reliable_mq._util.threads import InterruptibleEvent

_CHECK_EVERY: Final = 0.5  # seconds


def wait_heeding_signals(
    over: InterruptibleEvent | threading.Event, never_set: Callable[[], bool] = lambda: False
) -> None:
    """Block until ``over`` is set, and let signal handlers run every half second.

    ``never_set`` returns whether nothing can set it any more, which ends the wait, too.
    """
    while not (over.wait(_CHECK_EVERY) or never_set()):
        pass


def next_signal(received: SimpleQueue[int]) -> int:
    """Block until a signal handler has put a signal into the queue, and return it.

    A handler must not set an event that the main thread waits for, because it may run while that thread holds the
    event's lock. Putting into a simple queue needs no lock.
    """
    while True:
        try:
            return received.get(timeout=_CHECK_EVERY)
        except Empty:
            continue


@contextmanager
def stop_signals_handled(by: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT by a callable in the block. For the main thread."""
    replaced = ReplacedHandlers()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            replaced.replace(number, partial(signal.signal, number, by))
        yield
    finally:
        replaced.restore()


class ReplacedHandlers:
    """The signal handlers to restore. For the main thread."""

    def __init__(self, *, on_loop: bool = False) -> None:
        self._on_loop = on_loop  # the new handlers belong to an event loop, which signals wake by a descriptor
        # Signal -> handler. Python's own handlers are of several types, and of different ones in each version.
        self._before: dict[int, Any] = {}
        self._after: dict[int, Any] = {}

    @property
    def numbers(self) -> list[int]:
        """The signals whose handlers are replaced."""
        return list(self._before)

    def replace(self, number: int, install: Callable[[], object]) -> None:
        """Replace the handler of a signal by calling ``install``.

        If ``install`` raises and has not replaced it, `restore` will leave it alone.
        """
        if self not in _active:
            _active.append(self)
        before = signal.getsignal(number)
        self._before[number] = signal.SIG_DFL if before is None else before  # first, as a thread may fork meanwhile
        try:
            install()
        finally:
            after = self._after[number] = signal.getsignal(number)
            if after is before:
                del self._before[number]

    def restore(self, remove: Callable[[int], object] = lambda _: None) -> None:
        """Restore the handlers from before. A handler set in the meantime stays.

        ``remove`` removes the new handler of a signal, and may set Python's own.
        """
        try:
            self._restore(remove)
        except BaseException:  # of a signal handler; the others must not stay
            self._restore(remove)
            raise

    def _restore(self, remove: Callable[[int], object]) -> None:
        for number, before in list(self._before.items()):
            current = signal.getsignal(number)
            if current is not None:  # otherwise it was not set in Python, and could not be set again
                remove(number)
                signal.signal(number, before if current is self._after.get(number, current) else current)
            del self._before[number]
        if self in _active:
            _active.remove(self)

    def restore_in_child(self) -> None:
        """Restore the handlers from before; leave the event loop to the parent."""
        if self._on_loop and self._before:
            signal.set_wakeup_fd(-1)
        self.restore()


_active: list[ReplacedHandlers] = []  # the newest last
_forking = threading.local()


def _restore_in_child() -> None:
    for replaced in reversed(_active.copy()):
        replaced.restore_in_child()


def _block() -> None:
    """Block the signals on a thread that forks, and so in its child."""
    numbers = [number for replaced in list(_active) for number in replaced.numbers]
    if numbers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])  # noted first: a signal handler may raise
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _forking.mask = None


at_fork(ForkStage.RENEW, _restore_in_child)
at_fork(ForkStage.RENEW, _unblock)
around_fork(_block, _unblock)
