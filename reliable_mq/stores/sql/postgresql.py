"""The questions of a store in PostgreSQL's SQL: one statement, and so one round trip, for each."""

# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reliable_mq.core.claims import ClaimStatus
from reliable_mq.stores.questions import FORMAT, Answer
from reliable_mq.stores.sql.dialect import Ask, Dialect, Held, Steps, judged

__all__ = ["PostgreSQL"]


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

    def claim(self, holders: Mapping[str, int], *, lease: int, retention: int, now: int) -> Steps[dict[str, Answer]]:
        """See `Dialect.claim`. What is not granted is said from before the statement, or not at all."""
        rows = yield Ask(
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
        granted = {key: Answer(ClaimStatus.NEW, token, attempts) for key, token, _, _, attempts in rows if token}
        if len(granted) < len(holders):
            judged(holders, granted, [(row[0], *row[2:]) for row in rows if not row[1]])
        return granted

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield Ask(
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
        rows = yield Ask(
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
        rows = yield Ask(
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
        rows = yield Ask(
            f"DELETE FROM {self.table} WHERE claim_key = ANY(ARRAY(SELECT claim_key FROM {self.table} "
            f"WHERE expires <= {self._now} AND format < {FORMAT + 1} "
            "ORDER BY expires LIMIT CAST(:most AS bigint) FOR UPDATE SKIP LOCKED)) RETURNING claim_key",
            {"most": limit},
        )
        return len(rows)
