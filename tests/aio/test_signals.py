"""Signals stop consumers on a loop, and the earlier handlers are restored.

They are also restored in forked children.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from reliable_mq import AsyncConsumer
from reliable_mq._util import hooks
from reliable_mq.aio.consumer import on_signals
from reliable_mq.connection.connection import ConnectionState
from reliable_mq.testing.waiting import wait_until
from tests.children import end_of_forked_child
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function like `asyncio.run` for each kind of loop."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main)

    return run


def test_a_signal_reaches_all_blocks_and_its_handler_is_restored(run: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        received: list[str] = []
        both = asyncio.Event()

        def note(name: str) -> None:
            received.append(name)
            if len(received) == 2:
                both.set()

        with on_signals(lambda: note("one")):
            with on_signals(lambda: note("other")):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(both.wait(), 10)
            assert received == ["one", "other"]
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before

    run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_control_c_stops_the_work_and_cancels_no_main_task(run: Any) -> None:
    """SIGINT has asyncio.run's handler, which is replaced.

    Before and after that, SIGINT cancels the main task as usual.
    """
    ended: list[str] = []

    async def main() -> None:
        stopped = asyncio.Event()
        with on_signals(stopped.set):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stopped.wait(), 10)
        ended.append("stopped")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["stopped", "cancelled"]


def test_a_handler_that_is_there_is_left_alone(run: Any) -> None:
    async def main() -> None:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        with on_signals(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(received.wait(), 10)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    run(main())


def test_a_handler_that_is_set_meanwhile_stays(run: Any) -> None:
    """For example that of a server that starts after the consumer."""

    def own(*_: object) -> None: ...

    async def main() -> None:
        with on_signals(lambda: None):
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own

    before = signal.getsignal(signal.SIGTERM)
    try:
        run(main())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_added_to_the_loop_meanwhile_stays(run: Any) -> None:
    async def main() -> None:
        received, loop = asyncio.Event(), asyncio.get_running_loop()
        with on_signals(lambda: None):
            loop.add_signal_handler(signal.SIGTERM, received.set)
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(received.wait(), 10)
        loop.remove_signal_handler(signal.SIGTERM)

    run(main())


def test_off_the_main_thread_signals_are_left_alone(run: Any) -> None:
    async def main() -> None:
        with on_signals(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is before

    async def elsewhere() -> None:
        await asyncio.to_thread(run, main())

    before = signal.getsignal(signal.SIGTERM)
    run(elsewhere())


@pytest.mark.parametrize("in_thread", [False, True], ids=["loop", "thread"])
def test_a_signal_to_a_forked_child_ends_it_alone(run: Any, in_thread: bool) -> None:
    """A shared descriptor would pass the child's signals to the parent's loop."""
    received: list[int] = []

    async def main() -> None:
        own = asyncio.Event()

        def stop() -> None:
            received.append(len(received))
            own.set()

        with on_signals(stop):
            fork = partial(end_of_forked_child, signal.SIGTERM)
            ends = [await asyncio.to_thread(fork) if in_thread else fork() for _ in range(3)]
            os.kill(os.getpid(), signal.SIGTERM)  # the loop handles it after any signal of the children
            await asyncio.wait_for(own.wait(), 10)
        assert ends == [-signal.SIGTERM] * 3

    run(main())
    assert received == [0]


def test_a_signal_that_comes_early_ends_a_forked_child_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes before the first hook of the package in the child."""
    early = (hooks.ForkStage.RENEW, partial(signal.raise_signal, signal.SIGTERM))
    monkeypatch.setattr(hooks, "_in_child", [early, *hooks._in_child])
    received: list[str] = []

    async def main() -> None:
        own = asyncio.Event()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        with on_signals(lambda: own.set() or received.append("a signal")):
            assert end_of_forked_child(signal.SIGTERM) == -signal.SIGTERM
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(own.wait(), 10)

    run(main())
    assert received == ["a signal"]


def test_a_forked_child_has_the_handlers_from_before(run: Any) -> None:
    """Handlers that the program sets in the meantime stay."""

    async def main() -> None:
        def check() -> None:
            assert signal.getsignal(signal.SIGINT) is before
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask

        before = signal.getsignal(signal.SIGINT)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        with on_signals(lambda: None):
            signal.signal(signal.SIGTERM, own)
            assert end_of_forked_child(signal.SIGKILL, check) == -signal.SIGKILL

    def own(*_: object) -> None: ...

    run(main())


@pytest.mark.parametrize("hurried", [False, True], ids=["stop", "stop-now"])
def test_a_stop_by_the_programs_own_handler_begins_at_once(run: Any, hurried: bool) -> None:
    """Nothing else wakes the loop, which waits for its next attempt to connect.

    The loop does not handle signals itself.
    """

    async def handle(_: object) -> None: ...

    async def main() -> None:
        consumer = AsyncConsumer(NOBODY, "orders", handle, reconnect_wait=lambda _: 60)

        def stop(*_: object) -> None:
            subscription = consumer._subscription
            assert subscription is not None
            (subscription.stop_now if hurried else consumer.stop)()

        def waits() -> bool:
            subscription = consumer._subscription
            return subscription is not None and subscription._io._connector._state is ConnectionState.WAITING

        def kill_once_it_waits() -> None:
            wait_until(waits, timeout=10, what="an attempt that failed")
            os.kill(os.getpid(), signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        killing = threading.Thread(target=kill_once_it_waits)
        try:
            async with asyncio.timeout(20):
                killing.start()
                await consumer.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            killing.join()

    run(main())


def test_the_first_signal_after_a_stop_cancels_no_handler(run: Any) -> None:
    """The second one would."""
    ended: list[str] = []

    async def main() -> None:
        begun, may_end, signalled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handle(_: object) -> None:
            begun.set()
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            ended.append("returned")

        consumer = AsyncConsumer(broker.url, "orders", handle, stop_timeout=30)
        with on_signals(signalled.set):
            running = asyncio.create_task(consumer.run())
            channel = await asyncio.to_thread(lambda: broker.consuming)
            channel.deliver(b"")
            await asyncio.wait_for(begun.wait(), 10)
            consumer.stop()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(signalled.wait(), 10)
            await asyncio.wait([running], timeout=0.2)
            assert not running.done()
            may_end.set()
            await asyncio.wait_for(running, 10)

    with ScriptedBroker() as broker:
        run(main())
    assert ended == ["returned"]
    assert [one.verdict for one in broker.settlements] == ["ack"]


def test_nothing_keeps_a_loop_that_a_consumer_ran_on(run: Any) -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        with on_signals(lambda: None):
            pass

    run(main())
    gc.collect()
    assert loops[0]() is None
