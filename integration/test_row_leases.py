"""Relays of one table on servers that lock rows and skip locked ones."""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, delete, event, select, text

from integration.support.lossy import LossyProxy
from integration.support.programs import environment, faketime, output_of
from integration.support.seeds import soak_seeds, soaking
from reliable_mq import Message, OutboxError
from reliable_mq.core.outbox import RowOutcome, RowSettlement
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.outbox.sqlalchemy_table import database_time
from reliable_mq.testing.outbox_contract import OutboxContract, OutboxUnderTest
from tests.outbox.row_leases_contract import LEASE, RowLeasesContract, TableOutbox, store, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy import Connection, Engine, Transaction

    from integration.support.databases import Database
    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.outbox.protocol import RowLeases


@pytest.fixture(params=["postgresql", "mariadb", "mysql"])
def table(request: pytest.FixtureRequest, database: Callable[[str], Database]) -> Iterator[TableOutbox]:
    """A table in an empty database."""
    engine = create_engine(database(request.param).fresh())
    with TableOutbox(engine) as made:
        yield made
    engine.dispose()


class TestRowLeases(RowLeasesContract):
    def test_a_relay_waits_for_no_open_transaction_of_a_user(self, table: TableOutbox) -> None:
        """The table is so small that a server would prefer to scan all of it.

        It would then wait for rows that others have locked.
        """
        outbox, claims = table.outbox, table.outbox.claims()
        store(outbox, *map(str, range(300)))
        taken: list[OutboxRow] = []
        while len(taken) < 250:
            taken += take(claims, 250 - len(taken))
        confirmed, failed, again = taken[:100], taken[100:200], taken[200:225]
        names = [row.message.message_id for row in failed]
        with waiting_for_no_lock(table.engine), table.engine.connect() as user, user.begin():
            outbox.add(user, Message(b"open"), routing_key="q")
            claims.keep()
            report(outbox, claims, confirmed, RowOutcome.CONFIRMED)
            report(outbox, claims, failed, RowOutcome.SET_ASIDE)
            assert outbox.purge(names[:25]) == 25
            assert outbox.retry(names[25:50]) == 25
            assert outbox.retry() == 50
            report(outbox, claims, again, RowOutcome.SET_ASIDE)
            assert outbox.purge() == 25
            claims.close()
            assert outbox.status().rows == 300 - 100 - 25 - 25


@contextlib.contextmanager
def waiting_for_no_lock(engine: Engine) -> Iterator[None]:
    """Let new connections fail instead of waiting for a lock."""
    server = "postgresql" if engine.dialect.name == "postgresql" else "mysql"
    statement = {"postgresql": "SET lock_timeout = 1000", "mysql": "SET innodb_lock_wait_timeout = 1"}[server]

    def impatient(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)
        connection.commit()

    engine.dispose()
    event.listen(engine, "connect", impatient)
    try:
        yield
    finally:
        event.remove(engine, "connect", impatient)
        engine.dispose()


def report(outbox: SQLAlchemyOutbox, claims: RowLeases, rows: Sequence[OutboxRow], outcome: RowOutcome) -> None:
    """Write the outcome of claimed rows."""
    settlements = [RowSettlement(row, outcome) for row in rows]
    outbox.write([], settlements)
    claims.written(settlements)


def test_a_relay_passes_over_rows_that_another_has_locked(table: TableOutbox) -> None:
    """A transaction that hangs while it claims rows blocks only its own rows."""
    store(table.outbox, *"abcde")
    store(table.outbox, "0", "1", key="key")
    columns = table.outbox.table.c
    claims = table.outbox.claims()
    with ThreadPoolExecutor(1) as pool, table.engine.connect() as other:
        other = other.execution_options(isolation_level="READ COMMITTED")  # noqa: PLW2901  # the same one
        ids = select(columns.id).where(columns.body.in_([b"a", b"c", b"0"]))
        with other.begin():
            found = other.execute(ids).scalars().all()
            other.execute(select(columns.id).where(columns.id.in_(found)).with_for_update())
            taken = pool.submit(take, claims).result(10)
    assert [row.message.body for row in taken] == [b"b", b"d", b"e"]
    assert [row.message.body for row in take(claims)] == [b"a", b"c", b"0", b"1"]


