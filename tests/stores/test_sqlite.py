"""The store in a file, with several processes and forks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, inspect
from sqlalchemy.pool import NullPool

from reliable_mq import ConfigurationError, IdempotencyStoreError
from reliable_mq._util.generators import drive
from reliable_mq.stores import Claim, ClaimStatus, SQLAlchemyStore, SQLiteStore
from reliable_mq.stores.sql import Steps
from reliable_mq.testing.store_contract import LEASE, RETENTION
from tests.properties import examples
from tests.stores.subjects import Records, sqlite


def claimed(path: Path, keys: list[str]) -> list[ClaimStatus]:
    with SQLiteStore(path) as store:
        return [claim.status for claim in store.claim_many(keys, 60.0)]


def test_claims_of_one_store_are_known_to_another_on_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a file.db"
    with SQLiteStore(path) as store:
        done, _ = store.claim_many(["done", "held"], 60.0)
        store.complete_many([done])
    assert claimed(path, ["done", "held", "new"]) == [ClaimStatus.DONE, ClaimStatus.IN_PROGRESS, ClaimStatus.NEW]


def test_a_table_may_have_the_name_of_its_database(tmp_path: Path) -> None:
    """``main`` is the database of the file, and the index is in it too."""
    engine = create_engine(f"sqlite:///{tmp_path}/store.db", poolclass=NullPool)
    made = SQLAlchemyStore(engine, table="main.done")
    made.create_table()
    with SQLiteStore(tmp_path / "store.db", table="main.done") as store:
        [claim] = store.claim_many(["a"], 60.0)
        assert made.complete_many([claim]) == [True]
        assert store.reset_many(["a"]) == [False]
        assert store.purge() == 0
    assert inspect(engine).get_indexes("done")[0]["name"] == "done_expires"


def test_a_store_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    """Otherwise each message would be retried for ever."""
    (tmp_path / "file").touch()
    for directory in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigurationError) as refused:
            SQLiteStore(directory / "store.db")
        assert str(refused.value) == f"path is in {str(directory)!r}, which is no directory: create it"


def test_a_closed_store_opens_again(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    store.close()
    store.claim_many(["a"], 60.0)
    store.close()
    store.close()
    assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    store.close()


def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    store.claim_many(["parent"], 60.0)
    assert in_child(store, ["parent", "child"]) == ["IN_PROGRESS", "NEW"]
    assert store.claim_many(["child"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    store.close()


def in_child(store: SQLiteStore | SQLAlchemyStore, keys: list[str]) -> list[str]:
    """Claim keys in a forked child; return the statuses, or the error."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        try:
            answers.put([claim.status.name for claim in store.claim_many(keys, 60.0)])
        except IdempotencyStoreError as error:
            answers.put([str(error)])
        os._exit(0)

    process = context.Process(target=child, daemon=True)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    found: list[str] = answers.get()
    return found


def test_completions_of_a_child_survive_its_parents_close(tmp_path: Path) -> None:
    """The last connection deletes the log, unless SQLite sees the lock of another one."""
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.claim_many(["parent"], 60.0)
    context = multiprocessing.get_context("fork")
    opened, closed = context.Event(), context.Event()

    def child() -> None:
        [claim] = store.claim_many(["order"], 300.0)
        opened.set()
        assert closed.wait(20)
        os._exit(0 if store.complete_many([claim]) == [True] else 1)

    process = context.Process(target=child, daemon=True)
    process.start()
    assert opened.wait(20)
    store.close()
    closed.set()
    process.join(20)
    assert process.exitcode == 0
    assert claimed(path, ["order"]) == [ClaimStatus.DONE]


