"""An outbox in a database: messages join a transaction, and relays share rows."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, create_engine, inspect, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from integration.support.databases import APIS, with_driver
from integration.support.processes import run
from integration.support.seeds import soaking
from integration.test_outbox_sqlite import Killed
from reliable_mq import AsyncPublisher, ConfigurationError, Message, OutboxError, Publisher, Queue
from reliable_mq.core.outbox import FORMAT, NewRow, RowOutcome, RowSettlement
from reliable_mq.core.statistics import OutboxStatistics
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.outbox.relay import OutboxWriter
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from integration.support.databases import Database
    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", type="classic", dead_letter=None)
# For tests that take long, and for claims that a contract tests on each database.
ON_POSTGRESQL = pytest.mark.parametrize(
    "database_url",
    ["postgresql", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("sqlite", "mariadb", "mysql"))],
    indirect=True,
)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "mysql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path, database: Callable[[str], Database]) -> str:
    """An empty database of each kind, one after the other."""
    return f"sqlite:///{tmp_path / 'database'}" if request.param == "sqlite" else database(request.param).fresh()


@pytest.fixture
def new_engine(database_url: str) -> Iterator[Callable[[], Engine]]:
    """A function that creates engines for that database.

    They keep their connections, because opening one takes tens of milliseconds. By default SQLite waits 5 s for a lock,
    which a commit on a slow disk may hold for longer.
    """
    engines: list[Engine] = []
    patience = {"timeout": 60} if database_url.startswith("sqlite") else {}

    def new() -> Engine:
        engines.append(create_engine(database_url, connect_args=patience))
        return engines[-1]

    yield new
    for engine in engines:
        engine.dispose()


@pytest.fixture
def engine(new_engine: Callable[[], Engine]) -> Engine:
    """An engine for that database."""
    return new_engine()


@pytest.fixture
def outbox(engine: Engine) -> SQLAlchemyOutbox:
    """An outbox with its table."""
    outbox = SQLAlchemyOutbox(engine, lease=2)
    outbox.create_table()
    return outbox


def store(outbox: SQLAlchemyOutbox, count: int, *, key: str | None = None, first: int = 0) -> list[str]:
    """Store messages whose bodies are numbers; return their ids."""
    rows = [NewRow(Message(b"%d" % (first + number)), "", "orders", True, key) for number in range(count)]
    outbox.write(rows, [])
    return [row.message.message_id for row in rows]


def test_a_message_is_published_only_if_its_transaction_commits(
    vhost: VirtualHost, engine: Engine, outbox: SQLAlchemyOutbox
) -> None:
    """Commit and rollback apply to the message as to the rest of the transaction."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))
    with Session(engine) as session:
        session.execute(text("INSERT INTO orders VALUES (1)"))
        outbox.add(session, Message.json({"order": 1}, message_id="first", headers={"a": 1}), routing_key="orders")
        session.commit()
        session.execute(text("INSERT INTO orders VALUES (2)"))
        outbox.add(session, Message(b"never"), routing_key="orders")
        session.flush()
        session.rollback()
    with engine.begin() as connection:
        outbox.add(connection, Message(b"second"), routing_key="orders")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT number FROM orders")).scalars().all() == [1]
    assert outbox.status().rows == 2
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(20)
        assert outbox.status().rows == 0
    with vhost.connect() as connection:
        method, properties, body = connection.channel().basic_get("orders", auto_ack=True)
        assert (properties.message_id, properties.headers, body) == ("first", {"a": 1}, b'{"order":1}')
        assert method.message_count == 1
    assert [body for _, body in vhost.bodies("orders")] == [b"second"]