@pytest.mark.parametrize(("call", "free"), [("keep", []), ("close", [b"a", b"c"])])
def test_a_row_that_a_user_has_locked_blocks_no_other_lease(table: TableOutbox, call: str, free: list[bytes]) -> None:
    """Leases that are renewed with it would end, and those released with it would last."""
    claims, columns = table.outbox.claims(), table.outbox.table.c
    store(table.outbox, *"abc")
    _, row, _ = take(claims)
    table.age(LEASE / 2)
    with waiting_for_no_lock(table.engine), table.engine.connect() as user, user.begin():
        user.execute(select(columns.id).where(columns.id == row.id).with_for_update())
        getattr(claims, call)()
        assert [row.message.body for row in take(table.outbox.claims())] == free
    table.age(LEASE * 3 / 4)
    assert [row.message.body for row in take(table.outbox.claims())] == [b"b"]


def test_rows_of_a_late_commit_keep_their_order(table: TableOutbox) -> None:
    """The commit is between the choice of a key's first row and the search for those behind it."""
    claims: Any = table.outbox.claims()
    search = claims._next_of_keys
    with table.engine.connect() as user:
        late = stores_around(table.outbox, user)

        def commit_first(*args: Any) -> Any:
            late.commit()
            claims._next_of_keys = search
            return search(*args)

        claims._next_of_keys = commit_first
        rows = take(claims)
    assert [row.message.body for row in rows] == [b"10"]
    rows += take(claims)
    assert [row.message.body for row in rows] == [b"10", b"5"]
    report(table.outbox, claims, rows, RowOutcome.CONFIRMED)
    assert [row.message.body for row in take(claims)] == [b"11", b"20"]


def test_two_relays_take_no_row_of_a_late_commit_twice(table: TableOutbox) -> None:
    """A relay has locked the first row of a key as a row with a lower id is committed."""
    one: Any = table.outbox.claims()
    other = table.outbox.claims()
    mark, locked, go_on = one._mark, threading.Event(), threading.Event()

    def pause(*args: Any) -> None:
        locked.set()
        assert go_on.wait(20)
        mark(*args)

    one._mark = pause
    with ThreadPoolExecutor(2) as pool, table.engine.connect() as user:
        late = stores_around(table.outbox, user)
        first = pool.submit(take, one)
        assert locked.wait(10)
        late.commit()
        second = pool.submit(take, other)
        wait([second], 2)
        go_on.set()
        rows = [row.message.body for row in first.result(10)]
        assert [row.message.body for row in second.result(10)] == [b"5"]
    assert rows[0] == b"10"
    assert b"5" not in rows


def stores_around(outbox: SQLAlchemyOutbox, user: Connection) -> Transaction:
    """Store rows of one key, the first and the last ones in a transaction that stays open."""
    late = user.begin()
    outbox.add(user, Message(b"5"), routing_key="q", ordering_key="key")
    store(outbox, "10", "11", key="key")
    outbox.add(user, Message(b"20"), routing_key="q", ordering_key="key")
    return late


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_a_relay_takes_rows_again_whose_claim_may_be_committed(database: Callable[[str], Database], kind: str) -> None:
    """The reply to the COMMIT is lost. The rows do not wait for the end of their lease, which others respect."""
    server, armed, claimed = database(kind), threading.Event(), threading.Event()

    def loses(data: bytes) -> bool:
        if armed.is_set() and b"claimed_by=" in data:
            claimed.set()
        if not (claimed.is_set() and b"COMMIT" in data):
            return False
        armed.clear()
        claimed.clear()
        return True

    direct = create_engine(server.fresh())
    with (
        TableOutbox(direct) as table,
        LossyProxy(server.port, loses) as proxy,
    ):
        engine = create_engine(direct.url.set(port=proxy.port))
        store(table.outbox, "warm", "a", "b")
        store(table.outbox, "0", "1", key="key")
        claims, others = SQLAlchemyOutbox(engine).claims(), table.outbox.claims()
        take(claims, 1)
        armed.set()
        with pytest.raises(OutboxError, match="taking rows failed"):
            take(claims)
        assert proxy.lost == 1
        assert take(others) == []
        rows = take(claims)
        assert [row.message.body for row in rows] == [b"a", b"b", b"0", b"1"]
        assert take(claims) == []
        engine.dispose()
    direct.dispose()


