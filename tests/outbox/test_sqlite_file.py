"""The file of a SQLite outbox: counting, deletion while open, and the reserve."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from reliable_mq import Message, OutboxError
from reliable_mq._util.boottime import since_boot
from reliable_mq.core.outbox import NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLiteOutbox, sqlite, sqlite_file, sqlite_relay
from reliable_mq.outbox.protocol import RowLeases
from reliable_mq.outbox.sqlite_file import DiskReserve, OpenFile


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[SQLiteOutbox]:
    made = SQLiteOutbox(tmp_path / "outbox")
    yield made
    made.close()


def store(outbox: SQLiteOutbox, count: int, *keys: str | None) -> None:
    outbox.write([NewRow(Message(b"%d" % n), "", "q", True, keys[n % len(keys)]) for n in range(count)], [])


def store_bytes(outbox: SQLiteOutbox, size: int) -> None:
    outbox.write([NewRow(Message(bytes(size)), "", "q", True, None)], [])


def reader_of(outbox: SQLiteOutbox) -> sqlite3.Connection:
    """Return the connection that counts."""
    outbox.status()
    assert outbox._reader is not None
    return outbox._reader


def instructions(outbox: SQLiteOutbox) -> int:
    """Count the instructions of SQLite for `status` and `backlog`, in hundreds."""
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return 0

    reader_of(outbox).set_progress_handler(counted, 100)
    outbox.status()
    outbox.backlog()
    reader_of(outbox).set_progress_handler(None, 0)
    return count


def test_counting_is_linear_in_the_rows_of_a_key(outbox: SQLiteOutbox) -> None:
    """The count is linear, also if the first row of the key was set aside."""
    store(outbox, 1000, "key")
    claims = outbox.claims()
    row = claims.take(1).rows[0]
    outbox.write([], [RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "why")])
    claims.close()
    few = instructions(outbox)
    store(outbox, 7000, "key")
    assert instructions(outbox) < 10 * few
    assert (outbox.status().rows, outbox.status().held, outbox.backlog()[0]) == (7999, 7999, 0)


def test_a_decision_reads_no_more_where_more_rows_wait(outbox: SQLiteOutbox) -> None:
    """Writers wait for the lock during the decision.

    The rows that were set aside are not all read for each id.
    """
    store(outbox, 400, None)
    claims = outbox.claims()
    rows = claims.take(400).rows
    outbox.write([], [RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "why") for row in rows])
    claims.close()
    ids = [row.message.message_id for row in rows]

    def reads(decide: Callable[[], int], count: int) -> int:
        assert outbox._connection is not None
        seen = 0

        def counted() -> int:
            nonlocal seen
            seen += 1
            return 0

        outbox._connection.set_progress_handler(counted, 1)
        assert decide() == count
        outbox._connection.set_progress_handler(None, 0)
        return seen

    one = reads(lambda: outbox.retry(ids[:1]), 1)
    assert reads(lambda: outbox.retry(ids[1:101]), 100) < 10 * one
    store(outbox, 4000, None)
    assert reads(lambda: outbox.purge(ids[101:102]), 1) < 2 * one
    assert reads(lambda: outbox.purge([*ids[102:], *["unknown"] * 1000]), 298) < 20 * one
    assert outbox.status().set_aside == 0


def test_a_blocking_row_holds_only_later_rows_of_its_key(outbox: SQLiteOutbox) -> None:
    """Earlier rows of its key, other keys and rows without a key are not held."""
    store(outbox, 9, "a", "b", None)
    with sqlite3.connect(outbox.path) as connection:
        connection.execute("UPDATE outbox SET state = 2 WHERE id = 4")  # the second row of a
        connection.execute("UPDATE outbox SET format = 2 WHERE id = 2")  # the first row of b
    connection.close()
    status = outbox.status()
    assert (status.rows, status.held, status.set_aside, status.unreadable) == (7, 3, 1, 1)
    assert outbox.backlog() == (4, 9)
    assert outbox.backlog(3) == (2, 9)


def test_a_message_is_stored_while_somebody_counts(outbox: SQLiteOutbox) -> None:
    """Counting uses its own connection and blocks no writer."""
    store(outbox, 1000, "key")
    counts, goes_on = threading.Event(), threading.Event()

    def waits() -> int:
        counts.set()
        return int(not goes_on.wait(20))

    reader_of(outbox).set_progress_handler(waits, 100)
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(outbox.status)
        assert counts.wait(20)
        try:
            store(outbox, 1, None)
        finally:
            goes_on.set()
        assert counted.result(20).rows == 1000
    assert outbox.status().rows == 1001


def test_closing_does_not_wait_for_who_counts(outbox: SQLiteOutbox) -> None:
    """The count fails, and the next call opens the file again."""
    store(outbox, 1000, "key")
    counts = threading.Event()

    def slow() -> int:
        counts.set()
        time.sleep(0.01)  # all of it would take a minute
        return 0

    reader_of(outbox).set_progress_handler(slow, 1)
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(outbox.status)
        assert counts.wait(20)
        outbox.close()
        with pytest.raises(OutboxError, match="interrupted"):
            counted.result(20)
    assert outbox.status().rows == 1000


@pytest.mark.parametrize("gone", ["outbox", "outbox-wal"])
def test_nothing_is_reported_stored_in_a_file_that_was_deleted(outbox: SQLiteOutbox, gone: str) -> None:
    """The rest is not counted or relayed, and no new file is created."""
    store(outbox, 1, None)
    claims = outbox.claims()
    (outbox.path.parent / gone).unlink()
    with pytest.raises(OutboxError, match="was deleted") as not_stored:
        store(outbox, 1, None)
    assert not not_stored.value.may_have_arrived
    for ask in (outbox.status, outbox.backlog, outbox.set_aside, lambda: claims.take(1), lambda: outbox.purge([])):
        with pytest.raises(OutboxError, match="was deleted"):
            ask()
    assert not (outbox.path.parent / gone).exists()
    claims.close()
    outbox.close()
    store(outbox, 1, None)
    assert outbox.status().rows >= 1


@pytest.mark.parametrize("moment", ["while it is open", "while it is being opened"])
def test_nothing_is_reported_stored_in_a_file_that_was_replaced(
    outbox: SQLiteOutbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A backup was restored."""
    with closing(SQLiteOutbox(tmp_path / "backup")) as backup:
        backup.open()
    use_wal = sqlite._use_wal

    def replace() -> None:
        (tmp_path / "backup").rename(outbox.path)
        for name in ("wal", "shm"):
            file_of(outbox, name).unlink(missing_ok=True)

    def use_wal_and_replace(connection: sqlite3.Connection, timeout: float) -> None:
        use_wal(connection, timeout)
        replace()

    if moment == "while it is open":
        store(outbox, 1, None)
        replace()
    else:
        monkeypatch.setattr(sqlite, "_use_wal", use_wal_and_replace)
    with pytest.raises(OutboxError, match="was deleted or replaced") as not_stored:
        store(outbox, 1, None)
    assert not not_stored.value.may_have_arrived


