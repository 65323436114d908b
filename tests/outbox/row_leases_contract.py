"""Tests of row leases for any database: which rows a relay leases and how long."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from sqlalchemy import event, select, text, update

from reliable_mq import Message
from reliable_mq.core.outbox import FORMAT, NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox, sqlalchemy_relay
from reliable_mq.outbox.sqlalchemy_table import DELAYED, READY, SET_ASIDE

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from sqlalchemy import Connection, Engine

    from reliable_mq.outbox.protocol import RowLeases

LEASE = 100.0


class TableOutbox:
    """An outbox in a new table whose clock is set by the test."""

    def __init__(self, engine: Engine, *, lease: float = LEASE) -> None:
        self.engine = engine
        self.outbox = SQLAlchemyOutbox(engine, create=True, lease=lease)
        self.outbox.open()
        self._passed = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._passed)
        self._clock = patch.object(sqlalchemy_relay, "time", clock)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._clock.stop()

    def age(self, seconds: float) -> None:
        """Let the given seconds pass: move all times in the table into the past."""
        self._passed += seconds
        columns = self.outbox.table.c
        earlier = {name: columns[name] - seconds for name in ("claimed_until", "available_at", "stored_at")}
        with self.engine.begin() as connection:
            connection.execute(update(self.outbox.table).values(earlier))

    def reads(self, work: Callable[[], object]) -> int:
        """Count the rows of tables and indexes that the database reads for some work.

        In SQLite the unit is an instruction.
        """
        if self.engine.dialect.name == "sqlite":
            return _instructions(self.engine, work)
        with self.engine.connect() as connection:
            before = _rows_read(connection)
        work()
        with self.engine.connect() as connection:
            return _rows_read(connection) - before


def _rows_read(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
        connection.commit()
        return int(
            connection.execute(
                text(
                    "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) + (SELECT "
                    "coalesce(sum(idx_tup_read), 0) FROM pg_stat_user_indexes) FROM pg_stat_user_tables"
                )
            ).scalar_one()
        )
    found = connection.execute(text("SHOW GLOBAL STATUS LIKE 'Handler_read%'"))
    return sum(int(count) for _, count in found)


def _instructions(engine: Engine, work: Callable[[], object]) -> int:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return 0

    with engine.connect() as connection:
        held: Any = connection.connection.driver_connection
        held.set_progress_handler(counted, 1)
    work()  # on the same connection, which was last returned to the pool
    held.set_progress_handler(None, 0)
    return count


def store(outbox: SQLAlchemyOutbox, *bodies: str, key: str | None = None) -> None:
    outbox.write([NewRow(Message(body.encode()), "", "q", True, key) for body in bodies], [])


def take(claims: RowLeases, limit: int = 10) -> list[OutboxRow]:
    taken = claims.take(limit)
    assert not taken.damaged
    return taken.rows


class RowLeasesContract:
    """Tests of a ``table``, a fixture of the module that inherits them."""

    def test_a_row_taken_again_before_its_release_is_reported_stays(self, table: TableOutbox) -> None:
        """A row may be taken again once it is free in the table.

        The report of its earlier outcome may come later and must not end the new lease.
        """
        store(table.outbox, "a")
        relay, other = table.outbox.claims(), table.outbox.claims()
        [first] = take(relay)
        back = [RowSettlement(first, RowOutcome.BACK)]
        table.outbox.write([], back)
        [second] = take(relay)
        assert second.message.body == b"a"
        relay.written(back)
        table.age(LEASE - 30)
        relay.keep()
        table.age(LEASE - 30)
        assert take(other) == []
        table.age(31)
        assert len(take(other)) == 1

    def test_a_relay_renews_its_own_rows_but_not_taken_over_ones(self, table: TableOutbox) -> None:
        """The old holder of an ended lease neither renews nor releases it."""
        store(table.outbox, "a", "b")
        slow, quick = table.outbox.claims(), table.outbox.claims()
        assert len(take(slow, 1)) == 1
        table.age(LEASE + 1)
        assert [row.message.body for row in take(quick)] == [b"a", b"b"]
        table.age(LEASE - 30)
        slow.keep()
        slow.close()
        assert take(table.outbox.claims()) == []
        table.age(31)
        assert len(take(table.outbox.claims())) == 2

    def test_a_possible_duplicate_stays_one_when_it_is_released(self, table: TableOutbox) -> None:
        """This holds even if the relay that released it has not published it."""
        store(table.outbox, "a")
        dead, second, third = table.outbox.claims(), table.outbox.claims(), table.outbox.claims()
        assert [row.possible_duplicate for row in take(dead)] == [False]
        table.age(LEASE + 1)
        [row] = take(second)
        assert row.possible_duplicate
        table.outbox.write([], [RowSettlement(row, RowOutcome.BACK)])
        [row] = take(third)
        assert row.possible_duplicate

    def test_a_row_released_untouched_is_no_possible_duplicate(self, table: TableOutbox) -> None:
        """The row was never published."""
        store(table.outbox, "a")
        claims = table.outbox.claims()
        [row] = take(claims)
        table.outbox.write([], [RowSettlement(row, RowOutcome.BACK)])
        claims.written([RowSettlement(row, RowOutcome.BACK)])
        [row] = take(claims)
        assert not row.possible_duplicate

    def test_a_relay_that_ends_marks_no_unpublished_row(self, table: TableOutbox) -> None:
        """Its release need not have been written yet.

        A row that was released and taken again may have been published, so it is marked.
        """
        store(table.outbox, "back", "again", "out", "before")
        dead, ends, last = table.outbox.claims(), table.outbox.claims(), table.outbox.claims()
        rows = take(dead)
        free = [RowSettlement(row, RowOutcome.BACK) for row in rows[:3]]
        table.outbox.write([], free)
        table.age(LEASE + 1)
        back, again, _, before = take(ends)
        assert before.possible_duplicate
        ends.decided([RowSettlement(row, RowOutcome.BACK) for row in (back, again, before)])
        table.outbox.write([], [RowSettlement(again, RowOutcome.BACK)])
        assert [row.message.body for row in take(ends)] == [b"again"]
        ends.close()
        left = [(row.message.body, row.possible_duplicate) for row in take(last)]
        assert left == [(b"back", False), (b"again", True), (b"out", True), (b"before", True)]

    def test_a_key_is_one_relays_at_a_time(self, table: TableOutbox) -> None:
        """The relay with the first row of a key gets the others; later rows wait."""
        store(table.outbox, "0", "1", key="key")
        store(table.outbox, "free")
        one, other = table.outbox.claims(), table.outbox.claims()
        rows = take(one, 1)
        assert [row.message.body for row in rows] == [b"0", b"1"]
        store(table.outbox, "2", key="key")
        assert [row.message.body for row in take(other)] == [b"free"]
        table.outbox.write([], [RowSettlement(rows[0], RowOutcome.CONFIRMED)])
        assert take(other) == []
        table.outbox.write([], [RowSettlement(rows[1], RowOutcome.CONFIRMED)])
        assert [row.message.body for row in take(other)] == [b"2"]

    def test_a_relay_that_ends_frees_rows_as_possible_duplicates(self, table: TableOutbox) -> None:
        """The rows are free before their lease ends. Rows of another relay stay leased."""
        store(table.outbox, "a", "b")
        ending, other = table.outbox.claims(), table.outbox.claims()
        assert len(take(ending, 1)) == 1
        assert len(take(other, 1)) == 1
        ending.close()
        assert [(row.message.body, row.possible_duplicate) for row in take(other)] == [(b"a", True)]

    def test_an_untakable_row_holds_later_rows_of_its_key_only(self, table: TableOutbox) -> None:
        """A row of a newer format, for example, stops the take of its key before it."""
        store(table.outbox, "0", "1", "2", key="key")
        newer = update(table.outbox.table).where(table.outbox.table.c.body == b"1").values(format=FORMAT + 1)
        with table.engine.begin() as connection:
            connection.execute(newer)
        claims = table.outbox.claims()
        assert [row.message.body for row in take(claims)] == [b"0"]

    def test_a_damaged_row_is_set_aside_and_holds_those_behind_it(self, table: TableOutbox) -> None:
        """Rows of other keys are relayed; a purge of the damaged row frees the rest."""
        store(table.outbox, "0", "1", "2", key="key")
        store(table.outbox, "free")
        damage = update(table.outbox.table).where(table.outbox.table.c.body == b"1").values(properties=b"\xff")
        with table.engine.begin() as connection:
            connection.execute(damage)
        claims = table.outbox.claims()
        taken = claims.take(10)
        assert [row.message.body for row in taken.rows] == [b"0", b"free"]
        table.outbox.write([], taken.damaged)
        claims.written(taken.damaged)
        done = [RowSettlement(row, RowOutcome.CONFIRMED) for row in taken.rows]
        table.outbox.write([], done)
        claims.written(done)
        assert take(claims) == []
        status = table.outbox.status()
        assert (status.rows, status.held, status.set_aside) == (1, 1, 1)
        assert "damaged" in table.outbox.set_aside()[0].reason
        assert table.outbox.purge() == 1
        assert [(row.message.body, row.possible_duplicate) for row in take(claims)] == [(b"2", False)]

    def test_a_damaged_row_has_the_id_of_its_message(self, table: TableOutbox) -> None:
        """The relay logs it, and an operator decides about the row by it."""
        table.outbox.write([NewRow(Message(b"0", message_id="order-7"), "", "q", True, None)], [])
        with table.engine.begin() as connection:
            connection.execute(update(table.outbox.table).values(properties=b"\xff"))
        taken = table.outbox.claims().take(10)
        assert [one.row.message.message_id for one in taken.damaged] == ["order-7"]
        table.outbox.write([], taken.damaged)
        assert table.outbox.purge(["order-7"]) == 1

    def test_a_damaged_row_without_a_key_holds_no_other(self, table: TableOutbox) -> None:
        """Rows without a key are independent of each other."""
        store(table.outbox, "0", "1")
        damage = update(table.outbox.table).where(table.outbox.table.c.body == b"0").values(properties=b"\xff")
        with table.engine.begin() as connection:
            connection.execute(damage)
        taken = table.outbox.claims().take(10)
        assert [row.message.body for row in taken.rows] == [b"1"]
        assert [one.outcome for one in taken.damaged] == [RowOutcome.SET_ASIDE]

    @pytest.mark.parametrize("outcome", [RowOutcome.BACK, RowOutcome.LATER, RowOutcome.SET_ASIDE])
    def test_a_late_outcome_changes_no_row_of_another_relay(self, table: TableOutbox, outcome: RowOutcome) -> None:
        """A relay paused for longer than its lease does not know that it lost its rows."""
        store(table.outbox, "a", "b", key="key")
        slow, quick, third = table.outbox.claims(), table.outbox.claims(), table.outbox.claims()
        late = take(slow)
        table.age(LEASE + 1)
        rows = take(quick)
        assert [row.message.body for row in rows] == [b"a", b"b"]
        table.outbox.write([], [RowSettlement(row, outcome, 5.0, "it was late") for row in late])
        assert take(third) == []
        assert table.outbox.status().rows == 2
        table.outbox.write([], [RowSettlement(rows[0], RowOutcome.CONFIRMED)])
        assert take(third) == []
        table.outbox.write([], [RowSettlement(rows[1], RowOutcome.BACK)])
        assert [(row.message.body, row.possible_duplicate) for row in take(third)] == [(b"b", True)]

    def test_outcomes_of_many_rows_take_few_statements(self, table: TableOutbox) -> None:
        """One for each row would exceed the time limit of the transaction on a slow link, again and again."""
        store(table.outbox, *map(str, range(300)))
        claims = table.outbox.claims()
        taken: list[OutboxRow] = []
        while len(taken) < 300:
            taken += take(claims, 300)
        outcomes = (RowOutcome.LATER, RowOutcome.SET_ASIDE, RowOutcome.BACK)
        settlements = [
            RowSettlement(row, outcomes[row.id % 3], 60.0, f"why it is {row.id}", possible_duplicate=row.id % 2 == 0)
            for row in taken
        ]
        statements: list[str] = []

        def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            statements.append(statement)

        event.listen(table.engine, "before_cursor_execute", count)
        table.outbox.write([], settlements)
        event.remove(table.engine, "before_cursor_execute", count)
        assert len(statements) < 60
        columns = table.outbox.table.c
        query = select(columns.id, columns.state, columns.reason, columns.attempts, columns.possible_duplicate)
        with table.engine.connect() as connection:
            found = list(map(tuple, connection.execute(query.order_by(columns.id))))
        assert found == [
            (
                row.id,
                (DELAYED, SET_ASIDE, READY)[row.id % 3],
                None if row.id % 3 == 2 else f"why it is {row.id}",
                int(row.id % 3 < 2),
                int(row.id % 2 == 0),
            )
            for row in sorted(taken, key=lambda row: row.id)
        ]

    def test_a_confirm_that_comes_late_removes_the_row(self, table: TableOutbox) -> None:
        """The broker has the message, whichever relay published it."""
        store(table.outbox, "a")
        slow, quick = table.outbox.claims(), table.outbox.claims()
        [late] = take(slow)
        table.age(LEASE + 1)
        assert len(take(quick)) == 1
        table.outbox.write([], [RowSettlement(late, RowOutcome.CONFIRMED)])
        assert table.outbox.status().rows == 0

    def test_a_relay_does_not_take_what_it_has(self, table: TableOutbox) -> None:
        """A relay may hold rows with ended leases after an outage of the database."""
        store(table.outbox, "a", "b")
        relay, other = table.outbox.claims(), table.outbox.claims()
        [first] = take(relay, 1)
        table.age(LEASE + 1)
        assert [row.message.body for row in take(relay)] == [b"b"]
        assert take(other) == []
        table.outbox.write([], [RowSettlement(first, RowOutcome.CONFIRMED)])
        assert table.outbox.status().rows == 1

    def test_leases_are_renewed_well_before_they_end(self, table: TableOutbox) -> None:
        """This holds for short leases too."""
        for lease in (0.5, 30.0, 3600.0):
            claims = SQLAlchemyOutbox(table.engine, lease=lease).claims()
            assert claims.keep_every <= min(lease / 3, 5.0)

    def test_large_messages_are_taken_a_few_at_a_time(self, table: TableOutbox) -> None:
        """A relay holds some megabytes at most; small messages come by the hundred."""
        store(table.outbox, *["x" * 2**18] * 64)
        claims = table.outbox.claims()
        sizes = [len(take(claims, 500)) for _ in range(2)]
        assert sizes == [32, 31]
        small = table.outbox.claims()
        store(table.outbox, *["x"] * 200)
        while len(take(small, 500)) < 100:
            assert table.outbox.backlog()[0] == 64 + 200

    @pytest.mark.parametrize("key", ["key", None])
    def test_large_messages_after_small_ones_fit_in_memory(self, table: TableOutbox, key: str | None) -> None:
        """A relay that has taken small messages by the hundred does not read as many large ones at once.

        With a key, the first row is chosen, and the others are behind it.
        """
        claims, other = table.outbox.claims(), table.outbox.claims()
        store(table.outbox, *["x" * 10] * 600)
        while rows := take(claims, 500):
            done = [RowSettlement(row, RowOutcome.CONFIRMED) for row in rows]
            table.outbox.write([], done)
            claims.written(done)
        store(table.outbox, *(f"{number}".zfill(2**20) for number in range(12)), key=key)
        rows = take(claims, 500)
        assert [int(row.message.body[-2:]) for row in rows] == list(range(8 if key is None else 9))
        assert len(take(other, 1)) == (1 if key is None else 0)

    def test_a_message_larger_than_a_take_is_taken_alone(self, table: TableOutbox) -> None:
        """It would wait forever otherwise."""
        store(table.outbox, "x" * (9 * 2**20), "small")
        claims = table.outbox.claims()
        assert [len(row.message.body) for row in take(claims)] == [9 * 2**20]
        assert [row.message.body for row in take(claims)] == [b"small"]

    @pytest.mark.parametrize("keys", [3, None])
    def test_taking_reads_no_more_where_more_rows_wait(self, table: TableOutbox, keys: int | None) -> None:
        """This holds whatever statistics the database has of its tables."""

        def store_for_each(count: int) -> None:
            for number in range(keys or 1):
                store(table.outbox, *["x"] * count, key=None if keys is None else f"key {number}")

        def reads() -> int:
            claims = table.outbox.claims()

            def look() -> None:
                assert len(take(claims, 30)) >= 30
                assert len(take(claims, 30)) == (30 if keys is None else 0)

            count = table.reads(look)
            claims.close()
            return count

        store_for_each(100)
        reads()
        few = reads()
        store_for_each(1000)
        assert reads() < 1.5 * few + 300

    def test_relays_go_around_the_keys(self, table: TableOutbox) -> None:
        """Every key gets its turn, and within a choice the oldest rows come first."""
        keys = [f"{number * 7919 % 250}" for number in range(250)]
        rows = [NewRow(Message(b"%d" % number), "", "q", True, key) for number, key in enumerate(keys)]
        table.outbox.write(rows, [])
        one, other = table.outbox.claims(), table.outbox.claims()
        turns = iter((one, other) * 30)
        taken: list[bytes] = []
        while len(taken) < 250:
            taken += [row.message.body for row in take(next(turns), 7)]
        assert sorted(taken) == sorted(b"%d" % number for number in range(250))
        store(table.outbox, "new", key="0")
        table.outbox.write([], [])
        assert take(one) == take(other) == []

    def test_only_the_ids_that_are_given_are_decided_about(self, table: TableOutbox) -> None:
        """This holds even if the table has a case-insensitive collation."""
        ids = ("order-ab", "ORDER-AB", "Örder-ab", "order-ab ")
        with table.engine.begin() as connection:
            if connection.dialect.name == "mysql":
                loose = "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
                connection.execute(
                    text(f"ALTER TABLE reliable_mq_outbox MODIFY message_id VARCHAR(255) {loose} NOT NULL")
                )
        table.outbox.write([NewRow(Message(b"", message_id=name), "", "q", True, None) for name in ids], [])
        claims = table.outbox.claims()
        table.outbox.write([], [RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "why") for row in take(claims)])
        assert table.outbox.retry(["order-ab"]) == 1
        assert table.outbox.status().rows == 1
        assert table.outbox.purge(["order-ab", "order-ab "]) == 1
        assert sorted(one.message_id for one in table.outbox.set_aside()) == ["ORDER-AB", "Örder-ab"]
