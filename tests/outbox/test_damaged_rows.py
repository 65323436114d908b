"""A damaged row stops only itself: the other rows are relayed.

A row is damaged if another program has written into it, for example.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from reliable_mq import Message
from reliable_mq.core.outbox import NewRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox, sqlalchemy_relay
from reliable_mq.outbox.protocol import RowLeases


def settle(outbox: SQLiteOutbox, claims: RowLeases, settlements: list[RowSettlement]) -> None:
    claims.decided(settlements)
    outbox.write([], settlements)
    claims.written(settlements)


def bodies(claims: RowLeases) -> list[bytes]:
    return [row.message.body for row in claims.take(10).rows]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("properties", "X'FF'"),
        ("body", "'text'"),
        ("attempts", "'many'"),
        ("message_id", "X'00'"),
        ("routing_key", "CAST(X'FF' AS TEXT)"),
        ("exchange", "CAST(X'C328' AS TEXT)"),
    ],
)
def test_a_damaged_row_is_set_aside_and_holds_those_of_its_key(tmp_path: Path, column: str, value: str) -> None:
    """Later rows of its key wait until the row is purged; all others are relayed."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    keys = ("key", "key", "key", None)
    outbox.write([NewRow(Message(b"%d" % number), "", "q", True, key) for number, key in enumerate(keys)], [])
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute(f"UPDATE outbox SET {column} = {value} WHERE id = 2")
    claims = outbox.claims()
    taken = claims.take(10)
    assert [row.message.body for row in taken.rows] == [b"0", b"3"]
    claims.decided(taken.damaged)  # decided but not yet written, when the relay reads the file again
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute("UPDATE outbox_epoch SET epoch = epoch + 1")
    assert bodies(claims) == []
    outbox.write([], taken.damaged)
    claims.written(taken.damaged)
    settle(outbox, claims, [RowSettlement(row, RowOutcome.CONFIRMED) for row in taken.rows])
    assert bodies(claims) == []
    status = outbox.status()
    assert (status.rows, status.held, status.set_aside) == (1, 1, 1)
    assert "damaged" in outbox.set_aside()[0].reason
    assert outbox.purge() == 1
    assert bodies(claims) == [b"2"]
    claims.close()
    outbox.close()


def test_a_damaged_row_has_the_id_of_its_message(tmp_path: Path) -> None:
    """The relay logs it, and an operator decides about the row by it."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b"0", message_id="order-7"), "", "q", True, None)], [])
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute("UPDATE outbox SET body = 'text'")
    claims = outbox.claims()
    taken = claims.take(10)
    assert [one.row.message.message_id for one in taken.damaged] == ["order-7"]
    settle(outbox, claims, taken.damaged)
    assert outbox.purge(["order-7"]) == 1
    claims.close()
    outbox.close()


@pytest.mark.parametrize("outcome", [RowOutcome.LATER, RowOutcome.BACK])
@pytest.mark.parametrize("relay", ["same", "next"])
@pytest.mark.parametrize("row", ["damaged", "newer"])
def test_a_bad_row_holds_later_rows_of_its_key_and_no_earlier(
    tmp_path: Path, outcome: RowOutcome, relay: str, row: str
) -> None:
    """This holds although the row before it is published at a second attempt only."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b"%d" % number), "", "q", True, "key") for number in range(4)], [])

    def change(values: str) -> None:
        with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
            connection.execute(f"UPDATE outbox SET {values} WHERE id = 2")

    change("properties = X'FF'" if row == "damaged" else "format = 2")
    claims = outbox.claims()
    taken = claims.take(10)
    settle(outbox, claims, taken.damaged)
    settle(outbox, claims, [RowSettlement(taken.rows[0], outcome)])
    if relay == "next":
        claims.close()
        claims = outbox.claims()
    rows = claims.take(10).rows
    assert [one.message.body for one in rows] == [b"0"]
    settle(outbox, claims, [RowSettlement(one, RowOutcome.CONFIRMED) for one in rows])
    assert bodies(claims) == []
    if row == "newer":
        change("format = 1, state = 2")
    assert outbox.purge() == 1
    assert bodies(claims) == [b"2", b"3"]
    claims.close()
    outbox.close()


