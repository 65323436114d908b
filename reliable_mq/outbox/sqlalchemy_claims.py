"""How relays share the rows of a table: each takes some for the time of a lease, in a short transaction.

Where the database can, rows that another relay is just taking are passed over (``SKIP LOCKED``); else takers follow one
another. No transaction is open while a message is being published. A relay that dies leaves its rows claimed, and when
the lease is over they are anybody's; they may have been published, and are marked so.

Invariants:

- of an ordering key, a relay takes the first row of all that are left, and with it those behind it; so no other relay
  can have a row of the key at the same time, whoever committed what meanwhile. A row that was the first in any
  snapshot is the first for as long as it is there, so it may be looked for before it is locked;
- a row that is not ready (delayed, set aside, of a newer format, claimed) holds those behind it, because it is there;
- every claim has a name of its own, so that what a transaction has claimed is told from all that this relay had before,
  and a fate that comes too late from what another relay has claimed since;
- where leases are by the time since the boot of the machine, a claim of an earlier boot is over: its name says so;
- a relay never takes what it has: where its leases may have ended, as after an outage of the database, it renews first.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, exists, literal, or_, select, update

from reliable_mq.core.outbox import COLUMNS, FORMAT, LONGEST_DELAY, Fate, OutboxRow, Settlement, UnreadableRow, row_from
from reliable_mq.message import Message
from reliable_mq.outbox.protocol import Taken
from reliable_mq.outbox.sqlalchemy_table import LOCKS_WHAT_IT_READS, SET_ASIDE, database_time, skips_locked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, Select, Table

__all__ = ["SQLAlchemyClaims"]

_BEHIND: Final = 200  # rows looked at behind the first ones of their keys
_ROWS_AT_FIRST: Final = 32  # taken at a time while their size is not known
_BYTES_AT_A_TIME: Final = 8 * 1024 * 1024  # about
_WEIGHT: Final = 0.2  # of what was taken last in the average
_IDS_AT_A_TIME: Final = 200  # in one statement; some databases bind few
_KEEP_EVERY: Final = 5.0  # seconds


class SQLAlchemyClaims:
    """See the module. For one thread.

    Args:
        table: of the outbox.
        run: carries out work in a transaction of its own.
        lease: seconds.
        boot: names the boot of the machine, where leases are by the time since that; else empty.
    """

    def __init__(
        self, table: Table, run: Callable[[Callable[[Connection], Any], str], Any], lease: float, boot: str = ""
    ) -> None:
        self.owner = f"{boot}{uuid.uuid4().hex}"
        self._boot = boot
        self.keep_every = min(_KEEP_EVERY, lease / 4)
        self._table = table
        self._run = run
        self._lease = lease
        self._claims = 0  # made so far
        self._renewed_at = 0.0
        self._average: float | None = None  # bytes of a row
        self._taken: dict[int, OutboxRow] = {}  # by id: as it was taken last; it may be again before its fate is told

    def take(self, limit: int) -> Taken:
        """Take rows that are due and that nobody has, in order."""
        limit = min(limit, self._affordable)
        began = time.monotonic()
        renews = bool(self._taken) and began - self._renewed_at > self._lease / 2
        rows: list[Row[Any]] = self._run(lambda connection: self._claim(connection, limit, renews), "taking rows")
        if renews or not self._taken:
            self._renewed_at = began
        taken = Taken([], [])
        claim = self._claim_name
        held: set[str] = set()  # keys with a row that is damaged
        for found in rows:
            number, was_claimed, *values = list(found)[: 2 + len(COLUMNS)]
            try:
                row = row_from(number, values, in_doubt=bool(was_claimed), claim=claim)
            except UnreadableRow as error:
                row = OutboxRow(number, Message(b""), "", "", True, None, 0, False, claim)
                taken.damaged.append(Settlement(row, Fate.SET_ASIDE, 0.0, str(error)))
                held.add(found.ordering_key)
            else:
                if row.ordering_key in held:
                    taken.damaged.append(Settlement(row, Fate.BACK))
                else:
                    taken.rows.append(row)
            self._taken[number] = row
        if taken.rows:
            self._weigh(sum(len(row.message.body) for row in taken.rows) / len(taken.rows))
        return taken

    def decided(self, settlements: Sequence[Settlement]) -> None:
        """Nothing to do: a row that is there holds those behind it."""

    def written(self, settlements: Sequence[Settlement]) -> None:
        """Fates are carried out."""
        for settlement in settlements:
            row = settlement.row
            if self._taken.get(row.id) is row:
                del self._taken[row.id]

    def keep(self) -> None:
        """Renew the leases."""
        if self._taken:
            began = time.monotonic()
            self._run(self._renew, "renewing leases")
            self._renewed_at = began

    def close(self) -> None:
        """Hand back what is left. It may have been published."""
        if self._taken:
            self._run(self._release, "handing rows back")
            self._taken.clear()

    # In a transaction

    def _claim(self, connection: Connection, limit: int, renews: bool) -> list[Row[Any]]:
        if renews:
            self._renew(connection)
        self._claims += 1
        name = self._claim_name
        now = database_time(connection)
        until = now + self._lease
        if skips_locked(connection):
            first = self._lock_first(connection, limit, now)
            self._mark(connection, [row.id for row in first], name, until)
        else:
            first = self._take_first(connection, limit, now, name, until)
        keys = sorted({row.ordering_key for row in first if isinstance(row.ordering_key, str)})
        if not keys:
            return first
        behind = self._look_behind(connection, keys, {row.id for row in first}, now)
        self._mark(connection, [row.id for row in behind], name, until)
        return sorted((*first, *behind), key=lambda row: row.id)

    def _lock_first(self, connection: Connection, limit: int, now: float) -> list[Row[Any]]:
        """Lock rows without a key, and of each key the first, which no other relay is locking."""
        columns = self._table.c
        wanted = self._first(now)
        if connection.dialect.name in LOCKS_WHAT_IT_READS:
            # It would lock every row on the way, too, and others would pass over these: choose first, lock these alone.
            choice = select(columns.id).where(wanted).order_by(columns.id).limit(limit)
            chosen = connection.execute(choice).scalars().all()
            if not chosen:
                return []
            wanted = and_(columns.id.in_(chosen), self._due(now))
        query = self._select().where(wanted).order_by(columns.id).limit(limit)
        return list(connection.execute(query.with_for_update(skip_locked=True)))

    def _take_first(self, connection: Connection, limit: int, now: float, name: str, until: float) -> list[Row[Any]]:
        """Take rows without a key, and of each key the first; a statement that writes waits for all others that do."""
        columns = self._table.c
        chosen = select(columns.id).where(self._first(now)).order_by(columns.id).limit(limit).scalar_subquery()
        connection.execute(
            update(self._table)
            .where(columns.id.in_(chosen))
            .values(
                possible_duplicate=case((columns.claimed_by.is_not(None), 1), else_=columns.possible_duplicate),
                claimed_by=name,
                claimed_until=until,
            )
        )
        # Whether it was claimed before is in possible_duplicate by now.
        query = self._select(literal(value=False)).where(columns.claimed_by == name).order_by(columns.id)
        return list(connection.execute(query))

    def _look_behind(self, connection: Connection, keys: list[str], first: set[int], now: float) -> list[Row[Any]]:
        """Find what else of these keys can be taken: nobody else can take it, as their first rows are ours."""
        columns = self._table.c
        behind: list[Row[Any]] = []
        ended: set[str] = set()
        for start in range(0, len(keys), _IDS_AT_A_TIME):
            some = keys[start : start + _IDS_AT_A_TIME]
            rows = self._select().add_columns(self._due(now).label("due")).where(columns.ordering_key.in_(some))
            limit = min(_BEHIND, self._affordable) + len(some)
            for row in connection.execute(rows.order_by(columns.id).limit(limit)):
                if row.id in first or row.ordering_key in ended:
                    continue
                if row.due:
                    behind.append(row)
                else:
                    ended.add(row.ordering_key)
        return behind

    def _mark(self, connection: Connection, ids: Sequence[int], name: str, until: float) -> None:
        for start in range(0, len(ids), _IDS_AT_A_TIME):
            connection.execute(
                update(self._table)
                .where(self._table.c.id.in_(ids[start : start + _IDS_AT_A_TIME]))
                .values(claimed_by=name, claimed_until=until)
            )

    def _renew(self, connection: Connection) -> None:
        columns = self._table.c
        until = database_time(connection) + self._lease
        ids = sorted(self._taken)
        for start in range(0, len(ids), _IDS_AT_A_TIME):
            some = columns.id.in_(ids[start : start + _IDS_AT_A_TIME])
            connection.execute(update(self._table).where(some, self._ours()).values(claimed_until=until))

    def _release(self, connection: Connection) -> None:
        free = {"possible_duplicate": 1, "claimed_by": None, "claimed_until": 0}
        connection.execute(update(self._table).where(self._ours()).values(**free))

    @property
    def _affordable(self) -> int:
        """Rows that memory is spent on at a time."""
        return _ROWS_AT_FIRST if self._average is None else max(int(_BYTES_AT_A_TIME / (self._average + 1)), 1)

    def _weigh(self, average: float) -> None:
        if self._average is None or average > self._average:
            self._average = average
        else:
            self._average += _WEIGHT * (average - self._average)

    @property
    def _claim_name(self) -> str:
        return f"{self.owner}.{self._claims}"

    def _ours(self) -> ColumnElement[bool]:
        return self._table.c.claimed_by.startswith(f"{self.owner}.")

    def _first(self, now: float) -> ColumnElement[bool]:
        """Due, and of a key the first that is left."""
        columns, before = self._table.c, self._table.alias().c
        held = exists().where(before.ordering_key == columns.ordering_key, before.id < columns.id)
        return and_(self._due(now), or_(columns.ordering_key.is_(None), ~held))

    def _due(self, now: float) -> ColumnElement[bool]:
        columns = self._table.c
        free = columns.claimed_until <= now
        if self._boot:
            free = or_(free, ~columns.claimed_by.startswith(self._boot))
        return and_(
            columns.state < SET_ASIDE,
            columns.format <= FORMAT,
            free,
            or_(columns.available_at <= now, columns.available_at > now + 2 * LONGEST_DELAY),
        )

    def _select(self, was_claimed: ColumnElement[bool] | None = None) -> Select[Any]:
        columns = self._table.c
        claimed = columns.claimed_by.is_not(None) if was_claimed is None else was_claimed
        return select(columns.id, claimed.label("was_claimed"), *(columns[name] for name in COLUMNS))
