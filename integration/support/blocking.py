"""Runs `AsyncPublisher` on an event loop thread, with the methods of `Publisher`.

One test can then cover both APIs. Each method calls the method of the same name with the same arguments and waits for
the result. A call that exceeds the deadline fails the test.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import uvloop

from reliable_mq import PublishError
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.engine.publisher import PublisherState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from reliable_mq import Message, Receipt
    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.core.statistics import PublisherStatistics

_DEADLINE = 100.0  # seconds until a call counts as hanging


class Loop:
    """An event loop in a thread.

    It collects the errors that asyncio reports. `stop` fails the test if there are any, or if a task is left.

    Args:
        factory: Creates the loop. None for asyncio's loop.
    """

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        self.complaints: list[dict[str, Any]] = []
        self.left: set[str] = set()
        self._started = threading.Event()
        self._factory = factory
        self._thread = threading.Thread(target=self._run, name="event loop", daemon=True)
        self._thread.start()
        self._started.wait(10)

    def call(self, coroutine: Coroutine[Any, Any, Any], deadline: float = _DEADLINE) -> Any:
        """Run a coroutine on the loop and return its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(deadline)
        except concurrent.futures.CancelledError as error:
            raise AssertionError("a call was cancelled") from error
        except BaseException:
            future.cancel()  # if this thread was interrupted or timed out while it waited
            raise

    def stop(self) -> None:
        """End the loop; fail if a task is left or asyncio has reported an error."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)
        assert not self._thread.is_alive(), "the event loop hangs"
        assert not self.left, f"tasks are left: {self.left}"
        assert not self.complaints, self.complaints

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._factory) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.complaints.append(context))
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        self.left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


class BlockingConfirmation:
    """A confirmation that another thread can wait for."""

    def __init__(self, loop: Loop, confirmation: AsyncConfirmation) -> None:
        self._loop = loop
        self._confirmation = confirmation
        self.message_id = confirmation.message_id

    def done(self) -> bool:
        return self._confirmation.done()

    def result(self, timeout: float | None = None) -> Receipt:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._confirmation.result()

    def exception(self, timeout: float | None = None) -> PublishError | None:
        if not self._confirmation.done():
            self._loop.call(self._settled(timeout))
        return self._confirmation.exception()

    def add_done_callback(self, callback: Any) -> None:
        async def add() -> None:
            self._confirmation.add_done_callback(callback)

        self._loop.call(add())

    @property
    def callbacks(self) -> object:
        return self._confirmation.callbacks

    async def _settled(self, timeout: float | None) -> None:
        with suppress(PublishError):
            async with asyncio.timeout(timeout):
                await self._confirmation


class BlockingPublisher:
    """An `AsyncPublisher` on its own loop thread, with the methods of a `Publisher`."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None

    def __init__(self, url: Any, **arguments: Any) -> None:
        self.publisher = AsyncPublisher(url, **arguments)
        self._loop: Loop | None = None

    def publish(self, message: Message, **arguments: Any) -> Receipt:
        receipt: Receipt = self._call(lambda: self.publisher.publish(message, **arguments))
        return receipt

    def submit(self, message: Message, **arguments: Any) -> BlockingConfirmation:
        confirmation = self._call(lambda: self.publisher.submit(message, **arguments))
        assert self._loop is not None
        return BlockingConfirmation(self._loop, confirmation)

    def publish_many(self, messages: Any, **arguments: Any) -> Any:
        return self._call(lambda: self.publisher.publish_many(messages, **arguments))

    def flush(self, timeout: float | None = None) -> None:
        self._call(lambda: self.publisher.flush(timeout))

    def connect(self) -> None:
        self._call(self.publisher.connect)

    def close(self, timeout: float = 30.0) -> None:
        try:
            self._call(lambda: self.publisher.close(timeout))
        finally:
            self._stop()

    def __enter__(self) -> Self:
        self._call(self.publisher.__aenter__)
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._call(lambda: self.publisher.__aexit__(*exc_info))
        finally:
            self._stop()

    @property
    def outstanding(self) -> int:
        return self.publisher.outstanding

    @property
    def connected(self) -> bool:
        return self.publisher.connected

    @property
    def blocked(self) -> str | None:
        return self.publisher.blocked

    @property
    def statistics(self) -> PublisherStatistics:
        return self.publisher.statistics

    def _call(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if self._loop is None:
            self._loop = Loop(self.loop_factory)
        try:
            return self._loop.call(call())
        finally:
            publisher = self.publisher
            if (
                publisher._started_channel is publisher._outbox_channel is None
                or publisher._state is PublisherState.CLOSED
            ):  # nothing is running
                self._stop()

    def _stop(self) -> None:
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.stop()


class UvloopPublisher(BlockingPublisher):
    """A `BlockingPublisher` on uvloop's event loop."""

    loop_factory = staticmethod(uvloop.new_event_loop)
