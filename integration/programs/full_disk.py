"""Fill a small file system with a SQLite outbox; then empty the outbox, and store one more message.

Usage: ``python -m integration.programs.full_disk DIRECTORY MEGABYTES SIZE [read | open | URL API]``.
Mounts a tmpfs of MEGABYTES on DIRECTORY, and fills it with messages of SIZE bytes. With URL, publishers store the
messages without a broker and then flush them to URL, and ``attempt ID``, ``accepted ID`` and ``refused ID`` are written
to stdout for each message. Without URL, each row is removed in its own transaction, as a relay does if the broker
confirms slowly. With ``read``, somebody reads the outbox while its first 20 MB are stored, so its log grows. With
``open``, other files fill the file system while the outbox is closed, and again when it is open.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

from integration.programs.outboxing import ORDERS, tell
from integration.support.blocking import BlockingPublisher
from integration.support.small_disk import mount
from reliable_mq import Message, OutboxError, Publisher
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLiteOutbox

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


def fill(publisher: Publisher | BlockingPublisher, size: int) -> int:
    """Publish until ten messages are refused; return the number of accepted ones."""
    accepted = refused = 0
    while refused < 10:
        message = Message(b"x" * size)
        tell("attempt", message)
        try:
            publisher.publish(message, routing_key="orders")
        except OutboxError as error:
            if "the disk is full" not in str(error) or error.may_have_arrived:
                raise
            refused += 1
            tell("refused", message)
        else:
            accepted += 1
            tell("accepted", message)
    return accepted


def publish_and_flush(path: Path, size: int, url: str, api: str) -> None:
    kind = BlockingPublisher if api == "aio" else Publisher
    outbox = SQLiteOutbox(path)
    with kind(NOBODY, outbox=outbox) as publisher:
        accepted = fill(publisher, size)
        accepted += fill(publisher, 1)  # until not even the smallest message fits
    assert accepted > 50, accepted
    assert outbox.status().rows == accepted
    with kind(url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(30)  # has to remove rows on a full disk
        assert outbox.status().rows == 0
        message = Message(b"room again")
        tell("attempt", message)
        publisher.publish(message, routing_key="orders")
        tell("accepted", message)
        publisher.flush(30)


def store(outbox: SQLiteOutbox, size: int) -> None:
    outbox.write([NewRow(Message(b"x" * size), "", "orders", True, None)], [])


def remove(outbox: SQLiteOutbox) -> None:
    claims = outbox.claims()
    while rows := claims.take(1000).rows:
        for row in rows:
            outbox.write([], [RowSettlement(row, RowOutcome.CONFIRMED)])
    claims.close()
    assert outbox.status().rows == 0


def store_while_reading(outbox: SQLiteOutbox) -> None:
    outbox.open()
    with closing(sqlite3.connect(outbox.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM outbox").fetchone()
        for _ in range(20):
            store(outbox, 1_000_000)


def write_and_remove(path: Path, size: int, *, read: bool) -> None:
    outbox = SQLiteOutbox(path)
    stored = 0
    if read:
        store_while_reading(outbox)
    for each in (size, size // 100, size // 10_000):
        with suppress(OutboxError):
            while True:
                store(outbox, each)
                stored += each
    assert stored > shutil.disk_usage(path.parent).total // 5, outbox.status()
    remove(outbox)
    store(outbox, 1)
    outbox.close()


def fill_with_others(directory: Path) -> None:
    """Use the last block of the file system."""
    with (directory / "others").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def open_and_remove(path: Path, size: int) -> None:
    outbox = SQLiteOutbox(path)
    for _ in range(20):
        store(outbox, size)
    outbox.close()
    for _ in range(3):
        fill_with_others(path.parent)
        assert outbox.status().rows == 20
        outbox.close()
    outbox.open()
    fill_with_others(path.parent)
    remove(outbox)
    (path.parent / "others").unlink()
    store(outbox, 1)
    outbox.close()


def main(directory: str, megabytes: str, size: str, what: str = "", api: str = "") -> None:
    mount(directory, int(megabytes))
    path = Path(directory) / "outbox"
    if api:
        publish_and_flush(path, int(size), what, api)
    elif what == "open":
        open_and_remove(path, int(size))
    else:
        write_and_remove(path, int(size), read=what == "read")


if __name__ == "__main__":
    main(*sys.argv[1:])
