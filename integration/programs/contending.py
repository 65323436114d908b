"""Eight threads that are each delivered some messages of many, and effect what a store lets them.

Usage: ``python -m integration.programs.contending NUMBER OF IDS EFFECTS STORE_URL...``: it is process NUMBER of OF.
Each of IDS ids is delivered ten times, to threads of all processes. For each store an effect is a line in the file
EFFECTS. Every delivery is seen through until its id is done.
"""

from __future__ import annotations

import os
import random
import sys
import threading

from integration.programs.storing import new_store
from reliable_mq import IdempotencyStoreError
from reliable_mq.stores import ClaimStatus, IdempotencyStore

THREADS = 8
TOGETHER = 8


def deliveries(thread: int, of: int, ids: int) -> list[str]:
    """What a thread is delivered; the same for all who ask."""
    everything = [f"id-{number}" for number in range(ids) for _ in range(10)]
    random.Random(7).shuffle(everything)
    return everything[thread::of]


def see_through(store: IdempotencyStore, waiting: list[str], effect: int) -> None:
    rng = random.Random()
    while waiting:
        batch, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
        try:
            claims = store.claim_many(batch, 60.0)
            mine = [claim for claim in claims if claim.status is ClaimStatus.NEW]
            failed = [claim for claim in mine if rng.random() < 0.1]
            store.release_many(failed, failed=True)
            for claim in mine:
                if claim not in failed:
                    os.write(effect, f"{claim.key}\n".encode())
            assert all(store.complete_many([claim for claim in mine if claim not in failed]))
        except IdempotencyStoreError as error:
            sys.exit(f"the store failed: {error}")
        done = {claim.key for claim in mine if claim not in failed}
        waiting += [
            claim.key
            for claim in claims
            if claim.status is not ClaimStatus.DONE and not (claim.status is ClaimStatus.NEW and claim.key in done)
        ]


def main(number: int, of: int, ids: int, effects: str, urls: list[str]) -> None:
    for position, url in enumerate(urls):
        effect = os.open(f"{effects}.{position}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        store = new_store(url)
        errors: list[BaseException] = []

        def run(
            thread: int, store: IdempotencyStore = store, effect: int = effect, errors: list[BaseException] = errors
        ) -> None:
            try:
                see_through(store, deliveries(number * THREADS + thread, of * THREADS, ids), effect)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            sys.exit(f"{url}: {errors[0]!r}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
