"""The questions of a store in SQLite's SQL, and the clock that its processes share.

SQLite has no clock but the wall clock of whoever asks, which jumps. What is asked is therefore told the time, of
:mod:`reliable_mq.clock`, which goes on from boot to boot of the machine, and never backwards.
"""

# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from reliable_mq.core.claims import ClaimStatus
from reliable_mq.stores.questions import FORMAT, Answer
from reliable_mq.stores.sql.dialect import Ask, Dialect, Held, Steps, judged

__all__ = ["SQLite"]


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

    def claim(self, holders: Mapping[str, int], *, lease: int, retention: int, now: int) -> Steps[dict[str, Answer]]:
        """See `Dialect.claim`."""
        rows = yield Ask(
            f"INSERT INTO {self.table} AS c (claim_key, format, state, token, holder, attempts, lease_ends, expires) "
            f"SELECT g.k, {FORMAT}, 1, :now, g.n, 0, :now + :lease, :now + :lease + :retention "
            f"FROM {self._given} WHERE true ON CONFLICT (claim_key) DO UPDATE SET {self._one_transition} "
            "RETURNING claim_key, token, attempts",
            {"given": json.dumps(list(holders.items())), "now": now, "lease": lease, "retention": retention},
        )
        granted = {key: Answer(ClaimStatus.NEW, token, attempts) for key, token, attempts in rows}
        if len(granted) < len(holders):
            rows = yield Ask(
                f"SELECT claim_key, format, state = 2 AND expires > :now, attempts FROM {self.table} "
                "WHERE claim_key IN (SELECT value FROM json_each(:keys))",
                {"keys": json.dumps([key for key in holders if key not in granted]), "now": now},
            )
            judged(holders, granted, rows)
        return granted

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield Ask(
            f"UPDATE {self.table} AS c SET state = 2, holder = 0, expires = max(c.expires, :now + :retention) "
            f"FROM {self._given} WHERE c.claim_key = g.k AND c.token = g.n AND c.format = {FORMAT} "
            "AND c.state IN (1, 2) AND c.expires > :now RETURNING claim_key, token",
            {"given": json.dumps(held), "now": now, "retention": retention},
        )
        return {(key, token) for key, token in rows}

    def release(self, held: Sequence[Held], *, failed: bool, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.release`."""
        rows = yield Ask(
            f"UPDATE {self.table} AS c SET state = 0, holder = 0, attempts = c.attempts + :failed, "
            f"expires = max(c.expires, :now + :retention) FROM {self._given} WHERE c.claim_key = g.k "
            f"AND c.token = g.n AND c.format = {FORMAT} AND c.state = 1 AND c.expires > :now "
            "RETURNING claim_key, token",
            {"given": json.dumps(held), "now": now, "retention": retention, "failed": int(failed)},
        )
        return {(key, token) for key, token in rows}

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """See `Dialect.reset`."""
        rows = yield Ask(
            f"UPDATE {self.table} SET attempts = 0 WHERE claim_key IN (SELECT value FROM json_each(:keys)) "
            f"AND format = {FORMAT} AND state < 2 AND attempts > 0 AND expires > :now RETURNING claim_key",
            {"keys": json.dumps(list(keys)), "now": now},
        )
        return {key for (key,) in rows}

    def purge(self, limit: int, *, now: int) -> Steps[int]:
        """See `Dialect.purge`."""
        rows = yield Ask(
            f"DELETE FROM {self.table} WHERE claim_key IN (SELECT claim_key FROM {self.table} "
            f"WHERE expires <= :now AND format = {FORMAT} LIMIT :most) RETURNING claim_key",
            {"now": now, "most": limit},
        )
        return len(rows)

    def lock(self) -> Steps[None]:
        """Take the lock of the database for this transaction: where it is taken after a look, it may be refused.

        Not by BEGIN IMMEDIATE: a driver, or an event of the engine, may have begun already.
        """
        yield Ask(f"UPDATE {self.table} SET state = state WHERE 0", {})

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
        rows = yield Ask(f"SELECT base FROM {self.table}_clock WHERE boot = :boot", {"boot": boot})
        if not rows:
            yield Ask(
                f"INSERT INTO {self.table}_clock (boot, base) "
                f"SELECT :boot, coalesce(max(token) - :since, :offset) FROM {self.table} WHERE format = {FORMAT} "
                "ON CONFLICT (boot) DO NOTHING",
                {"boot": boot, "offset": offset, "since": since},
            )
            rows = yield Ask(f"SELECT base FROM {self.table}_clock WHERE boot = :boot", {"boot": boot})
        base: int = rows[0][0]
        return base
