"""Signals stop what runs on a loop, and are given back."""

from __future__ import annotations

import asyncio
import os
import signal

from reliable_mq.aio.signals import on_signals


def test_a_signal_reaches_all_in_their_blocks_and_then_whoever_had_it() -> None:
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

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_is_there_is_left_alone() -> None:
    async def main() -> None:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        with on_signals(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(received.wait(), 10)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())


def test_off_the_main_thread_signals_are_left_alone() -> None:
    async def main() -> None:
        with on_signals(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is before

    async def elsewhere() -> None:
        await asyncio.to_thread(asyncio.run, main())

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(elsewhere())
