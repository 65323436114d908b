"""``python -m integration.bench.outboxes [ROWS]``: the cost of a backlog.

The backlog has a million rows by default. The benchmark measures:

- of a file: the time to count the rows, with one key and with a thousand;
- of each kind of outbox: how many rows per second one relay takes and removes, without a broker, with no keys, with
  three and with a thousand. With keys, the rate must be at least a tenth of the rate without;
- of PostgreSQL and MariaDB: how many messages per second a publisher sends from there to a quorum queue of a broker,
  for 30,000 messages with three keys. The rate must be at least a thousand.

Exits with 1 if a rate is too low.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine

from integration.bench.broker import BenchBroker, started
from integration.support.databases import Database
from integration.support.set_up import set_up
from reliable_mq import Message, Publisher
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox

if TYPE_CHECKING:
    from reliable_mq.outbox import Outbox

KINDS = ("file", "postgresql", "mariadb", "mysql")
KEYS = (0, 3, 1000)
SECONDS = 10.0
BAR = 0.1
AT_A_TIME = 5000
QUEUE = "bench.outbox"
COUNTED_KEYS = (1, 1000)
PUBLISHED_KINDS = ("postgresql", "mariadb")
PUBLISHED = 30_000
PUBLISHED_KEYS = 3
PUBLISHED_BAR = 1000.0  # messages per second
PATIENCE = 2 * PUBLISHED / PUBLISHED_BAR  # seconds for all of them


def new_outbox(kind: str, stack: ExitStack) -> Outbox:
    """Return an empty outbox of this kind."""
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
    """Store small messages, with `keys` keys in turn, or without keys if it is 0."""
    for start in range(0, rows, AT_A_TIME):
        numbers = range(start, min(start + AT_A_TIME, rows))
        outbox.write(
            [NewRow(Message(b"x" * 200), "", QUEUE, True, f"{n % keys}" if keys else None) for n in numbers], []
        )


def rate(outbox: Outbox, seconds: float) -> float:
    """Return the rows per second that a relay takes and removes."""
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


def counted(rows: int, keys: int) -> str:
    """Measure how long a file takes to count its rows.

    This is the CPU time of this process, in which SQLite runs.
    """
    with ExitStack() as stack:
        outbox = new_outbox("file", stack)
        fill(outbox, rows, keys)
        begun = time.process_time()
        outbox.status()
        between = time.process_time()
        outbox.backlog()
        ended = time.process_time()
    status, backlog = between - begun, ended - between
    return f"file, {keys} keys: status() takes {status:.2f} s of CPU time, backlog() {backlog:.2f} s"


def published(kind: str, broker: BenchBroker) -> float:
    """Return the messages per second that a publisher sends from an outbox.

    A message counts when it is confirmed and its row is removed.
    """
    broker.make_queue(QUEUE, "quorum")
    with ExitStack() as stack:
        outbox = new_outbox(kind, stack)
        fill(outbox, PUBLISHED, PUBLISHED_KEYS)
        begun = time.perf_counter()
        with Publisher(broker.url, outbox=outbox) as publisher:
            with suppress(TimeoutError):  # the rate is far below the bar
                publisher.flush(PATIENCE)
            left, ended = outbox.backlog()[0], time.perf_counter()
    return (PUBLISHED - left) / (ended - begun)


def main(rows: int) -> int:
    set_up("databases")
    missed = []
    print(f"rows a second, of a backlog of {rows:,}")
    print(f"{'outbox':12}" + "".join(f"  {f'{keys} keys':>10}" for keys in KEYS))
    for kind in KINDS:
        found = []
        for keys in KEYS:
            with ExitStack() as stack:
                outbox = new_outbox(kind, stack)
                fill(outbox, rows, keys)
                found.append(rate(outbox, SECONDS))
        print(f"{kind:12}" + "".join(f"  {one:10.0f}" for one in found), flush=True)
        if min(found[1:]) < BAR * found[0]:
            missed.append(f"{kind} with keys is slower than a tenth of it without")
    for keys in COUNTED_KEYS:
        print(counted(rows, keys), flush=True)
    with started("newest") as broker:
        for kind in PUBLISHED_KINDS:
            speed = published(kind, broker)
            print(f"{kind}, {PUBLISHED:,} of {PUBLISHED_KEYS} keys to a broker: {speed:.0f} a second", flush=True)
            if speed < PUBLISHED_BAR:
                missed.append(f"{kind} to a broker is slower than {PUBLISHED_BAR:.0f} a second")
    for one in missed:
        print(f"MISSED: {one}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
