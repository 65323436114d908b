"""The inbox with a hanging server, a lost answer to COMMIT, or a new table."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from integration.support.blocking_consumer import ends_with_its_consumer
from integration.support.consuming import numbered, publish
from integration.support.databases import with_driver
from integration.support.lossy import LossyProxy
from integration.support.seeds import soaking
from reliable_mq import Consumer, IdempotencyStoreError, Queue, RetryPolicy
from reliable_mq.core.idempotency import CommitStatus, InboxClaim
from reliable_mq.stores import AsyncSQLAlchemyStore, ClaimStatus, SQLAlchemyStore
from reliable_mq.testing.waiting import wait_until
from tests.core.deliveries import delivery
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support.databases import Database
    from reliable_mq import Delivery
    from reliable_mq.testing import VirtualHost

ORDERS = Queue("orders")
INSERT = text("INSERT INTO effects (id) VALUES (:id)")
TIMEOUT = 0.5
PATIENT = 30.0  # the timeout of a store while its server answers, however busy the machine is


def prepared(url: str) -> str:
    """Create the tables in a fresh database; return its URL."""
    engine = create_engine(url, poolclass=NullPool)
    SQLAlchemyStore(engine).create_table()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id varchar(100) NOT NULL)"))
    return url


def effects(url: str) -> Counter[str]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return Counter(row[0] for row in connection.execute(text("SELECT id FROM effects")))


@pytest.fixture
def new_store(consumer_api: str) -> Iterator[Callable[..., Any]]:
    """A function that creates the store of the API at a URL."""
    closers: list[Callable[[], object]] = []

    def new(url: str, **options: Any) -> Any:
        if consumer_api == "aio":
            loops = create_async_engine(with_driver(url, "asyncmy") if url.startswith("mysql") else url)
            return ends_with_its_consumer(AsyncSQLAlchemyStore(loops, **options), loops.dispose)
        engine = create_engine(url)
        store = SQLAlchemyStore(engine, **options)
        closers.extend([store.close, engine.dispose])
        return store

    yield new
    for close in closers:
        close()


def writing(api: str, then: Callable[[Delivery], object]) -> Callable[[Delivery], object]:
    """Return a handler that writes an effect and calls `then` in its transaction."""

    def handle(one: Delivery) -> None:
        with one.transaction() as session:
            session.execute(INSERT, {"id": one.message_id})
            then(one)

    async def handle_async(one: Delivery) -> None:
        async with one.transaction() as session:
            await session.execute(INSERT, {"id": one.message_id})
            await asyncio.to_thread(then, one)

    return handle if api == "sync" else handle_async


def test_f42_a_server_hanging_in_a_transaction_blocks_no_handler(
    vhost: VirtualHost,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    consumer_api: str,
    fault_proxy: Any,
) -> None:
    """The handler ends within the timeout, and heartbeats continue.

    Afterwards every effect is there once.
    """
    server = database("postgresql")
    url = prepared(server.fresh())
    inside, frozen = threading.Event(), threading.Event()

    def wait(one: Delivery) -> None:
        if one.body == b"10":
            inside.set()
            assert frozen.wait(30)

    proxy = fault_proxy(vhost.url)
    with Consumer(
        proxy.url,
        ORDERS,
        writing(consumer_api, wait),
        heartbeat=5,  # with a shorter one, the broker would disconnect a process that a busy machine stops for 5 s
        idempotency=new_store(url, timeout=TIMEOUT),
        idempotency_lease=2.0,
        retry=RetryPolicy(5, delays=(0.05,)),
    ) as consumer:
        ids = publish(vhost, "orders", numbered(20))
        assert inside.wait(30)
        server.pause()
        frozen.set()
        begun = time.monotonic()
        wait_until(lambda: consumer.statistics.store_failures >= 1, timeout=30, what="it has failed")
        assert time.monotonic() - begun < 40 * TIMEOUT
        before = proxy.seen("heartbeat", "to_broker")
        proxy.wait_for(lambda: proxy.seen("heartbeat", "to_broker") > before, timeout=30)
        server.unpause()
        # Not a check of acks: a message that waits for its next attempt is acked, too.
        wait_until(lambda: consumer.statistics.handled == 20, timeout=60, what="all handled")
        assert (consumer.reconnects, consumer.statistics.dead_lettered) == (0, 0)
    assert effects(url) == Counter(ids)


def losing_one_commit(armed: threading.Event) -> Callable[[bytes], bool]:
    """Return a test that matches the next ``COMMIT`` once it is armed.

    Its answer is lost.
    """

    def loses(data: bytes) -> bool:
        if armed.is_set() and b"COMMIT" in data:
            armed.clear()
            return True
        return False

    return loses


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_f43_a_commit_whose_answer_is_lost_is_no_attempt(
    vhost: VirtualHost,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    consumer_api: str,
    kind: str,
) -> None:
    """With one attempt per message, none with a committed effect is dead-lettered."""
    server = database(kind)
    direct = prepared(server.fresh())
    armed = threading.Event()

    def arm(one: Delivery) -> None:
        if int(one.body) % 3 == 0:
            armed.set()

    with LossyProxy(server.port, losing_one_commit(armed)) as proxy:
        store = new_store(direct.replace(f":{server.port}/", f":{proxy.port}/"), timeout=PATIENT)
        with Consumer(
            vhost.url, ORDERS, writing(consumer_api, arm), idempotency=store, retry=RetryPolicy(1)
        ) as consumer:
            ids = publish(vhost, "orders", numbered(9))
            wait_until(lambda: consumer.statistics.acked == 9, timeout=60, what="all acked")
            assert (consumer.statistics.failed, consumer.statistics.dead_lettered) == (0, 0)
            assert consumer.statistics.duplicates == proxy.lost == 3
    assert effects(direct) == Counter(ids)


def trying_twice(
    api: str, handle: Callable[[Delivery], Any], refused: list[IdempotencyStoreError]
) -> Callable[[Delivery], object]:
    """Return a handler that calls another one, and again if that raises.

    ``refused`` gets the store's errors of the second call.
    """

    def try_twice(one: Delivery) -> None:
        with contextlib.suppress(Exception):
            return handle(one)
        try:
            return handle(one)
        except IdempotencyStoreError as error:
            refused.append(error)
            raise

    async def try_twice_async(one: Delivery) -> None:
        with contextlib.suppress(Exception):
            return await handle(one)
        try:
            return await handle(one)
        except IdempotencyStoreError as error:
            refused.append(error)
            raise

    return try_twice if api == "sync" else try_twice_async


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_f43_a_retry_in_the_handler_repeats_no_lost_commit(
    vhost: VirtualHost,
    database: Callable[[str], Database],
    new_store: Callable[..., Any],
    consumer_api: str,
    kind: str,
) -> None:
    """The handler repeats each failed transaction with the same delivery."""
    server = database(kind)
    direct = prepared(server.fresh())
    armed = threading.Event()
    refused: list[IdempotencyStoreError] = []
    armed_for: set[bytes] = set()

    def arm(one: Delivery) -> None:
        if int(one.body) % 3 == 0 and one.body not in armed_for:
            armed_for.add(one.body)
            armed.set()

    handler = trying_twice(consumer_api, writing(consumer_api, arm), refused)
    with LossyProxy(server.port, losing_one_commit(armed)) as proxy:
        store = new_store(direct.replace(f":{server.port}/", f":{proxy.port}/"), timeout=PATIENT)
        with Consumer(vhost.url, ORDERS, handler, idempotency=store, retry=RetryPolicy(1)) as consumer:
            ids = publish(vhost, "orders", numbered(9))
            wait_until(lambda: consumer.statistics.acked == 9, timeout=60, what="all acked")
            assert (consumer.statistics.failed, consumer.statistics.dead_lettered) == (0, 0)
            assert proxy.lost == len(refused) == 3
    assert all("may be committed" in str(error) for error in refused)
    assert effects(direct) == Counter(ids)


# -- without a consumer ------------------------------------------------------------------------------------------------


def held(claim: Any, transaction: Any) -> Delivery:
    assert claim.status is ClaimStatus.NEW
    one = delivery(message_id=claim.key)
    one.inbox_claim = InboxClaim(claim, transaction)
    return one


def in_time(begun: float) -> None:
    assert time.monotonic() - begun < TIMEOUT + 20.0  # a frozen server would never answer


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_f42_a_transaction_begins_ends_and_rolls_back_in_time(database: Callable[[str], Database], kind: str) -> None:
    """This includes a user's own transaction that contains the record."""
    server = database(kind)
    engine = create_engine(prepared(server.fresh()))
    store = SQLAlchemyStore(engine, timeout=PATIENT)
    connect(engine)
    keys = ["begin", "end", "roll back", "inbox"]
    begin, end, back, own = (held(claim, store.transaction) for claim in store.claim_many(keys, 2.0))
    engine.dispose()  # otherwise it would begin on an open connection, without a query
    begun = freeze(server, store)
    with pytest.raises(IdempotencyStoreError, match="no answer within"), begin.transaction():
        raise AssertionError("the handler was let in")
    in_time(begun)
    thaw(server, store)
    connect(engine)
    with pytest.raises(IdempotencyStoreError, match="no answer within"), end.transaction() as session:
        begun = write_and_freeze(session, server, store)
    in_time(begun)
    thaw(server, store)
    connect(engine)
    with pytest.raises(KeyError) as caught, back.transaction() as session:
        raise KeyError(write_and_freeze(session, server, store))
    in_time(caught.value.args[0])
    thaw(server, store)
    connect(engine)
    with Session(engine) as session:
        begun = write_and_freeze(session, server, store)
        with pytest.raises(IdempotencyStoreError, match="no answer within"):
            store.inbox(session, own)
        in_time(begun)
        thaw(server, store)
    assert [one.inbox_claim.commit for one in (begin, end, back, own) if one.inbox_claim] == [CommitStatus.NONE] * 4
    wait_until(lambda: all_new(store, keys), timeout=20, what="the leases have ended", interval=0.2)
    assert not effects(engine.url.render_as_string(hide_password=False))
    store.close()
    engine.dispose()


