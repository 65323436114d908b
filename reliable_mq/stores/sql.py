"""The SQL of the stores for each database, and the calls that use it.

The work of a call is a generator of statements. It yields them, receives their rows and returns its result. So each
statement is written once for the sync API, the asyncio API and the transaction of a handler.

There is one row per key. ``state`` is 0 free, 1 claimed or 2 done. ``token`` is the token of the newest claim, even
after its end. ``holder`` identifies the claim call while the key is claimed, and is 0 otherwise. Times are microseconds
since 1970, by the clock of the database server. SQLite has only the caller's wall clock, which may jump, so its
statements get the time from :mod:`reliable_mq._util.boottime`, continued from boot to boot and from machine to machine,
and never going backwards.

Invariants:

- one statement both finds and locks the current row that it changes, so only one of two claims of a key succeeds;
- a claim that finds its own holder keeps the token, so a call that was delayed and then repeated does no harm;
- a token is greater than the key's previous one and not below the time, so it is not used again after the row is
  deleted;
- a row of another format is neither changed nor interpreted;
- rows are locked in the order of their keys, so that transactions do not deadlock;
- the server itself ends a call that waits for the lock of a record: while PostgreSQL waits, it does not notice that its
  client is gone, and each further attempt would keep another of its processes. The transaction of a handler has the
  handler's settings;
- ``expires``, which has an index, is changed as rarely as possible, because an update of the other columns costs
  PostgreSQL no index entry. So a row may be kept for a lease longer than the retention.
"""

# ruff: noqa: S608 -- only the checked name of the table and own numbers are formatted into statements

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration, lock_timeout, seconds
from reliable_mq.core.idempotency import ClaimStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.base import FORMAT, ClaimAnswer, Held, PurgePace, Queries, StoreBase, microseconds

logger = get_logger(__name__)

T = TypeVar("T")
_ROWS_PER_PURGE: Final = 500
_KEYS_PER_LIST: Final = 512
_SAME_BEGIN: Final = 1_000_000  # microseconds between two readings of one boot's beginning, at most
_TABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,47}\.)?[A-Za-z_][A-Za-z0-9_]{0,47}")


class Query(NamedTuple):
    """A statement with named parameters. The reply is its rows, if it returns any."""

    sql: str
    parameters: Mapping[str, object]


Steps: TypeAlias = Generator[Query, Sequence[Sequence[Any]], T]


def checked_table(name: str) -> str:
    """Return a table name, with or without a schema, after checking that it is plain."""
    if not isinstance(name, str) or not _TABLE.fullmatch(name):
        raise ConfigurationError(f"table must be a name of letters, digits and underscores, not {name!r}")
    return name