def test_f45_outbox_leases_and_delays_ignore_the_wall_clock(
    database: Callable[[str], Database], tmp_path: Path
) -> None:
    """Another relay gets the row when the lease of a dead one ends, at that time.

    The same holds for a delay.
    """
    offset_file = tmp_path / "offset"
    offset_file.write_text("+0")
    servers = [database(kind) for kind in ("postgresql", "mariadb", *(["mysql"] if soaking() else []))]
    urls = [f"sqlite:///{tmp_path / 'database'}", *(server.fresh() for server in servers)]
    for url in urls:
        engine = create_engine(url)
        SQLAlchemyOutbox(engine).create_table()
        engine.dispose()
    program = [sys.executable, "-m", "integration.programs.jumping_outbox", str(offset_file)]
    said = output_of([*program, str(tmp_path / "outbox"), *urls], env=environment() | faketime(offset_file))
    assert said == "end\n"


def test_the_lease_clock_does_not_go_back_as_summer_time_ends(database: Callable[[str], Database]) -> None:
    """The session's local hour is the second of two equal ones.

    MySQL interprets it as the first one.
    """
    engine = create_engine(database("mysql").fresh())
    with engine.begin() as connection:
        for statement in _SUMMER_TIME_HAS_ENDED:
            connection.execute(text(statement))
    try:
        with engine.connect() as connection:
            exact = connection.execute(text("SELECT unix_timestamp()")).scalar_one()
            connection.execute(text("SET time_zone = 'Test/Summer'"))
            assert 0 <= database_time(connection) - exact < 30
    finally:
        with engine.begin() as connection:
            for table in ("time_zone", "time_zone_transition_type", "time_zone_transition", "time_zone_name"):
                connection.execute(text(f"DELETE FROM mysql.{table} WHERE Time_zone_id = 9999"))
        engine.dispose()


_SUMMER_TIME_HAS_ENDED = (
    "INSERT INTO mysql.time_zone (Time_zone_id, Use_leap_seconds) VALUES (9999, 'N')",
    "INSERT INTO mysql.time_zone_name (Name, Time_zone_id) VALUES ('Test/Summer', 9999)",
    "INSERT INTO mysql.time_zone_transition_type VALUES (9999, 0, 7200, 1, 'S'), (9999, 1, 3600, 0, 'W')",
    "INSERT INTO mysql.time_zone_transition VALUES (9999, unix_timestamp() - 9999999, 0)",
    "INSERT INTO mysql.time_zone_transition VALUES (9999, unix_timestamp() - 600, 1)",
)


class TestOutbox(OutboxContract):
    @pytest.fixture
    def examples(self) -> int:
        return 10 * soak_seeds()

    @pytest.fixture
    def subject(self, table: TableOutbox) -> Iterator[OutboxUnderTest]:
        """Time passes in the table, because the server has the clock."""

        def empty() -> None:
            with table.engine.begin() as connection:
                connection.execute(delete(table.outbox.table))

        with contextlib.closing(SQLAlchemyOutbox(table.engine, lease=LEASE)) as another:
            yield OutboxUnderTest(table.outbox, table.age, empty, lambda: another, LEASE)