def test_a_transaction_without_a_thread_for_its_end_rolls_back(database: Callable[[str], Database]) -> None:
    """Its connection is closed at once: without that thread, nothing would limit a ROLLBACK."""
    url = prepared(database("postgresql").fresh())
    engine = create_engine(url)
    store = SQLAlchemyStore(engine)
    one = held(store.claim_many(["a"], 60.0)[0], store.transaction)

    def write_and_lose_threads(session: Session) -> None:
        session.execute(INSERT, {"id": "lost"})
        store.close()
        refusing.enter_context(refusing_threads("-late"))

    with (
        contextlib.ExitStack() as refusing,
        pytest.raises(IdempotencyStoreError, match="no thread can be started"),
        one.transaction() as session,
    ):
        write_and_lose_threads(session)
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert not effects(url)
    assert store.claim_many(["b"], 60.0)[0].status is ClaimStatus.NEW
    store.close()
    engine.dispose()


def test_an_inbox_keeps_the_settings_of_its_transaction(database: Callable[[str], Database]) -> None:
    """The store's own calls wait for a lock for less than their timeout."""
    engine = create_engine(prepared(database("postgresql").fresh()))
    store = SQLAlchemyStore(engine)
    [claim] = store.claim_many(["a"], 60.0)
    with engine.begin() as connection:
        store.inbox(connection, held(claim, store.transaction))
        assert connection.scalar(text("SHOW lock_timeout")) == "0"
    store.close()
    engine.dispose()


