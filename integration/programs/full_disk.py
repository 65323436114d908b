"""Fill a small file system with a SQLite outbox without a broker; then flush it.

Usage: ``unshare --mount python -m integration.programs.full_disk URL DIRECTORY API``. Mounts a tmpfs of 24 MB on
DIRECTORY. Writes ``attempt ID``, ``accepted ID`` and ``refused ID`` for each message to stdout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from integration.programs.outboxing import ORDERS, tell
from integration.support.blocking import BlockingPublisher
from reliable_mq import Message, OutboxError, Publisher
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


def main(url: str, directory: str, api: str) -> None:
    kind = BlockingPublisher if api == "aio" else Publisher
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", directory], check=True)
    outbox = SQLiteOutbox(Path(directory) / "outbox")
    with kind(NOBODY, outbox=outbox) as publisher:
        accepted = fill(publisher, 100_000)
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
