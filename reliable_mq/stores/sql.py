"""The questions of a store in the SQL of MariaDB and MySQL.

The questions of a store in SQL, for each database that is known, as steps for whoever has a connection.

A question is a generator: it yields statements, is sent their rows, and returns the answer. So what is asked is said
once, for the sync face, the async one and the transaction of a handler.

One row per key. ``state`` is 0 free, 1 claimed or 2 done; ``token`` is that of the newest claim, whatever became of it;
``holder`` tells one question from another while it is claimed, and is 0 else. Times are microseconds since 1970, by the
clock of the database server; SQLite has none, and is told the time.

Invariants:

- a row is changed by one statement that finds it as it is then, and locks it: of two that would claim it, one does;
- a claim that finds its own holder changes no token: a question that was delayed and then asked again does no harm;
- a token is greater than that of the key before, and not below the time: it does not come again after the row is gone;
- a row of another format is neither changed nor understood;
- rows are locked in the order of their keys, so that nobody waits in a circle;
- ``expires``, which has an index, is changed as seldom as can be: an update of the other columns costs PostgreSQL no
  index entry. So a row may be kept for a lease longer than the retention asks for.

The questions of a store in SQLite's SQL, and the clock that its processes share.

SQLite has no clock but the wall clock of whoever asks, which jumps. What is asked is therefore told the time, of
:mod:`reliable_mq._util.boottime`, which goes on from boot to boot of the machine, and never backwards.

The questions of a store in PostgreSQL's SQL: one statement, and so one round trip, for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from reliable_mq.core.idempotency import ClaimStatus
from reliable_mq.errors import ConfigurationError
from reliable_mq.stores.keys import FORMAT, ClaimAnswer

__all__ = ["Dialect", "Held", "MySQL", "PostgreSQL", "Query", "SQLite", "Steps", "checked_table", "judged"]

T = TypeVar("T")
_TABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,47}\.)?[A-Za-z_][A-Za-z0-9_]{0,47}")

Held: TypeAlias = tuple[str, int]
"""What is stored for a key, and the token of its claim."""


class Query(NamedTuple):
    """A statement, with parameters by name; answer with its rows, or nothing."""

    sql: str
    parameters: Mapping[str, object]


Steps: TypeAlias = Generator[Query, Sequence[Sequence[Any]], T]


def checked_table(name: str) -> str:
    """Check the name of a table, with its schema or without.

    Raises:
        ConfigurationError: it is no plain name.
    """
    if not isinstance(name, str) or not _TABLE.fullmatch(name):
        raise ConfigurationError(f"table must be a name of letters, digits and underscores, not {name!r}")
    return name


class Dialect:
    """What the databases have in common.

    Args:
        table: its name, checked.

    Attributes:
        ddl: the statements that create the table, where it is not there.
        transactional: whether the steps of a question need a transaction around them.
    """

    transactional = False
    _greatest = "greatest"
    _create: tuple[str, ...] = ()

    def __init__(self, table: str) -> None:
        self.table = table
        names = {"table": table, "index": table.rpartition(".")[2] + "_expires"}
        self.ddl = tuple(statement.format(**names) for statement in self._create)
        self._one_transition = (
            f"token = CASE WHEN c.state = 1 AND c.holder = excluded.holder THEN c.token "
            f"ELSE {self._greatest}(c.token + 1, excluded.token) END, "
            "state = 1, holder = excluded.holder, "
            "attempts = CASE WHEN c.expires <= excluded.token THEN 0 ELSE c.attempts END, "
            "lease_ends = excluded.lease_ends, expires = excluded.expires "
            f"WHERE c.format = {FORMAT} AND (c.state = 0 OR c.expires <= excluded.token OR "
            "(c.state = 1 AND (c.lease_ends <= excluded.token OR c.holder = excluded.holder)))"
        )

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """Claim what is stored for keys, each in the name of its holder.

        Args:
            holders: by what is stored for a key, in its order; at least one.
            lease: microseconds.
            retention: microseconds.
            now: the time, for a database that has none.
        """
        raise NotImplementedError

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """Mark as done; answer with what is done by it. ``held`` is in the order of keys, and not empty."""
        raise NotImplementedError

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """Give up; answer with what was held. ``held`` as for `complete`."""
        raise NotImplementedError

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """Forget failed attempts; answer with the keys that had some."""
        raise NotImplementedError

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """Delete up to ``limit`` rows that are over; answer with how many it were."""
        raise NotImplementedError


def judged(
    holders: Mapping[str, int], granted: dict[str, ClaimAnswer], rows: Sequence[Sequence[Any]]
) -> dict[str, ClaimAnswer]:
    """Add to what is granted what is said of the other keys: key, format, whether it is done, attempts."""
    found = granted
    for key, version, done, attempts in rows:
        if key in found:
            continue
        if version != FORMAT:
            found[key] = ClaimAnswer(ClaimStatus.UNREADABLE)
        else:
            found[key] = ClaimAnswer(ClaimStatus.DONE if done else ClaimStatus.IN_PROGRESS, attempts=attempts)
    for key in holders:  # a row that came, or went, between the two looks: whoever brought it has it
        found.setdefault(key, ClaimAnswer(ClaimStatus.IN_PROGRESS))
    return found


# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own


class MySQL(Dialect):
    """MariaDB 10.5 and newer, MySQL 8: no ``RETURNING`` for both, so a question is a change and a look at it.

    A statement locks whatever it reads. Of a small table the server would rather read all rows than look up many keys;
    so each statement that locks is told to look them up.
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
        self._is_mariadb, self._version = False, ""  # not known

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """See `Dialect.claim`. An assignment sees those before it: ``holder`` says to the later ones what was found."""
        yield from self._find_out()
        old = self.table.rpartition(".")[2]
        # Of VALUES() MySQL warns, once for each question; MariaDB knows no name for the new row.
        named = not (self._is_mariadb or self._older_than(8, 0, 19))
        token, holder, lease_ends, expires = (
            f"new_row.{column}" if named else f"VALUES({column})"
            for column in ("token", "holder", "lease_ends", "expires")
        )
        free = (
            f"{old}.format = {FORMAT} AND ({old}.state = 0 OR {old}.expires <= {token} OR "
            f"({old}.state = 1 AND ({old}.lease_ends <= {token} OR {old}.holder = {holder})))"
        )
        ours = f"{old}.holder = {holder}"
        keys = {f"k{number}": key for number, key in enumerate(holders)}
        numbers = {f"n{number}": holder for number, holder in enumerate(holders.values())}
        rows_given = ", ".join(
            f"(:k{number}, {FORMAT}, 1, {self._now}, :n{number}, 0, {self._now} + :lease, {self._now} + :kept)"
            for number in range(len(holders))
        )
        yield Query(
            f"INSERT INTO {self.table} (claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"VALUES {rows_given} {'AS new_row ' if named else ''}ON DUPLICATE KEY UPDATE "
            f"token = IF({free}, IF({old}.state = 1 AND {ours}, {old}.token, GREATEST({old}.token + 1, {token})), "
            f"{old}.token), "
            f"attempts = IF({free} AND {old}.expires <= {token}, 0, {old}.attempts), "
            f"holder = IF({free}, {holder}, {old}.holder), "
            f"state = IF({ours}, 1, {old}.state), "
            f"lease_ends = IF({ours}, {lease_ends}, {old}.lease_ends), "
            f"expires = IF({ours}, {expires}, {old}.expires)",
            {**keys, **numbers, "lease": lease, "kept": lease + retention},
        )
        names = ", ".join(f":{name}" for name in keys)
        rows = yield Query(
            f"SELECT claim_key, format, state, expires > {self._now}, token, holder, attempts FROM {self.table} "
            f"WHERE claim_key IN ({names})",
            keys,
        )
        granted: dict[str, ClaimAnswer] = {}
        others: list[tuple[object, ...]] = []
        for key, version, state, lives, token, holder, attempts in rows:
            if version == FORMAT and state == 1 and holder == holders[key]:
                granted[key] = ClaimAnswer(ClaimStatus.NEW, token, attempts)
            else:
                others.append((key, version, state == 2 and lives, attempts))
        return judged(holders, granted, others)

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield from self._lock(held)
        taken = {(key, token) for key, token, state in rows if state in (1, 2)} & set(held)
        if taken:
            names, keys = _named(sorted(key for key, _ in taken))
            yield Query(
                f"UPDATE {self._by_key} SET state = 2, holder = 0, "
                f"expires = GREATEST(expires, {self._now} + :retention) WHERE claim_key IN ({names})",
                {**keys, "retention": retention},
            )
        return taken

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.release`."""
        rows = yield from self._lock(held)
        taken = {(key, token) for key, token, state in rows if state == 1} & set(held)
        if taken:
            names, keys = _named(sorted(key for key, _ in taken))
            yield Query(
                f"UPDATE {self._by_key} SET state = 0, holder = 0, attempts = attempts + :failed, "
                f"expires = GREATEST(expires, {self._now} + :retention) WHERE claim_key IN ({names})",
                {**keys, "retention": retention, "failed": int(failed)},
            )
        return taken

    def _lock(self, held: Sequence[Held]) -> Steps[Sequence[Sequence[Any]]]:
        names, keys = _named([key for key, _ in held])
        rows = yield Query(
            f"SELECT claim_key, token, state FROM {self._by_key} WHERE claim_key IN ({names}) AND format = {FORMAT} "
            f"AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            keys,
        )
        return rows

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """See `Dialect.reset`."""
        names, parameters = _named(keys)
        rows = yield Query(
            f"SELECT claim_key FROM {self._by_key} WHERE claim_key IN ({names}) AND format = {FORMAT} AND state < 2 "
            f"AND attempts > 0 AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            parameters,
        )
        found = [key for (key,) in rows]
        if found:
            names, parameters = _named(found)
            yield Query(f"UPDATE {self._by_key} SET attempts = 0 WHERE claim_key IN ({names})", parameters)
        return set(found)

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """See `Dialect.purge`.

        Looks for what is over without a lock: a locking look at the index of ``expires`` would lock the gap behind what
        it found, too, where claims that are made now belong. Then it locks what it found, key by key, and waits for
        nobody.
        """
        yield from self._find_out()
        locking = "FOR UPDATE" if self._is_mariadb and self._older_than(10, 6) else "FOR UPDATE SKIP LOCKED"
        over = f"expires <= {self._now} AND format = {FORMAT}"
        rows = yield Query(  # twice as many as wanted: others may be at the first of them
            f"SELECT claim_key FROM {self.table} WHERE {over} ORDER BY expires LIMIT {2 * limit}", {}
        )
        if not rows:
            return 0
        names, keys = _named([key for (key,) in rows])
        rows = yield Query(
            f"SELECT claim_key FROM {self._by_key} WHERE claim_key IN ({names}) AND {over} "
            f"LIMIT {int(limit)} {locking}",
            keys,
        )
        if rows:
            names, keys = _named([key for (key,) in rows])
            # Each has its own way to be told, and takes no notice of the other's.
            delete = (
                f"DELETE {self.table} FROM {self._by_key}"
                if self._is_mariadb
                else f"DELETE /*+ INDEX({self.table.rpartition('.')[2]} PRIMARY) */ FROM {self.table}"
            )
            yield Query(f"{delete} WHERE claim_key IN ({names})", keys)
        return len(rows)

    def _find_out(self) -> Steps[None]:
        """Ask the server which it is, once."""
        if not self._version:
            [(said,)] = yield Query("SELECT VERSION()", {})
            self._is_mariadb = "mariadb" in said.lower()
            self._version = said

    def _older_than(self, *version: int) -> bool:
        return tuple(map(int, re.findall(r"\d+", self._version)[:3])) < version


def _named(keys: Sequence[str]) -> tuple[str, dict[str, object]]:
    """Give keys names, as parameters of a statement."""
    parameters: dict[str, object] = {f"k{number}": key for number, key in enumerate(keys)}
    return ", ".join(f":{name}" for name in parameters), parameters


# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own


class SQLite(Dialect):
    """SQLite 3.35 and newer."""

    _greatest = "max"
    _create = (
        (
            "CREATE TABLE IF NOT EXISTS {table} (claim_key TEXT NOT NULL PRIMARY KEY, format INTEGER NOT NULL, "
            "state INTEGER NOT NULL, token INTEGER NOT NULL, holder INTEGER NOT NULL, attempts INTEGER NOT NULL, "
            "lease_ends INTEGER NOT NULL, expires INTEGER NOT NULL) WITHOUT ROWID"
        ),
        "CREATE INDEX IF NOT EXISTS {index} ON {table} (expires)",
        "CREATE TABLE IF NOT EXISTS {table}_clock (boot TEXT NOT NULL PRIMARY KEY, base INTEGER NOT NULL)",
    )
    _given = "(SELECT json_extract(value, '$[0]') AS k, json_extract(value, '$[1]') AS n FROM json_each(:given)) AS g"

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """See `Dialect.claim`."""
        rows = yield Query(
            f"INSERT INTO {self.table} AS c (claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"SELECT g.k, {FORMAT}, 1, :now, g.n, 0, :now + :lease, :now + :lease + :retention "
            f"FROM {self._given} WHERE true ON CONFLICT (claim_key) DO UPDATE SET {self._one_transition} "
            "RETURNING claim_key, token, attempts",
            {"given": json.dumps(list(holders.items())), "now": now, "lease": lease, "retention": retention},
        )
        granted = {key: ClaimAnswer(ClaimStatus.NEW, token, attempts) for key, token, attempts in rows}
        if len(granted) < len(holders):
            rows = yield Query(
                f"SELECT claim_key, format, state = 2 AND expires > :now, attempts FROM {self.table} "
                "WHERE claim_key IN (SELECT value FROM json_each(:keys))",
                {"keys": json.dumps([key for key in holders if key not in granted]), "now": now},
            )
            judged(holders, granted, rows)
        return granted

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield Query(
            f"UPDATE {self.table} AS c SET state = 2, holder = 0, expires = max(c.expires, :now + :retention) "
            f"FROM {self._given} WHERE c.claim_key = g.k AND c.token = g.n AND c.format = {FORMAT} "
            "AND c.state IN (1, 2) AND c.expires > :now RETURNING claim_key, token",
            {"given": json.dumps(held), "now": now, "retention": retention},
        )
        return {(key, token) for key, token in rows}

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.release`."""
        rows = yield Query(
            f"UPDATE {self.table} AS c SET state = 0, holder = 0, attempts = c.attempts + :failed, "
            f"expires = max(c.expires, :now + :retention) FROM {self._given} WHERE c.claim_key = g.k "
            f"AND c.token = g.n AND c.format = {FORMAT} AND c.state = 1 AND c.expires > :now "
            "RETURNING claim_key, token",
            {"given": json.dumps(held), "now": now, "retention": retention, "failed": int(failed)},
        )
        return {(key, token) for key, token in rows}

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """See `Dialect.reset`."""
        rows = yield Query(
            f"UPDATE {self.table} SET attempts = 0 WHERE claim_key IN (SELECT value FROM json_each(:keys)) "
            f"AND format = {FORMAT} AND state < 2 AND attempts > 0 AND expires > :now RETURNING claim_key",
            {"keys": json.dumps(list(keys)), "now": now},
        )
        return {key for (key,) in rows}

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """See `Dialect.purge`."""
        rows = yield Query(
            f"DELETE FROM {self.table} WHERE claim_key IN (SELECT claim_key FROM {self.table} "
            f"WHERE expires <= :now AND format = {FORMAT} LIMIT :most) RETURNING claim_key",
            {"now": now, "most": limit},
        )
        return len(rows)

    def lock(self) -> Steps[None]:
        """Take the lock of the database for this transaction: where it is taken after a look, it may be refused.

        Not by BEGIN IMMEDIATE: a driver, or an event of the engine, may have begun already.
        """
        yield Query(f"UPDATE {self.table} SET state = state WHERE 0", {})

    def clock_base(self, boot: str, offset: int, since: int) -> Steps[int]:
        """Return what to add to the microseconds since this boot of the machine, so that all processes read one clock.

        In the first boot that the file sees, that is the wall clock. From boot to boot the clock goes on from its
        newest claim, and the wall clock is not asked: it may be wrong at a boot, by years, until it is set over the
        network. If it were believed, what is done would be forgotten, or claims be held for years. So the time for
        which the machine is off does not count.

        Args:
            boot: names this boot.
            offset: what the wall clock would add.
            since: the microseconds since this boot.
        """
        rows = yield Query(f"SELECT base FROM {self.table}_clock WHERE boot = :boot", {"boot": boot})
        if not rows:
            yield Query(
                f"INSERT INTO {self.table}_clock (boot, base) "
                f"SELECT :boot, coalesce(max(token) - :since, :offset) FROM {self.table} WHERE format = {FORMAT} "
                "ON CONFLICT (boot) DO NOTHING",
                {"boot": boot, "offset": offset, "since": since},
            )
            rows = yield Query(f"SELECT base FROM {self.table}_clock WHERE boot = :boot", {"boot": boot})
        base: int = rows[0][0]
        return base


# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own


class PostgreSQL(Dialect):
    """PostgreSQL 12 and newer: one statement per question."""

    _create = (
        (
            "CREATE TABLE IF NOT EXISTS {table} (claim_key text NOT NULL PRIMARY KEY, format smallint NOT NULL, "
            "state smallint NOT NULL, token bigint NOT NULL, holder bigint NOT NULL, attempts integer NOT NULL, "
            "lease_ends bigint NOT NULL, expires bigint NOT NULL) WITH (fillfactor = 70)"
        ),
        "CREATE INDEX IF NOT EXISTS {index} ON {table} (expires)",
    )
    _now = "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000 AS bigint)"
    # As the joins say already: for PostgreSQL, which expects few rows in a table that is new, and would read them all
    # for each key.
    _listed = "c.claim_key = ANY(CAST(:keys AS text[]))"
    _given = "unnest(CAST(:keys AS text[]), CAST(:numbers AS bigint[])) AS g(k, n)"

    def claim(
        self, holders: Mapping[str, int], *, lease: int, retention: int, now: int
    ) -> Steps[dict[str, ClaimAnswer]]:
        """See `Dialect.claim`. What is not granted is said from before the statement, or not at all."""
        rows = yield Query(
            f"WITH given AS MATERIALIZED (SELECT g.k, g.n, {self._now} AS now FROM {self._given}), "
            f"taken AS (INSERT INTO {self.table} AS c "
            "(claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"SELECT k, {FORMAT}, 1, now, n, 0, now + CAST(:lease AS bigint), now + CAST(:kept AS bigint) FROM given "
            f"ON CONFLICT (claim_key) DO UPDATE SET {self._one_transition} "
            "RETURNING claim_key, token, attempts) "
            "SELECT claim_key, token, 0, false, attempts FROM taken UNION ALL "
            f"SELECT c.claim_key, 0, c.format, c.state = 2 AND c.expires > given.now, c.attempts "
            f"FROM given JOIN {self.table} c ON c.claim_key = given.k "
            f"WHERE {self._listed} AND NOT EXISTS (SELECT 1 FROM taken WHERE taken.claim_key = given.k)",
            {
                "keys": list(holders),
                "numbers": list(holders.values()),
                "lease": lease,
                "kept": lease + retention,
            },
        )
        granted = {key: ClaimAnswer(ClaimStatus.NEW, token, attempts) for key, token, _, _, attempts in rows if token}
        if len(granted) < len(holders):
            judged(holders, granted, [(row[0], *row[2:]) for row in rows if not row[1]])
        return granted

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield Query(
            self._locked("c.state IN (1, 2)") + f"UPDATE {self.table} c SET state = 2, holder = 0, "
            f"expires = greatest(c.expires, {self._now} + CAST(:retention AS bigint)) "
            f"FROM locked WHERE {self._listed} AND c.claim_key = locked.claim_key AND c.token = locked.token "
            "AND c.state IN (1, 2) "
            "RETURNING c.claim_key, c.token",
            {"keys": [key for key, _ in held], "numbers": [token for _, token in held], "retention": retention},
        )
        return {(key, token) for key, token in rows}

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.release`."""
        rows = yield Query(
            self._locked("c.state = 1")
            + f"UPDATE {self.table} c SET state = 0, holder = 0, attempts = c.attempts + CAST(:failed AS integer), "
            f"expires = greatest(c.expires, {self._now} + CAST(:retention AS bigint)) "
            f"FROM locked WHERE {self._listed} AND c.claim_key = locked.claim_key AND c.token = locked.token "
            "AND c.state = 1 "
            "RETURNING c.claim_key, c.token",
            {
                "keys": [key for key, _ in held],
                "numbers": [token for _, token in held],
                "retention": retention,
                "failed": int(failed),
            },
        )
        return {(key, token) for key, token in rows}

    def _locked(self, condition: str) -> str:
        return (
            f"WITH given AS (SELECT g.k, g.n FROM {self._given}), "
            f"locked AS (SELECT c.claim_key, c.token FROM {self.table} c JOIN given ON c.claim_key = given.k "
            f"AND c.token = given.n WHERE {self._listed} AND c.format = {FORMAT} AND {condition} "
            f"AND c.expires > {self._now} "
            "ORDER BY c.claim_key FOR UPDATE OF c) "
        )

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """See `Dialect.reset`."""
        rows = yield Query(
            f"UPDATE {self.table} SET attempts = 0 WHERE claim_key = ANY(CAST(:keys AS text[])) "
            f"AND format = {FORMAT} AND state < 2 AND attempts > 0 AND expires > {self._now} RETURNING claim_key",
            {"keys": list(keys)},
        )
        return {key for (key,) in rows}

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """See `Dialect.purge`.

        Of a table that was not analyzed yet, PostgreSQL expects few rows of one format, and would sort all that are
        over; by an open range of formats it reads the first of the index. A list of keys it looks up, whatever the
        size of the table.
        """
        rows = yield Query(
            f"DELETE FROM {self.table} WHERE claim_key = ANY(ARRAY(SELECT claim_key FROM {self.table} "
            f"WHERE expires <= {self._now} AND format < {FORMAT + 1} "
            "ORDER BY expires LIMIT CAST(:most AS bigint) FOR UPDATE SKIP LOCKED)) RETURNING claim_key",
            {"most": limit},
        )
        return len(rows)