@pytest.mark.parametrize(
    ("database_url", "driver"),
    [
        ("sqlite", "aiosqlite"),
        ("postgresql", "psycopg_async"),
        ("postgresql", "asyncpg"),
        ("mariadb", "asyncmy"),
        ("mysql", "asyncmy"),
    ],
    indirect=["database_url"],
)
def test_an_asyncio_session_adds_messages_its_engine_relays(
    vhost: VirtualHost, database_url: str, driver: str, outbox: SQLAlchemyOutbox
) -> None:
    """``add`` works as before; the relay uses its own connections and leaves none."""

    async def main() -> None:
        engine = create_async_engine(with_driver(database_url, driver))
        mine = SQLAlchemyOutbox(engine)
        async with AsyncSession(engine) as session:
            mine.add(session, Message(b"1"), routing_key="orders")
            await session.commit()
            mine.add(session, Message(b"never"), routing_key="orders")
            await session.rollback()
        async with AsyncPublisher(vhost.url, topology=[ORDERS], outbox=mine) as publisher:
            receipt = await publisher.publish(Message(b"2"), routing_key="orders")
            assert receipt.status == "stored"
            await publisher.flush(20)
        await engine.dispose()

    asyncio.run(main())
    assert [body for _, body in vhost.bodies("orders")] == [b"1", b"2"]
    assert outbox.status().rows == 0


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_a_connection_goes_back_to_its_pool_as_it_came(
    vhost: VirtualHost, database_url: str, outbox: SQLAlchemyOutbox
) -> None:
    """A relay reads at another isolation level than the engine's."""
    engine = create_engine(database_url, pool_size=1, max_overflow=0)
    with Publisher(vhost.url, topology=[ORDERS], outbox=SQLAlchemyOutbox(engine)) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        publisher.flush(20)
    assert outbox.status().rows == 0
    with engine.connect() as connection:
        assert connection.get_isolation_level() == "REPEATABLE READ"
    engine.dispose()


@pytest.mark.parametrize("database_url", ["mariadb", "mysql"], indirect=True)
def test_a_message_above_max_allowed_packet_fails_alone(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """Messages submitted at the same time are stored."""
    with engine.connect() as connection:
        limit = connection.execute(text("SELECT @@max_allowed_packet")).scalar_one()
    bodies = [b"before", bytes(limit), b"after"]
    stored: list[int] = []
    refused: list[int] = []
    writer: OutboxWriter[int] = OutboxWriter(
        outbox,
        name="writer",
        on_stored=lambda owners, error: (stored if error is None else refused).extend(owners),
        on_settled=lambda _: None,
        statistics=OutboxStatistics(),
    )
    for number, body in enumerate(bodies):
        writer.store(number, NewRow(Message(body), "", "orders", True, None))
    writer.start()
    writer.stop()
    assert writer.join(60)
    assert (stored, refused) == ([0, 2], [1])
    assert outbox.status().rows == 2


@ON_POSTGRESQL
def test_relays_share_the_rows_and_none_is_published_twice(
    vhost: VirtualHost,
    new_engine: Callable[[], Engine],
    outbox: SQLAlchemyOutbox,
    fault_proxy: FaultProxyFactory,
) -> None:
    """Three relays empty a table; each row goes to one, and keys keep their order."""
    proxy = fault_proxy(vhost.url)
    proxy.hold_confirms()  # otherwise the first may finish before the others start
    store(outbox, 400)
    for key in ("a", "b", "c"):
        store(outbox, 20, key=key, first=10_000)
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(
                Publisher(
                    proxy.url,
                    topology=[ORDERS],
                    outbox=SQLAlchemyOutbox(new_engine()),
                    max_outstanding=50,
                    confirm_timeout=150,  # a reconnect would publish rows again
                )
            )
            for _ in range(3)
        ]
        proxy.wait_for(lambda: proxy.seen("basic.publish") > 50, timeout=100)  # more than one may publish
        proxy.release_confirms()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda publisher: publisher.flush(60), publishers))
        shares = [publisher.statistics.confirmed for publisher in publishers]
    assert sum(shares) == 460
    assert sum(share > 0 for share in shares) >= 2, shares
    found = vhost.bodies("orders")
    assert len({message_id for message_id, _ in found}) == len(found) == 460


