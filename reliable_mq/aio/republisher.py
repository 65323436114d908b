"""Publishes dead letters on a connection of their own, confirmed, and says of each whether it was.

On a connection of their own, since the broker blocks publishing connections under an alarm, and a consumer's must go on
acking.

Invariants: each dead letter that is put is answered exactly once, unless the loop ends before; nothing blocks the
caller; the connection is opened with the first dead letter; there is a task only while some wait to be published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.core.ages import names
from reliable_mq.errors import PublishError, ReliableMQError
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.aio.publisher import AsyncPublisher
    from reliable_mq.core.deadletters import Republish

__all__ = ["AsyncRepublisher"]

logger = logging.getLogger(__name__)


class AsyncRepublisher:
    """See the module. On one event loop.

    Args:
        publisher: not opened yet; closed by `close`.
        answer: told of each dead letter: None where it is confirmed, else why not.
        name: of the task.
    """

    def __init__(
        self, publisher: AsyncPublisher, answer: Callable[[Republish, ReliableMQError | None], None], name: str
    ) -> None:
        self._publisher = publisher
        self._answer = answer
        self._name = name
        self._waiting: deque[Republish] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, republish: Republish) -> None:
        """Publish one. Does not wait."""
        self._waiting.append(republish)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def close(self, timeout: float) -> None:
        """Give up what is not confirmed within ``timeout`` seconds; its originals stay unacked."""
        try:
            await self._publisher.close(timeout)
        except PublishError:
            logger.exception("dead letters were given up; their originals stay in the queue")
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
                await self._publish(republish)
            except asyncio.CancelledError:  # the consumer ends, or the program does
                return

    async def _publish(self, republish: Republish) -> None:
        try:
            message = Message.from_wire(republish.body, republish.properties)
            confirmation = await self._publisher.submit(
                message, exchange=republish.exchange, routing_key=republish.routing_key
            )
        except ReliableMQError as error:
            self._answer(republish, error)
        except Exception as error:
            logger.exception("the copy of %s cannot be published", names([republish.delivery]))
            self._answer(republish, PublishError(f"it cannot be published: {error!r}"))
        else:
            confirmation.add_done_callback(partial(self._settled, republish))

    def _settled(self, republish: Republish, confirmation: AsyncConfirmation) -> None:
        self._answer(republish, confirmation.exception())
