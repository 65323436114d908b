"""The disk access of a `SQLiteStore`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.support.processes import run
from integration.support.syncs import traced

if TYPE_CHECKING:
    from pathlib import Path


def test_completions_are_synced_before_the_answer_once_per_batch(tmp_path: Path) -> None:
    """Claims and releases need no sync, because they may be lost with the machine."""
    path = tmp_path / "store.db"
    events = traced("syncing_store", str(path), directory=tmp_path)
    synced = f"sync {path}-wal"
    assert events[events.index("opened") : events.index("reset") + 1] == [
        "opened",
        "claimed",
        "released",
        synced,
        "completed one",
        synced,
        "completed many",
        synced,
        "reset",
    ]


def test_f39_a_store_on_a_full_disk_refuses_and_later_goes_on(tmp_path: Path) -> None:
    """Without a claim there is no effect.

    Earlier completions are known, and held claims can be completed.
    """
    done = run("integration.programs.full_store", str(tmp_path))
    assert done.stdout == b"end\n", done.stderr.decode()
