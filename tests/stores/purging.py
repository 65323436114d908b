"""Checks that the tables of stores in SQL databases stay bounded."""

from __future__ import annotations

from typing import Any

from reliable_mq.stores.base import PurgePace
from reliable_mq.testing.store_contract import LEASE, RETENTION
from tests.stores.subjects import Records, Subject

__all__ = ["Clock", "grow", "pace_of"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pace_of(subject: Subject) -> PurgePace:
    """Return the purge pace of a store in SQL, of either API."""
    store: Any = getattr(subject.store, "store", subject.store)
    pace: PurgePace = store._pace
    return pace


def grow(subject: Subject, *, keys: int = 64, seconds: float = LEASE / 5) -> None:
    """Claim and complete keys in rounds, and check the size of the table.

    Each round claims `keys` keys, and rounds are `seconds` apart. In the end the table holds the claims within
    retention and lease, and a few more.
    """
    records = subject.age.__self__  # type: ignore[attr-defined]
    assert isinstance(records, Records)
    clock = Clock()
    pace = pace_of(subject)
    pace._clock = clock
    pace._not_before = pace._at_latest = clock.now
    held = keys * (LEASE + RETENTION + PurgePace.PAUSE) / seconds + keys + PurgePace.AT_LEAST
    rounds = int(3 * held / keys)
    for number in range(rounds):
        claims = subject.store.claim_many([f"{number}-{key}" for key in range(keys)], LEASE)
        assert all(subject.store.complete_many(claims))
        subject.age(seconds)
        clock.now += seconds
    assert records.count() <= held
