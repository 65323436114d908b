"""The store in a file: what comes with files, processes and forks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliable_mq import ConfigurationError, IdempotencyStoreError, clock
from reliable_mq.stores import Claim, ClaimStatus, SQLiteStore
from tests.stores.subjects import Records, sqlite


def claimed(path: Path, keys: list[str]) -> list[ClaimStatus]:
    with SQLiteStore(path) as store:
        return [claim.status for claim in store.claim_many(keys, 60.0)]


def test_what_one_store_has_claimed_and_completed_another_one_knows(tmp_path: Path) -> None:
    path = tmp_path / "a file.db"
    with SQLiteStore(path) as store:
        done, _ = store.claim_many(["done", "held"], 60.0)
        store.complete_many([done])
    assert claimed(path, ["done", "held", "new"]) == [ClaimStatus.DONE, ClaimStatus.IN_PROGRESS, ClaimStatus.NEW]


def test_a_closed_store_opens_again(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    store.close()
    store.claim_many(["a"], 60.0)
    store.close()
    store.close()
    assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    store.close()


def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """Also where another thread of its parent held the store's lock at the fork."""
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.claim_many(["parent"], 60.0)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        made = store.claim_many(["parent", "child"], 60.0)
        answers.put([one.status.name for one in made])
        os._exit(0)

    with store._lock:
        process = context.Process(target=child)
        process.start()
        process.join(20)
    assert answers.get() == ["IN_PROGRESS", "NEW"]
    assert store.claim_many(["child"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    store.close()


def test_a_file_that_somebody_else_has_locked_is_an_error_in_time(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with SQLiteStore(path, timeout=0.1) as store:
        store.claim_many(["a"], 60.0)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(IdempotencyStoreError, match="locked"):
            store.claim_many(["b"], 60.0)
        other.execute("ROLLBACK")
        other.close()
        assert store.claim_many(["b"], 60.0)[0].status is ClaimStatus.NEW


def test_a_thread_that_has_the_store_for_long_is_an_error_in_time(tmp_path: Path) -> None:
    claim = Claim("a", ClaimStatus.NEW, 1)
    with (
        SQLiteStore(tmp_path / "store.db", timeout=0.05) as store,
        hold(store._lock),
        pytest.raises(IdempotencyStoreError, match="busy"),
    ):
        store.complete_many([claim])


@contextlib.contextmanager
def hold(lock: threading.Lock) -> Iterator[None]:
    """Until the store is to be closed, which needs the lock."""
    with lock:
        yield


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"no database at all" * 100)
    with SQLiteStore(path) as store, pytest.raises(IdempotencyStoreError, match="not a database"):
        store.claim_many(["a"], 60.0)


def test_what_is_over_is_purged_and_the_rest_is_not(tmp_path: Path) -> None:
    with sqlite(tmp_path) as subject:
        records = subject.age.__self__  # type: ignore[attr-defined]
        assert isinstance(records, Records)
        subject.store.complete_many(subject.store.claim_many([f"key-{n}" for n in range(1200)], 1.0))
        subject.age(1000)
        subject.store.claim_many(["a"], 10.0)
        assert subject.store.purge() == 1201
        assert records.count() == 1


def test_many_threads_open_a_new_file_at_once(tmp_path: Path) -> None:
    """As the workers of several consumers do."""
    barrier = threading.Barrier(8)
    wins: list[str] = []

    def contend(store: SQLiteStore) -> None:
        barrier.wait(10)
        wins.extend(one.key for one in store.claim_many(["a"], 60.0) if one.status is ClaimStatus.NEW)

    stores = [SQLiteStore(tmp_path / "store.db") for _ in range(8)]
    threads = [threading.Thread(target=contend, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for store in stores:
        store.close()
    assert wins == ["a"]


def test_leases_go_on_over_a_restart_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time since the boot begins anew; a claim from before is one until its lease ends, by the wall clock."""
    path = tmp_path / "store.db"
    assert claimed(path, ["a"]) == [ClaimStatus.NEW]
    wall = clock.boot()[1] + clock.since_boot()
    for name, later, status in (("second", 30, ClaimStatus.IN_PROGRESS), ("third", 61, ClaimStatus.NEW)):
        monkeypatch.setattr("reliable_mq.stores.sqlite.since_boot", lambda: 5)
        monkeypatch.setattr("reliable_mq.stores.sqlite.boot", lambda n=name, s=later: (n, wall + s * 1_000_000))
        assert claimed(path, ["a"]) == [status]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"path": ":memory:"}, "path"),
        ({"path": ""}, "path"),
        ({"path": "/"}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"path": None}, "path"),
        ({"retention": 0}, "retention"),
        ({"timeout": -1}, "timeout"),
        ({"table": "x; DROP TABLE y"}, "table"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        SQLiteStore(**{"path": tmp_path / "store.db", **wrong})  # type: ignore[arg-type]