def connect(engine: Engine) -> None:
    """Put a connection into the pool.

    Opening one takes longer than the timeout on a busy machine.
    """
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))


def freeze(server: Database, store: SQLAlchemyStore | AsyncSQLAlchemyStore) -> float:
    """Freeze the server, shorten the store's timeout, and return the time."""
    server.pause()
    store._timeout = TIMEOUT
    return time.monotonic()


def thaw(server: Database, store: SQLAlchemyStore | AsyncSQLAlchemyStore) -> None:
    server.unpause()
    store._timeout = PATIENT


def write_and_freeze(session: Session, server: Database, store: SQLAlchemyStore) -> float:
    session.execute(INSERT, {"id": "lost"})
    return freeze(server, store)


def all_new(store: SQLAlchemyStore, keys: list[str]) -> bool:
    try:
        return all(claim.status is ClaimStatus.NEW for claim in store.claim_many(keys, 1e-6))
    except IdempotencyStoreError:
        return False


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("postgresql", "psycopg_async"),
        *(
            pytest.param(kind, driver, marks=pytest.mark.soak)
            for kind, driver in [("postgresql", "asyncpg"), ("mariadb", "asyncmy"), ("mysql", "asyncmy")]
        ),
    ],
)
def test_f42_a_loops_transaction_begins_ends_rolls_back_in_time(
    database: Callable[[str], Database], run_async: Any, kind: str, driver: str
) -> None:
    server = database(kind)

    async def scenario() -> None:
        engine = create_async_engine(with_driver(prepared(server.fresh()), driver))
        store = AsyncSQLAlchemyStore(engine, timeout=PATIENT)
        await connect_async(engine)
        claims = await store.claim_many(["begin", "end", "back", "own"], 60.0)
        begin, end, back, own = (held(claim, store.transaction) for claim in claims)
        await engine.dispose()
        begun = freeze(server, store)
        with pytest.raises(IdempotencyStoreError, match="no answer within"):
            async with begin.transaction():
                raise AssertionError("the handler was let in")
        in_time(begun)
        thaw(server, store)
        await connect_async(engine)
        with pytest.raises(IdempotencyStoreError, match="no answer within"):
            async with end.transaction() as session:
                begun = await write_and_freeze_async(session, server, store)
        in_time(begun)
        thaw(server, store)
        await connect_async(engine)
        with pytest.raises(KeyError) as caught:
            async with back.transaction() as session:
                raise KeyError(await write_and_freeze_async(session, server, store))
        in_time(caught.value.args[0])
        thaw(server, store)
        await connect_async(engine)
        with contextlib.suppress(SQLAlchemyError):  # its connection may be closed
            async with AsyncSession(engine) as session:
                begun = await write_and_freeze_async(session, server, store)
                with pytest.raises(IdempotencyStoreError, match="no answer within"):
                    await store.inbox(session, own)
                in_time(begun)
                thaw(server, store)
        assert [one.inbox_claim.commit for one in (begin, end, back, own) if one.inbox_claim] == [CommitStatus.NONE] * 4
        while store._given_up:
            await asyncio.wait(store._given_up, timeout=20)
        await engine.dispose()

    run_async(scenario())


