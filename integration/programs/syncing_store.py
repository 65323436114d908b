"""Call a `SQLiteStore` step by step, and print a line after each step.

Usage: ``python -m integration.programs.syncing_store PATH``. Each line is one ``write`` call.
"""

from __future__ import annotations

import sys

from integration.programs.syncing import say
from reliable_mq.stores import SQLiteStore


def main(path: str) -> None:
    with SQLiteStore(path) as store:
        store.claim_many(["opens the file"], 60.0)
        say("opened")
        claims = store.claim_many([f"k{number}" for number in range(200)], 60.0)
        say("claimed")
        store.release_many(claims[100:], failed=True)
        say("released")
        store.complete_many(claims[:1])
        say("completed one")
        store.complete_many(claims[1:100])
        say("completed many")
        store.reset_many(["k150"])
        say("reset")


if __name__ == "__main__":
    main(sys.argv[1])