def test_a_file_that_is_put_back_is_good_again(outbox: SQLiteOutbox, tmp_path: Path) -> None:
    """A file that was moved away and back is the open one again."""
    store(outbox, 1, None)
    (tmp_path / "elsewhere").mkdir()
    names = ("outbox", "outbox-wal", "outbox-shm")
    for name in names:
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    with pytest.raises(OutboxError, match="was deleted or replaced"):
        store(outbox, 1, None)
    shutil.copy(tmp_path / "elsewhere" / "outbox", tmp_path / "outbox")
    with pytest.raises(OutboxError, match="was deleted or replaced"):
        store(outbox, 1, None)
    for name in names:
        (tmp_path / "elsewhere" / name).rename(tmp_path / name)
    store(outbox, 1, None)
    assert outbox.status().rows == 2


def test_an_outbox_can_be_read_after_a_failed_write(outbox: SQLiteOutbox) -> None:
    """The failure closes the connection. SQLite removes the log with the last one."""
    store(outbox, 1, None)
    claims = outbox.claims()
    outbox.write([], [RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "why") for row in claims.take(1).rows])
    claims.close()
    with closing(sqlite3.connect(outbox.path)) as connection:
        connection.execute("CREATE TRIGGER fails BEFORE UPDATE ON outbox BEGIN SELECT RAISE(ABORT, 'for a test'); END")
    with pytest.raises(OutboxError, match="for a test"):
        outbox.retry()
    assert not file_of(outbox, "wal").exists()
    assert outbox.status().set_aside == 1


