"""The inbox: a handler's writes and the record of the delivery in one transaction."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from integration.support.consuming import numbered, publish
from integration.support.databases import with_driver
from reliable_mq import AsyncConsumer, Consumer, IdempotencyStoreError, Publisher, Queue, RetryPolicy
from reliable_mq.stores import AsyncSQLAlchemyStore, ClaimStatus, SQLAlchemyStore
from reliable_mq.testing.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from integration.support.databases import Database
    from reliable_mq import Delivery
    from reliable_mq.testing import VirtualHost

ORDERS = Queue("orders")
INSERT = text("INSERT INTO effects (id) VALUES (:id)")
QUICK = RetryPolicy(5, delays=(0.05,))
PATIENCE = 120.0  # seconds for a database, on a slow disk, too: a late answer would be a failure of a handler


class Inbox:
    """A store, with a table of effects in its database."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        self.store = SQLAlchemyStore(self.engine, timeout=PATIENCE)
        self.store.create_table()
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (id varchar(100) NOT NULL)"))

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(row[0] for row in connection.execute(text("SELECT id FROM effects")))

    def close(self) -> None:
        self.store.close()
        self.engine.dispose()


def sqlite_in(directory: Path) -> str:
    return f"sqlite:///{directory / 'orders.db'}?timeout={PATIENCE}"


@pytest.fixture(params=["postgresql", "mariadb", "mysql", "sqlite"])
def inbox(request: pytest.FixtureRequest, database: Callable[[str], Database], tmp_path: Path) -> Iterator[Inbox]:
    made = Inbox(sqlite_in(tmp_path) if request.param == "sqlite" else database(request.param).fresh())
    yield made
    made.close()


def once(inbox: Inbox) -> dict[str, Any]:
    """Return options of a consumer whose keys begin with ``test|orders|``."""
    return {"idempotency": inbox.store, "idempotency_namespace": "test"}


def test_effects_are_committed_with_their_records_or_not_at_all(vhost: VirtualHost, inbox: Inbox) -> None:
    """A failed handler has written nothing; a successful one has written once."""
    attempts: dict[str, int] = {}

    def handle(delivery: Delivery) -> None:
        key = str(delivery.message_id)
        attempts[key] = attempts.get(key, 0) + 1
        with delivery.transaction() as session:
            session.execute(INSERT, {"id": key})
            if attempts[key] == 1:
                raise ValueError("no")

    with Consumer(vhost.url, ORDERS, handle, **once(inbox), retry=QUICK) as consumer:
        ids = publish(vhost, "orders", numbered(10))
        wait_until(lambda: consumer.statistics.handled == 10, timeout=PATIENCE, what="handled")
        assert consumer.statistics.failed == 10
    assert inbox.effects() == sorted(ids)
    claims = inbox.store.claim_many([f"test|orders|{key}" for key in ids], 1.0)
    assert {claim.status for claim in claims} == {ClaimStatus.DONE}


def test_a_handler_that_outlived_its_lease_commits_nothing(vhost: VirtualHost, inbox: Inbox) -> None:
    """Another holder has taken the message over, and has the only effect."""
    taken_over = threading.Event()
    calls: list[Any] = []
    refusals: list[str] = []

    def handle(delivery: Delivery) -> None:
        calls.append(delivery.message_id)
        if len(calls) == 1:
            [other] = inbox.store.claim_many([f"test|orders|{delivery.message_id}"], 60.0)
            assert other.status is ClaimStatus.NEW, "its lease has ended"
            with delivery.transaction() as session:
                session.execute(INSERT, {"id": "late"})
            raise AssertionError("it was committed")
        with delivery.transaction() as session:
            session.execute(INSERT, {"id": "in time"})
        taken_over.set()

    def handle_and_release(delivery: Delivery) -> None:
        try:
            handle(delivery)
        except IdempotencyStoreError as error:
            refusals.append(str(error))
            with inbox.engine.begin() as connection:  # as if the other holder died
                connection.execute(text("UPDATE reliable_mq_claims SET lease_ends = 0"))
            raise

    with Consumer(
        vhost.url,
        ORDERS,
        handle_and_release,
        idempotency=inbox.store,
        idempotency_namespace="test",
        retry=QUICK,
        idempotency_lease=1e-6,
    ) as consumer:
        publish(vhost, "orders", numbered(1))
        wait_until(lambda: consumer.statistics.handled == 1, timeout=PATIENCE, what="handled")
    assert taken_over.is_set()
    assert ["taken over" in refusal for refusal in refusals] == [True]
    assert inbox.effects() == ["in time"]


