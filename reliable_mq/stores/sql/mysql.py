"""The questions of a store in the SQL of MariaDB and MySQL."""

# ruff: noqa: S608 -- what is not a parameter is the checked name of the table, and numbers of our own

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reliable_mq.core.claims import ClaimStatus
from reliable_mq.stores.questions import FORMAT, Answer
from reliable_mq.stores.sql.dialect import Ask, Dialect, Held, Steps, judged

__all__ = ["MySQL"]


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

    def claim(self, holders: Mapping[str, int], *, lease: int, retention: int, now: int) -> Steps[dict[str, Answer]]:
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
        yield Ask(
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
        rows = yield Ask(
            f"SELECT claim_key, format, state, expires > {self._now}, token, holder, attempts FROM {self.table} "
            f"WHERE claim_key IN ({names})",
            keys,
        )
        granted: dict[str, Answer] = {}
        others: list[tuple[object, ...]] = []
        for key, version, state, lives, token, holder, attempts in rows:
            if version == FORMAT and state == 1 and holder == holders[key]:
                granted[key] = Answer(ClaimStatus.NEW, token, attempts)
            else:
                others.append((key, version, state == 2 and lives, attempts))
        return judged(holders, granted, others)

    def complete(self, held: Sequence[Held], *, retention: int, now: int) -> Steps[set[Held]]:
        """See `Dialect.complete`."""
        rows = yield from self._lock(held)
        taken = {(key, token) for key, token, state in rows if state in (1, 2)} & set(held)
        if taken:
            names, keys = _named(sorted(key for key, _ in taken))
            yield Ask(
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
            yield Ask(
                f"UPDATE {self._by_key} SET state = 0, holder = 0, attempts = attempts + :failed, "
                f"expires = GREATEST(expires, {self._now} + :retention) WHERE claim_key IN ({names})",
                {**keys, "retention": retention, "failed": int(failed)},
            )
        return taken

    def _lock(self, held: Sequence[Held]) -> Steps[Sequence[Sequence[Any]]]:
        names, keys = _named([key for key, _ in held])
        rows = yield Ask(
            f"SELECT claim_key, token, state FROM {self._by_key} WHERE claim_key IN ({names}) AND format = {FORMAT} "
            f"AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            keys,
        )
        return rows

    def reset(self, keys: Sequence[str], *, now: int) -> Steps[set[str]]:
        """See `Dialect.reset`."""
        names, parameters = _named(keys)
        rows = yield Ask(
            f"SELECT claim_key FROM {self._by_key} WHERE claim_key IN ({names}) AND format = {FORMAT} AND state < 2 "
            f"AND attempts > 0 AND expires > {self._now} ORDER BY claim_key FOR UPDATE",
            parameters,
        )
        found = [key for (key,) in rows]
        if found:
            names, parameters = _named(found)
            yield Ask(f"UPDATE {self._by_key} SET attempts = 0 WHERE claim_key IN ({names})", parameters)
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
        rows = yield Ask(  # twice as many as wanted: others may be at the first of them
            f"SELECT claim_key FROM {self.table} WHERE {over} ORDER BY expires LIMIT {2 * limit}", {}
        )
        if not rows:
            return 0
        names, keys = _named([key for (key,) in rows])
        rows = yield Ask(
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
            yield Ask(f"{delete} WHERE claim_key IN ({names})", keys)
        return len(rows)

    def _find_out(self) -> Steps[None]:
        """Ask the server which it is, once."""
        if not self._version:
            [(said,)] = yield Ask("SELECT VERSION()", {})
            self._is_mariadb = "mariadb" in said.lower()
            self._version = said

    def _older_than(self, *version: int) -> bool:
        return tuple(map(int, re.findall(r"\d+", self._version)[:3])) < version


def _named(keys: Sequence[str]) -> tuple[str, dict[str, object]]:
    """Give keys names, as parameters of a statement."""
    parameters: dict[str, object] = {f"k{number}": key for number, key in enumerate(keys)}
    return ", ".join(f":{name}" for name in parameters), parameters
