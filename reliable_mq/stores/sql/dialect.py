"""The questions of a store in SQL, for each database that is known, as steps for whoever has a connection.

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
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from reliable_mq.core.claims import ClaimStatus
from reliable_mq.errors import ConfigurationError
from reliable_mq.stores.questions import FORMAT, Answer

__all__ = ["Ask", "Dialect", "Held", "Steps", "checked_table", "judged"]

T = TypeVar("T")
_TABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,47}\.)?[A-Za-z_][A-Za-z0-9_]{0,47}")

Held: TypeAlias = tuple[str, int]
"""What is stored for a key, and the token of its claim."""


class Ask(NamedTuple):
    """A statement, with parameters by name; answer with its rows, or nothing."""

    sql: str
    parameters: Mapping[str, object]


Steps: TypeAlias = Generator[Ask, Sequence[Sequence[Any]], T]


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

    def claim(self, holders: Mapping[str, int], *, lease: int, retention: int, now: int) -> Steps[dict[str, Answer]]:
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


def judged(holders: Mapping[str, int], granted: dict[str, Answer], rows: Sequence[Sequence[Any]]) -> dict[str, Answer]:
    """Add to what is granted what is said of the other keys: key, format, whether it is done, attempts."""
    found = granted
    for key, version, done, attempts in rows:
        if key in found:
            continue
        if version != FORMAT:
            found[key] = Answer(ClaimStatus.UNREADABLE)
        else:
            found[key] = Answer(ClaimStatus.DONE if done else ClaimStatus.IN_PROGRESS, attempts=attempts)
    for key in holders:  # a row that came, or went, between the two looks: whoever brought it has it
        found.setdefault(key, Answer(ClaimStatus.IN_PROGRESS))
    return found