def test_the_relay_goes_on_after_a_failed_write(outbox: SQLiteOutbox) -> None:
    """The write closes its connection, and a failed read closes the last one, with which SQLite removes the log."""
    store(outbox, 1, None)
    claims = outbox.claims()
    assert isinstance(claims, sqlite_relay.SQLiteRowLeases)
    outbox._drop()
    claims._disconnect()
    assert not file_of(outbox, "wal").exists()
    assert len(claims.take(10).rows) == 1
    claims.close()


def test_a_directory_that_cannot_be_read_is_an_outbox_error(tmp_path: Path) -> None:
    """The outbox works again when the directory can be read."""
    directory = tmp_path / "directory"
    directory.mkdir()
    outbox = SQLiteOutbox(directory / "outbox")
    store(outbox, 1, None)
    claims = outbox.claims()
    directory.rename(tmp_path / "moved")
    directory.touch()
    for ask in (outbox.status, outbox.backlog, lambda: claims.take(1), lambda: store(outbox, 1, None)):
        with pytest.raises(OutboxError, match="Not a directory") as refused:
            ask()
        assert not refused.value.may_have_arrived
    directory.unlink()
    (tmp_path / "moved").rename(directory)
    store(outbox, 1, None)
    assert outbox.backlog()[0] == len(claims.take(10).rows) == 2
    claims.close()
    outbox.close()


