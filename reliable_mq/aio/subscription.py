"""A consumer's connection on the event loop, and how tasks wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from reliable_mq.aio.connector import AsyncConnector
from reliable_mq.connection.consuming.subscription import CLOSE_GRACE, BaseSubscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.aio.republisher import AsyncRepublisher
    from reliable_mq.connection.client import Client
    from reliable_mq.core.recovery import Recovery
    from reliable_mq.core.setup import ServerInfo, SetupGenerator
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings

__all__ = ["AsyncSubscription"]


class AsyncSubscription(BaseSubscription):
    """See `BaseSubscription`. Made on the loop that it is to run on."""

    ended: asyncio.Event
    republisher: AsyncRepublisher | None
    _verdict: asyncio.Event
    _io: AsyncConnector

    @property
    def stalled_seconds(self) -> float:
        """For how long the event loop has stood still, see `AsyncConnector`."""
        return self._io.stalled_seconds

    async def wait_connected(self, timeout: float) -> ReliableMQError | None:
        """Wait for the outcome of the first attempt on every host. Returns why it is not subscribed, or None.

        A set-up that goes on (a large topology) is waited for beyond ``timeout``.
        """
        limit = timeout
        while limit > 0 and not self._verdict.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._verdict.wait()
            limit = self._io.patience
        return self.verdict(timeout)

    async def join(self) -> bool:
        """After the end, wait until the connection is closed."""
        return await self._io.close(CLOSE_GRACE)

    def abort(self) -> None:
        """After the end, close the connection without a handshake. Does not wait."""
        self._io.stop()

    def _new_event(self) -> asyncio.Event:
        return asyncio.Event()

    def _new_connection(
        self,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: Client,
        recovery: Recovery,
    ) -> AsyncConnector:
        return AsyncConnector(name=name, settings=settings, setup=setup, client=client, recovery=recovery)
