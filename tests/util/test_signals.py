"""Signal handlers that are replaced temporarily, and signals to a waiting main thread."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from queue import SimpleQueue

import pytest

from reliable_mq._util.signals import ReplacedHandlers, next_signal, wait_heeding_signals


def test_a_handler_that_was_not_replaced_is_not_restored() -> None:
    def fail() -> None:
        raise NotImplementedError

    def own(*_: object) -> None: ...

    replaced = ReplacedHandlers()
    with pytest.raises(NotImplementedError):
        replaced.replace(signal.SIGUSR1, fail)
    assert not replaced.numbers
    before = signal.signal(signal.SIGUSR1, own)
    try:
        replaced.restore()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_replacement_that_was_cut_short_is_undone() -> None:
    """The handler of another signal raises just after the new handler is set."""

    def install() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGUSR1)
    replaced = ReplacedHandlers()
    with pytest.raises(KeyboardInterrupt):
        replaced.replace(signal.SIGUSR1, install)
    replaced.restore()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_restoring_that_is_interrupted_restores_all_the_same() -> None:
    """The handler of another signal raises in the middle."""
    interruptions = iter([KeyboardInterrupt])

    def remove(_: int) -> None:
        for interruption in interruptions:
            raise interruption

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    replaced = ReplacedHandlers()
    for number in numbers:
        replaced.replace(number, partial(signal.signal, number, signal.SIG_IGN))
    with pytest.raises(KeyboardInterrupt):
        replaced.restore(remove)
    assert [signal.getsignal(number) for number in numbers] == before
    assert not replaced.numbers


@pytest.mark.parametrize("for_any", [False, True])
def test_a_waiting_main_thread_handles_a_signal_to_another(for_any: bool) -> None:
    """The signal does not interrupt the wait.

    It may come just before the wait, or go to another thread.
    """
    over = threading.Event()
    received: SimpleQueue[int] = SimpleQueue()
    waiting = threading.Event()
    handled_by: list[threading.Thread] = []

    def handle(number: int, _frame: object) -> None:
        handled_by.append(threading.current_thread())
        over.set()
        received.put(number)

    def be_killed() -> None:
        waiting.wait(10)
        time.sleep(0.1)  # the main thread only waits by now; an earlier signal would do too
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    rescued = threading.Event()
    late = threading.Timer(30, lambda: (rescued.set(), over.set(), received.put(0)))
    victim = threading.Thread(target=be_killed)
    try:
        victim.start()
        late.start()
        waiting.set()
        if for_any:
            assert next_signal(received) == signal.SIGTERM
        else:
            wait_heeding_signals(over)
        assert handled_by == [threading.main_thread()]
        assert not rescued.is_set()
    finally:
        late.cancel()
        late.join()
        victim.join()
        signal.signal(signal.SIGTERM, before)
