"""Use a store while the wall clock of the process jumps by hours.

Leases and retention must not be affected.

Usage: ``python -m integration.programs.jumping_store OFFSET_FILE API STORE_URL...``, under libfaketime.
"""

from __future__ import annotations

import sys
from typing import Any

from integration.programs.jumping_clock import HOUR, WallClock
from integration.programs.storing import new_store
from reliable_mq.stores import ClaimStatus
from reliable_mq.testing.store_contract import StoreOnThread


def new(url: str, api: str) -> Any:
    """Return a store with the sync interface, whichever API it belongs to."""
    return new_store(url) if api == "sync" else StoreOnThread(lambda: new_store(url, api))


def main(offset_file: str, api: str, urls: list[str]) -> None:
    clock = WallClock(offset_file)
    for url in urls:
        store = new(url, api)
        held, done = store.claim_many(["held", "done"], 60.0)
        assert store.complete_many([done]) == [True], url
        for offset in (HOUR, -HOUR, 48 * HOUR, -48 * HOUR, 0):
            clock.jump(offset)
            other = new(url, api)  # a process that starts now must see the same time
            for one in (store, other):
                made = [claim.status for claim in one.claim_many(["held", "done"], 60.0)]
                assert made == [ClaimStatus.IN_PROGRESS, ClaimStatus.DONE], (url, offset, made)
            [brief] = other.claim_many([f"brief {offset}"], 1e-6)
            [again] = store.claim_many([f"brief {offset}"], 60.0)
            assert again.status is ClaimStatus.NEW, (url, offset)
            assert again.token > brief.token, (url, offset)
        assert store.complete_many([held]) == [True], url
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
