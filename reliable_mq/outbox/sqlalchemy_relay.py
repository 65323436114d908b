"""How relays share the rows of a table: each leases some in a short transaction.

If the database supports ``SKIP LOCKED``, a relay passes over rows that another relay is just taking; otherwise relays
take rows one after the other. No transaction is open while a message is being published. The rows of a relay that dies
stay claimed. After the lease, any relay may take them, and they are marked as possibly published before.

Rows without a key are found in the order of their ids, and the first row of each key in the order of the keys, each
with one search of the index of key and id. A relay iterates over the keys cyclically, starting where its last take
ended, so a take costs no more if a million rows wait behind the first ones. The oldest rows of both searches are taken,
and only as many delayed ones as the relay allows. The statement that locks them reads their sizes, and each body that
is not larger than its share of a take. If larger bodies fit, too, another statement reads them.

Invariants:

- a relay takes the first remaining row of an ordering key, and the rows behind it. A transaction that commits late may
  still store a row before them, which is another relay's or the next take's, and has no order with them;
- the rows of a transaction stay in order: the rows behind are those of one snapshot, in which the locked row is still
  the first of its key. None of them is marked before it is locked, too, and the first that another relay has ends them;
- a row that is not ready (delayed, set aside, of a newer format, claimed) holds the rows behind it because it is still
  in the table;
- every claim has a unique name, which distinguishes the rows of one transaction from rows that this relay had before,
  and a late outcome from a row that another relay has claimed since;
- if leases use the time since the boot of the machine, claims of an earlier boot are expired. The name of a claim
  contains its boot. If the claim or the relay cannot name it, a claim that ends later than a new one would is of an
  earlier boot;
- a row that another transaction has locked, for example one of the user, delays neither the renewal nor the release of
  other rows. Nobody can take it meanwhile, and the next renewal includes it if it is free again;
- a relay never takes a row that it already has, unless another transaction kept its lease from being renewed. If its
  leases may have ended, for example after an outage of the database, it renews them first.
"""

from __future__ import annotations

import time
import uuid
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, func, literal, or_, select, union_all, update

