"""Our consumer with each idempotency store, compared with itself without one.

Servers are started here, which is not measured.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from integration.support.databases import Database
from reliable_mq.stores import IdempotencyStore, MemoryStore, RedisStore, SQLAlchemyStore, SQLiteStore
from reliable_mq.sync.consumer import Consumer

if TYPE_CHECKING:
    from reliable_mq import Delivery

KINDS = ("memory", "sqlite", "redis", "postgresql", "mariadb")


def new_store(kind: str, stack: ExitStack) -> IdempotencyStore:
    """Return a store whose commits wait for the disk, as in production."""
    if kind == "memory":
        return MemoryStore()
    if kind == "sqlite":
        return stack.enter_context(SQLiteStore(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "done.db"))
    url = stack.enter_context(Database(kind, durable=True)).fresh()
    if kind == "redis":
        return stack.enter_context(RedisStore(url))
    engine = create_engine(url)
    store = SQLAlchemyStore(engine)
    store.create_table()
    stack.callback(engine.dispose)
    stack.callback(store.close)
    return store


def run(kind: str, job: Job) -> Sample:
    meter = Meter()
    finished = threading.Event()
    samples: list[Sample] = []
    count, last = 0, job.messages

    def handle(_delivery: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            meter.start()
        if count == last:
            samples.append(meter.stop(last))
            finished.set()

    def key(delivery: Delivery) -> str:
        return f"{delivery.delivery_tag}"  # messages here have no message_id, and are delivered once

    with ExitStack() as stack:
        store = new_store(kind, stack)
        with Consumer(
            job.url,
            job.queue,
            handle,
            prefetch=job.prefetch,
            ack_every=job.ack_every,
            idempotency=store,
            idempotency_key=key,
        ):
            finished.wait()
    return samples[0]


CONTENDERS = [
    Contender(
        name=f"ours-consumer-{kind}",
        label=f"reliable_mq Consumer with an idempotency store: {kind}",
        role=Role.CONSUMER,
        run=functools.partial(run, kind),
    )
    for kind in KINDS
]

BARS = [Bar("ours-consumer-memory", (Limit(Measure.RATE, 0.8, "ours-consumer"),))]

if __name__ == "__main__":
    child.main(CONTENDERS)