def test_a_key_that_is_damaged_is_no_key(tmp_path: Path) -> None:
    """The damaged row is set aside, and no row waits for it."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b"%d" % number), "", "q", True, "key") for number in range(3)], [])
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute("UPDATE outbox SET ordering_key = CAST(X'FF' AS TEXT) WHERE id = 2")
    claims = outbox.claims()
    taken = claims.take(10)
    assert [row.message.body for row in taken.rows] == [b"0", b"2"]
    settle(outbox, claims, [*taken.damaged, *(RowSettlement(row, RowOutcome.CONFIRMED) for row in taken.rows)])
    assert (outbox.status().rows, outbox.status().set_aside) == (0, 1)
    claims.close()
    outbox.close()


@pytest.mark.parametrize("driver", ["pysqlite", "aiosqlite"])
@pytest.mark.parametrize("column", ["message_id", "exchange", "routing_key", "ordering_key"])
@pytest.mark.parametrize("value", ["CAST(X'C328' AS TEXT)", "X'C328'"])
def test_text_of_a_table_that_is_no_utf8_stops_only_its_row(
    tmp_path: Path, driver: str, column: str, value: str
) -> None:
    """SQLite stores any bytes as text, and its drivers fail to read them."""
    url = f"sqlite+{driver}:///{tmp_path}/database"
    engine = create_engine(url, poolclass=NullPool) if driver == "pysqlite" else create_async_engine(url)
    outbox = SQLAlchemyOutbox(engine, create=True)
    claims = outbox.claims()
    keys = ("key", "key", "another", None)
    outbox.write([NewRow(Message(b"%d" % number), "", "q", True, key) for number, key in enumerate(keys)], [])
    with closing(sqlite3.connect(tmp_path / "database")) as connection, connection:
        connection.execute(f"UPDATE reliable_mq_outbox SET {column} = {value} WHERE id = 2")
    taken = claims.take(10)
    assert [row.message.body for row in taken.rows] == [b"0", b"2", b"3"]
    claims.decided(taken.damaged)
    outbox.write([], [*taken.damaged, *(RowSettlement(row, RowOutcome.CONFIRMED) for row in taken.rows)])
    [failed] = outbox.set_aside()
    assert "row 2 is damaged" in failed.reason
    if column != "ordering_key":
        assert getattr(failed, column) == "\\xc3("
    assert (outbox.status().rows, outbox.purge()) == (0, 1)
    outbox.close()


def test_every_key_has_its_turn_beside_one_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last key that a take reads, and the next take starts there."""
    monkeypatch.setattr(sqlalchemy_relay, "_KEYS_AT_LEAST", 2)
    outbox = SQLAlchemyOutbox(create_engine(f"sqlite:///{tmp_path}/database", poolclass=NullPool), create=True)
    claims = outbox.claims()
    outbox.write([NewRow(Message(key.encode()), "", "q", True, key) for key in ("a", "b", "c", "d")], [])
    with closing(sqlite3.connect(tmp_path / "database")) as connection, connection:
        connection.execute("UPDATE reliable_mq_outbox SET ordering_key = CAST(X'62FF' AS TEXT) WHERE id = 2")
    taken = [claims.take(2) for _ in range(2)]
    assert [[row.message.body for row in batch.rows] for batch in taken] == [[b"a"], [b"c", b"d"]]


def test_delayed_rows_of_a_newer_format_keep_no_others_back(tmp_path: Path) -> None:
    """A newer relay has delayed them, and a relay that does not know them has taken over."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b"%d" % number), "", "q", True, None) for number in range(4)], [])
    claims = outbox.claims()
    settle(outbox, claims, [RowSettlement(row, RowOutcome.LATER) for row in claims.take(3).rows])
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute("UPDATE outbox SET available_at = id, format = CASE WHEN id < 3 THEN 99 ELSE format END")
    assert [row.message.body for row in claims.take(10, 2).rows] == [b"2", b"3"]
    claims.close()
    outbox.close()
