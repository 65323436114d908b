"""Asks a `SQLiteStore` one question after the other, and says when each has its answer. To be run under strace.

Usage: ``python -m integration.programs.syncing_store PATH``.
"""

from __future__ import annotations

import sys

from reliable_mq.stores import SQLiteStore


def main(path: str) -> None:
    with SQLiteStore(path) as store:
        store.claim_many(["opens the file"], 60.0)
        print("opened", flush=True)
        claims = store.claim_many([f"k{number}" for number in range(200)], 60.0)
        print("claimed", flush=True)
        store.release_many(claims[100:], failed=True)
        print("released", flush=True)
        store.complete_many(claims[:1])
        print("completed one", flush=True)
        store.complete_many(claims[1:100])
        print("completed many", flush=True)
        store.reset_many(["k150"])
        print("reset", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
