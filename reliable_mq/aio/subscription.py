"""The consumer's connection in the asyncio API, on the event loop.

Dead letters and retries are published by a task, which exists only while messages wait to be published.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from reliable_mq.aio.connection import AsyncConnection
from reliable_mq.aio.loop import resolve
from reliable_mq.engine.pull import ANSWER, LONGEST_WAIT, BasePullSubscription, PulledDelivery
from reliable_mq.engine.republisher import BaseRepublisher
from reliable_mq.engine.steps import awaiting
from reliable_mq.engine.subscription import CLOSE_GRACE, BaseSubscription

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from reliable_mq.aio.publisher import AsyncPublisher
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.errors import ReliableMQError


class AsyncRepublisher(BaseRepublisher):
    """A republisher that publishes in a separate task. For one event loop."""

    _publisher: AsyncPublisher

    def __init__(
        self, publisher: AsyncPublisher, report: Callable[[RepublishRequest, ReliableMQError | None], None], name: str
    ) -> None:
        super().__init__(publisher, report)
        self._name = name
        self._waiting: deque[RepublishRequest] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, republish: RepublishRequest) -> None:
        self._waiting.append(republish)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def close(self, timeout: float) -> None:
        await awaiting(self._close_publisher(timeout))
        self.abort()
        if self._task is not None:
            await asyncio.wait([self._task])

    def abort(self) -> None:
        """Publish nothing more. Does not wait."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self._publisher._abort()  # noqa: SLF001  # no user has this publisher, or this way out

    async def _run(self) -> None:
        while self._waiting:
            republish = self._waiting.popleft()
            try:
                await awaiting(self._publish(republish))
            except asyncio.CancelledError:  # the consumer ends, or the program does
                return


class AsyncSubscription(BaseSubscription):
    """The connection of a consumer. Created on the loop that it runs on."""

    ended: asyncio.Event
    republisher: AsyncRepublisher | None
    _connection_type = AsyncConnection
    _event_type = asyncio.Event
    _first_attempts_over: asyncio.Event
    _io: AsyncConnection

    async def _wait_first_attempts(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._first_attempts_over.wait()

    async def join(self) -> bool:
        return await self._io.close(CLOSE_GRACE)

    def _call_outside(self, call: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(call)


class _Changes:
    """A monitor that wakes one waiting task. On one loop nothing needs guarding."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[None] = nullcontext()
        self._waiter: asyncio.Future[None] | None = None

    def notify_all(self) -> None:
        if self._waiter is not None:
            resolve(self._waiter, None)

    async def wait(self, timeout: float) -> None:
        """Wait for a change, for up to ``timeout`` seconds."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._waiter], timeout=timeout)
        finally:
            self._waiter = None


class AsyncPullSubscription(AsyncSubscription, BasePullSubscription):
    """A subscription that requests each delivery."""

    _changes_type = _Changes

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self._turn = asyncio.Lock()

    async def take(self, most: int, timeout: float, taken: list[PulledDelivery]) -> None:
        """Wait for deliveries. Tasks take turns."""
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(min(timeout + ANSWER, LONGEST_WAIT)):
                await self._turn.acquire()
        except TimeoutError:
            return
        try:
            await awaiting(self._take(most, max(deadline, time.monotonic()), taken))
        finally:
            self._turn.release()
