"""The outbox contract for the backends that need no server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete

from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox, sqlalchemy_table, sqlite, sqlite_relay
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

        yield OutboxUnderTest(outbox, clock.advance, empty)
        outbox.close()


class TestTable(OutboxContract):
    @pytest.fixture
    def examples(self) -> int:
        return scaled(12)

    @pytest.fixture
    def subject(self, tmp_path: Path, clock: Clock) -> Iterator[OutboxUnderTest]:
        engine = create_engine(f"sqlite:///{tmp_path}/database")
        outbox = SQLAlchemyOutbox(engine, create=True, lease=1e8)
        outbox.open()

        def empty() -> None:
            with engine.begin() as connection:
                connection.execute(delete(outbox.table))

        yield OutboxUnderTest(outbox, clock.advance, empty)
        outbox.close()
        engine.dispose()
