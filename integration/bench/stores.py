"""``python -m integration.bench.stores``: the throughput of idempotency stores.

The benchmark measures claims and completions per second, key by key and in batches, on servers whose commits wait for
the disk. Redis and PostgreSQL must be five times as fast in batches as key by key. Otherwise it exits with 1.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from integration.bench.contenders.ours_consumer_stores import KINDS, new_store
from integration.support.set_up import set_up

if TYPE_CHECKING:
    from reliable_mq.stores import IdempotencyStore

TOGETHER = 64
BAR = 5.0
BARRED = ("redis", "postgresql")


def rates(store: IdempotencyStore, together: int, seconds: float, name: str) -> tuple[float, float]:
    """Return the claims and the completions per second."""
    claiming = completing = 0.0
    done = 0
    while claiming + completing < seconds:
        keys = [f"{name}-{together}-{number}" for number in range(done, done + together)]
        begun = time.perf_counter()
        claims = store.claim_many(keys, 300.0)
        claimed = time.perf_counter()
        if not all(store.complete_many(claims)):
            raise RuntimeError(f"{name} did not take what it had granted")
        completing += time.perf_counter() - claimed
        claiming += claimed - begun
        done += together
    return done / claiming, done / completing


def main(seconds: float) -> int:
    set_up("databases")
    print(f"{'':12}  {'claims/s':>19}  {'completions/s':>19}")
    print(f"{'store':12}" + f"  {'one':>9} {TOGETHER:>9}" * 2)
    missed = []
    for kind in KINDS:
        with ExitStack() as stack:
            store = new_store(kind, stack)
            rates(store, TOGETHER, 0.2, "warm")
            one, many = rates(store, 1, seconds, "one"), rates(store, TOGETHER, seconds, "many")
        print(f"{kind:12}  {one[0]:9.0f} {many[0]:9.0f}  {one[1]:9.0f} {many[1]:9.0f}")
        if kind in BARRED and (many[0] < BAR * one[0] or many[1] < BAR * one[1]):
            missed.append(kind)
    for kind in missed:
        print(f"MISSED: {kind} is not {BAR:g} times as fast in batches")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0))
