"""``python -m integration.bench.outboxes [ROWS]``: what a backlog costs an outbox, a million rows where none are named.

Of a file: how long counting takes. Of each kind: how many rows a second one relay takes and removes, without a broker,
where the rows have no key, three keys, or a thousand. With keys it must be a tenth of that without at least: exits with
1 where it is not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine

from integration.support.databases import Database
from integration.support.set_up import set_up
from reliable_mq import Message
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox

if TYPE_CHECKING:
    from reliable_mq.outbox import Outbox

KINDS = ("file", "postgresql", "mariadb", "mysql")
KEYS = (0, 3, 1000)
SECONDS = 10.0
BAR = 0.1
AT_A_TIME = 5000


def new_outbox(kind: str, stack: ExitStack) -> Outbox:
    """One of a kind, empty."""
    if kind == "file":
        file = SQLiteOutbox(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "outbox")
        stack.callback(file.close)
        return file
    engine = create_engine(stack.enter_context(Database(kind)).fresh())
    stack.callback(engine.dispose)
    outbox = SQLAlchemyOutbox(engine, create=True)
    outbox.open()
    return outbox


def fill(outbox: Outbox, rows: int, keys: int) -> None:
    """Store small messages, of so many keys in turn."""
    for start in range(0, rows, AT_A_TIME):
        numbers = range(start, min(start + AT_A_TIME, rows))
        outbox.write([NewRow(Message(b"x" * 200), "", "q", True, f"{n % keys}" if keys else None) for n in numbers], [])


def rate(outbox: Outbox, seconds: float) -> float:
    """Rows a second that a relay takes and removes."""
    claims = outbox.claims()
    done, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        rows = claims.take(500).rows
        if not rows and outbox.backlog()[0] == 0:
            break
        settlements = [RowSettlement(row, RowOutcome.CONFIRMED) for row in rows]
        claims.decided(settlements)
        outbox.write([], settlements)
        claims.written(settlements)
        done += len(rows)
    claims.close()
    return done / elapsed


def main(rows: int) -> int:
    set_up("databases")
    missed = []
    print(f"rows a second, of a backlog of {rows:,}")
    print(f"{'outbox':12}" + "".join(f"  {f'{keys} keys':>10}" for keys in KEYS))
    counting = ""
    for kind in KINDS:
        found = []
        for keys in KEYS:
            with ExitStack() as stack:
                outbox = new_outbox(kind, stack)
                fill(outbox, rows, keys)
                if kind == "file" and keys == KEYS[-1]:
                    begun = time.perf_counter()
                    outbox.status()
                    counted = time.perf_counter()
                    outbox.backlog()
                    ended = time.perf_counter()
                    counting = f"file: status() takes {counted - begun:.2f} s, backlog() {ended - counted:.2f} s"
                found.append(rate(outbox, SECONDS))
        print(f"{kind:12}" + "".join(f"  {one:10.0f}" for one in found), flush=True)
        if min(found[1:]) < BAR * found[0]:
            missed.append(kind)
    print(counting)
    for kind in missed:
        print(f"MISSED: {kind} with keys is slower than a tenth of it without")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
