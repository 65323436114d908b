"""Transactions that complete deliveries, on SQLite files.

Tests with servers are in integration/test_inbox.py.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

from reliable_mq import ConfigurationError, IdempotencyStoreError, UsageError
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.idempotency import CommitStatus, InboxClaim
from reliable_mq.stores import AsyncSQLAlchemyStore, Claim, ClaimStatus, SQLAlchemyStore
from reliable_mq.testing.waiting import until
from tests.core.deliveries import delivery


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """The row of a handler."""

    __tablename__ = "effects"
    id: Mapped[str] = mapped_column(primary_key=True)


INSERT = text("INSERT INTO effects (id) VALUES (:id)")


def held(claim: Claim, transaction: Callable[..., Any]) -> Delivery:
    """Return a delivery that a handler processes, with this claim."""
    made = delivery(message_id=claim.key)
    made.inbox_claim = InboxClaim(claim, transaction)
    return made


def commit_of(one: Delivery) -> CommitStatus:
    assert one.inbox_claim is not None
    return one.inbox_claim.commit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "orders.db"
    connection = sqlite3.connect(made)
    connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE effects (id TEXT NOT NULL UNIQUE)")
    connection.close()
    return made


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{path}")
    yield made
    made.dispose()


@pytest.fixture
def store(engine: Engine) -> SQLAlchemyStore:
    made = SQLAlchemyStore(engine)
    made.create_table()
    return made


def effects(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT id FROM effects ORDER BY id").fetchall()
    connection.close()
    return [row[0] for row in rows]


def on_a_loop(path: Path, scenario: Callable[[AsyncSQLAlchemyStore, AsyncEngine], Any], **options: Any) -> None:
    async def run() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **options)
        store = AsyncSQLAlchemyStore(engine)
        await store.create_table()
        await scenario(store, engine)
        await engine.dispose()

    asyncio.run(run())


def test_a_transaction_is_committed_with_the_record_and_says_so(store: SQLAlchemyStore, path: Path) -> None:
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    with one.transaction() as session:
        session.execute(INSERT, {"id": "a"})
        assert commit_of(one) is CommitStatus.NONE
    assert commit_of(one) is CommitStatus.DONE
    assert effects(path) == ["a"]
    assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.DONE


def test_an_error_in_a_transaction_is_the_databases_own(store: SQLAlchemyStore, path: Path) -> None:
    """Nothing is committed, and the claim is unchanged."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    with pytest.raises(IntegrityError), one.transaction() as session:
        session.execute(INSERT, [{"id": "a"}, {"id": "a"}])
    assert commit_of(one) is CommitStatus.NONE
    assert effects(path) == []
    assert store.release_many([claim_of(one)], failed=True) == [True]


class ReadOnlyError(sqlite3.OperationalError):
    """An error of PostgreSQL after its server has become a replica."""

    sqlstate = "25006"


def refuse_effects(engine: Engine, error: type[sqlite3.Error]) -> list[object]:
    """Let the engine's statements that insert effects fail; return its new connections."""
    opened: list[object] = []

    def execute(_cursor: object, statement: str, *_: object) -> None:
        if "effects" in statement:
            raise error("cannot execute INSERT in a read-only transaction")

    event.listen(engine, "do_execute", execute)
    event.listen(engine, "connect", lambda connection, _: opened.append(connection))
    return opened


