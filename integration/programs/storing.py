"""Consume with an idempotency store, and die by SIGKILL at a given step.

Arguments: AMQP_URL STORE_URL API EFFECTS STEP [BATCH]. If EFFECTS is ``inbox``, an effect is a row in the table
``effects`` of the store's own database, in one transaction with the claim. Otherwise it is a line ``effect ID`` in
the file EFFECTS, and ``done ID`` there means that the store has accepted the completion. With BATCH, handlers get
batches of that size. STEP is one of ``claim``, ``claimed``, ``effect``, ``completed`` and ``acking`` (see `Dying`),
or ``none`` for a process that SIGTERM ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from reliable_mq import AsyncConsumer, Consumer, Queue
from reliable_mq.stores import AsyncRedisStore, AsyncSQLAlchemyStore, RedisStore, SQLAlchemyStore, SQLiteStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq import Delivery
    from reliable_mq.stores import Claim

LEASE = 2.0
ORDERS = Queue("orders")


def new_store(url: str, api: str = "sync") -> Any:
    """Return the store at a URL: ``redis://``, ``file://`` (SQLite), or SQLAlchemy's."""
    if url.startswith("redis://"):
        return RedisStore(url) if api == "sync" else AsyncRedisStore(url)
    if url.startswith("file://"):
        return SQLiteStore(url.removeprefix("file://"), timeout=30)
    if api == "sync":
        return SQLAlchemyStore(create_engine(url, pool_size=8), timeout=30)
    return AsyncSQLAlchemyStore(create_async_engine(url), timeout=30)


class Dying:
    """A store whose process dies once three messages have reached a step.

    ``claim``: before the store is asked for a claim; ``claimed``: after the claim was granted; ``effect``: in the
    handler, between its effect and the end of its transaction; ``completed``: after the completion; ``acking``:
    shortly after that.
    """

    def __init__(self, store: Any, step: str, where: str) -> None:
        self.store = store
        self.file = -1 if where == "inbox" else os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._step = step
        self._reached = 0
        self._lock = threading.Lock()

    def reach(self, step: str, messages: int = 1) -> None:
        with self._lock:
            if step == self._step:
                self._reached += messages
            if self._reached >= 3:
                os.kill(os.getpid(), signal.SIGKILL)

    def completed(self, claims: Sequence[Claim], done: Sequence[bool]) -> None:
        for claim, taken in zip(claims, done, strict=True):
            if taken and self.file >= 0:
                self.note("done", claim.key.partition("|")[2])
        self.after(len(claims))

    def note(self, what: str, message_id: str | None) -> None:
        os.write(self.file, f"{what} {message_id}\n".encode())

    def after(self, messages: int = 1) -> None:
        self.reach("completed", messages)
        threading.Timer(0.05, self.reach, ["acking", messages]).start()


class DyingStore(Dying):
    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        self.reach("claim", len(keys))
        claims: list[Claim] = self.store.claim_many(keys, lease)
        self.reach("claimed", len(keys))
        return claims

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        done: list[bool] = self.store.complete_many(claims)
        self.completed(claims, done)
        return done

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        held: list[bool] = self.store.release_many(claims, failed=failed)
        return held

    def transaction(self, *deliveries: Delivery) -> Any:
        return self.store.transaction(*deliveries)


class AsyncDyingStore(Dying):
    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        self.reach("claim", len(keys))
        claims: list[Claim] = await self.store.claim_many(keys, lease)
        self.reach("claimed", len(keys))
        return claims

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        done: list[bool] = await self.store.complete_many(claims)
        self.completed(claims, done)
        return done

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        held: list[bool] = await self.store.release_many(claims, failed=failed)
        return held

    def transaction(self, *deliveries: Delivery) -> Any:
        return self.store.transaction(*deliveries)


_EFFECT = text("INSERT INTO effects (id) VALUES (:id)")


class Effects:
    """The effects of handlers, for one delivery or for a batch."""

    def __init__(self, store: Dying) -> None:
        self._store = store

    def handle(self, given: Delivery | list[Delivery]) -> None:
        batch = given if isinstance(given, list) else [given]
        if self._store.file >= 0:
            self._write(batch)
            return
        with self._store.store.transaction(*batch) as session:
            for delivery in batch:
                session.execute(_EFFECT, {"id": delivery.message_id})
                self._store.reach("effect")
        self._store.after(len(batch))

    async def handle_async(self, given: Delivery | list[Delivery]) -> None:
        batch = given if isinstance(given, list) else [given]
        if self._store.file >= 0:
            self._write(batch)
            return
        async with self._store.store.transaction(*batch) as session:
            for delivery in batch:
                await session.execute(_EFFECT, {"id": delivery.message_id})
                self._store.reach("effect")
        self._store.after(len(batch))

    def _write(self, batch: list[Delivery]) -> None:
        for delivery in batch:
            self._store.note("effect", delivery.message_id)
            self._store.reach("effect")


def main(url: str, store_url: str, api: str, where: str, step: str, batch: str = "") -> None:
    options: dict[str, Any] = {"idempotency_lease": LEASE, "prefetch": 20, "concurrency": 2}
    if batch:
        options |= {"batch_size": int(batch), "batch_wait": 0.2}
    if api == "sync":
        store = DyingStore(new_store(store_url), step, where)
        Consumer(url, ORDERS, Effects(store).handle, idempotency=store, **options).run()
        return

    async def consume() -> None:
        store = AsyncDyingStore(new_store(store_url, api), step, where)
        await AsyncConsumer(url, ORDERS, Effects(store).handle_async, idempotency=store, **options).run()
        await (store.store.close() if isinstance(store.store, AsyncRedisStore) else store.store._engine.dispose())

    asyncio.run(consume())


if __name__ == "__main__":
    main(*sys.argv[1:])