from reliable_mq.core.outbox import (
    COLUMNS,
    FORMAT,
    LONGEST_DELAY,
    OutboxRow,
    RowOutcome,
    RowSettlement,
    UnreadableRow,
    damaged_row,
    row_from,
)
from reliable_mq.core.statistics import PeakAverage
from reliable_mq.errors import OutboxError
from reliable_mq.outbox.protocol import RowBatch, portions
from reliable_mq.outbox.sqlalchemy_table import (
    DELAYED,
    READY,
    SET_ASIDE,
    UNNAMED_BOOT,
    WALKS_AN_INDEX,
    any_text,
    begin_taking,
    database_time,
    skips_locked,
    update_by_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, Select, Table

_BEHIND: Final = 200  # the least limit of rows read behind the first rows of their keys
_KEYS_BEHIND: Final = 50  # keys whose rows one statement reads
_KEYS_AT_LEAST: Final = 100  # keys read in one statement
_KEYS_AT_MOST: Final = 5000  # keys read per take; the next take continues there
_ROWS_AT_FIRST: Final = 32  # rows per take while their size is unknown
_BYTES_PER_TAKE: Final = 8 * 1024 * 1024  # of the first rows, and of those behind them
_KEEP_EVERY: Final = 5.0  # seconds


class SQLAlchemyRowLeases:
    """The rows that one relay of a table has leased. Not thread-safe.

    Args:
        run: A function that runs work in a new transaction.
        boot: The name of the machine's boot if leases use the time since then, else an empty text.
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
        self._claims = 0  # number of claims so far
        self._renewed_at = 0.0
        self._average = PeakAverage()  # of the rows' bodies
        self._last_key: str | None = None  # keys up to this one were read
        self._taken: dict[int, OutboxRow] = {}  # by id, as last taken; a row may be retaken before its outcome is known
        #: Names of claims that failed but may be committed, and when their leases end. Their rows are taken again.
        self._doubted: dict[str, float] = {}
        self._unpublished: set[int] = set()  # ids of taken rows that are returned unpublished, until that is written

    def take(self, limit: int, retries: int | None = None) -> RowBatch:
        """Take rows that are due and that no relay has, in order of their ids."""
        limit = min(limit, self._affordable)
        most = limit if retries is None else min(retries, limit)
        began = time.monotonic()
        renews = bool(self._taken) and began - self._renewed_at > self._lease / 2
        self._doubted = {name: until for name, until in self._doubted.items() if began < until}
        before = self._claims

        def work(connection: Connection) -> list[Row[Any]]:
            with any_text(connection):  # a damaged row must not fail the others
                return self._claim(connection, limit, most, renews)

        try:
            rows: list[Row[Any]] = self._run(work, "taking rows")
        except OutboxError:
            self._doubted |= {self._name(number): began + self._lease for number in range(before + 1, self._claims + 1)}
            raise
        if renews or not self._taken:
            self._renewed_at = began
        taken = RowBatch([], [])
        claim = self._claim_name
        held: set[str] = set()  # keys with a damaged row
        for found in rows:
            number, was_claimed, *values = list(found)[: 2 + len(COLUMNS)]
            try:
                row = row_from(number, values, in_doubt=bool(was_claimed), claim=claim)
            except UnreadableRow as error:
                row = damaged_row(number, values, claim=claim)
                taken.damaged.append(RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, str(error)))
                if found.ordering_key is not None:
                    held.add(found.ordering_key)
            else:
                if row.ordering_key in held:
                    taken.damaged.append(RowSettlement(row, RowOutcome.BACK))
                else:
                    taken.rows.append(row)
            self._taken[number] = row
            self._unpublished.discard(number)
        if taken.rows:
            self._average.observe(sum(len(row.message.body) for row in taken.rows) / len(taken.rows))
        return taken

    def decided(self, settlements: Sequence[RowSettlement]) -> None:
        """Note rows that are returned unpublished. Held rows are held by the table."""
        for settlement in settlements:
            row = settlement.row
            if settlement.outcome is RowOutcome.BACK and not row.possible_duplicate and self._taken.get(row.id) is row:
                self._unpublished.add(row.id)

    def written(self, settlements: Sequence[RowSettlement]) -> None:
        for settlement in settlements:
            row = settlement.row
            if self._taken.get(row.id) is row:
                del self._taken[row.id]
                self._unpublished.discard(row.id)

    def keep(self) -> None:
        if self._taken:
            began = time.monotonic()
            self._run(self._renew, "renewing leases")
            self._renewed_at = began

    def close(self) -> None:
        """Release the remaining rows, which may have been published."""
        if self._taken:
            self._run(self._release, "releasing rows")
            self._taken.clear()
            self._unpublished.clear()

    # In a transaction

    def _claim(self, connection: Connection, limit: int, retries: int, renews: bool) -> list[Row[Any]]:
        if renews:
            self._renew(connection)
        self._claims += 1
        name = self._claim_name
        now = begin_taking(connection)
        until = now + self._lease
        locks = skips_locked(connection)
        if not locks:  # acquire the write lock first: after a read, the database may refuse it
            self._mark(connection, [-1], name, until)
        ids = self._choose(connection, limit, retries, now)
        first = self._acquire(connection, [[number] for number in ids], now, locks)
        # Rows behind one that failed before wait in the table, because it may fail again.
        heads = {row.ordering_key: row.id for row in first if isinstance(row.ordering_key, str) and not row.attempts}
        runs = self._next_of_keys(connection, heads, max(limit - len(first), _BEHIND), now)
        taken = sorted([*first, *self._acquire(connection, runs, now, locks)], key=lambda row: int(row.id))
        if locks:
            self._mark(connection, [row.id for row in taken], name, until)
        return taken

    def _choose(self, connection: Connection, limit: int, retries: int, now: float) -> list[int]:
        """Return the oldest ids of due rows without a key and due first rows of keys."""
        found = self._free(connection, limit, retries, now)
        heads = self._around(connection, limit, retries, now)
        chosen: set[int] = set()
        left = retries
        of_keys = [(number, state) for _, number, state in heads if state is not None]
        for number, state in sorted([*found, *of_keys]):
            if len(chosen) == limit:
                break
            if state == DELAYED:
                if not left:
                    continue
                left -= 1
            chosen.add(number)
        for key, number, due in heads:
            if number not in chosen and (due == READY or (due == DELAYED and left)):
                break
            if isinstance(key, str):  # a damaged one cannot be compared with others
                self._last_key = key
        return sorted(chosen)

    def _free(self, connection: Connection, limit: int, retries: int, now: float) -> set[tuple[int, int]]:
        """Return the ids and states of the oldest due rows without a key."""
        columns = self._table.c
        # The index of key and id has this order. Any other search would pass over rows with keys.
        free = select(columns.id, columns.state).where(columns.ordering_key.is_(None), self._due(now))
        free = free.order_by(columns.ordering_key, columns.id).limit(limit)
        found = {(number, state) for number, state in connection.execute(free)} if retries else set()
        if not retries or sum(state == DELAYED for _, state in found) > retries:
            found |= {(number, state) for number, state in connection.execute(free.where(columns.state == READY))}
        return found

    def _around(
        self, connection: Connection, limit: int, retries: int, now: float
    ) -> list[tuple[str, int, int | None]]:
        """Return keys in cyclic order, up to the one with which enough first rows are due.

        Each key has the id of its first row, and the state of that row if it is due.
        """
        columns = self._table.c
        size = max(limit, _KEYS_AT_LEAST)
        after, up_to = self._last_key, None
        around: list[tuple[str, int, int | None]] = []
        ready = delayed = 0
        while True:
            heads = self._heads(connection, after, up_to, size)
            due: dict[int, int] = {}
            for some in portions([number for _, number in heads]):
                query = select(columns.id, columns.state).where(columns.id.in_(some), self._due(now))
                due.update((number, state) for number, state in connection.execute(query))
            around += [(key, number, due.get(number)) for key, number in heads]
            ready += sum(state == READY for state in due.values())
            delayed += sum(state == DELAYED for state in due.values())
            if ready + min(delayed, retries) >= limit or len(around) >= _KEYS_AT_MOST:
                return around
            if len(heads) == size:
                after = heads[-1][0]
            elif up_to is None and self._last_key is not None:
                after, up_to = None, self._last_key
            else:
                return around

    def _heads(self, connection: Connection, after: str | None, up_to: str | None, size: int) -> list[tuple[str, int]]:
        """Return up to ``size`` keys in order, with the id of the first row of each."""
        columns = self._table.c

        def within(key: Any, last: Any) -> ColumnElement[bool]:
            begins: ColumnElement[bool] = key.is_not(None) if last is None else key > last
            return begins if up_to is None else and_(begins, key <= up_to)

        if connection.dialect.name not in WALKS_AN_INDEX:
            query = select(columns.ordering_key, func.min(columns.id)).where(within(columns.ordering_key, after))
            query = query.group_by(columns.ordering_key).order_by(columns.ordering_key).limit(size)
            return [(key, number) for key, number in connection.execute(query)]
        one, other, row = (self._table.alias().c for _ in range(3))
        begin = select(func.min(one.ordering_key)).where(within(one.ordering_key, after)).scalar_subquery()
        keys = select(begin.label("key"), literal(1).label("place")).cte("keys", recursive=True)
        following = select(func.min(other.ordering_key)).where(within(other.ordering_key, keys.c.key)).scalar_subquery()
        keys = keys.union_all(select(following, keys.c.place + 1).where(keys.c.key.is_not(None), keys.c.place < size))
        # Not min(id) of the key: a database may search for that in the order of the ids, through rows of other keys.
        at = select(row.id).where(row.ordering_key >= keys.c.key).order_by(row.ordering_key, row.id).limit(1)
        found = select(keys.c.place, keys.c.key, at.scalar_subquery()).where(keys.c.key.is_not(None))
        return [(key, number) for _, key, number in sorted(map(tuple, connection.execute(found)))]

    def _acquire(
        self, connection: Connection, runs: Sequence[Sequence[int]], now: float, locks: bool
    ) -> list[Row[Any]]:
        """Lock or claim rows, as many as fit in memory.

        Of each run, the first row that cannot be taken ends it.
        """
        acquire = self._lock if locks else self._update
        ids = sorted(number for run in runs for number in run)
        share = _BYTES_PER_TAKE // max(len(ids), 1)
        found = {row.id: row for some in portions(ids) for row in acquire(connection, some, now, share)}
        taken = sorted(number for run in runs for number in takewhile(found.__contains__, run))
        sizes = accumulate(found[number].size for number in taken)
        del taken[max(sum(size <= _BYTES_PER_TAKE for size in sizes), 1) :]
        if not locks:
            self._mark(connection, sorted(found.keys() - set(taken)), None, 0.0)
        for some in portions([number for number in taken if found[number].body is None]):
            query = self._select().where(self._table.c.id.in_(some))
            found.update((row.id, row) for row in connection.execute(query))
        return [found[number] for number in taken]

    def _lock(self, connection: Connection, ids: Sequence[int], now: float, share: int) -> list[Row[Any]]:
        """Lock and return the rows that are still due and not locked by another relay."""
        columns = self._table.c
        query = self._select(share).where(columns.id.in_(ids), self._due(now)).order_by(columns.id)
        return list(connection.execute(query.with_for_update(skip_locked=True)))

    def _update(self, connection: Connection, ids: Sequence[int], now: float, share: int) -> list[Row[Any]]:
        """Claim and return the rows that are still due. Other writers wait for this."""
        columns, name = self._table.c, self._claim_name
        connection.execute(
            update(self._table)
            .where(columns.id.in_(ids), self._due(now))
            .values(
                possible_duplicate=case((columns.claimed_by.is_not(None), 1), else_=columns.possible_duplicate),
                claimed_by=name,
                claimed_until=now + self._lease,
            )
        )
        # possible_duplicate is now set if the row was claimed before.
        mine = self._select(share).where(columns.id.in_(ids), columns.claimed_by == name)
        return list(connection.execute(mine.order_by(columns.id)))

    def _next_of_keys(self, connection: Connection, heads: dict[str, int], limit: int, now: float) -> list[list[int]]:
        """Return the ids of the due rows next to each head.

        There are none if the head is no longer the first row of its key.
        """
        columns = self._table.c
        each = min(limit, self._affordable) // len(heads) if heads else 0
        if not each:
            return []
        runs: list[list[int]] = []
        keys = list(heads.items())
        for start in range(0, len(keys), _KEYS_BEHIND):
            some = keys[start : start + _KEYS_BEHIND]
            queries = []
            for place, (key, _) in enumerate(some):
                # The index has this range and order. For an equality, a database might use the other index.
                mine = and_(columns.ordering_key >= key, columns.ordering_key <= key)
                rows = select(columns.id, self._due(now).label("due"), literal(place).label("place")).where(mine)
                queries.append(select(rows.order_by(columns.ordering_key, columns.id).limit(each + 1).subquery()))
            found: list[list[tuple[int, bool]]] = [[] for _ in some]
            for number, due, place in sorted(map(tuple, connection.execute(union_all(*queries)))):
                found[place].append((number, due))
            for (_, head), rows_of_key in zip(some, found, strict=True):
                (first, _), *behind = rows_of_key
                if first == head:
                    runs.append([number for number, _ in takewhile(itemgetter(1), behind)])
        return runs

    def _mark(self, connection: Connection, ids: Sequence[int], name: str | None, until: float) -> None:
        for some in portions(ids):
            mine = update_by_id(self._table, connection.dialect).where(self._table.c.id.in_(some))
            connection.execute(mine.values(claimed_by=name, claimed_until=until))

    def _renew(self, connection: Connection) -> None:
        self._change(connection, self._taken, {"claimed_until": database_time(connection) + self._lease})

    def _release(self, connection: Connection) -> None:
        free = {"claimed_by": None, "claimed_until": 0}
        self._change(connection, self._unpublished, free)
        self._change(connection, self._taken.keys() - self._unpublished, {**free, "possible_duplicate": 1})

    def _change(self, connection: Connection, taken: Iterable[int], values: dict[str, Any]) -> None:
        """Change those of the taken rows that this relay still has and nobody has locked."""
        for some in portions(sorted(taken)):
            ids = self._not_locked(connection, some)
            mine = update_by_id(self._table, connection.dialect).where(self._table.c.id.in_(ids), self._ours())
            connection.execute(mine.values(values))

    def _not_locked(self, connection: Connection, ids: Sequence[int]) -> Sequence[int]:
        """Lock and return the rows that nobody has locked, or all without SKIP LOCKED."""
        if not skips_locked(connection):
            return ids
        columns = self._table.c
        free = select(columns.id).where(columns.id.in_(ids), self._ours()).order_by(columns.id)
        return list(connection.execute(free.with_for_update(skip_locked=True)).scalars())

    @property
    def _affordable(self) -> int:
        """The maximum number of rows per take that fit in memory."""
        average = self._average.value
        return _ROWS_AT_FIRST if average is None else max(int(_BYTES_PER_TAKE / (average + 1)), 1)

    @property
    def _claim_name(self) -> str:
        return self._name(self._claims)

    def _name(self, claim: int) -> str:
        return f"{self.owner}.{claim}"

    def _ours(self) -> ColumnElement[bool]:
        return self._table.c.claimed_by.startswith(f"{self.owner}.")

    def _due(self, now: float) -> ColumnElement[bool]:
        columns = self._table.c
        free = columns.claimed_until <= now
        if self._doubted:
            free = or_(free, columns.claimed_by.in_(sorted(self._doubted)))
        if self._boot:
            free = or_(free, self._of_earlier_boot(now))
        return and_(
            columns.state < SET_ASIDE,
            columns.format <= FORMAT,
            free,
            or_(columns.available_at <= now, columns.available_at > now + 2 * LONGEST_DELAY),
        )

    def _of_earlier_boot(self, now: float) -> ColumnElement[bool]:
        columns = self._table.c
        too_late = columns.claimed_until > now + self._lease
        if self._boot == UNNAMED_BOOT:
            return too_late
        unnamed = columns.claimed_by.startswith(UNNAMED_BOOT)
        return case((unnamed, too_late), else_=~columns.claimed_by.startswith(self._boot))

    def _select(self, share: int | None = None) -> Select[Any]:
        """Return a query of rows and their sizes.

        A body that is larger than ``share`` is None.
        """
        columns = self._table.c
        size = func.length(columns.body)
        body = columns.body if share is None else case((size <= share, columns.body))
        # The claim may be this one.
        claimed = func.coalesce(columns.claimed_by, self._claim_name) != self._claim_name
        values = (body.label(name) if name == "body" else columns[name] for name in COLUMNS)
        return select(columns.id, claimed.label("was_claimed"), *values, size.label("size"))