@pytest.mark.parametrize("error", [ReadOnlyError, sqlite3.OperationalError])
@pytest.mark.parametrize("by", ["statement", "savepoint", "flush"])
def test_a_handlers_connection_to_a_read_only_server_is_dropped(
    store: SQLAlchemyStore, engine: Engine, by: str, error: type[sqlite3.Error]
) -> None:
    """A new one may reach the primary. Those that failed for other reasons stay."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    opened = refuse_effects(engine, error)

    def handle() -> None:
        with one.transaction() as session:
            if by == "flush":
                session.add(Effect(id="a"))
            elif by == "savepoint":
                with session.begin_nested():
                    session.execute(INSERT, {"id": "a"})
            else:
                session.execute(INSERT, {"id": "a"})

    with pytest.raises(OperationalError):
        handle()
    assert store.complete_many([claim_of(one)]) == [True]
    assert len(opened) == (error is ReadOnlyError)


@pytest.mark.parametrize("error", [ReadOnlyError, sqlite3.OperationalError])
@pytest.mark.parametrize("by", ["statement", "flush"])
def test_on_a_loop_a_connection_to_a_read_only_server_is_dropped(
    path: Path, by: str, error: type[sqlite3.Error]
) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        one = held((await store.claim_many(["a"], 60.0))[0], store.transaction)
        opened = refuse_effects(engine.sync_engine, error)

        async def handle() -> None:
            async with one.transaction() as session:
                if by == "flush":
                    session.add(Effect(id="a"))
                else:
                    await session.execute(INSERT, {"id": "a"})

        with pytest.raises(OperationalError):
            await handle()
        assert await store.complete_many([claim_of(one)]) == [True]
        assert len(opened) == (error is ReadOnlyError)

    on_a_loop(path, scenario)


def claim_of(one: Delivery) -> Claim:
    assert one.inbox_claim is not None
    return one.inbox_claim.claim


def lose_the_answer_to_a_commit(engine: Engine) -> None:
    """Let the next commit of the engine take effect and raise an error."""
    commit = engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        engine.dialect.do_commit = commit  # type: ignore[method-assign]
        commit(connection)
        raise sqlite3.OperationalError("the answer is lost")

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]


@pytest.mark.parametrize("own", [False, True], ids=["transaction", "inbox"])
def test_a_retry_after_a_lost_commit_commits_nothing(
    store: SQLAlchemyStore, engine: Engine, path: Path, own: bool
) -> None:
    """The handler retries the block, whose effect is already committed."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)

    def write() -> None:
        if own:
            with engine.begin() as connection:
                connection.execute(text("INSERT INTO effects (id) VALUES ('a' || random())"))
                store.inbox(connection, one)
        else:
            with one.transaction() as session:
                session.execute(text("INSERT INTO effects (id) VALUES ('a' || random())"))

    lose_the_answer_to_a_commit(engine)
    with pytest.raises(OperationalError, match="the answer is lost"):
        write()
    for _ in range(2):
        with pytest.raises(IdempotencyStoreError, match="earlier transaction of this handler may be committed"):
            write()
    assert commit_of(one) is CommitStatus.UNKNOWN
    assert len(effects(path)) == 1
    assert store.release_many([claim_of(one)], failed=True) == [False]
    assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.DONE


def test_on_a_loop_a_retry_after_a_lost_commit_commits_nothing(path: Path) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        async def write() -> None:
            async with one.transaction() as session:
                await session.execute(text("INSERT INTO effects (id) VALUES ('a' || random())"))

        one = held((await store.claim_many(["a"], 60.0))[0], store.transaction)
        lose_the_answer_to_a_commit(engine.sync_engine)
        with pytest.raises(OperationalError, match="the answer is lost"):
            await write()
        with pytest.raises(IdempotencyStoreError, match="earlier transaction of this handler may be committed"):
            await write()
        assert len(effects(path)) == 1

    on_a_loop(path, scenario)


