"""A SQLite outbox on a full disk, and with files torn in the middle of a write."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.support.processes import run
from integration.support.seeds import soaking
from integration.support.syncs import traced
from reliable_mq import Message, OutboxError
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLiteOutbox

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from reliable_mq.testing import Audit, VirtualHost


def on_a_full_disk(tmp_path: Path, *arguments: str, megabytes: int = 24, size: int = 100_000) -> str:
    """Run the program on a small disk, and return what it wrote."""
    directory = tmp_path / "small"
    directory.mkdir()
    program = ["integration.programs.full_disk", str(directory), str(megabytes), str(size)]
    done = run(*program, *arguments, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_f39_a_full_disk_refuses_new_messages_publishes_old_ones(
    one_api: str, vhost: VirtualHost, tmp_path: Path, checker: Audit
) -> None:
    """New messages are refused in time with the reason; accepted messages arrive.

    Their rows are removed, so that there is space again.
    """
    said = on_a_full_disk(tmp_path, vhost.url, one_api)
    for line in said.splitlines():
        what, _, message_id = line.partition(" ")
        {"attempt": checker.attempted, "accepted": checker.confirmed, "refused": checker.failed}[what](message_id)
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed > 50
    assert balance.failed >= 10
    assert not balance.refuted


def test_f39_an_emptied_outbox_has_room_again(tmp_path: Path) -> None:
    """The log that grew into the reserve while rows were removed does not keep the space."""
    on_a_full_disk(tmp_path)


@pytest.mark.parametrize("megabytes", [50, 54, 58, 62])
def test_f39_an_outbox_emptied_of_large_messages_has_room_again(tmp_path: Path, megabytes: int) -> None:
    """The log of one large message is larger than the usual reserve.

    How much of it the disk has no room for depends on the size of the disk.
    """
    on_a_full_disk(tmp_path, megabytes=megabytes, size=15 * 1024 * 1024)


def test_f39_an_outbox_somebody_read_for_long_has_room_again(tmp_path: Path) -> None:
    """Its log grew meanwhile and keeps that size, and stores go on in it when the disk is full."""
    on_a_full_disk(tmp_path, "read", megabytes=64)


def test_f39_a_disk_full_of_other_files_opens_the_outbox(tmp_path: Path) -> None:
    """SQLite needs some space for that, which the reserve has; the rest of it stays for removing the rows."""
    on_a_full_disk(tmp_path, "open")


def test_what_is_accepted_is_on_the_disk_before_publish_returns(one_api: str, tmp_path: Path) -> None:
    """A power cut loses data that was not synced.

    One sync serves all messages that arrived in the meantime.
    """
    path = tmp_path / "outbox"
    said = traced("syncing", str(path), one_api, directory=tmp_path)
    synchronised = f"sync {path}-wal"
    assert f"sync {tmp_path}" in said[: said.index("published")], "the name of the new file"
    spans: dict[str, list[int]] = {"publish": [], "submit": [], "write": []}
    began = ""
    for event in said:
        if event in spans:
            began = event
            spans[event].append(0)
        elif event in ("published", "stored", "written"):
            began = ""
        elif event == synchronised and began:
            spans[began][-1] += 1
    assert len(spans["publish"]) == 3
    assert all(count >= 1 for count in spans["publish"])
    assert spans["submit"][0] in (1, 2), "the group that the writer had begun, and all the others"
    assert spans["write"] == [1]


class Files(NamedTuple):
    """The two files of an outbox after a commit."""

    database: bytes
    log: bytes

    @classmethod
    def read(cls, path: Path) -> Files:
        return cls(path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes())

    def write(self, path: Path) -> None:
        path.write_bytes(self.database)
        path.with_name(f"{path.name}-wal").write_bytes(self.log)


def torn(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """Return the file after a write that is cut off at some byte.

    It has new data up to that byte, and then old data, nothing, or random bytes.
    """
    same, limit = 0, min(len(before), len(after))
    for step in (4096, 1):  # unchanged data is not written again
        while same < limit and before[same : same + step] == after[same : same + step]:
            same += step
    same = min(same, limit)
    at = rng.randrange(same, len(after) + 1)
    match rng.randrange(3):
        case 0:
            rest = before[at:]
        case 1:
            rest = b""
        case _:
            rest = rng.randbytes(rng.randrange(1, 10_000))
    return after[:at] + rest


def stored(path: Path) -> list[bytes]:
    """Return the bodies in an outbox in the order of a relay."""
    outbox = SQLiteOutbox(path)
    claims = outbox.claims()
    try:
        found: list[bytes] = []
        while rows := claims.take(1000).rows:
            found.extend(row.message.body for row in rows)
        return found
    finally:
        claims.close()
        outbox.close()


def test_f40_an_outbox_torn_at_any_byte_recovers_the_accepted(tmp_path: Path, rng: random.Random) -> None:
    """A torn log keeps all earlier commits; the last one is complete or missing.

    A torn database, from copying the log into it, loses nothing.
    """
    path, copy = tmp_path / "outbox", tmp_path / "copy"
    outbox = SQLiteOutbox(path)
    outbox.open()
    before, accepted, number = Files.read(path), list[bytes](), 0
    checkpoints = recovered = 0
    removed = 0
    for commit in range(400 if soaking() else 90):
        new = []
        for _ in range(rng.randrange(1, 20)):
            new.append(b"%d:" % number + rng.randbytes(rng.randrange(6000)))
            number += 1
        settled = []
        if commit % 7 == 0 and len(accepted) > 50:
            claims = outbox.claims()
            settled = [RowSettlement(row, RowOutcome.CONFIRMED) for row in claims.take(25).rows]
            claims.close()
        outbox.write([NewRow(Message(body), "", "orders", True, None) for body in new], settled)
        removed = len(settled)
        after = Files.read(path)
        for _ in range(3 if soaking() else 1):
            for left in copy.parent.glob("copy*"):
                left.unlink()
            if before.database == after.database:
                log = torn(before.log, after.log, rng)
                Files(after.database, log).write(copy)
            else:  # this commit copied the log into the database after syncing it
                checkpoints += 1
                at = rng.randrange(len(after.database) + 1)
                Files(after.database[:at] + before.database[at:], after.log).write(copy)
            found = stored(copy)
            if found == accepted[removed:] + new:
                recovered += 1
            else:
                assert before.database == after.database
                assert found == accepted
        accepted = accepted[removed:] + new
        before = after
    assert checkpoints > 0
    assert recovered > 0
    outbox.close()


def test_a_damaged_or_foreign_outbox_file_is_refused_clearly(tmp_path: Path) -> None:
    """The file is not overwritten."""
    path = tmp_path / "text"
    path.write_bytes(b"this is no database, and long enough to see that" * 100)
    with pytest.raises(OutboxError, match="not an SQLite database, or is damaged"):
        SQLiteOutbox(path).open()
    assert path.read_bytes().startswith(b"this is no database")
    with sqlite3.connect(tmp_path / "theirs") as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(OutboxError, match="something else"):
        SQLiteOutbox(tmp_path / "theirs").open()
    outbox = SQLiteOutbox(tmp_path / "newer")
    outbox.open()
    outbox.close()
    with sqlite3.connect(tmp_path / "newer") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(OutboxError, match="newer one"):
        outbox.status()
    with pytest.raises(OutboxError, match="directory"):
        SQLiteOutbox(tmp_path / "nowhere" / "outbox").open()


def test_f58_a_row_of_a_newer_format_is_left_for_a_newer_relay(tmp_path: Path) -> None:
    """The row is not claimed or changed, holds its key, and is counted."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    rows = [NewRow(Message(b"%d" % number), "", "orders", True, key) for number, key in enumerate(["k", "k", None])]
    outbox.write(rows, [])
    outbox.close()
    with sqlite3.connect(tmp_path / "outbox") as connection:
        connection.execute("UPDATE outbox SET format = 2, body = 'what is this' WHERE id = 1")
    connection.close()
    assert stored(tmp_path / "outbox") == [b"2"]
    status = outbox.status()
    assert (status.rows, status.held, status.unreadable, status.set_aside) == (2, 1, 1, 0)
    assert outbox.backlog()[0] == 1
    assert outbox.retry() == outbox.purge() == 0
    outbox.close()
