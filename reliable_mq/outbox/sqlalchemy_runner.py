"""Work on a database, from any thread, whether the user's engine is a plain or an asyncio one.

Work is a function of a plain ``Connection``. With an asyncio engine it runs on an event loop of its own thread, with
connections of its own: a pool belongs to the event loop that it was made on, and the user's must never wait for us.
Whoever waits for a database that hangs is let go by ``close``; loop and connections end when it answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Engine

from reliable_mq.isolation import transaction_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["AsyncRunner", "Runner", "SyncRunner"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE = 5.0  # seconds for connections to close


class Runner(Protocol):
    """Carries out work on a connection, in one transaction."""

    def run(self, work: Callable[[Connection], T], *, isolation: str | None = None) -> T:
        """Call ``work`` in a transaction and commit it; blocks. Rolled back where it raises."""
        ...

    def close(self) -> None:
        """Let go of what is ours, until the next call."""
        ...


class SyncRunner:
    """On the calling thread, with a connection of the user's own pool."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, work: Callable[[Connection], T], *, isolation: str | None = None) -> T:
        with self._engine.connect() as connection, transaction_at(connection, isolation):
            return work(connection)

    def close(self) -> None:
        """The pool is the user's."""


class AsyncRunner:
    """On an event loop of its own, with a pool like the user's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._theirs = engine
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine: AsyncEngine | None = None
        self._running: set[concurrent.futures.Future[Any]] = set()

    def run(self, work: Callable[[Connection], T], *, isolation: str | None = None) -> T:
        with self._lock:
            loop, engine = self._started()
            running = self._running
            call = asyncio.run_coroutine_threadsafe(self._run(engine, work, isolation), loop)
            running.add(call)
        try:
            result: T = call.result()
        except concurrent.futures.CancelledError as error:
            raise OSError("the outbox was closed before there was an answer") from error
        finally:
            running.discard(call)
        return result

    def close(self) -> None:
        """Close the connections, and end the thread; waits for that for some seconds, and lets go of who waits."""
        with self._lock:
            loop, thread, engine = self._loop, self._thread, self._engine
            self._loop = self._thread = self._engine = None
            running, self._running = self._running, set()
        for call in list(running):
            call.cancel()
        if loop is not None and thread is not None and engine is not None:
            asyncio.run_coroutine_threadsafe(_end(engine), loop)
            thread.join(_GRACE)

    def _started(self) -> tuple[asyncio.AbstractEventLoop, AsyncEngine]:
        if self._loop is None or self._engine is None:
            theirs = self._theirs.sync_engine
            self._engine = type(self._theirs)(Engine(theirs.pool.recreate(), theirs.dialect, theirs.url))
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="reliable_mq outbox database", daemon=True
            )
            self._thread.start()
        return self._loop, self._engine

    @staticmethod
    async def _run(engine: AsyncEngine, work: Callable[[Connection], Any], isolation: str | None) -> Any:
        def in_transaction(connection: Connection) -> Any:
            with transaction_at(connection, isolation):
                return work(connection)

        async with engine.connect() as connection:
            return await connection.run_sync(in_transaction)


async def _end(engine: AsyncEngine) -> None:
    """When everything under way has ended, close the connections, and stop the loop."""
    try:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        await engine.dispose()
    except Exception:
        logger.exception("closing the connections of an outbox")
    finally:
        asyncio.get_running_loop().stop()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