class Dialect:
    """The statements of the calls, in the SQL of one database.

    Methods receive the stored forms of keys: at least one, without duplicates, in order. Durations are in microseconds.
    ``now`` is the time for a database that has no clock. ``ddl`` contains the statements that create the table if it
    does not exist.
    """

    transactional = False  # whether the statements of a call need a transaction
    _greatest = "greatest"
    _create: tuple[str, ...] = ()

    def __init__(self, table: str) -> None:
        self.table = table
        schema, dot, name = table.rpartition(".")
        names = {"table": table, "name": name, "index": f"{name}_expires", "schema": schema + dot}
        self.ddl = tuple(statement.format(**names) for statement in self._create)
        self._on_conflict = (
            "ON CONFLICT (claim_key) DO UPDATE SET "
            "token = CASE WHEN c.state = 1 AND c.holder = excluded.holder THEN c.token "
            f"ELSE {self._greatest}(c.token + 1, excluded.token) END, "
            "state = 1, holder = excluded.holder, "
            "attempts = CASE WHEN c.expires <= excluded.token THEN 0 ELSE c.attempts END, "
            "lease_ends = excluded.lease_ends, expires = excluded.expires "
            f"WHERE c.format = {FORMAT} AND (c.state = 0 OR c.expires <= excluded.token OR "
            "(c.state = 1 AND (c.lease_ends <= excluded.token OR c.holder = excluded.holder))) "
            "RETURNING claim_key, token, attempts"
        )

    def waiting(self, timeout: float) -> Dialect:
        """Return a dialect that limits waits for a lock to less than the seconds.

        MariaDB, MySQL and SQLite have limits of their own.
        """
        return self

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """Claim each key in the name of its holder."""
        raise NotImplementedError

    def complete(self, held: Sequence[Held], *, again: bool, retention: int, now: int) -> Steps[set[Held]]:
        """Mark claims as done; return the claims that made their keys done.

        ``again`` is whether that includes claims that had made their keys done before.
        """
        return self._settle(held, "1, 2" if again else "1", "state = 2, holder = 0", retention, now)

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """Release claims; return the claims that were held."""
        change = f"state = 0, holder = 0, attempts = attempts + {int(failed)}"
        return self._settle(held, "1", change, retention, now)

    def _settle(self, held: Sequence[Held], states: str, change: str, retention: int, now: int) -> Steps[set[Held]]:
        """Change the claims' rows that are in one of the states; return these claims."""
        raise NotImplementedError

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """Forget failed attempts; return the keys that had some."""
        raise NotImplementedError

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """Delete up to ``limit`` expired rows; return their number."""
        raise NotImplementedError


def _with_others(
    holders: Mapping[str, int], granted: dict[str, ClaimAnswer], rows: Sequence[Sequence[Any]]
) -> dict[str, ClaimAnswer]:
    """Add the replies for keys that were not granted to those that were.

    ``rows`` has one row for each of these keys: key, format, whether it is done, failed attempts.
    """
    for key, version, done, attempts in rows:
        if key in granted:
            continue
        if version != FORMAT:
            granted[key] = ClaimAnswer(ClaimStatus.UNREADABLE)
        else:
            granted[key] = ClaimAnswer(ClaimStatus.DONE if done else ClaimStatus.IN_PROGRESS, attempts=attempts)
    for key in holders:  # a row that appeared or vanished between the two statements belongs to another caller
        granted.setdefault(key, ClaimAnswer(ClaimStatus.IN_PROGRESS))
    return granted