def test_a_file_deleted_during_a_commit_may_hold_the_message(
    outbox: SQLiteOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay may have published it, so the error says that it may be stored."""
    store(outbox, 1, None)
    checks = iter((lambda: None, outbox.path.unlink))
    check = outbox._file.check

    def deleted_before_the_second() -> None:
        next(checks, lambda: None)()
        check()

    monkeypatch.setattr(outbox._file, "check", deleted_before_the_second)
    with pytest.raises(OutboxError, match="was deleted") as in_doubt:
        store(outbox, 1, None)
    assert in_doubt.value.may_have_arrived


def linked(tmp_path: Path, name: str) -> Path:
    """Return a link in a directory of its own to a file in another one; an earlier link is replaced."""
    (tmp_path / name).mkdir()
    (tmp_path / "links").mkdir(exist_ok=True)
    link = tmp_path / "links" / "outbox"
    (tmp_path / "new").symlink_to(tmp_path / name / "outbox")
    (tmp_path / "new").rename(link)
    return link


def test_one_relay_has_a_file_whatever_links_name_it(tmp_path: Path) -> None:
    """Two relays would publish every message twice."""
    link = linked(tmp_path, "blue")
    with closing(SQLiteOutbox(link)) as outbox, closing(SQLiteOutbox(tmp_path / "blue" / "outbox")) as other:
        store(outbox, 1, None)
        claims = other.claims()
        assert len(claims.take(1).rows) == 1
        second = outbox.claims()
        assert second.take(1).rows == []
        claims.close()
        assert len(second.take(1).rows) == 1
        second.close()
        assert list(link.parent.iterdir()) == [link]


def test_a_deleted_log_is_noticed_behind_a_link(tmp_path: Path) -> None:
    """The log is beside the file, and not beside the link."""
    with closing(SQLiteOutbox(linked(tmp_path, "blue"))) as outbox:
        store(outbox, 1, None)
        (tmp_path / "blue" / "outbox-wal").unlink()
        with pytest.raises(OutboxError, match="was deleted"):
            store(outbox, 1, None)


def test_a_switched_link_is_followed_after_a_close(tmp_path: Path) -> None:
    """Until then, nothing is stored in or taken from either file."""
    with closing(SQLiteOutbox(linked(tmp_path, "blue"))) as outbox:
        store(outbox, 1, None)
        claims = outbox.claims()
        linked(tmp_path, "green")
        for ask in (lambda: store(outbox, 1, None), outbox.status, lambda: claims.take(1)):
            with pytest.raises(OutboxError, match="was deleted or replaced"):
                ask()
        claims.close()
        outbox.close()
        store(outbox, 2, None)
        claims = outbox.claims()
        assert len(claims.take(10).rows) == 2
        claims.close()
    with closing(SQLiteOutbox(tmp_path / "blue" / "outbox")) as before:
        assert before.status().rows == 1
    assert sorted(path.name for path in (tmp_path / "green").iterdir()) == ["outbox", "outbox-relay", "outbox-reserve"]


@pytest.mark.parametrize("system", ["macOS", "musl on NFS"])
def test_the_reserve_is_made_where_the_system_cannot_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Zeros are written if posix_fallocate is missing or unsupported."""

    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if system == "macOS":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with closing(SQLiteOutbox(tmp_path / "outbox")) as outbox:
        store(outbox, 1, None)
        assert outbox.status().rows == 1
    made = tmp_path / "outbox-reserve"
    assert made.stat().st_size == sqlite_file._BYTES
    assert made.stat().st_blocks * 512 >= sqlite_file._BYTES


def test_a_reserve_that_finds_no_room_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial reserve is truncated."""

    def full(_descriptor: int, _data: bytes, offset: int) -> int:
        if offset:
            raise OSError(28, "No space left on device")
        return os.write(_descriptor, _data)

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", full)
    reserve = DiskReserve(OpenFile(tmp_path / "outbox"))
    assert not reserve.available(1)
    assert (tmp_path / "outbox-reserve").stat().st_size == 0


def file_of(outbox: SQLiteOutbox, name: str) -> Path:
    return Path(f"{outbox.path}-{name}")


@pytest.mark.parametrize("properties", [0, 100_000])
def test_the_reserve_has_room_for_the_log_of_large_transactions(outbox: SQLiteOutbox, properties: int) -> None:
    """SQLite may have to copy the log into the database on a full disk."""
    store_bytes(outbox, 3_900_000)
    if properties:
        message = Message(b"", headers={"large": "x" * properties})
        outbox.write([NewRow(message, "", "q", True, None)] * 120, [])
    else:
        store_bytes(outbox, 12_000_000)
    assert file_of(outbox, "wal").stat().st_size > 15_900_000
    size = file_of(outbox, "reserve").stat().st_size
    assert size > file_of(outbox, "wal").stat().st_size + 1_000_000
    store_bytes(outbox, 1)
    assert file_of(outbox, "reserve").stat().st_size == size


def test_the_reserve_has_room_for_a_log_that_a_reader_let_grow(outbox: SQLiteOutbox) -> None:
    """The log does not start over while somebody reads, and keeps its size afterwards."""
    store_bytes(outbox, 1)
    with closing(sqlite3.connect(outbox.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM outbox").fetchone()
        for _ in range(12):
            store_bytes(outbox, 1_000_000)
    store_bytes(outbox, 1)
    log = file_of(outbox, "wal").stat().st_size
    assert log > 11_900_000
    assert file_of(outbox, "reserve").stat().st_size > log + 1_000_000


@contextmanager
def file_sizes_limited(size: int) -> Iterator[None]:
    """Let writes beyond this size fail, in all files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_large_message_leaves_the_usual_reserve(outbox: SQLiteOutbox) -> None:
    """Small messages are stored, and rows are removed, as before."""
    store(outbox, 1, None)
    with file_sizes_limited(10_000_000):
        with pytest.raises(OutboxError, match="the disk is full") as refused:
            store_bytes(outbox, 5_000_000)
        assert not refused.value.may_have_arrived
        assert file_of(outbox, "reserve").stat().st_size == sqlite_file._BYTES
        store(outbox, 1, None)
    assert outbox.status().rows == 2


def test_a_quota_that_is_used_up_is_a_full_disk(outbox: SQLiteOutbox) -> None:
    """The error of the write is another one. Nothing is in doubt, and rows are removed with the reserve."""
    store_bytes(outbox, 2_000_000)
    claims = outbox.claims()
    with file_sizes_limited(file_of(outbox, "wal").stat().st_size):
        with pytest.raises(OutboxError, match="disk I/O error") as refused:
            store_bytes(outbox, 10_000)
        assert not refused.value.may_have_arrived
        settle(outbox, claims, claims.take(10).rows)
        assert file_of(outbox, "reserve").stat().st_size == 0
    claims.close()
    assert outbox.status().rows == 0
    store(outbox, 1, None)
    assert file_of(outbox, "reserve").stat().st_size == sqlite_file._BYTES


@pytest.mark.parametrize(("file", "what"), [("reserve", "storing 1 messages failed"), ("relay", "opening failed")])
def test_a_sidecar_file_that_cannot_open_is_an_outbox_error(outbox: SQLiteOutbox, file: str, what: str) -> None:
    """The file may belong to another user; the message may be stored elsewhere."""
    outbox.open()
    path = Path(f"{outbox.path}-{file}")
    path.mkdir()
    with pytest.raises(OutboxError, match=f"{what} in outbox {outbox.path}: .*{path}") as raised:
        outbox.claims() if file == "relay" else store(outbox, 1, None)
    assert not raised.value.may_have_arrived
    path.rmdir()
    store(outbox, 1, None)
    claims = outbox.claims()
    assert len(claims.take(10).rows) == 1
    claims.close()


def test_a_look_for_rows_passes_over_so_many_and_no_more(outbox: SQLiteOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a backlog of one key are found by later takes."""
    monkeypatch.setattr(sqlite_relay, "_ROWS_PASSED", 50)
    store(outbox, 250, "key")
    store(outbox, 1, "other")
    claims = outbox.claims()
    sizes, bodies = [], []
    for _ in range(6):
        rows = claims.take(200).rows
        sizes.append(len(rows))
        bodies += [row.message.body for row in rows if row.ordering_key == "other"]
    assert sizes == [100, 0, 0, 1, 0, 0]
    assert bodies == [b"0"]
    claims.close()


def test_each_key_has_its_turn(outbox: SQLiteOutbox) -> None:
    """A key with recently published rows waits for the keys that waited longer."""
    keys = [f"{number}" for number in range(8)]
    store(outbox, 8 * 300, *keys)
    claims = outbox.claims()
    turns: list[str] = []
    for _ in range(24):
        rows = claims.take(100).rows
        turns += sorted({row.ordering_key or "" for row in rows})
        settlements = [RowSettlement(row, RowOutcome.CONFIRMED) for row in rows]
        claims.decided(settlements)
        outbox.write([], settlements)
        claims.written(settlements)
    assert outbox.status().rows == 0
    assert min(turns.index(key) for key in keys) >= 0
    assert max(turns.index(key) for key in keys) <= 8
    claims.close()


def settle(outbox: SQLiteOutbox, claims: RowLeases, rows: list[OutboxRow]) -> None:
    settlements = [RowSettlement(row, RowOutcome.CONFIRMED) for row in rows]
    claims.decided(settlements)
    outbox.write([], settlements)
    claims.written(settlements)


@pytest.mark.parametrize("key", [None, "key"])
def test_large_messages_are_taken_a_few_at_a_time(
    outbox: SQLiteOutbox, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """A relay holds some megabytes in memory whatever the size of the backlog."""
    monkeypatch.setattr(sqlite_relay, "_BYTES_PER_TAKE", 1000)
    outbox.write([NewRow(Message(b"x" * 300), "", "q", True, key)] * 20, [])
    claims = outbox.claims()
    taken = [claims.take(200).rows]
    while taken[-1]:
        settle(outbox, claims, taken[-1])
        taken.append(claims.take(200).rows)
    assert [len(rows) for rows in taken] == [4] * 5 + [0]
    claims.close()


def test_no_more_rows_of_a_key_are_taken_than_asked_for(outbox: SQLiteOutbox) -> None:
    """This includes rows that waited for earlier rows of their key."""
    store(outbox, 150, "key")
    claims = outbox.claims()
    settle(outbox, claims, claims.take(200).rows)
    assert len(claims.take(10).rows) == 10
    claims.close()


def fail_reading(claims: RowLeases, statement: str, nth: int = 1) -> None:
    """Let the nth read of the relay by this statement fail."""
    assert isinstance(claims, sqlite_relay.SQLiteRowLeases)
    connection, seen = claims._connection, 0
    assert connection is not None

    def trace(sql: str) -> None:
        nonlocal seen
        seen += statement in sql
        if seen == nth:
            connection.set_progress_handler(lambda: 1, 1)

    connection.set_trace_callback(trace)


def test_rows_waiting_for_their_key_are_taken_after_a_read_error(outbox: SQLiteOutbox) -> None:
    """They are taken in order, and none is skipped."""
    store(outbox, 250, "key")
    claims = outbox.claims()
    bodies: list[bytes] = []
    for number in range(5):
        if number == 1:
            fail_reading(claims, "ordering_key = ")
            with pytest.raises(OutboxError, match="interrupted"):
                claims.take(200)
            store(outbox, 1, "key")
        rows = claims.take(200).rows
        bodies += [row.message.body for row in rows]
        settle(outbox, claims, rows)
    assert bodies == [b"%d" % number for number in range(250)] + [b"0"]
    claims.close()


def test_a_damaged_row_is_set_aside_after_a_read_error(outbox: SQLiteOutbox) -> None:
    """It was found before the error and is found again."""
    store(outbox, 6, "key")
    with closing(sqlite3.connect(outbox.path)) as connection, connection:
        connection.execute("UPDATE outbox SET properties = x'ff' WHERE id = 1")
    claims = outbox.claims()
    fail_reading(claims, "ORDER BY id", 3)
    with pytest.raises(OutboxError, match="interrupted"):
        claims.take(2)
    taken = claims.take(2)
    assert [one.row.id for one in taken.damaged] == [1]
    assert taken.rows == []
    claims.close()


@pytest.mark.parametrize("decision", ["retry", "purge"])
@pytest.mark.parametrize("key", [None, "key"])
def test_a_decision_counts_before_the_relay_notes_its_row(outbox: SQLiteOutbox, decision: str, key: str | None) -> None:
    """The row is set aside in the file, and the relay does not know yet that this was written."""
    store(outbox, 2, key)
    claims = outbox.claims()
    outcome = [RowSettlement(claims.take(1).rows[0], RowOutcome.SET_ASIDE, 0.0, "why")]
    claims.decided(outcome)
    outbox.write([], outcome)
    assert getattr(outbox, decision)() == 1
    rows = claims.take(10).rows
    claims.written(outcome)
    bodies = [row.message.body for row in [*rows, *claims.take(10).rows]]
    assert sorted(bodies) == ([b"0", b"1"] if decision == "retry" else [b"1"])
    assert key is None or bodies == sorted(bodies)
    claims.close()


@pytest.mark.parametrize("due", [True, False])
def test_taking_reads_no_more_where_more_rows_are_delayed(outbox: SQLiteOutbox, due: bool) -> None:
    """Otherwise the many delayed rows after an outage would take quadratic time."""

    def reads(count: int) -> int:
        store(outbox, count, None)
        with closing(sqlite3.connect(outbox.path)) as connection, connection:
            connection.execute(
                "UPDATE outbox SET state = 1, available_at = ?", (0.0 if due else since_boot() / 1e6 + 60,)
            )
        claims, seen = outbox.claims(), 0
        assert isinstance(claims, sqlite_relay.SQLiteRowLeases)
        assert claims._connection is not None

        def counted() -> int:
            nonlocal seen
            seen += 1
            return 0

        assert len(claims.take(20).rows) == (20 if due else 0)  # the first take reads which rows hold others
        claims._connection.set_progress_handler(counted, 1)
        assert [row.id for row in claims.take(20).rows] == (list(range(21, 41)) if due else [])
        claims.close()
        return seen

    few = reads(100)
    assert reads(3900) < 2 * few