@pytest.mark.soak
@ON_POSTGRESQL
def test_rows_of_a_key_are_published_in_order_by_several_relays(
    vhost: VirtualHost, new_engine: Callable[[], Engine], outbox: SQLAlchemyOutbox
) -> None:
    """Rows are added while three relays publish; no row of a key overtakes another."""
    count = 400 if soaking() else 100  # each row of a key waits for the one before, with a query each
    with ExitStack() as stack:
        for _ in range(3):
            relayed = SQLAlchemyOutbox(new_engine(), poll_interval=0.01)
            stack.enter_context(Publisher(vhost.url, topology=[ORDERS], outbox=relayed))
        for first in range(0, count, 10):
            store(outbox, 10, key="key", first=first)
        wait_until(lambda: outbox.status().rows == 0, timeout=60, what="an empty outbox")
    assert [int(body) for _, body in vhost.bodies("orders")] == list(range(count))


@ON_POSTGRESQL
def test_f33_a_relay_killed_at_any_line_loses_no_row(
    vhost: VirtualHost, database_url: str, outbox: SQLAlchemyOutbox, checker: Audit, rng: random.Random
) -> None:
    """Relays are killed at seeded lines.

    When their leases end, others publish their rows in order.
    """
    count = 20 if soaking() else 8
    in_order: list[str] = []

    def lines_of(said: list[str]) -> int:
        return int(said[0].split()[1])

    def attempt() -> None:
        free, keyed = store(outbox, count), store(outbox, count, key="key")
        in_order.extend(keyed)
        for message_id in (*free, *keyed):
            checker.attempted(message_id)
            checker.confirmed(message_id)

    def relay(kill_at: int) -> tuple[int, list[str]]:
        done = run("integration.programs.relaying", vhost.url, database_url, "1", str(kill_at), timeout=100)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout.decode().splitlines()

    with vhost.connect() as connection:
        connection.channel().queue_declare("orders", durable=True, arguments={"x-queue-type": "classic"})
    attempt()
    died = 0
    total = lines_of(relay(0)[1])
    for _ in range(20 if soaking() else 3):
        attempt()
        status, said = relay(rng.randrange(total // 10, total * 9 // 10))
        died += status != 0
        if status == 0:  # the first relay was slower, and ran more lines while it waited
            total = min(total, lines_of(said))
    assert relay(0)[0] == 0
    assert died > 0
    assert outbox.status().rows == 0
    found = [message_id for message_id, _ in vhost.bodies("orders")]
    assert [message_id for message_id in dict.fromkeys(found) if message_id in set(in_order)] == in_order
    checker.left(found)
    checker.close()


@pytest.mark.parametrize(  # the test above kills a relay of the sync API
    ("database_url", "api", "driver"),
    [pytest.param(*APIS[0], marks=pytest.mark.soak), *APIS[1:]],
    indirect=["database_url"],
)
def test_f33_kills_at_any_line_lose_no_accepted_message(
    vhost: VirtualHost,
    database_url: str,
    api: str,
    driver: str,
    outbox: SQLAlchemyOutbox,
    checker: Audit,
    rng: random.Random,
) -> None:
    """On asyncio the outbox uses an ``AsyncEngine``.

    Rows of a killed process are published when its lease ends.
    """
    killed = Killed(vhost, with_driver(database_url, driver), api, checker)
    killed.run_and_be_killed(8, 25 if soaking() else 3, rng)
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(30)
    assert outbox.status().rows == 0
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed == killed.accepted


@ON_POSTGRESQL
def test_an_unpublishable_row_is_set_aside_for_a_decision(
    vhost: VirtualHost, outbox: SQLAlchemyOutbox, engine: Engine
) -> None:
    """An unroutable row holds its key; retry requeues it, purge frees the key."""
    with Session(engine) as session:
        outbox.add(session, Message(b"0", message_id="a"), routing_key="nowhere", ordering_key="k")
        outbox.add(session, Message(b"1"), routing_key="orders", ordering_key="k")
        outbox.add(session, Message(b"2"), routing_key="orders")
        session.commit()
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(20)
        assert [body for _, body in vhost.bodies("orders")] == [b"2"]
        status = outbox.status()
        assert (status.rows, status.held, status.set_aside) == (1, 1, 1)
        assert outbox.retry() == 1
        wait_until(lambda: outbox.status().set_aside == 1, timeout=20, what="a row set aside again")
        assert outbox.set_aside()[0].attempts == 2
        assert "NO_ROUTE" in outbox.set_aside()[0].reason
        assert outbox.purge(["a", "b"]) == 1
        publisher.flush(20)
    assert [body for _, body in vhost.bodies("orders")] == [b"1"]


@ON_POSTGRESQL
def test_f58_a_row_of_a_newer_format_is_left_for_a_newer_relay(
    vhost: VirtualHost, outbox: SQLAlchemyOutbox, engine: Engine
) -> None:
    """The row is not published or changed, holds its key, and is counted."""
    store(outbox, 2, key="k")
    store(outbox, 1)
    with engine.begin() as connection:
        first = update(outbox.table).where(outbox.table.c.id == 1).values(format=FORMAT + 1)
        connection.execute(first)
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(20)
    assert [body for _, body in vhost.bodies("orders")] == [b"0"]
    status = outbox.status()
    assert (status.rows, status.held, status.unreadable, status.set_aside) == (1, 1, 1, 0)
    assert outbox.retry() == outbox.purge() == 0


def description(engine: Engine, table: str) -> list[str]:
    """Return the database's description of a table, without its name."""
    seen = inspect(engine)
    columns = [{**column, "type": repr(column["type"])} for column in seen.get_columns(table)]
    parts = (*columns, seen.get_pk_constraint(table)["constrained_columns"], *seen.get_indexes(table))
    return [str(part).replace(table, "TABLE") for part in parts]


def test_without_its_table_an_outbox_says_what_to_do(engine: Engine) -> None:
    """The table is created on request, and the error has the statements."""
    outbox = SQLAlchemyOutbox(engine)
    with pytest.raises(OutboxError, match="create_table"):
        outbox.open()
    with engine.begin() as connection:
        for statement in outbox.ddl.split(";"):
            if statement.strip():
                connection.execute(text(statement))
    outbox.open()
    SQLAlchemyOutbox(engine, create=True).open()
    assert outbox.status().rows == 0
    made = SQLAlchemyOutbox(engine, table="made", create=True)
    made.open()
    assert description(engine, "made") == description(engine, outbox.table.name)


@pytest.mark.parametrize("database_url", ["mariadb", "mysql"], indirect=True)
def test_a_table_that_confuses_similar_keys_works_with_a_warning(
    engine: Engine, outbox: SQLAlchemyOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions created such a table.

    The statement in the log alters it; then the keys of its rows are distinct.
    """
    with engine.begin() as connection:
        loose = "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        connection.execute(text(f"ALTER TABLE reliable_mq_outbox CONVERT TO {loose}"))
    store(outbox, 2, key="a")
    store(outbox, 2, key="A", first=2)
    opened = SQLAlchemyOutbox(engine)
    opened.open()
    [said] = [record.getMessage() for record in caplog.records if "ALTER TABLE" in record.getMessage()]
    claims = opened.claims()
    assert [row.message.body for row in claims.take(10).rows] == [b"0", b"1", b"2", b"3"]
    claims.close()
    with engine.begin() as connection:
        connection.execute(text(said[said.index("ALTER TABLE") :]))
    caplog.clear()
    altered = SQLAlchemyOutbox(engine)
    altered.open()
    assert not caplog.records
    claims = altered.claims()
    assert [row.message.body for row in claims.take(10).rows] == [b"0", b"1", b"2", b"3"]
    claims.close()


@pytest.mark.parametrize("database_url", ["mariadb", "mysql"], indirect=True)
def test_rows_hold_any_text_in_a_database_of_latin1(engine: Engine) -> None:
    """latin1 is the default of MariaDB before 11.6.

    An outcome that cannot be written would block all others forever.
    """
    with engine.begin() as connection:
        connection.execute(text("ALTER DATABASE CHARACTER SET latin1"))
    outbox = SQLAlchemyOutbox(engine)
    outbox.create_table()
    outbox.write([NewRow(Message(b"", message_id="заказ"), "обмен", "ключ", True, "клиент")], [])
    store(outbox, 1)
    first, second = outbox.claims().take(10).rows
    assert (first.exchange, first.routing_key) == ("обмен", "ключ")
    outbox.write(
        [],
        [
            RowSettlement(first, RowOutcome.SET_ASIDE, 0.0, "PublishReturned: заказ"),
            RowSettlement(second, RowOutcome.CONFIRMED),
        ],
    )
    assert [(one.message_id, one.reason) for one in outbox.set_aside()] == [("заказ", "PublishReturned: заказ")]
    assert outbox.status().rows == 0


def test_any_number_of_processes_may_make_the_table_at_once(new_engine: Callable[[], Engine]) -> None:
    """A fleet that starts with ``create=True`` does so.

    Each process then finds the table with its index.
    """
    engines = [new_engine() for _ in range(8)]
    for number in range(4 if soaking() else 2):
        begin = Barrier(len(engines))

        def make(engine: Engine, table: str = f"outbox_{number}", begin: Barrier = begin) -> int:
            outbox = SQLAlchemyOutbox(engine, table=table, create=True)
            begin.wait(30)
            outbox.open()
            return outbox.status().rows

        with ThreadPoolExecutor(len(engines)) as pool:
            assert list(pool.map(make, engines)) == [0] * len(engines)
        assert [one["name"] for one in inspect(engines[0]).get_indexes(f"outbox_{number}")] == [
            f"outbox_{number}_in_order"
        ]


@ON_POSTGRESQL
def test_wrong_arguments_are_refused_where_they_are_given(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """The error is not raised later, by the flush or by the relay."""
    with pytest.raises(ConfigurationError, match="engine"):
        SQLAlchemyOutbox("sqlite://")
    for autocommits in (
        engine.execution_options(isolation_level="AUTOCOMMIT"),
        create_engine(engine.url, isolation_level="AUTOCOMMIT"),
    ):
        with pytest.raises(ConfigurationError, match="commits every statement by itself"):
            SQLAlchemyOutbox(autocommits)
    with Session(engine) as session:
        with pytest.raises(ConfigurationError, match="Message"):
            outbox.add(session, b"body", routing_key="orders")
        with pytest.raises(ConfigurationError, match="routing_key"):
            outbox.add(session, Message(b""), routing_key="x" * 256)
        with pytest.raises(ConfigurationError, match="ordering_key"):
            outbox.add(session, Message(b""), routing_key="x", ordering_key="a\0b")
        with pytest.raises(ConfigurationError, match="session"):
            outbox.add(None, Message(b""), routing_key="x")
        session.commit()
    assert outbox.status().rows == 0


@ON_POSTGRESQL
def test_a_message_that_no_row_can_hold_is_refused_alone(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """It is refused before it joins a transaction; this needs no broker."""
    keyed = SQLAlchemyOutbox(engine, ordering_key=lambda message, *_: message.body.decode("utf-8", "surrogateescape"))
    with Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=keyed) as publisher:
        stored = []
        for body in (b"x" * 256, b"a\0b", b"\xff"):
            stored += [publisher.submit(Message(b"1"), routing_key="orders") for _ in range(3)]
            with pytest.raises(ConfigurationError, match="ordering_key must"):
                publisher.submit(Message(body), routing_key="orders")
        assert [confirmation.result(20).status for confirmation in stored] == ["stored"] * 9
    assert outbox.status().rows == 9


def test_a_lost_database_fails_publishes_and_the_relay_recovers(
    vhost: VirtualHost, database: Callable[[str], Database]
) -> None:
    """No stored message is lost, and no call hangs."""
    server = database("postgresql")
    engine = create_engine(server.fresh())
    outbox = SQLAlchemyOutbox(engine, create=True, lease=2)
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.publish(Message(b"before"), routing_key="orders")
        publisher.flush(20)
        server.kill()
        with pytest.raises(OutboxError):
            publisher.publish(Message(b"never"), routing_key="orders", timeout=10)
        server.start()
        wait_until(lambda: _answers(outbox), timeout=30, what="the database")
        publisher.publish(Message(b"after"), routing_key="orders")
        publisher.flush(30)
    engine.dispose()
    assert [body for _, body in vhost.bodies("orders")] == [b"before", b"after"]


def _answers(outbox: SQLAlchemyOutbox) -> bool:
    try:
        outbox.status()
    except OutboxError:
        return False
    return True
