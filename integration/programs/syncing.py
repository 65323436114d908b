"""Store messages in a SQLite outbox, one by one and many at once.

Usage: ``python -m integration.programs.syncing PATH API``; API is ``sync`` or ``aio``. Prints each step as a line, in
one ``write`` call: ``publish``, ``published``, ``submit``, ``stored``, ``write``, ``written``. There is no broker.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing

from integration.support.blocking import BlockingPublisher
from reliable_mq import Message, Publisher
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLiteOutbox

NOWHERE = "amqp://guest:guest@127.0.0.1:1/"
GROUP = 300


def say(what: str) -> None:
    os.write(1, f"{what}\n".encode())


def main(path: str, api: str) -> None:
    outbox = SQLiteOutbox(path)
    with (BlockingPublisher if api == "aio" else Publisher)(NOWHERE, outbox=outbox) as publisher:
        for _ in range(3):
            say("publish")
            publisher.publish(Message(b"x"), routing_key="orders")
            say("published")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # makes the writer wait, so that the messages below form one group
            say("submit")
            submitted = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(GROUP)]
            other.execute("ROLLBACK")
        for confirmation in submitted:
            confirmation.result(20)
        say("stored")
        say("write")
        outbox.write([NewRow(Message(b"x"), "", "orders", True, None) for _ in range(GROUP)], [])
        say("written")


if __name__ == "__main__":
    main(*sys.argv[1:])