def test_a_batch_is_one_transaction(vhost: VirtualHost, inbox: Inbox) -> None:
    """The first attempt fails in the middle: nothing is written, nothing is done."""
    left: list[tuple[int, set[ClaimStatus]]] = []

    def handle(batch: list[Delivery]) -> None:
        if not left:
            with pytest.raises(ValueError, match="midway"), inbox.store.transaction(*batch) as session:
                write(session, batch[:-1])
            keys = [f"test|orders|{delivery.message_id}" for delivery in batch]
            claims = inbox.store.claim_many(keys, 1.0)
            left.append((len(inbox.effects()), {claim.status for claim in claims}))
        with inbox.store.transaction(*batch) as session:
            for delivery in batch:
                session.execute(INSERT, {"id": delivery.message_id})

    def write(session: Session, some: list[Delivery]) -> None:
        for delivery in some:
            session.execute(INSERT, {"id": delivery.message_id})
        raise ValueError("midway")

    with Consumer(vhost.url, ORDERS, handle, **once(inbox), batch_size=5, batch_wait=0.2) as consumer:
        ids = publish(vhost, "orders", numbered(20))
        wait_until(lambda: consumer.statistics.handled == 20, timeout=PATIENCE, what="handled")
    assert left == [(0, {ClaimStatus.IN_PROGRESS})]
    assert inbox.effects() == sorted(ids)
    claims = inbox.store.claim_many([f"test|orders|{key}" for key in ids], 1.0)
    assert {claim.status for claim in claims} == {ClaimStatus.DONE}


def test_a_transaction_of_the_users_own_takes_the_record_in(vhost: VirtualHost, inbox: Inbox) -> None:
    """It is a session or a connection; after its rollback, the claim is free again."""
    sessions = sessionmaker(inbox.engine)
    calls: list[Any] = []

    def handle(delivery: Delivery) -> None:
        calls.append(delivery.message_id)
        if len(calls) % 2:
            with sessions() as session:
                session.execute(INSERT, {"id": delivery.message_id})
                inbox.store.inbox(session, delivery)
                if len(calls) == 1:
                    session.rollback()
                    raise ValueError("no")
                session.commit()
        else:
            with inbox.engine.begin() as connection:
                connection.execute(INSERT, {"id": delivery.message_id})
                inbox.store.inbox(connection, delivery)

    with Consumer(vhost.url, ORDERS, handle, **once(inbox), retry=QUICK) as consumer:
        ids = publish(vhost, "orders", numbered(6))
        wait_until(lambda: consumer.statistics.handled == 6, timeout=PATIENCE, what="handled")
        assert consumer.statistics.failed == 1
    assert inbox.effects() == sorted(ids)


@pytest.mark.parametrize(
    "inbox",
    ["sqlite", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("postgresql", "mariadb", "mysql"))],
    indirect=True,
)
def test_the_users_own_sessions_are_used(vhost: VirtualHost, inbox: Inbox) -> None:
    class Mine(Session):
        pass

    store = SQLAlchemyStore(inbox.engine, timeout=PATIENCE, session=sessionmaker(inbox.engine, class_=Mine))
    seen: list[type] = []

    def handle(delivery: Delivery) -> None:
        with delivery.transaction() as session:
            seen.append(type(session))

    with Consumer(vhost.url, ORDERS, handle, idempotency=store) as consumer:
        publish(vhost, "orders", numbered(1))
        wait_until(lambda: consumer.statistics.handled == 1, timeout=PATIENCE, what="handled")
    store.close()
    assert [issubclass(kind, Mine) for kind in seen] == [True]


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("sqlite", "aiosqlite"),
        ("postgresql", "psycopg_async"),
        ("postgresql", "asyncpg"),
        ("mariadb", "asyncmy"),
        ("mysql", "asyncmy"),
    ],
)
def test_a_coroutine_has_the_same_on_its_loop(
    vhost: VirtualHost, database: Callable[[str], Database], tmp_path: Path, run_async: Any, kind: str, driver: str
) -> None:
    """Handlers get one delivery at a time and their own connection."""
    url = sqlite_in(tmp_path) if kind == "sqlite" else database(kind).fresh()
    inbox = Inbox(url)

    async def scenario() -> None:
        engine = create_async_engine(with_driver(url, driver))
        store = AsyncSQLAlchemyStore(engine, timeout=PATIENCE)
        calls: list[Any] = []

        async def handle(delivery: Delivery) -> None:
            calls.append(delivery.message_id)
            if delivery.body == b"0":
                async with engine.begin() as connection:
                    await connection.execute(INSERT, {"id": delivery.message_id})
                    await store.inbox(connection, delivery)
                return
            async with delivery.transaction() as session:
                await session.execute(INSERT, {"id": delivery.message_id})
                if calls.count(delivery.message_id) == 1:
                    raise ValueError("no")

        async with AsyncConsumer(vhost.url, ORDERS, handle, idempotency=store, retry=QUICK) as consumer:
            await until(lambda: consumer.statistics.handled == 5, timeout=PATIENCE)
            assert consumer.statistics.failed == 4
        await engine.dispose()

    with Publisher(vhost.url, topology=[ORDERS]):
        pass
    ids = publish(vhost, "orders", numbered(5))
    run_async(scenario())
    assert inbox.effects() == sorted(ids)
    inbox.close()