def test_a_fork_waits_for_a_transaction_of_another_thread(tmp_path: Path) -> None:
    """The child would inherit its lock, and nothing would release that."""
    store = SQLiteStore(tmp_path / "store.db", timeout=2.0)
    store.claim_many(["parent"], 60.0)
    inside, forked = threading.Event(), threading.Event()

    def slow(*, now: int) -> Steps[None]:
        inside.set()
        forked.wait(0.2)
        return
        yield

    def send() -> None:
        drive(store._query(slow), store._send)

    thread = threading.Thread(target=send)
    thread.start()
    assert inside.wait(10)
    context = multiprocessing.get_context("fork")
    answers, over = context.SimpleQueue(), context.Event()

    def child() -> None:
        assert over.wait(20)
        answers.put(store.claim_many(["child"], 60.0)[0].status.name)
        os._exit(0)

    process = context.Process(target=child, daemon=True)
    process.start()
    forked.set()
    thread.join(10)
    over.set()
    process.join(20)
    assert process.exitcode == 0
    assert answers.get() == "NEW"
    store.close()


def test_a_child_refuses_a_file_that_was_in_use_at_the_fork(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path, timeout=0.05)
    store.claim_many(["parent"], 60.0)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    another = SQLiteStore(link)
    with store._lock:
        [said] = in_child(another, ["child"])
    assert "in use by the parent" in said
    assert store.claim_many(["child"], 60.0)[0].status is ClaimStatus.NEW
    store.close()


def test_a_child_refuses_a_store_of_its_parents_engine(tmp_path: Path) -> None:
    """The engine may have the file open at the fork, and nothing closes it."""
    engine = create_engine(f"sqlite:///{tmp_path}/store.db")
    with SQLAlchemyStore(engine) as store:
        store.create_table()
        store.claim_many(["parent"], 60.0)
        [said] = in_child(store, ["child"])
        assert "was made before a fork" in said
        assert store.claim_many(["child"], 60.0)[0].status is ClaimStatus.NEW
    engine.dispose()


def test_a_forked_child_may_close_its_copy_of_a_store_in_use(tmp_path: Path) -> None:
    """Leaving ``with`` closes it. The connection stays open in the parent."""
    store = SQLiteStore(tmp_path / "store.db", timeout=0.05)
    store.claim_many(["parent"], 60.0)
    with store._lock:
        child = multiprocessing.get_context("fork").Process(target=store.close, daemon=True)
        child.start()
        child.join(20)
    assert child.exitcode == 0
    assert store.claim_many(["parent"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    store.close()


def test_a_locked_file_is_an_error_after_the_timeout(tmp_path: Path) -> None:
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


def test_a_new_file_that_is_locked_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    """The up to fifty attempts to switch to a write-ahead log share one timeout."""
    path = tmp_path / "theirs.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (id INTEGER)")
    other.execute("BEGIN EXCLUSIVE")
    with SQLiteStore(path, timeout=0.2) as store:
        began = time.monotonic()
        with pytest.raises(IdempotencyStoreError, match="locked"):
            store.claim_many(["a"], 60.0)
        assert time.monotonic() - began < 5
        other.execute("COMMIT")
        assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.NEW
    other.close()


def test_a_call_waits_for_others_however_long_its_timeout_is(tmp_path: Path) -> None:
    """SQLite counts milliseconds in 32 bits and does not wait at all above that."""
    path = tmp_path / "store.db"
    claimed(path, ["a"])
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    released = threading.Timer(0.2, other.execute, ["ROLLBACK"])
    released.start()
    with SQLiteStore(path, timeout=timedelta(days=30)) as store:
        assert store.claim_many(["b"], 60.0)[0].status is ClaimStatus.NEW
    released.join()
    other.close()


def test_a_store_busy_in_another_thread_times_out_with_an_error(tmp_path: Path) -> None:
    claim = Claim("a", ClaimStatus.NEW, 1)
    with (
        SQLiteStore(tmp_path / "store.db", timeout=0.05) as store,
        hold(store._lock),
        pytest.raises(IdempotencyStoreError, match="busy"),
    ):
        store.complete_many([claim])


@contextlib.contextmanager
def hold(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock of a store in the block. Closing the store needs the lock."""
    with lock:
        yield


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"no database at all" * 100)
    with SQLiteStore(path) as store, pytest.raises(IdempotencyStoreError, match="not a database"):
        store.claim_many(["a"], 60.0)


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lock ends by itself."""
    path = tmp_path / "store.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE other (number INTEGER)")
    read_only = partial(sqlite3.connect, uri=True)
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: read_only(f"file:{path}?mode=ro", **options))
    began = time.monotonic()
    with SQLiteStore(path, timeout=20) as store, pytest.raises(IdempotencyStoreError, match="readonly"):
        store.claim_many(["a"], 60.0)
    assert time.monotonic() - began < 10


