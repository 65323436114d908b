"""SIGTERM and SIGINT stop the consumers that run on an event loop, all of them, and are given back afterwards.

Invariants: a signal that somebody else handles (a server, the program itself) is left to them; what was there before
the first ``run()`` is there again after the last.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["on_signals"]


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` for each signal in the block, where the running loop can be told of signals and nobody else is."""
    loop = asyncio.get_running_loop()
    watch = _watches.setdefault(loop, _Watch(loop))
    watch.add(stop)
    try:
        yield
    finally:
        watch.remove(stop)


class _Watch:
    """The consumers of one loop, and the handlers that were there before them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stops: list[Callable[[], None]] = []
        self._before: dict[signal.Signals, Any] = {}

    def add(self, stop: Callable[[], None]) -> None:
        if not self._stops and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._take(number)
        self._stops.append(stop)

    def remove(self, stop: Callable[[], None]) -> None:
        self._stops.remove(stop)
        if not self._stops:
            for number, before in self._before.items():
                if not self._loop.is_closed():
                    self._loop.remove_signal_handler(number)
                signal.signal(number, before)
            self._before.clear()

    def _take(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not _is_default(before):
            return
        try:
            self._loop.add_signal_handler(number, self._on_signal)
        except (NotImplementedError, RuntimeError):  # not on this platform, or not with this loop
            return
        self._before[number] = before

    def _on_signal(self) -> None:
        for stop in list(self._stops):
            stop()


def _is_default(handler: object) -> bool:
    """Whether a handler is Python's own, or that of `asyncio.run`, which cancels the main task."""
    if isinstance(handler, partial):
        return isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    return handler in (signal.SIG_DFL, signal.default_int_handler)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()