def test_a_retry_after_a_commit_that_failed_commits(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    """Nothing was committed, so the claim is unchanged."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    commit = engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        engine.dialect.do_commit = commit  # type: ignore[method-assign]
        connection.rollback()
        raise sqlite3.OperationalError("a conflict")

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]
    with pytest.raises(OperationalError, match="a conflict"), one.transaction() as session:
        session.execute(INSERT, {"id": "a"})
    assert commit_of(one) is CommitStatus.UNKNOWN
    with one.transaction() as session:
        session.execute(INSERT, {"id": "a"})
    assert commit_of(one) is CommitStatus.DONE
    assert effects(path) == ["a"]


def test_a_second_block_after_a_commit_is_committed_too(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    """It is refused only after a commit with a lost answer, which it might repeat."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    for number in range(2):
        with one.transaction() as session:
            session.execute(INSERT, {"id": f"a{number}"})
    assert commit_of(one) is CommitStatus.DONE
    lose_the_answer_to_a_commit(engine)
    with pytest.raises(OperationalError, match="the answer is lost"), one.transaction() as session:
        session.execute(INSERT, {"id": "a2"})
    with pytest.raises(IdempotencyStoreError, match="may be committed"), one.transaction() as session:
        session.execute(INSERT, {"id": "a3"})
    assert effects(path) == ["a0", "a1", "a2"]


def test_a_transaction_may_take_the_record_in_twice(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    one, other = (held(claim, store.transaction) for claim in store.claim_many(["a", "b"], 60.0))
    with one.transaction() as session:
        session.execute(INSERT, {"id": "a"})
        store.inbox(session, one)
    assert commit_of(one) is CommitStatus.DONE
    with engine.begin() as connection:
        connection.execute(INSERT, {"id": "b"})
        store.inbox(connection, other)
        store.inbox(connection, one, other)
    assert effects(path) == ["a", "b"]


def test_an_inbox_refuses_a_session_of_the_other_api(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    async def scenario(other: AsyncSQLAlchemyStore, asynchronous: AsyncEngine) -> None:
        one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
        async with AsyncSession(asynchronous) as session:
            with pytest.raises(ConfigurationError, match="session must be a Session or a Connection, not AsyncSession"):
                store.inbox(session, one)  # type: ignore[arg-type]
        with Session(engine) as plain, pytest.raises(ConfigurationError, match="AsyncConnection, not Session"):
            await other.inbox(plain, one)  # type: ignore[arg-type]

    on_a_loop(path, scenario)


@pytest.mark.parametrize("ends", [Session.commit, Session.rollback])
def test_a_handler_that_ends_the_transaction_itself_is_told(
    store: SQLAlchemyStore, path: Path, ends: Callable[[Session], None]
) -> None:
    """Otherwise the inbox record would not be part of the transaction."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    with pytest.raises(UsageError, match="leave the commit"), one.transaction() as session:
        ends(session)
    assert store.claim_many(["a"], 60.0)[0].status is ClaimStatus.IN_PROGRESS

    async def scenario(store: AsyncSQLAlchemyStore, _engine: AsyncEngine) -> None:
        one = held((await store.claim_many(["b"], 60.0))[0], store.transaction)
        with pytest.raises(UsageError, match="leave the commit"):
            async with one.transaction() as session:
                await (session.commit() if ends is Session.commit else session.rollback())
        assert (await store.claim_many(["b"], 60.0))[0].status is ClaimStatus.IN_PROGRESS

    on_a_loop(path, scenario)


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://db/orders", "mysql+pymysql://db/orders", "sqlite:////x/orders.db"]
)
def test_an_engine_that_commits_each_statement_is_refused(url: str) -> None:
    """This holds for every way to set it, and for asyncio engines."""
    for engine in (
        create_engine(url, isolation_level="AUTOCOMMIT"),
        create_engine(url, execution_options={"isolation_level": "AUTOCOMMIT"}),
        create_engine(url).execution_options(isolation_level="AUTOCOMMIT"),
    ):
        with pytest.raises(ConfigurationError, match="isolation_level"):
            SQLAlchemyStore(engine)
    SQLAlchemyStore(create_engine(url, isolation_level="SERIALIZABLE"))
    with pytest.raises(ConfigurationError, match="isolation_level"):
        AsyncSQLAlchemyStore(create_async_engine("postgresql+psycopg://db/orders", isolation_level="AUTOCOMMIT"))


def test_an_engine_whose_transactions_share_a_connection_fails() -> None:
    """A claim would commit what a handler has written so far."""
    for pool in (StaticPool, SingletonThreadPool):
        with pytest.raises(ConfigurationError, match=f"{pool.__name__}, which shares a connection"):
            SQLAlchemyStore(create_engine("mysql+pymysql://db/orders", poolclass=pool))
    with pytest.raises(ConfigurationError, match="StaticPool, which shares a connection"):
        AsyncSQLAlchemyStore(create_async_engine("postgresql+psycopg://db/orders", poolclass=StaticPool))


def test_a_session_that_commits_each_statement_is_refused(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    """The error is raised before the handler writes anything.

    It covers the user's `sessionmaker` and a connection for `inbox`.
    """
    each = engine.execution_options(isolation_level="AUTOCOMMIT")
    by_driver = create_engine(f"sqlite:///{path}", connect_args={"isolation_level": None})
    for number, other in enumerate((each, by_driver)):
        mine = SQLAlchemyStore(engine, session=sessionmaker(other))
        one = held(store.claim_many([f"a{number}"], 60.0)[0], mine.transaction)
        with pytest.raises(ConfigurationError, match="commits every statement"), one.transaction():
            raise AssertionError("the handler was let in")
        with other.connect() as connection, pytest.raises(ConfigurationError, match="commits every statement"):
            store.inbox(connection, one)
        assert store.claim_many([f"a{number}"], 60.0)[0].status is ClaimStatus.IN_PROGRESS
    by_driver.dispose()


def test_an_asyncio_session_in_autocommit_mode_is_refused(path: Path) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        each = engine.execution_options(isolation_level="AUTOCOMMIT")
        mine = AsyncSQLAlchemyStore(engine, session=async_sessionmaker(each))
        one = held((await store.claim_many(["a"], 60.0))[0], mine.transaction)
        with pytest.raises(ConfigurationError, match="commits every statement"):
            async with one.transaction():
                raise AssertionError("the handler was let in")
        async with AsyncSession(each) as session:
            with pytest.raises(ConfigurationError, match="commits every statement"):
                await store.inbox(session, one)

    on_a_loop(path, scenario)


def begin_as_sqlalchemy_says(engine: Engine) -> None:
    """Begin transactions explicitly, as SQLAlchemy's documentation recommends.

    Transactions of SQLite then behave like those of other databases.
    """

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


def test_the_inbox_works_with_transactions_begun_by_an_event(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    begin_as_sqlalchemy_says(engine)
    store = SQLAlchemyStore(engine)
    store.create_table()
    one, other = (held(claim, store.transaction) for claim in store.claim_many(["a", "b"], 60.0))
    with one.transaction() as session:
        session.execute(INSERT, {"id": "a"})
    with engine.begin() as connection:
        connection.execute(INSERT, {"id": "b"})
        store.inbox(connection, other)
    assert effects(path) == ["a", "b"]
    engine.dispose()


def test_the_async_inbox_works_with_transactions_begun_by_events(path: Path) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        begin_as_sqlalchemy_says(engine.sync_engine)
        await engine.dispose()  # the earlier connections
        one = held((await store.claim_many(["a"], 60.0))[0], store.transaction)
        async with one.transaction() as session:
            await session.execute(INSERT, {"id": "a"})
        assert effects(path) == ["a"]

    on_a_loop(path, scenario)


def test_a_transaction_has_its_lock_from_the_beginning(store: SQLAlchemyStore, path: Path) -> None:
    """SQLite refuses a write after a read if another connection wrote in between."""
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)
    with one.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM effects")).scalar_one() == 0
        other = sqlite3.connect(path, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO effects VALUES ('other')")
        other.close()
        session.execute(INSERT, {"id": "a"})
    assert effects(path) == ["a"]


def test_any_number_may_create_the_table_at_once(tmp_path: Path) -> None:
    """All processes of a fleet may start at the same time."""
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        engine = create_engine(url)
        barrier.wait(10)
        try:
            SQLAlchemyStore(engine).create_table()
        except BaseException as error:
            errors.append(error)
        engine.dispose()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def transactions_of(engine: Engine) -> list[object]:
    """Return a list to which the transactions of an engine are added."""
    transactions: list[object] = []
    event.listen(engine, "begin", transactions.append)
    return transactions


def test_a_table_that_cannot_be_created_is_an_error_at_once(store: SQLAlchemyStore, engine: Engine, path: Path) -> None:
    """A retry would fail in the same way."""
    store._sql.ddl = ("CREATE TABLE effects (id TEXT)",)
    transactions = transactions_of(engine)
    with pytest.raises(OperationalError, match="already exists"):
        store.create_table()
    assert len(transactions) == 1

    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        store._sql.ddl = ("CREATE TABLE effects (id TEXT)",)
        transactions = transactions_of(engine.sync_engine)
        with pytest.raises(OperationalError, match="already exists"):
            await store.create_table()
        assert len(transactions) == 1

    on_a_loop(path, scenario)


def test_creating_a_table_in_a_read_only_file_is_tried_once(path: Path) -> None:
    engine = create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    transactions = transactions_of(engine)
    with pytest.raises(OperationalError, match="readonly"):
        SQLAlchemyStore(engine).create_table()
    assert len(transactions) == 1
    engine.dispose()


def test_creating_a_table_waits_for_others_that_write(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 0.01})
    transactions = transactions_of(engine)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OperationalError, match="locked"):
        SQLAlchemyStore(engine).create_table()
    assert len(transactions) == 10
    event.listen(engine, "begin", lambda _: other.in_transaction and other.rollback())
    SQLAlchemyStore(engine).create_table()
    other.close()
    engine.dispose()


def test_a_delivery_taken_over_is_not_committed_on_a_loop(path: Path) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        one = held((await store.claim_many(["a"], 1e-6))[0], store.transaction)
        [other] = await store.claim_many(["a"], 60.0)
        assert other.status is ClaimStatus.NEW
        with pytest.raises(IdempotencyStoreError, match="taken over"):
            async with one.transaction() as session:
                await session.execute(INSERT, {"id": "late"})
        assert commit_of(one) is CommitStatus.NONE
        async with AsyncSession(engine) as session:
            await session.execute(INSERT, {"id": "late"})
            with pytest.raises(IdempotencyStoreError, match="taken over"):
                await store.inbox(session, one)
        assert effects(path) == []

    on_a_loop(path, scenario)


def test_on_a_loop_a_batch_is_one_transaction_of_user_sessions(path: Path) -> None:
    class Mine(AsyncSession):
        pass

    async def fail_midway(session: AsyncSession) -> None:
        assert isinstance(session, Mine)
        await session.execute(INSERT, {"id": "a"})
        raise ValueError("midway")

    async def scenario(_store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        store = AsyncSQLAlchemyStore(engine, session=async_sessionmaker(engine, class_=Mine))
        batch = [held(claim, store.transaction) for claim in await store.claim_many(["a", "b", "c"], 60.0)]
        with pytest.raises(ValueError, match="midway"):
            async with store.transaction(*batch) as session:
                await fail_midway(session)
        assert effects(path) == []
        assert {claim.status for claim in await store.claim_many(["a", "b", "c"], 60.0)} == {ClaimStatus.IN_PROGRESS}
        async with store.transaction(*batch) as session:
            for one in batch:
                await session.execute(INSERT, {"id": one.message_id})
        assert {commit_of(one) for one in batch} == {CommitStatus.DONE}
        assert effects(path) == ["a", "b", "c"]
        assert {claim.status for claim in await store.claim_many(["a", "b", "c"], 60.0)} == {ClaimStatus.DONE}

    on_a_loop(path, scenario)


def test_on_a_loop_one_stale_delivery_rolls_back_its_batch(path: Path) -> None:
    async def scenario(store: AsyncSQLAlchemyStore, _engine: AsyncEngine) -> None:
        [mine] = await store.claim_many(["a"], 60.0)
        [late] = await store.claim_many(["b"], 1e-6)
        await store.claim_many(["b"], 60.0)
        batch = [held(mine, store.transaction), held(late, store.transaction)]
        with pytest.raises(IdempotencyStoreError, match="taken over b,"):
            async with store.transaction(*batch) as session:
                await session.execute(INSERT, {"id": "a"})
        assert effects(path) == []
        assert {commit_of(one) for one in batch} == {CommitStatus.NONE}
        assert (await store.claim_many(["a"], 60.0))[0].status is ClaimStatus.IN_PROGRESS

    on_a_loop(path, scenario)


def test_on_a_loop_the_inbox_record_joins_a_session_of_the_user(path: Path) -> None:
    """The store does not see the commit: if the handler raises, the consumer asks."""

    async def scenario(store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        one, other = (held(claim, store.transaction) for claim in await store.claim_many(["a", "b"], 60.0))
        async with AsyncSession(engine) as session:
            await session.execute(INSERT, {"id": "a"})
            await store.inbox(session, one)
            await session.commit()
        async with AsyncSession(engine) as session:
            await session.execute(INSERT, {"id": "b"})
            await store.inbox(session, other)
        assert commit_of(one) is commit_of(other) is CommitStatus.UNKNOWN
        assert effects(path) == ["a"]
        assert await store.release_many([claim_of(one), claim_of(other)], failed=True) == [False, True]

    on_a_loop(path, scenario)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_on_a_loop_the_inbox_leaves_no_statement_running(path: Path, reason: str) -> None:
    """The user rolls back on the same connection, which a driver refuses during a statement."""

    async def scenario(_store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        class Busy(AsyncConnection):
            async def run_sync(self, *_args: Any, **_options: Any) -> Any:
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)  # a driver learns of the cancellation in the next turn of the loop
                    ended.set()

        async def handle() -> None:
            try:
                await store.inbox(Busy(engine), one)
            finally:
                assert ended.is_set()

        store = AsyncSQLAlchemyStore(engine, timeout=0.05 if reason == "timeout" else 30)
        one = held(Claim("a", ClaimStatus.NEW), store.transaction)
        running = asyncio.ensure_future(handle())
        await began.wait()
        if reason == "cancelled":
            running.cancel()
        with pytest.raises(asyncio.CancelledError if reason == "cancelled" else IdempotencyStoreError):
            await running
        assert commit_of(one) is CommitStatus.NONE

    on_a_loop(path, scenario)


@pytest.mark.parametrize("moment", ["begun", "committed", "rolled back"])
def test_on_a_loop_a_cancelled_transaction_frees_its_connection(path: Path, moment: str) -> None:
    """SQLite's lock is freed with the connection. Otherwise no one could write."""

    async def scenario(_store: AsyncSQLAlchemyStore, engine: AsyncEngine) -> None:
        calls: list[str] = []

        def call(name: str) -> None:
            calls.append(name)
            if name == moment:
                running.cancel()

        class Mine(AsyncSession):
            async def run_sync(self, *args: Any, **options: Any) -> Any:
                outcome = await super().run_sync(*args, **options)
                call("committed" if calls else "begun")
                return outcome

            async def close(self) -> None:
                call("rolled back")
                await super().close()

        async def handle() -> None:
            async with one.transaction() as session:
                await session.execute(INSERT, {"id": "a"})
                if moment == "rolled back":
                    raise ValueError("no")

        store = AsyncSQLAlchemyStore(engine, session=async_sessionmaker(engine, class_=Mine))
        one = held((await store.claim_many(["a"], 60.0))[0], store.transaction)
        running = asyncio.ensure_future(handle())
        with pytest.raises(asyncio.CancelledError):
            await running
        pool = engine.pool
        assert isinstance(pool, QueuePool)
        await until(lambda: pool.checkedout() == 0, timeout=10)
        assert effects(path) == (["a"] if moment == "committed" else [])

    on_a_loop(path, scenario)
