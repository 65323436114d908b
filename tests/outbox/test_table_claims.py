"""Relays of one table: what each holds, for how long, and what is said of it when it changes hands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Engine, create_engine, update

from reliable_mq import Message
from reliable_mq.core.outbox import FORMAT, Fate, NewRow, OutboxRow, Settlement
from reliable_mq.outbox import SQLAlchemyOutbox, sqlalchemy_claims, sqlalchemy_table
from reliable_mq.outbox.protocol import Claims

LEASE = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sqlalchemy_table, "time", SimpleNamespace(time=lambda: clock.now, monotonic=time.monotonic))
    return clock


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    yield engine
    engine.dispose()


@pytest.fixture(params=["one writer at a time", "rows locked one by one"])
def outbox(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> SQLAlchemyOutbox:
    """Of either way to take rows; here, a lock is no more than a word."""
    if request.param == "rows locked one by one":
        monkeypatch.setattr(sqlalchemy_claims, "skips_locked", lambda _connection: True)
    return SQLAlchemyOutbox(engine, create=True, lease=LEASE)


def store(outbox: SQLAlchemyOutbox, *bodies: str, key: str | None = None) -> None:
    outbox.open()
    outbox.write([NewRow(Message(body.encode()), "", "q", True, key) for body in bodies], [])


def take(claims: Claims, limit: int = 10) -> list[OutboxRow]:
    taken = claims.take(limit)
    assert not taken.damaged
    return taken.rows


def test_what_is_taken_again_before_its_hand_back_is_told_stays_ours(outbox: SQLAlchemyOutbox, clock: Clock) -> None:
    """A row that is free in the table may be taken at once; the news about its former fate concern that alone."""
    store(outbox, "a")
    relay, other = outbox.claims(), outbox.claims()
    [first] = take(relay)
    back = [Settlement(first, Fate.BACK)]
    outbox.write([], back)
    [second] = take(relay)
    assert second.message.body == b"a"
    relay.written(back)
    clock.now += LEASE - 1
    relay.keep()
    clock.now += LEASE - 1
    assert take(other) == []
    clock.now += 2
    assert len(take(other)) == 1


def test_a_relay_renews_what_it_has_and_not_what_another_took_over(outbox: SQLAlchemyOutbox, clock: Clock) -> None:
    """A lease that ended is not renewed by who had it, nor does that take anything from the new holder."""
    store(outbox, "a", "b")
    slow, quick = outbox.claims(), outbox.claims()
    assert len(take(slow, 1)) == 1
    clock.now += LEASE + 1
    assert [row.message.body for row in take(quick)] == [b"a", b"b"]
    clock.now += LEASE - 1
    slow.keep()
    slow.close()
    assert take(outbox.claims()) == []
    clock.now += 2
    assert len(take(outbox.claims())) == 2


def test_what_may_have_been_published_stays_so_when_it_is_handed_back(outbox: SQLAlchemyOutbox, clock: Clock) -> None:
    """Also where the relay that handed it back has not touched it."""
    store(outbox, "a")
    dead, second, third = outbox.claims(), outbox.claims(), outbox.claims()
    assert [row.possible_duplicate for row in take(dead)] == [False]
    clock.now += LEASE + 1
    [row] = take(second)
    assert row.possible_duplicate
    outbox.write([], [Settlement(row, Fate.BACK)])
    [row] = take(third)
    assert row.possible_duplicate


def test_what_is_handed_back_untouched_is_no_possible_duplicate(outbox: SQLAlchemyOutbox) -> None:
    """Nobody has published it."""
    store(outbox, "a")
    claims = outbox.claims()
    [row] = take(claims)
    outbox.write([], [Settlement(row, Fate.BACK)])
    claims.written([Settlement(row, Fate.BACK)])
    [row] = take(claims)
    assert not row.possible_duplicate


def test_a_key_is_one_relays_at_a_time(outbox: SQLAlchemyOutbox) -> None:
    """Whoever has its first row has the others; what was stored meanwhile waits for that."""
    store(outbox, "0", "1", key="key")
    store(outbox, "free")
    one, other = outbox.claims(), outbox.claims()
    rows = take(one, 1)
    assert [row.message.body for row in rows] == [b"0", b"1"]
    store(outbox, "2", key="key")
    assert [row.message.body for row in take(other)] == [b"free"]
    outbox.write([], [Settlement(rows[0], Fate.CONFIRMED)])
    assert take(other) == []
    outbox.write([], [Settlement(rows[1], Fate.CONFIRMED)])
    assert [row.message.body for row in take(other)] == [b"2"]


def test_what_a_relay_lets_go_of_is_free_at_once_and_may_have_been_published(outbox: SQLAlchemyOutbox) -> None:
    """Nobody waits for the lease of a relay that ended in good order; what another has stays with it."""
    store(outbox, "a", "b")
    ending, other = outbox.claims(), outbox.claims()
    assert len(take(ending, 1)) == 1
    assert len(take(other, 1)) == 1
    ending.close()
    assert [(row.message.body, row.possible_duplicate) for row in take(other)] == [(b"a", True)]


def test_a_row_that_cannot_be_taken_holds_those_behind_it_and_not_those_before_it(
    outbox: SQLAlchemyOutbox, engine: Engine
) -> None:
    """In the middle of what a relay takes of a key, as one of a newer format may be."""
    store(outbox, "0", "1", "2", key="key")
    newer = update(outbox.table).where(outbox.table.c.body == b"1").values(format=FORMAT + 1)
    with engine.begin() as connection:
        connection.execute(newer)
    claims = outbox.claims()
    assert [row.message.body for row in take(claims)] == [b"0"]
