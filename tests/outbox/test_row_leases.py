"""The tests of row leases in SQLite, which needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from reliable_mq.core.outbox import RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, sqlalchemy_relay, sqlalchemy_table
from reliable_mq.outbox.protocol import RowLeases
from tests.outbox.row_leases_contract import RowLeasesContract, TableOutbox, store, take


@pytest.fixture(params=["one writer at a time", "rows locked one by one"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableOutbox]:
    """Return a table for each of the two ways to lock rows. SQLite ignores the locks."""
    if request.param == "rows locked one by one":
        monkeypatch.setattr(sqlalchemy_relay, "skips_locked", lambda _connection: True)
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with TableOutbox(engine) as made:
        yield made
    engine.dispose()


@pytest.mark.slow
class TestRowLeases(RowLeasesContract):
    pass


def test_claims_from_before_a_reboot_are_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases count the time since the boot; a reboot makes no delay longer."""

    def booted(name: str, uptime: float) -> None:
        monkeypatch.setattr(sqlalchemy_table, "boot", lambda: (name, 0))
        monkeypatch.setattr(sqlalchemy_table, "since_boot", lambda: int(uptime * 1_000_000))

    engine = create_engine(f"sqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, lease=30)
    outbox.create_table()
    booted("one", 10_000.0)
    store(outbox, "delayed", "claimed")
    before = outbox.claims()
    late, _ = take(before)
    outbox.write([], [RowSettlement(late, RowOutcome.LATER, 60.0)])
    booted("two", 9_990.0)
    assert [(row.message.body, row.possible_duplicate) for row in take(outbox.claims())] == [(b"claimed", True)]
    booted("three", 5.0)
    assert [row.message.body for row in take(outbox.claims())] == [b"delayed", b"claimed"]
    assert take(outbox.claims()) == []
    engine.dispose()


@pytest.mark.parametrize("names", [("one", ""), ("", "one"), ("", "")])
def test_a_relay_that_cannot_name_the_boot_shares_its_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """A lease that ends later than a new one would is from before a reboot."""

    def relay(name: str, uptime: float) -> RowLeases:
        monkeypatch.setattr(sqlalchemy_table, "boot", lambda: (name, 0))
        monkeypatch.setattr(sqlalchemy_table, "since_boot", lambda: int(uptime * 1_000_000))
        return outbox.claims()

    engine = create_engine(f"sqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, lease=30)
    outbox.create_table()
    store(outbox, "claimed")
    assert len(take(relay(names[0], 10_000.0))) == 1
    assert take(relay(names[1], 10_000.0)) == []
    assert take(relay(names[1], 10_029.0)) == []
    assert len(take(relay(names[1], 10_030.0))) == 1
    assert len(take(relay(names[0], 5.0))) == 1
    engine.dispose()


def test_a_late_confirm_removes_no_row_that_got_the_same_id(tmp_path: Path) -> None:
    """A truncated table, or a server that lost its last commits, uses ids again."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, create=True)
    outbox.open()
    store(outbox, "lost", "lost too")
    lost = take(outbox.claims())
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM reliable_mq_outbox"))
        connection.execute(text("DELETE FROM sqlite_sequence"))
    store(outbox, "new")
    outbox.write([], [RowSettlement(row, RowOutcome.CONFIRMED) for row in lost])
    [new] = take(outbox.claims())
    assert (new.id, new.message.body) == (lost[0].id, b"new")
    outbox.write([], [RowSettlement(new, RowOutcome.CONFIRMED)])
    assert outbox.status().rows == 0
    engine.dispose()


def test_a_table_without_its_index_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A migration may have left it out. ``create_table`` creates it."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, create=True)
    outbox.open()
    assert not caplog.records
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX reliable_mq_outbox_in_order"))
    SQLAlchemyOutbox(engine).open()
    assert "slow without an index on ordering_key and id" in caplog.text
    caplog.clear()
    outbox.create_table()
    SQLAlchemyOutbox(engine).open()
    assert not caplog.records
    engine.dispose()
