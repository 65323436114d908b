"""The main thread waits, and signals are handled all the same."""

from __future__ import annotations

import signal
import threading
import time

from reliable_mq.sync.signals import wait_heeding_signals


def test_a_signal_that_another_thread_got_is_handled_while_the_main_one_waits() -> None:
    """As one is that comes just before the wait: nothing interrupts it."""
    over = threading.Event()
    waiting = threading.Event()
    handled_by: list[threading.Thread] = []

    def handle(_number: int, _frame: object) -> None:
        handled_by.append(threading.current_thread())
        over.set()

    def be_killed() -> None:
        waiting.wait(10)
        time.sleep(0.1)  # the main thread has nothing left but to wait; earlier would do as well
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    rescued = threading.Event()
    late = threading.Timer(5, lambda: (rescued.set(), over.set()))
    victim = threading.Thread(target=be_killed)
    try:
        victim.start()
        late.start()
        waiting.set()
        wait_heeding_signals(over)
        assert handled_by == [threading.main_thread()]
        assert not rescued.is_set()
    finally:
        late.cancel()
        late.join()
        victim.join()
        signal.signal(signal.SIGTERM, before)
