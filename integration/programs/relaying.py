"""Relay the outbox in a database until it is empty; die at a given line.

Arguments: URL DATABASE_URL LEASE KILL_AT. At the end it writes ``lines N``, the number of executed lines of the
modules that `integration.programs.outboxing` traces. At line number KILL_AT, the process sends itself SIGKILL; 0
means never.
"""

from __future__ import annotations

import sys

from sqlalchemy import create_engine

from integration.programs.outboxing import Killer, tell
from reliable_mq import Publisher
from reliable_mq.outbox import SQLAlchemyOutbox


def main(url: str, database: str, lease: str, kill_at: str) -> None:
    killer = Killer(int(kill_at))
    killer.install()
    engine = create_engine(database)
    with Publisher(url, outbox=SQLAlchemyOutbox(engine, lease=float(lease))) as publisher:
        publisher.flush(60)
    engine.dispose()
    tell("lines", str(killer.lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
