"""The thread on which callbacks run."""

from __future__ import annotations

import gc
import threading
from weakref import WeakSet

from reliable_mq._util.threads import CallbackThread
from reliable_mq.testing.waiting import wait_until

NAME = "callbacks-of-a-test"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_callback_after_the_end_runs_on_a_thread_that_ends() -> None:
    """A late callback runs and leaves no thread; expecting one starts no thread."""
    callbacks = CallbackThread(NAME)
    called: list[int] = []
    callbacks.put(lambda: called.append(1))
    callbacks.stop()
    assert callbacks.join(10)
    callbacks.start()
    assert not threads()
    for number in (2, 3):
        callbacks.put(lambda number=number: called.append(number))
    wait_until(lambda: not threads(), timeout=10, what="the end of the threads")
    assert sorted(called) == [1, 2, 3]


def test_one_that_was_never_started_stops_at_once() -> None:
    callbacks = CallbackThread(NAME)
    callbacks.stop()
    assert callbacks.join(0)
    assert not threads()


def test_callbacks_that_may_wait_run_together_and_at_the_end() -> None:
    callbacks = CallbackThread(NAME)
    called: list[int] = []
    for number in range(250):  # more than the thread keeps
        callbacks.put_later(lambda number=number: called.append(number))
    wait_until(lambda: len(called) == 250, timeout=10, what="all of them")
    callbacks.put_later(lambda: called.append(250))
    callbacks.put(lambda: called.append(251))
    wait_until(lambda: len(called) == 252, timeout=10, what="both kinds")
    callbacks.put_later(lambda: called.append(252))
    callbacks.stop()
    assert callbacks.join(10)
    callbacks.put_later(lambda: called.append(253))
    wait_until(lambda: not threads(), timeout=10, what="the end of the threads")
    assert sorted(called) == list(range(254))


def test_an_idle_thread_keeps_no_callback_alive() -> None:
    """A callback may hold a large message."""
    callbacks = CallbackThread(NAME)
    kept: WeakSet[threading.Event] = WeakSet()

    def put() -> None:
        done = threading.Event()
        kept.add(done)
        callbacks.put(done.set)
        assert done.wait(10)

    def is_gone() -> bool:
        gc.collect()
        return not kept

    put()
    wait_until(is_gone, timeout=10, what="the end of the callback")
    callbacks.stop()
    assert callbacks.join(10)
