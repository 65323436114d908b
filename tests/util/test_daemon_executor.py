"""Threads for calls that may block: late calls, and calls that hang."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from reliable_mq._util.threads import DaemonExecutor, call_in_background, call_on_thread
from reliable_mq.testing.waiting import until, wait_until
from tests.refused_threads import refusing_threads


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("daemon-")]


def test_a_call_after_the_end_is_made_and_leaves_no_thread() -> None:
    """A cancelled task releases its claims. No one would end an idle thread."""

    async def main() -> None:
        threads = DaemonExecutor("daemon", 2)
        assert await threads.future(lambda: 1) == 1
        threads.close()
        assert await threads.future(lambda: 2) == 2
        await until(lambda: not running())

    asyncio.run(main())


def test_a_call_after_the_end_waits_for_none_that_hangs() -> None:
    go_on = threading.Event()

    async def main() -> None:
        threads = DaemonExecutor("daemon", 1)
        hanging = threads.future(lambda: go_on.wait(20))
        threads.close()
        async with asyncio.timeout(10):
            assert await threads.future(lambda: 2) == 2
        go_on.set()
        assert await hanging
        await until(lambda: not running())

    asyncio.run(main())


def test_a_call_hangs_once_nobody_waits_for_it() -> None:
    go_on = threading.Event()

    async def main() -> None:
        threads = DaemonExecutor("daemon", 1)
        hanging, queued = threads.future(lambda: go_on.wait(20)), threads.future(lambda: None)
        assert threads.hanging == 0
        hanging.cancel()
        queued.cancel()
        await until(lambda: threads.hanging == 2)
        go_on.set()
        await until(lambda: threads.hanging == 0)
        threads.close()

    asyncio.run(main())


def test_without_a_thread_a_call_runs_on_the_current_one() -> None:
    async def main() -> None:
        with refusing_threads("-late") as refused:
            assert await call_on_thread("end", threading.get_ident) == threading.get_ident()
        assert refused == ["end-late"]
        assert await call_on_thread("end", threading.get_ident) != threading.get_ident()

    asyncio.run(main())


def test_a_background_call_that_failed_keeps_nothing_alive() -> None:
    """Its error has a traceback. The collector of cycles may run much later."""

    class Caller:
        def fail(self) -> None:
            raise OSError("no answer")

        def done(self, outcome: object) -> None:
            outcomes.append(type(outcome))

    outcomes: list[type] = []
    caller = Caller()
    kept = weakref.ref(caller)
    gc.disable()
    try:
        call_in_background("daemon-background", caller.fail, caller.done)
        del caller
        wait_until(lambda: not running(), timeout=10, what="the end of the thread")
        assert kept() is None
    finally:
        gc.enable()
    assert outcomes == [OSError]


def test_a_forked_child_makes_calls_of_its_own() -> None:
    """The lock may be held at the fork. No call hangs in the child, and a closed executor stays closed."""
    go_on, context = threading.Event(), multiprocessing.get_context("fork")
    threads, closed, answers = DaemonExecutor("daemon", 1), DaemonExecutor("daemon"), context.SimpleQueue()
    with pytest.raises(TimeoutError):
        threads.call(lambda _: go_on.wait(20), 0.02)
    closed.close()

    def ask() -> None:
        answers.put([threads.hanging, threads.call(lambda _: 7, 20), closed.call(lambda _: 8, 20)])
        for thread in threading.enumerate():
            if thread.name.startswith("daemon-late"):
                thread.join(20)
        answers.put(running())

    with ThreadPoolExecutor(1) as other:
        other.submit(threads._lock.acquire).result(10)
        child = context.Process(target=ask, daemon=True)
        child.start()
        child.join(30)
        other.submit(threads._lock.release).result(10)
    assert child.exitcode == 0
    assert answers.get() == [0, 7, 8]
    assert answers.get() == ["daemon-1"]
    assert threads.hanging == 1
    go_on.set()
    threads.close()
