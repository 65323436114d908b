"""Relay outboxes while the wall clock of the process jumps by an hour.

Leases and delays must take their usual time.

Usage: ``python -m integration.programs.jumping_outbox OFFSET_FILE OUTBOX...``, under libfaketime. An OUTBOX is the
path of a SQLite file, or the URL of a database that has the table.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import create_engine

from integration.programs.jumping_clock import HOUR, LATE, WallClock
from reliable_mq import Message
from reliable_mq.core.outbox import NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox

if TYPE_CHECKING:
    from reliable_mq.outbox import RowLeases

LEASE = 2.0  # seconds
DELAY = 0.7  # seconds


def new_outbox(where: str) -> Outbox:
    return SQLAlchemyOutbox(create_engine(where), lease=LEASE) if "://" in where else SQLiteOutbox(where)


def wait_for_row(claims: RowLeases) -> OutboxRow:
    while not (rows := claims.take(1).rows):
        threading.Event().wait(0.1)  # libfaketime changes time.sleep(), too
    return rows[0]


class Began(NamedTuple):
    """The times before and after the call that began a delay or a lease."""

    earliest: float
    latest: float


def check(began: Began, least: float, what: str) -> None:
    longest, shortest = (time.monotonic() - moment for moment in began)
    assert least - 0.1 < longest, f"{what} took at most {longest:.2f} s"
    assert shortest < least + LATE, f"{what} took at least {shortest:.2f} s"


def main(offset_file: str, places: list[str]) -> None:
    clock = WallClock(offset_file)
    outboxes = {where: new_outbox(where) for where in places}
    relays = {where: outbox.claims() for where, outbox in outboxes.items()}
    for offset in (HOUR, -HOUR):
        clock.jump(0)
        delayed_at: dict[str, Began] = {}
        leased: list[str] = []
        for where, outbox in outboxes.items():
            outbox.write([NewRow(Message(b""), "", "orders", True, None) for _ in range(2)], [])
            relay = relays[where]
            first = wait_for_row(relay)
            before = time.monotonic()
            outbox.write([], [RowSettlement(first, RowOutcome.LATER, DELAY, "it was nacked")])
            relay.written([RowSettlement(first, RowOutcome.LATER)])
            delayed_at[where] = Began(before, time.monotonic())
            [second] = relay.take(1).rows
            if "://" in where:
                leased.append(where)
            else:  # no lease: SQLite has one relay, until its process ends
                outbox.write([], [RowSettlement(second, RowOutcome.CONFIRMED)])
        clock.jump(offset)
        for where, began in delayed_at.items():
            relays[where].keep()
            again = wait_for_row(relays[where])
            check(began, DELAY, f"the delay in {where}")
            outboxes[where].write([], [RowSettlement(again, RowOutcome.CONFIRMED)])
        claimed_at: dict[str, Began] = {}
        for where in leased:  # the last renewal, as if the holder died here
            before = time.monotonic()
            relays[where].keep()
            claimed_at[where] = Began(before, time.monotonic())
        others = {where: outboxes[where].claims() for where in leased}
        clock.jump(0)
        left: dict[str, OutboxRow] = {}
        for where, other in others.items():
            for row in other.take(1).rows:  # there is one if this process paused for longer than the lease
                check(claimed_at[where], LEASE, f"the lease in {where}, which was given away,")
                left[where] = row
        clock.jump(offset)
        for where, began in claimed_at.items():
            row = left.get(where) or wait_for_row(others[where])
            check(began, LEASE, f"the lease in {where}")
            outboxes[where].write([], [RowSettlement(row, RowOutcome.CONFIRMED)])
            relays[where] = others[where]
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
