"""Claims delete a few expired rows each, and a failed purge does not affect them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.stores import ClaimStatus, sql
from reliable_mq.stores.base import PurgePace
from reliable_mq.stores.sql import Query, Steps
from reliable_mq.testing.store_contract import LEASE, RETENTION
from tests.stores import subjects
from tests.stores.purging import Clock, grow, pace_of
from tests.stores.subjects import Subject

Make = Callable[[Path], AbstractContextManager[Subject]]
in_sqlalchemy = [subjects.sqlalchemy_sqlite, subjects.sqlalchemy_async_sqlite]


def make_it_time(subject: Subject) -> None:
    """Make the next purge due."""
    pace_of(subject)._not_before = pace_of(subject)._at_latest = 0.0


@pytest.mark.parametrize("make", in_sqlalchemy)
def test_a_purge_that_fails_costs_no_claim(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise no holder would know of the claim until its lease ends."""

    def fails(_dialect: sql.SQLite, _limit: int, *, now: int) -> Steps[int]:
        yield Query(f"DELETE FROM what_is_not_there WHERE {now}", {})
        raise AssertionError

    monkeypatch.setattr(sql.SQLite, "purge", fails)
    with make(tmp_path) as subject:
        make_it_time(subject)
        [claim] = subject.store.claim_many(["a"], LEASE)
        assert claim.status is ClaimStatus.NEW
        assert "failed to delete expired rows" in caplog.text
        assert subject.store.complete_many([claim]) == [True]


@pytest.mark.parametrize("make", [*in_sqlalchemy, subjects.sqlite])
def test_claims_purge_what_is_over(make: Make, tmp_path: Path) -> None:
    """Each purge deletes a limited number of rows."""
    with make(tmp_path) as subject:
        done = subject.store.claim_many([f"k{number}" for number in range(20)], LEASE)
        assert all(subject.store.complete_many(done))
        subject.age(RETENTION + LEASE + 1)
        make_it_time(subject)
        subject.store.claim_many(["b"], LEASE)
        assert subject.store.purge() == 0, "nothing is left of it"


@pytest.mark.parametrize("make", in_sqlalchemy)
def test_a_claim_and_its_purge_have_one_deadline(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a call would take twice the timeout once a minute."""
    with make(tmp_path) as subject:
        store = getattr(subject.store, "store", subject.store)
        send, deadlines = store._send, []

        def spy(query: sql.Transaction) -> object:
            deadlines.append(query.deadline)
            return send(query)

        monkeypatch.setattr(store, "_send", spy)
        make_it_time(subject)
        subject.store.claim_many(["a"], LEASE)
    assert len(deadlines) == 2
    assert deadlines[0] == deadlines[1] is not None


@pytest.mark.slow
@pytest.mark.parametrize("make", [*in_sqlalchemy, subjects.sqlite])
def test_a_table_holds_what_is_not_over_and_little_more(make: Make, tmp_path: Path) -> None:
    with make(tmp_path) as subject:
        grow(subject)


def test_a_purge_reads_what_is_over_by_the_index(tmp_path: Path) -> None:
    """It does not scan the whole table."""
    dialect = sql.SQLite("claims")
    ask = next(dialect.purge(250, now=1000))
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        for statement in dialect.ddl:
            connection.execute(statement)
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + ask.sql, ask.parameters)]
    assert any("INDEX claims_expires (expires<?)" in step for step in plan), plan
    assert not any(step.startswith("SCAN claims") for step in plan), plan


# -- the pace --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_claim_purges_and_the_next_ones_do_not(clock: Clock) -> None:
    """The first claim of a process purges, so short processes purge too."""
    pace = PurgePace(clock)
    assert pace.claimed(1) == PurgePace.AT_LEAST
    pace.purged(3, PurgePace.AT_LEAST)
    clock.now += PurgePace.PAUSE
    assert pace.claimed(1) == 0


def test_a_purge_that_left_nothing_is_followed_by_a_pause(clock: Clock) -> None:
    pace = PurgePace(clock)
    pace.purged(0, pace.claimed(1))
    assert pace.claimed(1000) == 0
    clock.now += PurgePace.PAUSE
    assert pace.claimed(1) == PurgePace.AT_LEAST


def test_a_full_purge_is_followed_by_another_as_claims_come_in(clock: Clock) -> None:
    pace = PurgePace(clock)
    pace.purged(PurgePace.AT_LEAST, pace.claimed(1))
    assert sum(pace.claimed(1) > 0 for _ in range(PurgePace.AT_LEAST // 2)) == 1


def test_a_claim_of_many_keys_purges_in_proportion_to_a_bound(clock: Clock) -> None:
    assert PurgePace(clock).claimed(1000) == 2000
    assert PurgePace(clock).claimed(100_000) == PurgePace.AT_MOST


def test_where_claims_are_few_one_a_minute_purges(clock: Clock) -> None:
    pace = PurgePace(clock)
    pace.purged(0, pace.claimed(1))
    limits = []
    for _ in range(20):
        clock.now += 10
        limits.append(pace.claimed(1))
    assert [limit > 0 for limit in limits] == ([False] * 5 + [True]) * 3 + [False] * 2


def test_a_purge_that_failed_is_not_tried_with_every_claim(clock: Clock) -> None:
    pace = PurgePace(clock)
    assert pace.claimed(1)
    pace.failed()
    clock.now += PurgePace.PAUSE_AFTER_ERROR / 2
    assert pace.claimed(1000) == 0
    clock.now += PurgePace.PAUSE_AFTER_ERROR / 2
    assert pace.claimed(1) > 0


@given(
    backlog=st.integers(0, 20_000),
    processes=st.lists(st.tuples(st.integers(1, 3000), st.floats(0.001, 0.3)), min_size=1, max_size=4),
)
def test_a_table_shrinks_to_what_it_must_hold_at_any_claim_rate(
    backlog: int, processes: list[tuple[int, float]]
) -> None:
    """Each process claims some keys at fixed intervals, and rows expire at once."""
    clock = Clock()
    over, claimed, ever = backlog, 0, 0
    paces = [PurgePace(clock) for _ in processes]
    due = [0.0 for _ in processes]
    begun = clock.now
    while claimed < 2 * backlog + 20_000 and ever < 3000:
        number = min(range(len(processes)), key=due.__getitem__)
        keys, apart = processes[number]
        clock.now = max(clock.now, begun + due[number])
        due[number] += apart
        ever += 1
        claimed += keys
        over += keys
        if limit := paces[number].claimed(keys):
            gone = min(limit, over)
            over -= gone
            paces[number].purged(gone, limit)
    rate = sum(keys / apart for keys, apart in processes)
    largest = max(keys for keys, _ in processes)
    bound = rate * PurgePace.PAUSE + len(processes) * (largest + PurgePace.AT_LEAST)
    assert over <= max(backlog + bound - claimed / 2, 2 * bound)