async def connect_async(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        await connection.execute(text("SELECT 1"))


async def write_and_freeze_async(session: AsyncSession, server: Database, store: AsyncSQLAlchemyStore) -> float:
    await session.execute(INSERT, {"id": "lost"})
    return freeze(server, store)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_a_fleet_that_starts_creates_its_table_at_once(database: Callable[[str], Database], kind: str) -> None:
    """Eight processes, or tasks of asyncio, create the table without an error."""
    server = database(kind)
    for _ in range(3 if soaking() else 1):
        url = server.fresh()
        errors: list[BaseException] = []
        barrier = threading.Barrier(8)

        def start(url: str = url, barrier: threading.Barrier = barrier) -> None:
            engine = create_engine(url, poolclass=NullPool)
            with engine.connect():
                barrier.wait(60)
            try:
                SQLAlchemyStore(engine).create_table()
            except BaseException as error:
                errors.append(error)  # noqa: B023

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert errors == []
        SQLAlchemyStore(create_engine(url, poolclass=NullPool)).claim_many(["a"], 1.0)


@pytest.mark.parametrize(
    ("kind", "driver"),
    [("postgresql", "psycopg_async"), ("postgresql", "asyncpg"), ("mariadb", "asyncmy"), ("mysql", "asyncmy")],
)
def test_a_fleet_on_asyncio_may_create_its_table_all_at_once(
    database: Callable[[str], Database], kind: str, driver: str
) -> None:
    async def start() -> None:
        url = with_driver(database(kind).fresh(), driver)
        stores = [AsyncSQLAlchemyStore(create_async_engine(url, poolclass=NullPool)) for _ in range(8)]
        await asyncio.gather(*(store.create_table() for store in stores))

    for _ in range(3 if soaking() else 1):
        asyncio.run(start())