def test_an_error_that_rolls_back_by_itself_is_told(tmp_path: Path) -> None:
    """An interruption ends the transaction, as an I/O error does."""
    with SQLiteStore(tmp_path / "store.db") as store:
        store.claim_many(["a"], 60.0)
        connection = store._connection
        assert connection is not None
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        connection.set_progress_handler(lambda: statements[-1].startswith("INSERT"), 1)
        with pytest.raises(IdempotencyStoreError, match="interrupted"):
            store.claim_many(["b"], 60.0)
        assert store.claim_many(["b"], 60.0)[0].status is ClaimStatus.NEW


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_an_interrupted_call_leaves_the_file_to_others(tmp_path: Path, statement: str) -> None:
    """A signal handler may raise before or after any statement, and no other call may follow."""

    class Interrupted(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql == statement == "COMMIT":
                raise KeyboardInterrupt
            done = super().execute(sql, *arguments)
            if sql == statement:
                raise KeyboardInterrupt
            return done

    path = tmp_path / "store.db"
    claimed(path, ["a"])
    with SQLiteStore(path) as store:
        store._connection = sqlite3.connect(path, isolation_level=None, factory=Interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.claim_many(["b"], 60.0)
        with SQLiteStore(path, timeout=0.1) as other:
            assert other.claim_many(["b"], 60.0)[0].status is ClaimStatus.NEW


def test_what_is_over_is_purged_and_the_rest_is_not(tmp_path: Path) -> None:
    with sqlite(tmp_path) as subject:
        records = subject.age.__self__  # type: ignore[attr-defined]
        assert isinstance(records, Records)
        subject.store.complete_many(subject.store.claim_many([f"key-{n}" for n in range(1200)], 1.0))
        subject.store.claim_many(["a"], 5000.0)
        subject.age(1000)  # a claim after it might purge some
        before = records.count()
        assert before >= 1201
        assert subject.store.purge() == before - 1
        assert records.count() == 1


def test_many_threads_open_a_new_file_at_once(tmp_path: Path) -> None:
    """The workers of several consumers do this."""
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


# -- boots of the machine ----------------------------------------------------------------------------------------------

YEAR = 365 * 86400.0


@dataclass
class Boot:
    """A boot of a machine, with any wall clock.

    Attributes:
        name: The name of the boot in new processes. Empty: they cannot read it.
        since: Seconds since the boot.
        began: The time of the boot by the wall clock.
    """

    name: str
    since: float
    began: float


class Machine:
    """A machine that is booted repeatedly, or several machines, and their stores.

    Attributes:
        running: Seconds for which the machines have run.
        current: The boot of the machine that has the file.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.path, self.running = path, 0.0
        self._boots: list[Boot] = []
        for module in ("reliable_mq.stores.sqlite", "reliable_mq.stores.sqlalchemy_base"):
            monkeypatch.setattr(f"{module}.since_boot", lambda: int(self.current.since * 1e6))
            monkeypatch.setattr(f"{module}.boot", lambda: (self.current.name, int(self.current.began * 1e6)))

    def boot(self, wall: float, *, named: bool = True, since: float = 5.0) -> Boot:
        """Boot it with a wall clock that is `wall` seconds after the start of 2026."""
        self.current = Boot(f"boot {len(self._boots)}" if named else "", since, 56 * YEAR + wall)
        self._boots.append(self.current)
        return self.current

    def run(self, seconds: float) -> None:
        for boot in self._boots:
            boot.since += seconds
        self.running += seconds

    @contextlib.contextmanager
    def store(self, kind: str) -> Iterator[SQLiteStore | SQLAlchemyStore]:
        """Return the store of a new process."""
        if kind == "sqlite":
            with SQLiteStore(self.path, retention=RETENTION) as store:
                yield store
        else:
            engine = create_engine(f"sqlite:///{self.path}", poolclass=NullPool)
            sql = SQLAlchemyStore(engine, retention=RETENTION)
            sql.create_table()
            yield sql
            sql.close()
            engine.dispose()

    def claim_two(self, kind: str, key: object) -> None:
        """Complete a claim of ``done KEY``, and hold one of ``held KEY``."""
        with self.store(kind) as store:
            done, _ = store.claim_many([f"done {key}", f"held {key}"], LEASE)
            assert store.complete_many([done]) == [True]

    def status(self, kind: str, key: str) -> ClaimStatus:
        with self.store(kind) as store:
            return store.claim_many([key], LEASE)[0].status


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "store.db")


@pytest.mark.parametrize("wrong", [-56 * YEAR, 4 * YEAR], ids=["1970", "2030"])
@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_a_boot_with_a_wrong_clock_keeps_leases_and_retention(machine: Machine, kind: str, wrong: float) -> None:
    """They survive that boot and the next one, which has a correct clock."""
    for wall in (0.0, wrong, 3600.0):
        machine.boot(wall)
        machine.claim_two(kind, wall)
        assert machine.status(kind, "done 0.0") is ClaimStatus.DONE
        assert machine.status(kind, f"held {wall}") is ClaimStatus.IN_PROGRESS
    assert machine.status(kind, f"done {wrong}") is ClaimStatus.DONE
    assert machine.status(kind, f"held {wrong}") is ClaimStatus.IN_PROGRESS
    machine.run(LEASE)
    assert machine.status(kind, f"held {wrong}") is ClaimStatus.NEW
    assert machine.status(kind, f"done {wrong}") is ClaimStatus.DONE
    machine.run(LEASE + RETENTION)
    with machine.store(kind) as store:
        store.purge()
    assert Records(create_engine(f"sqlite:///{machine.path}", poolclass=NullPool)).count() == 0


@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_a_file_begun_with_a_wrong_clock_keeps_its_own_time(machine: Machine, kind: str) -> None:
    machine.boot(-56 * YEAR)
    with machine.store(kind) as store:
        assert store.complete_many(store.claim_many(["done"], LEASE)) == [True]
    machine.boot(0.0)
    assert machine.status(kind, "done") is ClaimStatus.DONE
    machine.run(LEASE + RETENTION)
    assert machine.status(kind, "done") is ClaimStatus.NEW


@pytest.mark.parametrize("names", [("one", ""), ("", "one"), ("", ""), ("one", "two")])
@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_processes_share_a_clock_if_only_some_see_the_boot(machine: Machine, kind: str, names: tuple[str, str]) -> None:
    """Otherwise a lease of one process would have ended for another one."""
    machine.boot(0.0)
    machine.current.name = names[0]
    with machine.store(kind) as ahead:
        ahead.claim_many(["before"], LEASE)
        machine.run(3600.0)
        machine.current.name = names[1]
        with machine.store(kind) as late:
            assert late.claim_many(["a"], LEASE)[0].status is ClaimStatus.NEW
            assert ahead.claim_many(["a"], LEASE)[0].status is ClaimStatus.IN_PROGRESS
            machine.run(LEASE)
            assert late.claim_many(["a"], LEASE)[0].status is ClaimStatus.NEW


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("up", [5.0, YEAR], ids=["just booted", "booted a year ago"])
@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_a_file_that_is_moved_to_another_machine_and_back(machine: Machine, kind: str, up: float, named: bool) -> None:
    """Whichever machine has run for longer, each continues from the newest claim, and only its own time counts."""
    one = machine.boot(0.0, named=named, since=86400.0)
    other = machine.boot(86400.0 - up, named=named, since=up)
    for place in (one, other, one):
        machine.current = place
        key = f"of {machine.running}"
        machine.claim_two(kind, key)
        machine.run(10 * RETENTION)  # while nobody uses the file
        machine.current = other if place is one else one
        assert machine.status(kind, f"done {key}") is ClaimStatus.DONE
        assert machine.status(kind, f"held {key}") is ClaimStatus.IN_PROGRESS
        machine.run(LEASE)
        assert machine.status(kind, f"held {key}") is ClaimStatus.NEW
        assert machine.status(kind, f"done {key}") is ClaimStatus.DONE
    machine.run(LEASE + RETENTION)
    assert machine.status(kind, f"done {key}") is ClaimStatus.NEW


@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_an_empty_file_keeps_its_time_when_the_clock_is_set(machine: Machine, kind: str) -> None:
    """A process that still runs has the time from before."""
    machine.boot(-56 * YEAR)
    with machine.store(kind) as early:
        early.claim_many(["before"], LEASE)
        machine.run(LEASE + RETENTION + 1)
        assert early.purge() == 1
        machine.current.name, machine.current.began = "", 56 * YEAR
        with machine.store(kind) as late:
            late.claim_many(["a"], LEASE)
            assert early.claim_many(["a"], LEASE)[0].status is ClaimStatus.IN_PROGRESS
            machine.run(LEASE)
            assert early.claim_many(["a"], LEASE)[0].status is ClaimStatus.NEW


@given(
    walls=st.lists(st.floats(-56 * YEAR, 60 * YEAR), min_size=2, max_size=5),
    runs=st.lists(st.floats(0.0, RETENTION), min_size=5, max_size=5),
    kinds=st.lists(st.sampled_from(["sqlite", "sqlalchemy"]), min_size=5, max_size=5),
    named=st.lists(st.booleans(), min_size=5, max_size=5),
)
@examples(25)
def test_retention_counts_running_time_whatever_the_boot_clocks(
    walls: list[float], runs: list[float], kinds: list[str], named: list[bool]
) -> None:
    """It is exceeded by at most the lease: a boot continues from the last claim."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        machine = Machine(patch, Path(directory) / "store.db")
        done: dict[str, float] = {}
        for wall, run, kind, has_name in zip(walls, runs, kinds, named, strict=False):
            machine.boot(wall, named=has_name)
            for key, since in done.items():
                if machine.running - since < RETENTION:
                    assert machine.status(kind, key) is ClaimStatus.DONE
                elif machine.running - since > LEASE + RETENTION:
                    assert machine.status(kind, key) is not ClaimStatus.DONE
            with machine.store(kind) as store:
                store.complete_many(store.claim_many([f"of {wall}"], LEASE))
                done = {f"of {wall}": machine.running} | done
                machine.run(run)
                store.claim_many([f"last of {wall}"], LEASE)


def test_a_base_of_the_clock_that_was_rolled_back_is_not_kept(machine: Machine) -> None:
    """Another process may have stored another base in the meantime."""
    machine.boot(0.0)
    engine = create_engine(f"sqlite:///{machine.path}", poolclass=NullPool)
    store = SQLAlchemyStore(engine, retention=RETENTION)
    store.create_table()

    def fails(*, now: int) -> Steps[None]:
        raise OSError
        yield

    with pytest.raises(IdempotencyStoreError):
        drive(store._query(fails), store._send)
    machine.current.began += 100.0
    with machine.store("sqlite") as other:
        [claim] = other.claim_many(["a"], LEASE)
    assert store.claim_many(["b"], LEASE)[0].token == claim.token
    store.close()
    engine.dispose()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"path": ":memory:"}, "path"),
        ({"path": "x" * 300}, "path cannot be the path of a file"),
        ({"path": "\ud800"}, "path cannot be the path of a file"),
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