class MySQL(Dialect):
    """The SQL of MariaDB 10.5 and newer, and MySQL 8.

    They have no common ``RETURNING``, so a call changes rows and then reads them. A statement locks every row it reads.
    Instead of looking up many keys in a small table, the server would read all of its rows, so statements that lock
    rows force the use of the primary key.
    """

    transactional = True
    _create = (
        (
            "CREATE TABLE IF NOT EXISTS {table} (claim_key varchar(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL "
            "PRIMARY KEY, format smallint NOT NULL, state smallint NOT NULL, token bigint NOT NULL, "
            "holder bigint NOT NULL, attempts integer NOT NULL, lease_ends bigint NOT NULL, expires bigint NOT NULL, "
            "INDEX {index} (expires)) ENGINE = InnoDB"
        ),
    )
    _now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

    def __init__(self, table: str) -> None:
        super().__init__(table)
        self._by_key = f"{table} FORCE INDEX (PRIMARY)"
        self._is_mariadb, self._version = False, ""  # unknown until _find_version()

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """Claim keys.

        An assignment sees the results of those to its left, or the old row in some modes of MariaDB. A row that was
        free satisfies the condition again after each of these assignments, because its holder is the caller's.
        """
        yield from self._find_version()
        old = self.table.rpartition(".")[2]
        # MySQL warns about each VALUES(); MariaDB does not support a name for the new row.
        named = not (self._is_mariadb or self._older_than(8, 0, 19))
        token, holder, lease_ends, expires = (
            f"new_row.{column}" if named else f"VALUES({column})"
            for column in ("token", "holder", "lease_ends", "expires")
        )
        free = (
            f"{old}.format = {FORMAT} AND ({old}.state = 0 OR {old}.expires <= {token} OR "
            f"({old}.state = 1 AND ({old}.lease_ends <= {token} OR {old}.holder = {holder})))"
        )
        among, keys = _among(list(holders))
        # A repeated row finds its own holder, and changes nothing more.
        numbers = {f"n{number}": holders[key] for number, key in enumerate(keys.values())}
        rows_given = ", ".join(
            f"(:k{number}, {FORMAT}, 1, {self._now}, :n{number}, 0, {self._now} + :lease, {self._now} + :kept)"
            for number in range(len(keys))
        )
        yield Query(
            f"INSERT INTO {self.table} (claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"VALUES {rows_given} {'AS new_row ' if named else ''}ON DUPLICATE KEY UPDATE "
            f"token = IF({free}, IF({old}.state = 1 AND {old}.holder = {holder}, {old}.token, "
            f"GREATEST({old}.token + 1, {token})), {old}.token), "
            f"attempts = IF({free} AND {old}.expires <= {token}, 0, {old}.attempts), "
            f"holder = IF({free}, {holder}, {old}.holder), "
            f"state = IF({free}, 1, {old}.state), "
            f"lease_ends = IF({free}, {lease_ends}, {old}.lease_ends), "
            f"expires = IF({free}, {expires}, {old}.expires)",
            {**keys, **numbers, "lease": lease, "kept": lease + retention},
        )
        rows = yield Query(
            f"SELECT claim_key, format, state, expires > {self._now}, token, holder, attempts FROM {self.table} "
            f"WHERE ({among})",
            keys,
        )
        granted: dict[str, ClaimAnswer] = {}
        others: list[tuple[object, ...]] = []
        for key, version, state, lives, token, holder, attempts in rows:
            if version == FORMAT and state == 1 and holder == holders[key]:
                granted[key] = ClaimAnswer(ClaimStatus.NEW, token, attempts)
            else:
                others.append((key, version, state == 2 and lives, attempts))
        return _with_others(holders, granted, others)

    def _settle(self, held: Sequence[Held], states: str, change: str, retention: int, now: int) -> Steps[set[Held]]:
        among, keys = _among([key for key, _ in held])
        rows = yield Query(
            f"SELECT claim_key, token FROM {self._by_key} WHERE ({among}) AND format = {FORMAT} "
            f"AND state IN ({states}) AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            keys,
        )
        taken = {(key, token) for key, token in rows} & set(held)
        if taken:
            among, keys = _among(sorted(key for key, _ in taken))
            yield Query(
                f"UPDATE {self._by_key} SET {change}, expires = GREATEST(expires, {self._now} + :retention) "
                f"WHERE ({among})",
                {**keys, "retention": retention},
            )
        return taken

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        among, parameters = _among(keys)
        rows = yield Query(
            f"SELECT claim_key FROM {self._by_key} WHERE ({among}) AND format = {FORMAT} AND state < 2 "
            f"AND attempts > 0 AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            parameters,
        )
        found = [key for (key,) in rows]
        if found:
            among, parameters = _among(found)
            yield Query(f"UPDATE {self._by_key} SET attempts = 0 WHERE ({among})", parameters)
        return set(found)

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """Delete up to ``limit`` expired rows; return their number.

        The rows are found without a lock: a locking read of the index of ``expires`` would also lock the gap behind
        them, where new claims are inserted. Then they are locked by key, skipping rows that others have locked.
        """
        yield from self._find_version()
        locking = "FOR UPDATE" if self._is_mariadb and self._older_than(10, 6) else "FOR UPDATE SKIP LOCKED"
        expired = f"expires <= {self._now} AND format = {FORMAT}"
        rows = yield Query(  # twice as many as wanted, because others may have locked the first ones
            f"SELECT claim_key FROM {self.table} WHERE {expired} ORDER BY expires LIMIT :most", {"most": 2 * limit}
        )
        if not rows:
            return 0
        among, keys = _among([key for (key,) in rows])
        rows = yield Query(
            f"SELECT claim_key FROM {self._by_key} WHERE ({among}) AND {expired} LIMIT :most {locking}",
            {**keys, "most": limit},
        )
        if rows:
            among, keys = _among([key for (key,) in rows])
            # The two databases have different hints, and each ignores the hint of the other.
            delete = (
                f"DELETE {self.table} FROM {self._by_key}"
                if self._is_mariadb
                else f"DELETE /*+ INDEX({self.table.rpartition('.')[2]} PRIMARY) */ FROM {self.table}"
            )
            yield Query(f"{delete} WHERE ({among})", keys)
        return len(rows)

    def _find_version(self) -> Steps[None]:
        """Query the server's version once."""
        if not self._version:
            [(said,)] = yield Query("SELECT VERSION()", {})
            self._is_mariadb = "mariadb" in said.lower()
            self._version = said

    def _older_than(self, *version: int) -> bool:
        return tuple(map(int, re.findall(r"\d+", self._version)[:3])) < version


