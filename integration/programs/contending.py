"""Handle deliveries in eight threads or tasks that compete for their claims.

Usage: ``python -m integration.programs.contending API NUMBER OF IDS EFFECTS STORE_URL...``. This is process NUMBER of
OF. If API is ``sync``, it has eight threads; if API is ``aio``, an event loop with eight tasks. Each of IDS ids is
delivered ten times, to threads or tasks of all processes. An effect is a line in a file per store: EFFECTS.0,
EFFECTS.1, and so on. Every delivery is retried until its id is done.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from integration.programs.storing import new_store
from reliable_mq.stores import ClaimStatus

CALLERS = 8
TOGETHER = 8


class Awaited:
    """A sync store with an async interface, for a loop that runs nothing else."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def claim_many(self, keys: list[str], lease: float) -> Any:
        return self._store.claim_many(keys, lease)

    async def complete_many(self, claims: list[Any]) -> Any:
        return self._store.complete_many(claims)

    async def release_many(self, claims: list[Any], *, failed: bool) -> Any:
        return self._store.release_many(claims, failed=failed)


def deliveries(caller: int, of: int, ids: int) -> list[str]:
    """Return the deliveries of a thread or task; the same in every process."""
    everything = [f"id-{number}" for number in range(ids) for _ in range(10)]
    random.Random(7).shuffle(everything)
    return everything[caller::of]


async def see_through(store: Any, waiting: list[str], effect: int) -> None:
    rng = random.Random()
    while waiting:
        batch, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
        claims = await store.claim_many(batch, 60.0)
        mine = [claim for claim in claims if claim.status is ClaimStatus.NEW]
        failed = [claim for claim in mine if rng.random() < 0.1]
        await store.release_many(failed, failed=True)
        for claim in mine:
            if claim not in failed:
                os.write(effect, f"{claim.key}\n".encode())
        assert all(await store.complete_many([claim for claim in mine if claim not in failed]))
        done = {claim.key for claim in mine if claim not in failed}
        waiting += [
            claim.key
            for claim in claims
            if claim.status is not ClaimStatus.DONE and not (claim.status is ClaimStatus.NEW and claim.key in done)
        ]


def in_threads(url: str, shares: list[list[str]], effect: int) -> None:
    store = Awaited(new_store(url))
    with ThreadPoolExecutor(CALLERS) as threads:
        list(threads.map(lambda share: asyncio.run(see_through(store, share, effect)), shares))


async def in_tasks(url: str, shares: list[list[str]], effect: int) -> None:
    store = new_store(url, "aio")
    async with asyncio.TaskGroup() as tasks:
        for share in shares:
            tasks.create_task(see_through(store, share, effect))


def main(api: str, number: int, of: int, ids: int, effects: str, urls: list[str]) -> None:
    shares = [deliveries(number * CALLERS + caller, of * CALLERS, ids) for caller in range(CALLERS)]
    for position, url in enumerate(urls):
        effect = os.open(f"{effects}.{position}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if api == "sync":
            in_threads(url, shares, effect)
        else:
            asyncio.run(in_tasks(url, shares, effect))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
