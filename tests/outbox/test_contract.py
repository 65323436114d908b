"""The outbox contract for the backends that need no server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete

from reliable_mq.core.outbox import NewRow, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox, sqlalchemy_table, sqlite, sqlite_relay
from reliable_mq.outbox.sqlalchemy_relay import SQLAlchemyRowLeases
from reliable_mq.testing.outbox_contract import OutboxContract, OutboxUnderTest
from tests.properties import scaled


class Clock:
    """The time since the boot of the machine, as the backends read it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def since_boot(self) -> int:
        return int(self.now * 1_000_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (sqlite, sqlite_relay, sqlalchemy_table):
        monkeypatch.setattr(module, "since_boot", made.since_boot)
    return made


class TestFile(OutboxContract):
    @pytest.fixture
    def examples(self) -> int:
        return scaled(40)

    @pytest.fixture
    def subject(self, tmp_path: Path, clock: Clock) -> Iterator[OutboxUnderTest]:
        outbox = SQLiteOutbox(tmp_path / "outbox")
        outbox.open()

        def empty() -> None:
            with closing(sqlite3.connect(outbox.path)) as connection, connection:
                connection.execute("DELETE FROM outbox")

        with closing(SQLiteOutbox(outbox.path)) as another:
            yield OutboxUnderTest(outbox, clock.advance, empty, lambda: another)
        outbox.close()


class TestTable(OutboxContract):
    @pytest.fixture
    def examples(self) -> int:
        return scaled(12)

    @pytest.fixture
    def subject(self, tmp_path: Path, clock: Clock) -> Iterator[OutboxUnderTest]:
        engine, lease = create_engine(f"sqlite:///{tmp_path}/database"), 1e8
        outbox = SQLAlchemyOutbox(engine, create=True, lease=lease)
        outbox.open()

        def empty() -> None:
            with engine.begin() as connection:
                connection.execute(delete(outbox.table))

        with closing(SQLAlchemyOutbox(engine, lease=lease)) as another:
            yield OutboxUnderTest(outbox, clock.advance, empty, lambda: another, lease)
        outbox.close()
        engine.dispose()


class Buffered(SQLiteOutbox):
    """An outbox that writes what it was given when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.given: list[tuple[Sequence[NewRow], Sequence[RowSettlement]]] = []

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        self.given.append((rows, settlements))

    def close(self) -> None:
        given, self.given = self.given, []
        for rows, settlements in given:
            super().write(rows, settlements)
        super().close()


@pytest.mark.parametrize("shared", [False, True])
def test_an_outbox_that_writes_when_it_is_closed_is_found(tmp_path: Path, shared: bool) -> None:
    with closing(Buffered(tmp_path / "outbox")) as outbox, closing(SQLiteOutbox(outbox.path)) as another:
        subject = OutboxUnderTest(outbox, age=lambda _: None, empty=lambda: None)
        outbox.open()
        if shared:
            subject.another = lambda: another
            with pytest.raises(AssertionError):
                OutboxContract().test_what_is_written_is_seen_by_another_process(subject)
        else:
            OutboxContract().test_stored_rows_outlive_a_close(subject)


@pytest.mark.parametrize("fault", ["leases that do not end", "leases that are not kept"])
def test_an_outbox_with_wrong_leases_is_found(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "leases that are not kept":
        monkeypatch.setattr(SQLAlchemyRowLeases, "keep", lambda _: None)
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    lease = 1e9 if fault == "leases that do not end" else 100.0
    with closing(SQLAlchemyOutbox(engine, create=True, lease=lease)) as outbox:
        outbox.open()
        subject = OutboxUnderTest(outbox, clock.advance, empty=lambda: None, lease=100.0)

        with pytest.raises(AssertionError):
            OutboxContract().test_rows_of_a_dead_relay_are_free_after_its_lease(subject)
    engine.dispose()