def _among(keys: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return a condition that is true for keys, and its parameters.

    The last key is repeated up to the next power of two. So calls of any size have few different texts, which caches
    keep: the engine's has 500 entries for all statements of the user. From 1000 keys on in one list, MariaDB would look
    up the rows of the table in the list, and lock all of them.
    """
    padding = (1 << (len(keys) - 1).bit_length()) - len(keys)
    parameters = {f"k{number}": key for number, key in enumerate([*keys, *[keys[-1]] * padding])}
    names = [f":{name}" for name in parameters]
    lists = (names[start : start + _KEYS_PER_LIST] for start in range(0, len(names), _KEYS_PER_LIST))
    return " OR ".join(f"claim_key IN ({', '.join(some)})" for some in lists), parameters


class SQLite(Dialect):
    """The SQL of SQLite 3.35 and newer."""

    _greatest = "max"
    _create = (
        (
            "CREATE TABLE IF NOT EXISTS {table} (claim_key TEXT NOT NULL PRIMARY KEY, format INTEGER NOT NULL, "
            "state INTEGER NOT NULL, token INTEGER NOT NULL, holder INTEGER NOT NULL, attempts INTEGER NOT NULL, "
            "lease_ends INTEGER NOT NULL, expires INTEGER NOT NULL) WITHOUT ROWID"
        ),
        "CREATE INDEX IF NOT EXISTS {schema}{index} ON {name} (expires)",
        (
            "CREATE TABLE IF NOT EXISTS {table}_clock (boot TEXT NOT NULL PRIMARY KEY, base INTEGER NOT NULL, "
            "began INTEGER NOT NULL)"
        ),
    )
    _given = "(SELECT json_extract(value, '$[0]') AS k, json_extract(value, '$[1]') AS n FROM json_each(:given)) AS g"

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        rows = yield Query(
            f"INSERT INTO {self.table} AS c (claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"SELECT g.k, {FORMAT}, 1, :now, g.n, 0, :now + :lease, :now + :lease + :retention "
            f"FROM {self._given} WHERE true {self._on_conflict}",
            {"given": json.dumps(list(holders.items())), "now": now, "lease": lease, "retention": retention},
        )
        granted = {key: ClaimAnswer(ClaimStatus.NEW, token, attempts) for key, token, attempts in rows}
        if len(granted) < len(holders):
            rows = yield Query(
                f"SELECT claim_key, format, state = 2 AND expires > :now, attempts FROM {self.table} "
                "WHERE claim_key IN (SELECT value FROM json_each(:keys))",
                {"keys": json.dumps([key for key in holders if key not in granted]), "now": now},
            )
            _with_others(holders, granted, rows)
        return granted

    def _settle(self, held: Sequence[Held], states: str, change: str, retention: int, now: int) -> Steps[set[Held]]:
        rows = yield Query(
            f"UPDATE {self.table} AS c SET {change}, expires = max(c.expires, :now + :retention) "
            f"FROM {self._given} WHERE c.claim_key = g.k AND c.token = g.n AND c.format = {FORMAT} "
            f"AND c.state IN ({states}) AND c.expires > :now RETURNING claim_key, token",
            {"given": json.dumps(held), "now": now, "retention": retention},
        )
        return {(key, token) for key, token in rows}

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        rows = yield Query(
            f"UPDATE {self.table} SET attempts = 0 WHERE claim_key IN (SELECT value FROM json_each(:keys)) "
            f"AND format = {FORMAT} AND state < 2 AND attempts > 0 AND expires > :now RETURNING claim_key",
            {"keys": json.dumps(list(keys)), "now": now},
        )
        return {key for (key,) in rows}

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        rows = yield Query(
            f"DELETE FROM {self.table} WHERE claim_key IN (SELECT claim_key FROM {self.table} "
            f"WHERE expires <= :now AND format = {FORMAT} LIMIT :most) RETURNING claim_key",
            {"now": now, "most": limit},
        )
        return len(rows)

    def lock(self) -> Steps[None]:
        """Lock the database for writing in this transaction.

        After a read, SQLite may refuse the lock. This is not done by BEGIN IMMEDIATE, because the driver or an event of
        the engine may have begun the transaction already.
        """
        yield Query(f"UPDATE {self.table} SET state = state WHERE 0", {})

    def clock_base(self, boot: str, began: int, since: int) -> Steps[int]:
        """Return the time at which this boot of the machine began, by the file's clock.

        All processes that use the file share this clock. For the first boot that uses the file, the result is the wall
        clock's, ``began``. After another boot, of this machine or of one to which the file was moved, the clock
        continues from the newest claim. So the time for which no machine uses the file does not count. The wall clock
        may be wrong by years until it is set over the network, and another machine may have run for years: by either of
        them, done keys would be forgotten, or claims held for years.

        A process that cannot read the name of the boot, or reads another one, as in some containers, recognizes the
        boot by the wall clock's time of its beginning, which no other machine is likely to share to a second.

        The transaction must have locked the database, before ``since`` was read.
        """
        clock = f"{self.table}_clock"
        if boot:
            rows = yield Query(f"SELECT base FROM {clock} WHERE boot = :boot", {"boot": boot})
            if rows:
                return int(rows[0][0])
        [(newest,)] = yield Query(f"SELECT max(token) FROM {self.table} WHERE format = {FORMAT}", {})
        rows = yield Query(f"SELECT base, began FROM {clock}", {})
        shared = [base for base, other in rows if abs(other - began) <= _SAME_BEGIN and base + since >= (newest or 0)]
        base: int
        if shared:
            base = shared[0]
        elif newest is not None:
            base = newest - since
        else:
            base = max((earlier for earlier, _ in rows), default=began)
        if not shared:  # after a return to that boot or machine, the clock continues as well
            yield Query(f"DELETE FROM {clock}", {})
        yield Query(
            f"INSERT INTO {clock} (boot, base, began) VALUES (:boot, :base, :began) "
            "ON CONFLICT (boot) DO UPDATE SET base = excluded.base, began = excluded.began",
            {"boot": boot, "base": base, "began": began},
        )
        return base


class PostgreSQL(Dialect):
    """The SQL of PostgreSQL 12 and newer: one statement and one round trip per call."""

    _create = (
        (
            "CREATE TABLE IF NOT EXISTS {table} (claim_key text NOT NULL PRIMARY KEY, format smallint NOT NULL, "
            "state smallint NOT NULL, token bigint NOT NULL, holder bigint NOT NULL, attempts integer NOT NULL, "
            "lease_ends bigint NOT NULL, expires bigint NOT NULL) WITH (fillfactor = 70)"
        ),
        "CREATE INDEX IF NOT EXISTS {index} ON {table} (expires)",
    )
    _now = "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000 AS bigint)"
    # The joins imply this condition. Without it, PostgreSQL, which expects few rows in a new table, would read all rows
    # for each key.
    _listed = "c.claim_key = ANY(CAST(:keys AS text[]))"
    _given = "unnest(CAST(:keys AS text[]), CAST(:numbers AS bigint[])) AS g(k, n)"
    _order = 'c.claim_key COLLATE "C"'  # the order of claims, whatever the collation of the database

    def __init__(self, table: str, patience: int | None = None) -> None:
        super().__init__(table)
        # The function is called once, before rows are read. It applies to locks until the end of the transaction.
        set_timeout = f"(SELECT set_config('lock_timeout', '{patience}', true)) IS NOT NULL"
        self._patient = "true" if patience is None else set_timeout

    def waiting(self, timeout: float) -> Dialect:
        return PostgreSQL(self.table, lock_timeout(timeout))

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """Claim keys. Rows of other keys are read as before the statement, or missing."""
        rows = yield Query(
            f"WITH given AS MATERIALIZED (SELECT g.k, g.n, {self._now} AS now FROM {self._given} "
            f"WHERE {self._patient}), "
            f"taken AS (INSERT INTO {self.table} AS c "
            "(claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"SELECT k, {FORMAT}, 1, now, n, 0, now + CAST(:lease AS bigint), now + CAST(:kept AS bigint) FROM given "
            f"{self._on_conflict}) "
            "SELECT claim_key, token, 0, false, attempts FROM taken UNION ALL "
            f"SELECT c.claim_key, 0, c.format, c.state = 2 AND c.expires > given.now, c.attempts "
            f"FROM given JOIN {self.table} c ON c.claim_key = given.k "
            f"WHERE {self._listed} AND NOT EXISTS (SELECT 1 FROM taken WHERE taken.claim_key = given.k)",
            {"keys": list(holders), "numbers": list(holders.values()), "lease": lease, "kept": lease + retention},
        )
        granted = {key: ClaimAnswer(ClaimStatus.NEW, token, attempts) for key, token, _, _, attempts in rows if token}
        if len(granted) < len(holders):
            _with_others(holders, granted, [(row[0], *row[2:]) for row in rows if not row[1]])
        return granted

    def _settle(self, held: Sequence[Held], states: str, change: str, retention: int, now: int) -> Steps[set[Held]]:
        rows = yield Query(
            f"WITH given AS (SELECT g.k, g.n FROM {self._given} WHERE {self._patient}), "
            f"locked AS (SELECT c.claim_key, c.token FROM {self.table} c JOIN given ON c.claim_key = given.k "
            f"AND c.token = given.n WHERE {self._listed} AND c.format = {FORMAT} AND c.state IN ({states}) "
            f"AND c.expires > {self._now} ORDER BY {self._order} FOR UPDATE OF c) "
            f"UPDATE {self.table} c SET {change}, "
            f"expires = greatest(c.expires, {self._now} + CAST(:retention AS bigint)) "
            f"FROM locked WHERE {self._listed} AND c.claim_key = locked.claim_key AND c.token = locked.token "
            f"AND c.state IN ({states}) RETURNING c.claim_key, c.token",
            {"keys": [key for key, _ in held], "numbers": [token for _, token in held], "retention": retention},
        )
        return {(key, token) for key, token in rows}

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        rows = yield Query(
            f"WITH locked AS (SELECT c.claim_key FROM {self.table} c WHERE {self._patient} AND {self._listed} "
            f"AND c.format = {FORMAT} AND c.state < 2 AND c.attempts > 0 AND c.expires > {self._now} "
            f"ORDER BY {self._order} FOR UPDATE) "
            f"UPDATE {self.table} c SET attempts = 0 FROM locked WHERE {self._listed} "
            "AND c.claim_key = locked.claim_key RETURNING c.claim_key",
            {"keys": list(keys)},
        )
        return {key for (key,) in rows}

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """Delete up to ``limit`` expired rows; return their number.

        In a table that was not analyzed yet, PostgreSQL expects few rows of one format and would sort all expired rows.
        For an open range of formats, it reads the first rows of the index. It looks up a list of keys regardless of the
        size of the table.
        """
        rows = yield Query(
            f"DELETE FROM {self.table} WHERE claim_key = ANY(ARRAY(SELECT claim_key FROM {self.table} "
            f"WHERE expires <= {self._now} AND format < {FORMAT + 1} "
            "ORDER BY expires LIMIT CAST(:most AS bigint) FOR UPDATE SKIP LOCKED)) RETURNING claim_key",
            {"most": limit},
        )
        return len(rows)


class Transaction(NamedTuple):
    """A query of an SQL store: statements that are executed in one transaction.

    Attributes:
        steps: A function that makes the statements. Its argument ``now=`` is the time in microseconds if the database
            has no clock.
        deadline: The deadline by the monotonic clock.
        durable: Whether the effect must survive a crash of the machine. Only SQLite uses this value; other databases
            decide for themselves.
    """

    steps: Callable[..., Steps[Any]]
    deadline: float
    durable: bool


class SQLStoreBase(StoreBase):
    """The calls of an SQL store, for both APIs."""

    def __init__(self, dialect: Dialect, retention: Duration, timeout: Duration) -> None:
        super().__init__()
        self._retention = microseconds(seconds("retention", retention, positive=True))
        self._timeout = seconds("timeout", timeout, positive=True)
        self._sql = dialect.waiting(self._timeout)
        self._sql_in_transaction = dialect  # of a handler, which keeps its own settings
        self._pace = PurgePace()

    def _query(
        self, steps: Callable[..., Steps[T]], deadline: float | None = None, *, durable: bool = False
    ) -> Queries[T]:
        """Execute statements in a transaction. Subclasses repeat it where that helps."""
        result: T = yield Transaction(steps, deadline or time.monotonic() + self._timeout, durable)
        return result

    def _claim(self, holders: Mapping[str, int], lease: float) -> Queries[dict[str, ClaimAnswer]]:
        deadline = time.monotonic() + self._timeout
        claim = partial(self._sql.claim, holders, lease=microseconds(lease), retention=self._retention)
        found = yield from self._query(claim, deadline)
        if limit := self._pace.claimed(len(holders)):
            try:
                self._pace.purged((yield from self._query(partial(self._sql.purge, limit), deadline)), limit)
            except IdempotencyStoreError as error:  # the claims succeeded, and the expired rows stay for now
                self._pace.failed()
                logger.warning("failed to delete expired rows, trying again: %s", error)
        return found

    def _complete(self, held: Sequence[Held]) -> Queries[set[Held]]:
        return self._query(partial(self._sql.complete, held, again=True, retention=self._retention), durable=True)

    def _completing(self, held: Sequence[Held], *, again: bool) -> Callable[..., Steps[set[Held]]]:
        """Return the statements that complete claims in a transaction of a handler."""
        return partial(self._sql_in_transaction.complete, held, again=again, retention=self._retention)

    def _release(self, held: Sequence[Held], failed: bool) -> Queries[set[Held]]:
        return self._query(partial(self._sql.release, held, failed=failed, retention=self._retention))

    def _reset(self, keys: Sequence[str]) -> Queries[set[str]]:
        return self._query(partial(self._sql.reset, keys), durable=True)

    def _purge(self) -> Queries[int]:
        total = 0
        while True:
            count = yield from self._query(partial(self._sql.purge, _ROWS_PER_PURGE))
            total += count
            if count < _ROWS_PER_PURGE:
                return total
