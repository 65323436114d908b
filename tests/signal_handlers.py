"""Signal handlers of tests.

The handlers of SIGTERM and SIGINT are restored after each test. Spark's readers replace that of SIGTERM, and their
handler ends the process. A later test in the same process may send SIGTERM to itself. Tests that interrupt a program at
any step also do it between the end of a block and the restoring of its handlers.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Interrupted(BaseException):
    """The exception of a signal handler."""


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that raises Interrupted on the current thread, by a signal."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield partial(signal.pthread_kill, threading.get_ident(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
