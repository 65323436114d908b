"""The idempotency store in an SQL database for ``AsyncConsumer``, by SQLAlchemy's asyncio extension.

Invariants: as those of :mod:`reliable_mq.stores.sqlalchemy`; nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from reliable_mq.core.claims import Commit
from reliable_mq.durations import Duration
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.questions import (
    DAY,
    claims_in_order,
    held_by,
    stored_key,
    taken_in_order,
    the_one_loop,
    unique,
)
from reliable_mq.stores.sql.questions import (
    AGAIN_AT_MOST,
    PURGED_TOGETHER,
    Questions,
    mark,
    still_open,
    try_again,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from sqlalchemy.ext.asyncio import AsyncSessionTransaction, async_sessionmaker

    from reliable_mq.core.claims import Claim, Hold
    from reliable_mq.core.delivery import Delivery
    from reliable_mq.stores.sql.dialect import Steps

__all__ = ["AsyncSQLAlchemyStore"]

T = TypeVar("T")


class AsyncSQLAlchemyStore(Questions):
    """The same for ``AsyncConsumer``, on an ``AsyncEngine``, with the arguments of `SQLAlchemyStore`.

    To be used by one event loop.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        table: str = "reliable_mq_claims",
        session: async_sessionmaker[AsyncSession] | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(f"engine must be one of create_async_engine(), not {type(engine).__name__}")
        super().__init__(engine, retention, timeout, table)
        self._engine = engine
        self._session = session
        self._given_up: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def create_table(self) -> None:
        """See `SQLAlchemyStore.create_table`."""
        for attempt in range(AGAIN_AT_MOST):
            try:
                async with self._engine.begin() as connection:
                    for statement in self._sql.ddl:
                        await connection.execute(text(statement))
            except DBAPIError:
                if attempt == AGAIN_AT_MOST - 1:
                    raise
            else:
                return

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `SQLAlchemyStore.claim_many`."""
        if not keys:
            return []
        stored = unique(keys)
        holders = self.doubts.holders(stored.values())
        try:
            deadline = time.monotonic() + self.timeout
            found = await self._ask(self.claiming(holders, lease), deadline)
            if limit := self.pace.claimed(len(holders)):
                await self._purge_some(limit, deadline)
        except BaseException:
            self.doubts.unanswered(holders)
            raise
        return claims_in_order(keys, {key: found[name].claim(key) for key, name in stored.items()})

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `SQLAlchemyStore.complete_many`."""
        held = held_by(claims)
        return taken_in_order(claims, await self._ask(self.completing(held)) if held else ())

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `SQLAlchemyStore.release_many`."""
        held = held_by(claims)
        return taken_in_order(claims, await self._ask(self.releasing(held, failed)) if held else ())

    async def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `SQLAlchemyStore.reset_many`."""
        found = await self._ask(self.resetting(list(unique(keys).values()))) if keys else ()
        return [stored_key(key) in found for key in keys]

    async def purge(self) -> int:
        """See `SQLAlchemyStore.purge`."""
        total = 0
        while True:
            count = await self._ask(self.purging(PURGED_TOGETHER))
            total += count
            if count < PURGED_TOGETHER:
                return total

    @asynccontextmanager
    async def transaction(self, *deliveries: Delivery) -> AsyncIterator[AsyncSession]:
        """See `SQLAlchemyStore.transaction`."""
        holds = self.holds_of(deliveries)
        session, transaction, connection = await self._begin_in_time()
        try:
            yield session
        except BaseException:
            try:
                await self._in_time(self._roll_back(session))
            except IdempotencyStoreError as error:
                self.not_rolled_back(error)
            raise
        await self._in_time(self._commit(session, transaction, connection, holds))
        mark(holds, Commit.DONE)

    async def inbox(self, session: AsyncSession | AsyncConnection, *deliveries: Delivery) -> None:
        """See `SQLAlchemyStore.inbox`."""
        holds = self.holds_of(deliveries)
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        await self._in_time(self._complete_in(connection, holds))
        mark(holds, Commit.UNKNOWN)

    async def _begin_in_time(self) -> tuple[AsyncSession, AsyncSessionTransaction, AsyncConnection]:
        try:
            return await self._in_time(self._begin())
        except (ConfigurationError, IdempotencyStoreError):
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    async def _begin(self) -> tuple[AsyncSession, AsyncSessionTransaction, AsyncConnection]:
        session = AsyncSession(self._engine) if self._session is None else self._session()
        try:
            transaction = await session.begin()
            connection = await session.connection()
            await connection.run_sync(self.check_transaction)
        except BaseException:
            await self._roll_back(session)
            raise
        return session, transaction, connection

    async def _commit(
        self,
        session: AsyncSession,
        transaction: AsyncSessionTransaction,
        connection: AsyncConnection,
        holds: Sequence[Hold],
    ) -> None:
        try:
            still_open(transaction)
            await session.flush()
            await connection.run_sync(self.complete_in, holds)
            mark(holds, Commit.UNKNOWN)
            await transaction.commit()
        except BaseException:  # here: where nobody waits any more, nobody else is to touch the session
            await self._roll_back(session)
            raise
        await session.close()

    async def _complete_in(self, connection: AsyncConnection, holds: Sequence[Hold]) -> None:
        await connection.run_sync(self.check_transaction)
        await connection.run_sync(self.complete_in, holds)

    async def _roll_back(self, session: AsyncSession) -> None:
        try:
            await session.close()
        except Exception as error:  # noqa: BLE001 -- whatever the driver raises; the handler's own error matters more
            self.not_rolled_back(error)

    async def _purge_some(self, limit: int, deadline: float) -> None:
        try:
            self.pace.purged(await self._ask(self.purging(limit), deadline), limit)
        except IdempotencyStoreError as error:
            self.not_purged(error)

    async def _ask(self, steps: Callable[[int], Steps[T]], deadline: float | None = None) -> T:
        self._loop = the_one_loop(self, self._loop)
        left = self.timeout if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            return await self._in_time(self._ask_until_answered(steps), left)
        except IdempotencyStoreError:
            raise
        except Exception as error:  # whatever the driver raises
            raise self.failed(error) from error

    async def _in_time(self, coroutine: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Await; a driver that takes its time to be cancelled is left to itself."""
        task = asyncio.ensure_future(coroutine)
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout if limit is None else limit)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if not done:
            self._give_up(task)
            raise self.failed(TimeoutError(f"no answer within {self.timeout:g} s"))
        return task.result()

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # nobody is left to be told

    async def _ask_until_answered(self, steps: Callable[[int], Steps[T]]) -> T:
        for attempt in range(AGAIN_AT_MOST):
            try:
                return await self._ask_once(steps)
            except Exception as error:
                if not try_again(error, attempt):
                    raise
        raise TimeoutError("one conflict with others after the other")

    async def _ask_once(self, steps: Callable[[int], Steps[T]]) -> T:
        async with self._engine.connect() as connection:
            return await connection.run_sync(self.answer, steps)
