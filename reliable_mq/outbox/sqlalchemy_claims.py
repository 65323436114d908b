"""How relays share the rows of a table: each takes some for the time of a lease, in a short transaction.

Where the database can, rows that another relay is just taking are passed over (``SKIP LOCKED``); else takers follow one
another. No transaction is open while a message is being published. A relay that dies leaves its rows claimed, and when
the lease is over they are anybody's; they may have been published, and are marked so.

Invariants:

- of an ordering key, a relay takes the first row of all that are left, and with it those behind it; so no other relay
  can have a row of the key at the same time, whoever committed what meanwhile;
- a row that is not ready (delayed, set aside, of a newer format, claimed) holds those behind it, because it is there.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, exists, literal, or_, select, update

from reliable_mq.core.outbox import COLUMNS, FORMAT, LONGEST_DELAY, Fate, OutboxRow, Settlement, UnreadableRow, row_from
from reliable_mq.message import Message
from reliable_mq.outbox.protocol import Taken
from reliable_mq.outbox.sqlalchemy_table import SET_ASIDE, database_time, skips_locked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, Select, Table

__all__ = ["SQLAlchemyClaims"]

_BEHIND: Final = 200  # rows looked at behind the first ones of their keys
_IDS_AT_A_TIME: Final = 200  # in one statement; some databases bind few


class SQLAlchemyClaims:
    """See the module. For one thread.

    Args:
        table: of the outbox.
        run: carries out work in a transaction of its own.
        lease: seconds.
    """

    def __init__(self, table: Table, run: Callable[[Callable[[Connection], Any], str], Any], lease: float) -> None:
        self.owner = uuid.uuid4().hex
        self._table = table
        self._run = run
        self._lease = lease
        self._taken: set[int] = set()

    def take(self, limit: int) -> Taken:
        """Take rows that are due and that nobody has, in order."""
        rows: list[Row[Any]] = self._run(lambda connection: self._claim(connection, limit), "taking rows")
        taken = Taken([], [])
        for found in rows:
            number, was_claimed, *values = list(found)[: 2 + len(COLUMNS)]
            self._taken.add(number)
            try:
                taken.rows.append(row_from(number, values, in_doubt=bool(was_claimed)))
            except UnreadableRow as error:
                row = OutboxRow(number, Message(b""), "", "", True, None, 0, False)
                taken.damaged.append(Settlement(row, Fate.SET_ASIDE, 0.0, str(error)))
        return taken

    def decided(self, settlements: Sequence[Settlement]) -> None:
        """Nothing to do: a row that is there holds those behind it."""

    def written(self, settlements: Sequence[Settlement]) -> None:
        """Fates are carried out."""
        self._taken.difference_update(settlement.row.id for settlement in settlements)

    def keep(self) -> None:
        """Renew the leases."""
        if self._taken:
            self._run(self._renew, "renewing leases")

    def close(self) -> None:
        """Hand back what is left. It may have been published."""
        if self._taken:
            self._run(self._release, "handing rows back")
            self._taken.clear()

    # In a transaction

    def _claim(self, connection: Connection, limit: int) -> list[Row[Any]]:
        now = database_time(connection)
        until = now + self._lease
        first = self._take_first(connection, limit, now, until)
        keys = sorted({row.ordering_key for row in first if row.ordering_key is not None})
        if not keys:
            return first
        late, behind = self._look_behind(connection, keys, {row.id for row in first}, now)
        self._mark(connection, [row.id for row in behind], self.owner, until)
        self._mark(connection, sorted(late), None, 0.0)
        return sorted((*(row for row in first if row.id not in late), *behind), key=lambda row: row.id)

    def _take_first(self, connection: Connection, limit: int, now: float, until: float) -> list[Row[Any]]:
        """Take rows without a key, and of each key the first."""
        columns = self._table.c
        before = self._table.alias()
        held = exists().where(before.c.ordering_key == columns.ordering_key, before.c.id < columns.id)
        due = self._due(now)
        wanted = and_(due, or_(columns.ordering_key.is_(None), ~held))
        if skips_locked(connection):
            query = self._select().where(wanted).order_by(columns.id).limit(limit).with_for_update(skip_locked=True)
            rows = list(connection.execute(query))
            self._mark(connection, [row.id for row in rows], self.owner, until)
            return rows
        # The first statement that writes waits for all others that do, and sees what they did.
        chosen = select(columns.id).where(wanted).order_by(columns.id).limit(limit).scalar_subquery()
        connection.execute(
            update(self._table)
            .where(columns.id.in_(chosen))
            .values(
                possible_duplicate=case((columns.claimed_by.is_not(None), 1), else_=columns.possible_duplicate),
                claimed_by=self.owner,
                claimed_until=until,
            )
        )
        ours = and_(columns.claimed_by == self.owner, columns.claimed_until == until)
        # Whether it was claimed before is in possible_duplicate by now. What was taken in the same instant is ours too.
        query = self._select(literal(value=False)).where(ours).order_by(columns.id)
        return [row for row in connection.execute(query) if row.id not in self._taken]

    def _look_behind(
        self, connection: Connection, keys: list[str], first: set[int], now: float
    ) -> tuple[set[int], list[Row[Any]]]:
        """Find what else of these keys can be taken; and which of the first rows are not the first after all.

        A database whose locking reads see more than its other reads (MariaDB's do) may have missed an earlier one.
        """
        columns = self._table.c
        late: set[int] = set()
        behind: list[Row[Any]] = []
        ended: set[str] = set()
        begun: set[str] = set()
        for start in range(0, len(keys), _IDS_AT_A_TIME):
            some = keys[start : start + _IDS_AT_A_TIME]
            rows = self._select().add_columns(self._due(now).label("due")).where(columns.ordering_key.in_(some))
            query = rows.order_by(columns.id).limit(_BEHIND + len(some))
            for row in connection.execute(query):
                key = row.ordering_key
                if key not in begun:
                    begun.add(key)
                    if row.id not in first:
                        ended.add(key)
                    continue
                if row.id in first:  # behind another one
                    late.add(row.id)
                    ended.add(key)
                elif key not in ended:
                    if row.due:
                        behind.append(row)
                    else:
                        ended.add(key)
        return late, behind

    def _mark(self, connection: Connection, ids: Sequence[int], owner: str | None, until: float) -> None:
        for start in range(0, len(ids), _IDS_AT_A_TIME):
            connection.execute(
                update(self._table)
                .where(self._table.c.id.in_(ids[start : start + _IDS_AT_A_TIME]))
                .values(claimed_by=owner, claimed_until=until)
            )

    def _renew(self, connection: Connection) -> None:
        until = database_time(connection) + self._lease
        connection.execute(
            update(self._table).where(self._table.c.claimed_by == self.owner).values(claimed_until=until)
        )

    def _release(self, connection: Connection) -> None:
        columns = self._table.c
        connection.execute(
            update(self._table)
            .where(columns.claimed_by == self.owner)
            .values(possible_duplicate=1, claimed_by=None, claimed_until=0)
        )

    def _due(self, now: float) -> ColumnElement[bool]:
        columns = self._table.c
        return and_(
            columns.state < SET_ASIDE,
            columns.format <= FORMAT,
            columns.claimed_until <= now,
            or_(columns.available_at <= now, columns.available_at > now + 2 * LONGEST_DELAY),
        )

    def _select(self, was_claimed: ColumnElement[bool] | None = None) -> Select[Any]:
        columns = self._table.c
        claimed = columns.claimed_by.is_not(None) if was_claimed is None else was_claimed
        return select(columns.id, claimed.label("was_claimed"), *(columns[name] for name in COLUMNS))
