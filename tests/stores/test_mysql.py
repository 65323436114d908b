"""The statements for MariaDB and MySQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from reliable_mq._util.generators import drive
from reliable_mq.stores.sql import MySQL, Query, Steps


@pytest.mark.parametrize("call", ["claim", "complete", "release", "reset", "purge"])
def test_calls_of_many_sizes_share_few_statements(call: str) -> None:
    """Caches keep each text: the store's own and the query cache of the engine."""
    texts: defaultdict[int, set[str]] = defaultdict(set)
    for count in range(1, 501):
        keys = [f"key-{number:03}" for number in range(count)]
        statements = texts_of(steps(call, keys), call, keys)
        for place, (text, parameters) in enumerate(statements):
            texts[place].add(text)
            named = [parameters[name] for name in parameters if name.startswith("k") and name[1:].isdigit()]
            assert not named or sorted(set(map(str, named))) == keys
    assert all(len(some) <= 10 for some in texts.values())
    assert len(texts) >= 2


def test_long_lists_of_keys_are_split() -> None:
    """From 1000 keys on in one list, MariaDB locks all rows."""
    keys = [f"key-{number:04}" for number in range(2000)]
    for call in ("claim", "complete", "release", "reset", "purge"):
        for text, _ in texts_of(steps(call, keys), call, keys):
            assert all(some.count(":k") <= 512 for some in text.split(" IN ")[1:])


def steps(call: str, keys: Sequence[str]) -> Steps[Any]:
    """Return the steps of a call for keys."""
    sql, held = MySQL("claims"), [(key, 1) for key in keys]
    calls = {
        "claim": lambda: sql.claim(dict(held), lease=1, retention=1, now=0),
        "complete": lambda: sql.complete(held, again=True, retention=1, now=0),
        "release": lambda: sql.release(held, failed=True, retention=1, now=0),
        "reset": lambda: sql.reset(keys, now=0),
        "purge": lambda: sql.purge(len(keys), now=0),
    }
    return calls[call]()


def texts_of(steps: Steps[Any], call: str, keys: Sequence[str]) -> list[Query]:
    """Answer the steps of a call as if it changes each key, and return them."""
    queries: list[Query] = []

    def answer(query: Query) -> Sequence[Any]:
        if "VERSION" in query.sql:
            return [("8.0.36",)]
        queries.append(query)
        if not query.sql.startswith("SELECT"):
            return ()
        row = {"claim": (1, 1, True, 1, 1, 0), "complete": (1,), "release": (1,)}.get(call, ())
        return [(key, *row) for key in keys]

    result = drive(steps, answer)
    assert result == len(keys) if call == "purge" else len(result) == len(keys)
    return queries
