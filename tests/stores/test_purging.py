"""What is over is deleted by and by, by claims, which must not suffer from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from reliable_mq.stores import ClaimStatus
from reliable_mq.stores.sql import sqlite
from reliable_mq.stores.sql.dialect import Ask, Steps
from tests.stores import subjects
from tests.stores.subjects import LEASE, RETENTION, Subject

Make = Callable[[Path], AbstractContextManager[Subject]]
in_sqlalchemy = [subjects.sqlalchemy_sqlite, subjects.sqlalchemy_async_sqlite]


def make_it_time(subject: Subject) -> None:
    """As it is once a minute."""
    getattr(subject.store, "store", subject.store)._purge_at = 0.0


@pytest.mark.parametrize("make", in_sqlalchemy)
def test_a_purge_that_fails_costs_no_claim(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be known to nobody, and its message would wait for the end of the lease."""

    def fails(_dialect: sqlite.SQLite, _limit: int, *, now: int) -> Steps[int]:
        yield Ask(f"DELETE FROM what_is_not_there WHERE {now}", {})
        raise AssertionError

    monkeypatch.setattr(sqlite.SQLite, "purge", fails)
    with make(tmp_path) as subject:
        make_it_time(subject)
        [claim] = subject.store.claim_many(["a"], LEASE)
        assert claim.status is ClaimStatus.NEW
        assert "were not deleted" in caplog.text
        assert subject.store.complete_many([claim]) == [True]


@pytest.mark.parametrize("make", [*in_sqlalchemy, subjects.sqlite])
def test_claims_purge_what_is_over(make: Make, tmp_path: Path) -> None:
    """Now and then, some rows at a time."""
    with make(tmp_path) as subject:
        done = subject.store.claim_many([f"k{number}" for number in range(20)], LEASE)
        assert all(subject.store.complete_many(done))
        subject.age(RETENTION + LEASE + 1)
        make_it_time(subject)
        subject.store.claim_many(["b"], LEASE)
        assert subject.store.purge() == 0, "nothing is left of it"


@pytest.mark.parametrize("make", in_sqlalchemy)
def test_a_claim_and_its_purge_have_one_deadline(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a question would take twice the timeout, once a minute."""
    with make(tmp_path) as subject:
        store = getattr(subject.store, "store", subject.store)
        ask, deadlines = store._ask, []

        def spy(steps: Callable[..., object], deadline: float | None = None) -> object:
            deadlines.append(deadline)
            return ask(steps, deadline)

        monkeypatch.setattr(store, "_ask", spy)
        make_it_time(subject)
        subject.store.claim_many(["a"], LEASE)
    assert len(deadlines) == 2
    assert deadlines[0] == deadlines[1] is not None
