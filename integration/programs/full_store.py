"""Use a `SQLiteStore` on a file system that fills up and then has space again.

Usage: ``python -m integration.programs.full_store DIRECTORY``. Mounts a tmpfs of 4 MB on DIRECTORY.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from integration.support.small_disk import mount
from reliable_mq import IdempotencyStoreError
from reliable_mq.stores import ClaimStatus, SQLiteStore


def fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1000))


def refused(store: SQLiteStore, number: int) -> bool:
    """Return whether a claim of a hundred keys fails because the disk is full."""
    try:
        store.claim_many([f"{number} {key}" for key in range(100)], 60.0)
    except IdempotencyStoreError as error:
        if "full" not in str(error):
            raise
        return True
    return False


def main(directory: str) -> None:
    mount(directory, 4)
    ballast = Path(directory) / "ballast"
    store = SQLiteStore(Path(directory) / "store.db")
    done, held = store.claim_many(["done", "held"], 60.0)
    assert store.complete_many([done]) == [True]
    fill(ballast)
    accepted = 0
    while not refused(store, accepted):
        accepted += 1
    assert all(refused(store, accepted) for _ in range(5))
    ballast.unlink()
    made = store.claim_many(["done", "held", f"{accepted} 0"], 60.0)
    assert [one.status for one in made] == [ClaimStatus.DONE, ClaimStatus.IN_PROGRESS, ClaimStatus.NEW], made
    assert store.complete_many([held]) == [True]
    earlier = store.claim_many([f"{number} {key}" for number in range(accepted) for key in range(100)], 60.0)
    assert {one.status for one in earlier} <= {ClaimStatus.IN_PROGRESS}
    store.close()
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
